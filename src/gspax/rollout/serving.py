"""The serving copy: the parameters as the sampler reads them, made once per rollout batch.

Adapters are merged into their weights; arrays are in the compute dtype, except for those that the model reads in
float32; and every layer has arrays of its own (`model.decoding` says why).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from gspax.config import ModelConfig, layer_runs
from gspax.model import transformer
from gspax.model.low_rank import dense
from gspax.sharding import SERVING_RULES, named_sharding
from gspax.types import Params

FULL = {"norm", "router"}  # axes of the parameters that the model reads in float32 whatever its compute dtype


def make_serving_copy(params: Params, config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """The serving copy of parameters: `embedding`, `layers` (a tuple), `norm`, and `head` unless embeddings are tied.

    With a mesh, sharded by `serving_shardings`.
    """
    return copier(config, mesh)(params)


def convert(params: Params, config: ModelConfig) -> Params:
    """`make_serving_copy` inside a jitted function, without a layout."""

    def cast(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return leaf.astype(leaf.dtype if FULL & set(axes) else config.dtype)

    return _unstack(jax.tree.map(cast, dense(params), transformer.logical_axes(config)), config)


def serving_shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """The layout of the serving copy on a mesh: a `NamedSharding` for each array."""

    def sharding(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.sharding.NamedSharding:
        return named_sharding(mesh, *axes[len(axes) - leaf.ndim :], rules=SERVING_RULES)

    axes = _unstack(transformer.logical_axes(config), config, axes=True)
    return jax.tree.map(sharding, _abstract(config), axes)


def abstract_serving_copy(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """`ShapeDtypeStruct`s, with shardings, of what `make_serving_copy` returns."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        _abstract(config),
        serving_shardings(config, mesh),
    )


@lru_cache
def copier(config: ModelConfig, mesh: jax.sharding.Mesh | None) -> Any:
    """The jitted `make_serving_copy` of a model and a mesh."""
    shardings = {} if mesh is None else {"out_shardings": serving_shardings(config, mesh)}
    return jax.jit(lambda params: convert(params, config), **shardings)


def _abstract(config: ModelConfig) -> Params:
    return jax.eval_shape(lambda params: convert(params, config), transformer.abstract_params(config))


def _unstack(params: Params, config: ModelConfig, *, axes: bool = False) -> Params:
    """The tree with the layers one by one; with `axes`, of tuples of names instead of arrays."""
    layers = []
    for (_, count), run in zip(layer_runs(config), _runs(params), strict=True):
        for number in range(count):
            layers.append(run if axes else jax.tree.map(lambda leaf, number=number: leaf[number], run))
    return {**{name: leaf for name, leaf in params.items() if name != "runs"}, "layers": tuple(layers)}


def _runs(params: Params) -> list[Params]:
    runs = params["runs"]
    return [runs[number] for number in range(len(runs))]
