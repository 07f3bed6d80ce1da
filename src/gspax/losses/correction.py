"""Corrections for a sampler that differs from the learner, and measures of how far apart the two are.

An inference engine gives other log-probabilities than the learner with the same weights, and asynchronous runs also
sample with older weights. Here π_old is the learner's policy at the weights of the rollout (`old_logp`), μ the
policy that sampled the tokens (`sampler_logp`), ρ_t = π_old(y_t)/μ(y_t).

Axes: B rows (one sequence each, unless packed), T tokens.

Each correction gives float32 weights, [B, T] or [B], without a gradient, that multiply the policy loss of a token or of
a sequence; outside the mask, and in rows without a response token, they are 0. With `segment_ids` (int32 [B, T], packed
rows) all are [B, T]. The loss's own ratio is still π/π_old.

| function | weight | of |
| --- | --- | --- |
| `truncate_tokens` | min(ρ_t, cap) | token |
| `truncate_sequences` | min(Π_t ρ_t, cap) | sequence |
| `truncate_geometric` | min((Π_t ρ_t)^(1/|y|), cap) | sequence |
| `mask_tokens` | ρ_t if low ≤ ρ_t ≤ high, else 0 (IcePop) | token |
| `mask_sequences` | Π_t ρ_t if low ≤ Π_t ρ_t ≤ high, else 0 | sequence |
| `reject_geometric` | 1 if low ≤ (Π_t ρ_t)^(1/|y|) ≤ high, else 0 | sequence |
| `reject_tokens` | 1 if low ≤ k_t ≤ high, else 0, for a KL estimate k_t (`kl.k1`, `k2`, `k3`) | token |
| `reject_sequences` | the same for the mean, the sum, or the largest of k_t over the sequence | sequence |
| `product` | the product of several: one weight, any rejections | the finest of them |
| `reject_off_policy` | 0 if A < 0 and the mean of log(μ/π) is above δ, else 1 (OPSM) | sequence |

Which one: by token is biased but low in variance; the product is the exact ratio of a sequence, and its variance grows
with the length; the geometric mean does not depend on the length, but is not an importance weight.

They compose: `partial(product, factors=(truncate_tokens, partial(reject_geometric, low=0.99, high=1.01)))`.

Weights by token belong to losses whose gradient has a weight per token. GSPO, LUSPO and GMPO have one per sequence:
they replace the weights of a sequence's tokens by their mean (docs/corrections.md).

Only the loss of a token is weighted: the denominator of the batch is unchanged, so a rejected sequence
pulls the loss toward 0 instead of giving its weight to the others.

Comparisons are made between logarithms and `exp` comes last, so nothing overflows, and a NaN stays a NaN.
`mismatch_metrics` measures how far apart the two policies are; log it always, and before choosing a correction.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspax.losses import checks, sequences
from gspax.losses.formulas import call_text, factors, formula, formula_of
from gspax.losses.kl import k3
from gspax.losses.surrogate import LOG_RATIO_LIMIT, k3_of, log_ratio
from gspax.losses.terms import Metrics, Spread, mean_over, share_of_sequences, share_of_tokens
from gspax.losses.traits import at_level

Array = jax.Array
Estimate = Callable[[Array, Array, Array], Array]  # (logp, ref_logp, mask) -> [B, T]: `kl.k1`, `kl.k2`, or `kl.k3`
PLACES = (1, 17, 65, 257, 1025, 4097)  # in a response, where ranges of `mismatch_by_position` begin
OverSequence = Callable[[Array, Array, Array | None], Array]  # `sequences.mean`, `sequences.total`, `sequences.largest`


def _estimate_text(keywords: Mapping[str, Any]) -> str:
    """Return the formula of the KL estimate of a rejection: of KL(μ‖π_old)."""
    names = {"logp": "sampler_logp", "ref_logp": "old_logp"}
    return formula_of(keywords["estimate"], free=names) or call_text(keywords["estimate"], *names.values())


def _sequence_text(keywords: Mapping[str, Any]) -> str:
    over = formula_of(keywords["over"], free={"x": _estimate_text(keywords)})
    return f"inside({over or call_text(keywords['over'], _estimate_text(keywords))}, low, high)"


@formula("min(exp(old_logp - sampler_logp), cap)")
@at_level("token")
def truncate_tokens(
    old_logp: Array, sampler_logp: Array, mask: Array, *, cap: float = 2.0, segment_ids: Array | None = None
) -> Array:
    """Compute min(ρ_t, cap), [B, T]: truncated importance sampling by token.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". verl's default is 2 too.

    >>> old_logp, sampler_logp = jnp.log(jnp.array([[1.0, 0.4, 0.2]])), jnp.log(jnp.array([[1.0, 0.1, 0.4]]))
    >>> truncate_tokens(old_logp, sampler_logp, jnp.array([[False, True, True]])).tolist()
    [[0.0, 2.0, 0.5]]
    """
    log_ratio_BT, mask_BT, _ = log_ratio("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segment_ids)
    return _truncated(log_ratio_BT, mask_BT, cap)


@formula("min(exp(sum_t(old_logp - sampler_logp)), cap)")
@at_level("sequence")
def truncate_sequences(
    old_logp: Array, sampler_logp: Array, mask: Array, *, cap: float = 2.0, segment_ids: Array | None = None
) -> Array:
    """Compute min(Π_t ρ_t, cap), [B]: truncated importance sampling by sequence.

    Liu, Li et al. 2025, "When Speed Kills Stability". Long sequences reach the cap, or 0, by length alone.

    >>> old_logp, sampler_logp = jnp.log(jnp.array([[1.0, 0.4, 0.2]])), jnp.log(jnp.array([[1.0, 0.2, 0.4]]))
    >>> truncate_sequences(old_logp, sampler_logp, jnp.array([[False, True, True]])).tolist()  # 2 and 1/2
    [1.0]
    """
    product, keep = _of_sequence(sequences.total, old_logp, sampler_logp, mask, segment_ids)
    return _truncated(product, keep, cap)


@formula("min(exp(mean_t(old_logp - sampler_logp)), cap)")
@at_level("sequence")
def truncate_geometric(
    old_logp: Array, sampler_logp: Array, mask: Array, *, cap: float = 2.0, segment_ids: Array | None = None
) -> Array:
    """Compute min((Π_t ρ_t)^(1/|y|), cap), [B]: the geometric mean, which is GSPO's sequence ratio, truncated."""
    mean, keep = _of_sequence(sequences.mean, old_logp, sampler_logp, mask, segment_ids)
    return _truncated(mean, keep, cap)


@formula("exp(old_logp - sampler_logp) * inside(exp(old_logp - sampler_logp), low, high)")
@at_level("token")
def mask_tokens(
    old_logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    low: float = 0.5,
    high: float = 5.0,
    segment_ids: Array | None = None,
) -> Array:
    """Compute ρ_t inside [low, high] and 0 outside, [B, T]: IcePop (Ring-1T, arXiv 2510.18855).

    >>> old_logp, sampler_logp = jnp.log(jnp.array([[1.0, 0.6, 0.3]])), jnp.log(jnp.array([[1.0, 0.1, 0.4]]))
    >>> mask_tokens(old_logp, sampler_logp, jnp.array([[False, True, True]])).tolist()  # 6 is out of range
    [[0.0, 0.0, 0.75]]
    """
    log_ratio_BT, mask_BT, _ = log_ratio("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segment_ids)
    return _masked(log_ratio_BT, mask_BT, low, high, jnp.exp)


@formula("exp(sum_t(old_logp - sampler_logp)) * inside(exp(sum_t(old_logp - sampler_logp)), low, high)")
@at_level("sequence")
def mask_sequences(
    old_logp: Array, sampler_logp: Array, mask: Array, *, low: float, high: float, segment_ids: Array | None = None
) -> Array:
    """Compute Π_t ρ_t inside [low, high] and 0 outside, [B]: masked importance sampling by sequence.

    Liu, Li et al. 2025, "When Speed Kills Stability", where low is 0. A weight far above 1 marks a sequence that the
    sampler should hardly have sampled; truncating keeps it, this drops it.
    """
    product, keep = _of_sequence(sequences.total, old_logp, sampler_logp, mask, segment_ids)
    return _masked(product, keep, low, high, jnp.exp)


@formula("inside(exp(mean_t(old_logp - sampler_logp)), low, high)")
@at_level("sequence")
def reject_geometric(
    old_logp: Array, sampler_logp: Array, mask: Array, *, low: float, high: float, segment_ids: Array | None = None
) -> Array:
    """Return 1 if the geometric mean of ρ_t is inside [low, high], else 0, [B].

    Liu, Li et al. 2025, part 3 of "When Speed Kills Stability". The mean of many tokens hardly leaves 1, so useful
    bounds are narrow, some 1e-3 from 1: look at `mismatch_log_ppl_diff`, which is its logarithm, first.
    """
    mean, keep = _of_sequence(sequences.mean, old_logp, sampler_logp, mask, segment_ids)
    return _masked(mean, keep, low, high, lambda x: x * 0 + 1)


@formula(lambda keywords: f"inside({_estimate_text(keywords)}, low, high)")
@at_level("token")
def reject_tokens(
    old_logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    estimate: Estimate = k3,
    low: float = -math.inf,
    high: float,
    segment_ids: Array | None = None,
) -> Array:
    """Return 1 if an estimate of a token's KL(μ‖π_old) is inside [low, high], else 0, [B, T].

    verl's `token_k1`, `token_k2`, and `token_k3`. With `kl.k1`, which is -log ρ_t, bounds of ρ are minus their
    logarithms: ρ from 1/2 to 2 is low=-log 2, high=log 2.

    >>> old_logp, sampler_logp = jnp.log(jnp.array([[1.0, 0.4, 0.2]])), jnp.log(jnp.array([[1.0, 0.1, 0.3]]))
    >>> reject_tokens(old_logp, sampler_logp, jnp.array([[False, True, True]]), high=0.1).tolist()  # k3 1.61 and 0.07
    [[0.0, 0.0, 1.0]]

    Args:
      old_logp, sampler_logp, mask, segment_ids: as of every correction.
      estimate: a function of (sampler_logp, old_logp, mask), which holds log ρ within ±25.
      low: at most 0, the estimate for equal policies; only `kl.k1` is ever below.
      high: at least 0.
    """
    value_BT, mask_BT, _ = _estimated(estimate, old_logp, sampler_logp, mask, segment_ids)
    return _inside(value_BT, mask_BT, low, high)


@formula(_sequence_text)
@at_level("sequence")
def reject_sequences(
    old_logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    estimate: Estimate = k3,
    over: OverSequence = sequences.mean,
    low: float = -math.inf,
    high: float,
    segment_ids: Array | None = None,
) -> Array:
    """Return 1 if the mean, sum, or largest of the tokens' KL estimates is inside [low, high], else 0, [B].

    verl's `seq_mean_k1` to `seq_max_k3`. The largest rejects a sequence for a single token; the sum grows with the
    length. The mean of `kl.k1` with the bounds -log high and -log low is `reject_geometric`.

    Args:
      old_logp, sampler_logp, mask, segment_ids: as of every correction.
      estimate: a function of (sampler_logp, old_logp, mask), which holds log ρ within ±25.
      over: `sequences.mean`, `sequences.total`, or `sequences.largest`.
      low: at most 0, the estimate for equal policies; only `kl.k1` is ever below.
      high: at least 0.
    """
    checks.function("over", over)
    value_BT, mask_BT, segment_BT = _estimated(estimate, old_logp, sampler_logp, mask, segment_ids)
    value, keep = sequences.by_row_or_token(over(value_BT, mask_BT, segment_BT), mask_BT, segment_BT)
    return _inside(value, keep, low, high)


@formula(lambda keywords: factors(*(call_text(each, "old_logp", "sampler_logp") for each in keywords["factors"])))
def product(
    old_logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    factors: Sequence[Callable[..., Array]],
    segment_ids: Array | None = None,
) -> Array:
    """Multiply several corrections, [B] or [B, T]: one weight and any number of rejections.

    OpenRLHF's and NeMo-RL's sequence-masked TIS is a token's ratio in the sequences that `reject_geometric` keeps;
    verl's `rollout_is` and `rollout_rs` are one factor each for every name in them.

    >>> ratio, mask = jnp.array([[2.0, 0.5], [4.0, 1.0]]), jnp.ones((2, 2), bool)
    >>> keep = functools.partial(reject_geometric, low=0.9, high=1.1)  # of the geometric means 1 and 2
    >>> product(jnp.log(ratio), jnp.zeros((2, 2)), mask, factors=(truncate_tokens, keep)).tolist()
    [[2.0, 0.5], [0.0, 0.0]]

    Args:
      old_logp, sampler_logp, mask, segment_ids: as of every correction.
      factors: at least one correction.

    Raises:
      TypeError: a factor is no function.
      ValueError: there is none.
    """
    if not factors:
        raise ValueError("factors must be at least one correction, such as (truncate_tokens,); got none")
    for factor in factors:
        checks.function("factors", factor, like="correction.truncate_tokens")
    packed = {} if segment_ids is None else {"segment_ids": segment_ids}
    return multiplied([factor(old_logp, sampler_logp, mask, **packed) for factor in factors])


def multiplied(weights: Sequence[Array]) -> Array:
    """Multiply weights, some of them [B] and others [B, T]."""
    rank = max(weight.ndim for weight in weights)
    columns = (weight[:, None] if weight.ndim < rank else weight for weight in weights)
    return functools.reduce(operator.mul, columns)


@formula("where((advantage < 0) & (mean_t(sampler_logp - logp) > delta), 0, 1)")
@at_level("sequence")
def reject_off_policy(
    logp: Array,
    sampler_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    delta: float,
    segment_ids: Array | None = None,
) -> Array:
    """Mask off-policy sequences: OPSM (DeepSeek-V3.2, arXiv 2512.02556, eq. 8 and 9), [B], 0 or 1.

    0 if A < 0 and 1/|y| Σ_t log(μ(y_t)/π(y_t)) > delta, else 1. Bad samples that the current policy would hardly sample
    teach it little and can destabilize it; good ones count however far away. π is the policy that is trained and μ
    the sampler's, so this covers the mismatch and the staleness together. The paper gives no delta.

    >>> logp, sampler_logp = jnp.full((2, 2), -2.0), jnp.full((2, 2), -1.0)
    >>> reject_off_policy(logp, sampler_logp, jnp.array([1.0, -1.0]), jnp.ones((2, 2), bool), delta=0.1).tolist()
    [1.0, 0.0]

    Args:
      logp: float32 [B, T], of the policy that is trained.
      sampler_logp: float32 [B, T], of the policy that sampled the tokens.
      advantage: float32 [B], or [B, T]; then the weight is [B, T] too, 0 where that token's advantage is negative.
      mask: bool [B, T], True on response tokens.
      delta: at least 0.
      segment_ids: None, or int32 [B, T] for packed rows; then `advantage` is [B, T].
    """
    log_ratio_BT, mask_BT, segment_BT = log_ratio("logp", logp, "sampler_logp", sampler_logp, mask, segment_ids)
    checks.at_least_0("delta", delta)
    per_token = segment_BT is not None or len(getattr(advantage, "shape", ())) == 2
    advantage = checks.array("advantage", advantage, jnp.float32, "BT" if per_token else "B")
    like = mask_BT.shape if per_token else mask_BT.shape[:1]
    checks.same_shape("advantage", advantage, "logp" if per_token else "logp in its rows", like)
    mean_BS = sequences.mean(log_ratio_BT, mask_BT, segment_BT)
    if per_token:
        away, keep = jnp.broadcast_to(-sequences.at_tokens(mean_BS, segment_BT), mask_BT.shape), mask_BT
    else:
        away, keep = -mean_BS[:, 0], mask_BT.any(-1)
    weight = jnp.where((advantage < 0) & (away > delta), 0, away * 0 + 1)  # a NaN stays one
    return stop_gradient(jnp.where(keep, weight, 0))


def weight_metrics(weight: Array, mask: Array, segment_ids: Array | None = None) -> Metrics:
    """Return the metrics of a correction's weights, [B] or [B, T].

    `correction` (_mean, _min, _max): mean weight of a sequence; `correction_rejected`: share of tokens with 0.
    """
    mask_BT = sequences.response(mask, segment_ids)
    weight_BT = jnp.broadcast_to(weight if weight.ndim == 2 else weight[:, None], mask_BT.shape)
    mean_BS = sequences.mean(weight_BT, mask_BT, segment_ids)
    return {
        "correction": Spread(mean_BS, sequences.count(mask_BT, segment_ids) > 0),
        "correction_rejected": share_of_tokens(weight_BT == 0, mask_BT),
    }


def mismatch_metrics(
    old_logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    low: float = 0.5,
    high: float = 2.0,
    segment_ids: Array | None = None,
) -> Metrics:
    """Measure how far the sampler is from the learner: metrics per row, to be joined with those of `Terms` and reduced.

    With d = log π_old - log μ of a token sampled from μ:

    - `mismatch_kl`: mean of -d over the tokens, an estimate of KL(μ‖π_old) that can be negative.
    - `mismatch_k3`: mean of exp(d) - 1 - d, another, never negative.
    - `mismatch_log_ppl_diff` (_mean, _min, _max): log-perplexity of a sequence under the learner minus that under the
      sampler, which is the mean of -d over its tokens.
    - `mismatch_ratio_tokens`, `mismatch_ratio_squared_tokens`, and the same of `sequences`: means of ρ and ρ², of
      tokens and of the products over sequences. The first should be 1. `effective_sample_sizes` needs both.
    - `mismatch_chi2_tokens`, `mismatch_chi2_sequences`: mean of ρ² - 1, an estimate of χ²(π_old‖μ).
    - `mismatch_out_of_range_tokens`, `mismatch_out_of_range_sequences`: share with ρ, or its product, outside
      [low, high].
    - `mismatch_extreme_tokens`: share of tokens with |d| > ln 2 (arXiv 2510.11370).
    - `mismatch_abs_diff`: mean of |d|; `mismatch_abs_diff_largest` (_max): the largest |d| of a sequence, and of all.

    Log-ratios are clipped to ±25 before `exp`. No gradient flows through metrics.
    """
    d_BT, mask_BT, segment_BT = log_ratio("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segment_ids)
    bounds = _bounds(low, high)
    some_BS = sequences.count(mask_BT, segment_BT) > 0
    sum_BS = sequences.total(d_BT, mask_BT, segment_BT)

    held_BT, held_BS = (jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for x in (d_BT, sum_BS))
    size_BT = jnp.abs(d_BT)
    outside_BU = _outside(sequences.at_tokens(sum_BS, segment_BT), *bounds)
    return {
        "mismatch_kl": mean_over(-d_BT, mask_BT),
        "mismatch_k3": mean_over(k3_of(-held_BT), mask_BT),
        "mismatch_log_ppl_diff": Spread(-sequences.mean(d_BT, mask_BT, segment_BT), some_BS),
        "mismatch_ratio_tokens": mean_over(jnp.exp(held_BT), mask_BT),
        "mismatch_ratio_sequences": mean_over(jnp.exp(held_BS), some_BS),
        "mismatch_ratio_squared_tokens": mean_over(jnp.exp(2 * held_BT), mask_BT),
        "mismatch_ratio_squared_sequences": mean_over(jnp.exp(2 * held_BS), some_BS),
        "mismatch_chi2_tokens": mean_over(jnp.expm1(2 * held_BT), mask_BT),
        "mismatch_chi2_sequences": mean_over(jnp.expm1(2 * held_BS), some_BS),
        "mismatch_out_of_range_tokens": share_of_tokens(_outside(d_BT, *bounds), mask_BT),
        "mismatch_out_of_range_sequences": share_of_sequences(outside_BU & mask_BT, mask_BT, segment_BT),
        "mismatch_extreme_tokens": share_of_tokens(size_BT > math.log(2), mask_BT),
        "mismatch_abs_diff": mean_over(size_BT, mask_BT),
        "mismatch_abs_diff_largest": Spread(sequences.largest(size_BT, mask_BT, segment_BT), some_BS),
    }


def mismatch_by_position(
    old_logp: Array, sampler_logp: Array, mask: Array, *, segment_ids: Array | None = None
) -> Metrics:
    """Measure the mean of |log π_old - log μ| by the place of a token in its response: `mismatch_abs_diff_from_N`.

    N is the first place of a range, 1, 17, 65, 257, 1025, 4097; the range ends before the next one. What goes wrong
    late in a response, as with a cache that was filled wrongly, is hidden in the mean over all tokens.
    """
    d_BT, mask_BT, segment_BT = log_ratio("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segment_ids)
    count_BU = sequences.at_tokens(sequences.count(mask_BT, segment_BT), segment_BT)
    place_BT = count_BU - sequences.to_go(mask_BT.astype(jnp.float32), segment_BT) + 1
    ranges = zip(PLACES, (*PLACES[1:], math.inf), strict=True)
    return {
        f"mismatch_abs_diff_from_{first}": mean_over(jnp.abs(d_BT), mask_BT & (place_BT >= first) & (place_BT < end))
        for first, end in ranges
        if first <= mask_BT.shape[1]
    }


def effective_sample_sizes(metrics: dict[str, Array]) -> dict[str, Array]:
    """Compute `mismatch_ess_tokens` and `_sequences`: (Σ ρ)² / (N Σ ρ²), 1 if all ratios are equal.

    Of N samples, this share would be as good if they came from the learner. `metrics` is reduced: the share needs two
    means, and the effective sample sizes of microbatches do not add up to the batch's. 0 for an empty batch.
    """
    sizes = {}
    for of in ("tokens", "sequences"):
        mean, square = metrics[f"mismatch_ratio_{of}"], metrics[f"mismatch_ratio_squared_{of}"]
        sizes[f"mismatch_ess_{of}"] = mean**2 / jnp.maximum(square, jnp.finfo(jnp.float32).tiny)
    return sizes


def _of_sequence(
    reduction: Callable[[Array, Array, Array | None], Array],
    old_logp: ArrayLike,
    sampler_logp: ArrayLike,
    mask: ArrayLike,
    segments: ArrayLike | None,
) -> tuple[Array, Array]:
    """Return (log ρ reduced over each sequence, where it counts): [B], or [B, T] for packed rows."""
    log_ratio_BT, mask_BT, segment_BT = log_ratio("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segments)
    return sequences.by_row_or_token(reduction(log_ratio_BT, mask_BT, segment_BT), mask_BT, segment_BT)


def _estimated(
    estimate: Estimate, old_logp: ArrayLike, sampler_logp: ArrayLike, mask: ArrayLike, segments: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    """Return (the estimate of KL(μ‖π_old) by token, [B, T]; the mask; the segments)."""
    checks.function("estimate", estimate, like="kl.k3")
    policies = checks.two_policies("old_logp", old_logp, "sampler_logp", sampler_logp, mask, segments)
    old_logp_BT, sampler_logp_BT, mask_BT, segment_BT = policies
    mask_BT = sequences.response(mask_BT, segment_BT)
    return stop_gradient(estimate(sampler_logp_BT, old_logp_BT, mask_BT)), mask_BT, segment_BT


def _inside(value: Array, keep: Array, low: float, high: float) -> Array:
    """Return 1 where low ≤ value ≤ high, NaN where the value is NaN, else 0."""
    if not (checks.number("low", low) <= 0 and checks.number("high", high) >= 0):
        raise ValueError(f"low and high must be at most and at least 0, of equal policies; got {low} and {high}")
    return jnp.where(keep & ~((value < low) | (value > high)), value * 0 + 1, 0)


def _truncated(log_ratio: Array, keep: Array, cap: float) -> Array:
    return jnp.where(keep, jnp.exp(jnp.minimum(log_ratio, math.log(checks.positive("cap", cap)))), 0)


def _masked(log_ratio: Array, keep: Array, low: float, high: float, weight: Callable[[Array], Array]) -> Array:
    outside = _outside(log_ratio, *_bounds(low, high))
    return jnp.where(keep & ~outside, weight(jnp.where(outside, 0, log_ratio)), 0)


def _outside(log_ratio: Array, log_low: float, log_high: float) -> Array:
    """Return whether a log-ratio is out of range; False for NaN, so that a NaN remains visible."""
    return (log_ratio < log_low) | (log_ratio > log_high)


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Return the logarithms of 0 ≤ low ≤ 1 ≤ high < infinity."""
    for name, bound in (("low", low), ("high", high)):
        checks.number(name, bound)
    if not 0 <= low <= 1:
        raise ValueError(f"low must be from 0 to 1, so that equal policies are inside; got {low}")
    if not (high >= 1 and math.isfinite(high)):
        raise ValueError(f"high must be finite and at least 1, so that equal policies are inside; got {high}")
    return math.log(low) if low > 0 else -math.inf, math.log(high)
