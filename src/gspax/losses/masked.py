"""Mean, sum, min and max of the entries where a mask is True.

Entries outside the mask never matter, NaN and infinity included, in the value and in the gradient: they are replaced
before the reduction, because 0 times NaN is NaN. Where the mask is False everywhere the result is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def sum(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Sum the entries in the mask. `value` and `mask` (bool) have one shape; the result has the dtype of `value`."""
    return jnp.sum(jnp.where(mask, value, 0), axis=axis)


def mean(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Compute the mean of the entries in the mask, 0 where there are none."""
    count = jnp.sum(mask, axis=axis, dtype=value.dtype)
    return sum(value, mask, axis=axis) / jnp.maximum(count, 1)


def min(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Return the smallest entry in the mask, 0 where there are none."""
    least = jnp.min(jnp.where(mask, value, jnp.inf), axis=axis, initial=jnp.inf)
    return jnp.where(jnp.any(mask, axis=axis), least, 0)


def max(value: Array, mask: Array, *, axis: int | None = None) -> Array:
    """Return the largest entry in the mask, 0 where there are none."""
    return -min(-value, mask, axis=axis)
