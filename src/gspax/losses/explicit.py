"""Meshes with explicit axes, as `jax.make_mesh` makes them: there a sort, a scan, or a reshape needs its axis whole.

With automatic axes, inside `shard_map`, and on one device nothing is split as far as a program can see, and every
function here returns its argument unchanged.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array


def is_split(x: Array, axis: int) -> bool:
    """Return whether an axis of the array is split over explicit axes of a mesh."""
    return _parts(x)[axis] is not None


def whole(x: Array, *axes: int) -> Array:
    """Gather these axes of the array, or all of them if none is named, on every device."""
    gathered = {axis % x.ndim for axis in axes} or range(x.ndim)
    return _split(x, [None if axis in gathered else part for axis, part in enumerate(_parts(x))], x)


def like(x: Array, other: Array) -> Array:
    """Split the array as `other`, which has the same shape, is split."""
    return _split(x, _parts(other), other)


def alike(*arrays: Array) -> tuple[Array, ...]:
    """Split arrays of one shape like the first of them that is split at all."""
    first = next((x for x in arrays if any(_parts(x))), arrays[0])
    return tuple(like(x, first) for x in arrays)


def _parts(x: Array) -> list[object]:
    """Return the mesh axes, or None, that each axis of the array is split over."""
    spec = getattr(jax.typeof(x).sharding, "spec", ())
    return [*spec, *[None] * (x.ndim - len(spec))]


def _split(x: Array, parts: list[object], on: Array) -> Array:
    if parts == _parts(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(on).sharding.mesh, PartitionSpec(*parts)))
