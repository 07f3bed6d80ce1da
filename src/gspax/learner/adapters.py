"""LoRA: adapters next to frozen parameters. Their tree has the names of the parameters, with {a, b} for each weight.

The policy's parameters are the base's, with a `LowRank` in place of each adapted weight. The learner computes
base + scale · a b layer by layer, inside the layer scan, so no second copy of the model exists; only a and b have
gradients and moments. The sampler computes the sum once per rollout. Adapters are initialized as a no-op (b = 0). The
reference policy of a KL is the same base with a copy of the first adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from gspax.config import Lora, ModelConfig, adapted_weights
from gspax.model import transformer
from gspax.model.low_rank import LowRank, is_low_rank
from gspax.types import Array, Params, PyTree

T = TypeVar("T")

STACKED = ("layer", "expert")  # axes that stack independent matrices
FACTORS = {"a", "b"}


def logical_axes(config: ModelConfig, lora: Lora) -> Params:
    """Return the logical axes (`gspax.parallel.sharding.RULES`) of each factor."""
    return _map_adapted(transformer.logical_axes(config), lora, lambda axes: _split(axes, axes, "rank"))


def abstract(config: ModelConfig, lora: Lora) -> Params:
    """Return the `ShapeDtypeStruct`s of the adapters that `init` returns."""
    axes = transformer.logical_axes(config)
    shapes = jax.tree.map(
        lambda leaf, names: _split(names, leaf.shape, lora.rank), transformer.abstract_params(config), axes
    )
    leaves = _map_adapted(shapes, lora, lambda factors: factors)
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), leaves, is_leaf=_is_tuple)


def init(config: ModelConfig, lora: Lora, key: Array) -> Params:
    """Initialize adapters in float32: a is normal with variance 1 / fan-in, b is 0."""
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract(config, lora))
    axes = jax.tree.leaves(logical_axes(config, lora), is_leaf=_is_tuple)
    factors = []
    for index, ((path, leaf), names) in enumerate(zip(paths, axes, strict=True)):
        if path[-1].key == "b":
            factors.append(jnp.zeros(leaf.shape))
            continue
        inputs = zip(names[:-1], leaf.shape[:-1], strict=True)
        fan_in = math.prod(size for name, size in inputs if name not in STACKED)
        factors.append(jax.random.normal(jax.random.fold_in(key, index), leaf.shape) * fan_in**-0.5)
    return jax.tree.unflatten(tree, factors)


def attach_adapters(base: Params, adapters: Params, lora: Lora) -> Params:
    """Replace each adapted weight of the base by a `LowRank`. Nothing is computed."""
    if isinstance(adapters, dict) and adapters.keys() == FACTORS:
        return LowRank(base, adapters["a"], adapters["b"], lora.alpha / lora.rank)
    return {
        name: attach_adapters(leaf, adapters[name], lora) if name in adapters else leaf for name, leaf in base.items()
    }


def trained_axes(config: ModelConfig, trained: Params) -> Params:
    """Return the logical axes of the trained arrays (`low_rank.partition`): all parameters, or the factors alone."""
    axes = transformer.logical_axes(config)
    if not any(is_low_rank(leaf) for leaf in jax.tree.leaves(trained, is_leaf=is_low_rank)):
        return axes

    def factors(leaf: LowRank | None, names: tuple[str, ...]) -> LowRank | None:
        halves: PyTree = _split(names, names, "rank")
        return None if leaf is None else replace(leaf, **halves)

    return jax.tree.map(factors, trained, axes, is_leaf=lambda leaf: leaf is None or is_low_rank(leaf))


def _map_adapted(tree: Params, lora: Lora, change: Callable[[PyTree], PyTree]) -> Params:
    """Select the adapted subtree of a parameter-like tree, and apply `change` to each leaf."""

    def of_stacks(stacks: Params) -> Params:
        """Return the changed weights of one stack of layers, or of several by their number."""
        if all(isinstance(number, int) for number in stacks):
            return {number: of_stacks(stack) for number, stack in stacks.items()}
        return {
            part: {name: change(leaf) for name, leaf in stacks[part].items() if name in chosen}
            for part, chosen in adapted_weights(lora).items()
            if chosen and part in stacks
        }

    return {"runs": of_stacks(tree["runs"])}


def _split(axes: tuple[str, ...], of: tuple[T, ...], rank: T) -> dict[str, tuple[T, ...]]:
    """Divide `of`, one entry per axis of a weight, between a and b: one side of the matrix is the model dimension."""
    stacked = sum(name in STACKED for name in axes)
    inner = stacked + 1 if axes[stacked].endswith("embed") else len(axes) - 1
    return {"a": (*of[:inner], rank), "b": (*of[:stacked], rank, *of[inner:])}


def _is_tuple(leaf: object) -> bool:
    return isinstance(leaf, tuple)
