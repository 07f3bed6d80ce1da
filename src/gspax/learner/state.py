"""The training state, created sharded: no array is ever whole on one device first."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspax import unstable
from gspax.config import Lora, ModelConfig, Optimizer
from gspax.errors import UserError
from gspax.learner import adapters, weights
from gspax.learner.optimizer import Offloaded, state_shardings
from gspax.model import transformer
from gspax.model.low_rank import partition
from gspax.model.sizes import memory
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.types import Array, Params, TrainState


def require_memory(
    config: ModelConfig, lora: Lora | None, optimizer: Optimizer, mesh: jax.sharding.Mesh, *, reference: bool
) -> None:
    """UserError if what a run's devices always hold is larger than their memory: parameters, moments, a reference."""
    parts = memory.resident_bytes(config, lora, optimizer, dict(mesh.shape), reference=reference)
    needed, available = sum(parts.values()), _device_memory(jax.local_devices()[0])
    if available is not None and needed > available:
        what = ", ".join(f"{part} {size / 2**30:,.1f} GiB" for part, size in parts.items())
        raise UserError(
            f"model: wanted at most {available / 2**30:,.1f} GiB of each device for what a run always holds, got "
            f"{needed / 2**30:,.1f} GiB ({what}); take a smaller model, more devices or another mesh"
        )


def _device_memory(device: jax.Device) -> int | None:
    """Bytes; for a CPU device its share of the machine's. None if it is not known."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def count_updates(state: TrainState) -> int:
    """The optimiser updates that a state has had, skipped ones included."""
    return int(multihost.to_host(state.step))


def applied_updates(state: TrainState) -> int:
    """The updates that moved the parameters: the schedule's count, read from the optimizer's state.

    All updates for an optimizer that keeps no `count`, as optax's schedules and moments do.
    """
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    return max(map(int, multihost.to_host(counts)), default=count_updates(state))


def new_state(params: Params, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """The state before the first update."""
    # step and position are two arrays: a donated state must not hold one buffer twice
    trained, _ = partition(params)
    return TrainState(
        step=jnp.int32(0),
        position=jnp.int32(0),
        key=key,
        params=params,
        opt_state=optimizer.init(trained),
        clip_range=jnp.zeros(2),
    )


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: Array, mesh: jax.sharding.Mesh
) -> TrainState:
    """Fresh optimiser moments, and parameters from `config.checkpoint` or random ones, sharded over the mesh.

    Random parameters come from `fold_in(key, 0)`. UserError if the checkpoint is broken or of another model.
    """

    def init(key):
        return new_state(transformer.init(config, jax.random.fold_in(key, 0)), optimizer, key)

    def init_around(params, key):  # parameters that were read are not moved
        return replace(new_state(params, optimizer, key), params=None)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, optimizer, mesh))
    if not config.checkpoint:
        return jax.jit(init, out_shardings=shardings, compiler_options=unstable.fast_compilation(mesh))(key)
    params = weights.load(config, abstract_params(config, mesh))
    around = jax.jit(init_around, out_shardings=replace(shardings, params=None))(params, key)
    return replace(around, params=params)


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh, dtype: str | None = None) -> Params:
    """`ShapeDtypeStruct`s of the parameters, sharded by `sharding.RULES`, in the model's dtype or the given one."""
    return jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=named_sharding(mesh, *axes)),
        transformer.abstract_params(config),
        transformer.logical_axes(config),
    )


def add_adapters(
    state: TrainState,
    config: ModelConfig,
    lora: Lora,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """The state with adapters on its parameters, and moments of those alone.

    The adapters are fresh ones from `fold_in(key, 1)`, or those of `lora.checkpoint`. UserError if that does not fit.
    """
    wanted = abstract_adapters(config, lora, mesh)
    if lora.checkpoint:
        factors = weights.load_adapters(config, lora, wanted)
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        make = jax.jit(lambda key: adapters.init(config, lora, jax.random.fold_in(key, 1)), out_shardings=shardings)
        factors = make(state.key)
    attached = replace(state, params=adapters.attach_adapters(state.params, factors, lora))
    return with_new_moments(attached, config, lora, optimizer, mesh)


def with_new_moments(
    state: TrainState,
    config: ModelConfig,
    lora: Lora | None,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """The state before the first update of an optimiser: no parameter is moved, the updates count from 0 again."""
    wanted = abstract_state(config, optimizer, mesh, lora)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (wanted.step, wanted.opt_state))
    start = jax.jit(lambda trained: (jnp.int32(0), optimizer.init(trained)), out_shardings=shardings)
    step, opt_state = start(partition(state.params)[0])
    return replace(state, step=step, opt_state=opt_state)


def abstract_adapters(config: ModelConfig, lora: Lora, mesh: jax.sharding.Mesh) -> Params:
    """`ShapeDtypeStruct`s of the adapters, sharded by the table (`sharding.RULES`)."""
    return jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named_sharding(mesh, *axes)),
        adapters.abstract(config, lora),
        adapters.logical_axes(config, lora),
    )


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, lora: Lora | None = None
) -> TrainState:
    """`ShapeDtypeStruct`s with shardings: parameters and their moments by the table, everything else replicated.

    With `lora` the parameters have adapters. The moments are in the hosts' memory if the optimiser is `Offloaded`.
    """
    everywhere = named_sharding(mesh)
    memory = "pinned_host" if isinstance(optimizer, Offloaded) else "device"
    params = abstract_params(config, mesh)
    if lora is not None:
        params = adapters.attach_adapters(params, abstract_adapters(config, lora, mesh), lora)
    trained, _ = partition(params)
    state = jax.eval_shape(lambda params: new_state(params, optimizer, jax.random.key(0)), params)

    moments = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.with_memory_kind(memory)),
        state.opt_state,
        state_shardings(state.opt_state, trained, everywhere),
    )
    small: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        for name, leaf in vars(state).items()
        if name not in ("params", "opt_state")
    }
    return TrainState(params=params, opt_state=moments, **small)
