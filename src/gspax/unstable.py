"""Every name that gspax takes from `jax.experimental`, `jax._src` or `jaxlib`, which any release may move or drop.

Nothing else in gspax imports from there, so that a new jax breaks this module alone. Names are looked up when they are
used. Each entry says why it is needed and what to do when it goes; `tests/test_unstable.py` has a test for each and
fails with the same advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax


def create_device_mesh(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Lay devices along a TPU's torus, where one physical axis may be split over two mesh axes.

    `jax.make_mesh` refuses such a split. When it goes: `jax.make_mesh`, once it takes allow_split_physical_axes.
    """
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def light_compilation(mesh: jax.sharding.Mesh) -> dict[str, bool | int]:
    """Return `compiler_options` of `jax.jit` for LLVM's first level on CPU; programs are as fast, with the same bits.

    Without it the first step of `gspax bench experiments/bench_small_moe.py` took 26 % more CPU time on two cores, and
    later steps as much as with it (median of five pairs, no compilation cache). Empty on other devices and where the
    user switched optimizations off. When it goes: drop it; programs then compile for longer.
    """
    import jax

    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or jax.config.read("jax_disable_most_optimizations") or jax.__version_info__[:2] != (0, 10):
        return {}
    return {"xla_backend_optimization_level": 1}


def get_topology_desc(name: str, slices: int) -> Any:
    """Describe TPU slices that are not attached, for ahead-of-time compilation; only `gspax compile` needs it.

    When it goes: use what jax's documentation of ahead-of-time compilation names instead.
    """
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices)


def splash_attention() -> tuple[ModuleType, ModuleType]:
    """Import the splash attention kernel, the attention over full rows on TPU, and the module of its masks.

    With shared prompts its backward pass, `_splash_attention_bwd`, is called with a log-sum-exp of two calls.
    When it goes: its new home (the kernel is developed in the package tokamax), or plain attention on TPU.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    return splash_attention_kernel, splash_attention_mask


def pallas() -> tuple[ModuleType, ModuleType]:
    """Import Pallas, in which the decoding attention's TPU kernel is written, and its module for TPU.

    When it goes: its new home; or `model.kernels.segments` on TPU too, which reads more of the cache.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    return pallas, tpu


def row_major(x: jax.Array) -> jax.Array:
    """Lay out the array with its last axis contiguous, also where the compiler would choose another layout.

    When it goes: drop it; for each block of drafted tokens XLA:TPU then copies the cache into another layout and back.
    """
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def coordination_service(address: str, count: int) -> object:
    """Start jax's coordination service for `count` processes at `address`, until the object is deleted.

    gspax runs it in a process of its own, so that it outlives process 0 and the other processes can end in order.
    When it goes: let `jax.distributed.initialize` run it in process 0, whose death then aborts the others.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=100, shutdown_timeout=300)


def cluster_types() -> list[Any]:
    """Return the environments that `jax.distributed.initialize` detects (TPU VMs, GKE, SLURM, Open MPI), in order.

    gspax queries them before it connects, so that it can name the processes that are missing. When it goes: require
    --coordinator, --processes and --process, or let `jax.distributed.initialize` detect and time out.
    """
    from jax._src import clusters

    return list(clusters.ClusterEnv._cluster_types)


def is_kubernetes(cluster: object) -> bool:
    """Return whether one of `cluster_types` stands for a Kubernetes job.

    A pod outside an indexed job would otherwise query Kubernetes. When it goes: compare the class's name, K8sCluster.
    """
    from jax._src import clusters

    return cluster is clusters.K8sCluster


def key_impl_name(dtype: Any) -> str:
    """Return the implementation behind a typed PRNG key's dtype, such as "threefry2x32".

    `jax.random.key_impl` takes keys, not a `ShapeDtypeStruct` of one. When it goes: `jax.random.key_impl` of
    `jax.random.key(0)`, as every key of a run has the default implementation.
    """
    return str(dtype._impl.name)


def attached_tpu_chips() -> int:
    """Count the TPU chips on this machine's PCI bus without loading libtpu.

    The command line loads libtpu only where there are any. When it goes: count the PCI devices of vendor 0x1ae0 under
    /sys/bus/pci/devices.
    """
    from jax._src import hardware_utils

    return hardware_utils.num_available_tpu_chips_and_device_id()[0]
