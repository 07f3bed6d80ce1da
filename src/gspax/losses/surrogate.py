"""What the policy losses have in common: their inputs, exp of a log-ratio, the clipped objective.

Letters: B rows, T tokens, U for T, or 1 if all tokens of a row have the same number. `x_BT[b, t]` is about token t of
row b.

What a row has once stays [B, 1]: a loss with one ratio per sequence then passes over the tokens for the sum of their
log-ratios, for their number and for the gradient, and never else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier, stop_gradient

from gspax.losses import checks, sequences

Array = jax.Array

LOG_RATIO_LIMIT = 25.0


class Inputs(NamedTuple):
    """The checked arguments of a policy loss. Anything may stand outside the mask in the two that are `given`."""

    given_logp_BT: Array  # float32  log π, differentiable
    given_old_logp_BT: Array  # float32  log π_old, constant
    advantage_BU: Array  # float32  constant, 0 outside the mask
    mask_BT: Array  # bool     response tokens
    segment_BT: Array | None  # int32    the sequence that each token belongs to; None: a row is one
    correction_BU: Array | None  # float32  constant factor of the objective, 0 outside the mask; None: 1

    # Selected before any `exp`: behind it, a NaN from outside the mask would reach the gradient.

    @property
    def logp_BT(self) -> Array:  # noqa: N802
        """log π, 0 outside the mask."""
        return jnp.where(self.mask_BT, self.given_logp_BT, 0)

    @property
    def old_logp_BT(self) -> Array:  # noqa: N802
        """log π_old, 0 outside the mask."""
        return jnp.where(self.mask_BT, self.given_old_logp_BT, 0)

    @property
    def log_ratio_BT(self) -> Array:  # noqa: N802
        """log r = log π - log π_old, 0 outside the mask."""
        return jnp.where(self.mask_BT, self.given_logp_BT - self.given_old_logp_BT, 0)


Objective = tuple[Array, Array | None, Array | None]  # per token; where it is held from above, and from below


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
    """Check the arguments, and take gradients and what is outside the mask from those that are constants."""
    logp_BT, old_logp_BT, advantage, mask_BT = checks.policy_inputs(
        logp, old_logp, advantage, mask, advantage_axes=("BT",) if segment_ids is not None else advantage_axes
    )
    segment_BT = checks.segment_ids(segment_ids, logp_BT.shape)
    correction = checks.correction(correction, logp_BT.shape, packed=segment_BT is not None)
    mask_BT = sequences.response(mask_BT, segment_BT)

    def constant(value: Array) -> Array:
        if value.ndim == 2:
            return stop_gradient(jnp.where(mask_BT, value, 0))
        return stop_gradient(jnp.where(sequences.count(mask_BT, None) > 0, value[:, None], 0))

    return Inputs(
        given_logp_BT=logp_BT,
        given_old_logp_BT=stop_gradient(old_logp_BT),
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
    """exp(-x) - 1 + x, of x = log π - log of another policy; near 0 by its series x²/2 - x³/6 + ..., as 1 cancels."""
    series = jnp.zeros_like(x)
    for n in range(10, 1, -1):
        series = series * -x + 1 / math.factorial(n)
    return jnp.where(jnp.abs(x) < 0.5, x**2 * series, jnp.exp(-x) - 1 + x)


def sequence_log_ratio(x: Inputs) -> Array:
    """log s_i = 1/|y_i| Σ_t log r_it at every token of sequence i, [B, U]."""
    mean_BS = sequences.mean(x.log_ratio_BT, x.mask_BT, x.segment_BT)
    return sequences.at_tokens(mean_BS, x.segment_BT)


@jax.custom_jvp
def exp_of_each(log_s_BU: Array, logp_BT: Array) -> Array:
    """s_it = sg[s_i] π_it / sg[π_it], [B, T]: s_i at every token, with the derivative s_i ∇log π_it."""
    return jnp.broadcast_to(exp(log_s_BU), logp_BT.shape)


@exp_of_each.defjvp
def _exp_of_each_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    slope_BU = jax.jvp(exp, primals[:1], (jnp.ones_like(primals[0]),))[1]  # s_i, and 0 beyond ±25
    return exp_of_each(*primals), slope_BU * tangents[1]


def computed_again(objective: Callable[[Inputs], Objective], x: Inputs) -> Objective:
    """`objective(x)`, of which the backward pass computes the derivative from the arguments, `exp` and all.

    For an objective that is elementwise in the tokens. Each pass is then one loop over the arguments; else the ratios
    would be written to memory by the one and read by the other, which takes longer than to compute them twice.
    """
    constant = x._replace(given_logp_BT=stop_gradient(x.given_logp_BT))

    def of_logp(logp_BT: Array, x: Inputs) -> Array:
        return objective(x._replace(given_logp_BT=logp_BT))[0]

    # What `objective` has from outside, a traced clip range say, becomes an argument: custom_jvp takes no others.
    of_logp, outside = jax.closure_convert(of_logp, x.given_logp_BT, constant)
    return _first_order(of_logp, x.given_logp_BT, constant, *outside), *objective(constant)[1:]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_order(function: Callable[..., Array], logp_BT: Array, *constants: Any) -> Array:
    return function(logp_BT, *constants)


@_first_order.defjvp
def _first_order_jvp(function: Callable[..., Array], primals: Any, tangents: Any) -> tuple[Array, Array]:
    # Without the barrier the compiler would find that both passes want the same ratios, and write them to memory.
    logp_BT, *constants = optimization_barrier(primals)
    slope_BT = jax.jvp(lambda logp_BT: function(logp_BT, *constants), (logp_BT,), tangents[:1])[1]
    return _first_order(function, *primals), slope_BT


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
