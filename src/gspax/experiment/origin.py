"""Where an experiment comes from, its code and its data: recorded beside a run, and no part of what it is."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspax.config.functions import is_function, is_record, named_parts, unwrap
from gspax.errors import is_library
from gspax.experiment.description import described_parts, source_files

LARGEST = 2**20  # bytes of a file of code that is kept


@dataclass(frozen=True, kw_only=True)
class Code:
    """A file of the user's code: its place among the kept ones, where it was, and what was in it."""

    place: str
    path: Path
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of an experiment.

    Attributes:
      file: the experiment file; None for an experiment that was not loaded from one.
      code: that file, and those of the user's functions and classes that the experiment holds.
      data: the key of a table in the description, which has the hash, and the files it is read from.
    """

    file: Path | None = None
    code: tuple[Code, ...] = ()
    data: Mapping[str, list[str]] = field(default_factory=dict)


def find_origin(experiment: object, file: str | os.PathLike[str] | None = None) -> Origin:
    """The origin of an experiment that was loaded from a file. Files of code that cannot be read are left out."""
    path = None if file is None else Path(os.path.realpath(file))
    places = [] if path is None else [(path, path.name)]
    names = _module_names()
    for other in sorted(_files(experiment)):
        where = Path(os.path.realpath(other))
        if where not in dict(places):
            places.append((where, _place(where, names.get(other))))
    code: dict[str, Code] = {}
    for where, place in places:
        while place in code:  # two files of one name
            place = f"other/{place}"
        if (content := _read_small(where)) is not None:
            code[place] = Code(place=place, path=where, content=content)
    return Origin(file=path, code=tuple(code.values()), data=dict(_tables(experiment)))


def _files(value: object) -> set[str]:
    """The user's files that hold the functions and classes of a value, as its description sees it."""
    found = set[str]()
    if isinstance(value, functools.partial) or is_function(value):
        found |= source_files(unwrap(value))
    elif not isinstance(value, type):
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        found |= {file} if file is not None and not is_library(file) else set()
    return found.union(*map(_files, described_parts(value)))


def _module_names() -> dict[str, str]:
    """The name of the module of each file."""
    modules = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in [*sys.modules.items()]}
    return {file: name for name, file in modules.items() if isinstance(file, str)}


def _place(file: Path, module: str | None) -> str:
    """`rewards/digits.py` for the module `rewards.digits`, so that kept files import each other; else the name."""
    parts = (module or "").split(".")
    if file.name == "__init__.py" and all(map(str.isidentifier, parts)):
        return "/".join([*parts, file.name])
    return "/".join([*parts[:-1], file.name]) if all(map(str.isidentifier, parts)) else file.name


def _read_small(file: Path) -> bytes | None:
    """The content of a regular file that is small; None for another one, such as the cell of a notebook."""
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= LARGEST else None
    except OSError:
        return None


def _tables(value: object, key: str = "") -> Iterator[tuple[str, list[str]]]:
    """The files of the tables in a value, by key: a table is a record with `paths`."""
    paths = getattr(value, "paths", None) if is_record(value) else None
    if isinstance(paths, tuple) and all(isinstance(path, str | os.PathLike) for path in paths):
        if paths:
            yield key, [_absolute(os.fspath(path)) for path in paths]
        return
    parts: Mapping[str, object] = {}
    if is_record(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, tuple | list):
        parts = named_parts(value)
    elif isinstance(value, Mapping):
        parts = value
    for name, part in parts.items():
        yield from _tables(part, f"{key}.{name}" if key else str(name))


def _absolute(path: str) -> str:
    """A path of this machine as an absolute one; a name on the Hub or in a bucket as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path
