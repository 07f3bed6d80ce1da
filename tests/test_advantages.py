"""Rewards to advantages, against the float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gspax import advantages, losses

FUNCTIONS = {
    "standardize": (advantages.standardize, functools.partial(reference.standardize, ddof=1, eps=1e-6)),
    "standardize_0": (
        functools.partial(advantages.standardize, ddof=0, eps=1e-4),
        functools.partial(reference.standardize, ddof=0, eps=1e-4),
    ),
    "center": (advantages.center, reference.center),
    "leave_one_out": (advantages.leave_one_out, reference.leave_one_out),
}
over_functions = pytest.mark.parametrize("ours, references", FUNCTIONS.values(), ids=FUNCTIONS)


@over_functions
@pytest.mark.parametrize("group", (2, 3, 8, 64))
def test_is_the_references(ours, references, group):
    reward = np.random.default_rng(group).standard_normal((5, group)).astype(np.float32)
    reward[1] = reward[1] > 0
    reward[2] = 0.7
    got = ours(jnp.asarray(reward))
    assert got.shape == (5, group) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, references(reward), rtol=1e-5, atol=1e-6)


def test_worked_example():
    """Rewards 0.8, 0.4, 0.6 have mean 0.6 and, with ddof 1, standard deviation 0.2."""
    reward = jnp.array([[0.8, 0.4, 0.6]])
    np.testing.assert_allclose(advantages.standardize(reward, eps=0.0), [[1, -1, 0]], atol=1e-6)
    np.testing.assert_allclose(advantages.standardize(reward), [[1, -1, 0]], atol=6e-6)
    assert advantages.standardize(reward)[0, 0] == pytest.approx(0.2 / (0.2 + 1e-6), abs=5e-7)
    np.testing.assert_allclose(advantages.center(reward), [[0.2, -0.2, 0]], atol=1e-7)
    np.testing.assert_allclose(advantages.leave_one_out(reward), [[0.3, -0.3, 0]], atol=1e-7)


def test_worked_example_of_the_sequence_ratio():
    """A response of 10 tokens that became twice as likely has s = 2^(1/10) = 1.0718, not 2."""
    old_logp = jnp.full((1, 10), -1.0)
    logp = old_logp.at[0, 3].add(jnp.log(2.0))
    _, metrics = losses.gspo_loss(logp, old_logp, jnp.ones(1), jnp.ones((1, 10), bool))
    assert metrics["ratio_mean"] == pytest.approx(2**0.1, rel=1e-6)
    assert metrics["clip_fraction_sequences"] == 1


@over_functions
@pytest.mark.parametrize("reward", (0.1, 0.7, 1 / 3, 1e-8, -123.456, 1e30, 0.0))
@pytest.mark.parametrize("group", (1, 3, 7, 10))
def test_equal_rewards_give_exact_zeros(ours, references, reward, group):
    """The mean of ten times 0.1 is not 0.1 in floating point; divided by eps, the difference would be an advantage."""
    np.testing.assert_array_equal(ours(jnp.full((2, group), reward, jnp.float32)), np.zeros((2, group)))


@over_functions
def test_group_of_one_is_zero(ours, references):
    np.testing.assert_array_equal(ours(jnp.array([[3.0], [-2.0]])), np.zeros((2, 1)))


@over_functions
def test_rewards_that_are_large_against_their_differences(ours, references):
    """E[R²] - E[R]² in float32 is 0, or negative, for the first; the second is a group with one loser."""
    reward = np.array([[10000, 10001, 10002, 10001], [0, 0.95, 0.95, 0.95]], np.float32)
    np.testing.assert_allclose(ours(jnp.asarray(reward)), references(reward), rtol=1e-5, atol=1e-6)


@over_functions
def test_groups_do_not_mix_and_order_does_not_matter(ours, references):
    reward = np.random.default_rng(0).random((6, 4)).astype(np.float32)
    whole = np.asarray(ours(jnp.asarray(reward)))
    for p in range(6):
        np.testing.assert_allclose(ours(jnp.asarray(reward[p : p + 1]))[0], whole[p], rtol=1e-5, atol=1e-6)
    order = [2, 0, 3, 1]
    np.testing.assert_allclose(ours(jnp.asarray(reward[:, order])), whole[:, order], rtol=1e-5, atol=1e-6)


@over_functions
def test_jit_agrees_and_advantages_add_up_to_0(ours, references):
    reward = jnp.asarray(np.random.default_rng(0).random((6, 4)).astype(np.float32))
    np.testing.assert_allclose(jax.jit(ours)(reward), ours(reward), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(reward).sum(-1), np.zeros(6), atol=2e-6)


def test_constant_groups():
    reward = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 1e-6], [0.0, 0.0, 0.0], [2.0, 1.0, 2.0]])
    got = jax.jit(advantages.constant_groups)(reward)
    assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, [True, False, True, False])
    np.testing.assert_array_equal(advantages.constant_groups(reward[:, :1]), [True] * 4)


def test_eps_bounds_the_advantage_of_a_hardly_varying_group():
    """Differences of 1e-9 are noise: with eps 1e-6 they stay below 1e-3, without eps they become 1."""
    reward = jnp.array([[0.0, 0.0, 1e-9]])
    assert np.abs(advantages.standardize(reward)).max() < 1e-3
    assert np.abs(advantages.standardize(reward, eps=0.0)).max() > 1


def test_differences_whose_squares_underflow_are_no_nan_without_eps():
    assert np.isfinite(advantages.standardize(jnp.array([[0.0, 0.0, 1e-30]]), eps=0.0)).all()


@over_functions
@pytest.mark.parametrize(
    "dtype", (np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_, jnp.bfloat16), ids=str
)
def test_other_real_dtypes_become_float32(ours, references, dtype):
    reward = np.array([[1, 0, 0, 1], [1, 1, 1, 1]])
    got = ours(reward.astype(dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, ours(jnp.asarray(reward, jnp.float32)))


@over_functions
def test_a_nan_reward_is_not_hidden(ours, references):
    got = ours(jnp.array([[1.0, jnp.nan], [0.0, 1.0]]))
    assert np.isnan(got[0]).any() and np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    "function", (advantages.standardize, advantages.center, advantages.leave_one_out, advantages.constant_groups)
)
def test_wrong_rewards(function):
    with pytest.raises(ValueError, match=r"reward_PG must be \[P, G\].*got float32 \[3\]"):
        function(jnp.ones(3))
    with pytest.raises(ValueError, match=r"reward_PG must be \[P, G\].*got float32 \[1, 2, 3\]"):
        function(jnp.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"at least one sample.*got float32 \[2, 0\]"):
        function(jnp.ones((2, 0)))
    with pytest.raises(TypeError, match=r"real numbers; got complex64 \[1, 2\]"):
        function(jnp.ones((1, 2), jnp.complex64))
    with pytest.raises(TypeError, match=r"array \[P, G\] of real numbers; got list"):
        function([[1.0, 0.0]])


def test_wrong_ddof_and_eps():
    reward = jnp.array([[1.0, 0.0]])
    with pytest.raises(ValueError, match="eps must be at least 0; got -1e-06"):
        advantages.standardize(reward, eps=-1e-6)
    with pytest.raises(ValueError, match="eps must be at least 0; got nan"):
        advantages.standardize(reward, eps=float("nan"))
    for ddof in (2, 3, -1):
        with pytest.raises(ValueError, match=f"ddof must be at least 0 and below the group size 2; got {ddof}"):
            advantages.standardize(reward, ddof=ddof)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-(2.0**40), 2.0**40, width=32)))
def test_finite_rewards_never_give_nan(reward):
    for function in (advantages.standardize, advantages.center, advantages.leave_one_out):
        got = np.asarray(function(reward))
        assert np.isfinite(got).all()
    assert np.abs(advantages.standardize(reward)).max() <= 5**0.5
    assert np.isfinite(advantages.standardize(reward, eps=0.0)).all()
