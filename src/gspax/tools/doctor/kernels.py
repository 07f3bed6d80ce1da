"""Compares every kernel that this platform selects with its float64 reference, on each process's first device.

Products in float32 are computed in full precision, which is not what accelerators do by default, so that one tolerance
holds everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gspax.model import decoding, moe
from gspax.model import latent_attention as latents
from gspax.model.kernels import expert_ffn, gated_delta, quantization, segments, weights
from gspax.model.kernels.attention import Rows, row_attention
from gspax.model.kernels.expert_ffn import Experts
from gspax.model.kernels.trees import make_tree
from gspax.parallel import multihost, sharding
from gspax.tools.doctor import references
from gspax.tools.doctor.results import Result, compare, skipped
from gspax.types import Array

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # relative to the largest number of an array
# Numbers are rounded to 8 bits from float32 here, and from float64 in the reference: a tie may fall to the other side.
INT8_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
T, N, K, H = 320, 4, 2, 128  # positions, heads and key heads, head size
E, A, D, F = 8, 2, 128, 128  # experts
WINDOW = 100


def normal(seed: int, *shapes: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Generate arrays of normal numbers in this dtype."""
    rng = np.random.default_rng(seed)
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for shape in shapes]


def value_and_gradients(function: Callable[..., Array], arrays: Sequence[np.ndarray], dy: np.ndarray) -> list[Array]:
    """Return the result, and the gradients of Σ result · dy with respect to each array."""

    @jax.jit
    def both(arrays: Sequence[Array], dy: Array) -> list[Array]:
        y, pullback = jax.vjp(function, *arrays)
        return [y, *pullback(dy)]

    return both(arrays, dy)


def attention(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check whole rows, forward and backward: packed segments, a window, sinks, and shared prefixes."""
    q, k, v, dcontext = normal(0, (2, T, N, H), (2, T, K, H), (2, T, K, H), (2, T, N, H), dtype=dtype)
    segment_BT = np.repeat([[1, 2, 3, 0], [1, 2, 0, 0]], [T // 4, T // 2, T // 8, T // 8], axis=1).astype(np.int32)
    prefix_BT = np.isin(segment_BT, (2, 3)).astype(np.int32)
    chain_BT = np.maximum(segment_BT - 1, 0)  # each segment continues the one before it
    is_token = (segment_BT > 0)[..., None, None]  # the result at padding is not read
    cases: dict[str, tuple[int, np.ndarray | None, list[float] | None]] = {
        "packed": (T, None, None),
        "window": (WINDOW, None, None),
        "sinks": (T, None, [-1.0, 0.0, 1.0, 2.0]),
        "shared prompts": (T, prefix_BT, None),
        "shared prefixes": (T, chain_BT, None),
    }
    for name, (window, prefix, sinks) in cases.items():
        windows = (window,) if window < T else ()
        tree = None if prefix is None else make_tree(jnp.asarray(segment_BT), jnp.asarray(prefix))
        rows = Rows(jnp.asarray(segment_BT), mesh, windows=windows, tree=tree)

        sinks_N = None if sinks is None else jnp.asarray(sinks)

        def attend(q: Array, k: Array, v: Array, rows: Rows = rows, sinks_N: Array | None = sinks_N) -> Array:
            return jnp.where(is_token, row_attention(q, k, v, 0, rows, sinks_N), 0)

        seen = references.visible(segment_BT, window, prefix)
        context, _, gradients = references.attention(q, k, v, seen, np.where(is_token, dcontext, 0), sinks)
        want = dict(zip(("context", "dq", "dk", "dv"), (np.where(is_token, context, 0), *gradients), strict=True))
        got = dict(zip(want, value_and_gradients(attend, (q, k, v), dcontext), strict=True))
        yield compare(f"attention, {name}, {dtype}", got, want, TOLERANCE[dtype])


def decode_attention(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check one query of each slot over the active positions of its cache, in this dtype and in 8 bits."""
    start_B, stop_B = np.array([0, 0, 7, 250, 0, 60]), np.array([1, T, T, 257, 64, 61])
    q, k, v = normal(1, (6, N, H), (6, K, T, H), (6, K, T, H), dtype=dtype)
    active_BT = (np.arange(T)[None] >= start_B[:, None]) & (np.arange(T)[None] < stop_B[:, None])
    kernel = decoding.on_tpu(mesh)
    bounds = [0, *np.cumsum(segments.segment_sizes(T, kernel=kernel))]
    for int8 in (False, True):

        @jax.jit
        def attend(q: Array, k: Array, v: Array, int8: bool = int8) -> tuple[Array, Array]:
            cache = tuple(
                segments.make_segment(
                    k[:, :, first:last], v[:, :, first:last], "int8" if int8 else "auto", kernel=kernel
                )
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


def latent_attention(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check latent attention: whole rows, with values narrower than keys, and a token's queries over the latents.

    The queries of a token absorb the projection of the keys, and the latents are its keys and its values.
    """
    C, rotated, H, U = 128, 64, 128, 128
    q, latent, key, dcontext = normal(6, (2, T, N, H + rotated), (2, T, C), (2, T, rotated), (2, T, N, U), dtype=dtype)
    w_key, w_value = (
        np.asarray(w * np.asarray(C**-0.5, w.dtype)) for w in normal(7, (C, N, H), (C, N, U), dtype=dtype)
    )
    segment_BT = np.repeat([[1, 2, 0], [1, 1, 0]], [T // 4, T // 2, T // 4], axis=1).astype(np.int32)
    rows, is_token = Rows(jnp.asarray(segment_BT), mesh), (segment_BT > 0)[..., None, None]

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jnp.where(is_token, row_attention(q, k, v, 0, rows, None), 0)

    def project(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.einsum("btc,cnh->btnh", np.asarray(x, np.float64), np.asarray(w, np.float64))

    heads = np.broadcast_to(np.asarray(key, np.float64)[:, :, None], (2, T, N, rotated))
    k, v = np.concatenate([project(latent, w_key), heads], axis=-1), project(latent, w_value)
    given = [np.asarray(jnp.asarray(x, dtype)) for x in (q, k, v)]
    seen = references.visible(segment_BT, T)
    context, _, gradients = references.attention(given[0], given[1], given[2], seen, np.where(is_token, dcontext, 0))
    want = dict(zip(("context", "dq", "dk", "dv"), (np.where(is_token, context, 0), *gradients), strict=True))
    got = dict(zip(want, value_and_gradients(attend, given, dcontext), strict=True))
    yield compare(f"latent attention, rows, {dtype}", got, want, TOLERANCE[dtype])

    kernel, stop_B = decoding.on_tpu(mesh), np.array([T, T // 3])
    bounds = [0, *np.cumsum(segments.segment_sizes(T, kernel=kernel))]

    @jax.jit
    def decode(q: Array, latent: Array, key: Array) -> Array:
        cached = jnp.concatenate([latent, key], axis=-1)[:, None]
        absorbed = latents.absorb(q[:, None, :, :H], jnp.asarray(w_key))[:, 0] * ((C + rotated) / (H + rotated)) ** 0.5
        rescaled = q[..., H:] * ((C + rotated) / (H + rotated)) ** 0.5
        made = (segments.make_segment(None, cached[:, :, a:b], "auto", kernel=kernel) for a, b in pairwise(bounds))
        query = jnp.concatenate([absorbed, rescaled], axis=-1)
        attended_BNC, _ = segments.attend(query, tuple(made), jnp.zeros(2, int), jnp.asarray(stop_B), kernel=kernel)
        return jnp.einsum("bnc,cnu->bnu", attended_BNC[..., :C], w_value, preferred_element_type=jnp.float32)

    active_BT = np.arange(T)[None] < stop_B[:, None]
    context, *_ = references.attention(q[:, :1], k, v, active_BT[:, None])
    yield compare(f"latent attention, decoding, {dtype}", decode(q[:, 0], latent, key), context[:, 0], TOLERANCE[dtype])


def delta_net(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check the gated delta rule: on packed rows in chunks, forward and backward, and token by token."""
    length, heads, H, U = 2 * gated_delta.CHUNK + 32, 2, 64, 128
    shapes = (2, length, 1, H), (2, length, 1, H), (2, length, 1, heads, U)
    qkv = normal(8, *shapes, dtype=dtype)
    dout, *gates = normal(9, shapes[2], (2, length, 1, heads), (2, length, 1, heads), dtype="float32")
    arrays = [*qkv, -0.3 * np.abs(gates[0]), 1 / (1 + np.exp(-gates[1]))]
    segment_BT = np.repeat([[1, 2, 3], [1, 1, 1]], [40, 50, length - 90], axis=1).astype(np.int32)

    def rows(*arrays: Array) -> Array:
        return gated_delta.chunked_rule(gated_delta.Tokens(*arrays), jnp.asarray(segment_BT))[0]

    @jax.jit
    def step_by_step(*arrays: Array) -> tuple[Array, Array]:
        def step(state: Array, tokens: gated_delta.Tokens) -> tuple[Array, Array]:
            return gated_delta.recurrent_step(tokens, state, jnp.ones(2, bool))[::-1]

        by_time = gated_delta.Tokens(*(x.swapaxes(0, 1) for x in arrays))
        state, out = jax.lax.scan(step, jnp.zeros((2, 1, heads, H, U)), by_time)
        return out.swapaxes(0, 1), state

    def reference(row: int, segment_T: np.ndarray) -> tuple[np.ndarray, ...]:
        """Compute the outputs, the gradients, and the last state of a row, with the kernel's axes."""
        q, k = (np.repeat(x[row, :, 0, :, None], heads, axis=2) for x in arrays[:2])
        v, d = (x[row, :, 0].swapaxes(1, 2) for x in (arrays[2], dout))
        out, state, (dq, dk, dv, *dgates) = references.delta_rule(
            (q, k, v, *(x[row, :, 0] for x in arrays[3:])), segment_T, d
        )
        rest = dv.swapaxes(1, 2)[:, None], *(x[:, None] for x in dgates)
        return (
            out.swapaxes(1, 2)[:, None],
            *(x.sum(2)[:, None] for x in (dq, dk)),
            *rest,
            state.transpose(2, 0, 1)[None],
        )

    names = "out", "dq", "dk", "dv", "ddecay", "dbeta"
    packed = map(np.stack, zip(*(reference(row, segment_BT[row]) for row in range(2)), strict=True))
    want = dict(zip(names, packed, strict=False))
    got = dict(zip(want, value_and_gradients(rows, arrays, dout), strict=True))
    yield compare(f"delta net, rows, {dtype}", got, want, TOLERANCE[dtype])
    out, *_, state = map(np.stack, zip(*(reference(row, np.ones(length, int)) for row in range(2)), strict=True))
    got = dict(zip(("out", "state"), step_by_step(*arrays), strict=True))
    yield compare(f"delta net, decoding, {dtype}", got, {"out": out, "state": state}, TOLERANCE[dtype])


def int8(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check a product with weights in 8 bits."""
    x, w = normal(2, (96, D), (D, F), dtype=dtype)
    got = jax.jit(lambda x, w: weights.contract("rd,df->rf", x, quantization.quantize(w, axes=(0,))))(x, w)
    want = np.asarray(x, np.float64) @ references.rounded(w, axis=0)
    yield compare(f"product with int8 weights, {dtype}", got, want, INT8_TOLERANCE[dtype])


def expert_case(dtype: str, rows: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Generate choices, some dropped; rows, gates, and matrices of experts; the gradient of the result."""
    rng = np.random.default_rng(3)
    expert = np.where(rng.random((rows, A)) < 0.1, E, rng.integers(0, E, (rows, A))).astype(np.int32)
    *arrays, dy = normal(4, (rows, D), (rows, A), (E, D, F), (E, D, F), (E, F, D), (rows, D), dtype=dtype)
    return expert, [*arrays[:2], *(np.asarray(w * np.asarray(D**-0.5, w.dtype)) for w in arrays[2:])], dy


def experts(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check the grouped matrix products of experts, forward and backward, without and with biases, which also clip."""
    expert, arrays, dy = expert_case(dtype, 96)
    biases = [np.asarray(4 * bias) for bias in normal(5, (E, F), (E, F), dtype=dtype)]
    parts = "y", "dx", "dgates", "dgate matrix", "dup matrix", "ddown matrix", "dgate bias", "dup bias"

    def ffn(x: Array, gate: Array, *weights: Array) -> Array:
        return expert_ffn.expert_ffn(x, jnp.asarray(expert), gate, Experts(*weights))

    for name, given in (("experts", arrays), ("experts with biases", [*arrays, *biases])):
        y, gradients = references.experts(given[0], expert, given[1], given[2:], dy)
        want = dict(zip(parts, (y, *gradients), strict=False))
        got = dict(zip(want, value_and_gradients(ffn, given, dy), strict=True))
        yield compare(f"{name}, {dtype}", got, want, TOLERANCE[dtype])


def expert_exchange(mesh: Mesh, dtype: str) -> Iterator[Result]:
    """Check experts sharded over devices that exchange rows: in an update, and in a decoding step."""
    if not moe.exchanges_rows(mesh):
        yield skipped(f"expert exchange, {dtype}", "fewer than 4 devices")
        return
    expert, (x, gate, *weights), dy = expert_case(dtype, 4 * mesh.size)
    want, _ = references.experts(x, expert, gate, weights, dy)
    matrices = multihost.to_devices(weights, sharding.named_sharding(mesh))
    rows = [each.reshape(mesh.size, 4, -1) for each in (x, expert, gate)]
    placed = multihost.to_devices(rows, sharding.named_sharding(mesh, "batch"))
    for what in ("update", "decoding"):
        run = jax.jit(partial(moe._run_experts, mesh, decoding=what == "decoding"))
        got = multihost.to_host(run(*placed, Experts(*matrices))[0]).reshape(want.shape)
        yield compare(f"expert exchange, {what}, {dtype}", got, want, TOLERANCE[dtype])


LOCAL = attention, decode_attention, latent_attention, delta_net, experts, int8  # the kernels of a device by itself
