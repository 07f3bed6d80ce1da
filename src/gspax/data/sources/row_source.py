"""A data source that reads the rows of a table: `RowSource`.

Opening it reads every row once. Rows that are malformed, or that a check rejects, are errors, or are skipped and
counted; training rows that a filter rejects are counted too. The source keeps the numbers of the remaining rows and a
hash of each held-out prompt in memory, and reads a row from its table again when the row's turn comes.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Number
from pathlib import PurePath
from typing import Literal, Protocol

import numpy as np

from gspax.config.functions import title_of
from gspax.data.problem import Problem, at_least_0, digest, is_heldout
from gspax.data.sources.order import permute, shuffle
from gspax.data.sources.schema import Schema
from gspax.data.sources.tables import BadRows, Table
from gspax.errors import UserError, brief, describe_error

Rule = Callable[[Problem], str | None]  # returns the reason to reject a problem, or None


class HeldoutRows(Protocol):
    """A source that another one can exclude: a `RowSource`, or a benchmark (`gspax.evaluation.tasks.Benchmark`)."""

    @property
    def heldout_prompts(self) -> set[int]: ...

    @property
    def heldout_content(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Problems from the rows of tables.

    Training problems come in epochs, each in its own order, which depends only on `seed` and the epoch. Held-out
    problems come in one order that does not depend on the seed.

    Attributes:
      train_rows: the table of the training problems.
      heldout_rows: the table of the held-out problems, none of whose prompts may be in `train_rows`; None to hold out
        one prompt in eight of `train_rows`, chosen by the hash of its text.
      schema: the meaning of the columns.
      checks: functions that return the reason why a problem is bad, or None.
      filters: functions that return the reason to leave a training problem out, or None.
      exclude: sources whose held-out prompts are left out of the training problems, such as benchmarks.
      on_bad: "error" to refuse bad rows, or "skip" to leave them out and report their number.
      seed: the seed of the order of the training problems.
    """

    train_rows: Table
    heldout_rows: Table | None = None
    schema: Schema = field(default_factory=Schema)
    checks: tuple[Rule, ...] = ()
    filters: tuple[Rule, ...] = ()
    exclude: tuple[HeldoutRows, ...] = ()
    on_bad: Literal["error", "skip"] = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.on_bad not in ("error", "skip"):
            raise ValueError(f"on_bad: wanted 'error' or 'skip', got {self.on_bad!r}")
        for name in ("checks", "filters"):
            rules = getattr(self, name)
            if not isinstance(rules, tuple) or not all(map(callable, rules)):
                raise ValueError(f"{name}: wanted a tuple of functions, got {rules!r}")
        if not isinstance(self.exclude, tuple) or not all(
            hasattr(type(source), "heldout_prompts") for source in self.exclude
        ):
            raise ValueError(f"exclude: wanted a tuple of sources that read rows, got {self.exclude!r}")

    def train(self, index: int) -> Problem:
        """Return training problem number `index`, from 0; after the last one the list repeats in another order."""
        rows = self.opened.train
        return self._read(self.train_rows, rows[shuffle(self.seed, index, len(rows))])

    def heldout(self, index: int) -> Problem:
        """Return held-out problem number `index`, from 0; after the last one the list repeats."""
        rows = self.opened.heldout
        return self._read(self._held_out.table, rows[permute(at_least_0(index) % len(rows), len(rows), b"heldout")])

    @property
    def heldout_count(self) -> int:
        """The number of held-out problems."""
        return len(self.opened.heldout)

    @property
    def heldout_prompts(self) -> set[int]:
        """Digests of the held-out prompts. `train_rows` is not read if the held-out problems have their own table."""
        return self._held_out.heldout_prompts

    @property
    def heldout_content(self) -> str:
        """A hash of the rows that contain the held-out problems."""
        return self._held_out.content

    @functools.cached_property
    def _held_out(self) -> Scan:
        """The scan of the table that contains the held-out problems."""
        if self.heldout_rows is None:
            return self.opened
        scan = Scan(self.heldout_rows)
        for i, _, prompt in scan.problems(self):
            scan.hold_out(i, prompt)
        return scan

    @functools.cached_property
    def opened(self) -> Scan:
        """Find the rows to use by reading every row once. UserError if rows are bad, or if no problem is left."""
        try:
            return _open(self)
        except UserError:
            raise
        except Exception as problem:  # a table may be anybody's code
            raise UserError(f"data: the rows cannot be read: {describe_error(problem)}") from problem

    def described(self) -> dict[str, object]:
        """Return the settings that determine the problems, for `experiment.describe`; files by content, not by path."""
        return {
            "train_rows": self.opened.content,
            "heldout_rows": None if self.heldout_rows is None else self.heldout_content,
            "schema": self.schema,
            "checks": self.checks,
            "filters": self.filters,
            "exclude": [source.heldout_content for source in self.exclude],
            "on_bad": self.on_bad,
            "seed": self.seed,
        }

    def _read(self, table: Table, row: int) -> Problem:
        try:
            return self.schema.read(table[row])[0]
        except Exception as problem:  # a table may be anybody's code
            raise UserError(f"data: {table.where(row)}: {describe_error(problem)}") from problem


@dataclass
class Scan:
    """The rows of a table to use, found by reading all of them once.

    Attributes:
      table: the table.
      train: the numbers of the rows with training problems.
      heldout: the numbers of the rows with held-out problems.
      heldout_prompts: the digests of the held-out prompts.
      has_context: whether some problem has messages before its prompt, for which a chat tokenizer is needed.
      bad: the rows that cannot be used.
      filtered: the number of rows that each filter left out.
      notes: a sentence for each kind of row that was left out.
    """

    table: Table
    train: array[int] = field(default_factory=lambda: array("q"))
    heldout: array[int] = field(default_factory=lambda: array("q"))
    heldout_prompts: set[int] = field(default_factory=set)
    has_context: bool = False
    bad: BadRows = field(default_factory=BadRows)
    filtered: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    rows_hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def content(self) -> str:
        """A hash of the table."""
        return self.table.content or f"rows:{self.rows_hash.hexdigest()}"

    @property
    def bad_rows(self) -> str:
        return f"{self.bad.count} of {len(self.table)} rows ({self.bad})"

    def problems(self, source: RowSource) -> Iterator[tuple[int, Problem, str]]:
        """Yield (row, problem, text whose hash decides its split) for the rows that are not bad."""
        for i, row in enumerate(self.table.rows()):
            try:
                if isinstance(row, ValueError):
                    raise row
                problem, prompt = source.schema.read(row)
                if self.table.content is None:
                    self.rows_hash.update(_serialize(problem))
            except ValueError as reason:
                self.reject(i, brief(reason))
                continue
            if rejected := _first_reason(source.checks, problem, self.table, i):
                self.reject(i, rejected[1])
                continue
            self.has_context |= bool(problem.context)
            yield i, problem, prompt

    def reject(self, i: int, reason: str) -> None:
        self.bad.add(self.table.where(i), reason)

    def hold_out(self, i: int, prompt: str) -> None:
        self.heldout.append(i)
        self.heldout_prompts.add(digest(prompt))

    def describe_missing(self) -> Iterator[str]:
        """Yield a sentence for the rows that were skipped, and one for the rows that filters left out."""
        if self.bad.count:
            yield f"skipped {self.bad_rows}"
        if self.filtered:
            counts = ", ".join(f"{name} {count}" for name, count in self.filtered.items())
            yield f"filters left out {self.filtered.total()} of {len(self.table)} rows ({counts})"


def _open(source: RowSource) -> Scan:
    scan = Scan(source.train_rows)
    split = source.heldout_rows is None
    held_out = scan if split else source._held_out
    scans = [scan] if split else [scan, held_out]
    for i, problem, prompt in scan.problems(source):
        if split and is_heldout(prompt):
            scan.hold_out(i, prompt)
        elif digest(prompt) in held_out.heldout_prompts:
            scan.reject(i, "the prompt is among the held-out ones too")
        elif any(digest(prompt) in other.heldout_prompts for other in source.exclude):
            scan.filtered["exclude"] += 1
        elif rejected := _first_reason(source.filters, problem, source.train_rows, i):
            scan.filtered[rejected[0]] += 1
        else:
            scan.train.append(i)
    if source.on_bad == "error" and (bad := [scan.bad_rows for scan in scans if scan.bad.count]):
        raise UserError(f"data: {' and '.join(bad)} cannot be used; on_bad='skip' leaves them out")
    scan.heldout, scan.heldout_prompts = held_out.heldout, held_out.heldout_prompts
    scan.has_context |= held_out.has_context
    scan.notes = tuple(note for scan in scans for note in scan.describe_missing())
    for name, rows in (("training", scan.train), ("held-out", scan.heldout)):
        if not rows:
            raise UserError("; ".join([f"data: wanted at least one {name} problem, got none", *scan.notes]))
    return scan


def _first_reason(rules: tuple[Rule, ...], problem: Problem, table: Table, i: int) -> tuple[str, str] | None:
    """Return (name, reason) of the first rule that rejects the problem, or None."""
    for rule in rules:
        name = title_of(rule).rpartition(".")[2]
        try:
            reason = rule(problem)
        except UserError:
            raise
        except Exception as error:  # of the user's code
            raise UserError(f"data: {table.where(i)}: {name} raised {describe_error(error)}") from error
        if reason is not None and not isinstance(reason, str):
            raise UserError(f"data: {table.where(i)}: wanted a reason or None from {name}, got {reason!r}")
        if reason:
            return name, reason
    return None


def _serialize(problem: Problem) -> bytes:
    """Serialize a problem, the same in every process. ValueError if JSON cannot represent its metadata."""
    fields = [problem.prompt, problem.answer, problem.context, problem.task, problem.metadata]
    try:
        return json.dumps(fields, sort_keys=True, default=_plain).encode() + b"\n"
    except (TypeError, RecursionError) as error:  # keys that are no texts, values in themselves
        raise ValueError(f"metadata: wanted values that JSON can hold, got others: {error}") from None


def _plain(value: object) -> object:
    """Convert a metadata value of a type that JSON lacks to a JSON value."""
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(element, sort_keys=True, default=_plain) for element in value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return ["array", str(value.dtype), list(value.shape), content]
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, np.generic | Number | datetime.date | datetime.time | datetime.timedelta | PurePath):
        return str(value)
    raise ValueError(
        "metadata: wanted JSON values, sets, arrays, numbers, dates or paths, by which a resumed run can tell "
        f"whether the problems are the same; got {type(value).__name__}"
    )
