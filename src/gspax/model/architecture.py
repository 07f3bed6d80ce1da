"""The rules that a model configuration must satisfy. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator

from gspax.config import ModelConfig, is_sparse


def architecture_problems(m: ModelConfig) -> Iterator[str]:
    """Why no model can be built from a configuration whose fields are in range, one sentence each."""
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"model.num_attention_heads: wanted a multiple of model.num_key_value_heads ({m.num_key_value_heads}), "
            f"got {m.num_attention_heads}"
        )
    if m.head_dim % 2:
        yield f"model.head_dim: wanted an even number (RoPE rotates pairs), got {m.head_dim}"
    sparse = [is_sparse(m, layer) for layer in range(m.num_hidden_layers)]
    if outside := [layer for layer in m.mlp_only_layers if not 0 <= layer < m.num_hidden_layers]:
        yield f"model.mlp_only_layers: wanted layers below {m.num_hidden_layers}, got {outside[0]}"
    if not all(sparse) and m.intermediate_size < 1:
        yield f"model.intermediate_size: wanted at least 1 for the dense layers, got {m.intermediate_size}"
    if any(sparse) and m.moe_intermediate_size < 1:
        yield f"model.moe_intermediate_size: wanted at least 1 for the experts, got {m.moe_intermediate_size}"
    if any(sparse) and not 1 <= m.num_experts_per_tok <= m.num_experts:
        yield (
            f"model.num_experts_per_tok: wanted 1 to model.num_experts ({m.num_experts}), got {m.num_experts_per_tok}"
        )
