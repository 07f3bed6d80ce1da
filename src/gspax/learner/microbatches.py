"""A minibatch in microbatches: the sum of some results, and the rows of the others in the order of the minibatch.

Microbatch m of M takes the rows m, m + M, ..., so that every device keeps its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gspax.types import Array


def run_microbatches(
    each: Callable[[Any], tuple[Any, Any]], batch: Any, rows: int, count: Array | None = None
) -> tuple[Any, Any]:
    """`each(part)` for every microbatch: (sums over them in float32, results by row joined).

    Args:
      each: a part of `batch` -> (a tree of arrays to add up, a tree of arrays with a row for each of the part's).
      batch: a tree of arrays `[B, ...]`.
      rows: of a microbatch; 0: all of them.
      count: the microbatches to run, the first ones; the results of the others are zeros. None: all.

    Raises:
      ValueError: `rows` does not divide B.
    """
    total = jax.tree.leaves(batch)[0].shape[0]
    if rows in (0, total):
        return each(batch)
    if total % rows:
        raise ValueError(f"microbatch_rows must divide the batch's {total} rows, got {rows}")
    M = total // rows
    parts = _split(batch, M)
    sums, by_row = jax.eval_shape(each, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(_zeros, sums)

    def add(sums: Any, part: Any) -> tuple[Any, Any]:
        more, by_row = each(part)
        return jax.tree.map(jnp.add, sums, more), by_row

    if count is None:
        sums, by_row = jax.lax.scan(add, start, parts)
        return sums, jax.tree.map(_join, by_row)

    def step(m: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, by_row = carry
        sums, now = add(sums, jax.tree.map(lambda x: x[m], parts))
        return sums, jax.tree.map(lambda of_all, x: of_all.at[m].set(x), by_row, now)

    empty = jax.tree.map(lambda like: jnp.zeros((M, *like.shape), like.dtype), by_row)
    sums, by_row = jax.lax.fori_loop(0, count, step, (start, empty))
    return sums, jax.tree.map(_join, by_row)


def count_held(segment_BT: Array, rows: int) -> Array:
    """The microbatches of so many rows that hold a token, int32."""
    rows = rows or segment_BT.shape[0]
    return (_split(segment_BT, segment_BT.shape[0] // rows) > 0).any(axis=(1, 2)).sum(dtype=jnp.int32)


def _zeros(like: Any) -> Array:
    """Sums of floats are float32, whatever is added."""
    return jnp.zeros(like.shape, jnp.float32 if jnp.issubdtype(like.dtype, jnp.floating) else like.dtype)


def _split(tree: Any, parts: int) -> Any:
    """`[B, ...]` leaves to `[M, B / M, ...]`, part m holding the rows m, m + M, ..."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def _join(x: Array) -> Array:
    """The inverse of `_split` for one array."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
