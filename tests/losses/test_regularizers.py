"""Regularizers against loops in float64, their gradients against the papers' formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import expert_load
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pair_cases import MASKS, held, pair

from gspax import losses
from gspax.losses import kl, regularizers

L, B, T, E, A = 3, 8, 9, 5, 2
over_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def routers(seed=0, scale=1.0):
    """(logits, probabilities, ids of the best A experts)."""
    logits = (scale * np.random.default_rng(seed).standard_normal((L, B, T, E))).astype(np.float32)
    prob = np.asarray(jax.nn.softmax(logits))
    return logits, prob, np.argsort(-prob, axis=-1)[..., :A].astype(np.int32)


def load_of(expert, mask):
    return np.asarray(expert_load(jnp.where(mask[None, :, :, None], expert, E), E))


def loop_load_balance(prob, expert, mask):
    """E Σ_e f_e P_e by layer, over all tokens of the mask; and f."""
    values, shares = [], []
    for layer in range(L):
        tokens = [(b, t) for b in range(B) for t in range(T) if mask[b, t]]
        f = [sum(int(e in expert[layer, b, t]) for b, t in tokens) / (A * max(len(tokens), 1)) for e in range(E)]
        p = [math.fsum(float(prob[layer, b, t, e]) for b, t in tokens) / max(len(tokens), 1) for e in range(E)]
        values.append(E * math.fsum(x * y for x, y in zip(f, p, strict=True)))
        shares.append(f)
    return math.fsum(values) / L, np.array(shares)


def by_token(value_BT, mask_BT, segment_BT=None):
    return jnp.sum(jnp.where(mask_BT, value_BT, 0), -1), jnp.sum(mask_BT, -1, dtype=jnp.float32)


def gradient_and_terms(function, x, *rest, **options):
    def numerator(x):
        terms = function(x, *rest, **options)
        return terms.value.sum(), terms

    return jax.device_get(jax.jit(jax.grad(numerator, has_aux=True))(x))


@over_masks
def test_load_balance_equals_the_papers_formula(mask):
    _, prob, expert = routers()
    gradient, terms = gradient_and_terms(
        regularizers.load_balance, prob, load_of(expert, mask), mask, aggregate=by_token
    )
    wanted, share = loop_load_balance(prob, expert, mask)
    loss, metrics = losses.reduce(terms)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert metrics.keys() == {"load_balance"} and metrics["load_balance"] == pytest.approx(wanted, rel=1e-6)
    by_hand = E * share[:, None, None, :] * mask[None, :, :, None] / L
    np.testing.assert_allclose(gradient, np.broadcast_to(by_hand, gradient.shape), rtol=1e-6, atol=1e-9)


def test_load_balance_is_1_when_balanced_and_larger_when_routers_agree():
    mask = MASKS["full"]
    uniform = np.full((L, B, T, E), 1 / E, np.float32)
    assert losses.reduce(regularizers.load_balance(uniform, np.ones((L, E), np.float32), mask))[0] == pytest.approx(1)
    one = np.zeros((L, B, T, E), np.float32)
    one[..., 0] = 1
    load = np.zeros((L, E), np.float32)
    load[:, 0] = E
    assert losses.reduce(regularizers.load_balance(one, load, mask))[0] == pytest.approx(E)


def test_the_next_coefficient_steps_toward_the_target_within_its_bounds():
    """c + δ below the target, c - δ above it, from 0 to the highest."""
    coefficient, wanted = np.float32(0.004), 0.004
    for entropy in (0.1, 0.19, 0.3, 0.2, 0.25, 0.1, 0.1, 0.1, 0.1):
        wanted = min(max(wanted + (0.003 if entropy < 0.2 else -0.003), 0.0), 0.01)
        coefficient = regularizers.next_coefficient(
            coefficient, np.float32(entropy), target=0.2, step=0.003, highest=0.01
        )
        assert coefficient.dtype == jnp.float32 and not coefficient.weak_type
        np.testing.assert_allclose(coefficient, wanted, atol=1e-7)
    assert wanted == 0.01


@over_masks
@pytest.mark.parametrize("scale", (0.3, 30.0))
def test_log_ratio_square_equals_a_loop(mask, scale):
    """Held within ±25 in value and gradient."""
    x = pair(mask, scale)
    gradient, terms = gradient_and_terms(regularizers.log_ratio_square, x.logp, x.other, mask, aggregate=by_token)
    value, slope = np.zeros(B), np.zeros((B, T))
    for b, tokens, log_ratios in x.sequences():
        value[b] = math.fsum(held(r) ** 2 for r in log_ratios)
        slope[b, tokens] = [2 * held(r) for r in log_ratios]
    np.testing.assert_allclose(terms.value, value, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5)
    mean = value.sum() / max(mask.sum(), 1)
    assert losses.reduce(terms)[1]["log_ratio_square"] == pytest.approx(mean, rel=1e-5)


@over_masks
@pytest.mark.parametrize("scale", (0.3, 30.0))
def test_log_ratio_size_equals_a_loop(mask, scale):
    """Weighted, held within ±25; what stands outside the mask never matters."""
    x, weight = pair(mask, scale), (np.arange(B * T).reshape(B, T) % 3).astype(np.float32)
    value, slope = np.zeros(B), np.zeros((B, T))
    for b, tokens, log_ratios in x.sequences():
        value[b] = math.fsum(weight[b, t] * abs(held(r)) for t, r in zip(tokens, log_ratios, strict=True))
        slope[b, tokens] = [weight[b, t] * np.sign(r) for t, r in zip(tokens, log_ratios, strict=True)]
    for y, w in ((x, weight), (x.fill(np.nan), np.where(mask, weight, np.float32(np.nan)))):
        gradient, terms = gradient_and_terms(regularizers.log_ratio_size, y.logp, y.other, w, mask, aggregate=by_token)
        np.testing.assert_allclose(terms.value, value, rtol=1e-5)
        np.testing.assert_allclose(gradient, slope, rtol=1e-6)
    assert losses.reduce(terms)[1]["kl_cov"] == pytest.approx(value.sum() / max(mask.sum(), 1), rel=1e-5)


@over_masks
@pytest.mark.parametrize("scale", (1.0, 25.0))
def test_router_z_equals_the_papers_formula(mask, scale):
    logits, _, _ = routers(scale=scale)
    gradient, terms = gradient_and_terms(regularizers.router_z, logits, mask)
    value, slope = np.zeros(B), np.zeros(logits.shape)
    for b in range(B):
        tokens = [t for t in range(T) if mask[b, t]]
        for layer in range(L):
            for t in tokens:
                x = [float(v) for v in logits[layer, b, t]]
                z = max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x))
                value[b] += z * z / (L * len(tokens))
                slope[layer, b, t] = [2 * z * math.exp(v - z) / (L * len(tokens)) for v in x]
    np.testing.assert_allclose(terms.value, value, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=2e-5, atol=1e-6 * np.abs(slope).max())
    np.testing.assert_array_equal(terms.weight, mask.any(-1))


@over_masks
def test_entropy_bonus_equals_a_loop(mask):
    entropy = np.random.default_rng(1).exponential(1.0, mask.shape).astype(np.float32)
    gradient, terms = gradient_and_terms(regularizers.entropy_bonus, entropy, mask)
    rows = [[float(h) for h in row[keep]] for row, keep in zip(entropy, mask, strict=True)]
    np.testing.assert_allclose(terms.value, [-math.fsum(r) / max(len(r), 1) for r in rows], rtol=1e-6)
    wanted = -1.0 * mask / np.maximum(mask.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    everything = [h for row in rows for h in row]
    metric = losses.reduce(terms)[1]["entropy_bonus"]
    assert metric == pytest.approx(math.fsum(everything) / max(len(everything), 1), rel=1e-6)


def test_the_entropy_bonus_raises_the_entropy():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((4, 5, 6)), jnp.float32)
    tokens, mask = jnp.zeros((4, 5), jnp.int32), np.ones((4, 5), bool)
    mask[:, 0] = False

    def loss(logits):
        _, entropy = losses.chunked_token_logp(lambda x: x, logits, tokens, chunk=8)
        nothing = losses.Terms(jnp.zeros(4), jnp.ones(4), {})
        terms = kl.add_penalty(nothing, regularizers.entropy_bonus(entropy, mask), coefficient=0.5)
        return losses.reduce(terms)

    gradient, metrics = jax.grad(loss, has_aux=True)(logits)
    assert loss(logits - gradient)[1]["entropy_bonus"] > metrics["entropy_bonus"]


def members():
    logits, prob, expert = routers()
    entropy = np.random.default_rng(1).exponential(1.0, (B, T)).astype(np.float32)
    load = load_of(expert, MASKS["some_empty"])
    return {
        "entropy_bonus": (regularizers.entropy_bonus, entropy),
        "load_balance": (lambda x, mask: regularizers.load_balance(x, load, mask), prob),
        "router_z": (regularizers.router_z, logits),
    }


over_members = pytest.mark.parametrize("name", ("entropy_bonus", "load_balance", "router_z"))


@over_members
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38))
def test_padding_never_matters(name, garbage):
    function, x = members()[name]
    mask = MASKS["some_empty"]
    keep = mask if x.ndim == 2 else mask[None, :, :, None]
    got = gradient_and_terms(function, np.where(keep, x, np.float32(garbage)), mask)
    wanted = gradient_and_terms(function, x, mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not got[0][~np.broadcast_to(keep, x.shape)].any()


@over_members
def test_row_order_and_microbatches_change_nothing(name):
    """Each microbatch gets the expert load of the batch."""
    function, x = members()[name]
    mask = MASKS["some_empty"]
    axis = 0 if x.ndim == 2 else 1
    whole_gradient, whole = gradient_and_terms(function, x, mask)
    order = np.random.default_rng(0).permutation(B)
    parts = []
    for index in (order[:3], order[3:4], order[4:]):
        parts.append(gradient_and_terms(function, np.take(x, index, axis), mask[index]))
    gradient = np.concatenate([g for g, _ in parts], axis)
    terms = jax.tree.map(lambda *leaves: np.concatenate(leaves), *[t for _, t in parts])
    np.testing.assert_allclose(gradient, np.take(whole_gradient, order, axis), rtol=1e-5, atol=1e-8)
    for a, b in zip(jax.tree.leaves(losses.reduce(terms)), jax.tree.leaves(losses.reduce(whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@over_members
def test_no_gradient_flows_through_the_metric(name):
    function, x = members()[name]
    gradient = jax.grad(lambda x: function(x, MASKS["some_empty"]).metrics[name].part.sum())(jnp.asarray(x))
    assert not np.asarray(gradient).any()


@over_members
def test_a_nan_inside_the_mask_propagates(name):
    function, x = members()[name]
    x = x.copy()
    x[(2, 1) if x.ndim == 2 else (0, 2, 1, 0)] = np.nan
    _, terms = gradient_and_terms(function, x, MASKS["some_empty"])
    assert np.isnan(terms.value[2]) and np.isfinite(np.delete(terms.value, 2)).all()


@functools.cache
def compiled_z():
    return jax.jit(jax.value_and_grad(lambda x, mask: regularizers.router_z(x, mask).value.sum()))


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(np.float32, (1, 2, 2, 3), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    hnp.arrays(bool, (2, 2)),
)
def test_finite_logits_never_give_nan(logits, mask):
    for number in compiled_z()(logits, mask):
        assert np.isfinite(number).all()


def test_invalid_arguments_are_rejected():
    logits, prob, _ = routers()
    mask, load = MASKS["full"], np.ones((L, E), np.float32)
    cases = (
        (lambda: regularizers.entropy_bonus(logits[0], mask), ValueError, r"entropy must be a float32 array \[B, T\]"),
        (lambda: regularizers.entropy_bonus(logits[0, ..., 0], mask[:2]), ValueError, r"mask must have shape \[8, 9\]"),
        (
            lambda: regularizers.router_z(logits.astype(np.float16), mask),
            TypeError,
            r"logits must be a float32.*float16",
        ),
        (
            lambda: regularizers.router_z(logits[0], mask),
            ValueError,
            r"logits must be .*\[L, B, T, E\]; got.*\[8, 9, 5\]",
        ),
        (
            lambda: regularizers.router_z(logits, mask[:, 1:]),
            ValueError,
            r"mask must have shape \[8, 9\], as logits in",
        ),
        (lambda: regularizers.load_balance(prob, load[:, 1:], mask), ValueError, r"load must have shape \[3, 5\]"),
        (lambda: regularizers.load_balance(prob, load.astype(int), mask), TypeError, r"load must be a float32.*int64"),
    )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
