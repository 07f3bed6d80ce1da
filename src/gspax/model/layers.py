"""The small parts of a Qwen3 layer: weights, RMSNorm, SwiGLU, rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.model.config import ModelConfig
from gspax.types import Array


def weight(rngs: nnx.Rngs, scale: float, **axes: int) -> nnx.Param:
    """A normal float32 parameter; keyword names are its logical axes (`gspax.sharding.RULES`), values its shape.

    A trailing digit only keeps two equal axes apart and is dropped.
    """
    value = scale * jax.random.normal(rngs.params(), tuple(axes.values()))
    return nnx.Param(value, axes=tuple(axes))


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


def rotary_angles(position_BT: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """(cos, sin) `[B, T, 1, H/2]` float32 of RoPE (arXiv 2104.09864) with base `theta`."""
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    position_BT11 = position_BT[..., None, None].astype(jnp.float32)
    angle = position_BT11 * along_last(frequency, position_BT11)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
    """Turn the pairs (h, h + H/2) of every head by their angles, in float32."""
    cos, sin = angles
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
