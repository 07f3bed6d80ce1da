"""What the policy losses have in common: their inputs, exp of a log-ratio, the clipped objective.

Letters: B rows, T tokens. `x_BT[b, t]` is about token t of row b.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks, sequences

Array = jax.Array

LOG_RATIO_LIMIT = 25.0


class Inputs(NamedTuple):
    """The checked arguments of a policy loss, with zeros outside the mask: no NaN from there reaches a gradient."""

    logp_BT: Array  # float32  log π, differentiable
    old_logp_BT: Array  # float32  log π_old, constant
    log_ratio_BT: Array  # float32  log r = log π - log π_old, differentiable
    advantage_BT: Array  # float32  constant
    mask_BT: Array  # bool     response tokens
    segment_BT: Array | None  # int32    the sequence that each token belongs to; None: a row is one
    correction_BT: Array | None  # float32  constant factor of the objective; None: 1


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
    """Check the arguments, spread what belongs to a row over its tokens, and select away what is outside the mask."""
    logp_BT, old_logp_BT, advantage, mask_BT = checks.policy_inputs(
        logp, old_logp, advantage, mask, advantage_axes=("BT",) if segment_ids is not None else advantage_axes
    )
    segment_BT = checks.segment_ids(segment_ids, logp_BT.shape)
    correction = checks.correction(correction, logp_BT.shape, packed=segment_BT is not None)
    mask_BT = sequences.response(mask_BT, segment_BT)

    def constant(value: Array) -> Array:
        value_BT = value if value.ndim == 2 else jnp.broadcast_to(value[:, None], mask_BT.shape)
        return stop_gradient(jnp.where(mask_BT, value_BT, 0))

    # Selected here, before any `exp`: behind it, a NaN would reach the gradient.
    logp_BT, old_logp_BT = jnp.where(mask_BT, logp_BT, 0), constant(old_logp_BT)
    return Inputs(
        logp_BT=logp_BT,
        old_logp_BT=old_logp_BT,
        log_ratio_BT=logp_BT - old_logp_BT,
        advantage_BT=constant(advantage),
        mask_BT=mask_BT,
        segment_BT=segment_BT,
        correction_BT=None if correction is None else constant(correction),
    )


def exp(log_ratio: Array) -> Array:
    """exp of a log-ratio held within ±25, so that float32 cannot overflow; ±25 itself still has its gradient."""
    limit = jnp.sign(log_ratio) * LOG_RATIO_LIMIT
    return jnp.exp(jnp.where(jnp.abs(log_ratio) > LOG_RATIO_LIMIT, limit, log_ratio))


def sequence_log_ratio(x: Inputs) -> Array:
    """log s_i = 1/|y_i| Σ_t log r_it at every token of sequence i, [B, T]."""
    mean_BS = sequences.mean(x.log_ratio_BT, x.mask_BT, x.segment_BT)
    return sequences.at_tokens(mean_BS, x.mask_BT, x.segment_BT)


def clipped(
    ratio: Array, advantage: Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Array, Array, Array]:
    """min(r A, clip(r, 1 - low, 1 + high) A), elementwise, and where it is cut from above and from below.

    With `dual_clip` c (arXiv 1912.09729): max(that, c A) where A < 0, so a ratio above c is cut from above there.

    Written with the cases in which the result is a constant bound. `jnp.minimum` gives the same value, but
    splits its gradient on ties, and r A rounds to the bound's product before r rounds to the bound: then the
    gradient would be cut in half and the metrics would say that it was cut or that it was not.
    """
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    held = jnp.where(high, 1 + clip_high, jnp.where(low, 1 - clip_low, ratio))
    if dual_clip is not None:
        far = (advantage < 0) & (ratio > dual_clip)
        held, high = jnp.where(far, dual_clip, held), high | far
    return held * advantage, high, low
