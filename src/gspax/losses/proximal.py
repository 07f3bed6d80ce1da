"""Old log-probs without a pass that computes them: A-3PO (arXiv 2512.06547) interpolates them by the age of each token.

Asynchronous samples have three policies: μ, some rollouts old, which sampled a token; π_old, before the updates of the
rollout that it is trained in, which ratios are bounded to (decoupled PPO, arXiv 2110.00641, 2505.24298); and π. The
learner knows log μ and log π. If log-probs move along a line, log π_old lies between them where its age does.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspax.losses import checks, explicit
from gspax.losses.formulas import formula

Array = jax.Array


@formula("sampler_logp + where(progress == 0, 1, age / (age + progress)) * (sg(logp) - sampler_logp)")
def interpolated_logp(logp: Array, sampler_logp: Array, age: Array, progress: ArrayLike) -> Array:
    """Compute log μ + α (log π - log μ) with α = age / (age + progress), float32 [B, T], without a gradient (A-3PO).

    In units of a rollout's updates, μ is `age` before π_old and π `progress` after it: π_old is the share α of the way
    from μ to π. Before the first update, where `progress` is 0, π_old is π, and α is 1 also for a token
    of age 0. Later a token of age 0 has α = 0: μ is π_old, but for rounding. AReaL's `loglinear` has a `progress` of 1
    throughout.

    >>> logp, sampler_logp = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -2.0]])
    >>> interpolated_logp(logp, sampler_logp, jnp.array([[0, 1]]), 0.5).round(3).tolist()
    [[-2.0, -1.333]]

    Args:
      logp: float32 [B, T], of the policy that is trained.
      sampler_logp: float32 [B, T], of the policy that sampled the tokens.
      age: int32 [B, T], at least 0: rollouts trained on between the weights that sampled a token and π_old.
      progress: a scalar from 0 to 1: the updates of this rollout that are done, over their number.

    Raises:
      TypeError, ValueError: an argument is of another dtype or shape.
    """
    logp_BT = checks.finite_logp("logp", logp)
    sampler_BT = checks.finite_logp("sampler_logp", sampler_logp)
    age_BT = checks.array("age", age, jnp.int32, "BT").astype(jnp.float32)
    for name, value in (("sampler_logp", sampler_BT), ("age", age_BT)):
        checks.same_shape(name, value, "logp", logp_BT.shape)
    logp_BT, sampler_BT, age_BT = explicit.alike(logp_BT, sampler_BT, age_BT)
    until_BT = age_BT + progress
    share_BT = jnp.where(progress == 0, 1, age_BT / jnp.where(until_BT == 0, 1, until_BT))
    return stop_gradient(jnp.where(share_BT == 1, logp_BT, sampler_BT + share_BT * (logp_BT - sampler_BT)))
