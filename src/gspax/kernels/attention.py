"""Attention over whole rows: of the learner and of the sampler's prefill.

A token looks at those before it and at itself, within its segment and within its layer's window. Padding is a segment
like any other (0), so that no query is without a key: what it computes is finite, and no other token looks at it.

Three ways to the same numbers, chosen by the devices that the program is for (those of the mesh; they need not be of
this host):

- `attention_splash.py` on TPU;
- cuDNN on GPU, for bfloat16 and float16 and the head sizes that it takes;
- plain XLA elsewhere.

The last two go over the queries in stretches where rows are long, and make a stretch's scores anew in the backward
pass: they hold SCORE_BUDGET scores at once, not B·N·T·T.

On a mesh each device works at its rows, at its heads and, where the rows' time axis is split, at its stretch of the
queries, for which it gathers keys and values of the whole rows. That is exact and simple, and under grouped queries
keys and values are small; but the device with a row's end has more to look at than the one with its beginning.

Letters: B rows, T queries, S keys (of the whole row), N query heads, K key heads, R = N/K, H head, C queries at a time.
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
from gspax.kernels import attention_splash

MASKED = -1e30  # finite: where everything is masked the result is a harmless mean instead of NaN

Axes = str | tuple[str, ...] | None
# (q [B, C, N, H], k [B, S, K, H], v [B, S, K, H], see [B, C, S]) -> context [B, C, N, H]
Kernel = Callable[[Array, Array, Array, Array], Array]


class Split(NamedTuple):
    """The axes of a mesh that `[B, T, N, H]` is split over."""

    mesh: Mesh
    rows: Axes
    time: Axes
    heads: Axes

    def parts(self, axes: Axes) -> int:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)


class Part(NamedTuple):
    """What one device works at: some queries, and all keys that these may look at, with heads that fit them."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKH: Array
    segment_BT: Array  # of the queries
    segment_BS: Array  # of the keys
    first: Array | int  # the position of the first query among the keys


def row_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_BT: Array,
    layer: Array | int,
    *,
    windows: tuple[int, ...] = (),
    split: Split | None = None,
) -> Array:
    """softmax(q k / √H) v over what each token looks at: `[B, T, N, H]` in q's dtype. Differentiable in q, k and v.

    Scores and their softmax are float32, whatever the dtype.

    Args:
      segment_BT: int32; tokens look at equal numbers only.
      layer: int32, may be traced; which of the windows holds.
      windows: of each layer, how many tokens one looks at, itself included; empty: at all of its segment.
      split: how the arrays lie on a mesh, if on one.

    Raises:
      ValueError: the mesh does not divide an axis that it splits (rows, time, query heads, key heads).
    """
    platform = jax.default_backend() if split is None else split.mesh.devices.flat[0].platform
    if platform == "tpu":
        attend = by_splash
    elif platform == "gpu" and cudnn_takes(q_BTNH):
        attend = partial(by_chunks, kernel=cudnn)
    else:
        attend = partial(by_chunks, kernel=einsum)
    return attend(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, windows=windows, split=split)


def by_splash(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, *, windows=(), split=None, interpret=False) -> Array:
    """`row_attention` by the kernel for TPU; anywhere if interpreted."""
    T, N = q_BTNH.shape[1:3]
    shards, heads = (split.parts(split.time), N // split.parts(split.heads)) if split else (1, N)
    clipped = [min(window, T) for window in windows] or [T]
    choices = sorted(set(clipped))  # the kernel's masks are constants, the layer is not: a branch for each
    tables = [attention_splash.masks(T // shards, shards, heads, window, interpret) for window in choices]
    choice = jnp.asarray([choices.index(window) for window in clipped], jnp.int32)[layer if windows else 0]

    def local(constants, part: Part):
        tables, choice = constants
        return lax.switch(choice, [partial(attention_splash.attend, table) for table in tables], *part[:5])

    specs = [attention_splash.masks_spec(table, split.mesh, split.time) for table in tables] if split else None
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_BT)
    return _on_mesh(local, split, (tables, choice), (specs, PartitionSpec()), arrays)


def by_chunks(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, *, windows=(), split=None, kernel: Kernel) -> Array:
    """`row_attention` by a kernel that is told for each query and key whether one sees the other."""
    window = jnp.asarray(windows, jnp.int32)[layer] if windows else jnp.int32(q_BTNH.shape[1])
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_BT)
    return _on_mesh(partial(_in_chunks, kernel), split, window, PartitionSpec(), arrays)


def _on_mesh(local: Callable[[Any, Part], Array], split: Split | None, constants, constants_spec, arrays) -> Array:
    """`local(constants, part)` on each device, for its part of the arrays (queries, keys, values, segments)."""
    q, k, v, segment_BT = arrays
    if split is None:
        return local(constants, Part(q, k, v, segment_BT, segment_BT, 0))
    mesh, rows, time, heads = split

    def per_device(constants, q, k, v, segment_BT):
        segment_BS, first = segment_BT, 0
        if split.parts(time) > 1:
            k, v, segment_BS = (lax.all_gather(x, time, axis=1, tiled=True) for x in (k, v, segment_BT))
            first = lax.axis_index(time) * q.shape[1]
        return local(constants, Part(q, k, v, segment_BT, segment_BS, first))

    spec = PartitionSpec(rows, time, heads)
    return jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(constants_spec, spec, spec, spec, PartitionSpec(rows, time)),
        out_specs=spec,
        check_vma=False,  # a Pallas kernel does not say over which axes its result varies
    )(constants, *arrays)


def _in_chunks(kernel: Kernel, window: Array, part: Part) -> Array:
    """The kernel's answer for all queries, for so many at a time that their scores are at most SCORE_BUDGET."""
    q_BTNH, k_BSKH, v_BSKH, segment_BT, segment_BS, first = part
    (B, T, N, _), S, dtype = q_BTNH.shape, k_BSKH.shape[1], k_BSKH.dtype
    position_T = first + jnp.arange(T)

    def stretch(q_BCNH, segment_BC, position_C, k_BSKH, v_BSKH):
        back_1CS = (position_C[:, None] - jnp.arange(S)[None])[None]
        see_BCS = (segment_BC[:, :, None] == segment_BS[:, None]) & (back_1CS >= 0) & (back_1CS < window)
        return kernel(q_BCNH, k_BSKH.astype(dtype), v_BSKH.astype(dtype), see_BCS)

    C = max(1, SCORE_BUDGET // (B * N * S))
    if C >= T:
        return stretch(q_BTNH, segment_BT, position_T, k_BSKH, v_BSKH)
    count = -(-T // C)
    fill = count * C - T

    def cut(x_BT):
        filled_BT = jnp.pad(x_BT, ((0, 0), (0, fill), *[(0, 0)] * (x_BT.ndim - 2)), mode="edge")
        return jnp.moveaxis(filled_BT.reshape(x_BT.shape[0], count, C, *x_BT.shape[2:]), 1, 0)

    # The scan adds up the gradients of keys and values in the dtype that they come in with, hence float32.
    k_BSKH, v_BSKH = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
    again = jax.checkpoint(stretch, prevent_cse=False)
    queries = (cut(q_BTNH), cut(segment_BT), cut(position_T[None])[:, 0])
    _, context = lax.scan(lambda none, x: (none, again(*x, k_BSKH, v_BSKH)), None, queries)
    return jnp.moveaxis(context, 0, 1).reshape(B, count * C, *q_BTNH.shape[2:])[:, :T]


def einsum(q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, see_BCS: Array) -> Array:
    """The kernel for any platform."""
    B, C, N, H = q_BCNH.shape
    K = k_BSKH.shape[2]
    q_BCKRH = q_BCNH.reshape(B, C, K, N // K, H)
    score_BKRCS = jnp.einsum("bckrh,bskh->bkrcs", q_BCKRH, k_BSKH, preferred_element_type=jnp.float32)
    score_BKRCS = jnp.where(see_BCS[:, None, None], score_BKRCS * H**-0.5, MASKED)
    share_BKRCS = jax.nn.softmax(score_BKRCS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("bkrcs,bskh->bckrh", share_BKRCS, v_BSKH).reshape(B, C, N, H)


def cudnn(q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, see_BCS: Array, *, implementation: Any = "cudnn") -> Array:
    """The kernel for NVIDIA GPUs. Another `implementation` of `jax.nn.dot_product_attention` runs elsewhere."""
    even = ((0, 0), (0, q_BCNH.shape[1] % 2), (0, k_BSKH.shape[1] % 2))  # both lengths must be, beside a mask
    see_B1CS = jnp.pad(see_BCS, even)[:, None]
    q, k, v = (
        jnp.pad(x, (*pad, (0, 0), (0, 0))) for x, pad in ((q_BCNH, even[:2]), (k_BSKH, even[::2]), (v_BSKH, even[::2]))
    )
    context = jax.nn.dot_product_attention(q, k, v, mask=see_B1CS, implementation=implementation)
    return context[:, : q_BCNH.shape[1]]


def cudnn_takes(q_BTNH: Array) -> bool:
    """Whether cuDNN has a kernel for such queries."""
    H = q_BTNH.shape[3]
    return q_BTNH.dtype in (jnp.bfloat16, jnp.float16) and H <= 128 and H % 8 == 0
