"""Moments of a run in this process: the phases of each step, as a screen shows them, and calls of `reached`.

What a process leaves when it is killed is what its folder has at that moment: a copy of it stands for the kill. A
SIGTERM is sent to this process.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from api import progress


class Moment(NamedTuple):
    """A phase of a step; the warm start and the first evaluation are of step 0."""

    step: int
    phase: str


_watchers: list[Callable[[str], None]] = []


def reached(phase: str) -> None:
    """Mark a moment inside a function of an experiment."""
    for watch in _watchers:
        watch(phase)


@contextmanager
def watched(act: Callable[[Moment], None], done: int = 0) -> Iterator[None]:
    """Call `act` at each moment of a run whose step `done` is saved."""
    step = done

    def watch(phase: str) -> None:
        nonlocal step
        step += phase == "sampling"
        act(Moment(step, phase))

    def begin(phase: str) -> None:
        original(phase)
        watch(phase)

    original = progress.phase
    _watchers.append(watch)
    try:
        with mock.patch.object(progress, "phase", begin):
            yield
    finally:
        _watchers.remove(watch)


def once(moment: Moment, act: Callable[[], None]) -> Callable[[Moment], None]:
    """Act when a moment is reached for the first time."""
    begun = []

    def watch(now: Moment) -> None:
        if now == moment and not begun:
            begun.append(now)
            act()

    return watch


def terminate() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def leave(workdir: Path, target: Path) -> None:
    """Copy what a kill would leave of a run now; again if files came or went meanwhile."""
    while True:
        before = _names(workdir)
        try:
            shutil.copytree(workdir, target)
            if _names(workdir) == before:
                break
        except (shutil.Error, OSError):
            pass
        shutil.rmtree(target, ignore_errors=True)
    (target / "lock.json").unlink(missing_ok=True)  # it names this process, which lives


def _names(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}
