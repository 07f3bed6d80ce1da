"""Ctrl-C and SIGTERM end a run between two steps, after a checkpoint; a second one ends it at once.

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
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it, and the second signal leaves no time to show it again


class Interrupted(Exception):  # noqa: N818  (not an error)
    """A signal ended the run after its state had been saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name}: the state is saved; the same command continues the run")
        self.signum = signum


class Watch:
    """What `watch` gives: call it to ask whether a signal came."""

    def __init__(self) -> None:
        self._received = 0
        self._answered = 0

    def __call__(self) -> int:
        """The signal received, or 0.

        In a multi-host run every process must ask at the same places: all get the same answer, so that a signal to
        one host ends the run on all.
        """
        self._answered = max(multihost.gather(self._received))
        return self._answered

    def stop_here(self) -> None:
        """Raise `Interrupted` if the last answer was a signal. One that came since waits for the next question."""
        if self._answered:
            raise Interrupted(self._answered)

    def handle(self, signum: int, frame: object) -> None:
        """The handler of the first signal. It runs between any two bytecodes, so it takes no lock."""
        self._received = signum
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        os.write(2, f"{cursor}\n{signal.Signals(signum).name}: stopping after this step; again to abort\n".encode())


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Watch for SIGINT and SIGTERM.

    The first signal puts the system's default handlers back, so that the second kills the process wherever it is;
    leaving the context puts back what was there before. Only the main thread may handle signals: in another one no
    signal is ever seen here.
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
