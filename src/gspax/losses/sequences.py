"""Sums over the tokens of a sequence, whether it has a row for itself or shares one.

Unpacked (`segment_BT` is None) a row is one sequence. Packed, `segment_BT[b, t]` says which sequence of row b token t
belongs to: 1, 2, ... up to T in any order, and 0 for padding. A quantity of sequences is an array [B, S]: S = 1
unpacked; packed S = T + 1, with sequence s in column s and nothing in column 0. Only response tokens (`mask_BT`) count.

Letters: B rows, T tokens, S columns for sequences, U for T, or 1 if all tokens of a row have the same number.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


def response(mask_BT: Array, segment_BT: Array | None) -> Array:
    """The mask without the padding that the segments name."""
    return mask_BT if segment_BT is None else mask_BT & (segment_BT > 0)


def total(value_BU: Array, mask_BT: Array, segment_BT: Array | None) -> Array:
    """Σ over the response tokens of each sequence, [B, S]. What stands outside the mask never matters."""
    if segment_BT is not None:
        kept_BT, columns = jnp.where(mask_BT, value_BU, 0), mask_BT.shape[-1] + 1
        return jax.vmap(partial(jax.ops.segment_sum, num_segments=columns))(kept_BT, segment_BT)
    if value_BU.shape != mask_BT.shape:  # no pass over the tokens but the one that counts them
        tokens_BS = count(mask_BT, None)
        return jnp.where(tokens_BS > 0, value_BU * tokens_BS, 0)
    return jnp.sum(jnp.where(mask_BT, value_BU, 0), axis=-1, keepdims=True)


def count(mask_BT: Array, segment_BT: Array | None) -> Array:
    """|y|, the number of response tokens of each sequence, float32 [B, S]."""
    return total(jnp.ones(mask_BT.shape, jnp.float32), mask_BT, segment_BT)


def mean(value_BU: Array, mask_BT: Array, segment_BT: Array | None) -> Array:
    """1/|y| Σ over the response tokens of each sequence, [B, S]; 0 for a sequence without any."""
    return total(value_BU, mask_BT, segment_BT) / jnp.maximum(count(mask_BT, segment_BT), 1)


def at_tokens(value_BS: Array, segment_BT: Array | None) -> Array:
    """A quantity of sequences at each of their tokens, [B, U]: unpacked it is the same all along the row."""
    if segment_BT is None:
        return value_BS
    return jnp.take_along_axis(value_BS, segment_BT, axis=-1)
