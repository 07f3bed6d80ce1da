"""Router-Shift Policy Optimization (RSPO, arXiv 2510.23027): less weight for tokens whose routing has moved.

A token's factor is γ_t = max(floor, exp(-d_t)), where d_t is the mean of |log r(e) - log r_old(e)| over the layers and
the experts e that the old policy chose, and r are the router's probabilities. It has no gradient and multiplies the
token's ratio before that is clipped: a loss gets `old_logp - log γ` in place of `old_logp`. GSPO's ratio is then scaled
by the geometric mean of its tokens' factors.

The routing is taken at the position that computed the token's probability, the one before the token: the factor belongs
to the ratio of π(y_t | x, y_<t), and the routing of y_t as an input acts on later tokens only. The first response token
has the routing of the last prompt token.

Axes: B rows, L sparse layers, T tokens, A active experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks, explicit
from gspax.losses.formulas import formula

Array = jax.Array


@formula("max(-router_distance, log(floor))")
def log_factor(router_logp: Array, old_router_logp: Array, mask: Array, *, floor: float = 0.8) -> Array:
    """Compute log γ of each token, float32 [B, T], 0 outside the mask; without a gradient.

    >>> old = jnp.log(jnp.array([[[[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]]]]))
    >>> new = old.at[0, 0, 1, 0].add(-0.2)
    >>> log_factor(new, old, jnp.array([[False, True, True]])).round(3).tolist()
    [[0.0, -0.0, -0.10000000149011612]]

    Args:
      router_logp: float32 [B, L, T, A], log-probabilities that the router gives at position t, which reads token t, to
        the experts of the old policy. In packed rows too, a response token's left neighbor is the token before it.
      old_router_logp: float32 [B, L, T, A], the log-probabilities that the old policy gave.
      mask: bool [B, T], True on response tokens.
      floor: above 0 and at most 1; 1 turns the factor off.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape; the message names it.
    """
    new_BLTA = checks.array("router_logp", router_logp, jnp.float32, "BLTA")
    old_BLTA = checks.array("old_router_logp", old_router_logp, jnp.float32, "BLTA")
    mask_BT = checks.array("mask", mask, jnp.bool_, "BT")
    checks.same_shape("old_router_logp", old_BLTA, "router_logp", new_BLTA.shape)
    checks.same_shape("mask", mask_BT, "router_logp", (new_BLTA.shape[0], new_BLTA.shape[2]))
    if not 0 < floor <= 1:
        raise ValueError(f"floor: wanted above 0 and at most 1, got {floor}")
    shift_BT = jnp.abs(stop_gradient(new_BLTA) - stop_gradient(old_BLTA)).mean(axis=(1, 3))
    # The shift at a position belongs to the token that is computed there, one to the right.
    shift_BT = explicit.like(jnp.pad(explicit.whole(shift_BT, 1)[:, :-1], ((0, 0), (1, 0))), mask_BT)
    return jnp.where(mask_BT, jnp.maximum(-shift_BT, jnp.log(floor)), 0.0)
