"""Ends this process from any thread, and ends it automatically when it makes no progress.

A collective operation, a reward, or a sampler may hang.

Progress is what reaches the host from the devices: a chunk of tokens, an update, an evaluation
(`multihost.to_host`). After `limit` seconds without any, the stacks of all threads are printed and the process
exits with code 1, so that a launcher starts it again. In a run of several processes all of them wait for the one
that hangs, so each prints its stacks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

TICK = 10.0  # seconds between two looks, at most
OTHERS = 5.0  # seconds for the other processes, which wait since about the same time, to print their stacks too

SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor and may not be able to restore it
PATIENCE = 2.0  # seconds for what may block: another thread may hold a lock or wait for a host that is gone

_last_progress = 0.0
_doing = ""
_done: threading.Event | None = None


def progress(doing: str = "") -> None:
    """Note that the run has made progress, and its next activity if named. Cheap: a clock is read."""
    global _last_progress, _doing
    _last_progress, _doing = time.monotonic(), doing or _doing


def start(limit: float) -> None:
    """Watch this process until `stop`; a limit of 0 watches nothing."""
    global _done
    stop()
    progress()
    if limit > 0:
        _done = threading.Event()
        _arm(limit)
        threading.Thread(target=_watch, args=(limit, _done), name="gspax_watchdog", daemon=True).start()


def stop() -> None:
    """Stop watching, as before an exit."""
    global _done
    if _done is not None:
        _done.set()
        _done = None
        faulthandler.cancel_dump_traceback_later()


def _watch(limit: float, done: threading.Event) -> None:
    while not done.wait(min(limit / 4, TICK)):
        _arm(limit)
        if time.monotonic() - _last_progress > limit:
            faulthandler.dump_traceback(file=2, all_threads=True)
            if not done.wait(OTHERS):
                where = f" in {_doing!r}" if _doing else ""
                end_process(f"no progress for {limit:.0f} seconds{where}: the stacks of all threads are above", 1)


def _arm(limit: float) -> None:
    """Let C code print the stacks and exit, should the watching thread never get the interpreter's lock again."""
    faulthandler.dump_traceback_later(limit + OTHERS, exit=True, file=2)


def end_process(sentence: str, code: int, *, first: Callable[[], object] = lambda: None) -> NoReturn:
    """Call `first`, write the sentence to stderr and exit with `code`, whatever the other threads are doing.

    Nothing is cleaned up: the main thread may wait for a collective operation that never ends.
    """
    for work in (first, _flush):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE)
    cursor, stderr, nowhere = SHOW_CURSOR if os.isatty(2) else "", os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what the other threads still print, such as a traceback that follows from this
        os.dup2(nowhere, descriptor)
    os.write(stderr, f"{cursor}\ngspax: {sentence}\n".encode(errors="backslashreplace"))
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
