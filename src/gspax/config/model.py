"""The shape of a model, as in `config.json` of a checkpoint, and how it is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeVar

from gspax.config.layers import (
    Activation,
    DenseMlp,
    Experts,
    Feature,
    GatedDelta,
    LatentAttention,
    Layer,
    Mixer,
    NoMixer,
    NoMlp,
    Rope,
    SelfAttention,
)
from gspax.config.ranges import (
    AtLeast2,
    NonNegative,
    NonNegativeInt,
    OptionalSize,
    Positive,
    PositiveInt,
    Range,
    Share,
    Size,
    at_least,
    at_most,
)

LOGIT_BUDGET = 2**25  # logits that the learner holds at once on one device (128 MiB)
NO_WINDOW = 2**30  # the window of a layer without one, where other layers have one
SCORE_BUDGET = 2**23  # attention scores likewise, where they are held at all; fewer than logits: faster on a CPU

T = TypeVar("T")
Remat = Literal["none", "products", "full", "offload"]
Layers = Annotated[int, at_least(1), at_most(10_000)]
ExpertCount = Annotated[int, at_least(0), at_most(2**16 - 1)]  # ids are uint16 at most
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
class Llama3Rope:
    """RoPE of Llama 3.1 (`_compute_llama3_parameters` in transformers): slow rotations are `factor` times slower.

    A pair that makes at most `low_freq_factor` turns within the original context is slowed down, one that makes
    `high_freq_factor` turns or more is not, and a ramp lies in between.
    """

    factor: Annotated[float, at_least(1)]
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: PositiveInt


@dataclass(frozen=True, kw_only=True)
class AlphaRope:
    """RoPE of Hunyuan: the base is multiplied by alpha ** (R / (R - 2)), R the rotated dimensions of a head."""

    alpha: Annotated[float, at_least(1)]


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """RoPE of positions that are divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: Annotated[float, at_least(1)]


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """RoPE of Phi-3-128k and Phi-4-mini (LongRoPE, arXiv 2402.13753): each pair's frequency is divided by its factor.

    All sequences of a run have the short factors, or the long ones if `ModelConfig.max_position_embeddings` is more
    than `original_max_position_embeddings`. transformers chooses by the length of each sequence, so that the keys in
    a cache would be of another embedding once a sequence has grown beyond the original length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: AtLeast2
    max_position_embeddings: PositiveInt  # of the published model; that of `ModelConfig` is the run's
    factor: float | None = None  # None: the quotient of these two
    attention_factor: float | None = None  # scale of queries and keys; None: sqrt(1 + ln(factor) / ln(original))


@dataclass(frozen=True, kw_only=True)
class ProportionalRope:
    """RoPE of Gemma 4's layers without a window: only the first pairs of a head rotate.

    They are as slow as if all pairs did, where `ModelConfig.rope_fraction` spreads the frequencies over fewer pairs.
    """

    partial_rotary_factor: Share = 1.0  # of the pairs that rotate
    factor: Annotated[float, at_least(1)] = 1.0  # frequencies are divided by it


RopeScaling = Yarn | Llama3Rope | AlphaRope | LinearRope | LongRope | ProportionalRope


@dataclass(frozen=True, kw_only=True)
class Router:
    """The scoring and the choice of experts by a layer's router; `norm_topk_prob`: their gates sum to one.

    Experts are chosen by score plus bias, and weighed by score (auxiliary-loss-free balancing, arXiv 2408.15664).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False  # a bias of each expert that chooses and does not weigh; it is not trained
    # Only the experts of the `top_groups` best groups are chosen from; a group is as good as its `group_best` best
    # experts together (two in DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    group_best: PositiveInt = 2
    scale: Positive = 1.0  # of the gates


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Keys and values that are projections of a latent vector of each token (MLA, arXiv 2405.04434, section 2.1)."""

    rank: Size
    query_rank: OptionalSize = 0  # of a latent that queries are projections of; 0: of the layer's input
    nope_dim: Size  # dimensions of a query or key beside the `head_dim` that are rotated
    value_dim: Size


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """The heads of the attention layers without a window, where those of the layers with one differ (Gemma 4)."""

    head_dim: AtLeast2
    key_heads: Size
    keys_as_values: bool = False  # values are the keys, before these are normalized and rotated


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors of a model (Granite)."""

    embedding: Positive = 1.0  # of a token's embedding
    attention: NonNegative = 0.0  # of scores; 0: one over the square root of head_dim, or of query_pre_attn_scalar
    residual: Positive = 1.0  # of what a mixer or an MLP adds to the residual stream
    logits: Positive = 1.0  # logits are divided by it


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
    num_experts: ExpertCount = 0  # 0: every layer is dense
    num_experts_per_tok: ExpertCount = 0
    moe_intermediate_size: OptionalSize = 0  # width of one expert
    shared_expert_intermediate_size: OptionalSize = 0  # width of an expert for every token; 0: none
    shared_expert_gate: bool = True  # its output is scaled by a sigmoid of the token
    router: Router = Router()
    normed_experts: bool = False  # router, experts, and shared expert have norms of their own (Gemma 4)
    expert_bias: bool = False  # biases of the router and of experts, whose gated products are clamped then (gpt-oss)
    norm_topk_prob: bool = True  # renormalize the chosen experts' probabilities to sum to one
    decoder_sparse_step: PositiveInt = 1  # layer l has experts if (l + 1) is a multiple of this ...
    mlp_only_layers: tuple[int, ...] = ()  # ... and l is not listed here
    no_mlp_layers: tuple[int, ...] = ()  # the layers that are a mixer alone
    no_mixer_layers: tuple[int, ...] = ()  # the layers that are an MLP or experts alone
    activation: Activation = "silu"  # of MLPs and experts; relu2, squared ReLU: they have no gates
    rms_norm_eps: Positive = 1e-6
    # Of attention and MLP: their inputs are normalized, their outputs, or both.
    norm_place: Literal["before", "after", "around"] = "before"
    norm_plus_one: bool = False  # norms scale by 1 + their weight
    scale_embedding: bool = False  # by the square root of hidden_size
    multipliers: Multipliers = Multipliers()
    rope_theta: Positive = 1e6
    rope_scaling: RopeScaling | None = None
    rope_fraction: Share = 1.0  # of a head's dimensions, the first of which are rotated
    sliding_rope_theta: NonNegative = 0.0  # RoPE of the layers with a window, without scaling; 0: as in the others
    rope_interleaved: bool = False  # dimensions 2h and 2h + 1 are a pair, rather than h and h + R/2
    nope_layers: tuple[int, ...] = ()  # the layers whose queries and keys are not rotated
    attention_bias: bool = False  # in the four projections of an attention layer
    qkv_bias: bool = False  # in those of queries, keys and values only
    attention_sinks: bool = False  # each head has a score without a value in its softmax
    qk_norm: bool = True  # queries and keys are normalized by head
    qk_norm_projection: bool = False  # ... or rather all heads of a projection together
    qk_norm_after_rope: bool = False  # ... and rotated before that
    value_norm: bool = False  # values are normalized by head, without a weight
    query_pre_attn_scalar: NonNegativeInt = 0  # scores are divided by its square root; 0: by that of head_dim
    latent: Latent | None = None  # of latent attention
    sliding_window: NonNegativeInt = 0  # tokens visible to a token in `sliding_layers`, itself included
    sliding_layers: tuple[int, ...] = ()  # all other layers attend to everything before a token
    global_heads: GlobalHeads | None = None  # of the layers without a window; None: as in the others
    attention_gate: bool = False  # the context is scaled by a sigmoid of a projection
    delta: GatedDelta | None = None  # the gated delta net that mixes tokens in `delta_layers`
    delta_layers: tuple[int, ...] = ()  # all other layers have attention
    mixer: Mixer | None = None  # a kind of one's own, that mixes tokens in `mixer_layers`
    mixer_layers: tuple[int, ...] = ()
    layer_scale: bool = False  # each layer's output is multiplied by a number, which is not trained
    logit_cap: NonNegative = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    tie_word_embeddings: bool = False
    initializer_range: Positive = 0.02
    max_position_embeddings: PositiveInt = 40960  # tokens
    model_type: str = ""  # of an exported checkpoint, where several families have these parts; empty: the first of them

    dtype: Dtype = "float32"  # of activations and matmuls; logits are float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters; bfloat16 ones have a float32 master copy
    # What a layer stores for its backward pass: none: everything; products: matrix products and its input; full: its
    # input; offload: its input, in host memory. Everything else is recomputed.
    remat: Remat = "none"
    checkpoint: str = ""  # folder or name of a Hugging Face checkpoint to start from; empty: random parameters


def rotary_dim(config: ModelConfig) -> int:
    """Return the number of dimensions of a head that are rotated."""
    return int(config.head_dim * config.rope_fraction)


@lru_cache
def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Return the layers, in order."""
    return tuple(_layer(config, number) for number in range(config.num_hidden_layers))


def obstacle(config: ModelConfig, feature: Feature) -> str | None:
    """Return what prevents a feature in the first layer that does not support it; None if all layers do."""
    return next((found for layer in layers_of(config) if (found := layer.mixer.obstacles.get(feature))), None)


def _mixer(config: ModelConfig, number: int) -> Mixer:
    """Make the mixer of the layer with this number, from 0."""
    if number in config.no_mixer_layers:
        return NoMixer()
    if config.mixer is not None and number in config.mixer_layers:
        return config.mixer
    if config.delta is not None and number in config.delta_layers:
        return config.delta
    sliding = number in config.sliding_layers and config.sliding_window > 0
    own_rope = sliding and config.sliding_rope_theta > 0
    own_heads = None if sliding else config.global_heads
    head_dim = own_heads.head_dim if own_heads is not None else config.head_dim
    rope = Rope(
        dim=int(head_dim * config.rope_fraction),
        theta=config.sliding_rope_theta if own_rope else config.rope_theta,
        scaling=None if own_rope else config.rope_scaling,
        interleaved=config.rope_interleaved,
    )
    if config.latent is not None:
        return LatentAttention(heads=config.num_attention_heads, rope=rope, **vars(config.latent))
    scale = (head_dim / config.query_pre_attn_scalar) ** 0.5 if config.query_pre_attn_scalar else 1.0
    if config.multipliers.attention:
        scale = head_dim**0.5 * config.multipliers.attention
    return SelfAttention(
        heads=config.num_attention_heads,
        key_heads=own_heads.key_heads if own_heads is not None else config.num_key_value_heads,
        head_dim=head_dim,
        rope=None if number in config.nope_layers else rope,
        window=config.sliding_window if sliding else 0,
        bias="all" if config.attention_bias else "qkv" if config.qkv_bias else "none",
        qk_norm="none" if not config.qk_norm else "projection" if config.qk_norm_projection else "head",
        norm_after_rope=config.qk_norm_after_rope,
        sinks=config.attention_sinks,
        query_scale=scale,
        gate=config.attention_gate,
        value_norm=config.value_norm,
        keys_as_values=own_heads is not None and own_heads.keys_as_values,
    )


def _mlp(config: ModelConfig, number: int) -> DenseMlp | Experts | NoMlp:
    """Make the feed-forward network of the layer with this number, from 0."""
    if number in config.no_mlp_layers:
        return NoMlp()
    if config.num_experts and number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0:
        return Experts(
            count=config.num_experts,
            active=config.num_experts_per_tok,
            width=config.moe_intermediate_size,
            router=config.router,
            bias=config.expert_bias,
            normalize=config.norm_topk_prob,
            shared=config.shared_expert_intermediate_size,
            shared_gate=config.shared_expert_gate and config.shared_expert_intermediate_size > 0,
            activation=config.activation,
            normed=config.normed_experts,
        )
    return DenseMlp(width=config.intermediate_size, activation=config.activation)


def _layer(config: ModelConfig, number: int) -> Layer:
    """Make the layer with this number, from 0."""
    mixer, mlp = _mixer(config, number), _mlp(config, number)
    return Layer(mixer=mixer, mlp=mlp, norms=config.norm_place, scaled=config.layer_scale)


def sparse_numbers(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers, from 0, of the layers with experts."""
    return tuple(number for number, layer in enumerate(layers_of(config)) if layer.sparse)


def sparse_layers(config: ModelConfig) -> int:
    """Count the layers with experts."""
    return len(sparse_numbers(config))


def has_experts(config: ModelConfig) -> bool:
    """Return whether any layer has experts."""
    return sparse_layers(config) > 0


def expert_id_dtype(config: ModelConfig) -> Literal["uint8", "uint16"]:
    """Return the smallest dtype of the expert ids that scoring returns; `num_experts` itself stands on padding."""
    return "uint8" if config.num_experts < 2**8 else "uint16"


def token_id_dtype(config: ModelConfig) -> Literal["uint8", "uint16", "int32"]:
    """Return the smallest dtype of token ids that also holds `vocab_size`, which stands where there is no token."""
    return "uint8" if config.vocab_size < 2**8 else "uint16" if config.vocab_size < 2**16 else "int32"


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """Return how many tokens a token sees in each layer, itself included; empty if no layer has a window."""
    windows = [layer.mixer.window for layer in layers_of(config)]
    return tuple(window or NO_WINDOW for window in windows) if any(windows) else ()


class LayerGroup(NamedTuple):
    """Consecutive layers that are a pattern, repeated: one stack of parameters for each layer of the pattern, and one
    `lax.scan` whose body runs the pattern."""

    pattern: tuple[Layer, ...]  # without windows: these are a mask, which a layer's number selects
    repeats: int


class LayerPlace(NamedTuple):
    """Where the parameters of a layer are."""

    stack: tuple[int, ...]  # path below `runs`: the group, and in a pattern of several layers the place in it
    position: int  # in the stack


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Return the groups of a model's layers.

    Leading dense layers and experts after them are two groups of one kind each, layers that alternate are one group.
    """
    kinds = [
        replace(layer, mixer=replace(layer.mixer, window=0)) if isinstance(layer.mixer, SelfAttention) else layer
        for layer in layers_of(config)
    ]
    return tuple(itertools.starmap(LayerGroup, repeated_patterns(kinds)))


def repeated_patterns(items: Sequence[T]) -> list[tuple[tuple[T, ...], int]]:
    """Split the items into patterns and how often each follows itself.

    Each pattern covers as many of the remaining items as a repeated one can.
    """
    patterns, left = [], list(items)
    while left:
        repeats = {size: _count_repeats(left, size) for size in range(1, len(left) // 2 + 1)} or {1: 1}
        size = max(repeats, key=lambda size: (size * repeats[size] if repeats[size] > 1 or size == 1 else 0, -size))
        patterns.append((tuple(left[:size]), repeats[size]))
        left = left[size * repeats[size] :]
    return patterns


def _count_repeats(items: Sequence[T], size: int) -> int:
    """Count how often the first `size` items follow one another."""
    count = 1
    while items[count * size : (count + 1) * size] == items[:size]:
        count += 1
    return count


def layer_places(config: ModelConfig) -> tuple[LayerPlace, ...]:
    """Return the place of every layer, in order."""
    return tuple(
        LayerPlace((number,) if len(group.pattern) == 1 else (number, place), index)
        for number, group in enumerate(layer_groups(config))
        for index in range(group.repeats)
        for place in range(len(group.pattern))
    )


def architecture_problems(m: ModelConfig) -> Iterator[str]:
    """Yield why no model can be built from a configuration whose fields are in range, one sentence each."""
    if m.sliding_window and m.sliding_layers and set(m.sliding_layers).isdisjoint(range(m.num_hidden_layers)):
        yield f"model.sliding_layers: wanted layers from 0 to {m.num_hidden_layers - 1}, got {m.sliding_layers}"
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"model.num_attention_heads: wanted a multiple of model.num_key_value_heads ({m.num_key_value_heads}), "
            f"got {m.num_attention_heads}"
        )
    if isinstance(m.rope_scaling, Llama3Rope) and m.rope_scaling.high_freq_factor <= m.rope_scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor: wanted more than low_freq_factor "
            f"({m.rope_scaling.low_freq_factor:g}), got {m.rope_scaling.high_freq_factor:g}"
        )
    if isinstance(m.rope_scaling, LongRope):
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(m.rope_scaling, name))) != rotary_dim(m) // 2:
                yield f"model.rope_scaling.{name}: wanted {rotary_dim(m) // 2} numbers, one for each pair, got {count}"
        if m.max_position_embeddings > (most := m.rope_scaling.max_position_embeddings):
            yield f"model.max_position_embeddings: wanted at most {most}, got {m.max_position_embeddings}"
    if m.global_heads is not None:
        yield from _global_problems(m, m.global_heads)
    if m.head_dim % 2:
        yield f"model.head_dim: wanted an even number (RoPE rotates pairs), got {m.head_dim}"
    elif rotary_dim(m) % 2 or not rotary_dim(m):
        yield (
            f"model.rope_fraction: wanted a share of model.head_dim ({m.head_dim}) that is an even number of "
            f"dimensions, got {m.rope_fraction:g}"
        )
    if m.latent is not None:
        yield from _latent_problems(m)
    yield from _mixer_problems(m)
    yield from _lone_problems(m)
    sparse = sparse_layers(m)
    if outside := [layer for layer in m.mlp_only_layers if not 0 <= layer < m.num_hidden_layers]:
        yield f"model.mlp_only_layers: wanted layers below {m.num_hidden_layers}, got {outside[0]}"
    if any(isinstance(layer.mlp, DenseMlp) for layer in layers_of(m)) and m.intermediate_size < 1:
        yield f"model.intermediate_size: wanted at least 1 for the dense layers, got {m.intermediate_size}"
    if sparse and m.moe_intermediate_size < 1:
        yield f"model.moe_intermediate_size: wanted at least 1 for the experts, got {m.moe_intermediate_size}"
    if sparse and not 1 <= m.num_experts_per_tok <= m.num_experts:
        yield (
            f"model.num_experts_per_tok: wanted 1 to model.num_experts ({m.num_experts}), got {m.num_experts_per_tok}"
        )
    elif sparse:
        yield from _group_problems(m)
    if sparse and m.normed_experts and not m.shared_expert_intermediate_size:
        yield "model.shared_expert_intermediate_size: wanted at least 1 with model.normed_experts, got 0"
    if sparse and m.expert_bias and m.activation == "relu2":
        yield "model.expert_bias: wanted False with model.activation=relu2, got True"


def _lone_problems(m: ModelConfig) -> Iterator[str]:
    """Check the layers that are a mixer or a feed-forward network alone."""
    for name in ("no_mlp_layers", "no_mixer_layers"):
        if outside := [layer for layer in getattr(m, name) if not 0 <= layer < m.num_hidden_layers]:
            yield f"model.{name}: wanted layers below {m.num_hidden_layers}, got {outside[0]}"
    if both := sorted(set(m.no_mlp_layers) & set(m.no_mixer_layers)):
        yield f"model.no_mlp_layers: wanted no layer of model.no_mixer_layers, which would be empty, got {both[0]}"


def _mixer_problems(m: ModelConfig) -> Iterator[str]:
    """Check the settings of the mixers of some layers, and that these layers exist."""
    for name, kind in (("delta", m.delta), ("mixer", m.mixer)):
        yield from () if kind is None else kind.problems(f"model.{name}")
        layers = getattr(m, f"{name}_layers")
        if kind is None and layers:
            yield f"model.{name}_layers: wanted none without model.{name}, got {layers}"
        if outside := [layer for layer in layers if not 0 <= layer < m.num_hidden_layers]:
            yield f"model.{name}_layers: wanted layers below {m.num_hidden_layers}, got {outside[0]}"


def _global_problems(m: ModelConfig, heads: GlobalHeads) -> Iterator[str]:
    """Check the heads of the layers without a window."""
    if m.num_attention_heads % heads.key_heads:
        yield (
            f"model.num_attention_heads: wanted a multiple of model.global_heads.key_heads ({heads.key_heads}), "
            f"got {m.num_attention_heads}"
        )
    if heads.head_dim % 2:
        yield f"model.global_heads.head_dim: wanted an even number (RoPE rotates pairs), got {heads.head_dim}"


def _latent_problems(m: ModelConfig) -> Iterator[str]:
    """Check the settings that latent attention does not have."""
    absent = {
        "num_key_value_heads": m.num_attention_heads,
        **{"qk_norm": False, "qkv_bias": False, "attention_bias": False, "sliding_window": 0},
        "global_heads": None,
        **{"rope_fraction": 1.0, "norm_place": "before"},
    }
    for name, wanted in absent.items():
        if (value := getattr(m, name)) != wanted:
            yield f"model.{name}: wanted {wanted} with latent attention, got {value}"


def _group_problems(m: ModelConfig) -> Iterator[str]:
    """Check that the groups of experts are equal, and that enough experts are chosen from."""
    groups, chosen, best = m.router.groups, m.router.top_groups, m.router.group_best
    if groups > 1 and (m.num_experts % groups or m.num_experts < best * groups):
        yield (
            f"model.router.groups: wanted a divisor of model.num_experts ({m.num_experts}) with "
            f"{'two experts' if best == 2 else best} or more in a group, got {groups}"
        )
    elif chosen > groups or chosen * (m.num_experts // groups) < m.num_experts_per_tok:
        yield (
            f"model.router.top_groups: wanted at most model.router.groups ({groups}), with model.num_experts_per_tok "
            f"({m.num_experts_per_tok}) experts or more in them, got {chosen}"
        )
