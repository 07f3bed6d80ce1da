"""Compilation targets: the devices of a topology that the learner and the sampler run on, shared or separate.

libtpu compiles for all devices of a topology, or for a part of a single slice. For a part of several slices it produces
an empty slice or ends the process. So where the learner and the sampler have whole slices of their own, each is
compiled for its slices as a topology of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from gspax.commands.aot import chips
from gspax.commands.aot.chips import Topology
from gspax.commands.aot.hlo import UNKNOWN
from gspax.config import Experiment, Placement
from gspax.errors import UserError
from gspax.sampler.placement import make_meshes

Rate = Callable[[tuple[str, ...]], float]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that some of a run's programs are compiled for."""

    name: str  # "learner" or "sampler"
    mesh: jax.sharding.Mesh
    topology: Topology  # of the slices that hold the mesh

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    def link_rate(self) -> Rate:
        """`link_rate` of the mesh."""
        dimensions = len(self.topology.shape)
        coords = np.array([device.coords[:dimensions] for device in self.mesh.devices.flat])
        return link_rate(coords, self.sizes, self.topology)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"{self.mesh.size} devices, {axes or 'all axes of size 1'}"


def make_targets(experiment: Experiment, topology: Topology) -> tuple[Target, Target]:
    """The learner's and the sampler's target: the same devices, with other axes, unless the sampler is disaggregated.

    Raises:
      UserError: libtpu is missing or does not support the topology, the experiment does not fit its number of devices,
        or the sampler would have part of a slice among several.
    """
    learner, sampler = _split_slices(experiment.placement, topology)
    same = learner is sampler
    devices = [*chips.describe_devices(learner), *(() if same else chips.describe_devices(sampler))]
    mesh, sampler_mesh = make_meshes(experiment, devices, topology.chip.memory)
    return (
        Target(name="learner", mesh=mesh, topology=learner),
        Target(name="sampler", mesh=sampler_mesh, topology=sampler),
    )


def _split_slices(placement: Placement | None, topology: Topology) -> tuple[Topology, Topology]:
    """The slices of learner and sampler: the same ones, or whole slices for each."""
    if placement is None or topology.slices == 1:
        return topology, topology
    own, rest = divmod(placement.devices, topology.slice_devices)
    if rest or not 0 < own < topology.slices:
        raise UserError(
            f"placement.devices: wanted whole slices of {topology.slice_devices} devices on {topology}, and fewer than "
            f"all, got {placement.devices} (part of a slice is supported only where there is a single slice)"
        )
    return replace(topology, slices=topology.slices - own), replace(topology, slices=own)


def link_rate(coords: np.ndarray, mesh: dict[str, int], topology: Topology) -> Rate:
    """A function from mesh axes to the bytes/s at which a device can send to its group along them, within a slice.

    For axes that could not be read it assumes all dimensions.

    Args:
      coords: int [devices, dimensions], the coordinates of the mesh's devices in the torus.
      mesh: axis sizes, in the devices' order.
    """
    crossed = dimensions_crossed(coords, mesh)
    every = tuple(range(coords.shape[1]))
    extent = tuple(int(size) for size in coords.max(axis=0) - coords.min(axis=0) + 1)

    def rate(axes: tuple[str, ...]) -> float:
        return topology.network_rate(every if axes == UNKNOWN else crossed(axes), extent)

    return rate


def dimensions_crossed(coords: np.ndarray, mesh: dict[str, int]) -> Callable[[tuple[str, ...]], tuple[int, ...]]:
    """A function from mesh axes to the torus dimensions that their groups of devices extend over.

    Args: as for `link_rate`. Coordinates repeat from slice to slice.
    """
    grid = coords.reshape(*mesh.values(), -1)

    def crossed(axes: tuple[str, ...]) -> tuple[int, ...]:
        group = grid[tuple(slice(None) if axis in axes else 0 for axis in mesh)].reshape(-1, grid.shape[-1])
        return tuple(int(axis) for axis in np.flatnonzero((group != group[0]).any(axis=0)))

    return crossed
