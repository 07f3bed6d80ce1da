"""The parts of every policy loss: checked inputs, the clipped objective, and the terms and metrics of a row.

The metrics (named in docs/losses.md) describe the whole batch once they are reduced; no gradient
flows through them. `ratio_deviation` is the noise floor of s_i in the first update of a rollout batch, where both
policies are the same.

Axes: B rows, T tokens; U is T, or 1 for a quantity that is the same for all tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspax.losses import checks, sequences
from gspax.losses.terms import Aggregate, Metrics, Quantile, Share, Spread, Terms, mean_over

Array = jax.Array

LOG_RATIO_LIMIT = 25.0
CLIPPED = "min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)"  # the formula of `clipped`
NOISE_ABOVE = 0.1  # share of the tokens whose sequences may lie beyond the noise floor


class Inputs(NamedTuple):
    """The checked arguments of a policy loss; every float is 0 outside the mask, so that no NaN reaches a gradient."""

    logp_BT: Array  # float32  log π, differentiable
    old_logp_BT: Array  # float32  log π_old, constant
    log_ratio_BT: Array  # float32  log π - log π_old
    advantage_BU: Array  # float32  constant
    mask_BT: Array  # bool     response tokens
    segment_BT: Array | None  # int32    the sequence that a token belongs to; None: a row is one sequence
    correction_BU: Array | None  # float32  constant factor of the objective; None: 1


def compare_logp(
    logp: ArrayLike,
    other: ArrayLike,
    mask: ArrayLike,
    segment_ids: ArrayLike | None,
    *,
    other_name: str = "ref_logp",
) -> tuple[Array, Array, Array, Array | None]:
    """Return (log π, x = log π - log of the other policy without a gradient, the mask, the segments), checked."""
    policies = checks.two_policies("logp", logp, other_name, other, mask, segment_ids)
    logp_BT, other_BT, mask_BT, segment_BT = policies
    mask_BT = sequences.response(mask_BT, segment_BT)
    return logp_BT, limited_log_ratio(logp_BT, other_BT, mask_BT), mask_BT, segment_BT


def limited_log_ratio(logp_BT: Array, other_BT: Array, mask_BT: Array) -> Array:
    """Compute log π - log of the other policy, without a gradient, limited to ±25, 0 outside the mask."""
    return stop_gradient(jnp.clip(jnp.where(mask_BT, logp_BT - other_BT, 0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sampling_ratio(logp_BT: Array, old_logp: ArrayLike | None, mask_BT: Array) -> Array:
    """Compute π/π_old without a gradient, 1 outside the mask; 1 everywhere without `old_logp`: π sampled the tokens."""
    if old_logp is None:
        return jnp.ones_like(logp_BT)
    old_logp_BT = checks.finite_logp("old_logp", old_logp)
    checks.same_shape("old_logp", old_logp_BT, "logp", logp_BT.shape)
    return jnp.exp(limited_log_ratio(logp_BT, old_logp_BT, mask_BT))


def with_gradient(value_BT: Array, gradient_BT: Array, logp_BT: Array) -> Array:
    """Return the value with this gradient by logp, both constants: the added term is 0 except for its derivative.

    Entries outside the mask do not matter: every aggregation leaves them out.
    """
    return value_BT + gradient_BT * (logp_BT - stop_gradient(logp_BT))


def squared(x_BT: Array, logp_BT: Array) -> Array:
    """Compute x² with the gradient 2 x ∇log π, for a constant x = log π - log of another policy."""
    return with_gradient(x_BT**2, 2 * x_BT, logp_BT)


def prepare(
    logp: ArrayLike,
    old_logp: ArrayLike,
    advantage: ArrayLike,
    mask: ArrayLike,
    segment_ids: ArrayLike | None,
    correction: ArrayLike | None,
    *,
    advantage_axes: tuple[str, ...] = ("B",),
) -> Inputs:
    """Check the arguments, zero them outside the mask and stop the gradient of the constants."""
    logp_BT, old_logp_BT, advantage, mask_BT = checks.policy_inputs(
        logp, old_logp, advantage, mask, advantage_axes=("BT",) if segment_ids is not None else advantage_axes
    )
    segment_BT = checks.segment_ids(segment_ids, logp_BT.shape)
    factor = checks.correction(correction, logp_BT.shape, packed=segment_BT is not None)
    mask_BT = sequences.response(mask_BT, segment_BT)
    old_logp_BT = stop_gradient(old_logp_BT)

    def constant(value: Array) -> Array:
        if value.ndim == 2:
            return stop_gradient(jnp.where(mask_BT, value, 0))
        return stop_gradient(jnp.where(sequences.count(mask_BT, None) > 0, value[:, None], 0))

    return Inputs(
        logp_BT=jnp.where(mask_BT, logp_BT, 0),
        old_logp_BT=jnp.where(mask_BT, old_logp_BT, 0),
        log_ratio_BT=jnp.where(mask_BT, logp_BT - old_logp_BT, 0),
        advantage_BU=constant(advantage),
        mask_BT=mask_BT,
        segment_BT=segment_BT,
        correction_BU=None if factor is None else constant(factor),
    )


def log_ratio(
    name: str, logp: ArrayLike, other_name: str, other: ArrayLike, mask: ArrayLike, segment_ids: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    """Return (log-ratio of two policies without a gradient, arbitrary outside the mask; the mask; the segments)."""
    policies = checks.two_policies(name, logp, other_name, other, mask, segment_ids)
    logp_BT, other_BT, mask_BT, segment_BT = policies
    return stop_gradient(logp_BT - other_BT), sequences.response(mask_BT, segment_BT), segment_BT


def exp(log_ratio: Array) -> Array:
    """Compute exp of a log-ratio clipped to ±25, so that float32 cannot overflow; ±25 itself still has its gradient."""
    limit = jnp.sign(log_ratio) * LOG_RATIO_LIMIT
    return jnp.exp(jnp.where(jnp.abs(log_ratio) > LOG_RATIO_LIMIT, limit, log_ratio))


def k3_of(x: Array) -> Array:
    """Compute exp(-x) - 1 + x for a log-ratio x; near 0 by its series x²/2 - x³/6 + ..., as the difference cancels."""
    series = jnp.zeros_like(x)
    for n in range(10, 1, -1):
        series = series * -x + 1 / math.factorial(n)
    return jnp.where(jnp.abs(x) < 0.5, x**2 * series, jnp.exp(-x) - 1 + x)


def sequence_log_ratio(x: Inputs) -> Array:
    """Compute log s_i = 1/|y_i| Σ_t log r_it at every token of sequence i, [B, U]."""
    mean_BS = sequences.mean(x.log_ratio_BT, x.mask_BT, x.segment_BT)
    return sequences.at_tokens(mean_BS, x.segment_BT)


def clipped(
    ratio: Array, advantage: Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Array, Array, Array]:
    """Compute min(r A, clip(r, 1 - low, 1 + high) A), elementwise, and where it is clipped from above and from below.

    With `dual_clip` c (arXiv 1912.09729): max(min(...), c A) where A < 0, so a ratio above c is clipped from above.

    Written as a selection of the bound rather than with `jnp.minimum`. The value is the same, but `jnp.minimum` halves
    the gradient on ties, and r A can round to the bound's product before r rounds to the bound, so that gradient and
    clip fractions would disagree.
    """
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    held = jnp.where(high, 1 + clip_high, jnp.where(low, 1 - clip_low, ratio))
    if dual_clip is not None:
        far = (advantage < 0) & (ratio > dual_clip)
        held, high = jnp.where(far, dual_clip, held), high | far
    return held * advantage, high, low


def of_tokens(held_BS: Array, tokens_BS: Array) -> Share:
    """Compute the share of response tokens that are clipped, from the number of clipped tokens in each sequence."""
    return Share(jnp.sum(held_BS, -1), jnp.sum(tokens_BS, -1))


def of_sequences(held_BS: Array, tokens_BS: Array) -> Share:
    """Compute the share of non-empty sequences with at least one clipped token."""
    return Share(*(jnp.sum(tokens > 0, -1, dtype=jnp.float32) for tokens in (held_BS, tokens_BS)))


def weighted_terms(weight_BT: Array, x: Inputs, aggregate: Aggregate, *, high_BT: Array, low_BT: Array) -> Terms:
    """Return the `Terms` of a loss that maximizes w A log π, with a constant weight w that is 0 where high or low."""
    weight_BT = jnp.where(high_BT | low_BT, 0, weight_BT)
    return policy_terms(weight_BT * x.advantage_BU * x.logp_BT, x, aggregate, high_BU=high_BT, low_BU=low_BT)


def policy_terms(
    objective_BU: Array,
    x: Inputs,
    aggregate: Aggregate,
    *,
    high_BU: Array | None = None,
    low_BU: Array | None = None,
    share: Callable[[Array, Array], Share] = of_tokens,
) -> Terms:
    """Return the `Terms` of a loss that maximizes the aggregate of an objective; no flags: nothing is clipped."""
    checks.function("aggregate", aggregate)
    if x.correction_BU is not None:
        objective_BU = objective_BU * x.correction_BU
    if objective_BU.shape == x.mask_BT.shape:
        value_B, weight_B = aggregate(-objective_BU, x.mask_BT, x.segment_BT)
    else:  # the same for all tokens of a row: factored out of the sum over them
        share_B, weight_B = aggregate(jnp.ones(x.mask_BT.shape, jnp.float32), x.mask_BT, x.segment_BT)
        value_B = -objective_BU[:, 0] * share_B
    return Terms(value_B, weight_B, policy_metrics(x, high_BU, low_BU, share))


def policy_metrics(
    x: Inputs, high_BU: Array | None, low_BU: Array | None, share: Callable[[Array, Array], Share]
) -> Metrics:
    """Return the metrics of a policy loss; `share`, `of_tokens` or `of_sequences`, counts both sides' clips."""
    mask_BT, segment_BT = x.mask_BT, x.segment_BT
    tokens_BS = sequences.count(mask_BT, segment_BT)
    high_BS, low_BS = (
        jnp.zeros_like(tokens_BS) if flag is None else sequences.total(flag.astype(jnp.float32), mask_BT, segment_BT)
        for flag in (high_BU, low_BU)
    )  # no token is clipped from above and from below, so the two may be added
    return {
        "clip_fraction_tokens": of_tokens(high_BS + low_BS, tokens_BS),
        "clip_fraction_sequences": of_sequences(high_BS + low_BS, tokens_BS),
        "clip_fraction_high": share(high_BS, tokens_BS),
        "clip_fraction_low": share(low_BS, tokens_BS),
        **sequence_ratio_metrics(stop_gradient(x.log_ratio_BT), mask_BT, segment_BT),
    }


def sequence_ratio_metrics(log_ratio_BT: Array, mask_BT: Array, segment_BT: Array | None) -> Metrics:
    """Return the metrics that do not depend on the loss; the log-ratio is 0 outside the mask."""
    tokens_BS = sequences.count(mask_BT, segment_BT)
    log_s_BS, keep_BS = sequences.mean(log_ratio_BT, mask_BT, segment_BT), tokens_BS > 0
    ratio_BS = exp(log_s_BS)
    deviation_BS = jnp.abs(jnp.expm1(jnp.clip(log_s_BS, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
    k3_BT = k3_of(-jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "ratio": Spread(ratio_BS, keep_BS),
        "ratio_deviation": Quantile(value=deviation_BS, weight=tokens_BS, above=NOISE_ABOVE),
        "kl": mean_over(k3_BT, mask_BT),
    }
