"""Advantages from rewards, compared with the float64 reference."""

import functools
import inspect
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gspax import advantages, losses
from gspax.losses import shaping

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
def test_advantages_equal_the_reference(ours, references, group):
    reward = np.random.default_rng(group).standard_normal((5, group)).astype(np.float32)
    reward[1] = reward[1] > 0
    reward[2] = 0.7
    got = ours(jnp.asarray(reward))
    assert got.shape == (5, group) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, references(reward), rtol=1e-5, atol=1e-6)


def test_worked_example_of_group_advantages():
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
    """In floating point the mean of ten 0.1s is not 0.1; divided by eps, the difference would become an advantage."""
    np.testing.assert_array_equal(ours(jnp.full((2, group), reward, jnp.float32)), np.zeros((2, group)))


@over_functions
def test_a_group_of_one_has_advantage_0(ours, references):
    np.testing.assert_array_equal(ours(jnp.array([[3.0], [-2.0]])), np.zeros((2, 1)))


@over_functions
def test_rewards_much_larger_than_their_differences(ours, references):
    """For the first, E[R²] - E[R]² is 0 or negative in float32; the second is a group with one low reward."""
    reward = np.array([[10000, 10001, 10002, 10001], [0, 0.95, 0.95, 0.95]], np.float32)
    np.testing.assert_allclose(ours(jnp.asarray(reward)), references(reward), rtol=1e-5, atol=1e-6)


@over_functions
def test_groups_are_independent_and_order_does_not_matter(ours, references):
    reward = np.random.default_rng(0).random((6, 4)).astype(np.float32)
    whole = np.asarray(ours(jnp.asarray(reward)))
    for p in range(6):
        np.testing.assert_allclose(ours(jnp.asarray(reward[p : p + 1]))[0], whole[p], rtol=1e-5, atol=1e-6)
    order = [2, 0, 3, 1]
    np.testing.assert_allclose(ours(jnp.asarray(reward[:, order])), whole[:, order], rtol=1e-5, atol=1e-6)


@over_functions
def test_jit_changes_nothing_and_advantages_sum_to_0(ours, references):
    reward = jnp.asarray(np.random.default_rng(0).random((6, 4)).astype(np.float32))
    np.testing.assert_allclose(jax.jit(ours)(reward), ours(reward), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(reward).sum(-1), np.zeros(6), atol=2e-6)


def test_constant_groups_have_advantage_0():
    reward = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 1e-6], [0.0, 0.0, 0.0], [2.0, 1.0, 2.0]])
    got = jax.jit(advantages.constant_groups)(reward)
    assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, [True, False, True, False])
    np.testing.assert_array_equal(advantages.constant_groups(reward[:, :1]), [True] * 4)


def test_eps_bounds_the_advantage_of_nearly_constant_groups():
    """Differences of 1e-9 are noise: they give less than 1e-3 with eps 1e-6, and 1 without eps."""
    reward = jnp.array([[0.0, 0.0, 1e-9]])
    assert np.abs(advantages.standardize(reward)).max() < 1e-3
    assert np.abs(advantages.standardize(reward, eps=0.0)).max() > 1


def test_differences_whose_squares_underflow_give_no_nan_without_eps():
    assert np.isfinite(advantages.standardize(jnp.array([[0.0, 0.0, 1e-30]]), eps=0.0)).all()


@over_functions
@pytest.mark.parametrize(
    "dtype", (np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_, jnp.bfloat16), ids=str
)
def test_other_real_dtypes_are_cast_to_float32(ours, references, dtype):
    reward = np.array([[1, 0, 0, 1], [1, 1, 1, 1]])
    got = ours(reward.astype(dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, ours(jnp.asarray(reward, jnp.float32)))


@over_functions
def test_a_nan_reward_propagates(ours, references):
    got = ours(jnp.array([[1.0, jnp.nan], [0.0, 1.0]]))
    assert np.isnan(got[0]).any() and np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    "function", (advantages.standardize, advantages.center, advantages.leave_one_out, advantages.constant_groups)
)
def test_invalid_rewards_are_rejected(function):
    with pytest.raises(ValueError, match=r"reward_PG must be an array \[P, G\].*got float32 \[3\]"):
        function(jnp.ones(3))
    with pytest.raises(ValueError, match=r"reward_PG must be an array \[P, G\].*got float32 \[1, 2, 3\]"):
        function(jnp.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"at least one sample.*got float32 \[2, 0\]"):
        function(jnp.ones((2, 0)))
    with pytest.raises(TypeError, match=r"real numbers; got complex64 \[1, 2\]"):
        function(jnp.ones((1, 2), jnp.complex64))
    with pytest.raises(TypeError, match=r"array \[P, G\] of real numbers; got list"):
        function([[1.0, 0.0]])


def test_invalid_ddof_and_eps_are_rejected():
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


# Masked groups, rows in any order, and advantages with the statistics of the batch.


def loop_center(groups):
    return [[r - math.fsum(group) / len(group) for r in group] for group in groups]


def loop_leave_one_out(groups):
    return [
        [r - (math.fsum(group) - r) / (len(group) - 1) if len(group) > 1 else 0.0 for r in group] for group in groups
    ]


def loop_divide(groups, each):
    """Each group divided by its own number."""
    return [[x / n if n else x for x in group] for group, n in zip(groups, each, strict=True)]


def loop_std(numbers, ddof):
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / max(len(numbers) - ddof, 1))


def loop_standardize(groups, ddof=1, eps=1e-6):
    return loop_divide(loop_center(groups), [loop_std(group, ddof) + eps for group in groups])


def loop_over_batch(groups, ddof=1, eps=1e-6):
    """(x - mean) / (std + eps) over all numbers."""
    numbers = [x for group in groups for x in group]
    mean, std = math.fsum(numbers) / len(numbers), loop_std(numbers, ddof)
    return [[(x - mean) / (std + eps) for x in group] for group in groups]


def loop_maxrl(groups):
    means = [math.fsum(group) / len(group) for group in groups]
    return [[(r - m) / m if m > 0 else 0.0 for r in g] for g, m in zip(groups, means, strict=True)]


def loop_best_of_group(groups):
    """The amount that the best reward would lose without the sample."""
    return [
        [max(g) - max(g[:i] + g[i + 1 :]) if len(g) > 1 else 0.0 for i in range(len(g))]
        for g in (list(group) for group in groups)
    ]


GROUPED = {
    "standardize": (advantages.standardize, loop_standardize),
    "standardize_0": (
        functools.partial(advantages.standardize, ddof=0, eps=1e-3),
        functools.partial(loop_standardize, ddof=0, eps=1e-3),
    ),
    "center": (advantages.center, loop_center),
    "leave_one_out": (advantages.leave_one_out, loop_leave_one_out),
    "reinforce_plus_plus": (advantages.reinforce_plus_plus, loop_over_batch),
    "reinforce_plus_plus_baseline": (
        advantages.reinforce_plus_plus_baseline,
        lambda groups: loop_over_batch(loop_center(groups)),
    ),
    "maxrl": (advantages.maxrl, loop_maxrl),
    "best_of_group": (advantages.best_of_group, loop_best_of_group),
}
over_grouped = pytest.mark.parametrize("ours, loop", GROUPED.values(), ids=GROUPED)

RAGGED = [
    [0.0, 1.0, 0.0],
    [1.0],
    [0.0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95],
    [0.7, 0.7, 0.7],
    [0.25, 0.5],
    [0.0, 0.0, 0.0, 0.0],
]


def padded(groups, size, garbage=0.0):
    """(reward_PG, mask_PG) with the samples of each group spread over its row."""
    rng = np.random.default_rng(0)
    reward, mask = np.full((len(groups), size), garbage, np.float32), np.zeros((len(groups), size), bool)
    for p, group in enumerate(groups):
        where = np.sort(rng.permutation(size)[: len(group)])
        reward[p, where], mask[p, where] = group, True
    return reward, mask


def flat(groups):
    return np.array([x for group in groups for x in group], np.float32)


def as_floats(groups):
    """The float32 values that the functions get, as Python floats."""
    return [[float(np.float32(x)) for x in group] for group in groups]


def assert_close(got, wanted):
    """To 1e-6 of the largest advantage, because those near 0 are differences."""
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max(initial=1e-30))


@over_grouped
@pytest.mark.parametrize("offset", (0.0, 100.0))
def test_ragged_groups_equal_the_loop(ours, loop, offset):
    groups = as_floats([[x + offset for x in group] for group in RAGGED])
    reward, mask = padded(groups, 9)
    got = np.asarray(ours(reward, mask))
    assert got.dtype == np.float32 and not got[~mask].any()
    assert_close(got[mask], flat(loop(groups)))


@over_grouped
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38, -7.0))
def test_samples_outside_the_mask_never_matter(ours, loop, garbage):
    clean, mask = padded(RAGGED, 9)
    np.testing.assert_array_equal(ours(padded(RAGGED, 9, garbage)[0], mask), ours(clean, mask))


@over_grouped
def test_a_full_mask_equals_no_mask(ours, loop):
    reward = np.random.default_rng(1).random((4, 5)).astype(np.float32)
    np.testing.assert_array_equal(ours(reward, np.ones((4, 5), bool)), ours(reward))


@over_grouped
def test_an_empty_batch_gives_zeros(ours, loop):
    np.testing.assert_array_equal(ours(np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool)), np.zeros((2, 3)))


@over_grouped
def test_no_intermediate_value_is_nan(ours, loop):
    """jax.debug_nans also raises at a 0/0 that a `where` hides."""
    reward, mask = padded([[0.0, 0.0], [1.0], []], 3)
    with jax.debug_nans(True):
        assert not np.asarray(ours(reward, mask))[[0, 2]].all()


@over_grouped
@pytest.mark.parametrize("traced", (False, True))
@pytest.mark.parametrize("size", (None, 8))
def test_rows_may_be_in_any_order(ours, loop, traced, size):
    groups = as_floats(RAGGED)
    wanted = flat(loop(groups))
    reward = flat(groups)
    group = np.repeat([7, -3, 2**30, 0, 5, 1], [len(g) for g in groups]).astype(np.int32)
    order = np.random.default_rng(2).permutation(len(reward))
    function = functools.partial(advantages.by_group, ours, size=size)
    got = (jax.jit(function) if traced else function)(jnp.asarray(reward[order]), jnp.asarray(group[order]))
    assert got.shape == reward.shape and got.dtype == jnp.float32
    assert_close(got, wanted[order])


def test_all_bits_of_64_bit_ids_count():
    group = np.array([1, 1 + 2**40, 1, 1 + 2**40])
    got = advantages.by_group(advantages.center, np.array([0.0, 4.0, 2.0, 8.0]), group)
    np.testing.assert_array_equal(got, [-1, -2, 1, 2])


def test_a_group_larger_than_size_is_rejected_or_gives_nan():
    reward, group = np.array([1.0, 0.0, 1.0], np.float32), np.array([0, 0, 0], np.int32)
    with pytest.raises(ValueError, match="size must be at least the rows of the largest group, 3; got 2"):
        advantages.by_group(advantages.center, reward, group, size=2)
    traced = jax.jit(lambda r, g: advantages.by_group(advantages.center, r, g, size=2))
    np.testing.assert_array_equal(np.isnan(traced(reward, group)), [False, False, True])


def test_invalid_arguments_of_by_group_are_rejected():
    reward = np.ones(3, np.float32)
    ids = np.zeros(3, np.int32)
    cases = (
        ((reward, ids[:2]), {}, ValueError, r"group_B must have shape \[3\].*got \[2\]"),
        ((reward, reward), {}, TypeError, r"group_B must be an array \[B\] of integers; got float32 \[3\]"),
        ((reward, [0, 0, 0]), {}, TypeError, r"group_B must be an array \[B\] of integers; got list"),
        (([1.0], ids), {}, TypeError, r"reward must be an array \[B\] of real numbers; got list"),
        ((reward[None, None], ids), {}, ValueError, r"reward must be an array \[B\].*got float32 \[1, 1, 3\]"),
        ((reward, ids), {"size": 0}, ValueError, "size must be at least 1; got 0"),
        ((reward, ids), {"size": 1.0}, TypeError, "size must be a Python int; got float"),
    )
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            advantages.by_group(advantages.center, *arguments, **options)


@over_grouped
def test_invalid_masks_are_rejected(ours, loop):
    reward = np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"mask_PG must be a bool array \[P, G\]; got float32 \[2, 3\]"):
        ours(reward, reward)
    with pytest.raises(ValueError, match=r"mask_PG must have shape \[2, 3\], as reward_PG has; got \[2, 2\]"):
        ours(reward, np.ones((2, 2), bool))


def test_equal_rewards_and_one_lower():
    """Rewards [0, .95 x 7]: the variance of the seven equal ones must not be rounding error."""
    reward = np.array([[0.0] + [0.95] * 7])
    np.testing.assert_allclose(advantages.leave_one_out(reward)[0], [-0.95] + [0.95 / 7] * 7, rtol=1e-6)
    np.testing.assert_allclose(advantages.standardize(reward, eps=0.0)[0], [-7 / 8**0.5] + [1 / 8**0.5] * 7, rtol=1e-6)


@pytest.mark.parametrize("function", (advantages.reinforce_plus_plus, advantages.reinforce_plus_plus_baseline))
def test_the_batch_statistics_equal_the_loop(function):
    reward = np.random.default_rng(3).random((6, 4)).astype(np.float32)
    got = np.asarray(function(reward, ddof=0, eps=0.0))
    np.testing.assert_allclose([got.mean(), got.std()], [0, 1], atol=1e-6)
    assert abs(got.std(-1) - 1).min() > 1e-3  # differs from the groups' statistics
    np.testing.assert_allclose(function(reward[::-1])[::-1], function(reward), rtol=1e-6, atol=1e-6)


def test_constant_groups_give_exact_zeros_with_batch_statistics():
    """But not for REINFORCE++ without a baseline, which ignores groups."""
    reward = np.array([[0.1] * 10, [0.0, 1.0] * 5, [0.7] * 10], np.float32)
    got = np.asarray(advantages.reinforce_plus_plus_baseline(reward))
    assert not got[[0, 2]].any() and got[1].all()
    assert np.asarray(advantages.reinforce_plus_plus(reward)).all()


def test_gdpo_equals_the_loop():
    rng = np.random.default_rng(4)
    reward = rng.random((5, 6, 3)).astype(np.float32)
    reward[..., 1] *= 300
    reward[2, :, 2] = 0.1
    reward[3] = 0.7
    mask = rng.random((5, 6)) < 0.8
    weights = (1.0, 0.5, -2.0)
    summed = [[0.0] * int(row.sum()) for row in mask]
    for r, weight in enumerate(weights):
        groups = [[float(x) for x in row[keep]] for row, keep in zip(reward[..., r], mask, strict=True)]
        for total, group in zip(summed, loop_standardize(groups), strict=True):
            total[:] = [t + weight * a for t, a in zip(total, group, strict=True)]
    got = np.asarray(jax.jit(functools.partial(advantages.gdpo, weights=weights))(reward, mask))
    assert_close(got[mask], flat(loop_over_batch(summed)))
    assert not got[~mask].any() and not got[3].any()


def test_gdpo_distinguishes_groups_with_equal_standardized_sums():
    """One reward varies in the first group, both in the second: GDPO differs where standardized sums do not."""
    reward = np.array([[[0, 1], [1, 1]], [[0, 0], [1, 1]]], np.float32)
    summed = np.asarray(advantages.standardize(reward.sum(-1)))
    np.testing.assert_allclose(summed[0], summed[1], rtol=1e-5)
    got = np.asarray(advantages.gdpo(reward))
    np.testing.assert_allclose(got[1], 2 * got[0], rtol=1e-5)


def test_gdpo_accepts_rows_in_any_order():
    reward = np.random.default_rng(5).random((3, 4, 2)).astype(np.float32)
    order = np.random.default_rng(6).permutation(12)
    group = np.repeat(np.arange(3), 4)
    got = advantages.by_group(advantages.gdpo, reward.reshape(12, 2)[order], group[order], size=4)
    np.testing.assert_allclose(got, np.asarray(advantages.gdpo(reward)).reshape(-1)[order], rtol=1e-6, atol=1e-6)


def test_invalid_arguments_of_gdpo_are_rejected():
    reward = np.ones((2, 3, 2), np.float32)
    for weights in ((1.0,), (1.0, float("nan")), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="weights must be 2 finite numbers, one for each reward; got"):
            advantages.gdpo(reward, weights=weights)
    with pytest.raises(TypeError, match=r"weights must be a Python number.*got str"):
        advantages.gdpo(reward, weights=("1", 2.0))
    with pytest.raises(ValueError, match=r"reward_PGR must be an array \[P, G, R\].*got float32 \[2, 3\]"):
        advantages.gdpo(reward[..., 0])


def test_maxrl_of_a_group_with_one_success():
    """One success of four gets 3 and the failures -1; with all or none, every advantage is 0."""
    reward = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    np.testing.assert_allclose(advantages.maxrl(reward), [[3, -1, -1, -1], [0] * 4, [0] * 4, [1, 1, -1, -1]])


@pytest.mark.parametrize("G", (2, 3, 4))
@pytest.mark.parametrize("p", (0.1, 0.5, 0.85))
def test_the_expectation_of_maxrl_is_the_gradient_of_a_truncated_log_likelihood(G, p):
    """A sample succeeds with probability p = sigmoid(x); sum over all 2^G groups, weighted by probability.

    The gradient by x of a sample's log-probability is r - p, and that of Σ_k (1 - (1 - p)^k) / k for k < G is
    Σ_k (1 - p)^(k-1) p (1 - p).
    """
    expected = 0.0
    for group in itertools.product((0.0, 1.0), repeat=G):
        probability = math.prod(p if r else 1 - p for r in group)
        advantage = np.asarray(advantages.maxrl(np.array([group])), np.float64)[0]
        expected += probability * sum(a * (r - p) for a, r in zip(advantage, group, strict=True)) / G
    wanted = sum((1 - p) ** (k - 1) for k in range(1, G)) * p * (1 - p)
    assert expected == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("G", (2, 3))
def test_the_expectation_of_best_of_group_is_the_gradient_of_the_best_reward(G):
    """Three outcomes of a softmax policy, all 3^G groups in float64; the other side by differences."""
    rewards, logits = np.array([0.0, 0.4, 1.0]), np.array([0.3, 0.1, -0.8])

    def probabilities(logits):
        p = np.exp(logits - logits.max())
        return p / p.sum()

    def best(logits):
        p = probabilities(logits)
        groups = itertools.product(range(3), repeat=G)
        return math.fsum(math.prod(p[i] for i in group) * max(rewards[list(group)]) for group in groups)

    p, expected = probabilities(logits), np.zeros(3)
    for group in itertools.product(range(3), repeat=G):
        advantage = np.asarray(advantages.best_of_group(rewards[None, list(group)]), np.float64)[0]
        for a, i in zip(advantage, group, strict=True):
            expected += math.prod(p[j] for j in group) * a * (np.eye(3)[i] - p)
    step = 1e-6 * np.eye(3)
    wanted = [(best(logits + step[i]) - best(logits - step[i])) / 2e-6 for i in range(3)]
    np.testing.assert_allclose(expected, wanted, atol=1e-7)


def loop_opo(groups, lengths):
    pairs = list(zip(groups, lengths, strict=True))
    means = [math.fsum(r * n for r, n in zip(g, ns, strict=True)) / sum(ns) for g, ns in pairs]
    return [[r - mean for r in group] for group, mean in zip(groups, means, strict=True)]


@pytest.mark.parametrize("offset", (0.0, 100.0))
def test_opo_equals_the_loop(offset):
    groups = as_floats([[x + offset for x in group] for group in RAGGED])
    lengths = [[1 + (3 * i + p) % 7 for i in range(len(group))] for p, group in enumerate(groups)]
    (reward, mask), (length, _) = padded(groups, 9, np.nan), padded(lengths, 9, np.nan)
    for compiled in (advantages.opo, jax.jit(advantages.opo)):
        got = np.asarray(compiled(reward, mask, length_PG=length))
        assert got.dtype == np.float32 and not got[~mask].any()
        assert_close(got[mask], flat(loop_opo(groups, lengths)))
    constant = [p for p, group in enumerate(groups) if len(set(group)) == 1]
    assert len(constant) == 3 and not got[constant].any(), "exact zeros"


def test_opo_minimizes_the_variance_of_a_gradient_whose_square_grows_with_the_length():
    """One prompt, in float64: among baselines b, E[l (R - b)²] is least at OPO's."""
    reward, length = np.array([1.0, 0.0, 0.5, 0.0]), np.array([3.0, 10.0, 6.0, 1.0])
    baseline = reward[0] - float(advantages.opo(reward[None], length_PG=length[None])[0, 0])
    at = [float((length * (reward - b) ** 2).sum()) for b in (baseline - 0.01, baseline, baseline + 0.01)]
    assert at[1] < min(at[0], at[2])


def test_opo_with_equal_lengths_is_center_and_without_any_is_an_error():
    reward = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    same = np.full((3, 4), 5)
    np.testing.assert_allclose(advantages.opo(reward, length_PG=same), advantages.center(reward), atol=1e-6)
    for length, error, message in (
        (None, TypeError, r"^length_PG must be an array \[P, G\] of real numbers; got NoneType"),
        (same[:, :2], ValueError, r"^length_PG must have shape \[3, 4\], as reward_PG has; got \[3, 2\]"),
    ):
        with pytest.raises(error, match=message):
            advantages.opo(reward, length_PG=length)


@pytest.mark.parametrize("G", (2, 3))
def test_baselines_that_contain_the_sample_bias_the_gradient_as_they_say(G):
    """Three outcomes of a softmax policy, each of one token, all 3^G groups in float64; ∇E[R] is p (R - E[R])."""
    rewards, lengths, p = np.array([0.0, 0.4, 1.0]), np.array([1.0, 4.0, 8.0]), np.array([0.45, 0.4, 0.15])
    group = np.array([*itertools.product(range(3), repeat=G)])
    reward, score, probability = rewards[group], np.eye(3)[group] - p, p[group].prod(1)
    norm = (score**2).sum(-1)
    of_one_token = advantages.otb(reward, length_PG=np.ones(reward.shape), score_norm_PGN=norm[..., None])

    def expectation(advantage):
        return np.einsum("n,ng,ngk->k", probability, np.asarray(advantage, np.float64), score) / G

    wanted = p * (rewards - p @ rewards)
    np.testing.assert_allclose(expectation(advantages.leave_one_out(reward)), wanted, rtol=1e-6)
    opo = expectation(advantages.opo(reward, length_PG=lengths[group]))
    assert opo @ wanted / np.linalg.norm(opo) / np.linalg.norm(wanted) == pytest.approx(
        {2: 0.968, 3: 0.979}[G], abs=1e-3
    )
    share = np.linalg.norm(expectation(of_one_token[..., 0])) / np.linalg.norm((G - 1) / G * wanted)
    assert 0.8 <= share <= 0.95


def loop_otb(groups, norms):
    """For each group and sample, the advantages of its tokens."""
    wanted = []
    for group, of_tokens in zip(groups, norms, strict=True):
        weights = [list(itertools.accumulate(norm)) for norm in of_tokens]
        alive = [[i for i, norm in enumerate(of_tokens) if len(norm) > t] for t in range(max(map(len, of_tokens)))]
        baselines = [
            math.fsum(weights[i][t] * group[i] for i in rows) / math.fsum(weights[i][t] for i in rows)
            for t, rows in enumerate(alive)
        ]
        wanted.append([[r - baselines[t] for t in range(len(of_tokens[i]))] for i, r in enumerate(group)])
    return wanted


@pytest.mark.parametrize("offset", (0.0, 100.0))
def test_otb_equals_the_loop(offset):
    rng = np.random.default_rng(1)
    groups = as_floats([[x + offset for x in group] for group in RAGGED])
    norms = [[rng.uniform(0, 2, 1 + (3 * i + p) % 7).tolist() for i in range(len(g))] for p, g in enumerate(groups)]
    (reward, mask), (length, _) = padded(groups, 9, np.nan), padded([[*map(len, of)] for of in norms], 9, np.nan)
    norm = np.full((*mask.shape, 8), np.nan)
    norm[mask] = [np.pad(tokens, (0, 8 - len(tokens)), constant_values=np.nan) for of in norms for tokens in of]
    there = mask[..., None] & (np.arange(8) < np.nan_to_num(length)[..., None])
    for compiled in (advantages.otb, jax.jit(advantages.otb)):
        got = np.asarray(compiled(reward, mask, length_PG=length, score_norm_PGN=norm))
        assert got.dtype == np.float32 and not got[~there].any()
        assert_close(got[there], flat([of_token for of in loop_otb(groups, norms) for of_token in of]))
    constant = [p for p, group in enumerate(groups) if len(set(group)) == 1]
    assert len(constant) == 3 and not got[constant].any(), "exact zeros"


def test_otb_minimizes_the_variance_of_each_tokens_part():
    """In float64: among baselines b of a token, E[W (R - b)²] is least at OTB's, if W is the squared gradient."""
    reward, norm = np.array([1.0, 0.0, 0.5]), np.array([[0.5, 1.0], [1.5, 0.1], [0.2, 0.9]])
    given = {"length_PG": np.full((1, 3), 2), "score_norm_PGN": norm[None]}
    baselines = reward[0] - np.asarray(advantages.otb(reward[None], **given), np.float64)[0, 0]
    for weight, baseline in zip(norm.cumsum(1).T, baselines, strict=True):
        at = [float((weight * (reward - b) ** 2).sum()) for b in (baseline - 0.01, baseline, baseline + 0.01)]
        assert at[1] < min(at[0], at[2])


def test_otb_with_equal_norms_and_lengths_is_center_and_where_nothing_is_uncertain_too():
    reward = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    for norm in (0.7, 0.0):
        given = {"length_PG": np.full((3, 4), 5), "score_norm_PGN": np.full((3, 4, 5), norm)}
        wanted = np.broadcast_to(np.asarray(advantages.center(reward))[..., None], (3, 4, 5))
        np.testing.assert_allclose(advantages.otb(reward, **given), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"score_norm_PGN": None},
            TypeError,
            r"^score_norm_PGN must be an array \[P, G, N\] of real numbers; got None",
        ),
        ({"length_PG": None}, TypeError, r"^length_PG must be an array \[P, G\] of real numbers; got NoneType"),
        ({"score_norm_PGN": np.ones((3, 2, 5))}, ValueError, r"^score_norm_PGN\[\.\.\., 0\] must have shape \[3, 4\]"),
    ],
)
def test_otb_without_norms_of_its_tokens_is_an_error(changed, error, message):
    given = {"length_PG": np.full((3, 4), 5), "score_norm_PGN": np.ones((3, 4, 5))}
    with pytest.raises(error, match=message):
        advantages.otb(np.ones((3, 4)), **given | changed)


def test_maxrl_rejects_negative_rewards():
    """A length penalty would give such rewards. Samples outside the mask may have any."""
    reward = np.array([[1.0, -1.0], [1.0, 0.0]], np.float32)
    with pytest.raises(ValueError, match=r"reward_PG must not be negative, best 0 or 1, for maxrl; got -1\.0"):
        advantages.maxrl(reward)
    np.testing.assert_array_equal(jax.jit(advantages.maxrl)(reward), [[np.nan, np.nan], [1, -1]])
    np.testing.assert_array_equal(advantages.maxrl(reward, reward >= 0), [[0, 0], [1, -1]])


@settings(max_examples=25, deadline=None)
@given(
    hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 2.0**40, width=32)),
    hnp.arrays(bool, (3, 4)),
)
def test_finite_rewards_with_any_mask_give_no_nan(reward, mask):
    for ours, _ in GROUPED.values():
        got = np.asarray(ours(reward, mask))
        assert np.isfinite(got).all() and not got[~mask].any()
    assert np.isfinite(advantages.gdpo(np.stack([reward, -reward], -1), mask, eps=0.0)).all()
    bounded = np.asarray(advantages.maxrl(reward, mask))
    assert bounded.min() >= -1.0001 and bounded.max() <= 3.001


PAGE = (Path(__file__).parents[2] / "docs" / "advantages.md").read_text(encoding="utf-8")


def test_the_example_in_the_docs_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    exec(compile(example, "docs/advantages.md", "exec"), scope)
    np.testing.assert_allclose(scope["advantage"], [0.5**0.5, -1, -(0.5**0.5), 1, 0], atol=1e-5)
    np.testing.assert_allclose(scope["no_std"], [0.5, -0.5, -0.5, 0.5, 0], atol=1e-7)


def test_the_docs_list_every_function_and_correct_numbers():
    for module in (advantages, shaping):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                assert f"`{name}" in PAGE or f".{name}(" in PAGE, name
    rows = re.findall(r"^\| `(\w+)` \| (-[\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for name, loser, winner in rows:
        got = getattr(advantages, name)(np.array([[0, 1, 1, 1]]))[0]
        np.testing.assert_allclose(got, [float(loser)] + [float(winner)] * 3, atol=5e-4)
