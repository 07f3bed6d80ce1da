"""Attention of one new token per slot to the live positions of a cache.

A slot's keys and values are `[K, T, H]`; of the T positions those from `start` to `stop` are live, whatever the other
slots hold. Two implementations give the same result. Which one is used depends on the platform that the program is
lowered for:

- `tpu_kernel`, on TPU: a Pallas kernel that fetches only the blocks with live positions of each slot. The query heads
  of all key heads are computed together, so a block is read once.
- `portable`, elsewhere: a loop over blocks, up to the last live position of any slot.

Both keep a running maximum and sum per query head (online softmax) in float32, so nothing of the cache's size is
written. The log-sum-exp of the scores is returned too: parts of a context that are stored apart, such as a prompt
shared by a group and each sample's own completion, are attended to one by one and merged (`merge_parts`).

JAX's own paged attention kernels for TPU serve a page table, which contiguous slots do not need; they return no
log-sum-exp.

Axes: B slots, N query heads, K key heads, R = N/K, T positions of a slot, H head.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax import unstable
from gspax.kernels.attention import MASKED
from gspax.kernels.expert_ffn import vary_alike

BLOCK = 512  # positions; of 4 key heads of 128 bfloat16 numbers, 0.5 MB each of keys and values
NAME = "decode_attention"  # of the kernel in compiled programs
TINY = 1e-37  # instead of a sum of no weights


class Part(NamedTuple):
    """Attention to part of a context."""

    context_BNH: Array  # float32, normalised within the part; zeros if nothing is live
    logsumexp_BN: Array  # float32, of the scores; about -1e30 if nothing is live


def decode_attention(
    q_BNH: Array, k_BKTH: Array, v_BKTH: Array, length_B: Array, *, window: int | None = None
) -> Array:
    """softmax(q k / √H) v over the first `length_B` positions of each slot: context_BNH in q's dtype.

    Args:
      length_B: int32 in [0, T], the new token included; a slot of length 0 gives zeros.
      window: how many of the last positions are attended to; default: all.
    """
    start_B = jnp.zeros_like(length_B) if window is None else jnp.maximum(length_B - window, 0)
    return attend_part(q_BNH, k_BKTH, v_BKTH, start_B, length_B).context_BNH.astype(q_BNH.dtype)


def attend_part(q_BNH: Array, k_BKTH: Array, v_BKTH: Array, start_B: Array, stop_B: Array) -> Part:
    """Attention to the positions from `start_B` to `stop_B`, the latter excluded.

    Scores are accumulated in float32, and so are the contexts. Query heads that share a key head are adjacent; a
    caller whose samples share a prompt passes the queries of a whole group as the heads of one slot.

    Raises:
      ValueError: the number of key heads does not divide that of the query heads.
    """
    B, N, H = q_BNH.shape
    K = k_BKTH.shape[1]
    if N % K:
        raise ValueError(f"decode_attention: wanted query heads in multiples of the {K} key heads, got {N}")
    q_BKRH = q_BNH.reshape(B, K, N // K, H)
    context_BKRH, logsumexp_BKR = lax.platform_dependent(
        q_BKRH, k_BKTH, v_BKTH, start_B, stop_B, tpu=tpu_kernel, default=portable
    )
    return Part(context_BKRH.reshape(B, N, H), logsumexp_BKR.reshape(B, N))


def merge_parts(*parts: Part) -> Array:
    """Attention to all parts together: context_BNH, float32."""
    logsumexp_PBN = jnp.stack([part.logsumexp_BN for part in parts])
    weight_PBN = jax.nn.softmax(logsumexp_PBN, axis=0)
    context_PBNH = jnp.stack([part.context_BNH for part in parts])
    return (context_PBNH * weight_PBN[..., None]).sum(axis=0)


def write_position(cache_BKTH: Array, new_BKH: Array, position_B: Array) -> Array:
    """The cache with one new position in each slot.

    Written as a mapped `dynamic_update_slice`, which XLA runs in place on TPU and in the kernel's layout. A scatter by
    index prefers another layout and copies the cache back and forth for every token.
    """

    def write(cache_KTH: Array, new_KH: Array, position: Array) -> Array:
        return lax.dynamic_update_slice(cache_KTH, new_KH[:, None].astype(cache_KTH.dtype), (0, position, 0))

    return jax.vmap(write)(cache_BKTH, new_BKH, position_B)


def block_size(T: int) -> int:
    """Positions of a block, for slots of T positions."""
    return min(BLOCK, T)


def live_positions(T: int, stop: int, start: int = 0) -> int:
    """Positions that the kernel fetches of a slot whose live ones are `start` to `stop`: whole blocks, at least one."""
    block = block_size(T)
    last = max(stop - 1, 0) // block
    return (last - min(start // block, last) + 1) * block


# --- portable --------------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """The online softmax after some blocks, of all slots or (in the kernel, without the axis B) of one."""

    largest_BKR1: Array
    sum_BKR1: Array
    context_BKRH: Array

    @staticmethod
    def begin(q_BKRH: Array) -> _Running:
        zero_BKRH = jnp.zeros_like(q_BKRH, jnp.float32)
        return _Running(zero_BKRH[..., :1] + MASKED, zero_BKRH[..., :1], zero_BKRH)


def _add_block(before: _Running, q_BKRH: Array, k_BKCH: Array, v_BKCH: Array, live_B11C: Array) -> _Running:
    """One step of the online softmax, for a block of C positions; in the kernel all arrays are without the axis B."""
    score_BKRC = jnp.einsum("...rh,...ch->...rc", q_BKRH, k_BKCH, preferred_element_type=jnp.float32)
    score_BKRC = jnp.where(live_B11C, score_BKRC * q_BKRH.shape[-1] ** -0.5, MASKED)
    largest_BKR1 = jnp.maximum(before.largest_BKR1, score_BKRC.max(axis=-1, keepdims=True))
    weight_BKRC = jnp.where(live_B11C, jnp.exp(score_BKRC - largest_BKR1), 0.0)
    scale_BKR1 = jnp.exp(before.largest_BKR1 - largest_BKR1)
    added_BKRH = jnp.einsum(
        "...rc,...ch->...rh", weight_BKRC.astype(v_BKCH.dtype), v_BKCH, preferred_element_type=jnp.float32
    )
    return _Running(
        largest_BKR1,
        before.sum_BKR1 * scale_BKR1 + weight_BKRC.sum(axis=-1, keepdims=True),
        before.context_BKRH * scale_BKR1 + added_BKRH,
    )


def portable(q_BKRH: Array, k_BKTH: Array, v_BKTH: Array, start_B: Array, stop_B: Array) -> tuple[Array, Array]:
    """`attend_part` on any platform, with grouped heads: context_BKRH and logsumexp_BKR."""
    T = k_BKTH.shape[2]
    block = block_size(T)

    def add(i, running):
        first = jnp.minimum(i * block, T - block)  # the last block may overlap the one before it
        position_1C = first + jnp.arange(block)[None]
        live_BC = (position_1C >= jnp.maximum(start_B, i * block)[:, None]) & (position_1C < stop_B[:, None])
        k_BKCH, v_BKCH = (lax.dynamic_slice_in_dim(x, first, block, axis=2) for x in (k_BKTH, v_BKTH))
        return _add_block(running, q_BKRH, k_BKCH, v_BKCH, live_BC[:, None, None])

    begin = _Running(*(vary_alike(x, q_BKRH, k_BKTH, stop_B)[0] for x in _Running.begin(q_BKRH)))
    end = add(0, begin) if block == T else lax.fori_loop(0, -(-stop_B.max() // block), add, begin)
    return _normalise(end)


def _normalise(running: _Running) -> tuple[Array, Array]:
    sum_BKR1 = jnp.maximum(running.sum_BKR1, TINY)
    return running.context_BKRH / sum_BKR1, (running.largest_BKR1 + jnp.log(sum_BKR1))[..., 0]


# --- tpu -------------------------------------------------------------------------------------------------------------


def tpu_kernel(
    q_BKRH: Array, k_BKTH: Array, v_BKTH: Array, start_B: Array, stop_B: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """`portable` as a kernel for TPU; with `interpret`, on any platform.

    The grid is slots x blocks up to the longest slot's last. Blocks outside a slot's live positions are mapped to its
    nearest live one, which is in place already, so they are not fetched.
    """
    pl, pltpu = unstable.pallas(), unstable.pallas_tpu()
    B, K, R, H = q_BKRH.shape
    T = k_BKTH.shape[2]
    block = block_size(T)

    def live_block(b, i, start_B, stop_B):
        last = lax.div(jnp.maximum(stop_B[b] - 1, 0), block)
        return b, 0, jnp.clip(i, jnp.minimum(lax.div(start_B[b], block), last), last), 0

    def slot(b, i, *_):
        return b, 0, 0, 0

    # Computed, not stated: under shard_map the type includes the axes that the result varies over.
    out_shape = jax.eval_shape(lambda: _results_like(q_BKRH, k_BKTH, stop_B))
    blocks = jnp.maximum(lax.div(stop_B.max() + (block - 1), block), 1)
    context_BKRH, logsumexp_BKR1 = pl.pallas_call(
        partial(_kernel, block=block, T=T),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, blocks),
            in_specs=[
                pl.BlockSpec((None, K, R, H), slot),
                pl.BlockSpec((None, K, block, H), live_block),
                pl.BlockSpec((None, K, block, H), live_block),
            ],
            out_specs=[pl.BlockSpec((None, K, R, H), slot), pl.BlockSpec((None, K, R, 1), slot)],
            scratch_shapes=[pltpu.VMEM((K, R, size), jnp.float32) for size in (1, 1, H)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name=NAME,
        interpret=interpret,
    )(start_B.astype(jnp.int32), stop_B.astype(jnp.int32), q_BKRH, k_BKTH, v_BKTH)
    return context_BKRH, logsumexp_BKR1[..., 0]


def _results_like(q_BKRH: Array, k_BKTH: Array, stop_B: Array) -> tuple[Array, Array]:
    context_BKRH = vary_alike(jnp.zeros_like(q_BKRH, jnp.float32), q_BKRH, k_BKTH, stop_B)[0]
    return context_BKRH, context_BKRH[..., :1]


def _kernel(start_B, stop_B, q_ref, k_ref, v_ref, *refs, block, T):
    """One block of one slot. `refs` are the results (context, log-sum-exp) and the running state, in VMEM."""
    pl = unstable.pallas()
    context_ref, logsumexp_ref, *running_refs = refs
    b, i = pl.program_id(0), pl.program_id(1)
    start, stop = start_B[b], stop_B[b]

    def write(values):
        for ref, value in zip(running_refs, values, strict=True):
            ref[...] = value

    @pl.when(i == 0)
    def _():
        write(_Running.begin(q_ref[...]))

    @pl.when((i * block < stop) & ((i + 1) * block > start))
    def _():
        running = _Running(*(ref[...] for ref in running_refs))
        position_11C = i * block + lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
        live_11C = (position_11C >= start) & (position_11C < stop)
        v = v_ref[...]
        if T % block:  # what lies past the end is undefined and may not be finite
            row = i * block + lax.broadcasted_iota(jnp.int32, v.shape, 1)
            v = jnp.where(row < T, v, 0)
        write(_add_block(running, q_ref[...], k_ref[...], v, live_11C))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        context, logsumexp = _normalise(_Running(*(ref[...] for ref in running_refs)))
        context_ref[...] = context
        logsumexp_ref[...] = logsumexp[..., None]
