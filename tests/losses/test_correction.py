"""Corrections for the mismatch of sampler and learner, and mismatch metrics, against loops in float64."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pair_cases import CASES, Pair, exact_k3, held, pair

from gspax import losses
from gspax.losses import calibration, correction, kl, regularizers, selection, sequences

ADVANTAGE = np.array([-1, 1, -0.5, 0, -2, 0.5, -1, -1], np.float32)


def opsm(logp, sampler_logp, mask, delta=0.02):
    return correction.reject_off_policy(logp, sampler_logp, ADVANTAGE[: len(mask)], mask, delta=delta)


BAND = {"low": 0.8, "high": 1.25}
NARROW = {"low": 0.9995, "high": 1.0005}
# name: (function, loop: (log-ratios of a sequence's tokens, row, tokens) -> weight or weights of its tokens)
FUNCTIONS = {
    "truncate_tokens": (
        functools.partial(correction.truncate_tokens, cap=1.25),
        lambda x, b, at: [math.exp(min(r, math.log(1.25))) for r in x],
    ),
    "truncate_sequences": (
        functools.partial(correction.truncate_sequences, cap=1.25),
        lambda x, b, at: math.exp(min(math.fsum(x), math.log(1.25))),
    ),
    "truncate_geometric": (
        functools.partial(correction.truncate_geometric, cap=1.05),
        lambda x, b, at: math.exp(min(math.fsum(x) / len(x), math.log(1.05))),
    ),
    "mask_tokens": (
        functools.partial(correction.mask_tokens, **BAND),
        lambda x, b, at: [math.exp(r) if math.log(0.8) <= r <= math.log(1.25) else 0 for r in x],
    ),
    "mask_sequences": (
        functools.partial(correction.mask_sequences, **BAND),
        lambda x, b, at: math.exp(math.fsum(x)) if math.log(0.8) <= math.fsum(x) <= math.log(1.25) else 0,
    ),
    "reject_geometric": (
        functools.partial(correction.reject_geometric, **NARROW),
        lambda x, b, at: float(math.log(0.9995) <= math.fsum(x) / len(x) <= math.log(1.0005)),
    ),
    "reject_tokens": (
        functools.partial(correction.reject_tokens, high=0.02),
        lambda x, b, at: [float(exact_k3(-held(r)) <= 0.02) for r in x],
    ),
    "reject_tokens by k1": (
        functools.partial(correction.reject_tokens, estimate=kl.k1, low=-0.1, high=0.3),
        lambda x, b, at: [float(-0.1 <= -held(r) <= 0.3) for r in x],
    ),
    "reject_sequences": (
        functools.partial(correction.reject_sequences, high=0.03),
        lambda x, b, at: float(math.fsum(exact_k3(-held(r)) for r in x) / len(x) <= 0.03),
    ),
    "reject_sequences by the sum of k1": (
        functools.partial(correction.reject_sequences, estimate=kl.k1, over=sequences.total, low=-0.3, high=0.2),
        lambda x, b, at: float(-0.3 <= -math.fsum(map(held, x)) <= 0.2),
    ),
    "reject_sequences by the largest k2": (
        functools.partial(correction.reject_sequences, estimate=kl.k2, over=sequences.largest, high=0.1),
        lambda x, b, at: float(max(held(r) ** 2 / 2 for r in x) <= 0.1),
    ),
    "product": (
        functools.partial(
            correction.product,
            factors=(
                functools.partial(correction.truncate_tokens, cap=1.25),
                functools.partial(correction.reject_sequences, high=0.03),
                functools.partial(correction.reject_tokens, estimate=kl.k1, low=-0.1, high=0.3),
            ),
        ),
        lambda x, b, at: [
            math.exp(min(r, math.log(1.25)))
            * (math.fsum(exact_k3(-held(r)) for r in x) / len(x) <= 0.03)
            * (-0.1 <= -held(r) <= 0.3)
            for r in x
        ],
    ),
    "product of sequences": (
        functools.partial(
            correction.product,
            factors=(
                functools.partial(correction.truncate_geometric, cap=1.05),
                functools.partial(correction.reject_sequences, estimate=kl.k2, over=sequences.largest, high=0.1),
            ),
        ),
        lambda x, b, at: (
            math.exp(min(math.fsum(x) / len(x), math.log(1.05))) * (max(held(r) ** 2 / 2 for r in x) <= 0.1)
        ),
    ),
    "reject_off_policy": (
        opsm,
        lambda x, b, at: float(not (ADVANTAGE[b] < 0 and -math.fsum(x) / len(x) > 0.02)),
    ),
}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)
over_cases = pytest.mark.parametrize("case", CASES)
LAWS = pytest.mark.parametrize("case", ("some_empty-0.3", "holes-0.3"))


@functools.cache
def compiled(name):
    return jax.jit(FUNCTIONS[name][0])


def ours(name, x):
    return np.asarray(compiled(name)(x.logp, x.other, x.mask))


def loop(name, x):
    by_token = name in ("truncate_tokens", "mask_tokens", "reject_tokens", "reject_tokens by k1", "product")
    out = np.zeros(x.mask.shape if by_token else len(x.mask))
    for b, tokens, ratios in x.sequences():
        out[(b, tokens) if by_token else b] = FUNCTIONS[name][1](ratios, b, tokens)
    return out


@over_functions
@over_cases
def test_weights_equal_a_loop(name, case):
    x = CASES[case]
    got = ours(name, x)
    assert got.dtype == np.float32
    # exp turns the absolute error of a sum into a relative one; a sum is exact to 1e-7 of its largest term
    largest = max((abs(r) for _, _, ratios in x.sequences() for r in ratios if abs(r) < 100), default=0)
    np.testing.assert_allclose(got, loop(name, x), rtol=1e-6 * max(1, largest / 4), atol=1e-30)


@over_functions
def test_the_cases_cover_both_sides_of_every_bound(name):
    if name == "reject_off_policy":
        seen = {w for case in CASES for w in loop(name, CASES[case])}
    else:
        seen = {round(w, 6) for case in CASES for w in loop(name, CASES[case]).ravel()}
    assert {"truncate_tokens": 1.25, "truncate_sequences": 1.25, "truncate_geometric": 1.05}.get(name, 0) in seen
    assert len(seen) > 3 or seen == {0, 1}


def test_worked_example():
    """Two tokens with ratios 4 and 1/2: product 2, geometric mean √2."""
    old = jnp.log(jnp.array([[1.0, 0.4, 0.2]]))
    sampler = jnp.log(jnp.array([[1.0, 0.1, 0.4]]))
    x = (old, sampler, jnp.array([[False, True, True]]))
    np.testing.assert_allclose(correction.truncate_tokens(*x), [[0, 2, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(correction.mask_tokens(*x, low=0.4, high=3.0), [[0, 0, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(correction.truncate_sequences(*x, cap=10.0), [2], rtol=1e-6)
    np.testing.assert_allclose(correction.truncate_sequences(*x, cap=1.5), [1.5], rtol=1e-6)
    np.testing.assert_allclose(correction.truncate_geometric(*x), [2**0.5], rtol=1e-6)
    np.testing.assert_allclose(correction.mask_sequences(*x, low=0.0, high=1.9), [0])
    np.testing.assert_allclose(correction.reject_geometric(*x, low=0.5, high=1.5), [1])
    np.testing.assert_allclose(correction.reject_geometric(*x, low=0.5, high=1.4), [0])


def test_rejection_needs_a_negative_advantage_and_a_distant_policy():
    """Rows: negative and distant, positive and distant, negative and near, negative and distant the other way."""
    logp = jnp.array([[-2.0, -2.0], [-2.0, -2.0], [-1.05, -1.05], [-0.1, -0.1]])
    sampler = jnp.full((4, 2), -1.0)
    mask = jnp.ones((4, 2), bool)
    advantage = jnp.array([-1.0, 1.0, -1.0, -1.0])
    got = correction.reject_off_policy(logp, sampler, advantage, mask, delta=0.1)
    np.testing.assert_array_equal(got, [0, 1, 1, 1])
    both = jnp.stack([advantage, -advantage], 1)
    got = correction.reject_off_policy(logp, sampler, both, mask, delta=0.1)
    np.testing.assert_array_equal(got, [[0, 1], [1, 0], [1, 1], [1, 1]])


@over_functions
def test_equal_policies_have_weight_1(name):
    x = CASES["some_empty-0.3"]
    got = ours(name, Pair(x.logp, x.logp, x.mask))
    np.testing.assert_array_equal(got, x.mask if got.ndim == 2 else x.mask.any(-1))


@over_functions
def test_corrections_have_no_gradient(name):
    x = CASES["ragged-0.3"]
    for argument in (0, 1):
        gradient = jax.grad(lambda *a: FUNCTIONS[name][0](*a, x.mask).sum(), argument)(
            jnp.asarray(x.logp), jnp.asarray(x.other)
        )
        assert not np.asarray(gradient).any()


def test_weights_multiply_a_policy_loss():
    """Weights [B] multiply the value and the gradient of a row, not its weight."""
    x = CASES["some_empty-0.3"]

    def numerator(logp, weight_B):
        terms = losses.grpo(logp, x.other, ADVANTAGE, x.mask)
        return (terms.value * weight_B).sum()

    weight = ours("truncate_sequences", x)
    plain, weighted = (jax.grad(numerator)(x.logp, w) for w in (np.ones_like(weight), weight))
    np.testing.assert_allclose(weighted, np.asarray(plain) * weight[:, None], rtol=1e-6, atol=1e-9)


# Metrics


@functools.cache
def compiled_metrics():
    return jax.jit(functools.partial(correction.mismatch_metrics, **BAND))


def reduced(x):
    metrics = compiled_metrics()(x.logp, x.other, x.mask)
    nothing = jnp.zeros(len(x.mask))
    values = losses.reduce(losses.Terms(nothing, nothing, metrics))[1]
    return jax.device_get(values | correction.effective_sample_sizes(values))


def loop_metrics(x):
    rows = [ratios for _, _, ratios in x.sequences()]
    tokens = [r for row in rows for r in row]
    sums = [math.fsum(row) for row in rows]

    def mean(numbers):
        numbers = list(numbers)
        return math.fsum(numbers) / len(numbers) if numbers else 0.0

    def outside(r):
        return not math.log(0.8) <= r <= math.log(1.25)

    wanted = {
        "kl": mean(-r for r in tokens),
        "k3": mean(exact_k3(-held(r)) for r in tokens),
        "log_ppl_diff_mean": mean(-mean(row) for row in rows),
        "log_ppl_diff_min": min((-mean(row) for row in rows), default=0),
        "log_ppl_diff_max": max((-mean(row) for row in rows), default=0),
        "extreme_tokens": mean(abs(r) > math.log(2) for r in tokens),
        "abs_diff": mean(map(abs, tokens)),
        "abs_diff_largest_mean": mean(max(map(abs, row)) for row in rows),
        "abs_diff_largest_min": min((max(map(abs, row)) for row in rows), default=0),
        "abs_diff_largest_max": max((max(map(abs, row)) for row in rows), default=0),
    }
    for of, ratios in (("tokens", tokens), ("sequences", sums)):
        w = [math.exp(held(r)) for r in ratios]
        wanted[f"ratio_{of}"] = mean(w)
        wanted[f"ratio_squared_{of}"] = mean(v * v for v in w)
        wanted[f"chi2_{of}"] = mean(math.expm1(2 * held(r)) for r in ratios)
        wanted[f"out_of_range_{of}"] = mean(map(outside, ratios))
        wanted[f"ess_{of}"] = math.fsum(w) ** 2 / (len(w) * math.fsum(v * v for v in w)) if w else 0.0
    return {f"mismatch_{key}": value for key, value in wanted.items()}


@over_cases
def test_metrics_equal_a_loop(case):
    x = CASES[case]
    got, wanted = reduced(x), loop_metrics(x)
    assert got.keys() == wanted.keys()
    largest = max((abs(r) for _, _, ratios in x.sequences() for r in ratios), default=0)
    for key in wanted:
        atol = 0 if key == "mismatch_k3" else 3e-7 * min(largest, 1)  # the others are sums of both signs
        np.testing.assert_allclose(got[key], wanted[key], rtol=5e-6, atol=atol, err_msg=key)


def test_equal_policies_have_no_mismatch():
    x = CASES["ragged-0.3"]
    got = reduced(Pair(x.logp, x.logp, x.mask))
    for key, value in got.items():
        assert value == (1 if "ratio" in key or "ess" in key else 0), key


def test_effective_sample_size_with_one_dominant_sequence():
    """Ratios e^8 and seven times 1: one sample counts."""
    logp = np.zeros((8, 1), np.float32)
    logp[0] = 8
    got = reduced(Pair(logp, np.zeros_like(logp), np.ones((8, 1), bool)))
    assert got["mismatch_ess_tokens"] == pytest.approx(1 / 8, rel=0.01)


def test_an_empty_batch_gives_no_nan():
    """Nor does a batch whose tokens are all masked."""
    assert all(value == 0 for value in reduced(CASES["all_empty-0.3"].fill(np.nan)).values())


# Laws


@over_functions
@LAWS
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38))
def test_padding_never_matters(name, case, garbage):
    x = CASES[case]
    np.testing.assert_array_equal(ours(name, x.fill(garbage)), ours(name, x))


@LAWS
@pytest.mark.parametrize("garbage", (np.nan, np.inf, 3e38))
def test_padding_never_matters_to_metrics(case, garbage):
    x = CASES[case]
    got, wanted = reduced(x.fill(garbage)), reduced(x)
    for key in wanted:
        np.testing.assert_array_equal(got[key], wanted[key], err_msg=key)


@over_functions
@LAWS
def test_longer_padding_and_microbatches_change_nothing(name, case):
    x = CASES[case]
    whole = ours(name, x)
    longer = ours(name, x.longer())
    np.testing.assert_allclose(longer[:, :9] if longer.ndim == 2 else longer, whole, rtol=1e-6)
    if name != "reject_off_policy":  # the wrapper above takes its advantage from the row index
        parts = np.concatenate([ours(name, x.rows(slice(*cut))) for cut in ((0, 1), (1, 4), (4, 8))])
        np.testing.assert_allclose(parts, whole, rtol=1e-6)


@LAWS
def test_row_order_and_microbatches_change_no_metric(case):
    x = CASES[case]
    wanted = reduced(x)
    parts = [compiled_metrics()(y.logp, y.other, y.mask) for y in (x.rows(slice(5, 8)), x.rows(slice(0, 5)))]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    got = losses.reduce(losses.Terms(jnp.zeros(8), jnp.zeros(8), joined))[1]
    got |= correction.effective_sample_sizes(got)
    for key in wanted:
        np.testing.assert_allclose(got[key], wanted[key], rtol=1e-5, atol=1e-7, err_msg=key)


@over_functions
def test_a_nan_in_a_response_propagates(name):
    x = pair(CASES["full-0.3"].mask, 0.3)
    x.other[1, 2] = np.nan  # a row with a positive advantage
    got = ours(name, x)
    assert np.isnan(got[1, 2] if got.ndim == 2 else got[1])
    assert np.isfinite(np.delete(got, 1, axis=0)).all()


def finite_pairs():
    huge = 2.0**100
    elements = st.one_of(st.floats(-huge, huge, width=32), st.sampled_from([0.0, -25.0, 25.0, huge, -huge]))
    arrays = hnp.arrays(np.float32, (2, 3), elements=elements)
    return st.builds(Pair, arrays, arrays, hnp.arrays(bool, (2, 3)))


@over_functions
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_finite_input_never_gives_nan(name, data):
    got = ours(name, data.draw(finite_pairs()))
    assert np.isfinite(got).all() and (got >= 0).all() and (got <= 1.25).all()


@settings(max_examples=40, deadline=None)
@given(x=finite_pairs())
def test_finite_input_never_gives_nan_in_a_metric(x):
    for key, value in reduced(x).items():
        assert np.isfinite(value), key


# Invalid arguments


@pytest.mark.parametrize("name", [*FUNCTIONS, "mismatch_metrics"])
def test_invalid_arrays_are_rejected(name):
    function = FUNCTIONS[name][0] if name in FUNCTIONS else correction.mismatch_metrics
    first = "logp" if name == "reject_off_policy" else "old_logp"
    x = CASES["ragged-0.3"]
    wrong = (
        ((x.logp.astype(np.float64), x.other, x.mask), TypeError, rf"^{first} must be a float32.*got float64 \[8, 9\]"),
        ((x.logp, x.other.astype(np.float16), x.mask), TypeError, r"^sampler_logp must be a float32.*got float16"),
        ((x.logp, x.other[:, 1:], x.mask), ValueError, rf"^sampler_logp must have shape \[8, 9\], as {first} has"),
        ((x.logp, x.other, x.mask[:1]), ValueError, rf"^mask must have shape \[8, 9\], as {first} has; got \[1, 9\]"),
        ((x.logp, x.other, x.logp), TypeError, r"^mask must be a bool array \[B, T\]; got float32"),
    )
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            function(*arguments)


@pytest.mark.parametrize("function", (correction.mask_tokens, correction.mask_sequences, correction.reject_geometric))
@pytest.mark.parametrize(
    "bounds, error, message",
    (
        ({"low": 1.1, "high": 2.0}, ValueError, r"^low must be from 0 to 1.*got 1\.1"),
        ({"low": -0.1, "high": 2.0}, ValueError, r"^low must be from 0 to 1.*got -0\.1"),
        ({"low": 0.5, "high": 0.9}, ValueError, r"^high must be finite and at least 1.*got 0\.9"),
        ({"low": 0.5, "high": float("inf")}, ValueError, r"^high must be finite and at least 1.*got inf"),
        ({"low": "0", "high": 2.0}, TypeError, r"^low must be a Python number.*got str"),
    ),
)
def test_invalid_bounds_are_rejected(function, bounds, error, message):
    x = CASES["ragged-0.3"]
    with pytest.raises(error, match=message):
        function(x.logp, x.other, x.mask, **bounds)


@pytest.mark.parametrize("function", (correction.reject_tokens, correction.reject_sequences))
@pytest.mark.parametrize(
    "options, error, message",
    (
        ({"high": -0.1}, ValueError, r"^low and high must be at most and at least 0.*got -inf and -0\.1"),
        ({"high": 0.1, "low": 0.05}, ValueError, r"^low and high must be at most and at least 0.*got 0\.05 and 0\.1"),
        ({"high": float("nan")}, ValueError, r"^low and high must be.*got -inf and nan"),
        ({"high": "1"}, TypeError, r"^high must be a Python number.*got str"),
        ({"high": 0.1, "estimate": "k3"}, TypeError, r"^estimate must be a function, as kl\.k3 is; got str"),
    ),
)
def test_invalid_rejections_are_rejected(function, options, error, message):
    x = CASES["ragged-0.3"]
    with pytest.raises(error, match=message):
        function(x.logp, x.other, x.mask, **options)


def test_invalid_factors_are_rejected():
    x = CASES["ragged-0.3"]
    for factors, error, message in (
        ((), ValueError, r"^factors must be at least one correction.*got none"),
        ((correction.truncate_tokens, 2.0), TypeError, r"^factors must be a function.*got float"),
    ):
        with pytest.raises(error, match=message):
            correction.product(x.logp, x.other, x.mask, factors=factors)


# The names of verl's `rollout_rs`, and their formulas by its documentation, of r = π_old/μ.
ESTIMATES = {
    "k1": (kl.k1, lambda log_r: -log_r),
    "k2": (kl.k2, lambda log_r: log_r**2 / 2),
    "k3": (kl.k3, lambda log_r: math.exp(log_r) - 1 - log_r),
}
LEVELS = {
    "token": (correction.reject_tokens, lambda values: values),
    "seq_sum": (
        functools.partial(correction.reject_sequences, over=sequences.total),
        lambda values: [math.fsum(values)] * len(values),
    ),
    "seq_mean": (correction.reject_sequences, lambda values: [math.fsum(values) / len(values)] * len(values)),
    "seq_max": (
        functools.partial(correction.reject_sequences, over=sequences.largest),
        lambda values: [max(values)] * len(values),
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_every_rejection_of_verl_can_be_written(level, estimate):
    """k1 has bounds on both sides, the others an upper one; these keep about half of the tokens."""
    x = CASES["ragged-0.3"]
    (function, over), (ours, formula) = LEVELS[level], ESTIMATES[estimate]
    value = np.zeros(x.mask.shape)
    for b, tokens, log_ratios in x.sequences():
        value[b, tokens] = over([formula(r) for r in log_ratios])
    high = np.median(np.abs(value[x.mask])) + 1e-5
    low = -high if estimate == "k1" else -math.inf
    wanted = x.mask & (low <= value) & (value <= high)
    got = np.asarray(function(x.logp, x.other, x.mask, estimate=ours, low=low, high=float(high)))
    np.testing.assert_array_equal(got if level == "token" else np.where(x.mask, got[:, None], 0), wanted)
    assert 0.2 < wanted[x.mask].mean() < 0.8


@pytest.mark.parametrize("threshold", ("0.95_1.02", "0.8_1.1", "0.6_1.4"))
def test_thresholds_of_verl_are_written_as_the_page_says(threshold):
    """verl 0.9.1 keeps log lo ≤ k1 ≤ log hi with k1 = -log ρ, or with its sum or mean over a sequence."""
    x, (lo, hi) = CASES["ragged-0.3"], map(float, threshold.split("_"))
    bounds = {}
    for name, low, high in re.findall(r"`(token_k1|seq_mean_k1)`.* low = (.*?), high = (.*?)\.? \|", PAGE):
        sides = (re.sub(r"log (\w+)", r"math.log(\1)", side) for side in (low, high))
        bounds[name] = dict(
            zip(("low", "high"), (eval(side, {"math": math, "lo": lo, "hi": hi}) for side in sides), strict=True)
        )
    k1_BT = np.where(x.mask, -(x.logp.astype(np.float64) - x.other), 0)
    sum_B, count_B = k1_BT.sum(-1), np.maximum(x.mask.sum(-1), 1)

    def kept(value):
        return (math.log(lo) <= value) & (value <= math.log(hi))

    got = correction.reject_tokens(x.logp, x.other, x.mask, estimate=kl.k1, **bounds["token_k1"])
    np.testing.assert_array_equal(got, x.mask & kept(k1_BT))
    over = functools.partial(correction.reject_sequences, estimate=kl.k1, over=sequences.total)
    got = over(x.logp, x.other, x.mask, **bounds["token_k1"])
    np.testing.assert_array_equal(got, x.mask.any(-1) & kept(sum_B))
    got = correction.reject_geometric(x.logp, x.other, x.mask, **bounds["seq_mean_k1"])
    np.testing.assert_array_equal(got, x.mask.any(-1) & kept(sum_B / count_B))


def test_invalid_numbers_are_rejected():
    x = CASES["ragged-0.3"]
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"^cap must be finite and above 0; got {cap}"):
            correction.truncate_tokens(x.logp, x.other, x.mask, cap=cap)
    for delta in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"^delta must be at least 0; got {delta}"):
            opsm(x.logp, x.other, x.mask, delta=delta)
    with pytest.raises(ValueError, match=r"^advantage must have shape \[8\], as logp in its rows has; got \[4\]"):
        correction.reject_off_policy(x.logp, x.other, ADVANTAGE[:4], x.mask, delta=0.1)


# Documentation

PAGE = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text(encoding="utf-8")


def test_the_example_in_the_docs_runs():
    example, composed, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    exec(compile(example, "docs/corrections.md", "exec"), scope)
    assert np.isfinite(scope["loss"]) and scope["metrics"]["mismatch_ess_tokens"] < 1
    exec(compile(composed, "docs/corrections.md", "exec"), scope)
    weight = scope["one_weight_two_rejections"](scope["old_logp"], scope["sampler_logp"], scope["mask"])
    np.testing.assert_allclose(weight, [[0, 0, 0], [0, 0, 0]], err_msg="geometric means 1.22 and 1.10 are out of range")


def test_the_docs_list_every_function_and_metric():
    for module in (kl, correction, selection, regularizers, calibration):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_") and name != "k3_of":
                assert f"`{name}" in PAGE or f".{name}`" in PAGE or f"`{name}(" in PAGE, name
    for key in reduced(CASES["ragged-0.3"]):
        if not key.endswith(("_min", "_max", "_mean")):
            assert f"`{key}`" in PAGE, key


def test_the_mismatch_of_late_tokens_is_not_hidden_in_the_mean():
    """A sampler that goes wrong from a token on: the ranges before it show nothing, and the one that it is in does."""
    mask = np.zeros((2, 100), bool)
    mask[0, 10:90], mask[1, 20:30] = True, True
    mask[0, 30:40] = False  # a reply: places count what the policy sampled
    old_logp = np.full(mask.shape, -1.0, np.float32)
    sampler_logp = old_logp.copy()
    sampler_logp[0, 84:90] -= 0.5  # places 65 to 70
    reduced = losses.reduce(
        losses.Terms(jnp.zeros(2), jnp.ones(2), correction.mismatch_by_position(old_logp, sampler_logp, mask))
    )[1]
    assert [*reduced] == [f"mismatch_abs_diff_from_{first}" for first in (1, 17, 65)]
    assert [float(value) for value in reduced.values()] == [0.0, 0.0, 0.5]
