"""How many parameters a model has, the FLOPs of its forward pass, and the prompts that a sampler holds."""

from __future__ import annotations

from dataclasses import replace

from gspax.config import Lora, ModelConfig, Placement, Sampling, is_sparse


def parameter_count(config: ModelConfig) -> int:
    """Numbers in the model's parameters, embedding and head included."""
    return _outer_count(config) + sum(
        attention_count(config) + mlp_count(config, layer, config.num_experts)
        for layer in range(config.num_hidden_layers)
    )


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters used by one token: only its experts; embedding and head in full, as in the published "A3B"."""
    return _outer_count(config) + sum(
        attention_count(config) + mlp_count(config, layer, config.num_experts_per_tok)
        for layer in range(config.num_hidden_layers)
    )


def forward_flops(config: ModelConfig, length: float) -> float:
    """FLOPs of one token's forward pass in a row of `length` tokens: matrix products, and attention to half the row."""
    lookups = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
    return 2 * (active_parameter_count(config) - lookups) + attention


def trained_count(config: ModelConfig, lora: Lora | None) -> int:
    """Numbers that have a gradient: those of the adapters, if there are any, else all parameters."""
    if lora is None:
        return parameter_count(config)
    D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention = 2 * (D + N * H) + 2 * (D + K * H) if lora.attention else 0
    total = 0
    for layer in range(config.num_hidden_layers):
        sparse = is_sparse(config, layer)
        experts, width = (config.num_experts, config.moe_intermediate_size) if sparse else (1, config.intermediate_size)
        total += lora.rank * (attention + (3 * experts * (D + width) if lora.mlp else 0))
    return total


def with_carried(sampling: Sampling, placement: Placement | None) -> Sampling:
    """The settings with as many prompts as the sampler holds at once: with partial rollouts, more than a batch's."""
    carried = placement.partial.carried if placement is not None and placement.partial is not None else 0
    return replace(sampling, prompts=sampling.prompts + carried)


def _outer_count(config: ModelConfig) -> int:
    """Embedding, final norm and, unless tied, head."""
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * config.hidden_size + config.hidden_size


def attention_count(config: ModelConfig) -> int:
    """Projections and their biases, the norms of queries and keys, and the layer's two norms."""
    D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    biases = (N * H + 2 * K * H if config.attention_bias or config.qkv_bias else 0) + (
        D if config.attention_bias else 0
    )
    return 2 * D * N * H + 2 * D * K * H + biases + (2 * H if config.qk_norm else 0) + 2 * D


def mlp_count(config: ModelConfig, layer: int, experts: int) -> int:
    """The router, `experts` experts and the shared one, or one dense network."""
    D = config.hidden_size
    if is_sparse(config, layer):
        shared = config.shared_expert_intermediate_size
        own = 3 * D * shared + D if shared else 0
        return D * config.num_experts + 3 * experts * D * config.moe_intermediate_size + own
    return 3 * D * config.intermediate_size
