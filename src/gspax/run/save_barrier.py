"""The barrier in which Orbax's threads wait for the other processes of a save, and which ends when the save fails.

Orbax's own waits for up to 20 minutes for a process that cannot write and does not come.
"""

from __future__ import annotations

import sys
import threading
from concurrent import futures

import orbax.checkpoint as ocp

POLL = 0.2  # seconds between two looks at a save


class SaveBarrier:
    """A `barrier_sync_fn` for Orbax, for these processes; all if None."""

    def __init__(self, processes: set[int] | None) -> None:
        self._processes = processes
        self._failures, self._failed = 0, threading.Event()
        self._caller = 0

    def begin(self) -> None:
        """This thread begins a save. It may do so while it handles an exception, such as a signal's."""
        self._caller = threading.get_ident()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes. Raises if the save has failed, here or elsewhere: then some do not come."""
        error = sys.exc_info()[1]
        if error is not None and threading.get_ident() != self._caller:  # Orbax has barriers in a `finally` too
            raise error
        failed, name = self._failed, f"{key}.{self._failures}"
        barrier = ocp.multihost.get_barrier_sync_fn(processes=self._processes)
        met: futures.Future[None] = futures.Future()

        def meet() -> None:
            try:
                met.set_result(barrier(key=name, timeout_ms=timeout_ms))
            except Exception as error:
                met.set_exception(error)

        threading.Thread(target=meet, name="gspax_barrier", daemon=True).start()
        while not futures.wait([met], timeout=POLL).done:
            if failed.is_set():
                raise RuntimeError("the save has failed on another process")
        met.result()

    def fail(self) -> None:
        """End the waiting threads of this process."""
        self._failed.set()

    def renew(self) -> None:
        """Prepare for another save after one that has failed. All processes call it."""
        self._failures, self._failed = self._failures + 1, threading.Event()
