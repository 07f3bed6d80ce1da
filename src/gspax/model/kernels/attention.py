"""Attention over whole rows, for the learner and the sampler's prefill.

A token attends to itself and to earlier tokens within its segment and its layer's window, and to the segment that its
own continues, if there is one. Padding is a segment like any other (0), so every query has a key: the results at
padding are finite, and no other token attends to them.

There are four implementations. The devices that the program is for (those of the mesh, which need not belong to this
host) decide between them:

- `attention_splash.py` on TPU;
- cuDNN on GPU, for bfloat16 and float16 and the head sizes that it supports;
- `attention_blocks.py` on CPU, for rows that are not short;
- plain XLA elsewhere.

cuDNN and plain XLA process long rows in chunks of queries and recompute a chunk's scores in the backward pass, so that
at most SCORE_BUDGET scores exist at once instead of B·N·T·T.

On a mesh each device computes its own rows, its own heads and, where time is sharded, its own chunk of the queries, for
which it gathers the keys and values of the whole rows. That is exact and simple, and with grouped queries the keys and
values are small; but the device with the end of a row has more to attend to than the one with its start.

Axes: B rows, T queries, S keys (of the whole row), N query heads, K key heads, R = N/K, H head, C queries of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from gspax.config import SCORE_BUDGET
from gspax.model.kernels import attention_blocks, attention_splash
from gspax.model.kernels.online_softmax import MASKED

LONG = 128  # positions of a row from which a CPU uses `attention_blocks`: faster below too, but it compiles longer

Axes = str | tuple[str, ...] | None
# (q [B, C, N, H], k [B, S, K, H], v [B, S, K, H], visible [B, C, S]) -> context [B, C, N, H]
Kernel = Callable[[Array, Array, Array, Array], Array]


class RowSharding(NamedTuple):
    """The mesh axes that `[B, T, N, H]` is sharded over."""

    mesh: Mesh
    rows: Axes
    time: Axes
    heads: Axes

    def shards(self, axes: Axes) -> int:
        """The number of shards over these mesh axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)


class Shard(NamedTuple):
    """One device's queries, all keys that they may attend to, and the heads of both."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKH: Array
    segment_BT: Array  # of the queries
    prefix_BT: Array | None  # likewise
    segment_BS: Array  # of the keys
    first: Array | int  # position of the first query among the keys


def row_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_BT: Array,
    layer: Array | int,
    *,
    windows: tuple[int, ...] = (),
    prefix_BT: Array | None = None,
    sharding: RowSharding | None = None,
) -> Array:
    """softmax(q k / √H) v over what each token attends to: `[B, T, N, H]` in q's dtype. Differentiable in q, k and v.

    Scores and their softmax are float32 for every dtype.

    Args:
      segment_BT: int32; tokens attend within equal numbers.
      layer: int32, may be traced; selects the window.
      windows: for each layer, how many tokens one attends to, itself included; empty: its whole segment.
      prefix_BT: int32, a segment earlier in the row that a token attends to too; 0: none.
      sharding: of the arrays, if they are on a mesh.

    Raises:
      ValueError: the mesh does not divide an axis that it shards (rows, time, query heads, key heads), or there are
        windows and prefixes, between which there are other tokens.
    """
    if windows and prefix_BT is not None:
        raise ValueError("prefix_BT: wanted None in a model with sliding windows")
    platform = jax.default_backend() if sharding is None else sharding.mesh.devices.flat[0].platform
    attend: Callable[..., Array]
    if platform == "tpu":
        attend = splash_attention
    elif platform == "gpu" and cudnn_supports(q_BTNH):
        attend = partial(chunked_attention, kernel=cudnn_kernel)
    elif platform == "cpu" and q_BTNH.shape[1] >= LONG:
        attend = block_attention
    else:
        attend = partial(chunked_attention, kernel=xla_kernel)
    options = {"windows": windows, "prefix_BT": prefix_BT, "sharding": sharding}
    return attend(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, **options)


def splash_attention(
    q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, *, windows=(), prefix_BT=None, sharding=None, interpret=False
) -> Array:
    """`row_attention` by the kernel for TPU; with `interpret`, on any platform."""
    T, N = q_BTNH.shape[1:3]
    shards, heads = (sharding.shards(sharding.time), N // sharding.shards(sharding.heads)) if sharding else (1, N)
    clipped = [min(window, T) for window in windows] or [T]
    choices = sorted(set(clipped))  # masks are constants of the kernel and the layer is traced: a branch for each
    tables = [attention_splash.masks(T // shards, shards, heads, window, interpret) for window in choices]
    choice = jnp.asarray([choices.index(window) for window in clipped], jnp.int32)[layer if windows else 0]

    def local(constants, shard: Shard):
        tables, choice = constants

        def attend(table, shard: Shard):
            return attention_splash.attend(table, *shard[:4], shard.segment_BS, prefix_BT=shard.prefix_BT)

        return lax.switch(choice, [partial(attend, table) for table in tables], shard)

    specs = None
    if sharding:
        specs = [attention_splash.masks_spec(table, sharding.mesh, sharding.time) for table in tables]
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_BT, prefix_BT)
    return _on_mesh(local, sharding, (tables, choice), (specs, PartitionSpec()), arrays)


def chunked_attention(
    q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, *, windows=(), prefix_BT=None, sharding=None, kernel: Kernel
) -> Array:
    """`row_attention` by a kernel that takes a mask, in chunks of queries."""
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_BT, prefix_BT)
    window = _window(windows, layer, q_BTNH.shape[1])
    return _on_mesh(partial(_in_chunks, kernel), sharding, window, PartitionSpec(), arrays)


def block_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, *, windows=(), prefix_BT=None, sharding=None) -> Array:
    """`row_attention` without the blocks of scores that are masked."""

    def local(window: Array, shard: Shard) -> Array:
        return attention_blocks.attend(**shard._asdict(), window=window)

    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_BT, prefix_BT)
    return _on_mesh(local, sharding, _window(windows, layer, q_BTNH.shape[1]), PartitionSpec(), arrays)


def _window(windows: tuple[int, ...], layer: Array | int, T: int) -> Array:
    """The layer's; without one, the whole row."""
    return jnp.asarray(windows, jnp.int32)[layer] if windows else jnp.int32(T)


def _on_mesh(local: Callable[[Any, Shard], Array], sharding: RowSharding | None, constants, constants_spec, arrays):
    """`local(constants, shard)` on each device for its shard of (queries, keys, values, segments, prefixes)."""
    q, k, v, segment_BT, prefix_BT = arrays
    if sharding is None:
        return local(constants, Shard(q, k, v, segment_BT, prefix_BT, segment_BT, 0))
    mesh, rows, time, heads = sharding

    def per_device(constants, q, k, v, segment_BT, prefix_BT):
        segment_BS, first = segment_BT, 0
        if sharding.shards(time) > 1:
            k, v, segment_BS = (lax.all_gather(x, time, axis=1, tiled=True) for x in (k, v, segment_BT))
            first = lax.axis_index(time) * q.shape[1]
        return local(constants, Shard(q, k, v, segment_BT, prefix_BT, segment_BS, first))

    spec = PartitionSpec(rows, time, heads)
    return jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(constants_spec, spec, spec, spec, *[PartitionSpec(rows, time)] * 2),
        out_specs=spec,
        check_vma=False,  # a Pallas kernel does not declare which axes its result varies over
    )(constants, *arrays)


def _in_chunks(kernel: Kernel, window: Array, shard: Shard) -> Array:
    """The kernel's result for all queries, in chunks of at most SCORE_BUDGET scores."""
    q_BTNH, k_BSKH, v_BSKH, segment_BT, prefix_BT, segment_BS, first = shard
    (B, T, N, _), S, dtype = q_BTNH.shape, k_BSKH.shape[1], k_BSKH.dtype
    position_T = first + jnp.arange(T)

    def attend(q_BCNH, segment_BC, prefix_BC, position_C, k_BSKH, v_BSKH):
        back_1CS = (position_C[:, None] - jnp.arange(S)[None])[None]
        related_BCS = segment_BC[:, :, None] == segment_BS[:, None]
        if prefix_BC is not None:
            related_BCS |= jnp.where(prefix_BC > 0, prefix_BC, -1)[:, :, None] == segment_BS[:, None]
        visible_BCS = related_BCS & (back_1CS >= 0) & (back_1CS < window)
        return kernel(q_BCNH, k_BSKH.astype(dtype), v_BSKH.astype(dtype), visible_BCS)

    C = max(1, SCORE_BUDGET // (B * N * S))
    if C >= T:
        return attend(q_BTNH, segment_BT, prefix_BT, position_T, k_BSKH, v_BSKH)
    count = -(-T // C)
    padding = count * C - T

    def split(x_BT):
        padded_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *[(0, 0)] * (x_BT.ndim - 2)), mode="edge")
        return jnp.moveaxis(padded_BT.reshape(x_BT.shape[0], count, C, *x_BT.shape[2:]), 1, 0)

    # The scan accumulates the gradients of keys and values in their own dtype, hence float32.
    k_BSKH, v_BSKH = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
    recomputed = jax.checkpoint(attend, prevent_cse=False)
    by_token = jax.tree.map(split, (q_BTNH, segment_BT, prefix_BT))
    chunks = (*by_token, split(position_T[None])[:, 0])
    _, context = lax.scan(lambda none, chunk: (none, recomputed(*chunk, k_BSKH, v_BSKH)), None, chunks)
    return jnp.moveaxis(context, 0, 1).reshape(B, count * C, *q_BTNH.shape[2:])[:, :T]


@partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
def xla_kernel(q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, visible_BCS: Array) -> Array:
    """The kernel for any platform. The backward pass recomputes the softmax from the saved scores."""
    B, C, N, H = q_BCNH.shape
    K = k_BSKH.shape[2]
    q_BCKRH = q_BCNH.reshape(B, C, K, N // K, H)
    score_BKRCS = jnp.einsum("bckrh,bskh->bkrcs", q_BCKRH, k_BSKH, preferred_element_type=jnp.float32)
    score_BKRCS = jnp.where(visible_BCS[:, None, None], score_BKRCS * H**-0.5, MASKED)
    weight_BKRCS = jax.nn.softmax(score_BKRCS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("bkrcs,bskh->bckrh", weight_BKRCS, v_BSKH).reshape(B, C, N, H)


def cudnn_kernel(
    q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, visible_BCS: Array, *, implementation: Any = "cudnn"
) -> Array:
    """The kernel for NVIDIA GPUs. Another `implementation` of `jax.nn.dot_product_attention` runs elsewhere."""
    even = ((0, 0), (0, q_BCNH.shape[1] % 2), (0, k_BSKH.shape[1] % 2))  # cuDNN wants even lengths with a mask
    visible_B1CS = jnp.pad(visible_BCS, even)[:, None]
    q, k, v = (
        jnp.pad(x, (*pad, (0, 0), (0, 0))) for x, pad in ((q_BCNH, even[:2]), (k_BSKH, even[::2]), (v_BSKH, even[::2]))
    )
    context = jax.nn.dot_product_attention(q, k, v, mask=visible_B1CS, implementation=implementation)
    return context[:, : q_BCNH.shape[1]]


def cudnn_supports(q_BTNH: Array) -> bool:
    """Whether cuDNN has a kernel for queries of this dtype and head size."""
    H = q_BTNH.shape[3]
    return q_BTNH.dtype in (jnp.bfloat16, jnp.float16) and H <= 128 and H % 8 == 0
