"""Router statistics: how evenly tokens are routed to experts, and how many choices an update changed.

Axes: L sparse layers, B rows, T tokens, A active experts, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gspax.types import Array


def expert_load(expert_LBTA: Array, num_experts: int) -> Array:
    """Tokens of each expert over the mean of its layer, `[L, E]` float32: 1 everywhere is perfect balance.

    Ids equal to `num_experts` are padding and not counted.
    """
    L = expert_LBTA.shape[0]
    count_LE = jax.vmap(lambda ids: jnp.bincount(ids.reshape(-1), length=num_experts + 1))(expert_LBTA)[:, :num_experts]
    mean_L1 = jnp.maximum(count_LE.sum(axis=-1, keepdims=True) / num_experts, 1.0)
    return (count_LE / mean_L1).astype(jnp.float32).reshape(L, num_experts)


def changed_share(before_LBTA: Array, after_LBTA: Array, num_experts: int) -> Array:
    """Share of the same tokens' expert choices that changed, 1 - |before ∩ after| / A, float32.

    The order of a token's experts does not matter; padding (id `num_experts`) is not counted.
    """
    kept_LBTA = (before_LBTA[..., :, None] == after_LBTA[..., None, :]).any(axis=-1)
    real_LBTA = before_LBTA < num_experts
    return (real_LBTA & ~kept_LBTA).sum() / jnp.maximum(real_LBTA.sum(), 1)
