"""Ends a run after a save on SIGINT, SIGTERM, SIGHUP or a closed output; a second signal ends the process at once.

    with interrupt.listen(), interrupt.call_on_interrupt(save):
        for step in ...:
            ...  # long work calls `stop_point` where stopping loses nothing else
            interrupt.stop_point()

Signals belong to the process, and so does the listener: `stop_point` takes no argument, and does nothing outside of
`listen`.

A thread reads the signals from a pipe that C code writes to. The main thread may wait for a device for minutes, in C
code too, and Python runs no handler until it returns.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import TypeVar

from gspax.errors import Interrupted
from gspax.parallel import multihost
from gspax.parallel.watchdog import SHOW_CURSOR

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME = 1.0  # seconds in which signals count as one: a terminal and the shell in it, or a launcher, send several
POLL = 0.5  # seconds between two checks for signals while futures are waited for


class _Listener:
    """The signals that this process has received; see `listen`."""

    def __init__(self, unsaved: Callable[[], str], other: str) -> None:
        self.received, self.other = 0, other  # the first signal; what it ends, if that is no run
        self._unsaved, self._first = unsaved, 0.0

    def receive(self, signum: int) -> None:
        """Note the first signal. Called in any thread and between any two bytecodes, so it takes no lock."""
        self.received = self.received or signum

    def read(self, pipe: int) -> None:
        """Handle the signals of a pipe, one byte each, until 0 or its end."""
        while (byte := os.read(pipe, 1)) and (signum := byte[0]):
            if signum not in SIGNALS:  # of another handler
                continue
            if signum == signal.SIGHUP:
                drop_closed_outputs()
            if not self._first:
                self._first = time.monotonic()
                self.receive(signum)
                name = signal.Signals(signum).name
                what = self.other or "the run"
                _write(f"\n{name}: {what} ends after its current computation; send it again to end at once\n")
            elif time.monotonic() - self._first > SAME:
                self._end_now(signum)

    def _end_now(self, signum: int) -> None:
        threading.Timer(2.0, os._exit, (128 + signum,)).start()  # if the file system does not answer
        with contextlib.suppress(Exception):
            how = "at once" if self.other else "without saving"
            _write(f"\n{signal.Signals(signum).name} again: ended {how}; {self._unsaved()}\n")
        os._exit(128 + signum)


_listener: _Listener | None = None


@contextlib.contextmanager
def listen(
    unsaved: Callable[[], str] = lambda: "the same command continues the run", *, other: str = ""
) -> Iterator[None]:
    """Listen for signals until the block ends; then the previous handlers are back.

    A SIGHUP that is ignored, as under nohup, stays so. Python handles signals in the main thread only: in any other
    thread no signal is noticed.

    Args:
      unsaved: what is lost by ending at once, for the message. Called in another thread.
      other: what a signal ends if it is no run, such as "the server": nothing is saved, and no command continues it.
    """
    global _listener
    outer, _listener = _listener, _Listener(unsaved, other)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _handlers(_listener) if is_main else contextlib.nullcontext():
            yield
    finally:
        _listener = outer


@contextlib.contextmanager
def _handlers(to: _Listener) -> Iterator[None]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handled = [signum for signum in SIGNALS if (signum, signal.getsignal(signum)) != (signal.SIGHUP, signal.SIG_IGN)]
    thread = threading.Thread(target=to.read, args=(reader,), name="gspax_signals", daemon=True)
    thread.start()
    fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {signum: signal.signal(signum, lambda signum, frame: to.receive(signum)) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(fd)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def stop_point() -> None:
    """Raise `Interrupted` if this or another process has received a signal since `listen` began.

    Collective: every process calls it at the same points, so that a signal to one host ends the run on all.
    """
    if _listener is not None and (signum := max(multihost.gather(_listener.received))):
        raise Interrupted(signum, _listener.other)


@contextlib.contextmanager
def call_on_interrupt(save: Callable[[], None]) -> Iterator[None]:
    """Call `save` if a signal ends the block where there is a state to save."""
    try:
        yield
    except Interrupted:
        save()
        raise


def wait(
    pending: Iterable[futures.Future[T]], each: Callable[[set[futures.Future[T]]], None] = lambda done: None
) -> None:
    """Wait until the futures of all processes are done. Collective, and a stop point meanwhile.

    `each` gets the futures that are done since its last call, at least every `POLL` seconds; it must not raise.
    """
    waiting = set(pending)
    while True:
        done, waiting = futures.wait(waiting, timeout=POLL)
        each(done)
        stop_point()
        if not any(multihost.gather(bool(waiting))):
            return


def hang_up() -> None:
    """End the run as SIGHUP does: nobody reads its output any more."""
    drop_closed_outputs()
    if _listener is not None:
        _listener.receive(signal.SIGHUP)


def drop_closed_outputs() -> None:
    """Redirect closed terminals and pipes to the null device, so that writing to them does not fail."""
    closed = select.poll()
    for descriptor in (0, 1, 2):
        closed.register(descriptor, 0)  # errors are always reported
    descriptors = [descriptor for descriptor, _ in closed.poll(0)]
    if descriptors:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(null, descriptor)
        os.close(null)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}{text}".encode())
