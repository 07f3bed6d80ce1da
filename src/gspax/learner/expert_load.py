"""Router statistics: how evenly and how surely tokens are routed to experts, and how many choices an update changed.

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


def changed_share(
    before_LBTA: Array, after_LBTA: Array, num_experts: int, axis: tuple[int, ...] | None = None
) -> Array:
    """Share of the same tokens' expert choices that changed, 1 - |before ∩ after| / A, float32.

    The order of a token's experts does not matter; padding (id `num_experts`) is not counted.
    """
    kept_LBTA = (before_LBTA[..., :, None] == after_LBTA[..., None, :]).any(axis=-1)
    real_LBTA = before_LBTA < num_experts
    return (real_LBTA & ~kept_LBTA).sum(axis=axis) / jnp.maximum(real_LBTA.sum(axis=axis), 1)


def changed_by_layer(before_LBTA: Array, after_LBTA: Array, num_experts: int) -> Array:
    """`changed_share` of each layer, float32 `[L]`."""
    return changed_share(before_LBTA, after_LBTA, num_experts, axis=(1, 2, 3))


def router_confidence(logits_LBTE: Array, valid_BT: Array, active: int) -> dict[str, Array]:
    """The confidence of each layer's router, float32 `[L]`: means over the tokens of `valid_BT`.

    `entropy` of the softmax over the experts, in nats; `confidence`, its largest probability; `margin`, by how much the
    logit of the last chosen expert exceeds that of the first one that is not (0 if all `active` = E are chosen).
    """
    log_prob_LBTE = jax.nn.log_softmax(logits_LBTE.astype(jnp.float32))
    best_LBTA = jax.lax.top_k(log_prob_LBTE, min(active + 1, log_prob_LBTE.shape[-1]))[0]  # differences as of logits
    values = {
        "entropy": -(jnp.exp(log_prob_LBTE) * log_prob_LBTE).sum(axis=-1),
        "confidence": jnp.exp(best_LBTA[..., 0]),
        "margin": best_LBTA[..., active - 1] - best_LBTA[..., -1],
    }
    tokens = jnp.maximum(valid_BT.sum(), 1)
    return {name: jnp.where(valid_BT[None], x_LBT, 0).sum(axis=(1, 2)) / tokens for name, x_LBT in values.items()}
