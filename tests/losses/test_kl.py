"""KL to a reference: values and gradients against loops, and expected gradients against the exact KL."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pair_cases import CASES, exact_k3, held, pair

from gspax import losses
from gspax.losses import by_sequence, kl


def by_token(value_BT, mask_BT, segment_BT=None):
    return jnp.sum(jnp.where(mask_BT, value_BT, 0), -1), jnp.sum(mask_BT, -1, dtype=jnp.float32)


def with_old(logp, ref_logp, mask):
    """Tokens sampled from a policy between the two."""
    return kl.token_kl(logp, ref_logp, mask, old_logp=(logp + ref_logp) / 2)


TERMS = {
    "token_kl": kl.token_kl,
    "token_kl_old": with_old,
    "token_kl_by_token": functools.partial(kl.token_kl, aggregate=by_token),
    "sequence_kl": kl.sequence_kl,
    "grpo_kl": kl.grpo_kl,
}
over_terms = pytest.mark.parametrize("name", TERMS)
over_cases = pytest.mark.parametrize("case", CASES)
LAWS = pytest.mark.parametrize("case", ("some_empty-0.3", "holes-0.3"))


def loop(name, x):
    """(value_B, weight_B, gradient_BT) in float64."""
    value, weight, gradient = np.zeros(len(x.mask)), np.zeros(len(x.mask)), np.zeros(x.mask.shape)
    for b, tokens, ratios in x.sequences():
        ratios = [held(r) for r in ratios]
        n = 1 if name in ("sequence_kl", "token_kl_by_token") else len(tokens)
        weight[b] = len(tokens) if name == "token_kl_by_token" else 1
        for i, (t, r) in enumerate(zip(tokens, ratios, strict=True)):
            k3 = exact_k3(r)
            if name == "token_kl_old":
                old = float(x.logp[b, t] - np.float32((x.logp[b, t] + x.other[b, t]) / np.float32(2)))
                v, g = math.exp(held(old)) * k3, math.exp(held(old)) * r
            elif name == "sequence_kl":
                v, g = r, math.fsum(ratios[i:])
            elif name == "grpo_kl":
                v, g = k3, -math.expm1(-r)
            else:
                v, g = k3, r
            value[b] += v / n
            gradient[b, t] = g / n
    return value, weight, gradient


@functools.cache
def compiled(name):
    def numerator(logp, *rest):
        terms = TERMS[name](logp, *rest)
        return terms.value.sum(), terms

    return jax.jit(jax.grad(numerator, has_aux=True))


def ours(name, x):
    gradient, terms = compiled(name)(x.logp, x.other, x.mask)
    return jax.device_get((terms, gradient))


def assert_near(got, wanted, rtol=1e-6):
    """Relative to the largest number of a row, because terms of both signs cancel."""
    size = np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * size)


@over_terms
@over_cases
def test_value_and_gradient_equal_a_loop(name, case):
    x = CASES[case]
    value, weight, gradient = loop(name, x)
    terms, got = ours(name, x)
    np.testing.assert_array_equal(terms.weight, weight)
    assert terms.value.dtype == terms.weight.dtype == got.dtype == np.float32
    for b in range(len(value)):  # because the extreme case has rows of very different size
        assert_near(terms.value[b], value[b])
        assert_near(got[b], gradient[b])


@over_cases
def test_values_equal_a_loop(case):
    x = CASES[case]
    for function, formula in (
        (kl.k1, lambda r: r),
        (kl.k2, lambda r: r * r / 2),
        (kl.k3, exact_k3),
    ):
        wanted = np.zeros(x.mask.shape)
        for b, tokens, ratios in x.sequences():
            wanted[b, tokens] = [formula(held(r)) for r in ratios]
        got = function(x.logp, x.other, x.mask)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=0)
        gradient = jax.grad(lambda logp, f=function, y=x: f(logp, y.other, y.mask).sum())(jnp.asarray(x.logp))
        assert not np.asarray(gradient).any()


@over_cases
def test_metrics_equal_a_loop(case):
    x = CASES[case]
    ratios = [held(r) for _, _, row in x.sequences() for r in row]
    wanted = {
        "ref_kl": sum(exact_k3(r) for r in ratios) / max(len(ratios), 1),
        "ref_kl_k1": sum(ratios) / max(len(ratios), 1),
    }
    for name in TERMS:
        _, metrics = losses.reduce(ours(name, x)[0])
        assert metrics.keys() == wanted.keys()
        for key in wanted:
            np.testing.assert_allclose(metrics[key], wanted[key], rtol=2e-6, atol=2e-7, err_msg=key)


# Exact expectations: all sequences of a policy over 3 tokens that ends with token 0 or after 3 tokens.

CONTEXTS = [c for n in range(3) for c in itertools.product((1, 2), repeat=n)]  # without the end token, 0
ROW = {c: i for i, c in enumerate(CONTEXTS)}


def sequences():
    """Every complete sequence: ended by 0, or 3 tokens long."""
    for n in (1, 2, 3):
        for tokens in itertools.product((0, 1, 2), repeat=n):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or n == 3):
                yield tokens


def log_softmax(table):
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


def tables():
    rng = np.random.default_rng(7)
    return (rng.standard_normal((len(CONTEXTS), 3)) for _ in range(3))


def token_logps(table):
    """logp [B, T] of all sequences, column 0 unused, as a function of the logits of every context."""
    logp = jax.nn.log_softmax(table)
    rows = []
    for tokens in sequences():
        row = [logp[ROW[tokens[:i]], token] for i, token in enumerate(tokens)]
        rows.append(jnp.stack([jnp.zeros(()), *row, *[jnp.zeros(())] * (3 - len(row))]))
    return jnp.stack(rows)


MASK = np.array([[False] + [i < len(tokens) for i in range(3)] for tokens in sequences()])


def probabilities(table):
    logp = log_softmax(table)
    return np.array([math.exp(sum(logp[ROW[s[:i]], t] for i, t in enumerate(s))) for s in sequences()])


def exact_sequence_kl(table, ref):
    """Σ_y π(y) log(π(y)/π_ref(y)), in float64."""
    p, q = probabilities(table), probabilities(ref)
    return float(np.sum(p * np.log(p / q)))


def exact_token_kl(table, ref, context_table, reverse=False):
    """Σ over contexts of P(context) KL of the next token, with contexts sampled from another, fixed table."""
    logp, logq = log_softmax(table), log_softmax(ref)
    if reverse:
        logp, logq = logq, logp
    kl_C = np.sum(np.exp(logp) * (logp - logq), -1)
    reach = np.zeros(len(CONTEXTS))
    for s, p in zip(sequences(), probabilities(context_table), strict=True):
        for i in range(len(s)):
            reach[ROW[s[:i]]] += p
    return float(reach @ kl_C)


def numeric_gradient(function, table, step=1e-5):
    out = np.zeros(table.shape)
    for i in np.ndindex(*table.shape):
        up, down = table.copy(), table.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


def expectation(terms_of, table, ref, draws):
    """E[value] and E[∇ value] of sequences with the given probabilities."""
    weight = jnp.asarray(probabilities(draws), jnp.float32)
    ref_logp = token_logps(jnp.asarray(ref, jnp.float32))

    def mean(logits):
        return jnp.sum(weight * terms_of(token_logps(logits), ref_logp).value)

    return jax.value_and_grad(mean)(jnp.asarray(table, jnp.float32))


def sums(value_BT, mask_BT, segment_BT=None):
    """Σ over tokens, weight 1: the aggregation whose expectation is a sum over contexts."""
    return jnp.sum(jnp.where(mask_BT, value_BT, 0), -1), mask_BT.any(-1).astype(jnp.float32)


def test_the_enumeration_is_complete():
    table, _, _ = tables()
    assert probabilities(table).sum() == pytest.approx(1)


def test_expected_gradient_of_sequence_kl_is_exact():
    table, ref, _ = tables()
    value, gradient = expectation(lambda logp, r: kl.sequence_kl(logp, r, MASK), table, ref, table)
    assert value == pytest.approx(exact_sequence_kl(table, ref), rel=1e-5)
    wanted = numeric_gradient(lambda t: exact_sequence_kl(t, ref), table)
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)
    assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("off_policy", (False, True))
def test_expected_gradient_of_token_kl_is_exact(off_policy):
    """Contexts come from the sampling policy; with `old_logp` it may differ from the trained one."""
    table, ref, old = tables()
    draws = old if off_policy else table
    old_logp = token_logps(jnp.asarray(old, jnp.float32)) if off_policy else None
    value, gradient = expectation(
        lambda logp, r: kl.token_kl(logp, r, MASK, old_logp=old_logp, aggregate=sums), table, ref, draws
    )
    assert value == pytest.approx(exact_token_kl(table, ref, draws), rel=1e-5)
    wanted = numeric_gradient(lambda t: exact_token_kl(t, ref, draws), table)
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)
    assert np.abs(wanted).max() > 0.1


def test_token_kl_differs_from_sequence_kl():
    table, ref, _ = tables()
    gradient = numeric_gradient(lambda t: exact_token_kl(t, ref, table), table)
    whole = numeric_gradient(lambda t: exact_sequence_kl(t, ref), table)
    assert np.abs(gradient - whole).max() > 0.05


def test_expected_gradient_of_grpo_kl_is_that_of_the_reverse_kl():
    table, ref, _ = tables()
    value, gradient = expectation(lambda logp, r: kl.grpo_kl(logp, r, MASK, aggregate=sums), table, ref, table)
    assert value == pytest.approx(exact_token_kl(table, ref, table), rel=1e-5)
    other = numeric_gradient(lambda t: exact_token_kl(t, ref, table, reverse=True), table)
    np.testing.assert_allclose(gradient, other, atol=2e-6)
    right = numeric_gradient(lambda t: exact_token_kl(t, ref, table), table)
    assert np.abs(gradient - right).max() > 0.05


def test_on_samples_of_another_policy_a_kl_needs_the_ratio_to_it():
    """So those that take none are refused with stale samples."""
    table, ref, old = tables()
    ratio = jnp.exp(token_logps(jnp.asarray(table, jnp.float32)) - token_logps(jnp.asarray(old, jnp.float32)))

    def weighted(value_BT, mask_BT, segment_BT=None):
        return sums(ratio * value_BT, mask_BT)

    wanted = numeric_gradient(lambda t: exact_token_kl(t, ref, old, reverse=True), table)
    for aggregate, is_right in ((sums, False), (weighted, True)):
        _, gradient = expectation(lambda logp, r, a=aggregate: kl.grpo_kl(logp, r, MASK, aggregate=a), table, ref, old)
        assert (np.abs(gradient - wanted).max() < 2e-6) == is_right
        assert is_right or np.abs(gradient - wanted).max() > 0.05
    _, gradient = expectation(lambda logp, r: kl.sequence_kl(logp, r, MASK), table, ref, old)
    assert np.abs(gradient - numeric_gradient(lambda t: exact_sequence_kl(t, ref), table)).max() > 0.05


def test_expected_gradient_of_k1_is_0():
    """The reference drops out, which is why k1 must not be a loss."""
    table, ref, _ = tables()
    k1 = lambda logp, r: losses.Terms(jnp.sum(jnp.where(MASK, logp - r, 0), -1), None, {})  # noqa: E731
    value, gradient = expectation(k1, table, ref, table)
    assert value == pytest.approx(exact_sequence_kl(table, ref), rel=1e-5)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


# Laws


def everything(name, x):
    terms, gradient = ours(name, x)
    loss, metrics = losses.reduce(terms)
    return loss, metrics, gradient / max(terms.weight.sum(), 1)


def assert_same(a, b, rtol=2e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * 1e-1)


@over_terms
@LAWS
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38))
def test_padding_never_matters(name, case, garbage):
    x = CASES[case]
    got = everything(name, x.fill(garbage))
    assert_same(got, everything(name, x), rtol=0)
    assert not got[2][~x.mask].any()


@over_terms
def test_padding_never_matters_in_uncompiled_code(name):
    x = CASES["some_empty-0.3"]
    bad = x.fill(np.nan)
    gradient = jax.grad(lambda logp: TERMS[name](logp, jnp.asarray(bad.other), bad.mask).value.sum())(
        jnp.asarray(bad.logp)
    )
    assert_same(gradient, ours(name, x)[1])


@over_terms
@LAWS
def test_longer_padding_row_order_and_microbatches_change_nothing(name, case):
    x = CASES[case]
    whole = everything(name, x)
    loss, metrics, gradient = everything(name, x.longer())
    assert_same((loss, metrics, gradient[:, :9]), whole)
    order = np.random.default_rng(0).permutation(8)
    loss, metrics, gradient = everything(name, x.rows(order))
    assert_same((loss, metrics, gradient[np.argsort(order)]), whole)
    parts = [ours(name, x.rows(slice(*cut))) for cut in ((0, 1), (1, 4), (4, 8))]
    terms = jax.tree.map(lambda *leaves: np.concatenate(leaves), *[part[0] for part in parts])
    gradient = np.concatenate([part[1] for part in parts]) / terms.weight.sum()
    assert_same((*losses.reduce(terms), gradient), whole)


@over_terms
def test_a_nan_in_a_response_propagates(name):
    x = pair(CASES["full-0.3"].mask, 0.3)
    x.logp[0, 1] = np.nan
    assert np.isnan(ours(name, x)[0].value[0])


@over_terms
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_finite_input_never_gives_nan(name, data):
    huge = 2.0**100
    elements = st.one_of(st.floats(-huge, huge, width=32), st.sampled_from([0.0, -25.0, 25.0, huge, -huge]))
    logp, other = (data.draw(hnp.arrays(np.float32, (2, 3), elements=elements)) for _ in range(2))
    mask = data.draw(hnp.arrays(bool, (2, 3)))
    gradient, terms = compiled(name)(logp, other, mask)
    for number in jax.tree.leaves((gradient, terms)):
        assert np.isfinite(number).all()


def test_add_penalty_adds_its_gradient_to_the_policy_loss():
    x = CASES["some_empty-0.3"]
    advantage = np.linspace(-1, 1, 8).astype(np.float32)

    def numerator(logp, coefficient):
        terms = losses.grpo(logp, x.other, advantage, x.mask)
        joined = kl.add_penalty(terms, kl.token_kl(logp, x.other, x.mask), coefficient=coefficient)
        return joined.value.sum(), joined

    at = {c: jax.grad(functools.partial(numerator, coefficient=c), has_aux=True)(x.logp) for c in (0.0, 0.25)}
    (without, zero), (gradient, terms) = at[0.0], at[0.25]
    np.testing.assert_allclose(gradient - without, 0.25 * ours("token_kl", x)[1], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(terms.value - zero.value, 0.25 * ours("token_kl", x)[0].value, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(terms.weight, by_sequence(x.logp, jnp.asarray(x.mask))[1])
    _, metrics = losses.reduce(terms)
    assert {"ref_kl", "ref_kl_k1", "kl", "clip_fraction_tokens"} <= metrics.keys()


def test_add_penalty_rejects_invalid_arguments():
    x = CASES["ragged-0.3"]
    terms = kl.token_kl(x.logp, x.other, x.mask)
    bare = losses.Terms(terms.value, terms.weight, {})
    with pytest.raises(
        ValueError, match=r"penalty must not have metrics that terms has; got \['ref_kl', 'ref_kl_k1'\]"
    ):
        kl.add_penalty(terms, terms, coefficient=1.0)
    with pytest.raises(ValueError, match=r"penalty must have shape \[8\], as terms in its rows has; got \[4\]"):
        kl.add_penalty(terms, jax.tree.map(lambda a: a[:4], bare), coefficient=1.0)
    with pytest.raises(ValueError, match="coefficient must be finite; got inf"):
        kl.add_penalty(terms, bare, coefficient=float("inf"))
    with pytest.raises(TypeError, match=r"coefficient must be a Python number.*got ArrayImpl"):
        kl.add_penalty(terms, bare, coefficient=jnp.ones(()))


@pytest.mark.parametrize("function", (kl.k1, kl.k2, kl.k3, kl.token_kl, kl.sequence_kl, kl.grpo_kl))
def test_invalid_arrays_are_rejected(function):
    x = CASES["ragged-0.3"]
    wrong = (
        ((x.logp.astype(np.float64), x.other, x.mask), TypeError, r"logp must be a float32.*got float64 \[8, 9\]"),
        ((x.logp, x.other.astype(np.float16), x.mask), TypeError, r"ref_logp must be a float32.*got float16"),
        ((x.logp, x.other[:, 1:], x.mask), ValueError, r"ref_logp must have shape \[8, 9\], as logp has; got \[8, 8\]"),
        ((x.logp, x.other, x.mask[:1]), ValueError, r"mask must have shape \[8, 9\], as logp has; got \[1, 9\]"),
        ((x.logp, x.other, x.logp), TypeError, r"mask must be a bool array \[B, T\]; got float32"),
        ((x.logp[0], x.other, x.mask), ValueError, r"logp must be a float32 array \[B, T\]; got float32 \[9\]"),
    )
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            function(*arguments)
    if function is kl.token_kl:
        with pytest.raises(ValueError, match=r"old_logp must have shape \[8, 9\], as logp has; got \[8, 8\]"):
            function(x.logp, x.other, x.mask, old_logp=x.other[:, 1:])
