"""Length penalties, and truncated rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspax import advantages, losses
from gspax.losses import shaping


def loop(length, max_length, buffer):
    """Eq. 13 of DAPO, literally."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize("max_length, buffer", ((20480, 4096), (10, 3), (7, 7), (5, 1)))
def test_the_penalty_equals_the_papers(max_length, buffer):
    length = np.array([0, 1, max_length - buffer, max_length - buffer + 1, max_length - 1, max_length, 10**6])
    got = jax.jit(lambda x: shaping.soft_overlong_punishment(x, max_length=max_length, buffer=buffer))(length)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [loop(int(x), max_length, buffer) for x in length], rtol=1e-6)


def test_lengths_are_counted_from_the_mask():
    mask = np.array([[False, True, True, False], [False, True, False, True], [False] * 4])
    length = shaping.response_length(mask)
    assert length.dtype == jnp.int32
    np.testing.assert_array_equal(length, [2, 2, 0])


def test_a_truncated_row_has_weight_0():
    rng = np.random.default_rng(0)
    logp, old = rng.standard_normal((2, 4, 5)).astype(np.float32)
    mask = np.ones((4, 5), bool)
    truncated = np.array([False, True, False, False])
    reward = np.array([[1.0, 0.0, 0.0, 0.0]], np.float32)
    keep = jnp.asarray(~truncated)
    advantage = advantages.center(reward, keep[None])[0]
    np.testing.assert_allclose(advantage, [2 / 3, 0, -1 / 3, -1 / 3], rtol=1e-6)
    terms = losses.grpo(logp, old, advantage, shaping.filter_overlong(mask, truncated))
    np.testing.assert_array_equal(terms.weight, [1, 0, 1, 1])
    rest = losses.reduce(losses.grpo(logp[~truncated], old[~truncated], advantage[keep], mask[~truncated]))[0]
    np.testing.assert_allclose(losses.reduce(terms)[0], rest, rtol=1e-6)


def test_invalid_arguments_are_rejected():
    length, mask = np.array([3, 4]), np.ones((2, 3), bool)
    punish = shaping.soft_overlong_punishment
    cases = (
        (lambda: punish(length, max_length=4, buffer=5), ValueError, "buffer must be from 1 to max_length 4; got 5"),
        (lambda: punish(length, max_length=4, buffer=0), ValueError, "buffer must be from 1 to max_length 4; got 0"),
        (lambda: punish(length, max_length=4.0, buffer=2), TypeError, "max_length must be a Python int.*got float"),
        (lambda: punish(length, max_length=4, buffer=True), TypeError, "buffer must be a Python int.*got bool"),
        (
            lambda: punish(length / 2, max_length=4, buffer=2),
            TypeError,
            r"length_B must be an array \[B\] of integers; got float64 \[2\]",
        ),
        (
            lambda: punish([3, 4], max_length=4, buffer=2),
            TypeError,
            r"length_B must be an array \[B\] of integers; got list",
        ),
        (
            lambda: punish(length[None], max_length=4, buffer=2),
            ValueError,
            r"length_B must be an array \[B\] of integers; got int64 \[1, 2\]",
        ),
        (
            lambda: shaping.filter_overlong(mask, length),
            TypeError,
            r"truncated_B must be a bool array \[B\]; got int64",
        ),
        (
            lambda: shaping.filter_overlong(mask, mask[:1, 0]),
            ValueError,
            r"truncated_B must have shape \[2\].*got \[1\]",
        ),
        (
            lambda: shaping.response_length(mask[0]),
            ValueError,
            r"mask_BT must be a bool array \[B, T\]; got bool \[3\]",
        ),
    )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
