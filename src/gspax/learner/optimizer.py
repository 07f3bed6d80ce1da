"""Builds a training stage's optimizer, the settings' transform behind a gradient clip, and its state's shardings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspax import config
from gspax.config import ModelConfig, layer_places, sparse_numbers
from gspax.errors import UserError
from gspax.types import Array, Params, PyTree


def learning_rate(settings: config.Optimizer) -> optax.Schedule:
    """Return the learning rate as a function of the updates applied (`state.applied_updates`)."""
    return settings.schedule(settings.learning_rate, settings.warmup_updates)


def make_optimizer(settings: config.Optimizer, trained_dtype: str = "float32") -> optax.GradientTransformation:
    """Make the settings' transform behind a global-norm clip.

    Args:
      trained_dtype: dtype of the trained arrays; unless it is float32, the state holds a float32 copy (`with_master`).
    """
    optimizer = settings.transform(learning_rate(settings))
    if settings.max_grad_norm != 0:
        optimizer = optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), optimizer)
    optimizer = balance(optimizer)
    if settings.frozen:
        optimizer = freeze(optimizer, settings.frozen)
    if trained_dtype != "float32":
        optimizer = with_master(optimizer)
    return offloaded(optimizer) if settings.offload else optimizer


BALANCING = "correction_bias"  # parameters that balance the experts and have no gradient of the loss
CONSTANT = "layer_scale"  # parameters that no update changes


def balance(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer so that correction biases move by the steps of `balancing_steps`, and by nothing else.

    A weight decay or a sign would move them too, and the constants, whose gradient is 0. The state is the wrapped
    optimizer's.
    """

    def update(grads: Params, state: optax.OptState, params: Params = None) -> tuple[Params, optax.OptState]:
        others = jax.tree_util.tree_map_with_path(_without_step, grads)
        updates, state = inner.update(others, state, params)
        return jax.tree_util.tree_map_with_path(_with_step, updates, grads), state

    def _without_step(path: tuple[object, ...], grad: Array) -> Array:
        return jnp.zeros_like(grad) if is_apart(path) else grad

    def _with_step(path: tuple[object, ...], update: Array, grad: Array) -> Array:
        return grad if is_apart(path) else update

    def is_apart(path: tuple[object, ...]) -> bool:
        return not {BALANCING, CONSTANT}.isdisjoint(_names(path))

    return optax.GradientTransformation(inner.init, update)


def balancing_steps(grads: Params, count_LE: Array, config: ModelConfig, speed: float) -> Params:
    """Replace the gradients of the correction biases by the biases' next steps.

    b_e += speed · sign(mean of the counts - count_e) in each layer, so that experts with few tokens are chosen more
    often (auxiliary-loss-free balancing, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
      count_LE: the tokens that each sparse layer sent to each expert.
      speed: `Optimizer.bias_update_speed`.
    """
    step_LE = speed * jnp.sign(count_LE.mean(axis=-1, keepdims=True) - count_LE)
    places = layer_places(config)
    stacks = [places[number].stack for number in sparse_numbers(config)]

    def of_stack(path: tuple[object, ...], grad: Array) -> Array:
        if not _balances(path):
            return grad
        keys = [getattr(key, "key", None) for key in path]
        stack = tuple(key for key in keys[1:] if isinstance(key, int))
        return step_LE[np.array([row for row, own in enumerate(stacks) if own == stack])].astype(grad.dtype)

    return jax.tree_util.tree_map_with_path(of_stack, grads)


def _balances(path: Iterable[object]) -> bool:
    return BALANCING in _names(path)


def freeze(inner: optax.GradientTransformation, names: Sequence[str]) -> optax.GradientTransformation:
    """Wrap an optimizer so that parameters with one of `names` in their path are frozen and have no moments.

    Clipping uses the global norm of the other parameters. UserError, when the state is made, for a name that no
    parameter has.
    """

    def label(params: Params) -> PyTree:
        labels = jax.tree_util.tree_map_with_path(lambda path, _: _names(path).isdisjoint(names), params)
        known = set().union(*(_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)))
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"optimizer.frozen: wanted names among {', '.join(sorted(known))}, got {unknown[0]!r}")
        return labels

    return optax.partition({True: inner, False: optax.set_to_zero()}, label)


def _names(path: Iterable[object]) -> set[str]:
    return {str(getattr(key, "key", getattr(key, "name", key))) for key in path}


def state_shardings(opt_state: PyTree, trained: Params, replicated: jax.sharding.Sharding) -> PyTree:
    """Return a tree like `opt_state` of shardings: a parameter's own for its leaves, `replicated` for all others.

    A leaf belongs to a parameter if its path ends with the parameter's and it has its shape. Factored moments, as in
    Adafactor, have other shapes; they are small.

    Args:
      opt_state: `ShapeDtypeStruct`s or arrays.
      trained: the parameters that the optimizer updates, with shardings.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(trained)
    by_path = {path: leaf for path, leaf in leaves}

    def sharding(path: tuple[object, ...], leaf: Array | jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        suffixes = (path[start:] for start in range(len(path) + 1))
        parameter = next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)
        return parameter.sharding if parameter is not None and parameter.shape == leaf.shape else replicated

    return jax.tree_util.tree_map_with_path(sharding, opt_state)


class Master(NamedTuple):
    """A float32 copy of the trained parameters, and the state of the optimizer that updates it."""

    params: Params
    inner: optax.OptState


def with_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer to update a float32 copy; `apply_updates` gives that copy rounded to the parameters' dtype.

    An update below 1/256 of a bfloat16 number would be lost to rounding.
    """

    def init(params: Params) -> Master:
        master = jax.tree.map(lambda param: param.astype(jnp.float32), params)
        return Master(master, inner.init(master))

    def update(grads: Params, state: Master, params: Params = None) -> tuple[Params, Master]:
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        updates, inner_state = inner.update(grads, state.inner, state.params)
        master = optax.apply_updates(state.params, updates)
        # exact where the two differ by less than a factor of 2: adding it gives the master copy
        difference = jax.tree.map(lambda new, old: new - old.astype(jnp.float32), master, params)
        return difference, Master(master, inner_state)

    return optax.GradientTransformation(init, update)


class Offloaded(optax.GradientTransformation):
    """An optimizer with its state in host memory; `state.abstract_state` gives the state that sharding."""


def offloaded(inner: optax.GradientTransformation) -> Offloaded:
    """Wrap an optimizer so that its state stays in host memory and is copied to the devices for each update."""

    def update(grads: Params, state: optax.OptState, params: Params = None) -> tuple[Params, optax.OptState]:
        updates, state = inner.update(grads, jax.device_put(state, jax.memory.Space.Device), params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    return Offloaded(inner.init, update)


def update_if(
    applied: Array, optimizer: optax.GradientTransformation, grads: Params, state: optax.OptState, params: Params
) -> tuple[Params, optax.OptState]:
    """Apply the update if `applied`; otherwise return the parameters and the optimizer's state unchanged.

    Every array is selected in the loop that computes it, so the new one overwrites the old; the branch of a
    `lax.cond` would hold both. A state in host memory is on the devices within such a branch only.

    Args:
      applied: whether the update counts; a bool.
    """

    def update() -> tuple[Params, optax.OptState]:
        updates, new_state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), new_state

    if isinstance(optimizer, Offloaded):
        return jax.lax.cond(applied, update, lambda: (params, state))
    return jax.tree.map(partial(jax.lax.select, applied), update(), (params, state))
