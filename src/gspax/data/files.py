"""Readers for files from other sources: JSON of any shape, links that may lead anywhere, and names on the Hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from gspax.errors import UserError, brief, describe_error
from gspax.storage.files import open_storage

LONGEST = 2**26  # bytes of a JSON file
DEEPEST = 64  # nested containers
SHOWN = 200  # characters of a value in a message

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def why_not_on_hub(name: str, pattern: re.Pattern[str]) -> str | None:
    """Explain why the Hugging Face Hub is not asked for a folder that does not exist; None if the Hub may have it.

    A name on the Hub matches `pattern`. If its owner is also a folder here, `owner/name` is taken for a mistyped path,
    but `owner/name@revision` is not.
    """
    owner = Path(name).parent
    if not pattern.fullmatch(name):
        return "there is no such folder" + (
            "" if Path(name).is_absolute() else f" in the working directory {Path.cwd()}"
        )
    if "@" not in name and owner != Path() and owner.is_dir():
        return f"there is a folder {owner} here without a {Path(name).name}"
    return None


@contextlib.contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turn every exception into a UserError which says that `name` cannot be read, and why."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:  # of any type: it may come from a library
        words = brief(problem) if isinstance(problem, ValueError) else describe_error(problem)
        if (cause := problem.__cause__) is not None:  # of a library's own exception, which may say nothing else
            words += f": {describe_error(cause)}"
        why = getattr(problem, "strerror", None) or words
        raise UserError(f"{name}: cannot be read: {why}") from problem


def read_object(file: Path) -> dict[str, Json]:
    """Read the object in a JSON file. UserError if it is not a regular file, too long, too deep, or not an object."""
    with reading(file):
        if file.exists() and not file.is_file():  # a named pipe without a writer would be waited for
            raise ValueError("it is no regular file")
        with file.open("rb") as opened:
            content = opened.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} bytes")
        value = parse_json(content)
    if not isinstance(value, dict):
        raise UserError(f"{file}: wanted a JSON object, got {show(value)}")
    return value


def parse_json(data: bytes) -> Json:
    """Parse a JSON text. ValueError if it is too deeply nested, or not JSON in UTF-8."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"wanted at most {DEEPEST} nested lists and objects") from None
    level, depth = [value], 0
    while level := [inner for inner in level if isinstance(inner, (list, dict))]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"wanted at most {DEEPEST} nested lists and objects")
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return value


def show(value: Json) -> str:
    """Format a JSON value for a message, truncated to `SHOWN` characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def require_own_files(folder: Path) -> None:
    """Refuse a folder with a pipe, or with a link that leads out of it, whose target an export would copy.

    The cache of the Hugging Face Hub is made of links from `snapshots/REVISION` to `blobs`, which are permitted. A
    bucket has neither pipes nor links.
    """
    if not open_storage(folder).has_links:
        return
    place = Path(os.path.realpath(folder))  # `resolve` raises where links lead in a circle
    permitted = [place, *([place.parent.parent / "blobs"] if place.parent.name == "snapshots" else [])]
    for file in sorted(folder.iterdir()):
        if file.is_symlink() and not any(Path(os.path.realpath(file)).is_relative_to(target) for target in permitted):
            raise UserError(f"{file}: wanted a file, got a link that leads out of the folder")
        if not file.is_file() and not file.is_dir() and os.path.lexists(file):
            what = "a link to nothing" if file.is_symlink() else "a pipe, a socket or a device"
            raise UserError(f"{file}: wanted a file, got {what}")
