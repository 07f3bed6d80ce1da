"""A cache of keys and values that plain XLA reads in place, and only where it is live.

XLA:CPU copies a slice of an array before a product reads it, but reads a whole array in place. So the positions of a
cache are a few arrays, segments, and those that no row can see are skipped. Keys are stored transposed, since a product
reads them twice as fast so.

The cache for TPU is one array, of which `decode_attention` reads blocks.

Axes: B rows with one query each, X rows of the cache, N query heads, K key heads, R = N/K, H head, S positions of a
segment.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.model.kernels.decode_attention import merge
from gspax.model.kernels.online_softmax import MASKED
from gspax.model.kernels.quantization import Quantized, Weight, is_quantized, unpack

SEGMENT = 64  # positions
MOST_SEGMENTS = 8


class Segment(NamedTuple):
    """Keys and values of some positions."""

    k_XKHS: Weight  # a `Quantized` has a scale [X, K, S]
    v_XKSH: Weight


def segment_sizes(length: int) -> list[int]:
    """The positions of the segments of a cache of so many positions."""
    size = max(SEGMENT, -(-length // MOST_SEGMENTS))
    return [min(size, length - first) for first in range(0, length, size)]


def write(segments: tuple[Segment, ...], k_BKH: Weight, v_BKH: Weight, position: Array) -> tuple[Segment, ...]:
    """The segments with each row's new key and value at its position: int32 `[B]`, or `[]` if it is one for all rows.

    In the segments that do not have the position, an element is replaced by itself.
    """
    first, written = 0, []
    for segment in segments:
        size = segment.v_XKSH.shape[2]
        place, within = jnp.clip(position - first, 0, size - 1), (position >= first) & (position < first + size)
        written.append(
            Segment(
                _write_one(segment.k_XKHS, k_BKH, place, within, axis=3),
                _write_one(segment.v_XKSH, v_BKH, place, within, axis=2),
            )
        )
        first += size
    return tuple(written)


def _write_one(cache: Weight, new: Weight, place: Array, within: Array, axis: int) -> Weight:
    """The new key or value at the place along the axis, if that is within the segment."""
    if is_quantized(cache) and is_quantized(new):
        return Quantized(
            _write_array(cache.values, jnp.expand_dims(new.values, axis), place, within, axis),
            _write_array(cache.scale, new.scale[..., None], place, within, axis=2),
        )
    return _write_array(cache, jnp.expand_dims(new, axis), place, within, axis)


def _write_array(cache: Array, new: Array, place: Array, within: Array, axis: int) -> Array:
    if place.ndim == 0:
        old = lax.dynamic_slice_in_dim(cache, place, 1, axis)
        return lax.dynamic_update_slice_in_dim(cache, jnp.where(within, new, old), place, axis)
    return jax.vmap(partial(_write_array, axis=axis - 1))(cache, new, place, within)


def attend(
    q_BNH: Array, segments: tuple[Segment, ...], start_B: Array, stop_B: Array, row_B: Array | None = None
) -> tuple[Array, Array]:
    """`decode_attention` over segments that follow one another. All of the first one are read."""
    result = _attend_to_one(q_BNH, segments[0], start_B, stop_B, row_B)
    first, last = segments[0].v_XKSH.shape[2], stop_B.max()
    for segment in segments[1:]:

        def read(segment: Segment = segment, first: int = first) -> tuple[Array, Array]:
            return _attend_to_one(q_BNH, segment, start_B - first, stop_B - first, row_B)

        result = lax.cond(last > first, lambda so_far, read=read: merge(so_far, read()), lambda x: x, result)
        first += segment.v_XKSH.shape[2]
    return result


def _attend_to_one(
    q_BNH: Array, segment: Segment, start_B: Array, stop_B: Array, row_B: Array | None
) -> tuple[Array, Array]:
    (B, N, H), (K, S) = q_BNH.shape, segment.v_XKSH.shape[1:3]
    q_BKRH = q_BNH.reshape(B, K, N // K, H)
    of_rows = segment if row_B is None else jax.tree.map(lambda x_X: x_X[row_B], segment)
    (k_BKHS, k_BKS), (v_BKSH, v_BKS) = (unpack(x, q_BNH.dtype) for x in of_rows)
    score_BKRS = jnp.einsum("bkrh,bkhs->bkrs", q_BKRH, k_BKHS, preferred_element_type=jnp.float32) * H**-0.5
    score_BKRS = score_BKRS if k_BKS is None else score_BKRS * k_BKS[:, :, None]
    position_1S = jnp.arange(S)[None]
    live_BS = (position_1S >= start_B[:, None]) & (position_1S < stop_B[:, None])
    score_BKRS = jnp.where(live_BS[:, None, None], score_BKRS, MASKED)
    top_BKR1 = score_BKRS.max(axis=-1, keepdims=True)
    weight_BKRS = jnp.exp(score_BKRS - top_BKR1)
    sum_BKR1 = weight_BKRS.sum(axis=-1, keepdims=True)
    weight_BKRS = weight_BKRS if v_BKS is None else weight_BKRS * v_BKS[:, :, None]
    context_BKRH = jnp.einsum(
        "bkrs,bksh->bkrh", weight_BKRS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )
    logsumexp_BKR1 = top_BKR1 + jnp.log(sum_BKR1)
    return (context_BKRH / sum_BKR1).reshape(B, N, H), logsumexp_BKR1.reshape(B, N)
