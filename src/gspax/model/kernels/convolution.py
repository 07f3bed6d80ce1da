"""A short causal convolution of each channel, within the segments of packed rows.

Axes: B rows, T tokens, J inputs before a token that the convolution reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gspax.types import Array


def convolve(
    x_BT: Array,
    weight: Array,
    segment_BT: Array,
    before_BJ: Array | None = None,
    *prefix_BT: Array,
    bias: Array | float = 0.0,
) -> tuple[Array, Array]:
    """Convolve each channel causally, within segments.

    Args:
      x_BT: the inputs [B, T, ...]; the axes after T are the channels.
      weight: [..., J + 1], for the J inputs before a token and its own input, the oldest first.
      segment_BT: int32; 0 is padding, and only after a row's tokens.
      before_BJ: the inputs before the row [B, J, ...], which its first segment continues; None: zeros.
      prefix_BT: as in `chunked_rule`, or nothing: the inputs before a segment are its prefix's last ones. Without
        `before_BJ`.
      bias: of the channels [...], in x's dtype.

    Returns:
      The outputs in float32, and for rows with one segment the last J inputs, `before` of the next call: for a row
      without tokens its own `before`, bit for bit.
    """
    (B, T), J = x_BT.shape[:2], weight.shape[-1] - 1
    channels = (1,) * (x_BT.ndim - 2)
    before_BJ = jnp.zeros((B, J, *x_BT.shape[2:]), x_BT.dtype) if before_BJ is None else before_BJ.astype(x_BT.dtype)
    inputs = jnp.concatenate([before_BJ, x_BT], axis=1)
    if not prefix_BT:
        segments = jnp.concatenate([jnp.broadcast_to(segment_BT[:, :1], (B, J)), segment_BT], axis=1)
        read = [(segments[:, tap : tap + T] == segment_BT, inputs[:, tap : tap + T]) for tap in range(J + 1)]
    else:
        places = earlier_places(segment_BT, prefix_BT[0], J)
        moved = [jnp.take_along_axis(x_BT, jnp.maximum(each, 0).reshape(B, T, *channels), axis=1) for each in places]
        read = [*((each >= 0, x) for each, x in zip(places, moved, strict=True)), (segment_BT == segment_BT, x_BT)]
    y_BT = jnp.broadcast_to(jnp.asarray(bias, jnp.float32), x_BT.shape)
    for tap, (is_read_BT, input_BT) in enumerate(read):
        weighted = input_BT.astype(jnp.float32) * weight[None, None, ..., tap].astype(jnp.float32)
        y_BT += jnp.where(is_read_BT.reshape(B, T, *channels), weighted, 0.0)
    last_BJ = (segment_BT > 0).sum(axis=1)[:, None] + jnp.arange(J)[None]
    after_BJ = jnp.take_along_axis(inputs, last_BJ.reshape(B, J, *channels), axis=1)
    return y_BT, after_BJ


def earlier_places(segment_BT: Array, prefix_BT: Array, count: int) -> list[Array]:
    """Return where the input `count`, ..., 2, 1 before each token is, in its segment and prefix; -1: nowhere."""
    index_1T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)[None]
    is_first_BT = segment_BT != jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)))
    # a segment's prefix is the last segment before it that has none
    root_BT = jax.lax.cummax(jnp.where((prefix_BT == 0) & (segment_BT > 0), index_1T, -1), axis=1)
    before_BT = jnp.where(is_first_BT, jnp.where(prefix_BT > 0, root_BT, -1), index_1T - 1)
    places = [before_BT]
    for _ in range(1, count):
        further_BT = jnp.take_along_axis(before_BT, jnp.maximum(places[0], 0), axis=1)
        places.insert(0, jnp.where(places[0] >= 0, further_BT, -1))
    return places
