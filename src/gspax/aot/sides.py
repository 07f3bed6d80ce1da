"""The devices that the programs of a run are for: all of a topology, or the learner's and the sampler's own.

libtpu compiles for all devices of a topology, or for a part of its only slice. A part of several slices it takes for no
slice, or ends the process where slices have unlike parts; so whole slices of a learner or sampler are compiled for as a
topology of their own, which they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from gspax.aot import chips
from gspax.aot.chips import Topology
from gspax.config import Experiment
from gspax.errors import UserError
from gspax.rollout.placement import make_meshes

Rate = Callable[[tuple[str, ...]], float]


@dataclass(frozen=True, kw_only=True)
class Side:
    """Devices that run some of a run's programs."""

    name: str  # whose they are; empty if learner and sampler share them
    mesh: jax.sharding.Mesh
    topology: Topology  # of the slices that they are in

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    def link_rate(self) -> Rate:
        """See `link_rate`."""
        dimensions = len(self.topology.sides)
        coords = np.array([device.coords[:dimensions] for device in self.mesh.devices.flat])
        return link_rate(coords, self.sizes, self.topology)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"{self.mesh.size} devices, {axes or 'all axes of size 1'}"


def sides(experiment: Experiment, topology: Topology) -> tuple[Side, Side]:
    """The learner's devices of a topology and the sampler's, twice the same unless the experiment places them apart.

    Raises:
      UserError: libtpu is missing or does not know the topology, the experiment does not fit its number of devices, or
        the sampler is to have a part of a slice of several.
    """
    learner, sampler = _parts(experiment, topology)
    shared = learner is sampler  # no placement, or one in a slice that both have a part of
    devices = [*chips.devices(learner), *(() if shared else chips.devices(sampler))]
    mesh, own = make_meshes(experiment, devices)
    if experiment.placement is None:
        both = Side(name="", mesh=mesh, topology=topology)
        return both, both
    return Side(name="learner", mesh=mesh, topology=learner), Side(name="sampler", mesh=own, topology=sampler)


def _parts(experiment: Experiment, topology: Topology) -> tuple[Topology, Topology]:
    """The slices of learner and sampler: all of them for both, or whole ones for each."""
    if experiment.placement is None or topology.slices == 1:
        return topology, topology
    wanted = experiment.placement.devices
    own, rest = divmod(wanted, topology.slice_devices)
    if rest or not 0 < own < topology.slices:
        raise UserError(
            f"placement.devices: wanted whole slices of {topology.slice_devices} devices on {topology}, and fewer than "
            f"all, got {wanted} (a part of a slice is compiled for where there is one slice alone)"
        )
    return replace(topology, slices=topology.slices - own), replace(topology, slices=own)


def link_rate(coords: np.ndarray, mesh: dict[str, int], topology: Topology) -> Rate:
    """A function from axes of the mesh to the bytes/s that a device can send to its group of devices along them, within
    a slice; to any device for axes that could not be read.

    Args:
      coords: int [devices, dimensions], the places of the mesh's devices in the torus.
      mesh: axis sizes, in the devices' order.
    """
    crossed = dimensions_crossed(coords, mesh)
    every = tuple(range(coords.shape[1]))
    extent = tuple(int(size) for size in coords.max(axis=0) - coords.min(axis=0) + 1)

    def rate(axes: tuple[str, ...]) -> float:
        return topology.network_rate(every if axes == ("unread",) else crossed(axes), extent)

    return rate


def dimensions_crossed(coords: np.ndarray, mesh: dict[str, int]) -> Callable[[tuple[str, ...]], tuple[int, ...]]:
    """A function from axes of the mesh to the dimensions of the torus that their groups of devices extend over.

    Args: as of `link_rate`. Coordinates repeat from slice to slice.
    """
    grid = coords.reshape(*mesh.values(), -1)

    def crossed(axes: tuple[str, ...]) -> tuple[int, ...]:
        group = grid[tuple(slice(None) if axis in axes else 0 for axis in mesh)].reshape(-1, grid.shape[-1])
        return tuple(int(axis) for axis in np.flatnonzero((group != group[0]).any(axis=0)))

    return crossed
