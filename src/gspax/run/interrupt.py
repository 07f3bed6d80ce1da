"""Ctrl-C and SIGTERM end a run between two steps, after a checkpoint; a second signal ends it at once.

with interrupt.watch() as interrupted:
    for step in ...:
        ...
        if interrupted():
            ...save...
        interrupted.stop_here()  # raises Interrupted
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from gspax.distributed import multihost

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor and may not be able to restore it


class Interrupted(Exception):  # noqa: N818  (not an error)
    """A signal ended the run after its state was saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name}: the state is saved; the same command continues the run")
        self.signum = signum


class Watch:
    """What `watch` yields: a callable that returns the signal received, if any."""

    def __init__(self) -> None:
        self._received = 0
        self._returned = 0

    def __call__(self) -> int:
        """The signal that this or another process has received, or 0.

        Collective: every process calls it at the same points and gets the same result, so that a signal to one host
        ends the run on all.
        """
        self._returned = max(multihost.gather(self._received))
        return self._returned

    def stop_here(self) -> None:
        """Raise `Interrupted` if the last call returned a signal; one received since waits for the next call."""
        if self._returned:
            raise Interrupted(self._returned)

    def handle(self, signum: int, frame: object) -> None:
        """Handle the first signal. This runs between any two bytecodes, so it must not take a lock."""
        self._received = signum
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        os.write(2, f"{cursor}\n{signal.Signals(signum).name}: stopping after this step; again to abort\n".encode())


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Watch for SIGINT and SIGTERM.

    The first signal restores the system's default handlers, so that a second one kills the process at any point;
    leaving the context restores the previous handlers. Python handles signals in the main thread only: in any other
    thread nothing is watched.
    """
    interrupted = Watch()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = {each: signal.signal(each, interrupted.handle) for each in SIGNALS}
    try:
        yield interrupted
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
