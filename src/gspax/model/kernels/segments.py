"""The sampler's cache of keys and values: its layout, the writes, and the attention to it.

On TPU a layer's cache is one array, of which the kernel `decode_attention` reads the blocks that are active. Elsewhere
plain XLA reads it: XLA:CPU copies a slice of an array before a product reads it, but reads a whole array in place. So
the positions of a cache are a few arrays, segments, and segments that no row can see are skipped. Keys are then stored
transposed, since a product reads them twice as fast. With latent attention the values are the keys, stored once.

Axes: B rows with one query each, X rows of the cache, N query heads, K key heads, R = N/K, H head, S positions of a
segment.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax import unstable
from gspax.config import SamplerDtype
from gspax.model.kernels.decode_attention import decode_attention, merge, write_positions
from gspax.model.kernels.online_softmax import MASKED
from gspax.model.kernels.quantization import Quantized, quantize
from gspax.model.kernels.weights import Weight, unpack

SEGMENT = 64  # positions
LANES = 128  # numbers of a TPU's vector
MOST_SEGMENTS = 8


class Segment(NamedTuple):
    """Keys and values of some positions."""

    k_XKHS: Weight | None  # a `Quantized` has a scale [X, K, S]; with the kernel, [X, K, S, H]; None: the values
    v_XKSH: Weight


Segments = tuple[Segment, ...]  # that follow one another


def make_segment(k_XKSH: Array | None, v_XKSH: Array, dtype: SamplerDtype, *, kernel: bool) -> Segment:
    """Lay out keys and values for the cache, in a dtype; `kernel`: `decode_attention` reads them."""
    if kernel and k_XKSH is None:
        v_XKSH = _pad(v_XKSH)
    segment = _round(k_XKSH, v_XKSH) if dtype == "int8" else Segment(k_XKSH, v_XKSH)
    if kernel or k_XKSH is None:
        return segment
    return segment._replace(k_XKHS=jax.tree.map(lambda x: x.swapaxes(2, 3) if x.ndim == 4 else x, segment.k_XKHS))


def _round(k: Array | None, v: Array) -> Segment:
    """Round keys and values to 8 bits, with one scale for each token and head."""
    return Segment(None if k is None else quantize(k, axes=(-1,)), quantize(v, axes=(-1,)))


def _pad(x: Array) -> Array:
    """Pad a latent's last axis with zeros to whole lanes: for another width XLA:TPU copies the cache to write."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])


def segment_sizes(length: int, *, kernel: bool) -> list[int]:
    """Return the lengths of the segments of a cache with `length` positions."""
    size = length if kernel else max(SEGMENT, -(-length // MOST_SEGMENTS))
    return [min(size, length - first) for first in range(0, length, size)]


def write(segments: Segments, k_BKH: Array | None, v_BKH: Array, position: Array, *, kernel: bool) -> Segments:
    """Write each row's new key and value at its position: int32 `[B]`, or `[]` if all rows have the same.

    In the segments that do not have the position, an element is replaced by itself.
    """
    if kernel and k_BKH is None:
        v_BKH = _pad(v_BKH)
    new = _round(k_BKH, v_BKH) if isinstance(segments[0].v_XKSH, Quantized) else Segment(k_BKH, v_BKH)
    if kernel:
        return (jax.tree.map(partial(write_positions, position=position), segments[0], new),)
    first, written = 0, []
    for segment in segments:
        written.append(_write_segment(segment, new, position - first))
        first += segment.v_XKSH.shape[2]
    return tuple(written)


def _write_segment(segment: Segment, new: Segment, position: Array) -> Segment:
    """Write the new keys and values to the segment, where their position is within it."""
    size = segment.v_XKSH.shape[2]
    place, within = jnp.clip(position, 0, size - 1), (position >= 0) & (position < size)

    def put(cache: Array, x: Array, axis: int) -> Array:
        return _write_array(cache, jnp.expand_dims(x, axis), place, within, axis)

    return Segment(
        jax.tree.map(lambda cache, x: put(cache, x, axis=x.ndim), segment.k_XKHS, new.k_XKHS),
        jax.tree.map(lambda cache, x: put(cache, x, axis=2), segment.v_XKSH, new.v_XKSH),
    )


def write_block(
    segments: Segments, k_BKMH: Array | None, v_BKMH: Array, first_B: Array, count_B: Array, *, kernel: bool
) -> Segments:
    """Write the first `count_B` of each row's M new keys and values from its position `first_B` on.

    Both are int32 `[B]`. Row after row, M positions are updated in place: positions that get none do not change.
    """
    dtype: SamplerDtype = "int8" if isinstance(segments[0].v_XKSH, Quantized) else "auto"
    new = make_segment(k_BKMH, v_BKMH, dtype, kernel=kernel)

    def put_row(b: Array, segments: Segments) -> Segments:
        begin, written = 0, []
        for segment in segments:
            put = partial(_put_block, row=b, first=first_B[b] - begin, count=count_B[b])
            keys = jax.tree.map(partial(put, transposed=not kernel), segment.k_XKHS, new.k_XKHS)
            written.append(Segment(keys, jax.tree.map(put, segment.v_XKSH, new.v_XKSH)))
            begin += segment.v_XKSH.shape[2]
        return jax.tree.map(unstable.row_major, tuple(written)) if kernel else tuple(written)

    return lax.fori_loop(0, len(first_B), put_row, segments)


def _put_block(
    cache_B: Array, new_B: Array, *, row: Array, first: Array, count: Array, transposed: bool = False
) -> Array:
    """Write one array of `write_block`: [B, K, S, H], [B, K, H, S] if transposed, or [B, K, S]."""
    axis = new_B.ndim - 1 if transposed else 2  # of positions
    M = min(cache_B.shape[axis], new_B.shape[axis])
    start = jnp.clip(first, 0, cache_B.shape[axis] - M)
    number_M = start - first + jnp.arange(M)  # of the new ones
    is_new_M = jnp.expand_dims((number_M >= 0) & (number_M < count), range(1, new_B.ndim - axis))
    place: list[Array | int] = [row, *[0] * (new_B.ndim - 1)]
    place[axis] = start
    moved = jnp.take(lax.dynamic_slice_in_dim(new_B, row, 1), number_M, axis=axis, mode="clip")
    old = lax.dynamic_slice(cache_B, place, moved.shape)
    return lax.dynamic_update_slice(cache_B, jnp.where(is_new_M, moved, old), place)


def _write_array(cache: Array, new: Array, place: Array, within: Array, axis: int) -> Array:
    if place.ndim == 0:
        old = lax.dynamic_slice_in_dim(cache, place, 1, axis)
        return lax.dynamic_update_slice_in_dim(cache, jnp.where(within, new, old), place, axis)

    def write_row(cache: Array, new: Array, place: Array) -> Array:
        return cache.at[(slice(None),) * (axis - 1) + (place,)].set(new.squeeze(axis - 1), mode="drop")

    return jax.vmap(write_row)(cache, new, jnp.where(within, place, cache.shape[axis]))


def attend(
    q_BNH: Array, segments: Segments, start_B: Array, stop_B: Array, row_B: Array | None = None, *, kernel: bool
) -> tuple[Array, Array]:
    """Run `decode_attention` over consecutive segments; without the kernel, all of the first segment is read."""
    if kernel and segments[0].k_XKHS is None:
        H, padded_BNH = q_BNH.shape[-1], _pad(q_BNH)
        scaled_BNH = padded_BNH * (padded_BNH.shape[-1] / H) ** 0.5  # the kernel divides by the root of its width
        context_BNH, logsumexp_BN = decode_attention(scaled_BNH, *segments[0], start_B, stop_B, row_B)
        return context_BNH[..., :H], logsumexp_BN
    if kernel:
        return decode_attention(q_BNH, *segments[0], start_B, stop_B, row_B)
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
    v_BKSH, v_BKS = unpack(of_rows.v_XKSH, q_BNH.dtype)
    if of_rows.k_XKHS is None:
        keys, k_BKHS, k_BKS = "bksh", v_BKSH, v_BKS
    else:
        keys, (k_BKHS, k_BKS) = "bkhs", unpack(of_rows.k_XKHS, q_BNH.dtype)
    score_BKRS = jnp.einsum(f"bkrh,{keys}->bkrs", q_BKRH, k_BKHS, preferred_element_type=jnp.float32) * H**-0.5
    score_BKRS = score_BKRS if k_BKS is None else score_BKRS * k_BKS[:, :, None]
    position_1S = jnp.arange(S)[None]
    active_BS = (position_1S >= start_B[:, None]) & (position_1S < stop_B[:, None])
    score_BKRS = jnp.where(active_BS[:, None, None], score_BKRS, MASKED)
    top_BKR1 = score_BKRS.max(axis=-1, keepdims=True)
    weight_BKRS = jnp.exp(score_BKRS - top_BKR1)
    sum_BKR1 = weight_BKRS.sum(axis=-1, keepdims=True)
    weight_BKRS = weight_BKRS if v_BKS is None else weight_BKRS * v_BKS[:, :, None]
    context_BKRH = jnp.einsum(
        "bkrs,bksh->bkrh", weight_BKRS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )
    logsumexp_BKR1 = top_BKR1 + jnp.log(sum_BKR1)
    return (context_BKRH / sum_BKR1).reshape(B, N, H), logsumexp_BKR1.reshape(B, N)
