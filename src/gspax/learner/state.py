"""Creates, stores, and restores the training state; it is created sharded, so no array is ever whole on one device.

Its first parameters are random, or read from a published checkpoint or from one that `gspax convert` wrote. A run
with a reference policy or with adapters stores them in `start/`: step 0 is the model, step 1 the adapters that the
reference policy has. With adapters the checkpoints leave out what is frozen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from gspax import unstable
from gspax.config import Lora, ModelConfig, Term, Trained
from gspax.errors import UserError
from gspax.hf.parameters import named_shapes, read_params
from gspax.hf.peft import read_adapters
from gspax.hf.source import RUN, locate
from gspax.learner import adapters
from gspax.learner.optimizer import Offloaded, state_shardings
from gspax.model import transformer
from gspax.model.low_rank import combine, partition
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.run.checkpoints import Checkpoints, newest_step
from gspax.run.directory import RunDir
from gspax.run.manifest import MANIFEST, find_damage, has_manifest
from gspax.types import Adapted, Array, Params, PyTree, Stream, TrainState, named_leaves

CHECKPOINTS = "checkpoints"  # in a converted folder, next to config.json and the tokenizer's files
MODEL, ADAPTERS = 0, 1  # the steps of `start/`
UNTRAINED = optax.identity()  # the optimizer of parameters without moments


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy on a mesh, with what trains it.

    Attributes:
      model: the model's architecture.
      mesh: the devices that hold the state.
      optimizer: the transform whose moments the state has; by default it has none.
      lora: the adapters, which alone are trained; None: the whole model is.
      terms: the terms of the objective, which may keep parameters in the state.
    """

    model: ModelConfig
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation = UNTRAINED
    lora: Lora | None = None
    terms: Sequence[Term] = ()

    @property
    def trained_dtype(self) -> str:
        """The dtype of the trained arrays."""
        return Trained(self.model, self.lora).dtype

    @property
    def first_step(self) -> int:
        """The step of `start/` that has what was trained, as it was before the first update."""
        return MODEL if self.lora is None else ADAPTERS


def require_memory(field: str, parts: Mapping[str, int]) -> None:
    """Raise UserError about a field if the arrays that a run always holds do not fit the memory of a device."""
    needed, available = sum(parts.values()), device_memory(jax.local_devices()[0])
    if available is not None and needed > available:
        what = ", ".join(f"{part} {size / 2**30:,.1f} GiB" for part, size in parts.items())
        raise UserError(
            f"{field}: wanted at most {available / 2**30:,.1f} GiB of each device for what a run always holds, got "
            f"{needed / 2**30:,.1f} GiB ({what}); take a smaller model, more devices or another mesh"
        )


def device_memory(device: jax.Device) -> int | None:
    """Return the device's memory in bytes, for a CPU device its share of the machine's; None if unknown."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def count_updates(state: TrainState) -> int:
    """Return the number of optimizer updates of a state, skipped ones included."""
    return int(multihost.to_host(state.step))


def applied_updates(state: TrainState) -> int:
    """Return the number of updates that moved the parameters: the schedule's count, read from the optimizer's state.

    An optimizer without a `count`, which optax's schedules and moments have, counts all updates.
    """
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    return max(map(int, multihost.to_host(counts)), default=count_updates(state))


def new_state(params: Params, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """Make the state before the first update."""
    # step and position are two arrays: a donated state must not hold one buffer twice
    return TrainState(
        step=jnp.int32(0),
        position=jnp.int32(0),
        key=key,
        params=params,
        opt_state=optimizer.init(partition(params)[0]),
        adapted=Adapted(jnp.float32(0), jnp.float32(0), jnp.float32(0)),
    )


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: Array, mesh: jax.sharding.Mesh
) -> TrainState:
    """Make a state with new optimizer moments and with parameters from `config.checkpoint` or random ones, sharded.

    Random parameters come from `Stream.PARAMETERS`. UserError if the checkpoint is broken or of another model.
    """

    def make_params(key: Array) -> Params:
        return transformer.init(config, jax.random.fold_in(key, Stream.PARAMETERS))

    def init_rest(params: Params, key: Array) -> TrainState:  # the parameters are not moved
        return replace(new_state(params, optimizer, key), params=None)

    wanted = abstract_state(TrainedPolicy(config, mesh, optimizer))
    shardings = _shardings(wanted)
    if config.checkpoint:
        params = load_model(config, wanted.params)
    else:
        options = {"out_shardings": shardings.params, "compiler_options": unstable.light_compilation(mesh)}
        params = jax.jit(make_params, **options)(key)
    state = jax.jit(init_rest, out_shardings=replace(shardings, params=None))(params, key)
    return replace(state, params=params)


def add_adapters(state: TrainState, policy: TrainedPolicy, lora: Lora) -> TrainState:
    """Add adapters to the state's parameters, with optimizer moments for the adapters alone.

    The adapters are initialized from `Stream.ADAPTERS`, or read from `lora.checkpoint`. UserError if it does not fit.
    """

    def make_adapters(key: Array) -> Params:
        return adapters.init(policy.model, lora, jax.random.fold_in(key, Stream.ADAPTERS))

    wanted = abstract_adapters(policy.model, lora, policy.mesh)
    if lora.checkpoint:
        factors = load_adapters(policy.model, lora, wanted)
    else:
        shardings = _shardings(wanted)
        factors = jax.jit(make_adapters, out_shardings=shardings)(state.key)
    attached = replace(state, params=adapters.attach_adapters(state.params, factors, lora))
    return with_new_moments(attached, replace(policy, lora=lora))


def with_new_moments(state: TrainState, policy: TrainedPolicy) -> TrainState:
    """Reset the optimizer state and the count of updates; no parameter is moved."""
    wanted = abstract_state(policy)
    start = jax.jit(
        lambda trained: (jnp.int32(0), policy.optimizer.init(trained)),
        out_shardings=_shardings((wanted.step, wanted.opt_state)),
    )
    step, opt_state = start(partition(state.params)[0])
    return replace(state, step=step, opt_state=opt_state)


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh, dtype: str = "") -> Params:
    """Return `ShapeDtypeStruct`s of the parameters, sharded by `sharding.RULES`, in `dtype` (default: the model's)."""
    return _sharded(transformer.abstract_params(config, dtype), transformer.logical_axes(config), mesh)


def abstract_adapters(config: ModelConfig, lora: Lora, mesh: jax.sharding.Mesh) -> Params:
    """Return `ShapeDtypeStruct`s of the adapters, sharded by `sharding.RULES`."""
    return _sharded(adapters.abstract(config, lora), adapters.logical_axes(config, lora), mesh)


def _sharded(shapes: PyTree, axes: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Shard `ShapeDtypeStruct`s by the names of their axes."""
    return jax.tree.map(lambda leaf, names: leaf.update(sharding=named_sharding(mesh, *names)), shapes, axes)


def abstract_policy(policy: TrainedPolicy) -> Params:
    """Return `ShapeDtypeStruct`s of the policy's parameters, adapters included."""
    params = abstract_params(policy.model, policy.mesh)
    if policy.lora is None:
        return params
    return adapters.attach_adapters(params, abstract_adapters(policy.model, policy.lora, policy.mesh), policy.lora)


def abstract_state(policy: TrainedPolicy) -> TrainState:
    """Return `ShapeDtypeStruct`s of the state: parameters and moments sharded by the table, the rest replicated.

    The moments are in the hosts' memory if the optimizer is `Offloaded`.
    """
    everywhere = named_sharding(policy.mesh)
    kind = "pinned_host" if isinstance(policy.optimizer, Offloaded) else "device"
    params = abstract_policy(policy)
    state = jax.eval_shape(lambda params: new_state(params, policy.optimizer, jax.random.key(0)), params)
    moments = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding.with_memory_kind(kind)),
        state.opt_state,
        state_shardings(state.opt_state, partition(params)[0], everywhere),
    )
    rest = replace(state, params=None, opt_state=None)
    placed = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), rest)
    return replace(placed, params=params, opt_state=moments, teacher=abstract_kept(policy, params))


def abstract_kept(policy: TrainedPolicy, params: Params) -> Params:
    """Return `ShapeDtypeStruct`s of the parameters of an earlier policy that a term keeps in the state; None if none.

    A moving average is in float32: in bfloat16 most of its steps would be lost.
    """
    trained_dtype = policy.trained_dtype
    kept = [each for term in policy.terms for each in term.held(trained_dtype) if each.in_state]
    if not kept:
        return None
    trained, dtype = partition(params)[0], kept[0].dtype
    return (
        trained if dtype == trained_dtype else jax.tree.map(lambda leaf: leaf.update(dtype=jnp.dtype(dtype)), trained)
    )


def start_kept(state: TrainState, wanted: Params) -> TrainState:
    """Copy the state's trained parameters to those that a term keeps, in the dtypes of `wanted`."""
    copy = jax.tree.map(lambda leaf, like: jnp.copy(leaf).astype(like.dtype), partition(state.params)[0], wanted)
    return replace(state, teacher=copy)


def refresh_kept(state: TrainState, share: float) -> TrainState:
    """Move the parameters that a term keeps by `share` of the way to the trained ones; 1: make them equal."""
    trained = partition(state.params)[0]
    if share == 1:
        return start_kept(state, state.teacher)
    return replace(state, teacher=_move(state.teacher, trained, share))


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def _move(kept: Params, trained: Params, share: float) -> Params:
    return jax.tree.map(lambda old, new: old + share * (new.astype(old.dtype) - old), kept, trained)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def load_model(config: ModelConfig, wanted: Params) -> Params:
    """Load the parameters of `config.checkpoint`, with the shardings and dtypes of `wanted` (`ShapeDtypeStruct`s).

    A run's folder is read at its newest checkpoint.

    Raises:
      UserError: the checkpoint is broken, or of another architecture than `config`.
    """
    folder = locate(config.checkpoint)
    if not (folder / CHECKPOINTS).is_dir():
        return read_params(folder, config, wanted)
    if not (folder / RUN).is_file():  # a run verifies its checkpoints alone
        require_intact(folder)
    mesh = jax.tree.leaves(wanted)[0].sharding.mesh
    with Checkpoints(folder / CHECKPOINTS, mesh=mesh) as checkpoints:
        return _restore_params(checkpoints, wanted, newest_step(checkpoints))


def load_policy(run: RunDir, checkpoints: Checkpoints, policy: TrainedPolicy, step: int) -> Params:
    """Load the parameters of a run's checkpoint, adapters included, without optimizer state.

    Args:
      run: has the frozen parameters of adapters in `start/`.
      checkpoints: the run's, or its warm start's.
      policy: its optimizer and terms are not read.
      step: the checkpoint's step.

    Raises:
      UserError: there is no such checkpoint, or it is of another model.
    """
    wanted, _ = partition(abstract_policy(policy))
    return _with_frozen(run, _restore_params(checkpoints, wanted, step), policy)


def _restore_params(checkpoints: Checkpoints, wanted: Params, step: int) -> Params:
    """Restore the parameters of a checkpoint, like `wanted`."""
    leaves = {f"params/{name}": leaf for name, leaf in named_leaves(wanted).items()}
    arrays = checkpoints.restore_some(leaves, step)
    return jax.tree.unflatten(jax.tree.structure(wanted), [arrays[name] for name in leaves])


def _with_frozen(run: RunDir, params: Params, policy: TrainedPolicy) -> Params:
    """Add the frozen base parameters from `start/` to the adapters."""
    if policy.lora is None:
        return params
    base = load_start(run, abstract_params(policy.model, policy.mesh), policy.mesh)
    wanted = abstract_adapters(policy.model, policy.lora, policy.mesh)
    _, frozen = partition(adapters.attach_adapters(base, wanted, policy.lora))
    return combine(params, frozen)


def require_intact(folder: Path) -> None:
    """Raise UserError if config.json or the tokenizer of a converted checkpoint is damaged; warn without a manifest."""
    if not has_manifest(folder):
        multihost.warn_from_primary(f"{folder}: config.json and the tokenizer are not verified: there is no {MANIFEST}")
    elif damage := find_damage(folder):
        raise UserError(
            f"{folder}: damaged: {damage[0]}; convert the checkpoint again, or delete {MANIFEST} if the change is yours"
        )


def load_adapters(config: ModelConfig, lora: Lora, wanted: Params) -> Params:
    """Load the adapters of `lora.checkpoint`, with the shardings of `wanted`. UserError as for `load_model`."""
    leaves, shapes = named_leaves(wanted), named_shapes(wanted)
    factors = multihost.all_or_raise(lambda: read_adapters(Path(lora.checkpoint), config, lora, shapes))
    arrays = [multihost.to_devices(factors[name], leaf.sharding) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def first_state(run: RunDir, policy: TrainedPolicy, key: Array) -> TrainState:
    """Make the state before any update, of the warm start if there is one. Writes the base of adapters to `start/`."""
    if policy.lora is None:
        return init_state(policy.model, policy.optimizer, key, policy.mesh)
    state = init_state(policy.model, UNTRAINED, key, policy.mesh)  # there are moments of the adapters alone
    save_start(run, state.params, policy.mesh)
    return add_adapters(state, policy, policy.lora)


def save_start(run: RunDir, params: Params, mesh: jax.sharding.Mesh, step: int = MODEL) -> None:
    """Write parameters to `start/`: the model's, or with `ADAPTERS` the adapters alone."""
    with Checkpoints(run.start, keep=2, mesh=mesh) as checkpoints:
        checkpoints.save(step, params, {})


def load_start(run: RunDir, wanted: Params, mesh: jax.sharding.Mesh, step: int = MODEL) -> Params:
    """Load the parameters that `save_start` wrote, like `wanted`. UserError if they are missing."""
    with Checkpoints(run.start, mesh=mesh) as checkpoints:
        return checkpoints.restore(wanted, step)[0]


def save_first(run: RunDir, state: TrainState, policy: TrainedPolicy) -> None:
    """Write the parameters of the first policy, before the first update of reinforcement learning."""
    save_start(run, drop_frozen(state).params, policy.mesh, policy.first_step)


def load_first(run: RunDir, state: TrainState, policy: TrainedPolicy) -> Params:
    """Load the trained parameters from before the first update; they share no buffers with the state."""
    if count_updates(state) == 0:
        return jax.tree.map(jnp.copy, drop_frozen(state).params)  # the state is donated to the first update
    return load_start(run, partition(abstract_policy(policy))[0], policy.mesh, policy.first_step)


def drop_frozen(state: TrainState) -> TrainState:
    """Remove the frozen parameters from a state, which leaves the arrays that a checkpoint stores."""
    return replace(state, params=partition(state.params)[0])


def restore_state(run: RunDir, checkpoints: Checkpoints, policy: TrainedPolicy, step: int) -> TrainState:
    """Restore the whole state of a checkpoint. UserError if it cannot be read."""
    state, _ = checkpoints.restore(drop_frozen(abstract_state(policy)), step)
    return replace(state, params=_with_frozen(run, state.params, policy))
