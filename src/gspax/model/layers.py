"""The small parts of a Qwen3 layer: weights, RMSNorm, SwiGLU, rotary positions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspax.config import ModelConfig, Yarn
from gspax.types import Array


def weight(rngs: nnx.Rngs, scale: float, **axes: int) -> nnx.Param:
    """A normal float32 parameter; keyword names are its logical axes (`gspax.sharding.RULES`), values its shape.

    A trailing digit only keeps two equal axes apart and is dropped.
    """
    value = scale * jax.random.normal(rngs.params(), tuple(axes.values()))
    return nnx.Param(value, axes=tuple(axes))


def bias(on: bool, **axes: int) -> nnx.Param | None:
    """A float32 parameter of zeros with named axes, or None."""
    return nnx.Param(jnp.zeros(tuple(axes.values())), axes=tuple(axes)) if on else None


def biased(x_BT: Array, bias: nnx.Param | None) -> Array:
    """`x [B, T, ...]` plus a bias `[...]`, in x's dtype."""
    return x_BT if bias is None else x_BT + bias[None, None].astype(x_BT.dtype)


def along_last(vector: Array, like: Array) -> Array:
    """`vector` with leading axes of size one, as many as `like` has: broadcasting is always spelt out."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; the answer has x's dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size), axes=("norm",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse * along_last(self.scale[...], x)).astype(x.dtype)


class DenseMlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F, scale = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate = weight(rngs, scale, embed=D, mlp=F)
        self.up = weight(rngs, scale, embed=D, mlp=F)
        self.down = weight(rngs, scale, mlp=F, embed=D)

    def __call__(self, x_BTD: Array) -> Array:
        dtype = x_BTD.dtype
        hidden_BTF = jax.nn.silu(x_BTD @ self.gate.astype(dtype)) * (x_BTD @ self.up.astype(dtype))
        return hidden_BTF @ self.down.astype(dtype)


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of dimensions, float32 `[H/2]`, and the factor on cos and sin.

    RoPE (arXiv 2104.09864), with YaRN (arXiv 2309.00071, section 3.4) if the config has `rope_scaling`.
    """
    H, base, yarn = config.head_dim, config.rope_theta, config.rope_scaling
    frequency = base ** -(np.arange(0, H, 2) / H)
    if yarn is None:
        return frequency.astype(np.float32), 1.0

    def pair(turns: float) -> float:
        """The pair, on a scale without steps, that turns so often in the original context."""
        return H * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, H - 1)
    ramp = np.clip((np.arange(H // 2) - first) / (last - first or 1e-3), 0, 1)
    return (frequency * (1 - ramp + ramp / yarn.factor)).astype(np.float32), attention_factor(yarn)


def attention_factor(yarn: Yarn) -> float:
    """What YaRN multiplies queries and keys with (0.1 ln factor + 1 in the paper)."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(yarn.factor) + 1

    return scale(yarn.mscale) / scale(yarn.mscale_all_dim) if yarn.mscale and yarn.mscale_all_dim else scale(1)


def rotary_angles(position_BT: Array, config: ModelConfig) -> tuple[Array, Array]:
    """(cos, sin) `[B, T, 1, H/2]` float32 of rotary positions."""
    frequency, factor = rotary_frequencies(config)
    position_BT11 = position_BT[..., None, None].astype(jnp.float32)
    angle = position_BT11 * along_last(jnp.asarray(frequency), position_BT11)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
    """Turn the pairs (h, h + H/2) of every head by their angles, in float32."""
    cos, sin = angles
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
