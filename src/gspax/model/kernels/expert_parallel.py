"""Expert parallelism: each of the X devices along a mesh axis holds E / X experts, and rows are exchanged between them.

For use inside `jax.shard_map`, where every device has its own N rows. `expert_parallel` is for the rows of an update or
a prefill and is differentiable. Two exchanges give the same result:

- `ring`, on any device: the rows of all devices go once around the axis together with their partial results. At each
  of the X steps a device's experts add their part. A device holds one device's rows at a time, however uneven the
  routing is.
- `all_to_all`, on TPU: each row is sent to the devices of its experts and the results are sent back
  (`lax.ragged_all_to_all`). The receive buffer has the capacity of CAPACITY_FACTOR even shares. If any device of the
  mesh would receive more, all devices use the ring instead (a permutation is one operation of all of them), and the
  result says so. No choice is ever dropped for lack of capacity, and no memory is reserved for the worst case.

The backward pass is written by hand and recomputes: it saves only the arguments, exchanges x and the gradient of the
result, and receives the gradient of x.

`expert_decoding` is for a decoding step, whose few rows are cheap to move while weights are not: a device reads each of
its experts once. It has no gradient. Its two exchanges:

- `to_experts`, on TPU: each choice is sent to the device of its expert and its result is sent back.
- `gathered`, on any device: every device gathers the rows of all, computes the choices of its own experts, and the
  results are summed and scattered.

Both work through buffers of R choices, in as many rounds as the busiest device (`to_experts`) or the device itself
(`gathered`) needs. Usually that is one.

The exchange is chosen when the program is lowered: XLA has no ragged all-to-all for CPUs. It has none for some TPU
slices either (`has_ragged_all_to_all`).

Axes: as in `expert_ffn`, and X devices along the axis, E experts in all, K = E / X on each, R rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.model.kernels import expert_ffn as local
from gspax.model.kernels.expert_ffn import BLOCK, Experts, Permutation, vary_alike
from gspax.model.kernels.weights import cast
from gspax.types import PyTree

CAPACITY_FACTOR = 1.5  # of a receive buffer, in even shares; with a few devices the busiest rarely gets more
EXTRA_ROWS = 256  # added to that: the shares of a few rows are uneven by chance
DECODING_CAPACITY_FACTOR, DECODING_EXTRA_ROWS = 1.25, 64  # the same for a decoding step
FEW_EXPERTS = 2  # in decoding, up to this many experts multiply all rows of the buffer; more multiply their own rows
LANES = 128


class Exchange(NamedTuple):
    """The two passes of experts that are sharded over devices.

    forward(x_ND, expert_NA, gate_NA, experts) -> y_ND, fell_back
    backward(x_ND, expert_NA, gate_NA, experts, dy_ND) -> dx_ND, dgate_NA, dexperts
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Experts]]


def expert_parallel(
    x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, exchange: Exchange
) -> tuple[Array, Array]:
    """Run `expert_ffn` where device i of a mesh axis holds the experts i K to (i + 1) K - 1.

    Args:
        x_ND: this device's rows, float32 or bfloat16.
        expert_NA: int32 in [0, E], numbered over all devices; E drops the choice.
        gate_NA: the weight of each choice, used in float32.
        experts: the experts of this device.
        exchange: `by_platform`, `ring` or `all_to_all`, of an axis of two devices or more.

    Returns:
        y_ND in x's dtype, and fell_back, int32 and replicated: 1 if the ring replaced the all-to-all, else 0.

    Raises:
        TypeError: expert_NA is not int32.
    """
    if expert_NA.dtype != jnp.int32:
        raise TypeError(f"expert_NA must be int32, got {expert_NA.dtype}")
    return _exchanged(exchange, *vary_alike(x_ND, expert_NA, gate_NA, experts))


def by_platform(axis: str) -> Exchange:
    """Return the all-to-all on TPU, the ring elsewhere."""
    around, direct = ring(axis), all_to_all(axis)
    return Exchange(
        partial(lax.platform_dependent, tpu=direct.forward, default=around.forward),
        partial(lax.platform_dependent, tpu=direct.backward, default=around.backward),
    )


def has_ragged_all_to_all(device_kind: str, devices: int) -> bool:
    """Return whether the TPU compiler supports a ragged all-to-all on a slice of this many devices of a kind.

    It rejects v5e slices of more than 16 chips ("limited ICI routing", libtpu 0.0.51).
    """
    return devices <= 16 or device_kind not in ("TPU v5 lite", "TPU v5e")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(
    exchange: Exchange, x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts
) -> tuple[Array, Array]:
    return exchange.forward(x_ND, expert_NA, gate_NA, experts)


def _exchanged_forward(exchange: Exchange, *args: PyTree) -> tuple[tuple[Array, Array], PyTree]:
    return exchange.forward(*args), args


def _exchanged_backward(
    exchange: Exchange, args: PyTree, cotangents: tuple[Array, Array]
) -> tuple[Array, None, Array, Experts]:
    dx_ND, dgate_NA, dexperts = exchange.backward(*args, cotangents[0])
    return dx_ND, None, dgate_NA, dexperts


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def buffer_rows(
    choices: tuple[int, ...], devices: int, experts: int, *, capacity_factor: float, extra_rows: int, tile: int = 8
) -> int:
    """Compute R: rows of a receive buffer, for [N, A] choices and `experts` experts on each device.

    R is `capacity_factor` even shares plus `extra_rows`, rounded up to a multiple of `tile`, but never more than could
    arrive.
    """
    N, A = choices
    return min(-(-(int(capacity_factor * N * A) + extra_rows) // tile) * tile, devices * N * min(A, experts))


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, *like: PyTree) -> Array:
    """Return zeros that vary over the mesh axes that these arrays vary over."""
    return vary_alike(jnp.zeros(shape, dtype), like)[0]


def _empty(shape: tuple[int, ...], x: Array, *like: PyTree) -> Array:
    """Return memory of x's dtype with any values."""
    return vary_alike(lax.empty(shape, x.dtype), x, *like)[0]


# --- ring ------------------------------------------------------------------------------------------------------------


def ring(axis: str) -> Exchange:
    """Return the exchange that passes rows from device to device."""

    def forward(*args: PyTree) -> tuple[Array, Array]:
        return _ring_forward(axis, *args), jnp.int32(0)

    return Exchange(forward, partial(_ring_backward, axis))


def _ring_forward(axis: str, x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts) -> Array:
    def step(carry: PyTree, _: None) -> tuple[PyTree, None]:
        x_ND, expert_NA, gate_NA, y_ND = carry
        y_ND += local.forward(_sort_local(axis, expert_NA, experts), x_ND, gate_NA, experts).astype(jnp.float32)
        return _to_next_device(axis, (x_ND, expert_NA, gate_NA, y_ND)), None

    start = x_ND, expert_NA, gate_NA, _zeros(x_ND.shape, jnp.float32, x_ND)
    return lax.scan(step, start, length=lax.axis_size(axis))[0][3].astype(x_ND.dtype)


def _ring_backward(
    axis: str, x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, dy_ND: Array
) -> tuple[Array, Array, Experts]:
    def step(carry: PyTree, _: None) -> tuple[PyTree, None]:
        (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts = carry
        permutation = _sort_local(axis, expert_NA, experts)
        dx_ND, dgate_NA, added = local.backward(permutation, x_ND, gate_NA, experts, dy_ND)
        sums, dexperts = jax.tree.map(
            lambda total, a: total + a.astype(jnp.float32), (sums, dexperts), ((dx_ND, dgate_NA), added)
        )
        return (_to_next_device(axis, (x_ND, expert_NA, gate_NA, dy_ND, sums)), dexperts), None

    like = (x_ND, gate_NA), experts
    sums, dexperts = jax.tree.map(lambda a: _zeros(a.shape, jnp.float32, x_ND), like)
    start: PyTree = (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts
    ((*_, sums), dexperts), _ = lax.scan(step, start, length=lax.axis_size(axis))
    (dx_ND, dgate_NA), dexperts = jax.tree.map(lambda total, a: total.astype(a.dtype), (sums, dexperts), like)
    return dx_ND, dgate_NA, dexperts


def _sort_local(axis: str, expert_NA: Array, experts: Experts) -> Permutation:
    """Return the permutation of the choices of this device's experts; all others are dropped."""
    return local.sort_by_expert(_own_experts(axis, expert_NA, experts), experts.up_EDF.shape[0])


def _own_experts(axis: str, expert: Array, experts: Experts) -> Array:
    """Return the numbers of the experts among this device's K; K for all others."""
    K = experts.up_EDF.shape[0]
    own = expert - lax.axis_index(axis) * K
    return jnp.where((own >= 0) & (own < K), own, K)


def _to_next_device(axis: str, carry: PyTree) -> PyTree:
    X = lax.axis_size(axis)
    return lax.ppermute(carry, axis, [(i, (i + 1) % X) for i in range(X)])


# --- all to all ------------------------------------------------------------------------------------------------------


def all_to_all(
    axis: str,
    *,
    capacity_factor: float = CAPACITY_FACTOR,
    extra_rows: int = EXTRA_ROWS,
    ragged_all_to_all: Callable[..., Array] = lax.ragged_all_to_all,
) -> Exchange:
    """Return the exchange that sends rows, with receive buffers of `buffer_rows` rows."""

    def direct_or_ring(direct: Callable[..., PyTree], around: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def run(x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *dy_ND: Array) -> PyTree:
            X, K = lax.axis_size(axis), experts.up_EDF.shape[0]
            N, A = expert_NA.shape
            R = buffer_rows(expert_NA.shape, X, K, capacity_factor=capacity_factor, extra_rows=extra_rows)
            outgoing = local.sort_by_expert(expert_NA, X * K)
            rows_XXK = lax.all_gather(outgoing.count_E, axis).reshape(X, X, K)  # from device, to device, to expert
            plan = Plan(axis, ragged_all_to_all, rows_XXK, outgoing, R + BLOCK)
            if X * N * min(A, K) <= R:
                return direct(plan, x_ND, gate_NA, experts, *dy_ND), jnp.int32(0)
            most = lax.pmax(rows_XXK.sum((0, 2)).max(), tuple(jax.sharding.get_abstract_mesh().manual_axes))
            result = lax.cond(
                most > R,
                lambda: around(axis, x_ND, expert_NA, gate_NA, experts, *dy_ND),
                lambda: direct(plan, x_ND, gate_NA, experts, *dy_ND),
            )
            return result, (most > R).astype(jnp.int32)

        return run

    backward = direct_or_ring(_direct_backward, _ring_backward)
    return Exchange(direct_or_ring(_direct_forward, _ring_forward), lambda *args: backward(*args)[0])


class Plan(NamedTuple):
    """The rows that each device sends to each other device, and their places there."""

    axis: str
    ragged_all_to_all: Callable[..., Array]
    rows_XXK: Array  # from device, to device, for expert; known to all of them
    outgoing: Permutation  # of this device's choices, by expert and therefore by device
    buffer: int  # R

    def received(self) -> Array:
        """Return count_K: the rows that this device receives for each of its experts."""
        return self.rows_XXK[:, lax.axis_index(self.axis)].sum(0)

    def send(self, x_SD: Array) -> Array:
        """Send sorted rows to their experts' devices, ordered there by expert: x_RD; zeros after the last row."""
        starts_XXK, places_XXK = self._starts_and_places()
        here = lax.axis_index(self.axis)
        slices = starts_XXK[here], self.rows_XXK[here], places_XXK[here], self.rows_XXK[:, here]
        return self._move(x_SD, self.buffer, slices)

    def send_back(self, y_RD: Array) -> Array:
        """Return received rows to the places that `send` took them from: y_SD."""
        starts_XXK, places_XXK = self._starts_and_places()
        here = lax.axis_index(self.axis)
        slices = places_XXK[:, here], self.rows_XXK[:, here], starts_XXK[:, here], self.rows_XXK[here]
        return self._move(y_RD, self.outgoing.order_S.shape[0], slices)

    def _starts_and_places(self) -> tuple[Array, Array]:
        """Compute the offsets of rows at the sender and at the receiver per (from device, to device, expert)."""
        rows_XM = self.rows_XXK.reshape(self.rows_XXK.shape[0], -1)
        starts_XXK = (jnp.cumsum(rows_XM, 1) - rows_XM).reshape(self.rows_XXK.shape)
        count_XK = self.rows_XXK.sum(0)
        first_XK = jnp.cumsum(count_XK, 1) - count_XK
        return starts_XXK, first_XK[None] + jnp.cumsum(self.rows_XXK, 0) - self.rows_XXK

    def _move(self, x: Array, size: int, slices: tuple[Array, ...]) -> Array:
        buffer = _zeros((size, *x.shape[1:]), x.dtype, x)
        return self.ragged_all_to_all(x, buffer, *(counts.reshape(-1) for counts in slices), axis_name=self.axis)


def _direct_forward(plan: Plan, x_ND: Array, gate_NA: Array, experts: Experts) -> Array:
    x_RD, gate_R = plan.send(_dispatch(plan, x_ND)), _send_gates(plan, gate_NA)
    y_RD = local.BY_PLATFORM.forward(x_RD, gate_R, experts, plan.received())
    return local.combine(plan.outgoing, plan.send_back(y_RD))


def _direct_backward(
    plan: Plan, x_ND: Array, gate_NA: Array, experts: Experts, dy_ND: Array
) -> tuple[Array, Array, Experts]:
    x_RD, dy_RD = (plan.send(_dispatch(plan, rows_ND)) for rows_ND in (x_ND, dy_ND))
    gate_R = _send_gates(plan, gate_NA)
    dx_RD, dgate_R, dexperts = local.BY_PLATFORM.backward(x_RD, gate_R, experts, plan.received(), dy_RD)
    dgate_NA = local.take_rows(plan.send_back(dgate_R), plan.outgoing.place_NA)
    return local.combine(plan.outgoing, plan.send_back(dx_RD)), dgate_NA, dexperts


def _dispatch(plan: Plan, x_ND: Array) -> Array:
    """Run `local.dispatch` without its fill, which takes a pass: empty rows are not sent."""
    return x_ND.at[plan.outgoing.order_S // plan.outgoing.place_NA.shape[1]].get(mode="clip")


def _send_gates(plan: Plan, gate_NA: Array) -> Array:
    return plan.send(local.take_rows(gate_NA.reshape(-1), plan.outgoing.order_S))


# --- a decoding step -------------------------------------------------------------------------------------------------


def expert_decoding(
    x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, axis: str, ragged: bool
) -> Array:
    """Run `expert_parallel` on a few rows: y_ND in x's dtype. Not differentiable.

    With `ragged` the devices support a ragged all-to-all if they are TPUs.
    """
    if not ragged:
        return gathered(x_ND, expert_NA, gate_NA, experts, axis=axis)
    return lax.platform_dependent(
        x_ND, expert_NA, gate_NA, experts, tpu=partial(to_experts, axis=axis), default=partial(gathered, axis=axis)
    )


def _decoding_rows(expert_NA: Array, axis: str, experts: Experts) -> int:
    """Compute R in decoding."""
    return buffer_rows(
        expert_NA.shape,
        lax.axis_size(axis),
        experts.up_EDF.shape[0],
        capacity_factor=DECODING_CAPACITY_FACTOR,
        extra_rows=DECODING_EXTRA_ROWS,
        tile=16,
    )


def gathered(x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, axis: str) -> Array:
    """Run the experts on rows that all devices gather."""
    (N, A), X, K = expert_NA.shape, lax.axis_size(axis), experts.up_EDF.shape[0]
    R = _decoding_rows(expert_NA, axis, experts)
    x_GD, expert_GA, gate_GA = (lax.all_gather(x, axis, tiled=True) for x in (x_ND, expert_NA, gate_NA))
    own_M = _own_experts(axis, expert_GA.reshape(-1), experts)
    order_M = jnp.pad(local.sort_keys((own_M == K).astype(jnp.int32), 2), (0, R))
    count = (own_M < K).sum(dtype=jnp.int32)

    def add(number: Array, y_GD: Array) -> Array:
        choice_R = lax.dynamic_slice_in_dim(order_M, number * R, R)
        here_R = number * R + jnp.arange(R, dtype=jnp.int32) < count
        row_R = jnp.where(here_R, choice_R // A, X * N)
        expert_R = jnp.where(here_R, own_M[choice_R], K)
        y_RD = _apply_own(local.take_rows(x_GD, row_R), expert_R, gate_GA.reshape(-1)[choice_R], experts)
        return y_GD + _sum_rows(row_R, y_RD, X * N)

    y_GD = lax.fori_loop(0, -(-count // R), add, _zeros(x_GD.shape, jnp.float32, x_GD, own_M, experts))
    return lax.psum_scatter(y_GD, axis, tiled=True).astype(x_ND.dtype)


def to_experts(
    x_ND: Array,
    expert_NA: Array,
    gate_NA: Array,
    experts: Experts,
    *,
    axis: str,
    exchange: Callable[..., Array] = lax.ragged_all_to_all,
) -> Array:
    """Run the experts on choices that are sent to them. `exchange` has the signature of `lax.ragged_all_to_all`."""
    (N, A), X, K = expert_NA.shape, lax.axis_size(axis), experts.up_EDF.shape[0]
    R, here = _decoding_rows(expert_NA, axis, experts), lax.axis_index(axis)
    device_M = expert_NA.reshape(-1) // K  # X for a dropped choice
    order_M = local.sort_keys(device_M, X + 1)
    rows_XX = lax.all_gather(local.count_keys(device_M, X), axis)  # from device, to device
    starts_XX, places_XX = jnp.cumsum(rows_XX, 1) - rows_XX, jnp.cumsum(rows_XX, 0) - rows_XX
    x_MWD = _whole_words(x_ND)[order_M // A]
    # Gate and expert of a choice, as a row of a whole tile.
    about_M2 = jnp.stack([gate_NA.astype(jnp.float32), (expert_NA % K).astype(jnp.float32)], axis=-1).reshape(-1, 2)
    about_ML = jnp.pad(about_M2[order_M], ((0, 0), (0, LANES - 2)))

    def add(number: Array, back_MWD: Array) -> Array:
        # Of the rows that a device sends to another: those that arrive in this round.
        first_XX, last_XX = (jnp.clip(n * R - places_XX, 0, rows_XX) for n in (number, number + 1))
        size_XX = last_XX - first_XX
        start_XX, place_XX = starts_XX + first_XX, jnp.maximum(places_XX - number * R, 0)
        there = start_XX[here], size_XX[here], place_XX[here], size_XX[:, here]
        x_RD = exchange(x_MWD, _empty((R, *x_MWD.shape[1:]), x_MWD), *there, axis_name=axis).reshape(R, -1)
        about_RL = exchange(about_ML, _empty((R, LANES), about_ML), *there, axis_name=axis)
        arrived_R = jnp.arange(R, dtype=jnp.int32) < size_XX[:, here].sum()
        expert_R = jnp.where(arrived_R, about_RL[:, 1].astype(jnp.int32), K)
        y_RD = _apply_own(x_RD, expert_R, about_RL[:, 0], experts)
        home = place_XX[:, here], size_XX[:, here], start_XX[:, here], size_XX[here]
        return exchange(_whole_words(y_RD), back_MWD, *home, axis_name=axis)

    rounds = -(-rows_XX.sum(0).max() // R)
    back_MWD = lax.fori_loop(0, rounds, add, _empty(x_MWD.shape, x_MWD, about_ML, experts))
    sent_M1 = (jnp.arange(N * A, dtype=jnp.int32) < rows_XX[here].sum())[:, None]
    back_MD = jnp.where(sent_M1, back_MWD.reshape(N * A, -1), 0)
    return _sum_rows(order_M // A, back_MD, N).astype(x_ND.dtype)


def _whole_words(x_RD: Array) -> Array:
    """Reshape rows to [R, W, D / W] of W numbers to 32 bits, the shape in which TPUs exchange them.

    XLA would otherwise rearrange all choices before the exchange, and not only the few rows that they are copies of.
    """
    return x_RD.reshape(x_RD.shape[0], max(1, 4 // x_RD.dtype.itemsize), -1)


def _apply_own(x_RD: Array, expert_R: Array, gate_R: Array, experts: Experts) -> Array:
    """Run each row through its expert out of K, times its gate, in x's dtype; zeros for expert K."""
    K = experts.up_EDF.shape[0]
    if K > FEW_EXPERTS:
        return local.forward(local.sort_by_expert(expert_R[:, None], K), *vary_alike(x_RD, gate_R[:, None], experts))
    w = cast(experts, x_RD.dtype)
    own_KR = expert_R[None] == jnp.arange(K, dtype=jnp.int32)[:, None]
    x_RD = jnp.where((expert_R < K)[:, None], x_RD, 0)
    products = [local.dot("rd,kdf->krf", x_RD, w_KDF) for w_KDF in local.entry_matrices(w)]
    gate_KR = jnp.where(own_KR, gate_R.astype(jnp.float32)[None], 0)
    product_KRF = local.gated_product(products, w, lambda b_KF: b_KF[:, None])
    h_KRF = (product_KRF * gate_KR[..., None]).astype(x_RD.dtype)
    return local.dot_and_sum("krf,kfd->rd", h_KRF, w.down_EFD)


def _sum_rows(row_R: Array, y_RD: Array, rows: int) -> Array:
    """Sum the choices of each row, float32: a product with zeros and ones, which accelerators do fast."""
    own_NR = (row_R[None] == jnp.arange(rows, dtype=jnp.int32)[:, None]).astype(y_RD.dtype)
    return jnp.matmul(own_NR, y_RD, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
