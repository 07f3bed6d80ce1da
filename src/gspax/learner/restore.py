"""The parameters that reinforcement learning starts from, and the state that it resumes from.

A run with a reference policy or with adapters stores its first parameters in `start/`: step 0 is the model, step 1 the
adapters that the reference policy has. With adapters the checkpoints leave out what is frozen.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax

from gspax.config import Lora, ModelConfig
from gspax.learner import adapters
from gspax.learner.state import (
    abstract_adapters,
    abstract_params,
    abstract_state,
    add_adapters,
    count_updates,
    init_state,
)
from gspax.model.low_rank import combine, partition
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir
from gspax.types import Array, Params, TrainState

MODEL, ADAPTERS = 0, 1  # the steps of `start/`


def first_state(
    run: RunDir,
    model: ModelConfig,
    lora: Lora | None,
    optimizer: optax.GradientTransformation,
    key: Array,
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """The state before any update, of the warm start if there is one. The base of adapters is written to `start/`."""
    if lora is None:
        return init_state(model, optimizer, key, mesh)
    state = init_state(model, optax.identity(), key, mesh)  # there are moments of the adapters alone
    save_start(run, state.params, mesh)
    return add_adapters(state, model, lora, optimizer, mesh)


def save_start(run: RunDir, params: Params, mesh: jax.sharding.Mesh, step: int = MODEL) -> None:
    """Write parameters to `start/`: those of the model, or with `ADAPTERS` the adapters alone."""
    with Checkpoints(run.start, keep=2, mesh=mesh) as checkpoints:
        checkpoints.save(step, params, {})


def load_start(run: RunDir, model: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """The model that `save_start` wrote. UserError if it is not there."""
    with Checkpoints(run.start, mesh=mesh) as checkpoints:
        params, _ = checkpoints.restore(abstract_params(model, mesh), MODEL)
    return params


def save_reference(run: RunDir, state: TrainState, lora: Lora | None, mesh: jax.sharding.Mesh) -> None:
    """Write what `load_reference` reads, before the first update of reinforcement learning."""
    save_start(run, drop_frozen(state).params, mesh, MODEL if lora is None else ADAPTERS)


def load_reference(
    run: RunDir, state: TrainState, model: ModelConfig, lora: Lora | None, mesh: jax.sharding.Mesh
) -> Params:
    """What is trained as it was before the first update, as arrays of their own: all parameters, or the adapters."""
    trained = drop_frozen(state).params
    if count_updates(state) == 0:
        return jax.tree.map(jnp.copy, trained)  # the state is donated to the first update
    if lora is None:
        return load_start(run, model, mesh)
    with Checkpoints(run.start, mesh=mesh) as checkpoints:
        wanted = adapters.attach_adapters(abstract_params(model, mesh), abstract_adapters(model, lora, mesh), lora)
        return checkpoints.restore(partition(wanted)[0], ADAPTERS)[0]


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
