"""Tables: rows by number, from files or data sets. A package is imported when the first table that needs it is opened.

Grain (0.2) cannot replace them: only its reader of ArrayRecord has rows by number (`tfds` uses it), Parquet is an
iterator, JSON lines are missing, and none has a hash of the content or a row's location for error messages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from gspax.data.files import reading, why_not_on_hub
from gspax.errors import UserError, brief, describe_error, how_to_install
from gspax.storage.paths import open_file, to_path

_SHOWN = 5  # different reasons that a message lists
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}

Row = Any  # a mapping of columns or a `Problem`; `Schema.read` refuses anything else


@runtime_checkable
class Indexed(Protocol):
    """An object with `len` and `[]`: a list, a Grain MapDataset, a PyTorch Dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Row: ...


class Table(Indexed, Protocol):
    """A sequence of rows with their locations and a hash of their content."""

    def rows(self) -> Iterator[Row]:
        """Yield all rows in order; in place of a row that cannot be read, yield a ValueError."""

    def where(self, i: int, /) -> str:
        """Return the location of row `i`, for error messages."""

    @property
    def content(self) -> str | None:
        """A hash of the files; None if only the rows themselves can be hashed."""


@dataclass
class BadRows:
    """Rows that cannot be used: their number, and an example location for each of the first five reasons."""

    count: int = 0
    _shown: dict[str, tuple[str, int]] = field(default_factory=dict)  # reason -> (first location, number of rows)

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if reason in self._shown or len(self._shown) < _SHOWN:
            first, number = self._shown.get(reason, (where, 0))
            self._shown[reason] = first, number + 1

    def __str__(self) -> str:
        phrases = [
            f"{where}: {reason}" + (f" ({number} rows)" if number > 1 else "")
            for reason, (where, number) in self._shown.items()
        ]
        others = self.count - sum(number for _, number in self._shown.values())
        return "; ".join([*phrases, *([f"and {others} more"] if others else [])])


@dataclass(frozen=True)
class JsonLines:
    """Files with one JSON object per line, one after the other. A line is read from disk when it is needed.

    Files of a bucket are held in memory.
    """

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return sum(len(file.offsets) for file in self._files)

    def __getitem__(self, i: int) -> Row:
        file, line = self._find(i)
        with file.stream() as stream:
            stream.seek(file.offsets[line])
            return _parse(stream.readline())

    def rows(self) -> Iterator[Row]:
        for file in self._files:
            with file.stream() as stream:
                for line in stream:
                    try:
                        yield _parse(line)
                    except ValueError as problem:
                        yield problem

    @functools.cached_property
    def content(self) -> str:
        return _together([file.sha256 for file in self._files])

    def where(self, i: int) -> str:
        file, line = self._find(i)
        return f"{file.path}, line {line + 1}"

    @functools.cached_property
    def _files(self) -> tuple[_LineFile, ...]:
        return tuple(map(_LineFile.open, self.paths))

    def _find(self, i: int) -> tuple[_LineFile, int]:
        for file in self._files:
            if i < len(file.offsets):
                return file, i
            i -= len(file.offsets)
        raise IndexError(i)


@dataclass(frozen=True)
class _LineFile:
    """A file of lines, with the offset of each line."""

    path: str
    offsets: array[int]
    sha256: str
    stamp: tuple[int, int] | None  # size and time of the last change
    content: bytes | None  # the content of a file in a bucket, else None

    @classmethod
    def open(cls, path: str) -> _LineFile:
        """Read the file once, for its offsets and its hash. UserError if it cannot be read."""
        offsets, offset, hashed = array("q"), 0, hashlib.sha256()
        with reading(path), _open(path) as stream:
            content = stream.getvalue() if isinstance(stream, io.BytesIO) else None
            stamp = _stamp(stream) if content is None else None
            start = stream.read(6)
            if kind := next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), None):
                raise UserError(f"{path}: wanted lines of JSON, got a file compressed by {kind}: decompress it first")
            stream.seek(0)
            for line in stream:
                offsets.append(offset)
                hashed.update(line)
                offset += len(line)
        return cls(path, offsets, hashed.hexdigest(), stamp, content)

    @contextlib.contextmanager
    def stream(self) -> Iterator[io.BufferedIOBase]:
        """Open the file. OSError if it has changed since `open`."""
        with io.BytesIO(self.content) if self.content is not None else open(self.path, "rb") as stream:
            if self.stamp is not None and _stamp(stream) != self.stamp:
                raise OSError(f"{self.path} has changed since it was opened")
            yield stream


@dataclass(frozen=True)
class Parquet:
    """Parquet files, one after the other, held in memory. Needs pyarrow."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Row:
        return self._table.slice(i, 1).to_pylist()[0]

    def rows(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    @functools.cached_property
    def content(self) -> str:
        return _together([_sha256(path) for path in self.paths])

    def where(self, i: int) -> str:
        return f"{self.paths[0] if len(self.paths) == 1 else f'{self.paths[0]} …'}, row {i} from 0"

    @functools.cached_property
    def _table(self) -> Any:
        arrow, parquet = _import("pyarrow"), _import("pyarrow.parquet")
        with reading(", ".join(self.paths)):
            tables = [parquet.read_table(_source(path)) for path in self.paths]
            table = arrow.concat_tables(tables, promote_options="default")
        return table


@dataclass(frozen=True)
class Loaded:
    """An object with `len` and `[]`, usually a library's, which is loaded when its first row is needed.

    Attributes:
      load: returns the object.
      name: the prefix of a row's location.
    """

    load: Callable[[], Indexed] = field(repr=False)
    name: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The name of a library's data set; empty for an object in memory."""
        return (self.name.removesuffix(", "),) if self.name else ()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Row:
        return self._rows[i]

    def rows(self) -> Iterator[Row]:
        for i in range(len(self)):
            try:
                yield self[i]
            except Exception as problem:  # of any type: it is the library's or the user's code
                yield ValueError(f"cannot be read: {describe_error(problem)}")

    @property
    def content(self) -> None:
        return None

    def where(self, i: int) -> str:
        return f"{self.name}row {i} from 0"

    @functools.cached_property
    def _rows(self) -> Indexed:
        return self.load()


def hugging_face(name: str, split: str, config: str | None = None, revision: str | None = None) -> Loaded:
    """Load a split of a data set of the `datasets` library: a name on the Hub, a folder of files, or a folder that
    `save_to_disk` wrote."""

    def load() -> Indexed:
        datasets = _import("datasets")
        saved = any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json"))
        if not Path(name).exists() and not revision and (why := why_not_on_hub(name, _HUB_NAME)):
            raise UserError(f"{name}: wanted a folder or a name on the Hub, {why}")
        with reading(name):
            if saved:
                rows = datasets.load_from_disk(name)
            else:
                rows = datasets.load_dataset(name, config, split=split, revision=revision)
        if saved and isinstance(rows, dict):
            if split not in rows:
                raise UserError(f"{name}: wanted a split of {', '.join(rows)}, got {split!r}")
            rows = rows[split]
        return rows

    return Loaded(load, f"{name} ({split}), ")


def tensorflow_datasets(name: str, split: str, data_dir: str | None = None) -> Loaded:
    """Load a split of a data set that tensorflow-datasets has prepared as ArrayRecord files, without TensorFlow.

    `name` may also be the folder of the prepared version, with its `dataset_info.json`.
    """

    def load() -> Indexed:
        tfds = _import("tensorflow_datasets")
        prepared = Path(name, "dataset_info.json").is_file()
        if os.sep in name and not prepared and Path(name).is_dir():
            raise UserError(
                f"{name}: wanted the folder of a prepared version with dataset_info.json, such as "
                "DATA_DIR/gsm8k/1.0.0, or the name of the data set with data_dir=DATA_DIR"
            )
        with reading(name):
            if prepared:
                rows = tfds.builder_from_directory(name).as_data_source(split=split)
            else:
                rows = tfds.data_source(name, split=split, data_dir=data_dir, download=False)
        return rows

    return Loaded(load, f"{name} ({split}), ")


def _parse(line: bytes) -> Row:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as problem:
        got = "an empty line" if not line.strip() else repr(line[:60].decode(errors="replace"))
        raise ValueError(f"wanted a JSON object, got {got} ({brief(problem)})") from None


def _stamp(stream: io.BufferedIOBase) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _open(path: str) -> io.BufferedIOBase:
    """Open a file, or an object of a bucket, which is read as a whole."""
    return open_file(to_path(path))


def _source(path: str) -> io.BufferedIOBase | str:
    """Return the path or stream for pyarrow, which reads local files faster by path but would wait for a pipe."""
    stream = _open(path)
    if isinstance(stream, io.BytesIO):  # an object, read as a whole
        return stream
    stream.close()
    return path


def _sha256(path: str) -> str:
    with reading(path), _open(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return digest


def _together(hashes: list[str]) -> str:
    """Combine the hashes of files in this order: the hash of a single file, or a hash of the hashes."""
    one = hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return f"sha256:{one}"


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(f"data: reading this needs {package} ({how_to_install('data')}): {brief(problem)}") from None
