"""The decoding loop: slots that draw one token each at a time, and take the next sample when theirs has ended.

`start` prefills all prompts once and draws the first token of every sample; `advance` decodes until no sample is left;
`admit` puts new groups in the places of others, while the rest is being drawn. The samples that wait are a queue of
indices on the devices, so the loop runs without the host. On a mesh a device's slots take samples of the device's own
rows, so that no cache is moved.

With a slot for every sample nobody waits: slot b has sample b, all slots are at one position, and a prompt's cache is
read once for all its samples. With fewer, or where groups are admitted, each slot has a position of its own.

Axes: P prompts, G samples per prompt, B = P·G samples, W slots, Q devices that have rows of their own, S prompt
positions, C completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, Sampling, expert_id_dtype
from gspax.experiment.memory import count_slots
from gspax.model import decoding, transformer
from gspax.model.decoding import Cache, Slots
from gspax.rollout.drawing import draw_at, is_stop
from gspax.sharding import AXES, batch_shards, constrain, sample_axis, spec
from gspax.types import Array, Params


class Settings(NamedTuple):
    """What is fixed when the loop is compiled."""

    config: ModelConfig
    sampling: Sampling
    stop_ids: tuple[int, ...]
    mesh: jax.sharding.Mesh | None
    keep_experts: bool = False  # record the chosen experts
    keep_versions: bool = False  # record the version of the weights that drew each token
    greedy: int = 0  # of each prompt's samples, the last so many are decoded greedily
    admits: bool = False  # groups are put in the places of others (`admit`)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """The loop's state between two tokens."""

    rows: Rows
    step: Array  # int32    decoding passes so far
    cache: Cache
    prompt_expert_PSLA: Array | None  # as `Rows.expert_BCLA`


def start(
    params: Params,
    tokens_PS: Array,
    length_P: Array,
    id_P: Array,
    key: Array,
    settings: Settings,
) -> State:
    """Prefill the prompts, draw the first token of every sample, and fill the slots.

    Args:
      id_P: of each prompt's first sample; its others have the ids after it.
    """
    state = _draw_first(params, tokens_PS, length_P, id_P, key, settings)
    if state.rows.queue is None:
        return state
    fresh_B = jnp.ones(state.rows.length_B.shape, bool)
    return replace(state, rows=_on_devices(_fill, settings, state.rows)(state.rows, fresh_B))


def admit(
    params: Params,
    before: State | None,
    prompts: tuple[Array, Array, Array],
    key: Array,
    settings: Settings,
    *,
    fresh_P: Array,
    version: Array | int,
) -> State:
    """`start` for some of the P places of groups; their samples are queued behind those that wait.

    Every place is prefilled, though only the fresh ones are read: a group stays on the devices of its place, and how
    many places of a device are fresh is not known when this is compiled.

    Args:
      before: the state whose other places are kept; None: they are empty.
      prompts: `tokens_PS`, `length_P` and `id_P`, as for `start`.
      settings: with `admits`.
      fresh_P: bool, the places to take; those of `before` must hold groups that have ended.
      version: of the parameters, which draw the first tokens.
    """
    new = _draw_first(params, *prompts, key, settings, version=version)
    fresh_B = jnp.repeat(fresh_P, new.rows.length_B.shape[0] // fresh_P.shape[0])
    if before is None:
        state = replace(new, rows=replace(new.rows, finished_B=new.rows.finished_B | ~fresh_B))
    else:
        samples = [each.name for each in fields(Rows) if each.name not in ("queue", "token_W", "drawn_W", "live_W")]
        rows = replace(
            before.rows,
            **{name: _choose(fresh_B, getattr(new.rows, name), getattr(before.rows, name)) for name in samples},
        )
        caches = _choose(fresh_P, [each.prompt for each in new.cache], [each.prompt for each in before.cache])
        cache = tuple(each._replace(prompt=own) for each, own in zip(before.cache, caches, strict=True))
        expert_PSLA = _choose(fresh_P, new.prompt_expert_PSLA, before.prompt_expert_PSLA)
        state = replace(before, rows=rows, cache=cache, prompt_expert_PSLA=expert_PSLA)
    return replace(state, rows=_on_devices(_fill, settings, state.rows)(state.rows, fresh_B))


def _empty_queue(B: int, W: int, Q: int) -> Queue:
    zeros_Q = jnp.zeros(Q, jnp.int32)
    return Queue(order_B=jnp.zeros(B, jnp.int32), waiting_Q=zeros_Q, taken_Q=zeros_Q, sample_W=jnp.zeros(W, jnp.int32))


def _choose(fresh_X: Array, new: Any, old: Any) -> Any:
    """The fresh rows of the arrays of a tree, and the others of an older one."""
    return jax.tree.map(lambda x, y: jnp.where(fresh_X.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def _draw_first(
    params: Params,
    tokens_PS: Array,
    length_P: Array,
    id_P: Array,
    key: Array,
    settings: Settings,
    *,
    version: Array | int = 0,
) -> State:
    """The prefilled prompts and the first token of every sample; only a sample with a slot of its own is in it."""
    config, sampling, stop_ids, mesh = settings[:4]
    P, G, C = tokens_PS.shape[0], sampling.group, sampling.max_tokens
    B = P * G
    W = _count_slots(config, sampling, P, mesh)
    queued = W < B or settings.admits
    with jax.named_scope("prefill"):
        last_PD, prompts, expert_PSLA = decoding.prefill(params, config, tokens_PS, length_P, mesh=mesh)
    number_B = jnp.tile(jnp.arange(G, dtype=jnp.uint32), P)  # of a prompt's samples
    id_B = jnp.repeat(id_P, G) + number_B
    greedy_B = number_B >= G - settings.greedy if settings.greedy else None
    prompt_length_B = jnp.repeat(length_P, G)
    logits_BV = jnp.repeat(transformer.logits(params, last_PD), G, axis=0)
    token_B, logp_B = draw_at(logits_BV, key, id_B, prompt_length_B, sampling, greedy_B)
    stops_B = is_stop(token_B, stop_ids)
    kept_PSLA = expert_PSLA.astype(expert_id_dtype(config)) if settings.keep_experts else None

    def first(x_B: Array) -> Array:
        return jnp.zeros((B, C), x_B.dtype).at[:, 0].set(x_B)

    rows = Rows(
        prompt_B=jnp.arange(B, dtype=jnp.int32) // G % (P if mesh is None else P // batch_shards(mesh)),
        prompt_length_B=prompt_length_B,
        id_B=id_B,
        greedy_B=greedy_B,
        tokens_BC=first(token_B),
        logp_BC=first(logp_B),
        length_B=jnp.ones(B, jnp.int32),
        finished_B=stops_B,
        expert_BCLA=None
        if kept_PSLA is None
        else jnp.full((B, C, *kept_PSLA.shape[2:]), config.num_experts, kept_PSLA.dtype),
        version_BC=first(jnp.full(B, version, jnp.int32)) if settings.keep_versions else None,
        queue=_empty_queue(B, W, _row_shards(mesh, B, W)) if queued else None,
        token_W=token_B[:W],
        drawn_W=jnp.ones(W, jnp.int32),
        live_W=jnp.zeros(W, bool) if queued else ~stops_B & (C > 1),
    )
    rows = jax.tree.map(lambda leaf: constrain(leaf, mesh, _row_axis(mesh, B, W)), rows)
    cache = decoding.new_cache(prompts, config, W, C, mesh=mesh)
    return State(rows=rows, step=jnp.int32(0), cache=cache, prompt_expert_PSLA=kept_PSLA)


def advance(
    params: Params,
    state: State,
    key: Array,
    settings: Settings,
    tokens: Array | int = 2**30,
    version: Array | int = 0,
) -> State:
    """Decode until no sample is left, or `tokens` times.

    The parameters may be newer than those of the tokens drawn before; what is cached of these is not recomputed.
    """
    config, sampling, stop_ids, mesh = settings[:4]
    last = state.step + tokens
    settle = _on_devices(partial(_settle, stop_ids=stop_ids), settings, state.rows)

    def decode(state: State) -> State:
        rows = state.rows
        slots, id_W, greedy_W = _on_devices(_describe_slots, settings, rows)(rows)
        if rows.queue is None:  # read each prompt once where its slots are on one device
            whole = mesh is None or mesh.shape["context"] == 1
            slots = slots._replace(step=state.step, **({"prompt_W": None} if whole else {}))
        with jax.named_scope("decode"):
            hidden_WD, cache, expert_WLA = decoding.decode(params, config, rows.token_W, state.cache, slots, mesh=mesh)
        logits_WV = transformer.logits(params, hidden_WD)
        position_W = slots.prompt_length_W + rows.drawn_W
        token_W, logp_W = draw_at(logits_WV, key, id_W, position_W, sampling, greedy_W)
        drawn = Drawn(token_W, logp_W, expert_WLA if settings.keep_experts else None)
        rows = settle(rows, drawn, state.step, jnp.asarray(version, jnp.int32))
        return replace(state, rows=rows, step=state.step + 1, cache=cache)

    return jax.lax.while_loop(lambda state: (state.step < last) & state.rows.live_W.any(), decode, state)


def _count_slots(config: ModelConfig, sampling: Sampling, prompts: int, mesh: jax.sharding.Mesh | None) -> int:
    """W, for so many prompts; at least one on each device."""
    sizes = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
    return max(count_slots(config, replace(sampling, prompts=prompts), sizes), batch_shards(sizes))


class Drawn(NamedTuple):
    """A token of each slot."""

    token_W: Array
    logp_W: Array
    expert_WLA: Array | None  # of the token before


def _row_axis(mesh: jax.sharding.Mesh | None, B: int, W: int) -> str:
    """The logical axis of samples and slots."""
    return "sample" if sample_axis(mesh, B) == sample_axis(mesh, W) == "sample" else "batch"


def _row_shards(mesh: jax.sharding.Mesh | None, B: int, W: int) -> int:
    """Q."""
    if mesh is None:
        return 1
    return batch_shards(mesh) * (mesh.shape["context"] if _row_axis(mesh, B, W) == "sample" else 1)


def _on_devices(function: Callable[..., Any], settings: Settings, rows: Rows) -> Callable[..., Any]:
    """The function on each device's own rows. Arguments but scalars, and all results, have a leading axis of rows."""
    mesh = settings.mesh
    if mesh is None or mesh.size == 1:
        return function
    (over,) = spec(_row_axis(mesh, len(rows.length_B), len(rows.live_W)))
    by_row = PartitionSpec(over)

    def mapped(*args: Any) -> Any:
        specs = jax.tree.map(lambda leaf: by_row if jnp.ndim(leaf) else PartitionSpec(), args)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=by_row, check_vma=False)(*args)

    return mapped


def _describe_slots(rows: Rows) -> tuple[Slots, Array, Array | None]:
    """What the slots hold, their samples' ids, and which samples are greedy."""
    of_sample = rows.prompt_length_B, rows.prompt_B, rows.id_B, rows.greedy_B
    if rows.queue is not None:
        sample_W = rows.queue.sample_W
        of_sample = jax.tree.map(lambda x_B: x_B[sample_W], of_sample)
    prompt_length_W, prompt_W, id_W, greedy_W = of_sample
    return Slots(prompt_length_W, prompt_W, rows.drawn_W - 1, rows.live_W), id_W, greedy_W


def _fill(rows: Rows, fresh_B: Array) -> Rows:
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


def _settle(rows: Rows, drawn: Drawn, step: Array, version: Array, *, stop_ids: tuple[int, ...]) -> Rows:
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
