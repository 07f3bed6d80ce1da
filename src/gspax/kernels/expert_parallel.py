"""Experts that live on several devices: each of the X devices along a mesh axis has E / X of them, and rows visit them.

For use inside `jax.shard_map`, where every device has its own N rows. Two ways to the same result:

- `ring`, on any device: the rows of all devices travel once around the axis, with their results. At each of X stops the
  experts that live there add what they have to say. A device holds one device's rows at a time, however uneven the
  routing is.
- `all_to_all`, for TPUs: a row is sent to the experts that it chose and back again (`lax.ragged_all_to_all`). The
  buffer that it arrives in has room for ROOM times a device's even share. Where choices are so uneven that one would
  overflow, all devices of the mesh take the ring instead (a permutation is one operation of them all): no choice is
  ever dropped, and no memory is held for the worst case.

`expert_parallel` takes the right one when the program is lowered: XLA has no ragged_all_to_all for CPUs. For some TPUs
it has none either (`can_exchange`); on those call `ring`.

The backward pass is written out and recomputes: it keeps nothing but the arguments, sends x and the result's gradient,
and gets x's gradient back.

Letters as in `expert_ffn`, and X devices along the axis, E experts in all, K = E / X on each, R rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.kernels import expert_ffn as local
from gspax.kernels.expert_ffn import BLOCK, Experts, Routing, vary_alike

ROOM = 1.5  # of a receiving buffer, in even shares; the busiest of a few devices rarely gets more
SLACK = 256  # rows added to that: the shares of few rows are uneven by chance


class Way(NamedTuple):
    """How rows and experts meet.

    forward(x_ND, expert_NA, gate_NA, experts) -> y_ND
    backward(x_ND, expert_NA, gate_NA, experts, dy_ND) -> dx_ND, dgate_NA, dexperts
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def expert_parallel(x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD, *, axis: str) -> Array:
    """`expert_ffn` where device i of the axis has the experts i K to (i + 1) K - 1: y_ND in x's dtype.

    Args:
        x_ND: this device's rows, float32 or bfloat16.
        expert_NA: int32 in [0, E], counted over all devices; E is nowhere.
        gate_NA: the weight of each choice, used in float32.
        w_gate_KDF: this device's experts, as w_up_KDF and w_down_KFD.
        axis: the mesh axis that the experts are split over, of two devices or more.
    """
    around, there = _ring(axis), _all_to_all(axis, ROOM, SLACK, lax.ragged_all_to_all)
    chosen = Way(
        partial(lax.platform_dependent, tpu=there.forward, default=around.forward),
        partial(lax.platform_dependent, tpu=there.backward, default=around.backward),
    )
    return _apply(chosen, x_ND, expert_NA, gate_NA, Experts(w_gate_KDF, w_up_KDF, w_down_KFD))


def can_exchange(device_kind: str, devices: int) -> bool:
    """Whether the TPU compiler has a ragged all-to-all for so many devices of a kind that calls itself so.

    It refuses v5e in slices of more than 16 chips ("limited ICI routing", libtpu 0.0.51).
    """
    return devices <= 16 or device_kind not in ("TPU v5 lite", "TPU v5e")


def ring(x_ND, expert_NA, gate_NA, w_gate_KDF, w_up_KDF, w_down_KFD, *, axis: str) -> Array:
    """`expert_parallel`, the rows going around the axis."""
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
    room: float = ROOM,
    slack: int = SLACK,
    exchange: Callable[..., Array] = lax.ragged_all_to_all,
) -> Array:
    """`expert_parallel`, the rows going to their experts, through buffers of `room` even shares and `slack` rows more.

    `exchange` has the arguments of `lax.ragged_all_to_all`.
    """
    way = _all_to_all(axis, room, slack, exchange)
    return _apply(way, x_ND, expert_NA, gate_NA, Experts(w_gate_KDF, w_up_KDF, w_down_KFD))


def _apply(way, x_ND, expert_NA, gate_NA, experts):
    if expert_NA.dtype != jnp.int32:
        raise TypeError(f"expert_NA must be int32, got {expert_NA.dtype}")
    x_ND, expert_NA, gate_NA, *weights = vary_alike(x_ND, expert_NA, gate_NA, *experts)
    return _visit(way, x_ND, expert_NA, gate_NA, Experts(*weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _visit(way, x_ND, expert_NA, gate_NA, experts):
    return way.forward(x_ND, expert_NA, gate_NA, experts)


def _visit_forward(way, *args):
    return way.forward(*args), args


def _visit_backward(way, args, dy_ND):
    dx_ND, dgate_NA, dexperts = way.backward(*args, dy_ND)
    return dx_ND, None, dgate_NA, dexperts


_visit.defvjp(_visit_forward, _visit_backward)


def _zeros(shape, dtype, like):
    return vary_alike(jnp.zeros(shape, dtype), like)[0]


# --- ring ------------------------------------------------------------------------------------------------------------


def _ring(axis: str) -> Way:
    return Way(partial(_ring_forward, axis), partial(_ring_backward, axis))


def _ring_forward(axis, x_ND, expert_NA, gate_NA, experts):
    def stop(travellers, _):
        x_ND, expert_NA, gate_NA, y_ND = travellers
        y_ND += local.forward(_route_here(axis, expert_NA, experts), x_ND, gate_NA, experts).astype(jnp.float32)
        return _pass_on(axis, (x_ND, expert_NA, gate_NA, y_ND)), None

    start = x_ND, expert_NA, gate_NA, _zeros(x_ND.shape, jnp.float32, x_ND)
    return lax.scan(stop, start, length=lax.axis_size(axis))[0][3].astype(x_ND.dtype)


def _ring_backward(axis, x_ND, expert_NA, gate_NA, experts, dy_ND):
    def stop(carry, _):
        (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts = carry
        routing = _route_here(axis, expert_NA, experts)
        dx_ND, dgate_NA, here = local.backward(routing, x_ND, gate_NA, experts, dy_ND)
        sums, dexperts = jax.tree.map(
            lambda total, a: total + a.astype(jnp.float32), (sums, dexperts), ((dx_ND, dgate_NA), here)
        )
        return (_pass_on(axis, (x_ND, expert_NA, gate_NA, dy_ND, sums)), dexperts), None

    like = (x_ND, gate_NA), experts
    sums, dexperts = jax.tree.map(lambda a: _zeros(a.shape, jnp.float32, x_ND), like)
    start: Any = (x_ND, expert_NA, gate_NA, dy_ND, sums), dexperts
    ((*_, sums), dexperts), _ = lax.scan(stop, start, length=lax.axis_size(axis))
    (dx_ND, dgate_NA), dexperts = jax.tree.map(lambda total, a: total.astype(a.dtype), (sums, dexperts), like)
    return dx_ND, dgate_NA, dexperts


def _route_here(axis, expert_NA, experts):
    """Sorts the choices of experts that live here; all others are nowhere."""
    K = experts.gate_EDF.shape[0]
    here_NA = expert_NA - lax.axis_index(axis) * K
    return local.route(jnp.where((here_NA >= 0) & (here_NA < K), here_NA, K), K)


def _pass_on(axis, travellers):
    X = lax.axis_size(axis)
    return lax.ppermute(travellers, axis, [(i, (i + 1) % X) for i in range(X)])


# --- all to all ------------------------------------------------------------------------------------------------------


def _all_to_all(axis: str, room: float, slack: int, exchange: Callable[..., Array]) -> Way:
    def way(sent, around):
        def sent_if_there_is_room(x_ND, expert_NA, gate_NA, experts, *dy_ND):
            X, K = lax.axis_size(axis), experts.gate_EDF.shape[0]
            (N, A), R = expert_NA.shape, buffer_rows(expert_NA.shape, X, K, room=room, slack=slack)
            routing = local.route(expert_NA, X * K)
            rows_XXK = lax.all_gather(routing.count_E, axis).reshape(X, X, K)  # from device, to device, to expert
            rows_XX = rows_XXK.sum(2)
            post = Post(axis, exchange, rows_XX, routing, _arrivals(rows_XXK[:, lax.axis_index(axis)], R))
            if X * N * min(A, K) <= R:
                return sent(post, x_ND, gate_NA, experts, *dy_ND)
            most = lax.pmax(rows_XX.sum(0).max(), tuple(jax.sharding.get_abstract_mesh().manual_axes))
            return lax.cond(
                most > R,
                lambda: around(axis, x_ND, expert_NA, gate_NA, experts, *dy_ND),
                lambda: sent(post, x_ND, gate_NA, experts, *dy_ND),
            )

        return sent_if_there_is_room

    return Way(way(_sent_forward, _ring_forward), way(_sent_backward, _ring_backward))


def buffer_rows(choices: tuple[int, int], devices: int, experts: int, *, room: float = ROOM, slack: int = SLACK) -> int:
    """R: rows of a receiving buffer, for [N, A] choices on each device and so many experts on each.

    `room` even shares and `slack` rows, in whole tiles of 8, and never more than could arrive.
    """
    N, A = choices
    return min(-(-(int(room * N * A) + slack) // 8) * 8, devices * N * min(A, experts))


class Post(NamedTuple):
    """What sends rows to their experts and back."""

    axis: str
    exchange: Callable[..., Array]
    rows_XX: Array  # sent from a device to a device, known to all
    routing: Routing  # this device's choices, sorted by expert and so by device
    arrivals: Routing  # the rows that arrive here, by this device's experts

    def there(self, x_SD: Array) -> Array:
        """Sorted rows go to their experts, one sender's behind another's: x_RD; zeros behind the last."""
        return self._send(x_SD, self.rows_XX, self.arrivals.place_NA.shape[0])

    def back(self, y_RD: Array) -> Array:
        """What came of them goes back to where they stood: y_SD."""
        return self._send(y_RD, self.rows_XX.T, self.routing.order_S.shape[0])

    def _send(self, x, rows_XX, size):
        here = lax.axis_index(self.axis)
        starts_XX, places_XX = jnp.cumsum(rows_XX, 1) - rows_XX, jnp.cumsum(rows_XX, 0) - rows_XX
        room = _zeros((size, *x.shape[1:]), x.dtype, x)
        offsets = starts_XX[here], rows_XX[here], places_XX[here], rows_XX[:, here]
        return self.exchange(x, room, *offsets, axis_name=self.axis)


def _arrivals(rows_XK, R):
    """Routing of the arriving rows, which stand sorted by sender, then by expert. Known from their numbers alone."""
    count_K = rows_XK.sum(0)
    starts_XK = (jnp.cumsum(rows_XK.reshape(-1)) - rows_XK.reshape(-1)).reshape(rows_XK.shape)
    sorted_XK = (jnp.cumsum(count_K) - count_K)[None] + jnp.cumsum(rows_XK, 0) - rows_XK
    shift_XK = sorted_XK - starts_XK
    return Routing(
        order_S=_shifted(rows_XK.T, -shift_XK.T, R + BLOCK, nowhere=R),
        place_NA=_shifted(rows_XK, shift_XK, R, nowhere=R + BLOCK)[:, None],
        count_E=count_K,
    )


def _shifted(rows, shift, size, *, nowhere):
    """index + shift of the run that the index is in, for runs of so many rows; `nowhere` behind the last run."""
    index_R, end_M = jnp.arange(size, dtype=jnp.int32), jnp.cumsum(rows.reshape(-1))
    run_R = (index_R[:, None] >= end_M[None]).sum(1)
    return jnp.where(index_R < end_M[-1], index_R + shift.reshape(-1).at[run_R].get(mode="clip"), nowhere)


def _sent_forward(post, x_ND, gate_NA, experts):
    x_RD, gate_R1 = _sent(post, x_ND, gate_NA)
    return local.combine(post.routing, post.back(local.forward(post.arrivals, x_RD, gate_R1, experts)))


def _sent_backward(post, x_ND, gate_NA, experts, dy_ND):
    (x_RD, gate_R1), dy_RD = _sent(post, x_ND, gate_NA), post.there(local.dispatch(post.routing, dy_ND))
    dx_RD, dgate_R1, dexperts = local.backward(post.arrivals, x_RD, gate_R1, experts, dy_RD)
    dgate_S = post.back(dgate_R1[:, 0])
    return local.combine(post.routing, post.back(dx_RD)), local.take_rows(dgate_S, post.routing.place_NA), dexperts


def _sent(post, x_ND, gate_NA):
    gate_S = local.take_rows(gate_NA.reshape(-1), post.routing.order_S)
    return post.there(local.dispatch(post.routing, x_ND)), post.there(gate_S)[:, None]
