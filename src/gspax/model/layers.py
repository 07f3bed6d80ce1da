"""The building blocks of a layer: parameters, RMSNorm, SwiGLU, rotary position embedding, attention.

The norm and the gate recompute their element-wise operations in the backward pass: only their inputs are saved, which
halves the memory of a dense layer's residuals, and reading fewer of them makes the backward pass faster.

A layer's mixer is called with its input, what all layers share, its cache, and its number, and returns its output and
the cache. An attention layer projects; an `Attend` function decides what is attended to: the row itself
(`attend_within_segments`, for the learner and prefill) or a cache (`model.decoding`).

Axes: as in docs/architecture.md; R = N/K query heads share a key head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspax import config as kinds
from gspax.config import (
    AlphaRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    ProportionalRope,
    Rope,
    SelfAttention,
    Yarn,
    layers_of,
)
from gspax.model.kernels.attention import Rows, row_attention
from gspax.model.kernels.expert_ffn import squared_relu
from gspax.model.kernels.trees import Tree
from gspax.model.kernels.weights import contract
from gspax.parallel.sharding import spec, token_spec
from gspax.types import Array, PyTree


class Heads(NamedTuple):
    """The projections that an attention layer attends with."""

    q_BTNH: Array
    k_BTKH: Array | None  # None: the values (a cache of latents, one of which all heads share)
    v_BTKU: Array
    sinks_N: Array | None = None  # a score of each head without a value
    cached_BT1Z: Array | None = None  # what is cached in place of keys and values


# (heads, cache, number of the layer) -> (context [B, T, N, U], cache)
Attend = Callable[[Heads, PyTree, Array | int], tuple[Array, PyTree]]
# (a recurrence: (segments [B, T], state before or None, perhaps prefixes [B, T]) -> (outputs, state after); cache) ->
# (outputs, cache)
Advance = Callable[[Callable[..., tuple[Array, PyTree]], PyTree], tuple[Array, PyTree]]
Angles = dict[Rope, tuple[Array, Array]]  # (cos, sin) float32 [B, T, 1, R/2]


class LayerInputs(NamedTuple):
    """The inputs that all layers of one call share."""

    angles: Angles
    valid_BT: Array  # not padding
    attend: Attend
    advance: Advance
    mesh: jax.sharding.Mesh
    decoding: bool = False  # there are few tokens and no gradient (`expert_parallel.expert_decoding`)


def advance_rows(segment_BT: Array, *prefix_BT: Array) -> Advance:
    """Return an `Advance` for whole rows from an empty state; the cache is the state after each row.

    With prefixes, as in `attend_within_segments`, a segment continues the state after its own. Only kinds that support
    shared prompts are asked to.
    """
    return lambda run, _: run(segment_BT, None, *prefix_BT)


def init_weight(rngs: nnx.Rngs, scale: float, **axes: int) -> nnx.Param[Array]:
    """Make a normal float32 parameter; the keywords are its logical axes (`parallel.sharding.RULES`) and sizes."""
    value = scale * jax.random.normal(rngs.params(), tuple(axes.values()))
    return nnx.Param(value, axes=tuple(axes))


def init_bias(enabled: bool, **axes: int) -> nnx.Param[Array] | None:
    """Make a zero float32 parameter with named axes, or None if the model has no such bias."""
    return nnx.Param(jnp.zeros(tuple(axes.values())), axes=tuple(axes)) if enabled else None


def add_bias(x_BT: Array, bias: nnx.Param[Array] | None) -> Array:
    """Add a bias `[...]` to `x [B, T, ...]`, in x's dtype."""
    return x_BT if bias is None else x_BT + bias[None, None].astype(x_BT.dtype)


def expand_dims_like(vector: Array, like: Array) -> Array:
    """Add leading axes of size one to `vector`, up to the rank of `like`: rank promotion is an error here."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, computed in float32 and returned in x's dtype.

    With `plus_one` the factor is 1 + scale.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False):
        self.scale = nnx.Param((jnp.zeros if plus_one else jnp.ones)(size), axes=("norm",))
        self.eps, self.plus_one = eps, plus_one

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], self.eps, self.plus_one)


@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def rms_norm(x: Array, scale: Array, eps: float, plus_one: bool) -> Array:
    """Compute x / rms(x) * scale over the last axis in float32 (`RMSNorm`); return it in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = 1 + scale.astype(jnp.float32) if plus_one else scale
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * expand_dims_like(scale, x)).astype(x.dtype)


class DenseMlp(nnx.Module):
    """down(activation(gate x) * up x), SwiGLU with silu; with squared ReLU down(relu(up x)^2)."""

    def __init__(self, kind: kinds.DenseMlp, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F, scale = config.hidden_size, kind.width, config.initializer_range
        self.activation = kind.activation
        gated = "gate" in kinds.mlp_weights(kind.activation)
        self.gate = init_weight(rngs, scale, embed=D, mlp=F) if gated else None
        self.up = init_weight(rngs, scale, embed=D, mlp=F)
        self.down = init_weight(rngs, scale, mlp=F, embed=D)

    def __call__(self, x_BTD: Array, mesh: jax.sharding.Mesh) -> Array:
        # Matrices: on CPU the gradient of three-dimensional products takes twice as long. Positions that are sharded
        # cannot be merged with the rows without gathering them.
        x = x_BTD if mesh.shape["context"] > 1 else x_BTD.reshape(-1, x_BTD.shape[-1])
        up = contract("...d,df->...f", x, self.up.get_value())
        if self.gate is None:
            product = jax.checkpoint(squared_relu, prevent_cse=False)(up)
        else:
            product = _gated(contract("...d,df->...f", x, self.gate.get_value()), up, self.activation)
        return contract("...f,fd->...d", product, self.down.get_value()).reshape(x_BTD.shape)


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _gated(gate: Array, up: Array, activation: str) -> Array:
    return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


def rotary_frequencies(rope: Rope, longest: int = 0) -> tuple[np.ndarray, float]:
    """Return radians per position for each pair of rotated dimensions, float32 `[R/2]`, and the factor on cos and sin.

    RoPE (arXiv 2104.09864), with YaRN (arXiv 2309.00071, section 3.4) or another scaling. `longest` is the length of
    the run's longest sequences, from which a `LongRope` chooses its factors.
    """
    R, base, scaling = rope.dim, rope.theta, rope.scaling
    if isinstance(scaling, AlphaRope):
        base *= scaling.alpha ** (R / (R - 2))
    frequency = base ** -(np.arange(0, R, 2) / R)
    if isinstance(scaling, LinearRope):
        frequency /= scaling.factor
    if isinstance(scaling, ProportionalRope):
        frequency /= scaling.factor
        frequency[int(scaling.partial_rotary_factor * R // 2) :] = 0
    if isinstance(scaling, LongRope):
        is_long = longest > scaling.original_max_position_embeddings
        frequency /= np.array(scaling.long_factor if is_long else scaling.short_factor)
        return frequency.astype(np.float32), _long_attention_factor(scaling)
    if isinstance(scaling, Llama3Rope):
        return (frequency * _llama3_share(frequency, scaling)).astype(np.float32), 1.0
    if isinstance(scaling, Yarn):
        return (frequency * _yarn_share(R, base, scaling)).astype(np.float32), attention_factor(scaling)
    return frequency.astype(np.float32), 1.0


def _long_attention_factor(scaling: LongRope) -> float:
    """Return LongRoPE's factor on queries and keys, whichever factors the frequencies have."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original = scaling.original_max_position_embeddings
    factor = scaling.factor or scaling.max_position_embeddings / original
    return math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))


def _llama3_share(frequency: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    """Compute the factor on the frequency of each pair."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return kept + (1 - kept) / scaling.factor


def _yarn_share(R: int, base: float, yarn: Yarn) -> np.ndarray:
    """Compute the factor on the frequency of each pair of R dimensions."""

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this number of turns over the original context."""
        return R * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    ramp = np.clip((np.arange(R // 2) - first) / (last - first or 1e-3), 0, 1)
    return 1 - ramp + ramp / yarn.factor


def attention_factor(yarn: Yarn) -> float:
    """Return YaRN's factor on queries and keys (0.1 ln factor + 1 in the paper)."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn, yarn.mscale) / mscale(yarn, yarn.mscale_all_dim)
    return mscale(yarn, 1)


def mscale(yarn: Yarn, strength: float) -> float:
    """Compute YaRN's scale of queries and of keys, with a strength (`mscale`, `mscale_all_dim`), 1 in the paper."""
    return 0.1 * strength * math.log(yarn.factor) + 1


def rotary_angles(position_BT: Array, config: ModelConfig) -> Angles:
    """Compute the angles of rotary positions in each of the model's embeddings."""
    mixers = (layer.mixer for layer in layers_of(config))
    ropes = dict.fromkeys(rope for mixer in mixers for rope in mixer.ropes())
    return {rope: _angles(position_BT, rope, config.max_position_embeddings) for rope in ropes}


def _angles(position_BT: Array, rope: Rope, longest: int) -> tuple[Array, Array]:
    frequency, factor = rotary_frequencies(rope, longest)
    position_BT11 = position_BT[..., None, None].astype(jnp.float32)
    angle = position_BT11 * expand_dims_like(jnp.asarray(frequency), position_BT11)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: Array, angles: tuple[Array, Array], *, interleaved: bool = False) -> Array:
    """Rotate the pairs of dimensions of every head by their angles, in float32.

    The pairs are (h, h + R/2), or if `interleaved` (2h, 2h + 1), of the R first dimensions, for which there are angles.
    """
    cos, sin = angles
    R, kept = 2 * cos.shape[-1], None
    if x_BTNH.shape[-1] > R:
        x_BTNH, kept = x_BTNH[..., :R], x_BTNH[..., R:]
    if interleaved:
        first, second = (x_BTNH[..., start::2].astype(jnp.float32) for start in (0, 1))
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = pairs.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
    else:
        first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = rotated.astype(x_BTNH.dtype)
    return rotated if kept is None else jnp.concatenate([rotated, kept], axis=-1)


class Attention(nnx.Module):
    """Projections to queries, keys and values, `attend`, output projection."""

    def __init__(self, kind: SelfAttention, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, kind.heads, kind.key_heads, kind.head_dim
        scale = config.initializer_range
        self.query = init_weight(rngs, scale, embed=D, heads=N, head=H)
        self.key = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.value = None if kind.keys_as_values else init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.out = init_weight(rngs, scale, heads=N, head=H, embed=D)
        has_bias = kind.bias != "none"
        self.query_bias = init_bias(has_bias, heads=N, head=H)
        self.key_bias = init_bias(has_bias, heads=K, head=H)
        self.value_bias = init_bias(has_bias and not kind.keys_as_values, heads=K, head=H)
        self.out_bias = init_bias(kind.bias == "all", embed=D)
        normed = {"none": None, "head": (H, H), "projection": (N * H, K * H)}[kind.qk_norm]
        norm = partial(RMSNorm, eps=config.rms_norm_eps, plus_one=config.norm_plus_one)
        self.query_norm = norm(normed[0]) if normed else None
        self.key_norm = norm(normed[1]) if normed else None
        self.eps = config.rms_norm_eps
        self.sinks = init_bias(kind.sinks, heads=N)
        self.gate = init_weight(rngs, scale, embed=D, heads=N, head=H) if kind.gate else None
        self.kind = kind

    def __call__(self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        q_BTNH = add_bias(contract("btd,dnh->btnh", x_BTD, self.query.get_value()), self.query_bias)
        k_BTKH = add_bias(contract("btd,dkh->btkh", x_BTD, self.key.get_value()), self.key_bias)
        v_BTKH = k_BTKH
        if self.value is not None:
            v_BTKH = add_bias(contract("btd,dkh->btkh", x_BTD, self.value.get_value()), self.value_bias)
        if self.kind.value_norm:
            v_BTKH = rms_norm(v_BTKH, jnp.ones(self.kind.head_dim), self.eps, False)
        q_BTNH, k_BTKH = (
            self._place(*each, shared.angles) for each in ((q_BTNH, self.query_norm), (k_BTKH, self.key_norm))
        )
        q_BTNH = q_BTNH if self.kind.query_scale == 1 else q_BTNH * self.kind.query_scale
        sinks_N = None if self.sinks is None else self.sinks[...]
        context_BTNH, cache = shared.attend(Heads(q_BTNH, k_BTKH, v_BTKH, sinks_N), cache, layer)
        if self.gate is not None:
            context_BTNH *= jax.nn.sigmoid(contract("btd,dnh->btnh", x_BTD, self.gate.get_value()))
        return add_bias(contract("btnh,nhd->btd", context_BTNH, self.out.get_value()), self.out_bias), cache

    def _place(self, x_BTNH: Array, norm: RMSNorm | None, angles: Angles) -> Array:
        """Normalize queries or keys and rotate them to their positions."""
        rope = self.kind.rope
        if norm is not None and not self.kind.norm_after_rope:
            x_BTNH = self._normalize(norm, x_BTNH)
        if rope is not None:
            x_BTNH = rotate(x_BTNH, angles[rope], interleaved=rope.interleaved)
        return self._normalize(norm, x_BTNH) if norm is not None and self.kind.norm_after_rope else x_BTNH

    def _normalize(self, norm: RMSNorm, x_BTNH: Array) -> Array:
        if self.kind.qk_norm == "projection":
            return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
        return norm(x_BTNH)


def attend_within_segments(
    segment_BT: Array,
    mesh: jax.sharding.Mesh,
    windows: tuple[int, ...] = (),
    tree: Tree | None = None,
) -> Attend:
    """Make the causal attention of tokens to their own segments (0 is padding), and to those that these continue.

    The cache is returned unchanged.
    """
    by_row, by_time = (*token_spec(mesh, *segment_BT.shape), None)[:2]
    rows = Rows(segment_BT, mesh, by_row, by_time, spec("heads")[0], windows, tree)

    def attend(heads: Heads, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        keys = heads.v_BTKU if heads.k_BTKH is None else heads.k_BTKH
        return row_attention(heads.q_BTNH, keys, heads.v_BTKU, layer, rows, heads.sinks_N), cache

    return attend
