"""Attention over whole rows, for the learner and the sampler's prefill.

A token attends to itself and to earlier tokens within its segment and its layer's window, and to all of the segments
that its own continues (`trees`). Padding is a segment like any other (0), so every query has a key: the results at
padding are finite, and no other token attends to them.

There are four implementations. The devices that the program is for (those of the mesh, which need not belong to this
host) choose one of them:

- JAX's splash attention (Pallas) on TPU;
- cuDNN on GPU, for bfloat16 and float16 and the head sizes that it supports;
- blocks of queries and keys on CPU, for rows that are not short;
- plain XLA elsewhere.

cuDNN and plain XLA process long rows in chunks of queries and recompute a chunk's scores in the backward pass, so that
at most SCORE_BUDGET scores exist at once instead of B·N·T·T.

On a mesh each device computes its own rows, its own heads and, where time is sharded, a share of the queries, for which
it gathers the keys and values of the whole rows. That is exact and simple, and with grouped queries the keys and values
are small. Later queries have more keys, so a device exchanges the second half of its queries for that of the device as
far from the other end (`deal`): then all have the same number of keys in total. Nothing outside of this file sees it.

Axes: B rows, T queries of a device, S keys (of the whole row), N query heads, K key heads, R = N/K, H head, C queries
of a chunk or positions of a block; X blocks of queries and Y of keys, of all rows, Q = R·C queries of a key head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspax import unstable
from gspax.config import SCORE_BUDGET
from gspax.model.kernels.online_softmax import MASKED, OnlineSoftmax
from gspax.model.kernels.trees import Tree
from gspax.parallel import sharding
from gspax.types import PyTree

LONG = 128  # positions of a row from which a CPU attends by blocks: faster below too, but it compiles longer
BLOCK = 64  # positions of a block on CPU, at most
LAST = jnp.iinfo(jnp.int32).max
LANES = 128  # splash attention: lengths are padded to a multiple of this
SPLASH_BLOCKS = (512, 384, 256, 128)  # the largest that divides the padded length is used

splash, splash_mask = unstable.splash_attention()
LocalMask: Any = splash_mask.LocalMask
Masks: TypeAlias = Any  # splash.SplashAttentionKernel: a pytree of tables that is callable, the kernel

Axes = str | tuple[str, ...] | None
# (q [B, C, N, H], k [B, S, K, H], v [B, S, K, U], visible [B, C, S], perhaps sinks [N]) -> context [B, C, N, U]
Kernel = Callable[..., Array]


class Rows(NamedTuple):
    """The segments and windows that tokens of rows attend to, and the mesh axes that `[B, T, N, H]` is sharded over."""

    segment_BT: Array  # int32; tokens attend within equal numbers
    mesh: Mesh
    rows: Axes = None
    time: Axes = None
    heads: Axes = None
    windows: tuple[int, ...] = ()  # for each layer, how many tokens one attends to, itself included; empty: all
    tree: Tree | None = None  # of segments that continue others

    def shards(self, axes: Axes) -> int:
        """Count the shards over these mesh axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)


class Shard(NamedTuple):
    """The queries of one device, all keys that they may attend to, and the heads of both."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKU: Array
    segment_BT: Array  # of the queries
    segment_BS: Array  # of the keys
    tree: Tree | None  # of the keys
    first: tuple[Array | int, ...] = (0,)  # positions among the keys of the first queries of equally long pieces
    sinks_N: Array | None = None  # float32


def row_attention(
    q_BTNH: Array, k_BTKH: Array, v_BTKU: Array, layer: Array | int, rows: Rows, sinks_N: Array | None = None
) -> Array:
    """Compute softmax(q k / √H) v over the keys of each token: `[B, T, N, U]` in q's dtype. Differentiable in q, k, v.

    Scores and their softmax are float32 for every dtype. `layer`, int32, may be traced; it selects the window. Each
    head's sink, if there are any, is a score in the softmax of its queries that has no value.

    Raises:
      ValueError: the mesh does not divide an axis that it shards (rows, time, query heads, key heads), or there are
        segments that continue others, and windows, since there are other tokens between the two, or sinks, which the
        softmaxes of several segments would count each.
    """
    if rows.tree is not None and (rows.windows or sinks_N is not None):
        raise ValueError("prefix_BT: wanted None in a model with sliding windows or attention sinks")
    platform = sharding.platform(rows.mesh)
    if platform == "tpu":
        return splash_attention(q_BTNH, k_BTKH, v_BTKU, layer, rows, sinks_N)
    attend: Callable[[Array, Shard], Array] = partial(attend_in_chunks, xla_kernel)
    if platform == "gpu" and sinks_N is None and cudnn_supports(q_BTNH, v_BTKU):
        attend = partial(attend_in_chunks, cudnn_kernel)
    elif platform == "cpu" and q_BTNH.shape[1] >= LONG:
        attend = attend_by_blocks
    return masked_attention(q_BTNH, k_BTKH, v_BTKU, layer, rows, sinks_N, attend=attend)


def masked_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKU: Array,
    layer: Array | int,
    rows: Rows,
    sinks_N: Array | None = None,
    *,
    attend: Callable[[Array, Shard], Array],
) -> Array:
    """Run `row_attention` by `attend`, which gets the layer's window (without one, the row's length) and a shard."""
    window = jnp.asarray(rows.windows, jnp.int32)[layer] if rows.windows else jnp.int32(q_BTNH.shape[1])
    return _on_mesh(attend, rows, window, PartitionSpec(), (q_BTNH, k_BTKH, v_BTKU, sinks_N))


def splash_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKU: Array,
    layer: Array | int,
    rows: Rows,
    sinks_N: Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
    """Run `row_attention` by the kernel for TPU; with `interpret`, on any platform."""
    T, shards, heads = q_BTNH.shape[1], rows.shards(rows.time), q_BTNH.shape[2] // rows.shards(rows.heads)
    clipped = [min(window, T) for window in rows.windows] or [T]
    choices = sorted(set(clipped))  # masks are constants of the kernel and the layer is traced: a branch for each
    tables = [splash_masks(T // shards, shards, heads, window, interpret) for window in choices]
    choice = jnp.asarray([choices.index(window) for window in clipped], jnp.int32)[layer if rows.windows else 0]

    def attend(constants: tuple[list[Masks], Array], shard: Shard) -> Array:
        tables, choice = constants
        return lax.switch(choice, [partial(attend_by_splash, table) for table in tables], shard)

    automatic = Mesh(rows.mesh.devices, rows.mesh.axis_names)  # the shape of a shard is not defined on a manual axis
    by_time = NamedSharding(automatic, PartitionSpec(None, rows.time))
    specs = [table.manual_sharding_spec(by_time) for table in tables]
    return _on_mesh(attend, rows, (tables, choice), (specs, PartitionSpec()), (q_BTNH, k_BTKH, v_BTKU, sinks_N))


def _on_mesh(
    attend: Callable[[Any, Shard], Array],
    rows: Rows,
    constants: PyTree,
    constants_spec: PyTree,
    arrays: tuple[Array, Array, Array, Array | None],
) -> Array:
    """Run `attend(constants, shard)` on each device for its shard of (queries, keys, values, sinks)."""
    *qkv, sinks_N = arrays

    def on_device(
        constants: PyTree, qkv: list[Array], sinks_N: Array | None, segment_BT: Array, tree: Tree | None
    ) -> Array:
        q, k, v = qkv
        if rows.shards(rows.time) == 1:
            return attend(constants, Shard(q, k, v, segment_BT, segment_BT, tree, sinks_N=sinks_N))
        T = q.shape[1]
        k, v, segment_BS = (lax.all_gather(x, rows.time, axis=1, tiled=True) for x in (k, v, segment_BT))
        q, segment_BT = deal(q, rows.time), deal(segment_BT, rows.time)
        first = first_of_pieces(T, rows.shards(rows.time), lax.axis_index(rows.time))
        return collect(attend(constants, Shard(q, k, v, segment_BT, segment_BS, tree, first, sinks_N)), T, rows.time)

    by_token, spec = PartitionSpec(rows.rows, rows.time), PartitionSpec(rows.rows, rows.time, rows.heads)
    return jax.shard_map(
        on_device,
        mesh=rows.mesh,
        in_specs=(constants_spec, spec, PartitionSpec(rows.heads), by_token, PartitionSpec(rows.rows)),
        out_specs=spec,
        check_vma=False,  # a Pallas kernel does not declare which axes its result varies over
    )(constants, qkv, None if sinks_N is None else sinks_N.astype(jnp.float32), rows.segment_BT, rows.tree)


def first_of_pieces(T: int, shards: int, shard: Any) -> tuple[Any, Any]:
    """Return the positions of the first queries of a device's two pieces, of T of its own.

    The first piece is the first half of its own, the second is the second half of the device as far from the other end.
    Together they have the same number of earlier positions on every device. If T is odd, the halves share a position.
    """
    return shard * T, (shards - 1 - shard) * T + T // 2


def deal(x_BT: Array, axis: Axes) -> Array:
    """Return the two pieces of a device, `[B, 2 ⌈T/2⌉, ...]`, from its own T positions."""
    half = -(-x_BT.shape[1] // 2)
    return jnp.concatenate([x_BT[:, :half], _mirrored(x_BT[:, -half:], axis)], axis=1)


def collect(x_BT: Array, T: int, axis: Axes) -> Array:
    """Return the T positions of a device from two pieces; the inverse of `deal`."""
    first, second = jnp.split(x_BT, 2, axis=1)
    return jnp.concatenate([first[:, : T // 2], _mirrored(second, axis)], axis=1)


def _mirrored(x: Array, axis: Axes) -> Array:
    last = lax.axis_size(axis) - 1
    return lax.ppermute(x, axis, [(place, last - place) for place in range(last + 1)])


# --- plain XLA and cuDNN, in chunks of queries -----------------------------------------------------------------------


def attend_in_chunks(kernel: Kernel, window: Array, shard: Shard) -> Array:
    """Run the kernel for all queries, in chunks of at most SCORE_BUDGET scores."""
    q_BTNH, k_BSKH, v_BSKU, segment_BT, segment_BS, tree, first, sinks_N = shard
    sinks = () if sinks_N is None else (sinks_N,)
    (B, T, N, _), S, dtype = q_BTNH.shape, k_BSKH.shape[1], k_BSKH.dtype
    position_T = jnp.concatenate([begin + jnp.arange(T // len(first)) for begin in first])

    def attend(q_BCNH: Array, segment_BC: Array, position_C: Array, k_BSKH: Array, v_BSKU: Array) -> Array:
        back_1CS = (position_C[:, None] - jnp.arange(S)[None])[None]
        if tree is None:
            related_BCS = segment_BC[:, :, None] == segment_BS[:, None]
        else:
            related_BCS = position_C[None, :, None] < tree.until_BT[:, None]
        visible_BCS = related_BCS & (back_1CS >= 0) & (back_1CS < window)
        return kernel(q_BCNH, k_BSKH.astype(dtype), v_BSKU.astype(dtype), visible_BCS, *sinks)

    C = max(1, SCORE_BUDGET // (B * N * S))
    if C >= T:
        return attend(q_BTNH, segment_BT, position_T, k_BSKH, v_BSKU)
    count = -(-T // C)
    padding = count * C - T

    def split(x_BT: Array) -> Array:
        padded_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *[(0, 0)] * (x_BT.ndim - 2)), mode="edge")
        return jnp.moveaxis(padded_BT.reshape(x_BT.shape[0], count, C, *x_BT.shape[2:]), 1, 0)

    # The scan accumulates the gradients of keys and values in their own dtype, hence float32.
    k_BSKH, v_BSKU = k_BSKH.astype(jnp.float32), v_BSKU.astype(jnp.float32)
    recomputed = jax.checkpoint(attend, prevent_cse=False)
    chunks = (split(q_BTNH), split(segment_BT), split(position_T[None])[:, 0])
    _, context = lax.scan(lambda none, chunk: (none, recomputed(*chunk, k_BSKH, v_BSKU)), None, chunks)
    return jnp.moveaxis(context, 0, 1).reshape(B, count * C, N, -1)[:, :T]


@partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
def xla_kernel(q_BCNH: Array, k_BSKH: Array, v_BSKU: Array, visible_BCS: Array, sinks_N: Array | None = None) -> Array:
    """Attend on any platform. The backward pass recomputes the softmax from the saved scores."""
    B, C, N, H = q_BCNH.shape
    K = k_BSKH.shape[2]
    q_BCKRH = q_BCNH.reshape(B, C, K, N // K, H)
    score_BKRCS = jnp.einsum("bckrh,bskh->bkrcs", q_BCKRH, k_BSKH, preferred_element_type=jnp.float32)
    score_BKRCS = jnp.where(visible_BCS[:, None, None], score_BKRCS * H**-0.5, MASKED)
    weight_BKRCS = jax.nn.softmax(score_BKRCS, axis=-1)
    if sinks_N is not None:
        above_BKRC = jax.nn.logsumexp(score_BKRCS, axis=-1) - sinks_N.reshape(1, K, N // K, 1)
        weight_BKRCS *= jax.nn.sigmoid(above_BKRC)[..., None]
    weight_BKRCS = weight_BKRCS.astype(v_BSKU.dtype)
    return jnp.einsum("bkrcs,bsku->bckru", weight_BKRCS, v_BSKU).reshape(B, C, N, -1)


def cudnn_kernel(
    q_BCNH: Array,
    k_BSKH: Array,
    v_BSKU: Array,
    visible_BCS: Array,
    *,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Array:
    """Attend on NVIDIA GPUs. Another `implementation` of `jax.nn.dot_product_attention` runs elsewhere."""
    even = ((0, 0), (0, q_BCNH.shape[1] % 2), (0, k_BSKH.shape[1] % 2))  # cuDNN wants even lengths with a mask
    visible_B1CS = jnp.pad(visible_BCS, even)[:, None]
    q, k, v = (
        jnp.pad(x, (*pad, (0, 0), (0, 0))) for x, pad in ((q_BCNH, even[:2]), (k_BSKH, even[::2]), (v_BSKU, even[::2]))
    )
    context = jax.nn.dot_product_attention(q, k, v, mask=visible_B1CS, implementation=implementation)
    return context[:, : q_BCNH.shape[1]]


def cudnn_supports(q_BTNH: Array, v_BTKU: Array) -> bool:
    """Return whether cuDNN has a kernel for queries of this dtype and head size, and for their values."""
    H = q_BTNH.shape[3]
    return v_BTKU.shape[3] == H and q_BTNH.dtype in (jnp.bfloat16, jnp.float16) and H <= 128 and H % 8 == 0


# --- blocks, on CPU --------------------------------------------------------------------------------------------------
#
# Half of a row's blocks of scores lie in the future, and in packed rows most of the others are between responses. They
# are found from the numbers of the segments and skipped, forward and backward. How many are computed is data, so one
# compiled program serves every packing. A block's scores stay in the processor's cache; the backward pass computes them
# again.


class Blocks(NamedTuple):
    """The segments that queries attend to, and the blocks that these are in; int32."""

    segment_XC: Array
    segment_YC: Array
    until_YC: Array | None  # as in `Tree`
    begin_I: Array  # position of the first query of each of a row's blocks
    window: Array
    key_XJ: Array  # the J blocks of keys of the row; those that a block of queries needs come first
    count_X: Array  # how many those are

    def visit(self, x: Array, n: Array, heads: int) -> tuple[Array, Array]:
        """Return the n-th block of keys for a block of queries, and which keys its queries attend to, [1, Q, C]."""
        y, size, J = self.key_XJ[x, n], self.segment_XC.shape[1], self.key_XJ.shape[1]
        begin = self.begin_I[x % len(self.begin_I)]
        between = begin - y % J * size
        if self.until_YC is None:
            related_CC = self.segment_XC[x][:, None] == self.segment_YC[y][None]
        else:
            related_CC = begin + jnp.arange(size)[:, None] < self.until_YC[y][None]
        back_CC = between + jnp.arange(size)[:, None] - jnp.arange(size)[None]
        return y, jnp.tile(related_CC & (back_CC >= 0) & (back_CC < self.window), (heads, 1))[None]


def attend_by_blocks(window: Array, shard: Shard) -> Array:
    """Compute softmax(q k / √H) v without the masked blocks of scores; the results of blocks of padding are 0."""
    q_BTNH, k_BSKH, v_BSKU, segment_BT, segment_BS, tree, first, sinks_N = shard
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    piece = T // len(first)
    size = -(-piece // -(-piece // BLOCK) // 8) * 8  # of equal blocks, in multiples of 8 positions

    def split(x_BT: Array, length: int) -> Array:
        """Split [B, T, ...], pieces of a length, into [X, C, ...]."""
        x_ZL = x_BT.reshape(-1, length, *x_BT.shape[2:])
        padded = jnp.pad(x_ZL, ((0, 0), (0, -length % size), *[(0, 0)] * (x_BT.ndim - 2)))
        return padded.reshape(-1, size, *x_BT.shape[2:])

    segment_XC, segment_YC = split(segment_BT, piece), split(segment_BS, S)
    own, keys = (_range(x.reshape(B, -1, size)) for x in (segment_XC, segment_YC))
    J = keys[0].shape[1]
    begin_I = jnp.concatenate([begin + jnp.arange(0, piece, size) for begin in first])
    between_IJ = begin_I[:, None] - jnp.arange(J)[None] * size  # of their first positions
    reachable_IJ = (between_IJ > -size) & (between_IJ < window + size - 1)
    if tree is None:
        until_YC, related_BIJ = None, _overlap(own, keys)
    else:
        until_YC = split(tree.until_BT, S)
        last_BJ = jnp.where(segment_YC > 0, until_YC, 0).reshape(B, J, size).max(axis=2)
        related_BIJ = (begin_I[None, :, None] < last_BJ[:, None]) & (own[1] > 0)[:, :, None]
    needed_BIJ = related_BIJ & reachable_IJ[None]
    key_BIJ = jnp.argsort(~needed_BIJ, axis=2, stable=True).astype(jnp.int32)
    key_BIJ += J * jnp.arange(B, dtype=jnp.int32)[:, None, None]
    count_X = needed_BIJ.sum(axis=2, dtype=jnp.int32).reshape(-1)
    blocks = Blocks(segment_XC, segment_YC, until_YC, begin_I, window, key_BIJ.reshape(-1, J), count_X)
    q_XKQH = (
        split(q_BTNH, piece).reshape(-1, size, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(-1, K, N // K * size, H)
    )
    k_YKSH, v_YKSU = (split(x, S).swapaxes(1, 2) for x in (k_BSKH, v_BSKU))
    sink_KQ1 = None if sinks_N is None else jnp.repeat(sinks_N.reshape(K, -1), size, axis=1)[..., None]
    context_XKQU = _attend(q_XKQH, k_YKSH, v_YKSU, sink_KQ1, blocks)
    context_XCKRU = context_XKQU.reshape(-1, K, N // K, size, v_BSKU.shape[3]).transpose(0, 3, 1, 2, 4)
    context_ZLNU = context_XCKRU.reshape(B * len(first), -1, N, v_BSKU.shape[3])[:, :piece]
    return context_ZLNU.reshape(B, T, N, v_BSKU.shape[3])


def _range(number_BIC: Array) -> tuple[Array, Array]:
    """Return the least and the greatest number of each block other than 0; without one, the least is the greater."""
    return jnp.where(number_BIC > 0, number_BIC, LAST).min(axis=2), number_BIC.max(axis=2)


def _overlap(queries: tuple[Array, Array], keys: tuple[Array, Array]) -> Array:
    """Return whether two ranges overlap, [B, I, J]. Blocks of keys outside the range are not read."""
    (low_BI, high_BI), (low_BJ, high_BJ) = queries, keys
    return (low_BI[:, :, None] <= high_BJ[:, None]) & (low_BJ[:, None] <= high_BI[:, :, None])


@jax.custom_vjp
def _attend(q_XKQH: Array, k_YKSH: Array, v_YKSU: Array, sink_KQ1: Array | None, blocks: Blocks) -> Array:
    return _attend_forward(q_XKQH, k_YKSH, v_YKSU, sink_KQ1, blocks)[0]


def _attend_forward(
    q_XKQH: Array, k_YKSH: Array, v_YKSU: Array, sink_KQ1: Array | None, blocks: Blocks
) -> tuple[Array, PyTree]:
    heads = q_XKQH.shape[2] // blocks.segment_XC.shape[1]

    def of_queries(x: Array) -> tuple[Array, Array]:
        q_KQH = q_XKQH[x]

        def add(n: Array, so_far: OnlineSoftmax) -> OnlineSoftmax:
            y, visible_1QS = blocks.visit(x, n, heads)
            return so_far.add(q_KQH, k_YKSH[y], v_YKSU[y], visible_1QS)

        begin = OnlineSoftmax.begin(q_KQH, v_YKSU.shape[3], sink_KQ1)
        return lax.fori_loop(0, blocks.count_X[x], add, begin).result()

    context_XKQU, logsumexp_XKQ1 = lax.map(of_queries, jnp.arange(len(q_XKQH)))
    saved = q_XKQH, k_YKSH, v_YKSU, sink_KQ1, blocks, context_XKQU, logsumexp_XKQ1
    return context_XKQU.astype(q_XKQH.dtype), saved


def _attend_backward(saved: PyTree, dcontext_XKQU: Array) -> tuple[Array, Array, Array, Array | None, None]:
    q_XKQH, k_YKSH, v_YKSU, sink_KQ1, blocks, context_XKQU, logsumexp_XKQ1 = saved
    heads, scale, dtype = q_XKQH.shape[2] // blocks.segment_XC.shape[1], q_XKQH.shape[3] ** -0.5, q_XKQH.dtype
    shared_XKQ1 = (context_XKQU * dcontext_XKQU).sum(axis=-1, keepdims=True)

    def product(subscripts: str, *factors: Array) -> Array:
        return jnp.einsum(subscripts, *(x.astype(dtype) for x in factors), preferred_element_type=jnp.float32)

    def add_to(x_YKSH: Array, y: Array, more_KSH: Array) -> Array:
        return lax.dynamic_update_index_in_dim(x_YKSH, x_YKSH[y] + more_KSH, y, 0)

    def of_queries(dkeys: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        q_KQH, dcontext_KQU = q_XKQH[x], dcontext_XKQU[x]

        def add(n: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_KQH, dk_YKSH, dv_YKSU = so_far
            y, visible_1QS = blocks.visit(x, n, heads)
            k_KSH, v_KSU = k_YKSH[y], v_YKSU[y]
            score_KQS = product("kqh,ksh->kqs", q_KQH, k_KSH) * scale
            weight_KQS = jnp.exp(jnp.where(visible_1QS, score_KQS - logsumexp_XKQ1[x], MASKED))
            dweight_KQS = product("kqu,ksu->kqs", dcontext_KQU, v_KSU)
            dscore_KQS = weight_KQS * (dweight_KQS - shared_XKQ1[x]) * scale
            return (
                dq_KQH + product("kqs,ksh->kqh", dscore_KQS, k_KSH),
                add_to(dk_YKSH, y, product("kqs,kqh->ksh", dscore_KQS, q_KQH)),
                add_to(dv_YKSU, y, product("kqs,kqu->ksu", weight_KQS, dcontext_KQU)),
            )

        zero_KQH = jnp.zeros(q_KQH.shape, jnp.float32)
        dq_KQH, dk_YKSH, dv_YKSU = lax.fori_loop(0, blocks.count_X[x], add, (zero_KQH, *dkeys))
        return (dk_YKSH, dv_YKSU), dq_KQH.astype(dtype)

    start = jnp.zeros(k_YKSH.shape, jnp.float32), jnp.zeros(v_YKSU.shape, jnp.float32)
    (dk_YKSH, dv_YKSU), dq_XKQH = lax.scan(of_queries, start, jnp.arange(len(q_XKQH)))
    dsink_KQ1 = None  # its weight's gradient is that of a value of zero
    if sink_KQ1 is not None:
        dsink_KQ1 = -(jnp.exp(sink_KQ1[None] - logsumexp_XKQ1) * shared_XKQ1).sum(axis=0)
    return dq_XKQH, dk_YKSH.astype(k_YKSH.dtype), dv_YKSU.astype(v_YKSU.dtype), dsink_KQ1, None


_attend.defvjp(_attend_forward, _attend_backward)


# --- splash attention, on TPU ----------------------------------------------------------------------------------------
#
# The kernel works in blocks and skips those that the causal mask and the window leave empty; it compares segments
# itself. Nothing of size T·S exists, forward or backward. Lengths are padded to whole blocks: padding keys come after
# every query, padding queries attend like the last real one and are dropped.
#
# Where time is sharded, the two pieces of queries of each of `shards` devices attend to all keys. Which blocks a device
# computes is then its shard of three small tables, the `Masks`, which go through `shard_map` with the arrays. Each
# piece is padded by itself, and no block has queries of both.


class _Window(LocalMask):
    """A mask that finds empty and full blocks by their bounds: rows are long, and every block of the mask is read."""

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        position_T, keys = self.q_sequence[index[0]], index[1]
        first, last, back = position_T[0], position_T[-1], self.window_size[0]  # positions of a block never decrease
        shape = (len(position_T), keys.stop - keys.start)
        if keys.start > last or keys.stop <= first - back:
            return np.zeros(shape, bool)
        if keys.stop <= first + 1 and keys.start >= last - back:
            return np.ones(shape, bool)
        return super().__getitem__(index)


def window_mask(T: int, shards: int, window: int) -> _Window:
    """Return which keys a query attends to, by position; pieces of queries are padded with their last position."""
    first, piece = np.arange(shards)[:, None] * T, T
    if shards > 1:
        first, piece = np.stack(first_of_pieces(T, shards, np.arange(shards)), axis=1), -(-T // 2)
    position = first[..., None] + np.minimum(np.arange(_padded(piece)), piece - 1)
    mask = _Window((position.size, _padded(T * shards)), window_size=(window - 1, 0), offset=0)
    mask.q_sequence = position.reshape(-1).astype(np.int32)
    return mask


@lru_cache
def splash_masks(T: int, shards: int, heads: int, window: int, interpret: bool = False) -> Masks:
    """Make the tables for T·shards queries, T on each device, that attend to `window` positions, their own included.

    Args:
      heads: query heads on one device.
      interpret: run in Pallas' interpreter, on any platform.
    """
    mask = window_mask(T, shards, window)
    lengths = T if shards == 1 else -(-T // 2), T * shards
    q, kv = (next(size for size in SPLASH_BLOCKS if _padded(length) % size == 0) for length in lengths)
    by_query = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), q)
    by_key = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
    with jax.ensure_compile_time_eval():  # the tables are constants, also while tracing
        return splash.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(**by_query, **dict.fromkeys(by_key, kv)),
            head_shards=1,
            q_seq_shards=shards,
            interpret=interpret,
        )


def attend_by_splash(tables: Masks, shard: Shard) -> Array:
    """Compute softmax(q k / √H) v over what the tables, the segments and the tree let a query attend to."""
    q_BTNH, k_BSKH, v_BSKU, segment_BT, segment_BS, tree, first, sinks_N = shard
    (B, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    piece = T // len(first)

    def pad(x_BT: Array, length: int, mode: str = "constant") -> Array:
        """Pad [B, T, ...], pieces of a length, to whole blocks each."""
        x_ZL = x_BT.reshape(-1, length, *x_BT.shape[2:])
        padded = jnp.pad(x_ZL, ((0, 0), (0, _padded(length) - length), *[(0, 0)] * (x_BT.ndim - 2)), mode=mode)
        return padded.reshape(B, -1, *x_BT.shape[2:])

    def one_row(
        q_NTH: Array, k_KSH: Array, v_KSU: Array, segment_T: Array, segment_S: Array, parent_S: Array | None
    ) -> Array:
        own = splash.SegmentIds(q=segment_T, kv=segment_S)
        if parent_S is None:
            return tables(q_NTH, k_KSH, v_KSU, segment_ids=own, sinks=sinks_N)
        return _attend_to_levels(tables, q_NTH, k_KSH, v_KSU, (own, parent_S))

    scaled_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    context_BNTU = jax.vmap(one_row)(
        pad(scaled_BTNH, piece).swapaxes(1, 2),
        pad(k_BSKH, S).swapaxes(1, 2),
        pad(v_BSKU, S).swapaxes(1, 2),
        pad(segment_BT, piece, "edge"),
        pad(segment_BS, S, "edge"),
        None if tree is None else tree.parent_BS,
    )
    context_ZLNU = context_BNTU.swapaxes(1, 2).reshape(B * len(first), -1, N, v_BSKU.shape[3])[:, :piece]
    return context_ZLNU.reshape(B, T, N, v_BSKU.shape[3])


@jax.custom_vjp
def _attend_to_levels(tables: Masks, q_NTH: Array, k_KSH: Array, v_KSU: Array, levels: PyTree) -> Array:
    """Attend to a query's own segment, to the one that this continues, and so on: disjoint sets of keys.

    The kernel compares segments for equality only. So it runs once for each level, and the softmaxes are merged. Its
    backward pass takes the log-sum-exp of all keys; with the total, each level gives its part of the gradient.
    """
    return _levels_forward(tables, q_NTH, k_KSH, v_KSU, levels)[0]


def _climb(pair: Any, parent_S: Array) -> Any:
    """Return the segments of the next level; -1, which no key has, where there is none."""
    above_T = jnp.where(pair.q > 0, parent_S[jnp.maximum(pair.q, 0)], 0)
    return splash.SegmentIds(q=jnp.where(above_T > 0, above_T, -1), kv=pair.kv)


def _goes_on(pair_and_result: PyTree) -> Array:
    return (pair_and_result[0].q > 0).any()


def _levels_forward(tables: Masks, q_NTH: Array, k_KSH: Array, v_KSU: Array, levels: PyTree) -> tuple[Array, PyTree]:
    saving = type(tables)(*tables.tree_flatten()[0], **tables.kwargs | {"save_residuals": True})

    def attend(pair: Any) -> tuple[Array, Array]:
        context_NTU, (logsumexp_NT,) = saving(q_NTH, k_KSH, v_KSU, segment_ids=pair)
        return context_NTU.astype(jnp.float32), logsumexp_NT

    def add(so_far: PyTree) -> PyTree:
        pair, context_NTU, total_NT = so_far
        more_NTU, logsumexp_NT = attend(pair)
        # A query without a key has a log-sum-exp near the least float32, and so no weight.
        sum_NT = jnp.logaddexp(total_NT, logsumexp_NT)
        parts = (x * jnp.exp(y - sum_NT)[..., None] for x, y in ((context_NTU, total_NT), (more_NTU, logsumexp_NT)))
        return _climb(pair, parent_S), sum(parts), sum_NT

    own, parent_S = levels
    _, context_NTU, total_NT = lax.while_loop(_goes_on, add, (_climb(own, parent_S), *attend(own)))
    context_NTU = context_NTU.astype(q_NTH.dtype)
    return context_NTU, (tables, q_NTH, k_KSH, v_KSU, levels, context_NTU, total_NT)


def _levels_backward(saved: PyTree, dcontext_NTU: Array) -> tuple[Array | None, ...]:
    tables, q_NTH, k_KSH, v_KSU, (own, parent_S), context_NTU, total_NT = saved
    masks = tables.dq_mask_info, tables.dkv_mask_info

    def gradients(pair: PyTree) -> tuple[Array, ...]:
        residuals = (q_NTH, k_KSH, v_KSU, pair, None, context_NTU, total_NT, *masks)
        return splash._splash_attention_bwd(**tables.kwargs, res=residuals, do=dcontext_NTU)[3:6]

    def add(so_far: PyTree) -> PyTree:
        pair, sums = so_far
        return _climb(pair, parent_S), jax.tree.map(jnp.add, sums, gradients(pair))

    _, sums = lax.while_loop(_goes_on, add, (_climb(own, parent_S), gradients(own)))
    return None, *sums, None


_attend_to_levels.defvjp(_levels_forward, _levels_backward)


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES
