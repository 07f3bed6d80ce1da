"""Problems from files and data sets: `data.jsonl`, `data.parquet`, `data.huggingface`, `data.tfds`, `data.sequence`.

Each gives a `RowSource`. They share these keywords: `prompt`, `answer`, `task`, `task_column`, `metadata`, `template`,
`system` and `examples` of `Schema`; `checks`, `filters`, `exclude`, `on_bad` and `seed` of `RowSource`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack

from gspax.data.sources.mixture import Mixture, mixture
from gspax.data.sources.rows import RowSource, Rule
from gspax.data.sources.rules import AnswerMatches, PassRate, PromptTokens
from gspax.data.sources.schema import Schema
from gspax.data.sources.tables import HuggingFace, JsonLines, Parquet, Sequence, Table, TensorFlowDatasets
from gspax.errors import UserError

__all__ = [
    "AnswerMatches",
    "Mixture",
    "PassRate",
    "PromptTokens",
    "RowSource",
    "Schema",
    "huggingface",
    "jsonl",
    "mixture",
    "opening_notes",
    "opening_problems",
    "parquet",
    "sequence",
    "tfds",
]

StrPath = str | os.PathLike[str]


class Settings(TypedDict, total=False):
    """What all sources have in common."""

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
    exclude: tuple[Any, ...]  # of HeldoutRows, such as the data of a `Task`; checked when the source is made
    on_bad: Literal["error", "skip"]
    seed: int


def jsonl(*paths: StrPath, heldout: StrPath | tuple[StrPath, ...] = (), **settings: Unpack[Settings]) -> RowSource:
    """Files with one JSON object per line; `heldout` are those of the held-out problems."""
    return _source(JsonLines(_paths("jsonl", paths)), JsonLines(_heldout(heldout)) if heldout else None, settings)


def parquet(*paths: StrPath, heldout: StrPath | tuple[StrPath, ...] = (), **settings: Unpack[Settings]) -> RowSource:
    """Parquet files, held in memory; `heldout` are those of the held-out problems. Needs pyarrow."""
    return _source(Parquet(_paths("parquet", paths)), Parquet(_heldout(heldout)) if heldout else None, settings)


def huggingface(
    name: StrPath,
    split: str = "train",
    *,
    heldout: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    **settings: Unpack[Settings],
) -> RowSource:
    """A data set of the `datasets` library.

    Args:
      name: on the hub, or a local folder: of files that `datasets` can read, or written by `save_to_disk`.
      split: of the training problems.
      heldout: the split of the held-out problems.
      config: the data set's configuration, if it has several.
      revision: a commit or tag of the hub's repository.
    """
    train = HuggingFace(os.fspath(name), split, config, revision)
    return _source(train, None if heldout is None else dataclasses.replace(train, split=heldout), settings)


def tfds(
    name: str,
    split: str = "train",
    *,
    heldout: str | None = None,
    data_dir: StrPath | None = None,
    **settings: Unpack[Settings],
) -> RowSource:
    """A data set of tensorflow-datasets, prepared as ArrayRecord (`download_and_prepare(file_format="array_record")`).

    TensorFlow is not needed.

    Args:
      name: with configuration and version as tensorflow-datasets writes them: `gsm8k/main:1.0.0`; or the folder of a
        prepared version.
      split: of the training problems, slices such as `train[:90%]` included.
      heldout: the split of the held-out problems.
      data_dir: where the prepared data sets lie; None for the library's default.
    """
    train = TensorFlowDatasets(name, split, None if data_dir is None else os.fspath(data_dir))
    return _source(train, None if heldout is None else dataclasses.replace(train, split=heldout), settings)


def sequence(rows: Any, *, heldout: Any = None, **settings: Unpack[Settings]) -> RowSource:
    """Any object with `len` and `[]` whose elements are mappings, or `Problem`s: a list, a Grain MapDataset."""
    return _source(Sequence(rows), None if heldout is None else Sequence(heldout), settings)


def opening_problems(data: Any, tokenizer: Any) -> Iterator[str]:
    """Why a source of this package cannot be opened or encoded, one sentence each; nothing for other sources."""
    try:
        has_context = any([source.opened.has_context for source in _row_sources(data)])
    except UserError as problem:
        yield str(problem)
        return
    if has_context and not callable(getattr(tokenizer, "encode_chat", None)):
        yield (
            "tokenizer: wanted one for chats (data.hf_chat), because the problems have messages before their prompt; "
            f"got {type(tokenizer).__name__}"
        )


def opening_notes(data: Any) -> list[str]:
    """What a source of this package has left out, one sentence each."""
    return [f"data: {note}" for source in _row_sources(data) for note in source.opened.notes]


def _row_sources(data: Any) -> list[RowSource]:
    parts = data.parts if isinstance(data, Mixture) else (data,)
    return [part for part in parts if isinstance(part, RowSource)]


def _source(train: Table, heldout: Table | None, settings: Settings) -> RowSource:
    given: dict[str, Any] = dict(settings)
    columns = {field.name: given.pop(field.name) for field in dataclasses.fields(Schema) if field.name in given}
    return RowSource(train_rows=train, heldout_rows=heldout, schema=Schema(**columns), **given)


def _paths(name: str, paths: tuple[StrPath, ...]) -> tuple[str, ...]:
    if not paths:
        raise TypeError(f"data.{name}: wanted at least one path, got none")
    return tuple(os.fspath(path) for path in paths)


def _heldout(paths: StrPath | tuple[StrPath, ...]) -> tuple[str, ...]:
    return tuple(os.fspath(path) for path in (paths if isinstance(paths, tuple) else (paths,)))
