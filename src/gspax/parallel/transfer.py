"""Moves arrays from one mesh to another with no device in common.

In one process that is `jax.device_put`. Between processes there are two steps: the array is laid out on its own mesh
as the other mesh wants it, so that each source device holds exactly the shard of one target device; then a collective
permutation over the devices of both meshes moves the shards. Every platform supports that, while `jax.device_put`
between processes needs support in the runtime (which CPUs lack, jax 0.10) and equal device counts.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspax.errors import UserError
from gspax.types import PyTree

T = TypeVar("T")


def transfer(tree: T, shardings: PyTree) -> T:
    """Move the arrays of a tree, of one dimension or more each, to `shardings`: one for all, or a tree of them.

    Collective: it waits for earlier computations on the devices of both meshes. All arrays are on one mesh, and all
    shardings on one other.

    Raises:
      UserError: there are several processes, and neither mesh's device count divides the other's.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda array: _transfer_array(array, shardings), tree)
    return jax.tree.map(_transfer_array, tree, shardings)


def size_mismatch(source: int, target: int) -> str | None:
    """Return the reason why arrays cannot move between meshes of these sizes in several processes; None if they can."""
    if source % target and target % source:
        wanted = f"wanted a divisor or a multiple of the other {source} devices"
        return f"{wanted} in a run of several processes, got {target}"
    return None


def _transfer_array(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    current = cast(NamedSharding, array.sharding)
    if problem := size_mismatch(current.mesh.size, wanted.mesh.size):
        raise UserError(f"devices: {problem}")
    if current.mesh.size >= wanted.mesh.size:  # replicate on the larger mesh, send one of the replicas
        return _send(_relayout(array, _replicated(current, wanted)), wanted)
    return _relayout(_send(array, _replicated(wanted, current)), wanted)


def _replicated(larger: NamedSharding, sharding: NamedSharding) -> NamedSharding:
    """Return the layout of `sharding`, repeated on each of the groups of its size in the mesh of `larger`."""
    grid = larger.mesh.devices.reshape(-1, *sharding.mesh.devices.shape)
    axes = ("copy", *sharding.mesh.axis_names)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return NamedSharding(Mesh(grid, axes, axis_types=kinds), sharding.spec)


def _send(array: jax.Array, landing: NamedSharding) -> jax.Array:
    """Send the shards of the array's first devices to the devices of `landing`: the same layout, once or repeated."""
    targets = list(landing.mesh.devices.flat)
    current = cast(NamedSharding, array.sharding)
    sources = list(current.mesh.devices.flat)[: len(targets)]
    joint = Mesh(np.array(sources + targets), "device")
    shape = landing.shard_shape(array.shape)
    held = {shard.device: shard.data for shard in array.addressable_shards}
    shards = [
        held[device] if device in sources else jnp.zeros(shape, array.dtype, device=device)
        for device in sources + targets
        if device.process_index == jax.process_index()
    ]
    stacked = jax.make_array_from_single_device_arrays(
        (joint.size * shape[0], *shape[1:]),
        NamedSharding(joint, PartitionSpec("device")),
        shards,
        dtype=array.dtype,
    )
    moved = {shard.device: shard.data for shard in _permute(stacked, joint, len(sources)).addressable_shards}
    local = [moved[device] for device in targets if device in moved]
    return jax.make_array_from_single_device_arrays(array.shape, landing, local, dtype=array.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _permute(stacked: jax.Array, mesh: Mesh, sources: int) -> jax.Array:
    """Send shard i of the first `sources` shards to positions sources + i, 2 sources + i, ...; sources get zeros."""

    def permute(shard: jax.Array) -> jax.Array:
        rounds = [
            jax.lax.ppermute(shard, "device", [(source, first + source) for source in range(sources)])
            for first in range(sources, mesh.size, sources)
        ]
        return sum(rounds[1:], start=rounds[0])  # a device that receives nothing has zeros

    by_device = PartitionSpec("device")
    return jax.shard_map(permute, mesh=mesh, in_specs=by_device, out_specs=by_device)(stacked)


def _relayout(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """Change the layout of an array on its devices."""
    return jax.jit(_layer_by_layer, static_argnums=1, out_shardings=wanted)(array, wanted)


def _layer_by_layer(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """Constrain stacked layers one at a time: between some layouts XLA can only gather the full array everywhere."""
    if array.ndim < 3 or _shards_first_axis(wanted):
        return array
    layer = NamedSharding(wanted.mesh, PartitionSpec(*wanted.spec[1:]))
    return jax.lax.map(lambda part: jax.lax.with_sharding_constraint(part, layer), array)


def _shards_first_axis(sharding: NamedSharding) -> bool:
    return bool(sharding.spec) and sharding.spec[0] is not None
