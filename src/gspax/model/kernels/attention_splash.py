"""Attention over whole rows on TPU: JAX's splash attention (Pallas), for rows of any length.

The kernel works in blocks and skips those that the causal mask and the window leave empty; it compares segments itself.
Nothing of size T·S exists, forward or backward. Lengths are padded to whole blocks: padding keys come after every
query, padding queries attend like the last real one and are dropped.

A row's time may be sharded over devices: `shards` equal chunks of queries, each against all keys. Which blocks a device
computes is then its shard of three small tables, the `Masks`, which go through `shard_map` with the arrays.

Axes: B rows, T queries of a device, S keys, N query heads, K key heads, H head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspax import unstable

LANES = 128  # lengths are padded to a multiple of this
BLOCKS = (512, 384, 256, 128)  # the largest that divides the padded length is used

splash, splash_mask = unstable.splash_attention_kernel(), unstable.splash_attention_mask()
LocalMask: Any = splash_mask.LocalMask
Masks: TypeAlias = Any  # splash.SplashAttentionKernel: a pytree of tables that is callable, the kernel


class _Window(LocalMask):
    """Recognises empty and full blocks by their bounds: rows are long, and every block of the mask is read."""

    def __getitem__(self, index):
        position_T, keys = self.q_sequence[index[0]], index[1]
        first, last, back = position_T[0], position_T[-1], self.window_size[0]  # positions never decrease
        shape = (len(position_T), keys.stop - keys.start)
        if keys.start > last or keys.stop <= first - back:
            return np.zeros(shape, bool)
        if keys.stop <= first + 1 and keys.start >= last - back:
            return np.ones(shape, bool)
        return super().__getitem__(index)


def window_mask(T: int, shards: int, window: int) -> _Window:
    """Which keys a query attends to, by position; each chunk of T queries is padded by repeating its last position."""
    padded = _padded(T)
    position = np.arange(padded * shards, dtype=np.int32)
    mask = _Window((padded * shards, _padded(T * shards)), window_size=(window - 1, 0), offset=0)
    mask.q_sequence = position // padded * T + np.minimum(position % padded, T - 1)
    return mask


@lru_cache
def masks(T: int, shards: int, heads: int, window: int, interpret: bool = False) -> Masks:
    """The tables for T·shards queries, T on each device, that attend to `window` positions, their own included.

    Args:
      heads: query heads on one device.
      interpret: run in Pallas' interpreter, on any platform.
    """
    mask = window_mask(T, shards, window)
    q, kv = _block(_padded(T)), _block(_padded(T * shards))
    blocks = splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    with jax.ensure_compile_time_eval():  # the tables are constants, also while tracing
        return splash.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=shards,
            interpret=interpret,
        )


def masks_spec(tables: Masks, mesh: jax.sharding.Mesh, time: str | tuple[str, ...] | None) -> Masks:
    """`shard_map` specs of the tables where time is sharded over these mesh axes."""
    automatic = Mesh(mesh.devices, mesh.axis_names)  # the shape of a shard is not defined where an axis is manual
    return tables.manual_sharding_spec(NamedSharding(automatic, PartitionSpec(None, time)))


def attend(
    tables: Masks,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segment_BT: Array,
    segment_BS: Array,
    *,
    prefix_BT: Array | None = None,
) -> Array:
    """softmax(q k / √H) v over the keys of a query's own segment and window: `[B, T, N, H]` in q's dtype.

    With `prefix_BT`, also over those of another segment before it, or of none where that is 0.
    """
    T, S, H = q_BTNH.shape[1], k_BSKH.shape[1], q_BTNH.shape[3]
    pad_T, pad_S = _padded(T) - T, _padded(S) - S

    def heads_first(x_BTNH: Array, padding: int) -> Array:
        return jnp.pad(x_BTNH, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)

    def one_row(q_NTH, k_KSH, v_KSH, segment_T, prefix_T, segment_S):
        own = splash.SegmentIds(q=segment_T, kv=segment_S)
        if prefix_T is None:
            return tables(q_NTH, k_KSH, v_KSH, segment_ids=own)
        earlier = splash.SegmentIds(q=jnp.where(prefix_T > 0, prefix_T, -1), kv=segment_S)
        return _attend_to_both(tables, q_NTH, k_KSH, v_KSH, (own, earlier))

    def pad(segment: Array | None, padding: int) -> Array | None:
        return None if segment is None else jnp.pad(segment, ((0, 0), (0, padding)), mode="edge")

    scaled_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    context_BNTH = jax.vmap(one_row)(
        heads_first(scaled_BTNH, pad_T),
        heads_first(k_BSKH, pad_S),
        heads_first(v_BSKH, pad_S),
        *(pad(segment_BT, pad_T), pad(prefix_BT, pad_T), pad(segment_BS, pad_S)),
    )
    return context_BNTH[:, :, :T].swapaxes(1, 2)


@jax.custom_vjp
def _attend_to_both(tables: Masks, q_NTH: Array, k_KSH: Array, v_KSH: Array, segments: tuple[Any, Any]) -> Array:
    """The kernel's result over the keys that either of two pairs of segments allows, none of them by both.

    The kernel compares segments for equality only. So it runs twice, and the two softmaxes are merged. Its backward
    pass takes the log-sum-exp of all keys; with that of both, each half gives its part of the gradient.
    """
    return _merge_both(tables, q_NTH, k_KSH, v_KSH, segments)[0]


def _merge_both(tables, q_NTH, k_KSH, v_KSH, segments) -> tuple[Array, Array]:
    saving = type(tables)(*tables.tree_flatten()[0], **tables.kwargs | {"save_residuals": True})
    halves = [saving(q_NTH, k_KSH, v_KSH, segment_ids=each) for each in segments]
    # A query without a key has a log-sum-exp near the least float32, and so no weight.
    total_NT = jnp.logaddexp(*(logsumexp_NT for _, (logsumexp_NT,) in halves))
    parts = [x_NTH * jnp.exp(logsumexp_NT - total_NT)[..., None] for x_NTH, (logsumexp_NT,) in halves]
    return (parts[0] + parts[1]).astype(q_NTH.dtype), total_NT


def _both_forward(tables, q_NTH, k_KSH, v_KSH, segments):
    context_NTH, total_NT = _merge_both(tables, q_NTH, k_KSH, v_KSH, segments)
    return context_NTH, (tables, q_NTH, k_KSH, v_KSH, segments, context_NTH, total_NT)


def _both_backward(kept, dcontext_NTH):
    tables, q_NTH, k_KSH, v_KSH, segments, context_NTH, total_NT = kept
    options, masks = dict(tables.kwargs), (tables.dq_mask_info, tables.dkv_mask_info)

    def gradients(each):
        residuals = (q_NTH, k_KSH, v_KSH, each, None, context_NTH, total_NT, *masks)
        return splash._splash_attention_bwd(**options, res=residuals, do=dcontext_NTH)[3:6]

    return None, *(own + earlier for own, earlier in zip(*map(gradients, segments), strict=True)), None


_attend_to_both.defvjp(_both_forward, _both_backward)


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES


def _block(length: int) -> int:
    return next(block for block in BLOCKS if length % block == 0)
