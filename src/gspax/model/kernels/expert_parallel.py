"""Expert parallelism: each of the X devices along a mesh axis holds E / X experts, and rows are exchanged between them.

For use inside `jax.shard_map`, where every device has its own N rows. Two exchanges give the same result:

- `ring`, on any device: the rows of all devices go once around the axis together with their partial results. At each
  of the X steps a device's experts add their part. A device holds one device's rows at a time, however uneven the
  routing is.
- `all_to_all`, on TPU: each row is sent to the devices of its experts and the results are sent back
  (`lax.ragged_all_to_all`). The receive buffer has the capacity of CAPACITY_FACTOR even shares. If any device of the
  mesh would receive more, all devices use the ring instead (a permutation is one operation of all of them), and the
  result says so. No choice is ever dropped for lack of capacity, and no memory is reserved for the worst case.

`expert_parallel` picks the exchange when the program is lowered: XLA has no ragged all-to-all for CPUs. It has none for
some TPU slices either (`has_ragged_all_to_all`); there, call `ring`.

The backward pass is written by hand and recomputes: it saves only the arguments, exchanges x and the gradient of the
result, and receives the gradient of x.

Axes: as in `expert_ffn`, and X devices along the axis, E experts in all, K = E / X on each, R rows of a receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.model.kernels import expert_ffn as local
from gspax.model.kernels.expert_ffn import BLOCK, Experts, Permutation, vary_alike

CAPACITY_FACTOR = 1.5  # of a receive buffer, in even shares; with a few devices the busiest rarely gets more
EXTRA_ROWS = 256  # added to that: the shares of a few rows are uneven by chance


class Exchange(NamedTuple):
    """How rows and experts are brought together.

    forward(x_ND, expert_NA, gate_NA, experts) -> y_ND, fell_back
    backward(x_ND, expert_NA, gate_NA, experts, dy_ND) -> dx_ND, dgate_NA, dexperts
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def expert_parallel(x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD, *, axis: str) -> tuple[Array, Array]:
    """`expert_ffn` where device i of the axis holds the experts i K to (i + 1) K - 1.

    Args:
        x_ND: this device's rows, float32 or bfloat16.
        expert_NA: int32 in [0, E], numbered over all devices; E drops the choice.
        gate_NA: the weight of each choice, used in float32.
        w_gate_KDF: this device's experts, as w_up_KDF and w_down_KFD.
        axis: the mesh axis that the experts are sharded over, of two devices or more.

    Returns:
        y_ND in x's dtype, and fell_back, int32 and replicated: 1 if the ring replaced the all-to-all, else 0.

    Raises:
        TypeError: expert_NA is not int32.
    """
    around, direct = _ring(axis), _all_to_all(axis, CAPACITY_FACTOR, EXTRA_ROWS, lax.ragged_all_to_all)
    by_platform = Exchange(
        partial(lax.platform_dependent, tpu=direct.forward, default=around.forward),
        partial(lax.platform_dependent, tpu=direct.backward, default=around.backward),
    )
    return _apply(by_platform, x_ND, expert_NA, gate_NA, Experts(w_gate_KDF, w_up_KDF, w_down_KFD))


def has_ragged_all_to_all(device_kind: str, devices: int) -> bool:
    """Whether the TPU compiler supports a ragged all-to-all on a slice of so many devices of this kind.

    It rejects v5e slices of more than 16 chips ("limited ICI routing", libtpu 0.0.51).
    """
    return devices <= 16 or device_kind not in ("TPU v5 lite", "TPU v5e")


def ring(x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD, *, axis: str) -> tuple[Array, Array]:
    """`expert_parallel` by the ring."""
    return _apply(_ring(axis), x_ND, expert_NA, gate_NA, Experts(w_gate_KDF, w_up_KDF, w_down_KFD))


def all_to_all(
    x_ND,
    expert_NA,
    gate_NA,
    w_gate_KDF,
    w_up_KDF,
    w_down_KFD,
    *,
    axis: str,
    capacity_factor: float = CAPACITY_FACTOR,
    extra_rows: int = EXTRA_ROWS,
    ragged_all_to_all: Callable[..., Array] = lax.ragged_all_to_all,
) -> tuple[Array, Array]:
    """`expert_parallel` by the all-to-all, with receive buffers of `buffer_rows` rows."""
    exchange = _all_to_all(axis, capacity_factor, extra_rows, ragged_all_to_all)
    return _apply(exchange, x_ND, expert_NA, gate_NA, Experts(w_gate_KDF, w_up_KDF, w_down_KFD))


def _apply(exchange, x_ND, expert_NA, gate_NA, experts):
    if expert_NA.dtype != jnp.int32:
        raise TypeError(f"expert_NA must be int32, got {expert_NA.dtype}")
    x_ND, expert_NA, gate_NA, *weights = vary_alike(x_ND, expert_NA, gate_NA, *experts)
    return _exchanged(exchange, x_ND, expert_NA, gate_NA, Experts(*weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange, x_ND, expert_NA, gate_NA, experts):
    return exchange.forward(x_ND, expert_NA, gate_NA, experts)


def _exchanged_forward(exchange, *args):
    return exchange.forward(*args), args


def _exchanged_backward(exchange, args, cotangents):
    dy_ND, _ = cotangents
    dx_ND, dgate_NA, dexperts = exchange.backward(*args, dy_ND)
    return dx_ND, None, dgate_NA, dexperts


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _zeros(shape, dtype, like):
    return vary_alike(jnp.zeros(shape, dtype), like)[0]


# --- ring ------------------------------------------------------------------------------------------------------------


def _ring(axis: str) -> Exchange:
    def forward(*args):
        return _ring_forward(axis, *args), jnp.int32(0)

    return Exchange(forward, partial(_ring_backward, axis))


def _ring_forward(axis, x_ND, expert_NA, gate_NA, experts):
    def step(carry, _):
        x_ND, expert_NA, gate_NA, y_ND = carry
        y_ND += local.forward(_sort_local(axis, expert_NA, experts), x_ND, gate_NA, experts).astype(jnp.float32)
        return _to_next_device(axis, (x_ND, expert_NA, gate_NA, y_ND)), None

    start = x_ND, expert_NA, gate_NA, _zeros(x_ND.shape, jnp.float32, x_ND)
    return lax.scan(step, start, length=lax.axis_size(axis))[0][3].astype(x_ND.dtype)


def _ring_backward(axis, x_ND, expert_NA, gate_NA, experts, dy_ND):
    def step(carry, _):
        (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts = carry
        permutation = _sort_local(axis, expert_NA, experts)
        dx_ND, dgate_NA, added = local.backward(permutation, x_ND, gate_NA, experts, dy_ND)
        sums, dexperts = jax.tree.map(
            lambda total, a: total + a.astype(jnp.float32), (sums, dexperts), ((dx_ND, dgate_NA), added)
        )
        return (_to_next_device(axis, (x_ND, expert_NA, gate_NA, dy_ND, sums)), dexperts), None

    like = (x_ND, gate_NA), experts
    sums, dexperts = jax.tree.map(lambda a: _zeros(a.shape, jnp.float32, x_ND), like)
    start: Any = (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts
    ((*_, sums), dexperts), _ = lax.scan(step, start, length=lax.axis_size(axis))
    (dx_ND, dgate_NA), dexperts = jax.tree.map(lambda total, a: total.astype(a.dtype), (sums, dexperts), like)
    return dx_ND, dgate_NA, dexperts


def _sort_local(axis, expert_NA, experts):
    """The permutation of the choices of this device's experts; all others are dropped."""
    K = experts.gate_EDF.shape[0]
    local_NA = expert_NA - lax.axis_index(axis) * K
    return local.sort_by_expert(jnp.where((local_NA >= 0) & (local_NA < K), local_NA, K), K)


def _to_next_device(axis, carry):
    X = lax.axis_size(axis)
    return lax.ppermute(carry, axis, [(i, (i + 1) % X) for i in range(X)])


# --- all to all ------------------------------------------------------------------------------------------------------


def _all_to_all(axis: str, capacity_factor: float, extra_rows: int, ragged_all_to_all: Callable) -> Exchange:
    def direct_or_ring(direct, around):
        def run(x_ND, expert_NA, gate_NA, experts, *dy_ND):
            X, K = lax.axis_size(axis), experts.gate_EDF.shape[0]
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


def buffer_rows(
    choices: tuple[int, int],
    devices: int,
    experts: int,
    *,
    capacity_factor: float = CAPACITY_FACTOR,
    extra_rows: int = EXTRA_ROWS,
) -> int:
    """R: rows of a receive buffer, for [N, A] choices and so many experts on each device.

    `capacity_factor` even shares and `extra_rows`, rounded up to a multiple of 8, but never more than could arrive.
    """
    N, A = choices
    return min(-(-(int(capacity_factor * N * A) + extra_rows) // 8) * 8, devices * N * min(A, experts))


class Plan(NamedTuple):
    """What each device sends to each other device, and where it is placed there."""

    axis: str
    ragged_all_to_all: Callable[..., Array]
    rows_XXK: Array  # from device, to device, for expert; known to all of them
    outgoing: Permutation  # of this device's choices, by expert and therefore by device
    buffer: int  # R

    def received(self) -> Array:
        """count_K: the rows that this device receives for each of its experts."""
        return self.rows_XXK[:, lax.axis_index(self.axis)].sum(0)

    def send(self, x_SD: Array) -> Array:
        """Sorted rows to the devices of their experts, ordered there by expert: x_RD; zeros after the last row."""
        starts_XXK, places_XXK = self._starts_and_places()
        here = lax.axis_index(self.axis)
        slices = starts_XXK[here], self.rows_XXK[here], places_XXK[here], self.rows_XXK[:, here]
        return self._move(x_SD, self.buffer, slices)

    def send_back(self, y_RD: Array) -> Array:
        """Received rows to the places that `send` took them from: y_SD."""
        starts_XXK, places_XXK = self._starts_and_places()
        here = lax.axis_index(self.axis)
        slices = places_XXK[:, here], self.rows_XXK[:, here], starts_XXK[:, here], self.rows_XXK[here]
        return self._move(y_RD, self.outgoing.order_S.shape[0], slices)

    def _starts_and_places(self) -> tuple[Array, Array]:
        """Where the rows from a device, to a device, for an expert begin on the first and on the second."""
        rows_XM = self.rows_XXK.reshape(self.rows_XXK.shape[0], -1)
        starts_XXK = (jnp.cumsum(rows_XM, 1) - rows_XM).reshape(self.rows_XXK.shape)
        count_XK = self.rows_XXK.sum(0)
        first_XK = jnp.cumsum(count_XK, 1) - count_XK
        return starts_XXK, first_XK[None] + jnp.cumsum(self.rows_XXK, 0) - self.rows_XXK

    def _move(self, x: Array, size: int, slices: tuple[Array, ...]) -> Array:
        buffer = _zeros((size, *x.shape[1:]), x.dtype, x)
        return self.ragged_all_to_all(x, buffer, *(each.reshape(-1) for each in slices), axis_name=self.axis)


def _direct_forward(plan, x_ND, gate_NA, experts):
    x_RD, gate_R = plan.send(_dispatch(plan, x_ND)), _send_gates(plan, gate_NA)
    y_RD = local.backend().forward(x_RD, gate_R, experts, plan.received())
    return local.combine(plan.outgoing, plan.send_back(y_RD))


def _direct_backward(plan, x_ND, gate_NA, experts, dy_ND):
    x_RD, dy_RD = (plan.send(_dispatch(plan, rows_ND)) for rows_ND in (x_ND, dy_ND))
    gate_R = _send_gates(plan, gate_NA)
    dx_RD, dgate_R, dexperts = local.backend().backward(x_RD, gate_R, experts, plan.received(), dy_RD)
    dgate_NA = local.take_rows(plan.send_back(dgate_R), plan.outgoing.place_NA)
    return local.combine(plan.outgoing, plan.send_back(dx_RD)), dgate_NA, dexperts


def _dispatch(plan, x_ND):
    """`local.dispatch` without its fill, a pass of its own: empty rows are not sent."""
    return x_ND.at[plan.outgoing.order_S // plan.outgoing.place_NA.shape[1]].get(mode="clip")


def _send_gates(plan, gate_NA):
    return plan.send(local.take_rows(gate_NA.reshape(-1), plan.outgoing.order_S))
