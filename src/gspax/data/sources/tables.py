"""Tables: rows by number, from files or data sets. Packages are imported when a table is first read.

A table has `len` and `[]`, and

    rows()      all rows in order; one that cannot be read is a ValueError in its place
    content     a hash of the files; None if only the rows themselves can be hashed
    where(i)    the place of row i, for messages
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from gspax.data.tokenizer import brief
from gspax.errors import UserError, how_to_install

_STRIDE = 64  # lines of a file between two whose offset is kept
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Table(Protocol):
    """See the module's docstring."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...
    def rows(self) -> Iterator[Any]: ...
    def where(self, i: int, /) -> str: ...

    @property
    def content(self) -> str | None: ...


@dataclass(frozen=True)
class JsonLines:
    """Files with one JSON object per line, one after the other. Lines are read from disk when they are needed."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return sum(file.lines for file in self._files)

    def __getitem__(self, i: int) -> Any:
        file, line = self._find(i)
        return _parse(file.read(line))

    def rows(self) -> Iterator[Any]:
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
            if i < file.lines:
                return file, i
            i -= file.lines
        raise IndexError(i)


@dataclass(frozen=True)
class _LineFile:
    """A file of lines with the offset of every 64th of them."""

    path: str
    offsets: np.ndarray
    lines: int
    sha256: str
    stamp: tuple[int, int]  # size and time of the last change

    @classmethod
    def open(cls, path: str) -> _LineFile:
        """UserError if the file cannot be read."""
        offsets, lines, offset, hashed = [], 0, 0, hashlib.sha256()
        try:
            with open(path, "rb") as stream:
                stamp = _stamp(stream)
                start = stream.read(6)
                if kind := next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), None):
                    raise UserError(
                        f"{path}: wanted lines of JSON, got a file compressed by {kind}: decompress it first"
                    )
                stream.seek(0)
                for line in stream:
                    if lines % _STRIDE == 0:
                        offsets.append(offset)
                    hashed.update(line)
                    lines, offset = lines + 1, offset + len(line)
        except OSError as problem:
            raise UserError(f"{path}: cannot be read: {problem.strerror}") from problem
        return cls(path, np.array(offsets, np.int64), lines, hashed.hexdigest(), stamp)

    @contextlib.contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """The open file. OSError if it is not what it was."""
        with open(self.path, "rb") as stream:
            if _stamp(stream) != self.stamp:
                raise OSError(f"{self.path} has changed since it was opened")
            yield stream

    def read(self, line: int) -> bytes:
        """A line, from 0."""
        with self.stream() as stream:
            stream.seek(int(self.offsets[line // _STRIDE]))
            return next(islice(stream, line % _STRIDE, None))


@dataclass(frozen=True)
class Parquet:
    """Parquet files, one after the other, held in memory. Needs pyarrow."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Any:
        return self._table.slice(i, 1).to_pylist()[0]

    def rows(self) -> Iterator[Any]:
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
        tables = [_attempt(path, lambda path=path: parquet.read_table(path)) for path in self.paths]
        return _attempt(self.paths[0], lambda: arrow.concat_tables(tables, promote_options="default"))


@dataclass(frozen=True)
class _Loaded:
    """A data set that a library loads, with `len` and `[]`."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Any:
        return self._rows[i]

    def rows(self) -> Iterator[Any]:
        for i in range(len(self)):
            try:
                yield self._rows[i]
            except Exception as problem:  # of any kind: it is the library's or the user's code
                yield ValueError(f"cannot be read: {type(problem).__name__}: {brief(problem)}")

    @property
    def content(self) -> str | None:
        return None

    def where(self, i: int) -> str:
        return f"row {i} from 0"

    @property
    def _rows(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class HuggingFace(_Loaded):
    """A split of a data set for the `datasets` library: a name on the hub, a folder of files, or one that
    `save_to_disk` wrote."""

    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None

    def where(self, i: int) -> str:
        return f"{self.name} ({self.split}), row {i} from 0"

    @functools.cached_property
    def _rows(self) -> Any:
        datasets = _import("datasets")
        if Path(self.name, "dataset_dict.json").is_file() or Path(self.name, "state.json").is_file():
            loaded = _attempt(self.name, lambda: datasets.load_from_disk(self.name))
            if isinstance(loaded, dict):
                if self.split not in loaded:
                    raise UserError(f"{self.name}: wanted a split of {', '.join(loaded)}, got {self.split!r}")
                loaded = loaded[self.split]
            return loaded
        if not Path(self.name).exists() and (why := _no_hub_name(self.name)):
            raise UserError(f"{self.name}: wanted a folder or a name on the Hub, {why}")
        return _attempt(
            self.name,
            lambda: datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision),
        )


@dataclass(frozen=True)
class TensorFlowDatasets(_Loaded):
    """A split of a data set that tensorflow-datasets has prepared as ArrayRecord files, read without TensorFlow.

    `name` may be the folder of the prepared version too, which has a `dataset_info.json`.
    """

    name: str
    split: str = "train"
    data_dir: str | None = None

    def where(self, i: int) -> str:
        return f"{self.name} ({self.split}), row {i} from 0"

    @functools.cached_property
    def _rows(self) -> Any:
        tfds = _import("tensorflow_datasets")
        if Path(self.name, "dataset_info.json").is_file():
            return _attempt(self.name, lambda: tfds.builder_from_directory(self.name).as_data_source(split=self.split))
        if os.sep in self.name and Path(self.name).is_dir():
            raise UserError(
                f"{self.name}: wanted the folder of a prepared version with dataset_info.json, such as "
                "DATA_DIR/gsm8k/1.0.0, or the name of the data set with data_dir=DATA_DIR"
            )
        return _attempt(
            self.name,
            lambda: tfds.data_source(self.name, split=self.split, data_dir=self.data_dir, download=False),
        )


@dataclass(frozen=True)
class Sequence(_Loaded):
    """Any object with `len` and `[]`: a list, a Grain MapDataset, a PyTorch Dataset."""

    given: Any = field(repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.given, "__len__") or not hasattr(self.given, "__getitem__"):
            raise UserError(f"data.sequence: wanted an object with len and [], got {type(self.given).__name__}")

    @property
    def _rows(self) -> Any:
        return self.given


def _no_hub_name(name: str) -> str | None:
    """Why a name must be that of a folder that is not there, for which the Hub would be asked in vain."""
    owner = Path(name).parent
    if not _HUB_NAME.fullmatch(name):
        return "there is no such folder" + ("" if Path(name).is_absolute() else f" in {Path.cwd()}")
    return f"there is a folder {owner} here without a {Path(name).name}" if owner != Path() and owner.is_dir() else None


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as problem:
        got = "an empty line" if not line.strip() else repr(line[:60].decode(errors="replace"))
        raise ValueError(f"wanted a JSON object, got {got} ({brief(problem)})") from None


def _stamp(stream: Any) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _sha256(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from problem


def _together(hashes: list[str]) -> str:
    """One hash for files in this order; that of the file if there is one."""
    one = hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return f"sha256:{one}"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(f"data: reading this needs {package} ({how_to_install('data')}): {brief(problem)}") from None


def _attempt(name: str, work: Any) -> Any:
    """`work()`; UserError with the name of the data if it fails in any way."""
    try:
        return work()
    except Exception as problem:
        raise UserError(f"{name}: cannot be read: {type(problem).__name__}: {brief(problem)}") from problem
