"""Attention over whole rows on TPU: JAX's splash attention (Pallas), fitted to rows of any length.

The kernel works in blocks and skips those that the causal mask and the window leave empty; segments are compared inside
it. Nothing of size T·S is ever held, forward or backward. Lengths are filled up to whole blocks: filled keys stand
behind every query, filled queries repeat the last one's view and are cut off.

A row may be split over devices in time: `shards` equal stretches of queries, each against all keys. Which blocks a
device works at is then its part of three small tables, the `Masks`, that go through `shard_map` with the arrays.

Letters: B rows, T queries of a device, S keys, N query heads, K key heads, H head.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from gspax.unstable import LocalMask, MultiHeadMask, splash

LANES = 128  # lengths are filled up to a multiple of this
BLOCKS = (512, 384, 256, 128)  # the largest that divides the filled length is used

Masks = splash.SplashAttentionKernel  # a pytree of the tables, and how to run the kernel on them


class _Window(LocalMask):
    """Knows at once of most blocks that all of it is seen, or nothing: rows are long, and all blocks are asked for."""

    def __getitem__(self, index):
        position_T, keys = self.q_sequence[index[0]], index[1]
        first, last, back = position_T[0], position_T[-1], self.window_size[0]  # positions never fall
        shape = (len(position_T), keys.stop - keys.start)
        if keys.start > last or keys.stop <= first - back:
            return np.zeros(shape, bool)
        if keys.stop <= first + 1 and keys.start >= last - back:
            return np.ones(shape, bool)
        return super().__getitem__(index)


def window_mask(T: int, shards: int, window: int) -> LocalMask:
    """Which key a query sees, by position: each of the stretches of T queries filled up with its last one."""
    filled = _filled(T)
    position = np.arange(filled * shards, dtype=np.int32)
    mask = _Window((filled * shards, _filled(T * shards)), window_size=(window - 1, 0), offset=0)
    mask.q_sequence = position // filled * T + np.minimum(position % filled, T - 1)
    return mask


@lru_cache
def masks(T: int, shards: int, heads: int, window: int, interpret: bool = False) -> Masks:
    """The tables for queries of T·shards positions, T on each device, that see `window` positions, themselves included.

    Args:
      heads: query heads on one device.
      interpret: run by Pallas' interpreter, on any platform.
    """
    mask = window_mask(T, shards, window)
    q, kv = _block(_filled(T)), _block(_filled(T * shards))
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
    with jax.ensure_compile_time_eval():  # constants, whoever is tracing
        return splash.make_splash_mha(
            MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=shards,
            interpret=interpret,
        )


def masks_spec(tables: Masks, mesh: jax.sharding.Mesh, time: str | tuple[str, ...] | None) -> Masks:
    """How the tables are split by `shard_map` where rows are split in time over these axes of the mesh."""
    return tables.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, time)))


def attend(tables: Masks, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, segment_BT: Array, segment_BS: Array) -> Array:
    """softmax(q k / √H) v over the keys of a query's own segment and window: `[B, T, N, H]` in q's dtype."""
    T, S, H = q_BTNH.shape[1], k_BSKH.shape[1], q_BTNH.shape[3]
    fill_T, fill_S = _filled(T) - T, _filled(S) - S

    def heads_first(x_BTNH: Array, fill: int) -> Array:
        return jnp.pad(x_BTNH, ((0, 0), (0, fill), (0, 0), (0, 0))).swapaxes(1, 2)

    def one_row(q_NTH, k_KSH, v_KSH, segment_T, segment_S):
        return tables(q_NTH, k_KSH, v_KSH, segment_ids=splash.SegmentIds(q=segment_T, kv=segment_S))

    context_BNTH = jax.vmap(one_row)(
        heads_first(q_BTNH * jnp.asarray(H**-0.5, q_BTNH.dtype), fill_T),
        heads_first(k_BSKH, fill_S),
        heads_first(v_BSKH, fill_S),
        jnp.pad(segment_BT, ((0, 0), (0, fill_T)), mode="edge"),
        jnp.pad(segment_BS, ((0, 0), (0, fill_S)), mode="edge"),
    )
    return context_BNTH[:, :, :T].swapaxes(1, 2)


def _filled(length: int) -> int:
    return -(-length // LANES) * LANES


def _block(length: int) -> int:
    return next(block for block in BLOCKS if length % block == 0)
