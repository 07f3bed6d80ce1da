"""The samples of a rollout and the slots that draw them: which sample a slot has, and what is recorded for it.

Everything here is arithmetic on one device's own rows, inside the loop of `rollout.engine`.

Axes: as in `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspax.model.decoding import Slots
from gspax.rollout.drawing import is_stop
from gspax.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Queue:
    """The samples that wait for a slot, and those that have one."""

    order_B: Array  # int32    waiting samples; only the first `waiting_Q` count
    waiting_Q: Array  # int32
    taken_Q: Array  # int32    of those, the samples that have had a slot
    sample_W: Array  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples and slots. Indices of samples and prompts count on their own device."""

    prompt_B: Array  # int32
    prompt_length_B: Array  # int32
    id_B: Array  # uint32
    greedy_B: Array | None  # bool     decoded greedily; None: no sample is
    tokens_BC: Array  # int32
    logp_BC: Array  # float32
    length_B: Array  # int32    tokens drawn
    finished_B: Array  # bool     ended with a stop token
    expert_BCLA: Array | None  # uint8 or wider, of the tokens that were decoded; `num_experts` elsewhere
    version_BC: Array | None  # int32
    queue: Queue | None  # None: slot b has sample b, and all are at one position
    token_W: Array  # int32    the last token
    drawn_W: Array  # int32    tokens drawn of the sample
    live_W: Array  # bool     the sample has not ended


class Drawn(NamedTuple):
    """A token of each slot."""

    token_W: Array
    logp_W: Array
    expert_WLA: Array | None  # of the token before


def empty_queue(B: int, W: int, Q: int) -> Queue:
    """A queue in which no sample waits, of so many samples, slots and devices."""
    zeros_Q = jnp.zeros(Q, jnp.int32)
    return Queue(order_B=jnp.zeros(B, jnp.int32), waiting_Q=zeros_Q, taken_Q=zeros_Q, sample_W=jnp.zeros(W, jnp.int32))


def describe_slots(rows: Rows) -> tuple[Slots, Array, Array | None]:
    """What the slots hold, their samples' ids, and which samples are greedy."""
    of_sample = rows.prompt_length_B, rows.prompt_B, rows.id_B, rows.greedy_B
    if rows.queue is not None:
        sample_W = rows.queue.sample_W
        of_sample = jax.tree.map(lambda x_B: x_B[sample_W], of_sample)
    prompt_length_W, prompt_W, id_W, greedy_W = of_sample
    return Slots(prompt_length_W, prompt_W, rows.drawn_W - 1, rows.live_W), id_W, greedy_W


def fill(rows: Rows, fresh_B: Array) -> Rows:
    """Queue the samples that have neither ended nor a slot, fresh ones last, and give the first of them a slot."""
    assert rows.queue is not None
    own, C = rows.tokens_BC.shape
    held_B = jnp.zeros(own, bool).at[jnp.where(rows.live_W, rows.queue.sample_W, own)].set(True, mode="drop")
    waits_B = ~rows.finished_B & (rows.length_B < C) & ~held_B
    order_B = jnp.argsort(jnp.where(waits_B, fresh_B.astype(jnp.int32), 2)).astype(jnp.int32)
    waiting_Q = waits_B.sum(dtype=jnp.int32)[None]
    queue = replace(rows.queue, order_B=order_B, waiting_Q=waiting_Q, taken_Q=jnp.zeros_like(waiting_Q))
    return _refill(replace(rows, queue=queue))


def _refill(rows: Rows) -> Rows:
    """Give each slot whose sample has ended the next one, whose first token is drawn already."""
    queue = rows.queue
    assert queue is not None
    turn_W = queue.taken_Q + jnp.cumsum(~rows.live_W, dtype=jnp.int32) - 1
    takes_W = ~rows.live_W & (turn_W < queue.waiting_Q)
    sample_W = jnp.where(takes_W, queue.order_B.at[turn_W].get(mode="clip"), queue.sample_W)
    return replace(
        rows,
        queue=replace(queue, sample_W=sample_W, taken_Q=queue.taken_Q + takes_W.sum(dtype=jnp.int32)[None]),
        token_W=jnp.where(takes_W, rows.tokens_BC[sample_W, 0], rows.token_W),
        drawn_W=jnp.where(takes_W, 1, rows.drawn_W),
        live_W=rows.live_W | takes_W,
    )


def settle(rows: Rows, drawn: Drawn, step: Array, version: Array, *, stop_ids: tuple[int, ...]) -> Rows:
    """Record a token of each live slot; samples that end leave their slots to others."""
    C = rows.tokens_BC.shape[1]
    stops_W = is_stop(drawn.token_W, stop_ids) & rows.live_W
    sample_W: Any = None
    if rows.queue is not None:
        sample_W = jnp.where(rows.live_W, rows.queue.sample_W, len(rows.length_B))  # of an empty slot: dropped

    def record(x_BC: Any, x_W: Any, back: int = 0) -> Any:
        """With a value for the new token of each slot, or for the one before."""
        if x_BC is None or x_W is None:
            return x_BC
        if sample_W is None:
            return jax.lax.dynamic_update_index_in_dim(x_BC, x_W.astype(x_BC.dtype), step + 1 - back, axis=1)
        return x_BC.at[sample_W, rows.drawn_W - back].set(x_W.astype(x_BC.dtype), mode="drop")

    def of_sample(x_B: Array, x_W: Array) -> Array:
        return jnp.where(rows.live_W, x_W, x_B) if sample_W is None else x_B.at[sample_W].set(x_W, mode="drop")

    rows = replace(
        rows,
        tokens_BC=record(rows.tokens_BC, drawn.token_W),
        logp_BC=record(rows.logp_BC, drawn.logp_W),
        expert_BCLA=record(rows.expert_BCLA, drawn.expert_WLA, back=1),
        version_BC=record(rows.version_BC, jnp.broadcast_to(version, stops_W.shape)),
        length_B=of_sample(rows.length_B, rows.drawn_W + 1),
        finished_B=of_sample(rows.finished_B, stops_W),
        token_W=drawn.token_W,
        drawn_W=rows.drawn_W + rows.live_W,
        live_W=rows.live_W & ~stops_W & (rows.drawn_W + 1 < C),
    )
    return rows if sample_W is None else _refill(rows)
