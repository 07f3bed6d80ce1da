"""The kinds of layers: a mixer of a row's tokens, a feed-forward network, and the position of their norms.

`config.layers_of` derives these values from the fields of a `ModelConfig`. The model builds its modules from them, and
counts, memory, sharding and validation ask them, so that a new kind of layer answers here. Sizes are whole numbers of
array elements; D is the model dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from gspax.config.ranges import Size, at_least, at_most

if TYPE_CHECKING:
    from gspax.config.model import RopeScaling, Router


Activation = Literal["silu", "gelu_tanh", "relu2"]  # of the gate; squared ReLU has none


class Feature(Enum):
    """A feature of a run that a kind of layer may not support (`Mixer.supports`)."""

    SHARED_PROMPTS = "shared prompts"
    DRAFTS = "drafts"
    INT8_CACHE = "8-bit cache"
    INT8_WEIGHTS = "8-bit weights"
    SERVERS = "servers"
    CONTEXT_PARALLEL = "context parallelism"


class Dimension(NamedTuple):
    """A dimension of a layer's parameters that a mesh shards."""

    field: str  # of ModelConfig
    size: int
    axis: str  # logical axis, of `parallel.sharding.RULES`


class CacheSize(NamedTuple):
    """The size of a mixer's cache of a row while it is sampled, on each device."""

    vectors: int = 0  # of each token; in 8 bits a vector has a scale of its own
    width: int = 0  # numbers in a vector
    state: int = 0  # float32 numbers, whatever the row's length
    inputs: int = 0  # numbers in the compute dtype, likewise


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary position embedding of a mixer's queries and keys."""

    dim: int  # of a head's dimensions, the first ones, which are rotated
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False


class Mixer:
    """A kind of mixer: its settings, its costs, and the features that it supports.

    A kind is a frozen dataclass. With these defaults it has a state instead of keys and values, no rotary embedding, no
    adapters, and no dimension that a mesh shards, and it supports the features that ask nothing of a state's kind.
    """

    module: ClassVar[str]  # "package.module.Class" of its Flax module, imported where a model is made
    name: ClassVar[str]  # in sentences and plans
    part: ClassVar[str] = "mixer"  # of a layer's parameters
    window: int = 0
    deep_prefixes: ClassVar[bool] = False  # a segment may continue one that continues another (`kernels.trees`)

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        """The features that the kind does not support, each with the part of the layer that is in the way.

        The sampler runs a state again over the tokens that are kept of a draft, and does not round it to 8 bits.
        """
        return dict.fromkeys(set(Feature) - {Feature.DRAFTS, Feature.INT8_CACHE}, self.name)

    def supports(self, feature: Feature) -> bool:
        """Return whether a run may use a feature with this kind."""
        return feature not in self.obstacles

    def ropes(self) -> tuple[Rope, ...]:
        """List the rotary embeddings whose angles the kind reads."""
        return ()

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        raise NotImplementedError

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights, in half a row of `length` tokens."""
        raise NotImplementedError

    def activations(self, tensor: int, context: int) -> int:
        """Count the numbers of a token that the backward pass reads, without scores.

        Heads are sharded over `tensor` devices, and `context` devices gather keys and values.
        """
        raise NotImplementedError

    def cache(self, tensor: int) -> CacheSize:
        """Size the cache of a row, with heads sharded over `tensor` devices."""
        raise NotImplementedError

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide."""
        return ()

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one: its rows and columns, added."""
        return {}

    def problems(self, path: str) -> Iterator[str]:
        """Yield why no layer can be built from settings in range, one sentence each; `path` is the settings' own."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class SelfAttention(Mixer):
    """Attention of heads of queries to keys and values of each token."""

    module = "gspax.model.layers.Attention"
    name = "attention"
    part = "attention"
    deep_prefixes = True

    heads: int
    key_heads: int
    head_dim: int
    rope: Rope | None  # None: queries and keys are not rotated
    window: int = 0  # tokens visible to a token, itself included; 0: everything before it
    bias: Literal["none", "qkv", "all"] = "none"  # of the four projections
    qk_norm: Literal["none", "head", "projection"] = "head"
    norm_after_rope: bool = False
    sinks: bool = False  # each head has a score without a value in its softmax
    query_scale: float = 1.0  # of queries, before scores are divided by the square root of head_dim
    gate: bool = False  # the context is scaled by a sigmoid of a projection
    value_norm: bool = False  # values are normalized by head, without a weight
    keys_as_values: bool = False  # values are the keys, before these are normalized and rotated

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        limited = "sliding windows" if self.window else "attention sinks" if self.sinks else ""
        return {Feature.SHARED_PROMPTS: limited} if limited else {}

    def ropes(self) -> tuple[Rope, ...]:
        return () if self.rope is None else (self.rope,)

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        heads, key = self.heads * self.head_dim, self.key_heads * self.head_dim
        keys = key if self.keys_as_values else 2 * key
        biases = {"none": 0, "qkv": heads + keys, "all": heads + keys + D}
        norms = {"none": 0, "head": 2 * self.head_dim, "projection": heads + key}
        projections = D * ((3 if self.gate else 2) * heads + keys)
        return projections + biases[self.bias] + norms[self.qk_norm] + self.heads * self.sinks

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights: attention to half a row of `length` tokens."""
        return 2 * self.heads * self.head_dim * length

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads, no scores; `context` devices gather keys and values."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        gathered = 2 * keys * context if context > 1 else 0
        return (3 * queries + 3 * keys + gathered) // tensor  # projected, normalized, rotated, and the context

    def cache(self, tensor: int) -> CacheSize:
        """Size the keys and values of a device's heads, with heads sharded over `tensor` devices."""
        return CacheSize(vectors=2 * (self.key_heads // tensor), width=self.head_dim)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide; the key heads divide the query heads."""
        return (Dimension("num_key_value_heads", self.key_heads, "heads"),)

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one: its rows and columns, added."""
        queries, keys = D + self.heads * self.head_dim, D + self.key_heads * self.head_dim
        values = {} if self.keys_as_values else {"value": keys}
        return {"query": queries, "key": keys} | values | {"out": queries}


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Mixer):
    """Attention to keys and values that are projections of a latent vector of each token (MLA)."""

    module = "gspax.model.latent_attention.LatentMixer"
    name = "latent attention"
    part = "attention"
    deep_prefixes = True

    heads: int
    rank: int  # of the latent
    query_rank: int  # of a latent that queries are projections of; 0: of the layer's input
    nope_dim: int  # of a query or key, without its rotated dimensions
    value_dim: int
    rope: Rope

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        return {}

    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,)

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        queries = self.query_rank * (D + 1) + (self.query_rank or D) * self.heads * (self.nope_dim + self.rope.dim)
        latents = D * (self.rank + self.rope.dim) + self.rank
        return queries + latents + (self.rank * (self.nope_dim + self.value_dim) + self.value_dim * D) * self.heads

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights: attention to half a row of `length` tokens."""
        return self.heads * (self.nope_dim + self.rope.dim + self.value_dim) * length

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads, no scores; `context` devices gather keys and values."""
        keys, values = self.heads * (self.nope_dim + self.rope.dim), self.heads * self.value_dim
        gathered = (keys + values) * context if context > 1 else 0
        latents = 2 * (self.query_rank + self.rank + self.rope.dim)  # projected, and normalized or rotated
        return latents + (4 * keys + 2 * values + gathered) // tensor

    def cache(self, tensor: int) -> CacheSize:
        """Size the latent with the rotated key, on every device."""
        return CacheSize(vectors=1, width=self.rank + self.rope.dim)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide."""
        ranks = (("latent.rank", self.rank), ("latent.query_rank", self.query_rank))
        sharded = (Dimension(field, size, "embed") for field, size in ranks)
        return (Dimension("num_attention_heads", self.heads, "heads"), *sharded)

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one: its rows and columns, added."""
        return {
            "query": (self.query_rank or D) + self.heads * (self.nope_dim + self.rope.dim),
            "key": self.rank + self.heads * self.nope_dim,
            "value": self.rank + self.heads * self.value_dim,
            "out": D + self.heads * self.value_dim,
        }


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Mixer):
    """A gated delta net (`model.delta_net`): a state of fixed size instead of keys and values."""

    module = "gspax.model.delta_net.GatedDeltaNet"
    name = "gated delta nets"

    key_heads: Size
    value_heads: Size  # a multiple of `key_heads`
    key_dim: Size
    value_dim: Size
    taps: Annotated[int, at_least(2), at_most(64)] = 4  # inputs that the convolution reads, a token's own included

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        return {}

    def problems(self, path: str) -> Iterator[str]:
        if self.value_heads % self.key_heads:
            yield (
                f"{path}.value_heads: wanted a multiple of {path}.key_heads ({self.key_heads}), got {self.value_heads}"
            )

    @property
    def channels(self) -> int:
        """The numbers of a token that the convolution reads: queries, keys, and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        N, U = self.value_heads, self.value_dim
        return D * (self.channels + 2 * N * U + 2 * N) + self.channels * self.taps + 2 * N + U

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights: the state is read twice and written once."""
        return 6 * self.value_heads * self.key_dim * self.value_dim

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads, with the states between chunks of 64, in float32."""
        N, U = self.value_heads, self.value_dim
        columns = U + self.key_dim if context > 1 else U  # of a state; beside it its map (`rule_over_devices`)
        states = 2 * N * self.key_dim * columns // 64
        return (3 * self.channels + 3 * N * U + 4 * N + states) // tensor  # projected, convolved, normalized; outputs

    def cache(self, tensor: int) -> CacheSize:
        """Size the state of a device's heads."""
        state = self.value_heads * self.key_dim * self.value_dim
        return CacheSize(state=state // tensor, inputs=(self.taps - 1) * self.channels // tensor)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide; the key heads divide the value heads."""
        return (Dimension("delta.key_heads", self.key_heads, "heads"),)

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one: its rows and columns, added."""
        keys, values, heads = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.value_heads
        widths = {"query": keys, "key": keys, "value": values, "gate": values, "decay": heads, "beta": heads}
        return {name: D + width for name, width in widths.items()} | {"out": D + values}


@dataclass(frozen=True, kw_only=True)
class StateSpace(Mixer):
    """A state space layer, Mamba-2 (`model.state_space`): a state of fixed size instead of keys and values."""

    module = "gspax.model.state_space.StateSpaceNet"
    name = "state space layers"

    groups: Size  # of heads that read and write their states with the same vectors
    heads: Size  # a multiple of `groups`
    state_dim: Size  # numbers of a state for each of the head's `head_dim`
    head_dim: Size
    taps: Annotated[int, at_least(2), at_most(64)] = 4  # inputs that the convolution reads, a token's own included
    conv_bias: bool = True

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        return {}

    @property
    def channels(self) -> int:
        """The numbers of a token that the convolution reads: those that read and write states, and the inputs."""
        return 2 * self.groups * self.state_dim + self.heads * self.head_dim

    def problems(self, path: str) -> Iterator[str]:
        if self.heads % self.groups:
            yield f"{path}.heads: wanted a multiple of {path}.groups ({self.groups}), got {self.heads}"

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        N, P = self.heads, self.head_dim
        convolution = self.channels * (self.taps + self.conv_bias)
        return D * (self.channels + 2 * N * P + N) + convolution + 3 * N + N * P

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights: the state is read once and written once."""
        return 4 * self.heads * self.state_dim * self.head_dim

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads, with the states between chunks of 64, in float32."""
        N, P = self.heads, self.head_dim
        columns = P + self.state_dim if context > 1 else P  # of a state; beside it its map (`rule_over_devices`)
        states = 2 * N * self.state_dim * columns // 64
        return (3 * self.channels + 3 * N * P + 2 * N + states) // tensor  # projected, convolved, gated; outputs

    def cache(self, tensor: int) -> CacheSize:
        """Size the state of a device's heads."""
        state = self.heads * self.state_dim * self.head_dim
        return CacheSize(state=state // tensor, inputs=(self.taps - 1) * self.channels // tensor)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide; the groups divide the heads."""
        return (Dimension("mixer.groups", self.groups, "heads"),)


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """A convolution of a few tokens between two gates (`model.short_convolution`): it keeps its last inputs alone."""

    module = "gspax.model.short_convolution.ShortConvolutionNet"
    name = "short convolutions"

    width: Size  # channels
    taps: Annotated[int, at_least(2), at_most(64)] = 3  # inputs that the convolution reads, a token's own included
    bias: bool = False  # of the projections and the convolution

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        return {}

    def parameters(self, D: int) -> int:
        """Count the parameters."""
        return 4 * D * self.width + self.width * self.taps + self.bias * (4 * self.width + D)

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs besides its products with weights: those of the two gates."""
        return 2 * self.width

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads: the gates, the inputs, and what is convolved."""
        return 6 * self.width // tensor

    def cache(self, tensor: int) -> CacheSize:
        """Size the last inputs of a device's channels."""
        return CacheSize(inputs=(self.taps - 1) * self.width // tensor)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide."""
        return (Dimension("mixer.width", self.width, "heads"),)


@dataclass(frozen=True, kw_only=True)
class NoMixer(Mixer):
    """The mixer of a layer that is a feed-forward network alone."""

    name = "no mixer"
    deep_prefixes = True

    @property
    def obstacles(self) -> Mapping[Feature, str]:
        return {}

    def parameters(self, D: int) -> int:
        """Count the parameters: none."""
        return 0

    def flops(self, length: int | float) -> float:
        """Count a token's FLOPs: none."""
        return 0

    def activations(self, tensor: int, context: int) -> int:
        """Count a token's numbers that the backward pass reads: none."""
        return 0

    def cache(self, tensor: int) -> CacheSize:
        """Size the cache: nothing is kept."""
        return CacheSize()


def mlp_weights(activation: Activation) -> tuple[str, ...]:
    """List the matrices of a feed-forward network with this activation."""
    return ("up", "down") if activation == "relu2" else ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class NoMlp:
    """The feed-forward network of a layer that is a mixer alone."""

    def parameters(self, D: int, experts: int) -> int:
        """Count the parameters: none."""
        return 0

    def activation_bytes(self, D: int, number: int, tensor: int) -> int:
        """Count a token's bytes that the backward pass reads: none."""
        return 0

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide: none."""
        return ()

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in adapters: there is no weight."""
        return {}


@dataclass(frozen=True, kw_only=True)
class DenseMlp:
    """A feed-forward network, with a gate unless its activation is squared ReLU."""

    width: int
    activation: Activation = "silu"

    def parameters(self, D: int, experts: int) -> int:
        """Count the parameters; there are no experts."""
        return len(mlp_weights(self.activation)) * D * self.width

    def activation_bytes(self, D: int, number: int, tensor: int) -> int:
        """Count a token's bytes that the backward pass reads, with `number` bytes for each."""
        return number * (2 * D + len(mlp_weights(self.activation)) * self.width // tensor)

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide."""
        return (Dimension("intermediate_size", self.width, "mlp"),)

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one: its rows and columns, added."""
        return dict.fromkeys(mlp_weights(self.activation), D + self.width)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A router, and the best of its experts for each token; perhaps a shared expert for every token."""

    count: int
    active: int
    width: int
    router: Router
    bias: bool = False  # of the router and of the experts, whose gated products are clamped then
    normalize: bool = True  # the gates of a token sum to one
    shared: int = 0  # width of the shared expert; 0: none
    shared_gate: bool = False  # its output is scaled by a sigmoid of the token
    activation: Activation = "silu"
    normed: bool = False  # router, experts, and shared expert have norms of their own, and gates a factor

    def parameters(self, D: int, experts: int) -> int:
        """Count the parameters of the router, the shared expert, and as many experts."""
        router = self.count * (D + self.router.correction_bias + self.bias)
        biases = experts * (2 * self.width + D) * self.bias
        norms = (5 * D + self.count) if self.normed else 0
        matrices = len(mlp_weights(self.activation)) * D * (experts * self.width + self.shared)
        return router + biases + norms + matrices + D * self.shared_gate

    def activation_bytes(self, D: int, number: int, tensor: int) -> int:
        """Count a token's bytes that the backward pass reads: `number` for each, float32 for the router's logits."""
        products = len(mlp_weights(self.activation))
        rows = self.active * (2 * D + products * self.width // tensor)
        shared = 2 * D + products * self.shared // tensor if self.shared else 0
        return number * (2 * D + rows + shared) + 2 * 4 * self.count

    def dimensions(self) -> tuple[Dimension, ...]:
        """List the sizes that a mesh must divide."""
        return (
            Dimension("num_experts", self.count, "expert"),
            Dimension("moe_intermediate_size", self.width, "mlp"),
            Dimension("shared_expert_intermediate_size", self.shared, "mlp"),
        )

    def adapted(self, D: int) -> dict[str, int]:
        """Count the numbers in adapters of rank 1 of all experts, for each of their matrices."""
        return dict.fromkeys(mlp_weights(self.activation), self.count * (D + self.width))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: a mixer, a feed-forward network, or one after the other."""

    mixer: Mixer
    mlp: DenseMlp | Experts | NoMlp
    norms: Literal["before", "after", "around"] = "before"  # the inputs of mixer and MLP, their outputs, or both
    scaled: bool = False  # the layer's output is multiplied by a number

    @property
    def sparse(self) -> bool:
        """True if the layer has experts."""
        return isinstance(self.mlp, Experts)

    def parameters(self, D: int, experts: int) -> int:
        """Count the parameters with as many experts."""
        parts = 2 - isinstance(self.mixer, NoMixer) - isinstance(self.mlp, NoMlp)
        norms = parts * (2 if self.norms == "around" else 1) * D
        if isinstance(self.mlp, Experts) and self.mlp.normed:
            norms -= D
        return self.mixer.parameters(D) + self.mlp.parameters(D, experts) + norms + self.scaled

    def adapted(self, D: int) -> dict[str, dict[str, int]]:
        """Count the numbers in an adapter of rank 1 of each weight that can have one, by part and name."""
        return {self.mixer.part: self.mixer.adapted(D), "mlp": self.mlp.adapted(D)}
