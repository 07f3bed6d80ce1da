"""How many programs a process compiled, and how long that took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # also where the program comes from the persistent cache
READ = "/jax/compilation_cache/cache_hits"


@dataclass
class Compilations:
    """A count of what was compiled so far."""

    programs: int = 0
    cached: int = 0  # of these, read from the persistent cache
    seconds: float = 0.0  # in XLA, reading included; tracing is not

    def __str__(self) -> str:
        return f"{self.programs} programs compiled in {self.seconds:.1f} s ({self.cached} read from the cache)"


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count all compilations of the process within the context."""
    compilations = Compilations()

    def add_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            compilations.programs += 1
            compilations.seconds += duration_secs

    def add_hit(event: str, **_: str | int) -> None:
        compilations.cached += event == READ

    jax.monitoring.register_event_duration_secs_listener(add_duration)
    jax.monitoring.register_event_listener(add_hit)
    try:
        yield compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(add_duration)
        jax.monitoring.unregister_event_listener(add_hit)
