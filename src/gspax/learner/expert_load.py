"""Router statistics: how evenly tokens are routed to experts, and how many choices an update changed.

Axes: L sparse layers, B rows, T tokens, A active experts, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gspax.types import Array


def expert_counts(expert_LBTA: Array, num_experts: int) -> Array:
    """Tokens that each layer sent to each expert, int32 `[L, E]`. Ids equal to `num_experts` are padding."""
    return jax.nn.one_hot(expert_LBTA, num_experts, dtype=jnp.int32).sum(axis=(1, 2, 3))


def relative_load(count_LE: Array) -> Array:
    """The counts over the mean of their layer, float32 `[L, E]`: 1 everywhere is perfect balance."""
    mean_L1 = jnp.maximum(count_LE.mean(axis=-1, keepdims=True), 1.0)
    return (count_LE / mean_L1).astype(jnp.float32)


def expert_load(expert_LBTA: Array, num_experts: int) -> Array:
    """`relative_load` of the choices in `expert_counts`."""
    return relative_load(expert_counts(expert_LBTA, num_experts))


def changed_share(before_LBTA: Array, after_LBTA: Array, num_experts: int) -> Array:
    """Share of the same tokens' expert choices that changed, 1 - |before ∩ after| / A, float32.

    The order of a token's experts does not matter; padding (id `num_experts`) is not counted.
    """
    kept_LBTA = (before_LBTA[..., :, None] == after_LBTA[..., None, :]).any(axis=-1)
    real_LBTA = before_LBTA < num_experts
    return (real_LBTA & ~kept_LBTA).sum() / jnp.maximum(real_LBTA.sum(), 1)
