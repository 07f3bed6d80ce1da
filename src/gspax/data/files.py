"""Files that somebody else has written: JSON that may be of any shape, and links that may lead anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspax.errors import UserError

LONGEST = 2**26  # bytes of a JSON file
DEEPEST = 64  # nested containers
SHOWN = 200  # characters of a value in a message


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
      OSError: it cannot be opened.
      ValueError: it is no regular file, too long, too deeply nested, or not JSON in UTF-8.
    """
    if file.exists() and not file.is_file():  # a named pipe without a writer would be waited for
        raise ValueError("it is no regular file")
    with file.open("rb") as opened:
        data = opened.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} bytes")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. ValueError if it is too deeply nested, or not JSON in UTF-8."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError(f"wanted at most {DEEPEST} nested lists and objects") from None
    level, depth = [found], 0
    while level := [each for each in level if isinstance(each, (list, dict))]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"wanted at most {DEEPEST} nested lists and objects")
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return found


def show(value: Any) -> str:
    """A JSON value in a message: its beginning, if it is long."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def require_own_files(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it, which would be read, and copied by an export, or with a pipe.

    The cache of the Hugging Face Hub is made of links from `snapshots/REVISION` to `blobs`, which are permitted.
    """
    own = folder.resolve()
    permitted = [own, *([own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [])]
    for file in sorted(folder.iterdir()):
        if file.is_symlink() and not any(file.resolve().is_relative_to(each) for each in permitted):
            raise UserError(f"{file}: wanted a file, got a link that leads out of the folder")
        if not file.is_file() and not file.is_dir() and file.exists():
            raise UserError(f"{file}: wanted a file, got a pipe, a socket or a device")
