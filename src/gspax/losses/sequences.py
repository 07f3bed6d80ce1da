"""Sums over the tokens of a sequence, whether it has a row to itself or shares one.

Unpacked (`segment_BT` is None) a row is one sequence. Packed, `segment_BT[b, t]` is the sequence of row b that token t
belongs to: 1, 2, ... up to T in any order, and 0 for padding. A quantity of sequences is an array [B, S]: S = 1
unpacked; packed S = T + 1, with sequence s in column s and nothing in column 0. Only response tokens (`mask_BT`) count.

Axes: B rows, T tokens, S columns for sequences; U is T, or 1 for a quantity that is the same for all tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from gspax.losses import explicit
from gspax.losses.formulas import formula

Array = jax.Array


def response(mask_BT: Array, segment_BT: Array | None) -> Array:
    """Remove from the mask the tokens that the segments mark as padding."""
    return mask_BT if segment_BT is None else mask_BT & (segment_BT > 0)


@formula("sum_t(x)")
def total(value_BU: Array, mask_BT: Array, segment_BT: Array | None) -> Array:
    """Sum over the response tokens of each sequence, [B, S]. Values outside the mask never matter."""
    if segment_BT is not None:
        return _by_segment(jax.ops.segment_sum, jnp.where(mask_BT, value_BU, 0), segment_BT)
    if value_BU.shape != mask_BT.shape:
        tokens_BS = count(mask_BT, None)
        return jnp.where(tokens_BS > 0, value_BU * tokens_BS, 0)
    return jnp.sum(jnp.where(mask_BT, value_BU, 0), axis=-1, keepdims=True)


def count(mask_BT: Array, segment_BT: Array | None) -> Array:
    """Count |y|, the response tokens of each sequence, float32 [B, S]."""
    return total(jnp.ones(mask_BT.shape, jnp.float32), mask_BT, segment_BT)


@formula("mean_t(x)")
def mean(value_BU: Array, mask_BT: Array, segment_BT: Array | None) -> Array:
    """Compute 1/|y| Σ over the response tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return total(value_BU, mask_BT, segment_BT) / jnp.maximum(count(mask_BT, segment_BT), 1)


def at_tokens(value_BS: Array, segment_BT: Array | None) -> Array:
    """Return a quantity of sequences at each of their tokens, [B, U]; unpacked, it is the same all along the row."""
    if segment_BT is None:
        return value_BS
    at_BT = jnp.take_along_axis(value_BS, explicit.whole(segment_BT, 1), axis=-1)
    return explicit.like(at_BT, segment_BT)


@formula("max_t(x)")
def largest(value_BT: Array, mask_BT: Array, segment_BT: Array | None) -> Array:
    """Return the largest value of the response tokens of each sequence, [B, S]; 0 for a sequence without any."""
    kept_BT = jnp.where(mask_BT, value_BT, -jnp.inf)
    if segment_BT is None:
        most_BS = jnp.max(kept_BT, axis=-1, keepdims=True, initial=-jnp.inf)
    else:
        most_BS = _by_segment(jax.ops.segment_max, kept_BT, segment_BT)
    return jnp.where(count(mask_BT, segment_BT) > 0, most_BS, 0)


def _by_segment(reduction: Callable[..., Array], value_BT: Array, segment_BT: Array) -> Array:
    """Reduce over the tokens of each segment, [B, S]."""
    value_BT, segment_BT = (explicit.whole(x_BT, 1) for x_BT in explicit.alike(value_BT, segment_BT))
    return jax.vmap(partial(reduction, num_segments=segment_BT.shape[-1] + 1))(value_BT, segment_BT)


def to_go(value_BT: Array, segment_BT: Array | None) -> Array:
    """Sum the values from each token to the end of its sequence, [B, T]; the values are 0 outside the mask."""
    value_BT = explicit.whole(value_BT, 1)
    if segment_BT is None:
        return jnp.cumsum(value_BT[:, ::-1], axis=-1)[:, ::-1]
    value_BT, segment_BT = explicit.alike(value_BT, explicit.whole(segment_BT, 1))
    order_BT = jnp.argsort(-segment_BT, axis=-1, stable=True)[:, ::-1]  # by segment, from the last token to the first
    segment_BT, value_BT = (jnp.take_along_axis(x_BT, order_BT, axis=-1) for x_BT in (segment_BT, value_BT))
    first_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sum_BT = jax.lax.associative_scan(add, (first_BT, value_BT), axis=-1)
    return jnp.take_along_axis(sum_BT, jnp.argsort(order_BT, axis=-1), axis=-1)


def by_row_or_token(value_BS: Array, mask_BT: Array, segment_BT: Array | None) -> tuple[Array, Array]:
    """Return a quantity of sequences in the shape of a correction, [B], or [B, T] if packed, and where it counts."""
    if segment_BT is None:
        return value_BS[:, 0], mask_BT.any(-1)
    return at_tokens(value_BS, segment_BT), mask_BT
