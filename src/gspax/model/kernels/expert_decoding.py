"""Expert parallelism for a decoding step: a few rows on each device, through experts sharded over many devices.

As `expert_parallel`, for use inside `jax.shard_map`, and with the same result; but it is not differentiable, and made
for rows that are cheap to move and weights that are not: a device reads each of its experts once. There are two
exchanges:

- `to_experts`, on TPU: each choice is sent to the device of its expert and its result is sent back
  (`lax.ragged_all_to_all`).
- `gathered`, on any device: every device gathers the rows of all, computes the choices of its own experts, and the
  results are summed and scattered.

Both work through buffers of R choices, in as many rounds as the busiest device (`to_experts`) or the device itself
(`gathered`) needs. Usually that is one; no choice is dropped, and no memory is reserved for the worst case.

Axes: N rows on a device, A choices of a row, M = N·A choices, X devices along the axis, K experts on each, E = X·K,
D model, F expert width, R choices of a buffer.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.model.kernels import expert_ffn as local
from gspax.model.kernels.expert_ffn import Experts
from gspax.model.kernels.quantization import cast, is_quantized

CAPACITY_FACTOR = 1.25  # of a buffer, in even shares
EXTRA_ROWS = 64  # added to that: the shares of a few rows are uneven by chance
FEW_EXPERTS = 2  # a device multiplies all rows of its buffer by so many; by more, only each expert's own
LANES = 128


def expert_decoding(x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD, *, axis: str, ragged: bool) -> Array:
    """`expert_parallel` of a few rows: y_ND in x's dtype.

    Args:
      x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD: as for `expert_parallel`.
      axis: the mesh axis that the experts are sharded over.
      ragged: whether the devices support a ragged all-to-all, if they are TPUs.
    """
    experts = Experts(w_gate_KDF, w_up_KDF, w_down_KFD)
    if not ragged:
        return gathered(x_ND, expert_NA, gate_NA, experts, axis=axis)
    return lax.platform_dependent(
        x_ND, expert_NA, gate_NA, experts, tpu=partial(to_experts, axis=axis), default=partial(gathered, axis=axis)
    )


def buffer_rows(N: int, A: int, X: int, K: int) -> int:
    """R: `CAPACITY_FACTOR` even shares and `EXTRA_ROWS`, in whole tiles, but no more than can arrive."""
    share = int(CAPACITY_FACTOR * N * A) + EXTRA_ROWS
    return min(-(-share // 16) * 16, X * N * min(A, K))


def gathered(x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, axis: str) -> Array:
    """The experts of rows that all devices gather."""
    (N, A), X, K = expert_NA.shape, lax.axis_size(axis), experts.gate_EDF.shape[0]
    R = buffer_rows(N, A, X, K)
    x_GD, expert_GA, gate_GA = (lax.all_gather(x, axis, tiled=True) for x in (x_ND, expert_NA, gate_NA))
    own_M = expert_GA.reshape(-1) - lax.axis_index(axis) * K
    own_M = jnp.where((own_M >= 0) & (own_M < K), own_M, K)
    order_M = jnp.pad(_sort((own_M == K).astype(jnp.int32), 2), (0, R))
    count = (own_M < K).sum(dtype=jnp.int32)

    def add(number: Array, y_GD: Array) -> Array:
        choice_R = lax.dynamic_slice_in_dim(order_M, number * R, R)
        here_R = number * R + jnp.arange(R, dtype=jnp.int32) < count
        row_R = jnp.where(here_R, choice_R // A, X * N)
        expert_R = jnp.where(here_R, own_M[choice_R], K)
        y_RD = _apply_own(local.take_rows(x_GD, row_R), expert_R, gate_GA.reshape(-1)[choice_R], experts)
        return y_GD + _sum_rows(row_R, y_RD, X * N)

    y_GD = lax.fori_loop(0, -(-count // R), add, _zeros_like_all(x_GD, jnp.float32, own_M, experts))
    return lax.psum_scatter(y_GD, axis, tiled=True).astype(x_ND.dtype)


def to_experts(
    x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, axis: str, exchange=lax.ragged_all_to_all
) -> Array:
    """The experts of choices that are sent to them. `exchange` has the signature of `lax.ragged_all_to_all`."""
    (N, A), X, K = expert_NA.shape, lax.axis_size(axis), experts.gate_EDF.shape[0]
    R = buffer_rows(N, A, X, K)
    here = lax.axis_index(axis)
    device_M = expert_NA.reshape(-1) // K  # X for a dropped choice
    order_M = _sort(device_M, X + 1)
    count_X = (device_M[None] == jnp.arange(X, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    rows_XX = lax.all_gather(count_X, axis)  # from device, to device
    starts_XX, places_XX = jnp.cumsum(rows_XX, 1) - rows_XX, jnp.cumsum(rows_XX, 0) - rows_XX
    x_MD = x_ND[order_M // A]
    # Gate and expert of a choice, as a row of a whole tile.
    about_M2 = jnp.stack([gate_NA.astype(jnp.float32), (expert_NA % K).astype(jnp.float32)], axis=-1).reshape(-1, 2)
    about_ML = jnp.pad(about_M2[order_M], ((0, 0), (0, LANES - 2)))

    def add(number: Array, back_MD: Array) -> Array:
        # Of the rows that a device sends to another: those that arrive in this round.
        first_XX, last_XX = (jnp.clip(n * R - places_XX, 0, rows_XX) for n in (number, number + 1))
        size_XX = last_XX - first_XX
        start_XX, place_XX = starts_XX + first_XX, jnp.maximum(places_XX - number * R, 0)
        there = start_XX[here], size_XX[here], place_XX[here], size_XX[:, here]
        x_RD = exchange(x_MD, jnp.zeros_like(back_MD, shape=(R, x_ND.shape[1])), *there, axis_name=axis)
        about_RL = exchange(about_ML, jnp.zeros_like(about_ML, shape=(R, LANES)), *there, axis_name=axis)
        arrived_R = jnp.arange(R, dtype=jnp.int32) < size_XX[:, here].sum()
        expert_R = jnp.where(arrived_R, about_RL[:, 1].astype(jnp.int32), K)
        y_RD = _apply_own(x_RD, expert_R, about_RL[:, 0], experts)
        return exchange(
            y_RD, back_MD, place_XX[:, here], size_XX[:, here], start_XX[:, here], size_XX[here], axis_name=axis
        )

    rounds = -(-rows_XX.sum(0).max() // R)
    back_MD = lax.fori_loop(0, rounds, add, _zeros_like_all(x_MD, x_MD.dtype, about_ML, experts))
    return _sum_rows(order_M // A, back_MD, N).astype(x_ND.dtype)


def _zeros_like_all(x: Array, dtype: jnp.dtype, other: Array, experts: Experts) -> Array:
    """Zeros in the shape of x that vary over the mesh axes of all these arrays."""
    return local.vary_alike(jnp.zeros(x.shape, dtype), x, other, *experts)[0]


def _sort(key_M: Array, keys: int) -> Array:
    """The indices that sort keys below `keys`, in one int32 operand."""
    M = key_M.size
    if keys * M >= 2**31:
        raise ValueError(f"{M} choices with {keys} keys do not fit an int32 sort key")
    return lax.sort(key_M * M + jnp.arange(M, dtype=jnp.int32), is_stable=False) % M


def _apply_own(x_RD: Array, expert_R: Array, gate_R: Array, experts: Experts) -> Array:
    """Each row through its expert out of K, times its gate, in x's dtype; zeros for expert K."""
    K = experts.gate_EDF.shape[0]
    if K > FEW_EXPERTS:
        x_RD, gate_R1, *weights = local.vary_alike(x_RD, gate_R[:, None], *experts)
        return local.forward(local.sort_by_expert(expert_R[:, None], K), x_RD, gate_R1, Experts(*weights))
    w = cast(experts, x_RD.dtype)
    own_KR = expert_R[None] == jnp.arange(K, dtype=jnp.int32)[:, None]
    x_RD = jnp.where((expert_R < K)[:, None], x_RD, 0)
    a_KRF, u_KRF = (local.dot("rd,kdf->krf", x_RD, w_KDF) for w_KDF in (w.gate_EDF, w.up_EDF))
    gate_KR = jnp.where(own_KR, gate_R.astype(jnp.float32)[None], 0)
    h_KRF = (jax.nn.silu(a_KRF) * u_KRF * gate_KR[..., None]).astype(x_RD.dtype)
    if is_quantized(w.down_EFD):
        return local.dot("krf,kfd->krd", h_KRF, w.down_EFD).sum(0).astype(x_RD.dtype)
    return local.dot("krf,kfd->rd", h_KRF, w.down_EFD).astype(x_RD.dtype)


def _sum_rows(row_R: Array, y_RD: Array, rows: int) -> Array:
    """The sum of the choices of each row, float32: a product with zeros and ones, which accelerators do fast."""
    own_NR = (row_R[None] == jnp.arange(rows, dtype=jnp.int32)[:, None]).astype(y_RD.dtype)
    return jnp.matmul(own_NR, y_RD, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
