"""Every kernel that this platform selects against its float64 reference, on the first device of each process.

Products in float32 are computed in full precision, which is not what accelerators do by default, so that one tolerance
holds everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gspax.commands.doctor import references
from gspax.commands.doctor.results import Result, compare, skipped
from gspax.model import decoding, moe
from gspax.model.kernels import expert_ffn, quantization, segments
from gspax.model.kernels.attention import Rows, row_attention
from gspax.model.kernels.expert_ffn import Experts
from gspax.parallel import multihost, sharding
from gspax.types import Array

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # relative to the largest number of an array
# Numbers are rounded to 8 bits from float32 here, and from float64 in the reference: a tie may fall to the other side.
INT8_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
T, N, K, H = 320, 4, 2, 128  # positions, heads and key heads, head size
E, A, D, F = 8, 2, 128, 128  # experts
WINDOW = 100


def normal(seed: int, *shapes: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Normal numbers in this dtype."""
    rng = np.random.default_rng(seed)
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for shape in shapes]


def value_and_gradients(function: Callable[..., Array], arrays: Sequence[np.ndarray], dy: np.ndarray) -> list[Array]:
    """The result, and the gradients of Σ result · dy with respect to each array."""

    @jax.jit
    def both(arrays: Sequence[Array], dy: Array) -> list[Array]:
        y, pullback = jax.vjp(function, *arrays)
        return [y, *pullback(dy)]

    return both(arrays, dy)


def attention(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Whole rows, forward and backward: packed segments, a window, sinks, and responses that share a prompt."""
    q, k, v, dcontext = normal(0, (2, T, N, H), (2, T, K, H), (2, T, K, H), (2, T, N, H), dtype=dtype)
    segment_BT = np.repeat([[1, 2, 3, 0], [1, 2, 0, 0]], [T // 4, T // 2, T // 8, T // 8], axis=1).astype(np.int32)
    prefix_BT = np.isin(segment_BT, (2, 3)).astype(np.int32)
    is_token = (segment_BT > 0)[..., None, None]  # the result at padding is not read
    cases: dict[str, tuple[int, np.ndarray | None, list[float] | None]] = {
        "packed": (T, None, None),
        "window": (WINDOW, None, None),
        "sinks": (T, None, [-1.0, 0.0, 1.0, 2.0]),
        "shared prompts": (T, prefix_BT, None),
    }
    for name, (window, prefix, sinks) in cases.items():
        windows = (window,) if window < T else ()
        rows = Rows(jnp.asarray(segment_BT), mesh, windows=windows, prefix_BT=jax.tree.map(jnp.asarray, prefix))

        sinks_N = None if sinks is None else jnp.asarray(sinks)

        def attend(q: Array, k: Array, v: Array, rows: Rows = rows, sinks_N: Array | None = sinks_N) -> Array:
            return jnp.where(is_token, row_attention(q, k, v, 0, rows, sinks_N), 0)

        seen = references.visible(segment_BT, window, prefix)
        context, _, gradients = references.attention(q, k, v, seen, np.where(is_token, dcontext, 0), sinks)
        want = dict(zip(("context", "dq", "dk", "dv"), (np.where(is_token, context, 0), *gradients), strict=True))
        got = dict(zip(want, value_and_gradients(attend, (q, k, v), dcontext), strict=True))
        yield compare(f"attention, {name}, {dtype}", got, want, TOLERANCE[dtype])


def decode_attention(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """One query of each slot to the active positions of its cache, in this dtype and in 8 bits."""
    start_B, stop_B = np.array([0, 0, 7, 250, 0, 60]), np.array([1, T, T, 257, 64, 61])
    q, k, v = normal(1, (6, N, H), (6, K, T, H), (6, K, T, H), dtype=dtype)
    active_BT = (np.arange(T)[None] >= start_B[:, None]) & (np.arange(T)[None] < stop_B[:, None])
    kernel = decoding.on_tpu(mesh)
    bounds = [0, *np.cumsum(segments.segment_sizes(T, kernel=kernel))]
    for int8 in (False, True):

        @jax.jit
        def attend(q: Array, k: Array, v: Array, int8: bool = int8) -> tuple[Array, Array]:
            cache = tuple(
                segments.make_segment(k[:, :, first:last], v[:, :, first:last], int8=int8, kernel=kernel)
                for first, last in pairwise(bounds)
            )
            return segments.attend(q, cache, jnp.asarray(start_B), jnp.asarray(stop_B), kernel=kernel)

        keys, values = (references.rounded(x, axis=-1) if int8 else x for x in (k, v))
        cached = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        context, logsumexp, _ = references.attention(q[:, None], *cached, active_BT[:, None])
        name = f"decode attention, {dtype}, cache {'int8' if int8 else dtype}"
        tolerance = (INT8_TOLERANCE if int8 else TOLERANCE)[dtype]
        got = dict(zip(("context", "logsumexp"), attend(q, k, v), strict=True))
        yield compare(name, got, {"context": context[:, 0], "logsumexp": logsumexp[:, 0]}, tolerance)


def int8(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """A product with weights in 8 bits."""
    x, w = normal(2, (96, D), (D, F), dtype=dtype)
    got = jax.jit(lambda x, w: quantization.contract("rd,df->rf", x, quantization.quantize(w, axes=(0,))))(x, w)
    want = np.asarray(x, np.float64) @ references.rounded(w, axis=0)
    yield compare(f"product with int8 weights, {dtype}", got, want, INT8_TOLERANCE[dtype])


def expert_case(dtype: str, rows: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Choices, of which some are dropped; rows, gates, and matrices of experts; the gradient of the result."""
    rng = np.random.default_rng(3)
    expert = np.where(rng.random((rows, A)) < 0.1, E, rng.integers(0, E, (rows, A))).astype(np.int32)
    *arrays, dy = normal(4, (rows, D), (rows, A), (E, D, F), (E, D, F), (E, F, D), (rows, D), dtype=dtype)
    return expert, [*arrays[:2], *(np.asarray(w * np.asarray(D**-0.5, w.dtype)) for w in arrays[2:])], dy


def experts(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """The grouped matrix products of experts, forward and backward."""
    expert, arrays, dy = expert_case(dtype, 96)

    def ffn(x: Array, gate: Array, *weights: Array) -> Array:
        return expert_ffn.expert_ffn(x, jnp.asarray(expert), gate, Experts(*weights))

    y, gradients = references.experts(arrays[0], expert, arrays[1], arrays[2:], dy)
    want = dict(zip(("y", "dx", "dgates", "dgate matrix", "dup matrix", "ddown matrix"), (y, *gradients), strict=True))
    got = dict(zip(want, value_and_gradients(ffn, arrays, dy), strict=True))
    yield compare(f"experts, {dtype}", got, want, TOLERANCE[dtype])


def expert_exchange(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Experts that are sharded over devices, which exchange rows: in an update, and in a decoding step."""
    if not moe.exchanges_rows(mesh):
        yield skipped(f"expert exchange, {dtype}", "fewer than 4 devices")
        return
    expert, (x, gate, *weights), dy = expert_case(dtype, 4 * mesh.size)
    want, _ = references.experts(x, expert, gate, weights, dy)
    experts = jax.jit(lambda x, expert, gate, *weights: moe._run_experts(mesh, x, expert, gate, Experts(*weights))[0])
    matrices = multihost.to_devices(weights, sharding.named_sharding(mesh))
    for tokens, what in ((4, "update"), (1, "decoding")):
        rows = [each.reshape(mesh.size * 4 // tokens, tokens, -1) for each in (x, expert, gate)]
        placed = multihost.to_devices(rows, sharding.named_sharding(mesh, "batch"))
        got = multihost.to_host(experts(*placed, *matrices)).reshape(want.shape)
        yield compare(f"expert exchange, {what}, {dtype}", got, want, TOLERANCE[dtype])
