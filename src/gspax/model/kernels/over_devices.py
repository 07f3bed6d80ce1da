"""Sums over the devices of a mesh axis that hold the parts of a row, in order, inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")


def shift(tree: T, axis: str, by: int = 1) -> T:
    """Send arrays to the device `by` places later; the first devices get zeros."""
    pairs = [(place, place + by) for place in range(jax.lax.axis_size(axis) - by)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)


def accumulate(join: Callable[[T, T], T], own: T, axis: str) -> T:
    """Join the values of all devices up to each one, in log2 of their number exchanges.

    `join(earlier, later)` is associative. Before the first device stand zeros, which must join as what comes first of
    all: as an empty state, for maps between states.
    """
    by = 1
    while by < jax.lax.axis_size(axis):
        own = join(shift(own, axis, by), own)
        by *= 2
    return own
