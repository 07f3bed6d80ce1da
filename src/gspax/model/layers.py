"""The building blocks of a Qwen3 layer: parameters, RMSNorm, SwiGLU, rotary position embedding.

The norm and the gate recompute their element-wise operations in the backward pass: only their inputs are saved, which
halves the memory of a dense layer's residuals, and reading fewer of them makes the backward pass faster.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspax.config import ModelConfig, Yarn
from gspax.model.kernels.quantization import contract
from gspax.types import Array


def init_weight(rngs: nnx.Rngs, scale: float, **axes: int) -> nnx.Param:
    """A normal float32 parameter; the keywords are its logical axes (`parallel.sharding.RULES`) and their sizes."""
    value = scale * jax.random.normal(rngs.params(), tuple(axes.values()))
    return nnx.Param(value, axes=tuple(axes))


def init_bias(enabled: bool, **axes: int) -> nnx.Param | None:
    """A zero float32 parameter with named axes, or None if the model has no such bias."""
    return nnx.Param(jnp.zeros(tuple(axes.values())), axes=tuple(axes)) if enabled else None


def add_bias(x_BT: Array, bias: nnx.Param | None) -> Array:
    """`x [B, T, ...]` plus a bias `[...]`, in x's dtype."""
    return x_BT if bias is None else x_BT + bias[None, None].astype(x_BT.dtype)


def expand_dims_like(vector: Array, like: Array) -> Array:
    """`vector` with leading axes of size one up to the rank of `like`, since rank promotion is an error here."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, computed in float32 and returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size), axes=("norm",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], self.eps)


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """The function of `RMSNorm`."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * expand_dims_like(scale, x)).astype(x.dtype)


class DenseMlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, *, width: int, rngs: nnx.Rngs):
        D, F, scale = config.hidden_size, width, config.initializer_range
        self.gate = init_weight(rngs, scale, embed=D, mlp=F)
        self.up = init_weight(rngs, scale, embed=D, mlp=F)
        self.down = init_weight(rngs, scale, mlp=F, embed=D)

    def __call__(self, x_BTD: Array, mesh: jax.sharding.Mesh) -> Array:
        # Matrices: on CPU the gradient of three-dimensional products takes twice as long. Positions that are sharded
        # cannot be merged with the rows without gathering them.
        x = x_BTD if mesh.shape["context"] > 1 else x_BTD.reshape(-1, x_BTD.shape[-1])
        gate, up = (contract("...d,df->...f", x, weight.get_value()) for weight in (self.gate, self.up))
        return contract("...f,fd->...d", _gated(gate, up), self.down.get_value()).reshape(x_BTD.shape)


@partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position for each pair of dimensions, float32 `[H/2]`, and the factor on cos and sin.

    RoPE (arXiv 2104.09864), with YaRN (arXiv 2309.00071, section 3.4) if the config has `rope_scaling`.
    """
    H, base, yarn = config.head_dim, config.rope_theta, config.rope_scaling
    frequency = base ** -(np.arange(0, H, 2) / H)
    if yarn is None:
        return frequency.astype(np.float32), 1.0

    def pair(turns: float) -> float:
        """The (fractional) index of the pair that makes so many full turns over the original context."""
        return H * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, H - 1)
    ramp = np.clip((np.arange(H // 2) - first) / (last - first or 1e-3), 0, 1)
    return (frequency * (1 - ramp + ramp / yarn.factor)).astype(np.float32), attention_factor(yarn)


def attention_factor(yarn: Yarn) -> float:
    """YaRN's factor on queries and keys (0.1 ln factor + 1 in the paper)."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(yarn.factor) + 1

    return scale(yarn.mscale) / scale(yarn.mscale_all_dim) if yarn.mscale and yarn.mscale_all_dim else scale(1)


def rotary_angles(position_BT: Array, config: ModelConfig) -> tuple[Array, Array]:
    """(cos, sin) `[B, T, 1, H/2]` float32 of rotary positions."""
    frequency, factor = rotary_frequencies(config)
    position_BT11 = position_BT[..., None, None].astype(jnp.float32)
    angle = position_BT11 * expand_dims_like(jnp.asarray(frequency), position_BT11)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
    """Rotate the pairs (h, h + H/2) of every head by their angles, in float32."""
    cos, sin = angles
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
