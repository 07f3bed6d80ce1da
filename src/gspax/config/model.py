"""The shape of a model: what `config.json` of a checkpoint says, and how it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

from gspax.config.ranges import (
    AtLeast2,
    NonNegativeInt,
    OptionalSize,
    Positive,
    PositiveInt,
    Range,
    Size,
    at_least,
    at_most,
)

LOGIT_BUDGET = 2**25  # logits that the learner holds at once on one device (128 MiB)
SCORE_BUDGET = 2**23  # attention scores likewise, where they are held at all; fewer than logits: faster on a CPU

Remat = Literal["none", "products", "full", "offload"]
Layers = Annotated[int, at_least(1), at_most(10_000)]
Experts = Annotated[int, at_least(0), at_most(2**16 - 1)]  # ids are uint16 at most
Dtype = Annotated[str, Range("float32 or bfloat16", lambda x: x in ("float32", "bfloat16"))]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """RoPE stretched to `factor` times the context length of pre-training (YaRN, arXiv 2309.00071)."""

    factor: Annotated[float, at_least(1)]
    original_max_position_embeddings: PositiveInt
    beta_fast: Positive = 32.0  # dimensions with more rotations than this in the original context keep their frequency
    beta_slow: Positive = 1.0  # those with fewer rotations than this are divided by `factor`; a ramp lies in between
    truncate: bool = True  # the ramp starts and ends at whole dimensions
    attention_factor: float | None = None  # scale of queries and keys; None: from mscale, else 0.1 ln(factor) + 1
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture; below the blank line, how it is computed and where its parameters come from."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: AtLeast2
    intermediate_size: OptionalSize = 0  # width of a dense feed-forward layer
    num_experts: Experts = 0  # 0: every layer is dense
    num_experts_per_tok: Experts = 0
    moe_intermediate_size: OptionalSize = 0  # width of one expert
    shared_expert_intermediate_size: OptionalSize = 0  # width of an expert for every token; 0: none
    norm_topk_prob: bool = True  # renormalize the chosen experts' probabilities to sum to one
    decoder_sparse_step: PositiveInt = 1  # layer l has experts if (l + 1) is a multiple of this ...
    mlp_only_layers: tuple[int, ...] = ()  # ... and l is not listed here
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 1e6
    rope_scaling: Yarn | None = None
    attention_bias: bool = False  # in the four projections of an attention layer
    qkv_bias: bool = False  # in those of queries, keys and values only
    qk_norm: bool = True  # queries and keys are normalised by head
    sliding_window: NonNegativeInt = 0  # tokens visible to a token in `sliding_layers`, itself included
    sliding_layers: tuple[int, ...] = ()  # all other layers attend to everything before a token
    tie_word_embeddings: bool = False
    initializer_range: Positive = 0.02
    max_position_embeddings: PositiveInt = 40960  # tokens

    dtype: Dtype = "float32"  # of activations and matmuls; logits are float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters; bfloat16 ones have a float32 master copy
    # What a layer stores for its backward pass: none: everything; products: matrix products and its input; full: its
    # input; offload: its input, in host memory. Everything else is recomputed.
    remat: Remat = "none"
    checkpoint: str = ""  # folder or name of a Hugging Face checkpoint to start from; empty: random parameters


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether `layer` (from 0) has experts rather than one dense feed-forward network."""
    return (
        config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )


def sparse_layers(config: ModelConfig) -> int:
    """The number of layers with experts."""
    return sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def has_experts(config: ModelConfig) -> bool:
    """Whether any layer has experts."""
    return sparse_layers(config) > 0


def expert_id_dtype(config: ModelConfig) -> Literal["uint8", "uint16"]:
    """The smallest dtype of the expert ids that scoring returns; `num_experts` itself stands on padding."""
    return "uint8" if config.num_experts < 2**8 else "uint16"


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """How many tokens are visible to a token in each layer, itself included; empty if no layer has a window."""
    sliding = config.sliding_layers if config.sliding_window else ()
    everything = 2**30
    layers = range(config.num_hidden_layers)
    return tuple(config.sliding_window if layer in sliding else everything for layer in layers) if sliding else ()


def layer_runs(config: ModelConfig) -> tuple[tuple[bool, int], ...]:
    """Consecutive layers of one kind as (sparse, count); each run is one stack of parameters and one `lax.scan`."""
    sparse = (is_sparse(config, layer) for layer in range(config.num_hidden_layers))
    return tuple((kind, len(list(layers))) for kind, layers in groupby(sparse))


def architecture_problems(m: ModelConfig) -> Iterator[str]:
    """Why no model can be built from a configuration whose fields are in range, one sentence each."""
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"model.num_attention_heads: wanted a multiple of model.num_key_value_heads ({m.num_key_value_heads}), "
            f"got {m.num_attention_heads}"
        )
    if m.head_dim % 2:
        yield f"model.head_dim: wanted an even number (RoPE rotates pairs), got {m.head_dim}"
    sparse = sparse_layers(m)
    if outside := [layer for layer in m.mlp_only_layers if not 0 <= layer < m.num_hidden_layers]:
        yield f"model.mlp_only_layers: wanted layers below {m.num_hidden_layers}, got {outside[0]}"
    if sparse < m.num_hidden_layers and m.intermediate_size < 1:
        yield f"model.intermediate_size: wanted at least 1 for the dense layers, got {m.intermediate_size}"
    if sparse and m.moe_intermediate_size < 1:
        yield f"model.moe_intermediate_size: wanted at least 1 for the experts, got {m.moe_intermediate_size}"
    if sparse and not 1 <= m.num_experts_per_tok <= m.num_experts:
        yield (
            f"model.num_experts_per_tok: wanted 1 to model.num_experts ({m.num_experts}), got {m.num_experts_per_tok}"
        )
