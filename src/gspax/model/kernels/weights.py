"""Products with matrices in the forms that are stored: arrays, or numbers in 8 bits (`kernels.quantization`).

What multiplies with a `Weight` works with both, and need not know which it has.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gspax.model.kernels.quantization import Quantized

T = TypeVar("T")
Axes: TypeAlias = tuple[str, ...]
Weight: TypeAlias = Array | Quantized


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


def project(x: Array, weight: Weight, *, transposed: bool) -> Array:
    """Compute the float32 product x @ weight, or x @ weight.T."""
    if not isinstance(weight, Quantized):
        matrix = weight.T if transposed else weight
        return jnp.matmul(x, matrix.astype(x.dtype), preferred_element_type=jnp.float32)
    return contract("...d,vd->...v" if transposed else "...d,dv->...v", x, weight, jnp.float32)


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
    return jax.tree.map(lambda x: x if is_compound(x) else x.astype(dtype), tree, is_leaf=is_compound)


def is_compound(leaf: object) -> bool:
    """Return whether a node of a tree is one weight of several arrays, for `is_leaf`."""
    return isinstance(leaf, Quantized)


def array_axes(weight: Weight, axes: Axes, summed: tuple[int, ...]) -> Axes | Quantized:
    """Return the axes of the arrays of a weight, in place of them: a scale has none of the `summed` ones."""
    if not isinstance(weight, Quantized):
        return axes
    return Quantized._make((axes, tuple(axis for number, axis in enumerate(axes) if number not in summed)))
