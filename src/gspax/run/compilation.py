"""Counts compiled programs and their seconds, and estimates when the current compilation will end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also where the program comes from the persistent cache
READ = "/jax/compilation_cache/cache_hits"


@dataclass
class Compilations:
    """The number and the seconds of compilations so far."""

    programs: int = 0
    cached: int = 0  # of these, read from the persistent cache
    seconds: float = 0.0  # in XLA, reading included; tracing is not
    lowering: float = 0.0  # seconds in which jax wrote these programs for XLA
    next_lowering: float = 0.0  # the lowering seconds of the program that XLA compiles now, if there is one
    since: float = 0.0

    def __str__(self) -> str:
        return f"{self.programs} programs compiled in {self.seconds:.1f} s ({self.cached} read from the cache)"

    def left(self) -> float:
        """Estimate the seconds until the program that is compiled now is ready; 0 if there is none, or it is overdue.

        The time is taken to be proportional to that of its lowering, as for the programs before (a small run on CPU:
        7 to 14 times).
        """
        if not self.lowering:
            return 0.0
        return max(0.0, self.next_lowering * self.seconds / self.lowering - (time.monotonic() - self.since))


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count all compilations of the process within the context."""
    compilations = Compilations()

    def add_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == LOWERED:
            compilations.next_lowering, compilations.since = duration_secs, time.monotonic()
        elif event == COMPILED:
            compilations.programs += 1
            compilations.seconds += duration_secs
            compilations.lowering += compilations.next_lowering
            compilations.next_lowering = 0.0

    def add_hit(event: str, **_: str | int) -> None:
        compilations.cached += event == READ

    jax.monitoring.register_event_duration_secs_listener(add_duration)
    jax.monitoring.register_event_listener(add_hit)
    try:
        yield compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(add_duration)
        jax.monitoring.unregister_event_listener(add_hit)
