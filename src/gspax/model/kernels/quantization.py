"""Numbers in 8 bits, for sampling: symmetric integers with one float32 scale for the numbers that a product sums.

A weight has a scale for each output channel (the vector-wise weights of LLM.int8, arXiv 2208.07339, section 3.1), a
cached key or value one for each token and head. Because the numbers of one sum share their scale, a product is computed
with the integers, in the compute dtype, and scaled afterwards. XLA:TPU converts integers inside the product, so only
they are read.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

LARGEST = 127
T = TypeVar("T")


class Quantized(NamedTuple):
    """An array that is about `values` times `scale`, in place of the array."""

    values: Array  # int8; in a tree of shardings or axis names, the sharding or names of this array
    scale: Array  # float32, without the axes whose numbers share one; in such trees as `values`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Weight: TypeAlias = Array | Quantized


def quantize(x: Array, axes: tuple[int, ...]) -> Quantized:
    """Round x to 8 bits, with one scale for all numbers along `axes`; the error is at most half a scale."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Quantized(jnp.round(x / scale).astype(jnp.int8), jnp.squeeze(scale, axes))


def contract(subscripts: str, x: Array, weight: Weight, dtype: DTypeLike | None = None) -> Array:
    """Compute einsum(subscripts, x, weight) in x's dtype, accumulated in float32 if the weight has 8 bits.

    Args:
      subscripts: axes of x, weight and result; the result's last axes are the weight's axes that are not summed over.
      x: float32 or bfloat16.
      weight: an array of any float dtype or a `Quantized`.
      dtype: the dtype of the result; default: x's.
    """
    if not isinstance(weight, Quantized):
        return jnp.einsum(subscripts, x, weight.astype(x.dtype), preferred_element_type=dtype)
    y = jnp.einsum(subscripts, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    scale = weight.scale.reshape((1,) * (y.ndim - weight.scale.ndim) + weight.scale.shape)
    return (y * scale).astype(dtype or x.dtype)


def unpack(x: Weight, dtype: DTypeLike) -> tuple[Array, Array | None]:
    """Return the numbers to multiply, x itself or its values in a dtype, and their scale, or None."""
    return (x.values.astype(dtype), x.scale) if isinstance(x, Quantized) else (x, None)


def dequantize(weight: Weight, dtype: DTypeLike, axis: int) -> Array:
    """Return a weight as an array in a dtype; a `Quantized` has one scale along `axis`."""
    if not isinstance(weight, Quantized):
        return weight.astype(dtype)
    return (weight.values.astype(jnp.float32) * jnp.expand_dims(weight.scale, axis)).astype(dtype)


def look_up(table: Weight, index: Array, dtype: DTypeLike) -> Array:
    """Return rows of a table of vectors, in a dtype."""
    return dequantize(jax.tree.map(lambda x: x[index], table), dtype, axis=-1)


def cast(tree: T, dtype: DTypeLike) -> T:
    """Cast the arrays of a tree to this dtype, except `Quantized` ones."""
    return jax.tree.map(lambda leaf: leaf if is_quantized(leaf) else leaf.astype(dtype), tree, is_leaf=is_quantized)


def is_quantized(leaf: object) -> bool:
    """Return whether a node of the tree is a `Quantized`."""
    return isinstance(leaf, Quantized)
