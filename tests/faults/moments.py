"""Moments of a run at which it is killed, marked by the functions of `victim.py` and by the files that appear.

A kill is SIGKILL to the process itself, a random time after the moment: nothing is flushed and no handler runs.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SPAN = {  # moment -> the seconds after it in which the kill is drawn, about as long as what it begins
    "start": 2.0,  # the experiment, devices, the lock
    "restore": 0.3,
    "compile": 1.5,  # restored
    "sampling": 0.03,
    "update": 0.05,
    "save": 0.1,
    "evaluation": 0.05,
    "report": 3.0,  # the last step is saved
}
BEGIN = "start", "restore", "compile"  # before the first step of a process
REPEATED = "sampling", "update", "save", "evaluation"  # what a run reaches several times


@dataclass(frozen=True)
class Kill:
    """Kill `delay` seconds after `moment` is reached for the first time with step `after` or a later one saved.

    Once the last step is saved, the process is killed at its report only: there is nothing else to interrupt.
    """

    moment: str
    after: int
    delay: float


@dataclass
class _Armed:
    kill: Kill
    workdir: Path
    steps: int
    has_begun: bool = False  # the run has restored its state
    has_fired: bool = False


_armed: list[_Armed] = []  # one at most; a list, because plain values count as part of the victim's functions


def arm(kill: Kill, workdir: Path, steps: int) -> None:
    """Kill this process at a moment of the run that it is about to begin."""
    _armed.append(_Armed(kill, workdir, steps))
    if kill.moment == "save":
        _when(lambda: _is_saving(workdir), "save")
    elif kill.moment == "report":
        _when(lambda: newest(workdir) >= steps, "report")
    reached("start")


def reached(moment: str) -> None:
    """Mark a moment; the kill is started if it is the one.

    The checks at the start of a process call the functions of `victim.py` once, too: moments of a step count from the
    time when the run has restored its state.
    """
    for armed in _armed:
        armed.has_begun |= moment == "compile"
        is_it = armed.kill.moment == moment and (moment in BEGIN or armed.has_begun)
        if is_it and not armed.has_fired and newest(armed.workdir) >= armed.kill.after:
            armed.has_fired = True
            threading.Thread(target=_kill_after, args=(armed,), daemon=True).start()


def newest(workdir: Path) -> int:
    """The newest step that is saved; 0 before the first one."""
    try:
        return int(json.loads((workdir / "newest_checkpoint.json").read_text())["newest"])
    except (OSError, ValueError):
        return 0


def _kill_after(armed: _Armed) -> None:
    time.sleep(armed.kill.delay)
    if armed.kill.moment == "report" or newest(armed.workdir) < armed.steps:
        os.kill(os.getpid(), signal.SIGKILL)


def _when(condition: Callable[[], bool], moment: str) -> None:
    """Reach the moment each time that the condition becomes true."""

    before = condition()  # a killed save may have left its folder

    def watch() -> None:
        nonlocal before
        while True:
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
