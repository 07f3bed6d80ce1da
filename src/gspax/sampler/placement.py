"""Where completions are sampled: on the learner's devices, or on devices of the sampler's own, ahead of the learner.

Before each rollout the inference weights (`sampler.inference_weights`) are made on the sampler's mesh, and the rollout
is fetched back. Colocated, that mesh has the learner's devices, with other axes. Disaggregated
(`Experiment.placement`), it has the last devices, and while the learner updates, the sampler samples ahead: batch n is
sampled with the parameters that the learner had after batch n - 1 - k, with k at most `placement.staleness`. Partial
rollouts renew them while a batch is sampled (`rollout.group_pool`).

Whichever parameters sampled a batch, its old log-probs are the learner's, from before the batch's first update; they
are the ratio's denominator. The sampler's log-probs belong to the older parameters; `correction` accounts for the
difference (`losses.correction`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax

from gspax.config import Experiment, ModelConfig, SamplerDtype
from gspax.errors import UserError
from gspax.model.sizes import choose_sampler_layout
from gspax.parallel import multihost
from gspax.parallel.sharding import make_mesh, named_sharding, reshape_mesh, split_devices
from gspax.parallel.transfer import size_mismatch, transfer
from gspax.sampler.inference_weights import convert, inference_shardings, make_inference_weights
from gspax.types import Array, Params, Rollout

Arrays = dict[str, Array]  # of a rollout, by name


@dataclass(frozen=True)
class Sampler:
    """The sampler's mesh, and what moves arrays between it and the learner's mesh."""

    mesh: jax.sharding.Mesh
    push: Callable[[Params], Params]  # the learner's parameters to inference weights
    fetch: Callable[[Rollout], Rollout]  # a rollout, to the learner; arrays on the host stay there


class Meshes(NamedTuple):
    """Where the parts of a run compute."""

    learner: jax.sharding.Mesh  # log-probs and updates
    sampler: jax.sharding.Mesh  # the learner's devices, unless `experiment.placement` disaggregates it


def make_meshes(experiment: Experiment, devices: Sequence[jax.Device] = (), memory: int = 0) -> Meshes:
    """Make the meshes of a run on `devices` (default: all), which jax sorts by process.

    The first are the learner's, then come those of a disaggregated sampler.

    Args:
      memory: bytes that a program may use on a device; default: what the device states, if it does.

    Raises:
      UserError: the axes do not fit the devices. The rest is checked before (`validation.devices.check_on`).
    """
    placement, config = experiment.placement, experiment.model
    learners, samplers = split_devices(devices or jax.devices(), placement)
    mesh = make_mesh(experiment.mesh, learners, config)
    sampler = mesh if placement is None else make_mesh(placement.mesh, samplers, config)
    layout = choose_sampler_layout(experiment, dict(sampler.shape), memory or stated_memory(sampler))
    return Meshes(mesh, reshape_mesh(sampler, layout))


def stated_memory(mesh: jax.sharding.Mesh) -> float:
    """Return the bytes that a program may use on a device, infinity if it states none. Equal on all processes."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    stats = local[0].memory_stats() if local and local[0].platform != "cpu" else None
    limits = [limit for limit in multihost.gather((stats or {}).get("bytes_limit")) if limit]
    return min(limits, default=math.inf)


def make_sampler(
    config: ModelConfig, mesh: jax.sharding.Mesh, learner: jax.sharding.Mesh, weights_dtype: SamplerDtype = "auto"
) -> Sampler:
    """Make the sampler on a mesh of the learner's devices, or of devices of its own.

    Raises:
      UserError: the devices are its own, and parameters cannot be moved there between processes.
    """
    by_row = named_sharding(learner, "batch")
    if set(mesh.devices.flat) == set(learner.devices.flat):
        push = partial(make_inference_weights, config=config, mesh=mesh, weights_dtype=weights_dtype)
        return Sampler(mesh, push, partial(_move_arrays, move=_resharder(by_row)))
    if jax.process_count() > 1 and (problem := size_mismatch(learner.size, mesh.size)):
        raise UserError(f"placement.devices: {problem}")
    shardings = inference_shardings(config, mesh, weights_dtype)
    convert_on_learner = jax.jit(partial(convert, config=config, weights_dtype=weights_dtype))
    return Sampler(
        mesh,
        push=lambda params: transfer(convert_on_learner(params), shardings),
        fetch=partial(_move_arrays, move=partial(transfer, shardings=by_row)),
    )


@lru_cache
def _resharder(sharding: jax.sharding.NamedSharding) -> Callable[[Arrays], Arrays]:
    """Make what moves arrays between meshes of the same devices: one compiled program for all calls."""
    return jax.jit(lambda tree: tree, out_shardings=sharding)


def _move_arrays(rollout: Rollout, move: Callable[[Arrays], Arrays]) -> Rollout:
    """Move the rollout's arrays that are on devices; those on the host stay there."""
    return replace(rollout, **move({name: x for name, x in vars(rollout).items() if isinstance(x, jax.Array)}))


def find_last_ahead(staleness: int, done: int, due: Callable[[int], object]) -> int:
    """Find the last batch (counted from 0) that may be sampled once `done` have been trained on.

    No batch is sampled ahead past a checkpoint (`due(n)`: one is saved after n batches), so that a resumed run samples
    what the uninterrupted run did.
    """
    return next((last for last in range(done, done + staleness) if due(last + 1)), done + staleness)
