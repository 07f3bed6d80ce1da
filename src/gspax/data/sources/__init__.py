"""Problems from files and data sets: `data.jsonl`, `data.parquet`, `data.huggingface`, `data.tfds`, `data.sequence`.

Each function returns a `RowSource`, and takes the fields of `Schema` and `RowSource` as keywords (`Settings`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from gspax.config.functions import is_record, named_parts
from gspax.data.sources.mixture import Mixture
from gspax.data.sources.row_source import RowSource, Rule
from gspax.data.sources.schema import Schema
from gspax.data.sources.tables import Indexed, JsonLines, Loaded, Parquet, Table, hugging_face, tensorflow_datasets
from gspax.errors import UserError

StrPath = str | os.PathLike[str]
T = TypeVar("T")


class Settings(TypedDict, total=False):
    """The keywords that all sources accept."""

    prompt: str
    answer: str | None
    task: str
    task_column: str | None
    metadata: tuple[str, ...]
    template: str
    system: str | None
    examples: tuple[tuple[str, str], ...]
    checks: tuple[Rule, ...]
    filters: tuple[Rule, ...]
    exclude: tuple[object, ...]  # of HeldoutRows, such as the data of a `Task`; checked when the source is made
    on_bad: Literal["error", "skip"]
    seed: int


def jsonl(*paths: StrPath, heldout: StrPath | tuple[StrPath, ...] = (), **settings: Unpack[Settings]) -> RowSource:
    """Read files with one JSON object per line; `heldout` lists the files of the held-out problems."""
    return _file_source(JsonLines, paths, heldout, settings)


def parquet(*paths: StrPath, heldout: StrPath | tuple[StrPath, ...] = (), **settings: Unpack[Settings]) -> RowSource:
    """Read Parquet files, held in memory; `heldout` lists the files of the held-out problems. Needs pyarrow."""
    return _file_source(Parquet, paths, heldout, settings)


def huggingface(
    name: StrPath,
    split: str = "train",
    *,
    heldout: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    **settings: Unpack[Settings],
) -> RowSource:
    """Read a data set of the `datasets` library.

    Args:
      name: a name on the Hub, or a local folder of files that `datasets` can read or that `save_to_disk` wrote.
      split: the split of the training problems.
      heldout: the split of the held-out problems.
      config: the data set's configuration, if it has several.
      revision: a commit or tag of the repository on the Hub.
    """
    read = partial(hugging_face, os.fspath(name), config=config, revision=revision)
    return _source(read, split, heldout, settings)


def tfds(
    name: str,
    split: str = "train",
    *,
    heldout: str | None = None,
    data_dir: StrPath | None = None,
    **settings: Unpack[Settings],
) -> RowSource:
    """Read a data set of tensorflow-datasets, prepared with `download_and_prepare(file_format="array_record")`.

    TensorFlow is not needed.

    Args:
      name: the name, configuration and version as tensorflow-datasets writes them: `gsm8k/main:1.0.0`; or the folder
        of a prepared version.
      split: the split of the training problems, or a slice such as `train[:90%]`.
      heldout: the split of the held-out problems.
      data_dir: the folder of the prepared data sets; None for the library's default.
    """
    read = partial(tensorflow_datasets, name, data_dir=None if data_dir is None else os.fspath(data_dir))
    return _source(read, split, heldout, settings)


def sequence(rows: object, *, heldout: object = None, **settings: Unpack[Settings]) -> RowSource:
    """Read any object with `len` and `[]` whose elements are mappings or `Problem`s: a list, a Grain MapDataset."""
    return _source(_sequence, rows, heldout, settings)


def _sequence(rows: object) -> Loaded:
    if not isinstance(rows, Indexed):
        raise UserError(f"data.sequence: wanted an object with len and [], got {type(rows).__name__}")
    return Loaded(lambda: rows)


def opening_problems(data: object, tokenizer: object) -> Iterator[str]:
    """Yield the reasons why a source of this package cannot be opened or encoded, one sentence each."""
    keyed = named_parts(data.sources, "data.sources.") if isinstance(data, Mixture) else {"data": data}
    if unreadable := [problem for key, source in keyed.items() for problem in _table_problems(key, source)]:
        yield from unreadable
        return
    try:
        has_context = any([source.opened.has_context for source in _row_sources(data)])  # a list: each is opened
    except UserError as problem:
        yield str(problem)
        return
    if has_context and not callable(getattr(tokenizer, "encode_chat", None)):
        yield (
            "tokenizer: wanted one for chats (data.hf_chat), because the problems have messages before their prompt; "
            f"got {type(tokenizer).__name__}"
        )


def reading_problems(key: str, source: object) -> Iterator[str]:
    """Yield the reasons why a benchmark's problems cannot be read: an unreadable table, or rows that do not fit."""
    problems = list(_table_problems(key, source))
    try:
        _ = problems or getattr(source, "heldout_count", None)
    except UserError as problem:
        problems.append(f"{key}: {problem}")
    yield from problems


def opening_notes(data: object) -> list[str]:
    """Describe the rows that a source of this package leaves out, one sentence for each kind."""
    return [f"data: {note}" for source in _row_sources(data) for note in source.opened.notes]


def _table_problems(key: str, source: object) -> Iterator[str]:
    """Yield a sentence for each table of a source that cannot be opened; it begins with the path of the field.

    Args:
      key: the path of the source, such as "data".
      source: a `RowSource`, a benchmark, or any other object, which has no tables.
    """
    for field in dataclasses.fields(source) if is_record(source) else ():
        table = getattr(source, field.name)
        if isinstance(table, JsonLines | Parquet | Loaded):
            try:
                len(table)
            except UserError as problem:
                where = f"{key}.{field.name}{'' if isinstance(table, Loaded) else '.paths'}"
                yield f"{where}: {str(problem).removeprefix('data: ')}"
            except Exception:  # from a library's or a user's object: opening the source reports it
                continue


def _row_sources(data: object) -> list[RowSource]:
    parts = data.parts if isinstance(data, Mixture) else (data,)
    return [part for part in parts if isinstance(part, RowSource)]


def _file_source(
    table: type[JsonLines] | type[Parquet],
    paths: tuple[StrPath, ...],
    heldout: StrPath | tuple[StrPath, ...],
    settings: Settings,
) -> RowSource:
    if not paths:
        raise TypeError("data: wanted at least one path, got none")
    heldout_paths = heldout if isinstance(heldout, tuple) else (heldout,)
    for name, wanted, part in (("data", "paths", paths), ("heldout", "a path or a tuple of paths", heldout_paths)):
        if wrong := [path for path in part if not isinstance(path, (str, os.PathLike))]:
            raise TypeError(f"{name}: wanted {wanted}, got {wrong[0]!r}")
    train, test = (tuple(os.fspath(path) for path in part) for part in (paths, heldout_paths))
    return _source(table, train, test if heldout else None, settings)


def _source(table: Callable[[T], Table], train: T, heldout: T | None, settings: Settings) -> RowSource:
    """Build the source whose tables `table` makes from `train` and, unless that is None, from `heldout`."""
    remaining: dict[str, Any] = dict(settings)
    names = [field.name for field in dataclasses.fields(Schema) if field.name in settings]
    schema = Schema(**{name: remaining.pop(name) for name in names})
    heldout_rows = None if heldout is None else table(heldout)
    return RowSource(train_rows=table(train), heldout_rows=heldout_rows, schema=schema, **remaining)
