"""Collects when a run did what: its phases, rewards, servers, pushes of weights, and work of devices.

Nothing is collected outside `collecting`: `add`, `span` and `watch` do nothing then. Each event is a line of JSON, as
the Trace Event Format has it (a complete event, `"ph": "X"`), which Perfetto reads. Events of a lane that overlap get
rows of their own, so that they stand below each other.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspax.types import PyTree

PHASES, LEARNER, SAMPLER = "phases", "learner's devices", "sampler's devices"
BEGIN = "[\n"  # of the file; the format allows an array without its end


class Timeline:
    """Events of any thread, until they are taken."""

    def __init__(self) -> None:
        self._lock, self._lines = threading.Lock(), list[str]()
        self._ends = dict[str, list[float]]()  # of each lane: when the last event of each row ended
        self._numbers = dict[tuple[str, int], int]()  # of a lane's row in the file
        self._watcher = ThreadPoolExecutor(1, "gspax_timeline")
        self._free = dict[str, float]()  # when the devices of a lane had done what they were given before
        self._offset = round((time.time() - time.monotonic()) * 1e6)  # microseconds

    def add(self, lane: str, name: str, began: float, ended: float) -> None:
        """Add an event, its times by `time.monotonic`."""
        with self._lock:
            ends = self._ends.setdefault(lane, [])
            row = next((row for row, end in enumerate(ends) if end <= began), len(ends))
            ends[row : row + 1] = [ended]
            if (lane, row) not in self._numbers:
                self._numbers[lane, row] = len(self._numbers) + 1
                self._lines.append(_to_header(self._numbers[lane, row], lane))
            start, end = round(began * 1e6), round(ended * 1e6)  # both, so that an event that follows does not overlap
            times = f'"ts":{self._offset + start},"dur":{end - start}'
            number, text = self._numbers[lane, row], json.dumps(name)
            self._lines.append(f'{{"ph":"X","pid":1,"tid":{number},{times},"name":{text}}},\n')

    def watch(self, lane: str, name: str, began: float, arrays: PyTree) -> None:
        """Add an event from its begin, or the end of the one before, until devices have computed the arrays."""

        def wait() -> None:
            import jax  # here: rewards call `add`, and need no jax

            with contextlib.suppress(RuntimeError):  # donated meanwhile
                jax.block_until_ready(arrays)
                start, self._free[lane] = max(began, self._free.get(lane, began)), time.monotonic()
                self.add(lane, name, start, self._free[lane])

        self._watcher.submit(wait)

    def take(self) -> str:
        """Return the lines of the events since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return "".join(lines)

    def close(self) -> None:
        """Wait for what is watched."""
        self._watcher.shutdown()


def _to_header(number: int, lane: str) -> str:
    """Return the line that names a row."""
    return f'{{"ph":"M","pid":1,"tid":{number},"name":"thread_name","args":{{"name":{json.dumps(lane)}}}}},\n'


_timeline: Timeline | None = None


def take() -> str:
    """Return the lines of the events since the last call; "" if nothing is collected."""
    return "" if _timeline is None else _timeline.take()


@contextlib.contextmanager
def collecting() -> Iterator[Timeline]:
    """Collect events until the block ends."""
    global _timeline
    _timeline = timeline = Timeline()
    try:
        yield timeline
    finally:
        _timeline = None
        timeline.close()


def add(lane: str, name: str, began: float, ended: float) -> None:
    """Add an event, its times by `time.monotonic`."""
    if _timeline is not None:
        _timeline.add(lane, name, began, ended)


@contextlib.contextmanager
def span(lane: str, name: str) -> Iterator[None]:
    """Add the time of the block as an event."""
    began = time.monotonic()
    try:
        yield
    finally:
        add(lane, name, began, time.monotonic())


def watch(lane: str, name: str, began: float, arrays: PyTree) -> None:
    """Add an event that ends when devices have computed the arrays. Waits for nothing."""
    if _timeline is not None:
        _timeline.watch(lane, name, began, arrays)
