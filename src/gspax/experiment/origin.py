"""Records where an experiment comes from, its code and its data, and what it minimizes; not part of its description."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspax.config import Experiment
from gspax.config.functions import is_function, is_record, named_parts, unwrap
from gspax.errors import is_library
from gspax.experiment.description import described_parts, source_files
from gspax.experiment.explanation import objective_lines
from gspax.model.passes import Passes

LARGEST = 2**20  # bytes of a code file to save


@dataclass(frozen=True, kw_only=True)
class Code:
    """A file of the user's code: its path among the saved files, its original path, and its content."""

    place: str
    path: Path
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of an experiment.

    Attributes:
      file: the experiment file; None for an experiment that was not loaded from one.
      code: that file, and the files of the user's functions and classes in the experiment.
      data: the files of each table, by the table's key in the description, which has their hash.
      objective: the equation of the objective, in lines (`experiment.explanation`).
    """

    file: Path | None = None
    code: tuple[Code, ...] = ()
    data: Mapping[str, list[str]] = field(default_factory=dict)
    objective: tuple[str, ...] = ()


def find_origin(experiment: object, file: str | os.PathLike[str] | None = None) -> Origin:
    """Find the origin of an experiment that was loaded from a file. Code files that cannot be read are left out."""
    path = None if file is None else Path(os.path.realpath(file))
    places = [] if path is None else [(path, path.name)]
    names = _module_names()
    for other in sorted(_files(experiment)):
        where = Path(os.path.realpath(other))
        if where not in dict(places):
            places.append((where, _place(where, names.get(other))))
    code: dict[str, Code] = {}
    for where, place in places:
        while place in code:  # two files with the same name
            place = f"other/{place}"
        if (content := _read_small(where)) is not None:
            code[place] = Code(place=place, path=where, content=content)
    objective = tuple(objective_lines(Passes(experiment))) if isinstance(experiment, Experiment) else ()
    return Origin(file=path, code=tuple(code.values()), data=dict(_tables(experiment)), objective=objective)


def _files(value: object) -> set[str]:
    """Return the user's files that define the functions and classes of a value, as its description sees it."""
    found = set[str]()
    if isinstance(value, functools.partial) or is_function(value):
        found |= source_files(unwrap(value))
    elif not isinstance(value, type):
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        found |= {file} if file is not None and not is_library(file) else set()
    return found.union(*map(_files, described_parts(value)))


def _module_names() -> dict[str, str]:
    """Return the name of the module of each file."""
    modules = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in [*sys.modules.items()]}
    return {file: name for name, file in modules.items() if isinstance(file, str)}


def _place(file: Path, module: str | None) -> str:
    """Return `rewards/digits.py` for `rewards.digits`, so that saved files import each other, else the name."""
    parts = (module or "").split(".")
    if file.name == "__init__.py" and all(map(str.isidentifier, parts)):
        return "/".join([*parts, file.name])
    return "/".join([*parts[:-1], file.name]) if all(map(str.isidentifier, parts)) else file.name


def _read_small(file: Path) -> bytes | None:
    """Read a small regular file; None for anything else, such as a notebook's cell."""
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= LARGEST else None
    except OSError:
        return None


def _tables(value: object, key: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield (key, files) for each table in a value: a table is a record with `paths`."""
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
    """Make the path of an existing file absolute; return names on the Hub or in a bucket unchanged."""
    return os.path.abspath(path) if os.path.exists(path) else path
