"""Counting the programs that a process compiles."""

import jax
import jax.numpy as jnp

from gspax.run.compilation import count_compilations


def test_each_program_is_counted_once_and_only_within_the_context():
    double = jax.jit(lambda x: 2 * x)
    one, two = jnp.ones(1), jnp.ones(2)
    with count_compilations() as compiled:
        double(one)
        double(one)
        assert compiled.programs == 1 and compiled.seconds > 0
        double(two)
    jax.jit(lambda x: 3 * x)(one)
    assert compiled.programs == 2 and 0 <= compiled.cached <= 2
    assert str(compiled).startswith("2 programs compiled in ")
