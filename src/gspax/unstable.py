"""Every name that gspax takes from `jax.experimental` or `jax._src`: what jax may move or drop in any release.

Nothing else in gspax imports from there, so that a new jax breaks this module alone. Each entry says why it is needed
and what to do when it goes; `tests/test_unstable.py` fails with the same advice.
"""

from __future__ import annotations

from typing import Any

from jax._src import clusters as _clusters
from jax._src import distributed as _distributed
from jax._src import hardware_utils as _hardware_utils
from jax.experimental import mesh_utils as _mesh_utils
from jax.experimental import topologies as _topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import LocalMask, MultiHeadMask

__all__ = [
    "LocalMask",
    "MultiHeadMask",
    "attached_tpu_chips",
    "cluster_types",
    "coordination_client",
    "create_device_mesh",
    "get_topology_desc",
    "key_impl_name",
    "splash",
]

# Lays mesh axes along a TPU's torus and may split a physical axis over two of them, which `jax.make_mesh` refuses.
# When it goes: jax.make_mesh, once that takes allow_split_physical_axes.
create_device_mesh = _mesh_utils.create_device_mesh

# Describes TPU slices that are not attached, for ahead-of-time compilation.
# When it goes: whatever jax's ahead-of-time documentation names in its place; `gspax compile` is all that needs it.
get_topology_desc = _topologies.get_topology_desc


def coordination_client() -> Any:
    """The client of jax's coordination service; None in a run of one process.

    Its key-value store carries what processes tell each other without occupying a device, and its barrier lets a
    failing process leave. When it goes: `jax.experimental.multihost_utils`, which does the same over the devices.
    """
    return _distributed.global_state.client


def cluster_types() -> list[Any]:
    """The environments that `jax.distributed.initialize` detects (TPU VMs, GKE, SLURM, Open MPI), in its order.

    gspax asks them before it connects, so that it can name the processes that are missing. When it goes: require
    --coordinator, --processes and --process, or let jax.distributed.initialize detect and time out.
    """
    return list(_clusters.ClusterEnv._cluster_types)


def is_kubernetes(cluster: Any) -> bool:
    """Whether one of `cluster_types` stands for a Kubernetes job."""
    return cluster is _clusters.K8sCluster


def key_impl_name(dtype: Any) -> str:
    """The implementation behind a typed PRNG key's dtype, such as "threefry2x32".

    `jax.random.key_impl` takes keys only, no `ShapeDtypeStruct` of one. When it goes: `jax.random.key_impl` of a key
    made with `jax.random.key(0)`, as every key of a run has the default implementation.
    """
    return str(dtype._impl.name)


def attached_tpu_chips() -> int:
    """TPU chips on this machine's PCI bus, counted without loading libtpu.

    The command line loads libtpu only where there are any. When it goes: count the PCI devices of vendor 0x1ae0 under
    /sys/bus/pci/devices, as it does.
    """
    return _hardware_utils.num_available_tpu_chips_and_device_id()[0]
