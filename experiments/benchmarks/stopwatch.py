"""Times the methods of another framework's trainer; needs nothing but Python, because other interpreters run it."""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from typing import Any

START = time.perf_counter()  # of the process, if this is the first import of its script
STEPS = 6


def now() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


class Stopwatch:
    """Wall and CPU seconds of each call of a method, after which `wait` is called."""

    def __init__(self, owner: Any, name: str, wait: Any = lambda: None) -> None:
        self.calls: list[tuple[float, float]] = []
        self.starts: list[tuple[float, float]] = []
        method = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self.starts.append(now())
            result = method(*arguments, **options)
            wait()
            self.calls.append(_between(self.starts[-1], now()))
            return result

        setattr(owner, name, timed)


def summarize(version: str, rollout: Stopwatch) -> dict[str, Any]:
    """The figures of a training that has just ended, as `peers.compare` reads them.

    Medians of the steps after the first third, the end of the first step since the start of the process, and the
    peak memory. A step begins with its rollout; the rest of it is the update.
    """
    starts = [*rollout.starts, now()]
    steps = list(itertools.starmap(_between, itertools.pairwise(starts)))
    updates = list(itertools.starmap(_between, zip(rollout.calls, steps, strict=True)))
    return {
        "version": version,
        "first_step_s": starts[1][0] - START,
        "first_step_cpu_s": starts[1][1],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phases": {"rollout": _medians(rollout.calls), "train": _medians(updates), "step": _medians(steps)},
    }


def _between(begin: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - begin[0], end[1] - begin[1]


def _medians(calls: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = (statistics.median(seconds) for seconds in zip(*calls[len(calls) // 3 :], strict=True))
    return {"wall_s": wall, "cpu_s": cpu}
