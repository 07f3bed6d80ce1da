"""The shape of a Qwen3 / Qwen3-MoE model, in the field names of its published `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Remat = Literal["none", "products", "full", "offload"]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """RoPE stretched to `factor` times the context that the model was trained on (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0  # dimensions that turn more often than this in the original context keep their frequency
    beta_slow: float = 1.0  # those that turn less often than this have theirs divided by `factor`; a ramp in between
    truncate: bool = True  # the ramp starts and ends at whole dimensions
    attention_factor: float | None = (
        None  # multiplies queries and keys; None: from the next two, else 0.1 ln factor + 1
    )
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, and below the blank line how it is computed and where its parameters come from."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0  # width of a dense feed-forward layer
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # width of one expert
    norm_topk_prob: bool = True  # renormalise the chosen experts' probabilities to sum to one
    decoder_sparse_step: int = 1  # layer l has experts if (l + 1) is a multiple of this ...
    mlp_only_layers: tuple[int, ...] = ()  # ... and l is not listed here
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: Yarn | None = None
    attention_bias: bool = False  # of the four projections of an attention layer
    sliding_window: int = 0  # tokens that a token of the layers listed next looks at, itself included
    sliding_layers: tuple[int, ...] = ()  # the others look at everything before them
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 40960

    dtype: str = "float32"  # of activations and matmuls; logits are float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters; bfloat16 ones have a float32 master copy
    # What a layer keeps for its backward pass: none: everything; products: matrix products and its input; full: its
    # input; offload: its input, in the host's memory. The rest is computed again.
    remat: Remat = "none"
    checkpoint: str = ""  # folder of a Hugging Face checkpoint that parameters start from; empty: random


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether `layer` (from 0) has experts rather than one dense feed-forward network."""
    return (
        config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """How many tokens a token of each layer looks at, itself included; empty if all layers look at everything."""
    sliding = config.sliding_layers if config.sliding_window else ()
    everything = 2**30
    layers = range(config.num_hidden_layers)
    return tuple(config.sliding_window if layer in sliding else everything for layer in layers) if sliding else ()


def layer_runs(config: ModelConfig) -> tuple[tuple[bool, int], ...]:
    """Consecutive layers of one kind as (sparse, count); each run is one stack of parameters and one `lax.scan`."""
    runs: list[tuple[bool, int]] = []
    for layer in range(config.num_hidden_layers):
        sparse = is_sparse(config, layer)
        if runs and runs[-1][0] == sparse:
            runs[-1] = (sparse, runs[-1][1] + 1)
        else:
            runs.append((sparse, 1))
    return tuple(runs)
