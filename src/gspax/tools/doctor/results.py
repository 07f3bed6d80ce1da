"""Defines the result of a check: a status, a figure with its bound, and the reason; the worst of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from gspax.parallel import multihost, watchdog
from gspax.types import PyTree

Status = Literal["ok", "skipped", "slow", "wrong"]
WORST: tuple[Status, ...] = ("wrong", "slow", "ok", "skipped")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one comparison or measurement."""

    name: str
    status: Status
    measured: float | None = None
    bound: float | None = None  # of a difference at most, of a rate at least; None: nothing to compare with
    unit: str = ""  # of a rate; a difference is relative to the largest number
    why: str = ""  # where a difference is, or why a check was skipped

    def __str__(self) -> str:
        figure = ""
        if self.measured is not None and self.unit:
            figure = f"{self.measured:.3g} {self.unit}" + (f" (at least {self.bound:.3g})" if self.bound else "")
        elif self.measured is not None and self.bound:
            figure = f"{self.measured:.1e} (at most {self.bound:.0e})"
        elif self.measured is not None:
            figure = f"{self.measured:.1e} (wanted equal bits)" if self.measured else "equal bits"
        return row(self.status, self.name, figure, self.why)


Check = Callable[[], Iterator[Result]]


def row(status: str, name: str, figure: str, why: str) -> str:
    """Format a line of the table."""
    return f"{status:8} {name:46} {figure:28} {why}".rstrip()


def compare(name: str, got: PyTree, want: PyTree, tolerance: float) -> Result:
    """Compare trees of arrays up to `tolerance`, relative to the largest number of each array.

    A tolerance of 0 wants equal bits. The reason names the array and the index of the largest difference.
    """
    worst, where = 0.0, ""
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, wanted), got_leaf in zip(leaves, jax.tree.leaves(got), strict=True):
        got_leaf, wanted = (np.asarray(x, np.float64) for x in (got_leaf, wanted))
        if not got_leaf.size:
            continue
        off = np.abs(got_leaf - wanted) / max(float(np.abs(wanted).max()), 1e-30)
        off = np.where(np.isfinite(off), off, np.inf)
        if (largest := float(off.max())) > worst:
            index = [int(i) for i in np.unravel_index(off.argmax(), off.shape)]
            worst, where = largest, f"largest in {jax.tree_util.keystr(path) or 'the result'} at {index}"
    wrong = worst > tolerance
    status: Status = "wrong" if wrong else "ok"
    return Result(name=name, status=status, measured=worst, bound=tolerance, why=where if wrong else "")


class Place(NamedTuple):
    """A folder for a checkpoint, and whether all hosts see it."""

    folder: Path
    shared: bool


def rate(name: str, measured: float, bound: float | None, unit: str, why: str = "") -> Result:
    """Make the result of a rate: slow if it is below `bound`; without a bound it is just measured."""
    status: Status = "slow" if bound is not None and measured < bound else "ok"
    return Result(name=name, status=status, measured=measured, bound=bound, unit=unit, why=why)


def skipped(name: str, why: str) -> Result:
    return Result(name=name, status="skipped", why=why)


def run(name: str, check: Check) -> list[Result]:
    """Run a check; return its results, the worst of all processes for each; an exception is one too. Collective."""
    results: list[Result] = []
    try:
        for result in check():
            results.append(result)
            watchdog.progress()
    except Exception as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:400]
        results.append(Result(name=name, status="wrong", why=reason))
    gathered = multihost.gather([vars(result) for result in results])
    return merge([[Result(**fields) for fields in process] for process in gathered])


def merge(by_process: Sequence[Sequence[Result]]) -> list[Result]:
    """Return for each name the worst result of the processes, with the number of its process if it is bad."""
    every = [
        replace(result, why=f"process {process}: {result.why}".rstrip(": "))
        if by_process[1:] and result.status in ("wrong", "slow")
        else result
        for process, results in enumerate(by_process)
        for result in results
    ]
    worst_first = sorted(every, key=lambda result: WORST.index(result.status))
    names = dict.fromkeys(result.name for result in every)
    return [next(result for result in worst_first if result.name == name) for name in names]
