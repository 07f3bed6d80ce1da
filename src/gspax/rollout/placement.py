"""Where completions are sampled: on the learner's devices, or on devices of the sampler's own, ahead of the learner.

Before each rollout batch a serving copy of the parameters (`rollout.serving`) is made on the sampler's mesh. Colocated,
that is the learner's mesh. Disaggregated (`Experiment.placement`), it is made of the last devices, and the rollout is
fetched back. While the learner updates, the sampler draws
ahead: batch n is drawn with the parameters that the learner had after batch n - 1 - k, with k at most
`placement.staleness`.

Whichever parameters drew a batch, its old log-probs are the learner's, from before the batch's first update; they are
the ratio's denominator. The sampler's log-probs belong to the older parameters; `correction` accounts for the
difference (`losses.correction`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from gspax.config import Experiment, ModelConfig
from gspax.distributed.transfer import size_mismatch, transfer, transfer_key
from gspax.errors import UserError
from gspax.experiment.validation import check
from gspax.rollout.serving import convert, make_serving_copy, serving_shardings
from gspax.sharding import group_by_slice, make_mesh, named_sharding
from gspax.types import Array, Params, Rollout


@dataclass(frozen=True)
class Sampler:
    """The sampler's mesh, and what moves arrays between it and the learner's mesh."""

    mesh: jax.sharding.Mesh
    push: Callable[[Params], Params]  # the learner's parameters to a serving copy
    push_key: Callable[[Array], Array]  # a PRNG key, from the learner
    fetch: Callable[[Rollout], Rollout]  # a rollout, to the learner; arrays on the host stay there


def make_meshes(
    experiment: Experiment, devices: Sequence[jax.Device] | None = None
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """The learner's mesh and the sampler's; one and the same unless `experiment.placement` disaggregates them.

    Scoring and evaluation run on the learner's. The sampler's own devices are the last of `devices` (default: all),
    which jax sorts by process.

    Raises:
      UserError: the experiment is invalid, on these devices or on any (`validation.check`).
    """
    devices = jax.devices() if devices is None else list(devices)
    placement, config = experiment.placement, experiment.model
    first = len(devices) - (placement.devices if placement else 0)
    learners, own = devices[:first], devices[first:]
    check(experiment, len(devices), (len(group_by_slice(learners)), len(group_by_slice(own))))
    mesh = make_mesh(experiment.mesh, learners, config)
    return mesh, make_mesh(placement.mesh, own, config) if placement else mesh


def make_colocated_sampler(config: ModelConfig, mesh: jax.sharding.Mesh) -> Sampler:
    """The sampler on the learner's mesh."""
    push = partial(make_serving_copy, config=config, mesh=mesh)
    return Sampler(mesh, push, lambda key: key, lambda rollout: rollout)


def make_disaggregated_sampler(config: ModelConfig, mesh: jax.sharding.Mesh, learner: jax.sharding.Mesh) -> Sampler:
    """The sampler on a mesh of its own. UserError if parameters cannot be moved there between processes."""
    if jax.process_count() > 1 and (problem := size_mismatch(jax.device_count() - mesh.size, mesh.size)):
        raise UserError(f"placement.devices: {problem}")
    shardings = serving_shardings(config, mesh)
    by_row = named_sharding(learner, "batch")
    copy = jax.jit(partial(convert, config=config))

    def fetch(rollout: Rollout) -> Rollout:
        on_devices = {name: x for name, x in vars(rollout).items() if isinstance(x, jax.Array)}
        return replace(rollout, **transfer(on_devices, by_row))

    return Sampler(
        mesh,
        push=lambda params: transfer(copy(params), shardings),
        push_key=lambda key: transfer_key(key, named_sharding(mesh)),
        fetch=fetch,
    )


def find_last_ahead(staleness: int, done: int, due: Callable[[int], Any]) -> int:
    """The last rollout batch (counted from 0) that may be drawn once `done` have been learnt from.

    No batch is drawn ahead past a checkpoint (`due(n)`: one is saved after n batches), so that a resumed run draws what
    the uninterrupted run did.
    """
    last = done
    while last < done + staleness and not due(last + 1):
        last += 1
    return last
