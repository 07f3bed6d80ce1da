"""A weight as a frozen matrix plus a trained low-rank product (LoRA, arXiv 2106.09685, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax

from gspax.types import Array, Params, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """base + scale · a b, in place of an array in the parameter tree.

    Axes: X stacked matrices (layers, experts), I input, O output, r rank; X, I and O may be several axes. Slicing the
    first axis of X slices all three arrays, so that layers can be scanned over.
    """

    base: Array  # [X, I, O]
    a: Array  # [X, I, r]
    b: Array  # [X, r, O]
    scale: float = field(metadata={"static": True})

    def dense(self) -> Array:
        """Compute the weight that this object replaces."""
        stacked = self.a.ndim + self.b.ndim - 2 - self.base.ndim
        rank, shape = self.a.shape[-1], self.base.shape[:stacked]
        product = self.a.reshape(*shape, -1, rank) @ self.b.reshape(*shape, rank, -1)
        return self.base + self.scale * product.reshape(self.base.shape)


def dense(params: Params) -> Params:
    """Replace every `LowRank` in the tree by its weight."""
    return jax.tree.map(lambda leaf: leaf.dense() if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank)


def partition(params: Params) -> tuple[Params, Params]:
    """Split into (trained, frozen): two trees like `params`, each with None where the other has an array.

    If the tree has a `LowRank`, only the factors a and b are trained; otherwise every leaf is.
    """
    if not any(map(is_low_rank, jax.tree.leaves(params, is_leaf=is_low_rank))):
        return params, jax.tree.map(lambda _: None, params)

    def train(leaf: PyTree) -> PyTree:
        return replace(leaf, base=None) if is_low_rank(leaf) else None

    def freeze(leaf: PyTree) -> PyTree:
        return replace(leaf, a=None, b=None) if is_low_rank(leaf) else leaf

    return jax.tree.map(train, params, is_leaf=is_low_rank), jax.tree.map(freeze, params, is_leaf=is_low_rank)


def combine(trained: Params, frozen: Params) -> Params:
    """Join the two trees of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None)


def is_low_rank(leaf: object) -> bool:
    """Return whether a node of the tree is a `LowRank`."""
    return isinstance(leaf, LowRank)
