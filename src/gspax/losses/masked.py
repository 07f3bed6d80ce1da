"""Mean, sum, min and max of the entries that a mask keeps.

Entries outside the mask never matter, NaN and infinity included, in the value and in the gradient: they are replaced
before the reduction, because a product with 0 keeps a NaN. Where the mask keeps nothing the result is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def sum(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Σ of the kept entries. `value` and `mask` (bool) have one shape; the result has the dtype of `value`."""
    return jnp.sum(jnp.where(mask, value, 0), axis=axis)


def mean(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Mean of the kept entries, 0 where there are none."""
    count = jnp.sum(mask, axis=axis, dtype=value.dtype)
    return sum(value, mask, axis=axis) / jnp.maximum(count, 1)


def min(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Smallest kept entry, 0 where there are none."""
    least = jnp.min(jnp.where(mask, value, jnp.inf), axis=axis, initial=jnp.inf)
    return jnp.where(jnp.any(mask, axis=axis), least, 0)


def max(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Largest kept entry, 0 where there are none."""
    return -min(-value, mask, axis=axis)
