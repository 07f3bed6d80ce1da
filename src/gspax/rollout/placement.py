"""Where completions are sampled: on the learner's devices, or on devices of the sampler's own, ahead of the learner.

Colocated, the sampler reads the learner's parameters in place. Disaggregated (`Experiment.placement`), the sampler's
mesh is made of the last devices; parameters are pushed to it before each rollout batch, in the compute dtype except
for those that the model reads in float32, and the rollout is fetched back. While the learner updates, the sampler draws
ahead: batch n is drawn with the parameters that the learner had after batch n - 1 - k, with k at most
`placement.staleness`.

Whichever parameters drew a batch, its old log-probs are the learner's, from before the batch's first update; they are
the ratio's denominator. The sampler's log-probs belong to the older parameters; `correction` accounts for the
difference (`losses.correction`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from gspax.config import Experiment, ModelConfig
from gspax.distributed.transfer import size_mismatch, transfer, transfer_key
from gspax.errors import UserError
from gspax.experiment.validation import check
from gspax.learner.state import abstract_params
from gspax.model import transformer
from gspax.model.low_rank import dense
from gspax.sharding import group_by_slice, make_mesh, named_sharding
from gspax.types import Array, Params, Rollout

FULL = {"norm", "router"}  # axes of the parameters that the model reads in float32 whatever its compute dtype


@dataclass(frozen=True)
class Sampler:
    """The sampler's mesh, and what moves arrays between it and the learner's mesh."""

    mesh: jax.sharding.Mesh
    push: Callable[[Params], Params]  # parameters, from the learner
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


def make_colocated_sampler(mesh: jax.sharding.Mesh) -> Sampler:
    """The sampler on the learner's mesh: nothing is moved."""
    return Sampler(mesh, lambda params: params, lambda key: key, lambda rollout: rollout)


def make_disaggregated_sampler(config: ModelConfig, mesh: jax.sharding.Mesh, learner: jax.sharding.Mesh) -> Sampler:
    """The sampler on a mesh of its own. UserError if parameters cannot be moved there between processes."""
    if jax.process_count() > 1 and (problem := size_mismatch(jax.device_count() - mesh.size, mesh.size)):
        raise UserError(f"placement.devices: {problem}")
    wanted = abstract_pushed(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    by_row = named_sharding(learner, "batch")

    @jax.jit
    def cast(params: Params) -> Params:
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), dense(params), wanted)

    def fetch(rollout: Rollout) -> Rollout:
        on_devices = {name: x for name, x in vars(rollout).items() if isinstance(x, jax.Array)}
        return replace(rollout, **transfer(on_devices, by_row))

    return Sampler(
        mesh,
        push=lambda params: transfer(cast(params), shardings),
        push_key=lambda key: transfer_key(key, named_sharding(mesh)),
        fetch=fetch,
    )


def abstract_pushed(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """`ShapeDtypeStruct`s of the parameters on a sampler's own mesh: dense, in the compute dtype except for `FULL`."""

    def cast(leaf: Any, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if FULL & set(axes) else config.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(cast, abstract_params(config, mesh), transformer.logical_axes(config))


def find_last_ahead(staleness: int, done: int, due: Callable[[int], Any]) -> int:
    """The last rollout batch (counted from 0) that may be drawn once `done` have been learnt from.

    No batch is drawn ahead past a checkpoint (`due(n)`: one is saved after n batches), so that a resumed run draws what
    the uninterrupted run did.
    """
    last = done
    while last < done + staleness and not due(last + 1):
        last += 1
    return last
