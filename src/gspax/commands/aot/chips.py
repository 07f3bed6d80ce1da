"""TPU chips and topologies: peak rates of a device, and device descriptions without TPU hardware.

A device is what jax calls one: a whole chip, or half a chip of TPU7x. Rates are the vendor's published peaks
(cloud.google.com/tpu/docs: v5e, v5p, v6e, tpu7x). A link's rate is the chip's bidirectional rate divided by its ports
and by two. The data centre's network gives 50 Gb/s to a chip of v5p, 100 to one of tpu7x (page tpu7x), and 6.4 Tb/s to
a pod of 256 chips of v5e, 25.6 to one of v6e (page v6e). `memory` is what the compiler allows a program, taken from its
error messages (libtpu 0.0.42).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gspax.errors import UserError, how_to_install


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The peak rates and the memory of one device of a TPU generation."""

    flops: float  # FLOP/s of bfloat16 matrix products
    memory: int  # bytes that a program may use
    memory_rate: float  # bytes/s
    link_rate: float  # bytes/s, one way: the device's share of one link to a neighbour
    dcn_rate: float  # bytes/s, one way: its share of the data centre's network, which connects slices
    dimensions: int  # of the torus
    ring: int  # a dimension whose length is a multiple of this wraps around
    devices: int  # per chip


CHIPS = {
    "v5e": Chip(
        flops=197e12,
        memory=int(15.75 * 2**30),
        memory_rate=819e9,
        link_rate=50e9,
        dcn_rate=25e9 / 8,
        dimensions=2,
        ring=16,
        devices=1,
    ),
    "v5p": Chip(
        flops=459e12,
        memory=int(95.74 * 2**30),
        memory_rate=2765e9,
        link_rate=100e9,
        dcn_rate=50e9 / 8,
        dimensions=3,
        ring=4,
        devices=1,
    ),
    "v6e": Chip(
        flops=918e12,
        memory=int(31.25 * 2**30),
        memory_rate=1638e9,
        link_rate=100e9,
        dcn_rate=100e9 / 8,
        dimensions=2,
        ring=16,
        devices=1,
    ),
    "tpu7x": Chip(
        flops=2307e12 / 2,
        memory=int(94.75 * 2**30),
        memory_rate=7380e9 / 2,
        link_rate=100e9 / 2,
        dcn_rate=100e9 / 8 / 2,
        dimensions=3,
        ring=4,
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

    def network_rate(self, crossed: tuple[int, ...], extent: tuple[int, ...] | None = None) -> float:
        """Bytes/s that a device can send at once along these dimensions of the torus.

        A dimension that wraps around has two links; a line has one, since the others wait for its end devices.

        Args:
          crossed: dimensions.
          extent: the devices of the program along each dimension, if it uses only part of a slice; a dimension that is
            used in part does not wrap around.
        """
        extent = extent or self.shape
        closed = [a == b and b % self.chip.ring == 0 for a, b in zip(extent, self.shape, strict=True)]
        links = sum(1 + closed[axis] for axis in crossed if self.shape[axis] > 1)
        return max(links, 1) * self.chip.link_rate


def parse_topology(text: str) -> Topology:
    """Parse `v5p:4x4x4` or `2xv5p:4x4x4`. UserError for anything else."""
    found = re.fullmatch(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)", text.strip())
    if not found:
        raise UserError(
            "--topology: wanted a TPU generation and the shape of a slice such as v5p:4x4x4, or several slices such as "
            f"2xv5p:4x4x4, got {text!r}"
        )
    slices, kind, shape = int(found[1] or 1), found[2], tuple(map(int, found[3].split("x")))
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"--topology: wanted one of {', '.join(CHIPS)}, got {kind!r}{hint}")
    wanted = CHIPS[kind].dimensions
    if len(shape) != wanted or min(shape) < 1:
        example = "x".join("4" * wanted)
        raise UserError(f"--topology: {kind} has {wanted} dimensions, such as {kind}:{example}; got {text!r}")
    if slices < 1:
        raise UserError(f"--topology: wanted at least one slice, got {text!r}")
    return Topology(kind=kind, shape=shape, slices=slices)


def describe_devices(topology: Topology) -> list[Any]:
    """The devices of a topology, slice by slice. They serve for compiling only: they hold no arrays and run nothing.

    Raises:
      UserError: libtpu is not installed, or does not support the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compiling for a TPU needs the package libtpu: {how_to_install('tpu')}")
    from gspax import unstable

    name = str(replace(topology, slices=1))
    try:
        with _environment():
            found = unstable.get_topology_desc(name, topology.slices)
    except Exception as problem:
        reason = str(problem).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology {topology}: libtpu does not support it: {reason}") from problem
    return list(found.devices)


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
