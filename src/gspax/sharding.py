"""Where arrays live: one mesh, one table from logical axes to mesh axes. One device is a mesh of size 1."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gspax import config
from gspax.errors import UserError

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # rows of a batch, prompts of the sampler
    "embed": "fsdp",  # the model dimension of parameters; gathered where a layer uses them
    "layer": None,
    "vocab": None,
    "heads": None,
    "head": None,
    "mlp": None,
    "expert": None,
    "norm": None,
    "rank": None,
}


def spec(*axes: str) -> PartitionSpec:
    """The mesh axes of an array with these logical axes; an unknown name is a KeyError, not a silent replica."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def mesh_shape(mesh: config.Mesh, devices: int) -> dict[str, int]:
    """Axis sizes with -1 filled in. UserError if they do not multiply to the number of devices."""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp}
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and known > 0 and devices % known == 0:
        sizes[free[0]] = devices // known
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != devices:
        raise UserError(
            f"mesh: the axes must multiply to the {devices} devices at hand (at most one may be -1); "
            f"got data={mesh.data}, fsdp={mesh.fsdp}"
        )
    return sizes


def make_mesh(mesh: config.Mesh, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The device mesh, with axes ('data', 'fsdp') that the compiler partitions by itself (`AxisType.Auto`)."""
    found = jax.devices() if devices is None else devices
    sizes = mesh_shape(mesh, len(found))
    grid = np.array(found).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def named(mesh: jax.sharding.Mesh, *axes: str) -> NamedSharding:
    """`spec(*axes)` on this mesh; without axes, replicated."""
    return NamedSharding(mesh, spec(*axes))


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Into how many parts a batch is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]
