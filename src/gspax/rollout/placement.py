"""Where completions are drawn: on the learner's devices, or on devices of the sampler's own, ahead of the learner.

Colocated, the sampler reads the learner's parameters where they lie. Apart (`Experiment.placement`), the last devices
of all are the sampler's mesh; parameters are pushed to it before each rollout batch, in the model's compute dtype where
the model computes in it, and the rollout comes back. While the learner updates, the sampler draws what follows: batch n
with the parameters that the learner had after batch n - 1 - k, where k is at most `placement.staleness`.

Whatever drew a batch, its old log-probs are the learner's own, of its parameters before the batch's first update: they
are the ratio's denominator. The sampler's log-probs are of the older parameters; `correction` makes up for the
difference (`losses.correction`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gspax.config import Experiment, ModelConfig
from gspax.distributed.transfer import size_mismatch, transfer
from gspax.errors import UserError
from gspax.experiment.validation import check
from gspax.learner.state import abstract_params
from gspax.model import transformer
from gspax.model.low_rank import dense
from gspax.sharding import by_slice, make_mesh
from gspax.types import Params

FULL = {"norm", "router"}  # axes of the parameters that the model reads in float32 whatever its compute dtype


@dataclass(frozen=True)
class Sampler:
    """The sampler's mesh, and what brings the learner's parameters there (the same arrays if it is the learner's)."""

    mesh: jax.sharding.Mesh
    push: Callable[[Params], Params]


def make_meshes(
    experiment: Experiment, devices: Sequence[jax.Device] | None = None
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """The learner's mesh and the sampler's; the same one unless the experiment places them apart.

    The learner's is also that of scores and evaluations. The sampler's own devices are the last of `devices` (all there
    are, unless given), which jax sorts by process.

    Raises:
      UserError: anything is wrong with the experiment, on these devices or on any (`validation.check`).
    """
    devices = jax.devices() if devices is None else list(devices)
    placement, config = experiment.placement, experiment.model
    first = len(devices) - (placement.devices if placement else 0)
    learners, own = devices[:first], devices[first:]
    check(experiment, len(devices), (len(by_slice(learners)), len(by_slice(own))))
    mesh = make_mesh(experiment.mesh, learners, config)
    return mesh, make_mesh(placement.mesh, own, config) if placement else mesh


def abstract_pushed(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """`ShapeDtypeStruct`s of the parameters on a sampler's own mesh: dense, in the compute dtype but for `FULL`."""

    def pushed(leaf: Any, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if FULL & set(axes) else config.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(pushed, abstract_params(config, mesh), transformer.logical_axes(config))


def make_sampler(experiment: Experiment, mesh: jax.sharding.Mesh) -> Sampler:
    """The sampler on this mesh. UserError if several processes cannot bring parameters there."""
    if experiment.placement is None:
        return Sampler(mesh, lambda params: params)
    if jax.process_count() > 1 and (problem := size_mismatch(jax.device_count() - mesh.size, mesh.size)):
        raise UserError(f"placement.devices: {problem}")
    wanted = abstract_pushed(experiment.model, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)

    @jax.jit
    def cast(params: Params) -> Params:
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), dense(params), wanted)

    return Sampler(mesh, lambda params: transfer(cast(params), shardings))


def last_ahead(experiment: Experiment, done: int, due: Callable[[int], Any]) -> int:
    """The number of the last rollout batch that may be drawn when `done` are learnt from (they count from 0).

    None is drawn ahead over a checkpoint (`due(n)`: one is saved after n batches), so that a resumed run draws what the
    uninterrupted one did.
    """
    last = done
    while experiment.placement and last < done + experiment.placement.staleness and not due(last + 1):
        last += 1
    return last
