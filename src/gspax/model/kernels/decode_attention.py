"""Attention of one query per row to the active positions of a cache, which is read in place, for TPU.

A sample attends to its prompt, which all samples of the prompt share, and to its own completion. Each part is one call
of `decode_attention`; `merge` makes one softmax of the two. `segments` does the same on other devices.

A Pallas kernel fetches only the blocks with active positions of each row. The query heads of all key heads are computed
together, so a block is read once. It keeps a running maximum and sum per query head (online softmax) in float32, so
nothing of the cache's size is written. JAX's own paged attention for TPU serves a page table, which rows without pages
do not need, and returns no log-sum-exp.

Axes: B rows with one query each, X rows of the cache, N query heads, K key heads, R = N/K, T cache positions, H head.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax import unstable
from gspax.model.kernels.expert_ffn import vary_alike
from gspax.model.kernels.online_softmax import OnlineSoftmax
from gspax.model.kernels.quantization import Quantized
from gspax.model.kernels.weights import Weight

KERNEL = "decode_attention"  # its name in compiled programs
KERNEL_BLOCK = 512  # positions; of 4 key heads of 128 bfloat16 numbers, 0.5 MB each of keys and values
Ref: TypeAlias = Any  # a Pallas reference to memory


def decode_attention(
    q_BNH: Array,
    k_XKTH: Weight | None,
    v_XKTH: Weight,
    start_B: Array,
    stop_B: Array,
    row_B: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute softmax(q k / √H) v over positions start ≤ t < stop: context_BNH and logsumexp_BN, both float32.

    Not differentiable. On a mesh, call it inside `jax.shard_map`: the partitioner does not partition the kernel.

    Args:
      q_BNH: float32 or bfloat16; query head n reads key head n // R. Rows that attend to the same positions of one
        cache row may be passed as one row of more heads.
      k_XKTH: in q's dtype, or a `Quantized` with a scale [X, K, T]. Positions that no row sees may hold anything
        finite. None: the values are the keys too, and are read once (latent attention).
      v_XKTH: as k_XKTH.
      start_B: int32, in [0, T].
      stop_B: int32, in [0, T]. Where it is at most `start_B`, the context is 0 and the logsumexp about -1e30, so that
        `merge` drops the row's part.
      row_B: int32, the cache row that each query reads; None: row b reads cache row b, and X = B.
      interpret: run the kernel in Pallas' interpreter, on any platform.

    Raises:
      ValueError: the number of key heads does not divide the number of query heads.
    """
    (B, N, H), K = q_BNH.shape, v_XKTH.shape[1]
    if N % K:
        raise ValueError(f"decode_attention: wanted query heads in multiples of the {K} key heads, got {N}")
    row_B = jnp.arange(B) if row_B is None else row_B
    bounds = tuple(x.astype(jnp.int32) for x in (row_B, start_B, stop_B))
    context_BKRH, logsumexp_BKR1 = _call_kernel(q_BNH.reshape(B, K, N // K, H), k_XKTH, v_XKTH, bounds, interpret)
    return context_BKRH.reshape(B, N, H), logsumexp_BKR1.reshape(B, N)


def merge(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge two results of `decode_attention` for the same queries into the result over both sets of positions."""
    (first_BNH, first_BN), (second_BNH, second_BN) = first, second
    share_BN1 = jax.nn.sigmoid(first_BN - second_BN)[..., None]
    return share_BN1 * first_BNH + (1 - share_BN1) * second_BNH, jnp.logaddexp(first_BN, second_BN)


def write_positions(cache_BKTH: Array, new_BKH: Array, position: Array) -> Array:
    """Write a new key or value at each row's position into the cache, or into a `Quantized` one's scales [B, K, T].

    The positions are int32 `[B]`, or `[]` if it is one for all rows. A mapped `dynamic_update_slice` runs in place on
    TPU, in the kernel's layout. For a scatter by index XLA picks another layout, and copies the cache there and back
    for every token.
    """
    if position.ndim == 0:
        return lax.dynamic_update_slice_in_dim(cache_BKTH, new_BKH[:, :, None], position, axis=2)

    def write(cache_KTH: Array, new_KH: Array, position: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(cache_KTH, new_KH[:, None].astype(cache_KTH.dtype), position, axis=1)

    return jax.vmap(write)(cache_BKTH, new_BKH, position)


def fetched_positions(T: int, stop: int, start: int = 0) -> int:
    """Count the positions that the kernel fetches of a row active in start ≤ t < stop: whole blocks, at least one."""
    block = min(KERNEL_BLOCK, T)
    last = max(stop - 1, 0) // block
    return (last - min(start // block, last) + 1) * block


def _call_kernel(
    q_BKRH: Array, k_XKTH: Weight | None, v_XKTH: Weight, bounds: tuple[Array, ...], interpret: bool
) -> tuple[Array, Array]:
    """Run `decode_attention` with grouped heads: context_BKRH, logsumexp_BKR1. `bounds` are row, start and stop.

    The grid is rows x blocks, up to the last block of the longest row. Blocks outside a row's active positions are
    mapped to its nearest active one, which is on chip already, so they are not fetched.
    """
    pl, pltpu = unstable.pallas()
    (B, K, R, H), T = q_BKRH.shape, v_XKTH.shape[2]
    block = min(KERNEL_BLOCK, T)

    def active_block(b: Array, i: Array, row_B: Array, start_B: Array, stop_B: Array) -> tuple[Array | int, ...]:
        last = lax.div(jnp.maximum(stop_B[b] - 1, 0), block)
        return row_B[b], 0, jnp.clip(i, jnp.minimum(lax.div(start_B[b], block), last), last), 0

    def own_row(b: Array, *_: Array) -> tuple[Array | int, ...]:
        return b, 0, 0, 0

    in_row = [pl.BlockSpec((None, K, R, size), own_row) for size in (H, 1)]
    in_cache = pl.BlockSpec((None, K, block, H), active_block)

    def results() -> tuple[Array, Array]:  # computed: under shard_map their type has the axes that they vary over
        context_BKRH = vary_alike(jnp.zeros_like(q_BKRH, jnp.float32), q_BKRH, values[0], bounds[2])[0]
        return context_BKRH, context_BKRH[..., :1]

    # The operands with four axes (see `tools.aot.hlo`) are queries and the numbers of keys and values.
    cached = [x for x in (k_XKTH, v_XKTH) if x is not None]
    scales = [x.scale for x in cached if isinstance(x, Quantized)]
    values = [x.values if isinstance(x, Quantized) else x for x in cached]
    # Otherwise XLA copies whole caches to the core's memory and back for every token, where that has room (v6e).
    read = values if interpret else [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in values]
    in_scales = pl.BlockSpec((None, K, block), lambda *args: active_block(*args)[:3])
    return pl.pallas_call(
        partial(_kernel, block=block, T=T, scales=len(scales), caches=len(values)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, jnp.maximum(lax.div(bounds[2].max() + (block - 1), block), 1)),
            in_specs=[*(in_scales for _ in scales), in_row[0], *(in_cache for _ in values)],
            out_specs=in_row,
            scratch_shapes=[pltpu.VMEM((K, R, size), jnp.float32) for size in (1, 1, H)],
        ),
        out_shape=jax.eval_shape(results),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name=KERNEL,
        interpret=interpret,
    )(*bounds, *scales, q_BKRH, *read)


def _kernel(row_B: Ref, start_B: Ref, stop_B: Ref, *refs: Ref, block: int, T: int, scales: int, caches: int) -> None:
    """Process a block of a row. `refs`, in VMEM: scales of keys and values, if any; queries; keys, unless they are the
    values; values; context, log-sum-exp; the running softmax."""
    pl = unstable.pallas()[0]
    scale_refs, q_ref, cache_refs = refs[:scales], refs[scales], refs[scales + 1 : scales + 1 + caches]
    context_ref, logsumexp_ref, *running_refs = refs[scales + 1 + caches :]
    b, i = pl.program_id(0), pl.program_id(1)
    start, stop = start_B[b], stop_B[b]

    def write(running: OnlineSoftmax) -> None:
        for ref, value in zip(running_refs, running, strict=True):
            ref[...] = value

    def read(ref: Ref, axis: int) -> Array:
        """Return the block with zeros past the end of the cache, where it is undefined and may not be finite."""
        x = ref[...]
        return jnp.where(i * block + lax.broadcasted_iota(jnp.int32, x.shape, axis) < T, x, 0) if T % block else x

    @pl.when(i == 0)
    def _() -> None:
        write(OnlineSoftmax.begin(q_ref[...], q_ref.shape[-1]))

    @pl.when((i * block < stop) & ((i + 1) * block > start))
    def _() -> None:
        position_11S = i * block + lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
        active_11S = (position_11S >= start) & (position_11S < stop)
        v_KSH = read(cache_refs[-1], 1)
        k_KSH = v_KSH if caches == 1 else cache_refs[0][...]
        cached: tuple[Weight, Weight] = k_KSH, v_KSH
        if scale_refs:
            cached = Quantized(k_KSH, scale_refs[0][...]), Quantized(v_KSH, read(scale_refs[-1], 1))
        write(OnlineSoftmax(*(ref[...] for ref in running_refs)).add(q_ref[...], *cached, active_11S))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        context_ref[...], logsumexp_ref[...] = OnlineSoftmax(*(ref[...] for ref in running_refs)).result()
