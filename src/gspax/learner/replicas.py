"""Sums over the devices that hold the same parameters and different rows, once for all microbatches.

Left to the partitioner, each microbatch's gradient is added up over all devices with rows of their own. Over the axes
that parameters are sharded over it has to be, since no device has room for more than its part. Over the others, slices
of a TPU or copies of the model (`sharding.replica_axes`), each adds up its own microbatches and they are added once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gspax.parallel.sharding import replica_axes, within_replica


def sum_over_replicas(
    local: Callable[..., tuple[Any, Any]], batch: Any, *shared: Any, mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
    """`local(mesh, batch, *shared)` on each replica, for its rows of the batch.

    Args:
      local: (the mesh of a replica, its rows, *shared) -> (a tree of arrays to add up, a tree of arrays by row).
      batch: a tree of arrays `[B, ...]`.
      shared: trees of arrays that all replicas have; nothing else that is computed may be read by `local`.
    """
    axes = replica_axes(mesh)
    if not axes:
        return local(mesh, batch, *shared)
    inner, everywhere, by_row = within_replica(mesh, axes), PartitionSpec(), PartitionSpec(axes)

    def on_replica(batch: Any, *shared: Any) -> tuple[Any, Any]:
        sums, rows = local(inner, batch, *shared)
        return jax.lax.psum(sums, axes), rows

    return jax.shard_map(
        on_replica,
        mesh=mesh,
        in_specs=(by_row, *[everywhere] * len(shared)),
        out_specs=(everywhere, by_row),
        axis_names=set(axes),
        check_vma=False,  # with the check, the gradient of replicated parameters is added up where it is computed
    )(batch, *shared)
