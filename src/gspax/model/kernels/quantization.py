"""Numbers in 8 bits, for sampling: symmetric integers with one float32 scale for the numbers that a product sums.

A weight has a scale for each output channel (the vector-wise weights of LLM.int8, arXiv 2208.07339, section 3.1), a
cached key or value one for each token and head. Because the numbers of one sum share their scale, a product is computed
with the integers, in the compute dtype, and scaled afterwards. XLA:TPU converts integers inside the product, so only
they are read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LARGEST = 127


class Quantized(NamedTuple):
    """An array that is about `values` times `scale`, in place of the array."""

    values: Array  # int8; in a tree of shardings or axis names, the sharding or names of this array
    scale: Array  # float32, without the axes whose numbers share one; in such trees as `values`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def quantize(x: Array, axes: tuple[int, ...]) -> Quantized:
    """Round x to 8 bits, with one scale for all numbers along `axes`; the error is at most half a scale."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Quantized(jnp.round(x / scale).astype(jnp.int8), jnp.squeeze(scale, axes))
