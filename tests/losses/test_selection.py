"""Selections of tokens against loops in float64, and in an experiment: exact under any split into microbatches."""

import functools
import math

import jax
import numpy as np
import pytest
from loss_cases import MASKS, Packed, case

from gspax.losses import selection
from gspax.losses.selection import Minibatch

KEY = jax.random.key(3)


def minibatch(mask, seed=0):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, mask.shape)
    arrays = logp, logp + 0.3 * rng.standard_normal(mask.shape), rng.exponential(1.0, mask.shape)
    advantage = 2 * rng.standard_normal((len(mask), 1)) * np.ones(mask.shape)
    return Minibatch(*(x.astype(np.float32) for x in (*arrays, advantage)), mask, KEY)


def fill(x, garbage):
    floats = (np.where(x.mask_BT, value, np.float32(garbage)) for value in x[:4])
    return Minibatch(*floats, x.mask_BT, x.key)


def kept(x, tokens):
    weight = np.zeros(x.mask_BT.shape, np.float32)
    for b, t in tokens:
        weight[b, t] = 1
    return weight


def loop_top_entropy(x, share):
    tokens = sorted(map(tuple, np.argwhere(x.mask_BT)), key=lambda at: -x.entropy_BT[at])
    return kept(x, tokens[: max(1, round(share * len(tokens)))])


def loop_second_moment(x, threshold):
    """As in the paper: the largest are left out, one after the other, until the mean of the others is below."""
    square = {
        tuple(at): float(x.old_logp_BT[tuple(at)] - x.sampler_logp_BT[tuple(at)]) ** 2 for at in np.argwhere(x.mask_BT)
    }
    tokens = sorted(square, key=lambda at: -square[at])
    while len(tokens) > 1 and math.fsum(square[at] for at in tokens) / len(tokens) >= threshold:
        tokens.pop(0)
    return kept(x, tokens)


def covariances(x):
    tokens = [tuple(at) for at in np.argwhere(x.mask_BT)]
    means = [math.fsum(float(y[at]) for at in tokens) / max(len(tokens), 1) for y in (x.advantage_BT, x.old_logp_BT)]
    return {at: (x.advantage_BT[at] - means[0]) * (x.old_logp_BT[at] - means[1]) for at in tokens}


def loop_top_cov(x, share):
    cov = covariances(x)
    return kept(x, sorted(cov, key=lambda at: -cov[at])[: max(1, round(share * len(cov)))])


LOOPS = {
    "top_cov": (selection.top_cov, {"share": 0.2}, loop_top_cov),
    "top_entropy": (selection.top_entropy, {"share": 0.3}, loop_top_entropy),
    "second_moment": (selection.second_moment, {"threshold": 0.04}, loop_second_moment),
}
FUNCTIONS = {
    **{name: functools.partial(function, **options) for name, (function, options, _) in LOOPS.items()},
    "clip_cov": functools.partial(selection.clip_cov, share=0.1, low=0.5, high=4.0),
}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", LOOPS)
def test_weights_equal_a_loop(name, mask):
    function, options, loop = LOOPS[name]
    x = minibatch(mask)
    wanted = loop(x, **options)
    for compiled in (function, jax.jit(function, static_argnames=tuple(options))):
        got = np.asarray(compiled(x, **options))
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wanted)
    if mask.sum() > 8:
        assert 0 < wanted.sum() < mask.sum()


@pytest.mark.parametrize("share", (0.01, 0.1, 0.5))
def test_clip_cov_draws_a_share_between_the_bounds(share):
    x = minibatch(MASKS["full"])
    between = {at for at, value in covariances(x).items() if 0.5 < value < 4}
    assert 10 < len(between) < 40
    drawn = []
    for seed in range(5):
        got = np.asarray(selection.clip_cov(x._replace(key=jax.random.key(seed)), share=share, low=0.5, high=4.0))
        assert not got[~x.mask_BT].any()
        zeros = {tuple(at) for at in np.argwhere((got == 0) & x.mask_BT)}
        assert zeros <= between and len(zeros) == min(max(1, round(share * 64)), len(between))
        drawn.append(zeros)
    assert share == 0.5 or len(set(map(frozenset, drawn))) > 1, "another key draws others"


def test_second_moment_keeps_the_smallest_alone_where_none_is_below():
    """And all where all are: the threshold is compared with the mean, not with single squares."""
    mask = np.ones((1, 4), bool)
    x = minibatch(mask)._replace(
        old_logp_BT=np.array([[2, -1, 3, 4]], np.float32), sampler_logp_BT=np.zeros((1, 4), np.float32)
    )
    for threshold, wanted in ((0.5, [0, 1, 0, 0]), (1.1, [0, 1, 0, 0]), (2.6, [1, 1, 0, 0]), (8.0, [1, 1, 1, 1])):
        np.testing.assert_array_equal(selection.second_moment(x, threshold=threshold)[0], wanted)


@over_functions
@pytest.mark.parametrize("garbage", (np.nan, np.inf, 3e38))
def test_padding_never_matters(name, garbage):
    for mask in (MASKS["some_empty"], MASKS["all_empty"]):
        x = minibatch(mask)
        got = np.asarray(FUNCTIONS[name](fill(x, garbage)))
        np.testing.assert_array_equal(got, FUNCTIONS[name](x))
        assert not got[~mask].any()


@pytest.mark.parametrize("name", LOOPS)
def test_packed_rows_and_rows_in_another_order_have_the_same_weights(name):
    x = minibatch(MASKS["ragged"])
    packed = Packed(case(x.mask_BT, 0.3), sequences_per_row=4)
    got = FUNCTIONS[name](Minibatch(*map(packed.pack, x[:5]), KEY))
    np.testing.assert_array_equal(packed.unpack(got), FUNCTIONS[name](x))


@over_functions
def test_eight_devices_equal_one(name):
    x = minibatch(MASKS["some_empty"])
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    sharded = Minibatch(*(jax.device_put(value, rows) for value in x[:5]), KEY)
    np.testing.assert_array_equal(jax.jit(FUNCTIONS[name])(sharded), FUNCTIONS[name](x))


def test_invalid_arguments_are_rejected():
    x = minibatch(MASKS["ragged"])
    for function, options, error, message in (
        (selection.top_entropy, {"share": 0.0}, ValueError, r"^share must be above 0 and at most 1; got 0\.0"),
        (selection.top_entropy, {"share": "1"}, TypeError, r"^share must be a Python number.*got str"),
        (selection.second_moment, {"threshold": 0.0}, ValueError, r"^threshold must be finite and above 0; got 0\.0"),
        (selection.clip_cov, {"low": 5.0}, ValueError, r"^low must be below high; got 5\.0 and 5\.0"),
    ):
        with pytest.raises(error, match=message):
            function(x, **options)


def test_the_share_is_of_the_whole_minibatch():
    """Rows one by one would each keep their own share."""
    x = minibatch(MASKS["full"])
    whole = np.asarray(selection.top_entropy(x, share=0.25))
    rows = [selection.top_entropy(Minibatch(*(y[b : b + 1] for y in x[:5]), KEY), share=0.25) for b in range(8)]
    assert {float(row.sum()) for row in rows} == {2.0} and len({float(row.sum()) for row in whole}) > 1
    assert whole.sum() == 16
