"""Meshes with explicit axes, as `jax.make_mesh` makes them: there a sort, a scan, or a reshape needs its axis whole.

With automatic axes, inside `shard_map`, and on one device nothing is split as far as a program can see, and every
function here returns what it was given.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array


def is_split(x: Array, axis: int) -> bool:
    """Whether that axis of the array is split over explicit axes of a mesh."""
    return _parts(x)[axis] is not None


def whole(x: Array, *axes: int) -> Array:
    """The array with these axes, or all of them if none is named, whole on every device."""
    gathered = {axis % x.ndim for axis in axes} or range(x.ndim)
    return _split(x, [None if axis in gathered else part for axis, part in enumerate(_parts(x))], x)


def like(x: Array, other: Array) -> Array:
    """The array, split as `other` is, which has its shape."""
    return _split(x, _parts(other), other)


def alike(*arrays: Array) -> tuple[Array, ...]:
    """Arrays of one shape, all of them split as the first that is split at all."""
    first = next((x for x in arrays if any(_parts(x))), arrays[0])
    return tuple(like(x, first) for x in arrays)


def _parts(x: Array) -> list[object]:
    """The mesh axes, or None, that each axis of the array is split over."""
    spec = getattr(jax.typeof(x).sharding, "spec", ())
    return [*spec, *[None] * (x.ndim - len(spec))]


def _split(x: Array, parts: list[object], on: Array) -> Array:
    if parts == _parts(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(on).sharding.mesh, PartitionSpec(*parts)))
