"""The training state: made already sharded, never on one device first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspax.model import transformer
from gspax.model.config import ModelConfig
from gspax.sharding import named
from gspax.types import Array, Params, TrainState


def new_state(params: Params, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """State before the first update."""
    # step and position are two arrays: a donated state must not hold one buffer twice
    return TrainState(
        step=jnp.int32(0), position=jnp.int32(0), key=key, params=params, opt_state=optimizer.init(params)
    )


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: Array, mesh: jax.sharding.Mesh
) -> TrainState:
    """Random parameters (from `fold_in(key, 0)`) and fresh optimiser moments, sharded over the mesh."""

    def init(key):
        return new_state(transformer.init(config, jax.random.fold_in(key, 0)), optimizer, key)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, optimizer, mesh))
    return jax.jit(init, out_shardings=shardings)(key)


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """`ShapeDtypeStruct`s with shardings: parameters and their moments by the table, everything else replicated."""
    everywhere = named(mesh)
    params = jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named(mesh, *axes)),
        transformer.abstract_params(config),
        transformer.logical_axes(config),
    )
    state = jax.eval_shape(lambda params: new_state(params, optimizer, jax.random.key(0)), params)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding),
        state.opt_state,
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
    )
    small: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        for name, leaf in (("step", state.step), ("position", state.position), ("key", state.key))
    }
    return TrainState(params=params, opt_state=moments, **small)
