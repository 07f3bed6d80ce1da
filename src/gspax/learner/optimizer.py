"""The optimiser of an experiment, from optax, and where its state lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspax import config


def learning_rate(settings: config.Optimizer) -> optax.Schedule:
    """Linear from 0 over `warmup_updates`, then constant. A function of the updates done."""
    if settings.warmup_updates == 0:
        return optax.constant_schedule(settings.learning_rate)
    return optax.linear_schedule(0.0, settings.learning_rate, settings.warmup_updates)


def make_optimizer(settings: config.Optimizer, trained_dtype: str = "float32") -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; weight decay, where set, is on every parameter.

    Args:
      trained_dtype: of what is trained; unless it is float32, the state holds a float32 copy (`with_master`).
    """
    optimizer = optax.adamw(
        learning_rate(settings),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    if settings.max_grad_norm != 0:
        optimizer = optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), optimizer)
    if trained_dtype != "float32":
        optimizer = with_master(optimizer)
    return offloaded(optimizer) if settings.offload else optimizer


def optimizer_of(experiment: config.Experiment) -> optax.GradientTransformation:
    """The optimiser of what an experiment trains."""
    return make_optimizer(experiment.optimizer, config.trained_dtype(experiment))


class Master(NamedTuple):
    """The float32 copy of what is trained, and the state of the optimiser that updates it."""

    params: Any
    inner: Any


def with_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser on a float32 copy; `apply_updates` then gives that copy, rounded to the parameters' dtype.

    A bfloat16 number cannot take an update below 1/256 of itself: small learning rates would do nothing.
    """

    def init(params: Any) -> Master:
        master = jax.tree.map(lambda param: param.astype(jnp.float32), params)
        return Master(master, inner.init(master))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        updates, inner_state = inner.update(grads, state.inner, state.params)
        master = optax.apply_updates(state.params, updates)
        # exact where the two differ by less than a factor of 2, so that adding it gives the master
        difference = jax.tree.map(lambda new, old: new - old.astype(jnp.float32), master, params)
        return difference, Master(master, inner_state)

    return optax.GradientTransformation(init, update)


class Offloaded(optax.GradientTransformation):
    """An optimiser whose state lives in the hosts' memory; `state.abstract_state` places it there."""


def offloaded(inner: optax.GradientTransformation) -> Offloaded:
    """The same updates; the state comes to the devices for an update and goes back."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(grads, jax.device_put(state, jax.memory.Space.Device), params)
        return updates, jax.device_put(state, jax.memory.Space.Host)

    return Offloaded(inner.init, update)
