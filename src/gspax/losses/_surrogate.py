"""What the policy losses share: checked inputs, exp of a log-ratio, the clipped objective.

Axes: B rows, T tokens; U is T, or 1 for a quantity that is the same for all tokens of a row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import _checks, _sequences

Array = jax.Array

LOG_RATIO_LIMIT = 25.0


class Inputs(NamedTuple):
    """The checked arguments of a policy loss; every float is 0 outside the mask, so that no NaN reaches a gradient."""

    logp_BT: Array  # float32  log π, differentiable
    old_logp_BT: Array  # float32  log π_old, constant
    log_ratio_BT: Array  # float32  log π - log π_old
    advantage_BU: Array  # float32  constant
    mask_BT: Array  # bool     response tokens
    segment_BT: Array | None  # int32    the sequence that a token belongs to; None: a row is one sequence
    correction_BU: Array | None  # float32  constant factor of the objective; None: 1


def prepare(
    logp: Any,
    old_logp: Any,
    advantage: Any,
    mask: Any,
    segment_ids: Any,
    correction: Any,
    *,
    advantage_axes: tuple[str, ...] = ("B",),
) -> Inputs:
    """Check the arguments, zero them outside the mask and stop the gradient of the constants."""
    logp_BT, old_logp_BT, advantage, mask_BT = _checks.policy_inputs(
        logp, old_logp, advantage, mask, advantage_axes=("BT",) if segment_ids is not None else advantage_axes
    )
    segment_BT = _checks.segment_ids(segment_ids, logp_BT.shape)
    correction = _checks.correction(correction, logp_BT.shape, packed=segment_BT is not None)
    mask_BT = _sequences.response(mask_BT, segment_BT)
    old_logp_BT = stop_gradient(old_logp_BT)

    def constant(value: Array) -> Array:
        if value.ndim == 2:
            return stop_gradient(jnp.where(mask_BT, value, 0))
        return stop_gradient(jnp.where(_sequences.count(mask_BT, None) > 0, value[:, None], 0))

    return Inputs(
        logp_BT=jnp.where(mask_BT, logp_BT, 0),
        old_logp_BT=jnp.where(mask_BT, old_logp_BT, 0),
        log_ratio_BT=jnp.where(mask_BT, logp_BT - old_logp_BT, 0),
        advantage_BU=constant(advantage),
        mask_BT=mask_BT,
        segment_BT=segment_BT,
        correction_BU=None if correction is None else constant(correction),
    )


def exp(log_ratio: Array) -> Array:
    """exp of a log-ratio held within ±25, so that float32 cannot overflow; ±25 itself still has its gradient."""
    limit = jnp.sign(log_ratio) * LOG_RATIO_LIMIT
    return jnp.exp(jnp.where(jnp.abs(log_ratio) > LOG_RATIO_LIMIT, limit, log_ratio))


def k3_of(x: Array) -> Array:
    """exp(-x) - 1 + x for a log-ratio x; near 0 by its series x²/2 - x³/6 + ..., where the difference cancels."""
    series = jnp.zeros_like(x)
    for n in range(10, 1, -1):
        series = series * -x + 1 / math.factorial(n)
    return jnp.where(jnp.abs(x) < 0.5, x**2 * series, jnp.exp(-x) - 1 + x)


def sequence_log_ratio(x: Inputs) -> Array:
    """log s_i = 1/|y_i| Σ_t log r_it at every token of sequence i, [B, U]."""
    mean_BS = _sequences.mean(x.log_ratio_BT, x.mask_BT, x.segment_BT)
    return _sequences.at_tokens(mean_BS, x.segment_BT)


def clipped(
    ratio: Array, advantage: Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Array, Array, Array]:
    """min(r A, clip(r, 1 - low, 1 + high) A), elementwise, and where it is clipped from above and from below.

    With `dual_clip` c (arXiv 1912.09729): max(that, c A) where A < 0, so a ratio above c is clipped from above there.

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
