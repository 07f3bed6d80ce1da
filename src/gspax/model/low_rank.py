"""A weight that is a frozen matrix plus a trained product of two thin ones (LoRA, arXiv 2106.09685, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from gspax.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """base + scale · a b, in place of an array in a tree of parameters.

    Letters: X axes that stack matrices (layers, experts), I the axes that come in, O those that go out, r the rank. A
    slice along the first axis of X is a slice of all three, so layers can be scanned over.
    """

    base: Array  # [X, I, O]
    a: Array  # [X, I, r]
    b: Array  # [X, r, O]
    scale: float = field(metadata={"static": True})

    def dense(self) -> Array:
        """The weight itself."""
        stacked = self.a.ndim + self.b.ndim - 2 - self.base.ndim
        rank, shape = self.a.shape[-1], self.base.shape[:stacked]
        product = self.a.reshape(*shape, -1, rank) @ self.b.reshape(*shape, rank, -1)
        return self.base + self.scale * product.reshape(self.base.shape)


def dense(params: Any) -> Any:
    """The tree with every `LowRank` as the array that it stands for."""
    return jax.tree.map(lambda leaf: leaf.dense() if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank)


def base(params: Any) -> Any:
    """The tree with every `LowRank` as its frozen matrix."""
    return jax.tree.map(lambda leaf: leaf.base if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank)


def partition(params: Any) -> tuple[Any, Any]:
    """(what is trained, what is frozen): two trees like `params`, each with None where the other has the array.

    In a tree with a `LowRank` their factors are trained and nothing else, in any other everything is.
    """
    adapted = any(is_low_rank(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_low_rank))
    nothing = jax.tree.map(lambda _: None, params)
    if not adapted:
        return params, nothing

    def part(leaf: Any, trained: bool) -> Any:
        if not is_low_rank(leaf):
            return None if trained else leaf
        return replace(leaf, base=None) if trained else replace(leaf, a=None, b=None)

    return tuple(jax.tree.map(lambda leaf, t=t: part(leaf, t), params, is_leaf=is_low_rank) for t in (True, False))


def combine(trained: Any, frozen: Any) -> Any:
    """The inverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None)


def is_low_rank(leaf: Any) -> bool:
    """Whether a node of a tree stands for a weight."""
    return isinstance(leaf, LowRank)
