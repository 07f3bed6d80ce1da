"""Describes TPU chips and topologies: peak rates, devices without TPU hardware, the meshes of a run on them.

A device is what jax calls one: a whole chip, or half a chip of TPU7x. Rates are the vendor's published peaks
(cloud.google.com/tpu/docs: v5e, v5p, v6e, tpu7x). A link's rate is the chip's bidirectional rate divided by its ports
and by two. The data center's network gives 50 Gb/s to a chip of v5p, 100 to one of tpu7x (page tpu7x), and 6.4 Tb/s to
a pod of 256 chips of v5e, 25.6 to one of v6e (page v6e). `memory` is what the compiler allows a program, taken from its
error messages (libtpu 0.0.42).

libtpu compiles for all devices of a topology, or for a part of a single slice. For a part of several slices it produces
an empty slice or ends the process. So where the parts of a run have whole slices of their own, each is compiled for its
slices as a topology of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from gspax import unstable
from gspax.config import Experiment, Placement
from gspax.errors import UserError, did_you_mean, how_to_install
from gspax.experiment.validation.devices import check_on
from gspax.sampler.placement import make_meshes
from gspax.tools.aot.hlo import UNKNOWN

Rate = Callable[[tuple[str, ...]], float]  # mesh axes -> bytes/s


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The peak rates and the memory of one device of a TPU generation."""

    flops: float  # FLOP/s of bfloat16 matrix products
    memory_gib: float  # that a program may use
    memory_rate: float  # bytes/s
    link_rate: float  # bytes/s, one way: the device's share of one link to a neighbor
    dcn_rate: float  # bytes/s, one way: its share of the data center's network, which connects slices
    dimensions: int  # of the torus
    devices: int = 1  # per chip

    @property
    def memory(self) -> int:
        """The bytes that a program may use."""
        return int(self.memory_gib * 2**30)

    @property
    def ring(self) -> int:
        """The length of a wrap-around: a dimension of the torus wraps around if its length is a multiple of this."""
        return 16 if self.dimensions == 2 else 4


CHIPS = {
    "v5e": Chip(flops=197e12, memory_gib=15.75, memory_rate=819e9, link_rate=50e9, dcn_rate=25e9 / 8, dimensions=2),
    "v5p": Chip(flops=459e12, memory_gib=95.74, memory_rate=2765e9, link_rate=100e9, dcn_rate=50e9 / 8, dimensions=3),
    "v6e": Chip(flops=918e12, memory_gib=31.25, memory_rate=1638e9, link_rate=100e9, dcn_rate=100e9 / 8, dimensions=2),
    "tpu7x": Chip(  # each chip is two devices
        flops=2307e12 / 2,
        memory_gib=94.75,
        memory_rate=7380e9 / 2,
        link_rate=100e9 / 2,
        dcn_rate=100e9 / 8 / 2,
        dimensions=3,
        devices=2,
    ),
}
# Without these libtpu queries the metadata server of a TPU VM, and allows one process at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of a TPU generation, such as v5p:4x4x4, or several slices, such as 2xv5p:4x4x4."""

    kind: str
    shape: tuple[int, ...]  # of a slice, in chips
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def slice_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices

    def __str__(self) -> str:
        return (f"{self.slices}x" if self.slices > 1 else "") + f"{self.kind}:{'x'.join(map(str, self.shape))}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that a part of a run's programs is compiled for."""

    mesh: jax.sharding.Mesh
    topology: Topology  # of the slices that hold the mesh

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    def link_rate(self, axes: tuple[str, ...]) -> float:
        """Return `link_rate` along axes of the mesh."""
        dimensions = len(self.topology.shape)
        coords = np.array([device.coords[:dimensions] for device in self.mesh.devices.flat])
        return link_rate(axes, coords, self.sizes, self.topology)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"{self.mesh.size} devices, {axes or 'all axes of size 1'}"


def parse_topology(text: str) -> Topology:
    """Parse `v5p:4x4x4` or `2xv5p:4x4x4`. UserError for anything else."""
    match = re.fullmatch(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)", text.strip())
    if google := re.fullmatch(r"(v5p|v5e|v5litepod|v6e)-(\d+)", text.strip()):
        raise UserError(f"--topology: {_explain_accelerator(*google.groups())}; got {text!r}")
    if not match:
        raise UserError(
            "--topology: wanted a TPU generation and the shape of a slice such as v5p:4x4x4, or several slices such as "
            f"2xv5p:4x4x4, got {text!r}"
        )
    slices, kind, shape = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    if kind not in CHIPS:
        hint = did_you_mean(kind, CHIPS, cutoff=0.5)
        raise UserError(f"--topology: wanted one of {', '.join(CHIPS)}, got {kind!r}{hint and f' ({hint})'}")
    wanted = CHIPS[kind].dimensions
    if len(shape) != wanted or min(shape) < 1:
        example = "x".join("4" * wanted)
        raise UserError(f"--topology: {kind} has {wanted} dimensions, such as {kind}:{example}; got {text!r}")
    if slices < 1:
        raise UserError(f"--topology: wanted at least one slice, got {text!r}")
    return Topology(kind=kind, shape=shape, slices=slices)


def _explain_accelerator(name: str, number: str) -> str:
    """Explain Google's name of an accelerator type as a topology: v5p's number counts cores, two per chip."""
    kind, chips = name.replace("v5litepod", "v5e"), int(number) // (2 if name == "v5p" else 1)
    dimensions = CHIPS[kind].dimensions
    shape = [2 ** max(0, (chips.bit_length() + i - 1) // dimensions) for i in range(dimensions)]
    shape = sorted(shape, reverse=1 in shape)  # 2x2x1, but 2x4x4
    same = f"{kind}:{'x'.join(map(str, shape))}"
    known = f"which is {same} here" if math.prod(shape) == chips else f"whose shape is written as in {kind}:4x4"
    return f"Google's {name}-{number} has {chips} chips, {known}"


def describe_devices(topology: Topology) -> list[jax.Device]:
    """Describe the devices of a topology, slice by slice, for compiling only: they hold no arrays and run nothing.

    Raises:
      UserError: libtpu is not installed, or does not support the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compiling for a TPU needs the package libtpu: {how_to_install('tpu')}")
    try:
        with _environment():
            return list(unstable.get_topology_desc(str(replace(topology, slices=1)), topology.slices).devices)
    except Exception as problem:
        reason = str(problem).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology {topology}: libtpu does not support it: {reason}") from problem


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the unset variables of `ENVIRONMENT`, and unset them again: processes started later must not see a TPU."""
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class Targets(NamedTuple):
    """The targets of a run: the same devices, unless the sampler has separate ones."""

    learner: Target
    sampler: Target


def make_targets(experiment: Experiment, topology: Topology) -> Targets:
    """Make the targets of a run's parts: the same devices, or whole slices for each.

    Raises:
      UserError: libtpu is missing or does not support the topology, the experiment does not fit its number of devices,
        or a part would have some of a slice among several.
    """
    sampler, learner, placement = None, topology, experiment.placement
    if placement is not None and topology.slices > 1:
        sampler = _take_slices(placement, topology)
    if sampler is not None:
        learner = replace(topology, slices=topology.slices - sampler.slices)
    devices = [device for part in (learner, sampler) if part is not None for device in describe_devices(part)]
    check_on(devices, experiment)
    meshes = make_meshes(experiment, devices, topology.chip.memory)
    return Targets(
        Target(mesh=meshes.learner, topology=learner),
        Target(mesh=meshes.sampler, topology=sampler or learner),
    )


def _take_slices(placement: Placement, topology: Topology) -> Topology:
    """Return the slices of a disaggregated sampler among several. UserError if it does not take whole ones."""
    slices, rest = divmod(placement.devices, topology.slice_devices)
    if rest or not 0 < slices < topology.slices:
        raise UserError(
            f"placement.devices: wanted whole slices of {topology.slice_devices} devices on {topology}, and fewer than "
            f"all, got {placement.devices} (part of a slice is supported only where there is a single slice)"
        )
    return replace(topology, slices=slices)


def link_rate(axes: tuple[str, ...], coords: np.ndarray, mesh: dict[str, int], topology: Topology) -> float:
    """Return the bytes/s at which a device can send to its group along axes of the mesh, within a slice.

    A dimension of the torus that wraps around has two links. A line has one, since the others wait for its end devices,
    and so has a dimension that the program uses in part. Axes that are `UNKNOWN` count as all axes.

    Args:
      axes: mesh axes.
      coords: int [devices, dimensions], the coordinates of the mesh's devices in the torus. They repeat from slice to
        slice.
      mesh: axis sizes, in the devices' order.
      topology: the slices that hold the mesh.
    """
    grid = coords.reshape(*mesh.values(), -1)
    group = grid[tuple(slice(None) if axis in axes or axes == UNKNOWN else 0 for axis in mesh)]
    crossed = np.ptp(group.reshape(-1, coords.shape[-1]), axis=0) > 0
    extent = np.ptp(coords, axis=0) + 1
    wraps = (extent == topology.shape) & (extent % topology.chip.ring == 0)
    links = int(np.sum(crossed * (1 + wraps)))
    return max(links, 1) * topology.chip.link_rate
