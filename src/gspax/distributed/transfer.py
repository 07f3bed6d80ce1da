"""Arrays from the devices of one mesh to those of another, with no device in common.

In one process that is `jax.device_put`. Between processes every array is laid out twice: on the mesh it leaves, as the
other mesh wants it, so that each sending device holds just what one receiving device is to have; then a collective
permutation over the devices of both hands it over. XLA has it on every platform, while `jax.device_put` between
processes needs a runtime that can (not that of CPUs, jax 0.10), and equal numbers of devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspax.errors import UserError

T = TypeVar("T")


def transfer(tree: T, shardings: Any) -> T:
    """The arrays of a tree, one dimension or more each, placed by `shardings`: one for all, or a tree of them.

    Collective: it waits for what the devices of both meshes have to do before. All arrays lie on one mesh, and all
    shardings are of one other.

    Raises:
      UserError: several processes, and neither mesh's number of devices divides the other's.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda array: _transfer_array(array, shardings), tree)
    return jax.tree.map(_transfer_array, tree, shardings)


def transfer_key(key: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`move` for a typed PRNG key."""
    moved = transfer(jax.random.key_data(key), sharding)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(key))


def size_mismatch(given: int, taken: int) -> str | None:
    """What is wrong with moving from so many devices to so many in several processes, if anything."""
    if given % taken and taken % given:
        return f"wanted a divisor or a multiple of the other {given} devices in a run of several processes, got {taken}"
    return None


def _transfer_array(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    given: Any = array.sharding
    if problem := size_mismatch(given.mesh.size, wanted.mesh.size):
        raise UserError(f"devices: {problem}")
    if given.mesh.size >= wanted.mesh.size:  # copies among the givers, of which one is sent
        return _send(_lay_out(array, _copies(given.mesh, wanted)), wanted)
    return _lay_out(_send(array, _copies(wanted.mesh, given)), wanted)


def _copies(mesh: Any, sharding: NamedSharding) -> NamedSharding:
    """The layout of `sharding`, once on each of so many equal parts of the mesh's devices."""
    grid = mesh.devices.reshape(-1, *sharding.mesh.devices.shape)
    axes = ("copy", *sharding.mesh.axis_names)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return NamedSharding(Mesh(grid, axes, axis_types=kinds), sharding.spec)


def _send(array: jax.Array, landing: NamedSharding) -> jax.Array:
    """Equal layouts: the array's first devices hand their parts to those of `landing`, once or several times."""
    takers = list(landing.mesh.devices.flat)
    given: Any = array.sharding
    givers = list(given.mesh.devices.flat)[: len(takers)]
    together = Mesh(np.array(givers + takers), "device")
    part = landing.shard_shape(array.shape)
    held = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [
        held[device] if device in givers else jnp.zeros(part, array.dtype, device=device)
        for device in givers + takers
        if device.process_index == jax.process_index()
    ]
    joined = jax.make_array_from_single_device_arrays(
        (together.size * part[0], *part[1:]),
        NamedSharding(together, PartitionSpec("device")),
        parts,
        dtype=array.dtype,
    )
    handed = {shard.device: shard.data for shard in _hand_over(joined, together, len(givers)).addressable_shards}
    mine = [handed[device] for device in takers if device in handed]
    return jax.make_array_from_single_device_arrays(array.shape, landing, mine, dtype=array.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _hand_over(joined: jax.Array, mesh: Mesh, givers: int) -> jax.Array:
    """Part i of the first `givers` ones in the places givers + i, 2 givers + i, ...; zeros in the first."""

    def permuted(part: jax.Array) -> jax.Array:
        rounds = [
            jax.lax.ppermute(part, "device", [(giver, first + giver) for giver in range(givers)])
            for first in range(givers, mesh.size, givers)
        ]
        return sum(rounds[1:], start=rounds[0])  # a device that is sent nothing has zeros

    split = PartitionSpec("device")
    return jax.shard_map(permuted, mesh=mesh, in_specs=split, out_specs=split)(joined)


def _lay_out(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """The same on the same devices, in another layout."""
    return jax.jit(_by_layers, static_argnums=1, out_shardings=wanted)(array, wanted)


def _by_layers(array: jax.Array, wanted: NamedSharding) -> jax.Array:
    """Stacked layers go one by one: for some layouts XLA knows no way but to gather the whole on every device."""
    if array.ndim < 3 or _splits_first(wanted):
        return array
    layer = NamedSharding(wanted.mesh, PartitionSpec(*wanted.spec[1:]))
    return jax.lax.map(lambda part: jax.lax.with_sharding_constraint(part, layer), array)


def _splits_first(sharding: NamedSharding) -> bool:
    return bool(sharding.spec) and sharding.spec[0] is not None
