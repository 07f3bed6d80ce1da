"""Counting the programs that a process compiles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from gspax.run import compilation
from gspax.run.compilation import COMPILED, LOWERED, count_compilations


def test_each_program_is_counted_once_and_only_within_the_context():
    double = jax.jit(lambda x: 2 * x)
    one, two = jnp.ones(1), jnp.ones(2)
    with count_compilations() as compiled:
        double(one)
        double(one)
        assert compiled.programs == 1 and compiled.seconds > 0 and compiled.lowering > 0
        double(two)
    jax.jit(lambda x: 3 * x)(one)
    assert compiled.programs == 2 and 0 <= compiled.cached <= 2
    assert str(compiled).startswith("2 programs compiled in ")


def test_the_time_until_a_program_is_ready_is_estimated_from_the_programs_before(monkeypatch):
    now, record = [100.0], jax.monitoring.record_event_duration_secs
    monkeypatch.setattr(compilation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with count_compilations() as compiled:
        record(LOWERED, 2.0)
        assert compiled.left() == 0, "nothing is known yet"
        for lowering, seconds in ((2.0, 18.0), (1.0, 12.0)):
            record(LOWERED, lowering)
            record(COMPILED, seconds)
        assert compiled.left() == 0, "nothing is compiled"
        record(LOWERED, 3.0)
        now[0] += 12
        assert compiled.left() == 3.0 * (18 + 12) / (2 + 1) - 12
        now[0] += 30
        assert compiled.left() == 0, "overdue"
