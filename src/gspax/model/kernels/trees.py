"""Rows whose segments continue others: a prompt and its responses, or the sequences of a sample that begin alike.

A segment continues one other segment of its row, which may continue one itself. Its tokens attend to all of these, and
their positions count on from there. Directly after a segment stand those that continue it, each followed by those that
continue it in turn. So the queries that attend to a key are an interval of positions, however deep the tree is.

Axes: B rows, T positions, S = T + 1 segments; segment 0 is padding.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Reached = tuple[Array, Array, Array, Array]  # levels; of each segment: an ancestor so many up, the end, what is before


class Tree(NamedTuple):
    """What the tokens of rows attend to, and where their segments begin; int32."""

    until_BT: Array  # the queries from a key's position up to this one attend to it
    parent_BS: Array  # the segment that each segment continues; 0: none
    before_BS: Array  # the tokens of all that it continues


def make_tree(segment_BT: Array, prefix_BT: Array) -> Tree:
    """Make the tree of rows.

    Args:
      segment_BT: int32, 1 to T; 0 is padding.
      prefix_BT: int32, the segment that the token's own continues; 0: none.
    """
    B, T = segment_BT.shape
    largest, total = (
        jax.vmap(partial(reduction, num_segments=T + 1)) for reduction in (jax.ops.segment_max, jax.ops.segment_sum)
    )
    after_BT = jnp.broadcast_to(jnp.arange(1, T + 1, dtype=jnp.int32), (B, T))
    parent_BS = jnp.maximum(largest(prefix_BT, segment_BT), 0).at[:, 0].set(0)
    length_BS = total(jnp.ones_like(segment_BT), segment_BT).at[:, 0].set(0)

    def goes_on(reached: Reached) -> Array:
        return (reached[1] > 0).any() & (reached[0] <= T)

    def lift(reached: Reached) -> Reached:
        """Reach twice as many levels up and down."""
        levels, ancestor_BS, end_BS, before_BS = reached
        end_BS = jnp.maximum(end_BS, largest(end_BS, ancestor_BS))
        return 2 * levels, _at(ancestor_BS, ancestor_BS), end_BS, before_BS + _at(before_BS, ancestor_BS)

    start = jnp.int32(1), parent_BS, largest(after_BT, segment_BT), _at(length_BS, parent_BS)
    _, ancestor_BS, end_BS, before_BS = lax.while_loop(goes_on, lift, start)
    parent_BS = jnp.where(ancestor_BS > 0, 0, parent_BS)  # of segments that continue themselves, which nothing allows
    until_BT = jnp.where(segment_BT > 0, _at(end_BS, segment_BT), after_BT)
    return Tree(until_BT, parent_BS, before_BS)


def positions(segment_BT: Array, tree: Tree | None = None) -> Array:
    """Compute tokens' positions in their segments, from 0, or after all that their own continues, int32."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    previous_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BT = jnp.where(segment_BT != previous_BT, index_T[None], 0)
    position_BT = index_T[None] - lax.cummax(start_BT, axis=1)
    return position_BT if tree is None else position_BT + _at(tree.before_BS, segment_BT)


def _at(value_BS: Array, segment_BU: Array) -> Array:
    return jnp.take_along_axis(value_BS, segment_BU, axis=1)
