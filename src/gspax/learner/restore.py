"""The parameters that reinforcement learning starts from, and the state that it resumes from.

A run with a reference policy or with adapters stores its first parameters in `start/`; with adapters its checkpoints
leave out what is frozen.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax

from gspax.config import Lora, ModelConfig
from gspax.learner import adapters
from gspax.learner.state import abstract_adapters, abstract_params, abstract_state, count_updates
from gspax.model.low_rank import combine, partition
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir
from gspax.types import Params, TrainState


def save_start(run: RunDir, params: Params, mesh: jax.sharding.Mesh) -> None:
    """Write the parameters to `start/`."""
    with Checkpoints(run.start, keep=1, mesh=mesh) as checkpoints:
        checkpoints.save(0, params, {})


def load_start(run: RunDir, model: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """What `save_start` wrote. UserError if it is not there."""
    with Checkpoints(run.start, mesh=mesh) as checkpoints:
        params, _ = checkpoints.restore(abstract_params(model, mesh))
    return params


def load_reference(run: RunDir, state: TrainState, model: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """The parameters that reinforcement learning started from, as arrays of their own."""
    if count_updates(state) == 0:
        return jax.tree.map(jnp.copy, state.params)  # the state is donated to the first update
    return load_start(run, model, mesh)


def drop_frozen(state: TrainState) -> TrainState:
    """The part of a state that a checkpoint stores: without the frozen parameters."""
    return replace(state, params=partition(state.params)[0])


def restore_state(
    run: RunDir,
    checkpoints: Checkpoints,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    lora: Lora | None = None,
    step: int | None = None,
) -> TrainState:
    """The whole state of a checkpoint (default: the newest). UserError if there is none that can be read."""
    state, _ = checkpoints.restore(drop_frozen(abstract_state(model, optimizer, mesh, lora)), step)
    if lora is None:
        return state
    start = load_start(run, model, mesh)
    _, frozen = partition(adapters.attach_adapters(start, abstract_adapters(model, lora, mesh), lora))
    return replace(state, params=combine(state.params, frozen))
