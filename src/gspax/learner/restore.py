"""The parameters that reinforcement learning starts from, and the state that it goes on from.

A run with a reference policy or with adapters keeps its first parameters in `start/`; its checkpoints then leave out
what never changes.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import optax

from gspax.config import Experiment
from gspax.learner import adapters
from gspax.learner.state import abstract_adapters, abstract_params, abstract_state
from gspax.model.low_rank import combine, partition
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir
from gspax.types import Params, TrainState


def save_start(experiment: Experiment, run: RunDir, params: Params, mesh: jax.sharding.Mesh) -> None:
    """Write the parameters to `start/`, if the run will need them again."""
    if experiment.reference is not None or experiment.lora is not None:
        with Checkpoints(run.start, keep=1, mesh=mesh) as kept:
            kept.save(0, params, {})


def load_start(experiment: Experiment, run: RunDir, mesh: jax.sharding.Mesh) -> Params:
    """What `keep_start` wrote. UserError if it is not there."""
    with Checkpoints(run.start, mesh=mesh) as kept:
        params, _ = kept.restore(abstract_params(experiment.model, mesh))
    return params


def drop_frozen(state: TrainState) -> TrainState:
    """The part of a state that a checkpoint holds: without the parameters that are frozen."""
    return replace(state, params=partition(state.params)[0])


def restore_state(
    experiment: Experiment,
    run: RunDir,
    checkpoints: Checkpoints,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    step: int | None = None,
) -> TrainState:
    """The whole state of a checkpoint, the newest without `step`. UserError if there is none that can be read."""
    model, lora = experiment.model, experiment.lora
    state, _ = checkpoints.restore(drop_frozen(abstract_state(model, optimizer, mesh, lora)), step)
    if lora is None:
        return state
    start = load_start(experiment, run, mesh)
    _, frozen = partition(adapters.attach_adapters(start, abstract_adapters(model, lora, mesh), lora))
    return replace(state, params=combine(state.params, frozen))
