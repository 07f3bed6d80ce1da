"""Moments of a run at which it is killed, marked by the functions of `victim.py` and by the files that appear.

A kill is SIGKILL to the process itself, a random time after the moment: nothing is flushed and no handler runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SPAN = {  # moment -> the seconds after it in which the kill is drawn, about as long as what it begins
    "start": 6.0,  # imports, compilation, restoring
    "sampling": 0.03,
    "update": 0.05,
    "save": 0.1,
    "evaluation": 0.05,
    "report": 3.0,
}


@dataclass(frozen=True)
class Kill:
    """Kill at the `count`-th time that `moment` is reached, `delay` seconds after it."""

    moment: str
    count: int
    delay: float


_armed: dict[str, Kill] = {}
_counts: dict[str, int] = {}


def arm(kill: Kill, workdir: Path, steps: int) -> None:
    """Kill this process at a moment of the run that it is about to begin."""
    _armed[kill.moment] = kill
    if kill.moment == "start":
        reached("start")
    elif kill.moment == "save":
        _when(lambda: _is_saving(workdir), "save", again=True)
    elif kill.moment == "report":
        _when(lambda: _is_newest(workdir, steps), "report")


def reached(moment: str) -> None:
    """Count a moment; the kill is started if it is the one."""
    kill = _armed.get(moment)
    if kill is None:
        return
    _counts[moment] = _counts.get(moment, 0) + 1
    if _counts[moment] == kill.count:
        threading.Thread(target=_kill_after, args=(kill.delay,), daemon=True).start()


def _kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _when(condition: Callable[[], bool], moment: str, *, again: bool = False) -> None:
    """Reach the moment when the condition becomes true, with `again` each time that it does."""

    def watch() -> None:
        before = False
        while again or not before:
            now = condition()
            if now and not before:
                reached(moment)
            before = now
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()


def _is_saving(workdir: Path) -> bool:
    try:
        return any(not name.isdecimal() for name in os.listdir(workdir / "checkpoints"))
    except OSError:
        return False


def _is_newest(workdir: Path, step: int) -> bool:
    try:
        return f" {step}}}" in (workdir / "newest_checkpoint.json").read_text()
    except OSError:
        return False
