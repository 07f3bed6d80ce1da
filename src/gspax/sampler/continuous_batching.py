"""Continuous batching: slots that get one token in each pass, and take the next sample when theirs has finished.

`start` prefills all prompts once and samples the first token of every sample; `advance` decodes until no slot is
active; `admit` puts new groups in the places of finished ones while the others continue; `resume` continues samples
whose turn has ended with an environment's replies. Samples without a slot are in a queue of indices on the devices, so
the loop runs without the host. On a mesh a device's slots take samples of the device's own rows, so that no cache is
moved. `state` defines samples, slots, and the queue.

Axes: P prompts, G samples per prompt, B = P·G samples, W slots, Q devices that have rows of their own, S prompt
positions, C positions after the prompt (with turns: those of turns and replies), X tokens of the longest reply, Y =
X + 1 with the stop token before it, V vocabulary, K tokens of a sampling mask, T = S + C, H as in `drafts`, M = 1 + the
drafts of a pass.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from gspax.config import expert_id_dtype, layer_windows, token_id_dtype
from gspax.model import decoding
from gspax.model.decoding import Slots
from gspax.model.sizes import sampler_sizes
from gspax.parallel.sharding import batch_shards, constrain
from gspax.sampler import drafts, stops
from gspax.sampler.state import (
    Prompts,
    Replies,
    Rows,
    SampleOptions,
    State,
    has_queue,
    of_samples,
    on_devices,
    row_axis,
    row_shards,
)
from gspax.sampler.token_sampling import SampledTokens, sample_at
from gspax.types import Array, Params, PyTree

T = TypeVar("T")
CHECK_EVERY = 16  # passes without drafts: one of them looks up what it would have drafted


class SampleIds(NamedTuple):
    """The samples that tokens are sampled for."""

    id_B: Array  # uint32, which the randomness of their tokens depends on
    greedy_B: Array | None  # bool     decoded greedily; None: no sample is


class NewTokens(NamedTuple):
    """The tokens that a pass sampled at M positions of each slot."""

    gets_W: Array  # bool     the slot gets new tokens; the others' are padding
    token_WM: Array  # int32
    logp_WM: Array  # float32
    kept_WMK: Array | None  # as in `Rollout`
    cut_WM: Array | None
    expert_WMLA: Array | None  # of the tokens before them, which the pass ran
    step: Array  # int32 []  decoding passes before
    version: Array  # int32 []  of the parameters


def start(params: Params, prompts: Prompts, key: Array, options: SampleOptions) -> State:
    """Prefill the prompts, sample the first token of every sample, and give the slots their samples."""
    return _enqueue_all(_sample_first(params, prompts, key, options), jnp.ones(len(prompts.length_P), bool), options)


def admit(
    params: Params,
    before: State | None,
    prompts: Prompts,
    key: Array,
    options: SampleOptions,
    *,
    fresh_P: Array,
    version: Array | int,
) -> State:
    """Start some of the P places of groups; their samples are queued behind those that wait.

    Every place is prefilled, though only the fresh ones are read: a group stays on the devices of its place, and how
    many places of a device are fresh is not known when this is compiled.

    Args:
      before: the state whose other places are kept; None: they are empty.
      prompts: of all places.
      options: with `admits`.
      fresh_P: bool, the places to take; in `before` they must hold finished groups.
      version: of the parameters, which the first tokens are sampled with.
    """
    new = _sample_first(params, prompts, key, options, version=version)
    fresh_B = jnp.repeat(fresh_P, new.rows.length_B.shape[0] // fresh_P.shape[0])
    if before is None:
        state = replace(new, rows=replace(new.rows, finished_B=new.rows.finished_B | ~fresh_B))
    else:
        samples = [item.name for item in fields(Rows) if not item.name.endswith(("_W", "_Q"))]
        rows = replace(
            before.rows,
            **{name: _choose(fresh_B, getattr(new.rows, name), getattr(before.rows, name)) for name in samples},
        )
        cache = tuple(
            old._replace(prompt=_choose(fresh_P, layer.prompt, old.prompt))
            for layer, old in zip(new.cache, before.cache, strict=True)
        )
        expert_PSLA = _choose(fresh_P, new.prompt_expert_PSLA, before.prompt_expert_PSLA)
        state = replace(before, rows=rows, cache=cache, prompt_expert_PSLA=expert_PSLA)
    return _enqueue_all(state, fresh_P, options)


def _choose(fresh_X: Array, new: T, old: T) -> T:
    """Choose the fresh rows of the arrays of a tree, and the others of an older one."""
    return jax.tree.map(lambda x, y: jnp.where(fresh_X.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def _sample_first(
    params: Params, prompts: Prompts, key: Array, options: SampleOptions, *, version: Array | int = 0
) -> State:
    """Prefill the prompts, and sample the first token of every sample; only without a queue do slots have samples."""
    model, mesh, P = options.model, options.mesh, len(prompts.length_P)
    sampling = replace(options.sampling, prompts=P)
    G, sizes, dtype = sampling.group, sampler_sizes(model, sampling, dict(mesh.shape)), sampling.kv_cache_dtype
    with jax.named_scope("prefill"):
        last_PD, cached, expert_PSLA = decoding.prefill(
            params,
            model,
            prompts.tokens_PS,
            prompts.length_P,
            chunk=sizes.prefill_chunk,
            kv_cache_dtype=dtype,
            mesh=mesh,
        )
    number_B = jnp.tile(jnp.arange(G, dtype=jnp.uint32), P)  # of a prompt's samples
    greedy_B = number_B >= G - options.greedy if options.greedy else None
    ids = SampleIds(jnp.repeat(prompts.id_P, G) + number_B, greedy_B)
    prompt_length_B, logits_PV = jnp.repeat(prompts.length_P, G), decoding.logits(params, last_PD, model.logit_cap)
    sampled = _sample_next(jnp.repeat(logits_PV, G, axis=0), key, ids, prompt_length_B, options)
    recorded_PSLA = expert_PSLA.astype(expert_id_dtype(model)) if options.keep_experts else None
    rows = _first_rows(prompts, sampled, ids, options, slots=sizes.slots, version=version)
    if recorded_PSLA is not None:
        shape = *rows.tokens_BC.shape, *recorded_PSLA.shape[2:]
        rows = replace(rows, expert_BCLA=jnp.full(shape, model.num_experts, recorded_PSLA.dtype))
    rows = jax.tree.map(lambda leaf: constrain(leaf, mesh, row_axis(mesh, P * G, sizes.slots)), rows)
    cache = decoding.new_cache(cached, model, sizes.slots, sampling.max_tokens, kv_cache_dtype=dtype, mesh=mesh)
    return State(rows=rows, step=jnp.int32(0), cache=cache, prompt_expert_PSLA=recorded_PSLA)


def _first_rows(
    prompts: Prompts,
    sampled: SampledTokens,
    ids: SampleIds,
    options: SampleOptions,
    *,
    slots: int,
    version: Array | int,
) -> Rows:
    """Make the rows of samples that have one token each, without experts."""
    tokens_PS, length_P, _, earlier_PGC, turn_limit_P = prompts
    mesh, sampling, B, P, W = options.mesh, options.sampling, len(ids.id_B), len(length_P), slots
    G, C = B // P, sampling.max_tokens
    stop_state_B, stops_B = stops.follow_first(sampled.token_B, options.stop_ids, options.matcher)
    zeros_Q, zeros_W = jnp.zeros(row_shards(mesh, B, W), jnp.int32), jnp.zeros(W, jnp.int32)

    def first(x_B: Array) -> Array:
        return jnp.zeros((B, C, *x_B.shape[1:]), x_B.dtype).at[:, 0].set(x_B)

    rows = Rows(
        prompt_B=jnp.arange(B, dtype=jnp.int32) // G % (P // batch_shards(mesh)),
        prompt_length_B=jnp.repeat(length_P, G),
        id_B=ids.id_B,
        greedy_B=ids.greedy_B,
        tokens_BC=first(sampled.token_B),
        logp_BC=first(sampled.logp_B),
        sampled_BC=first(jnp.ones(B, bool)) if options.turns else None,
        length_B=jnp.ones(B, jnp.int32),
        finished_B=jnp.zeros(B, bool) if options.turns else stops_B,
        stop_state_B=stop_state_B,
        limit_B=None if turn_limit_P is None else jnp.repeat(turn_limit_P, G),
        expert_BCLA=None,
        version_BC=first(jnp.full(B, version, jnp.int32)) if options.keep_versions else None,
        kept_BCK=jax.tree.map(first, sampled.kept_BK),
        cut_BC=jax.tree.map(first, sampled.cut_B),
        text_BH=None if earlier_PGC is None else drafts.join_texts(tokens_PS, length_P, earlier_PGC),
        passes_B=jnp.ones(B, jnp.int32) if sampling.drafts else None,
        order_B=jnp.zeros(B, jnp.int32),
        queued_Q=zeros_Q,
        taken_Q=zeros_Q,
        sample_W=jnp.arange(W, dtype=jnp.int32) % (W // len(zeros_Q)) if sampling.drafts else zeros_W,
        token_W=sampled.token_B[:W],
        length_W=zeros_W + 1,
        active_W=jnp.zeros(W, bool),
        waiting_W=jnp.zeros(W, bool),
        accept_rate_W=jnp.zeros(W) if sampling.drafts and sampling.draft_cost else None,
    )
    return rows if has_queue(rows, options) else replace(rows, active_W=~stops_B & (C > 1))


def _sample_next(
    logits_BV: Array, key: Array, ids: SampleIds, position_B: Array, options: SampleOptions
) -> SampledTokens:
    """Sample by `sample_at` with the options; ids of sampling masks get the dtype that they are kept in."""
    sampled = sample_at(logits_BV, key, ids.id_B, position_B, options.sampling, ids.greedy_B, kept=options.mask_size)
    dtype = token_id_dtype(options.model)
    return sampled._replace(kept_BK=jax.tree.map(lambda kept_BK: kept_BK.astype(dtype), sampled.kept_BK))


def at_one_position(rows: Rows, options: SampleOptions) -> bool:
    """Return whether all slots are at one position: slot b has sample b, and each pass gives it one token."""
    return not has_queue(rows, options) and not options.sampling.drafts


def advance(
    params: Params,
    state: State,
    key: Array,
    options: SampleOptions,
    passes: int = 0,
    version: Array | int = 0,
) -> State:
    """Decode until no slot is active, in at most this number of passes unless it is 0.

    A pass with drafts may give a slot several tokens. With `Sampling.draft_cost` passes have drafts only while these
    pay (`_drafts_pay`).

    The parameters may be newer than at earlier tokens, whose cached keys and values are not recomputed.
    """
    last = state.step + (passes or 2**30)
    at_version = jnp.asarray(version, jnp.int32)
    decode, verify = (
        partial(decode_pass, params, key=key, options=options, version=at_version)
        for decode_pass in (_decode_pass, _verify_pass)
    )

    def goes_on(state: State) -> Array:
        return (state.step < last) & state.rows.active_W.any()

    def alternate(state: State) -> State:
        def pays(state: State) -> Array:
            return _drafts_pay(state.rows, options)

        state = jax.lax.while_loop(lambda state: goes_on(state) & pays(state), verify, state)
        return jax.lax.while_loop(lambda state: goes_on(state) & ~pays(state), decode, state)

    run = verify if options.sampling.drafts else decode
    return jax.lax.while_loop(goes_on, run if state.rows.accept_rate_W is None else alternate, state)


def _decode_pass(params: Params, state: State, key: Array, options: SampleOptions, version: Array) -> State:
    """Run the model over the active slots' last tokens, and sample a token for each."""
    rows = state.rows
    slots, ids_W = _describe_slots(rows, options)
    if at_one_position(rows, options):
        slots = slots._replace(first=state.step)
    with jax.named_scope("decode"):
        hidden_WD, cache, expert_WLA = decoding.decode(
            params, options.model, rows.token_W, state.cache, slots, mesh=options.mesh
        )
    position_W = slots.prompt_length_W + rows.length_W
    sampled_W1 = _sample_block(params, hidden_WD[:, None], key, ids_W, position_W, options)
    new = NewTokens(rows.active_W, *sampled_W1, expert_WLA[:, None], state.step, version)
    rows = on_devices(partial(_write_decoded, options=options), options, rows, new)
    return replace(state, rows=rows, step=state.step + 1, cache=cache)


def _verify_pass(params: Params, state: State, key: Array, options: SampleOptions, version: Array) -> State:
    """Run the model over the active slots' last tokens and drafts of the next ones, and sample a token after each.

    A slot accepts its drafts up to the first that is not the token sampled in its place, which it gets as well.
    """
    rows = state.rows
    slots, ids_W = _describe_slots(rows, options)
    draft_WK, count_W = on_devices(partial(_look_up_drafts, options=options), options, rows)
    tokens_WM = jnp.concatenate([rows.token_W[:, None], draft_WK], axis=1)
    slots = slots._replace(count_W=slots.count_W * (1 + count_W))
    with jax.named_scope("decode"):
        hidden_WMD, keep, expert_WMLA = decoding.decode_block(
            params, options.model, tokens_WM, state.cache, slots, options.mesh
        )
    position_W = slots.prompt_length_W + rows.length_W
    sampled_WM = _sample_block(params, hidden_WMD, key, ids_W, position_W, options)
    new = NewTokens(rows.active_W, *sampled_WM, expert_WMLA, state.step, version)
    rows, kept_W = on_devices(partial(_write_verified, options=options), options, rows, draft_WK, count_W, new)
    return replace(state, rows=rows, step=state.step + 1, cache=keep(kept_W))


def _sample_block(
    params: Params, hidden_WMD: Array, key: Array, ids_W: SampleIds, position_W: Array, options: SampleOptions
) -> SampledTokens:
    """Sample the tokens after the M positions of each slot's block, [W, M, ...]; the first is for `position_W`."""
    W, M, D = hidden_WMD.shape
    each = partial(jnp.repeat, repeats=M, axis=0)
    position_WM = position_W[:, None] + jnp.arange(M)[None]
    logits_BV = decoding.logits(params, hidden_WMD.reshape(W * M, D), options.model.logit_cap)
    sampled_B = _sample_next(logits_BV, key, jax.tree.map(each, ids_W), position_WM.reshape(-1), options)
    return jax.tree.map(lambda x_B: x_B.reshape(W, M, *x_B.shape[1:]), sampled_B)


def _drafts_pay(rows: Rows, options: SampleOptions) -> Array:
    """Return whether a pass with drafts is expected to give more tokens than it costs.

    While samples wait for slots, the mean of the active slots counts. After that the slowest one does, because the loop
    runs until the last sample finishes.
    """
    assert rows.accept_rate_W is not None
    tokens_W = drafts.expected_tokens(rows.accept_rate_W, options.sampling.drafts)
    mean = jnp.mean(tokens_W, where=rows.active_W)
    least = jnp.min(tokens_W, where=rows.active_W, initial=jnp.inf)
    return jnp.where((rows.taken_Q < rows.queued_Q).any(), mean, least) > options.sampling.draft_cost


def _look_up_drafts(rows: Rows, *, options: SampleOptions) -> tuple[Array, Array]:
    """Look up drafts for the samples of the slots."""
    assert rows.text_BH is not None, "see `Prompts.earlier_PGC`"
    text_WH, tokens_WC = rows.text_BH, rows.tokens_BC
    if has_queue(rows, options):
        text_WH, tokens_WC = text_WH[rows.sample_W], tokens_WC[rows.sample_W]
    texts = min(options.sampling.group, drafts.TEXTS)
    return drafts.look_up(text_WH, texts, tokens_WC, rows.length_W, options.sampling.drafts)


def _write_decoded(rows: Rows, new: NewTokens, *, options: SampleOptions) -> Rows:
    """Write back a pass without drafts; now and then look some up, to know whether they would be accepted."""
    if (rate_W := rows.accept_rate_W) is None:
        return _write_back(rows, new, options=options)
    updated_W = jax.lax.cond(
        new.step % CHECK_EVERY == 0,
        lambda: drafts.update_accept_rate(
            rate_W, new.gets_W, *_look_up_drafts(rows, options=options), new.token_WM[:, 0]
        ),
        lambda: rate_W,
    )
    return _write_back(replace(rows, accept_rate_W=updated_W), new, options=options)


def _write_verified(
    rows: Rows, draft_WK: Array, count_W: Array, new: NewTokens, *, options: SampleOptions
) -> tuple[Rows, Array]:
    """Write back the accepted drafts and the token after them; also count the run tokens that each slot's cache keeps.

    A draft that ends a turn is not accepted: sampled in its place, it is the token after the accepted ones.
    """
    token_WM, index_1K = new.token_WM, jnp.arange(draft_WK.shape[1])[None]
    _, stops_WM = _follow(rows, token_WM, options)
    agrees_WK = (draft_WK == token_WM[:, :-1]) & (index_1K < count_W[:, None]) & ~stops_WM[:, :-1]
    accepted_W = jnp.cumprod(agrees_WK, axis=1, dtype=jnp.int32).sum(axis=1) * new.gets_W
    if (rate_W := rows.accept_rate_W) is not None:
        rate_W = drafts.update_accept_rate(rate_W, new.gets_W, draft_WK, count_W, token_WM[:, 0])
        rows = replace(rows, accept_rate_W=rate_W)
    return _write_back(rows, new, accepted_W, options=options), (1 + accepted_W) * new.gets_W


def _follow(rows: Rows, token_WM: Array, options: SampleOptions) -> tuple[Array | None, Array]:
    """Follow the stops through the next tokens of the slots' samples."""
    stop_state_W = rows.stop_state_B
    if stop_state_W is not None and not at_one_position(rows, options):
        stop_state_W = stop_state_W[rows.sample_W]
    return stops.follow(stop_state_W, token_WM, options.stop_ids, options.matcher)


def _describe_slots(rows: Rows, options: SampleOptions) -> tuple[Slots, SampleIds]:
    """Describe where active slots' next tokens go, and which samples they are for."""

    def describe(rows: Rows) -> tuple[Slots, SampleIds]:
        of_sample = rows.prompt_length_B, rows.prompt_B, rows.id_B, rows.greedy_B
        if has_queue(rows, options):
            of_sample = jax.tree.map(lambda x_B: x_B[rows.sample_W], of_sample)
        prompt_length_W, prompt_W, id_W, greedy_W = of_sample
        slots = Slots(prompt_length_W, prompt_W, rows.length_W - 1, rows.active_W.astype(jnp.int32))
        return slots, SampleIds(id_W, greedy_W)

    slots, ids_W = on_devices(describe, options, rows)
    in_order = len(rows.active_W) == len(rows.length_B) and not options.admits  # slot b has sample b
    one_view = at_one_position(rows, options) or not layer_windows(options.model)  # a prompt's slots see the same of it
    if in_order and one_view and options.mesh.shape["context"] == 1:
        slots = slots._replace(prompt_W=None)  # each prompt is read once for all its slots
    return slots, ids_W


def _enqueue_all(state: State, fresh_P: Array, options: SampleOptions) -> State:
    """Queue the samples that have neither finished nor a slot, fresh ones last, and refill the free slots."""
    if not has_queue(state.rows, options):
        return state
    fresh_B = jnp.repeat(fresh_P, state.rows.length_B.shape[0] // fresh_P.shape[0])

    def enqueue(rows: Rows, fresh_B: Array) -> Rows:
        C, held_B = rows.tokens_BC.shape[1], of_samples(rows, rows.active_W | rows.waiting_W)
        queued_B = ~rows.finished_B & (rows.length_B < C) & ~held_B
        order_B = jnp.argsort(jnp.where(queued_B, fresh_B.astype(jnp.int32), 2)).astype(jnp.int32)
        queued_Q = queued_B.sum(dtype=jnp.int32)[None]
        rows = replace(rows, order_B=order_B, queued_Q=queued_Q, taken_Q=jnp.zeros_like(queued_Q))
        return _refill(rows, options)

    return replace(state, rows=on_devices(enqueue, options, state.rows, fresh_B))


def _refill(rows: Rows, options: SampleOptions) -> Rows:
    """Give each free slot the next sample, whose first token is sampled already; with turns, that may end the first."""
    free_W = ~(rows.active_W | rows.waiting_W)
    place_W = rows.taken_Q + jnp.cumsum(free_W, dtype=jnp.int32) - 1
    takes_W = free_W & (place_W < rows.queued_Q)
    sample_W = jnp.where(takes_W, rows.order_B.at[place_W].get(mode="clip"), rows.sample_W)
    token_W = jnp.where(takes_W, rows.tokens_BC[sample_W, 0], rows.token_W)
    stop_state_W = None if rows.stop_state_B is None else rows.stop_state_B[sample_W]
    stops_W = stops.has_ended(stop_state_W, token_W, options.stop_ids, options.matcher)
    if rows.limit_B is not None:
        stops_W |= rows.limit_B[sample_W] <= 1
    return replace(
        rows,
        taken_Q=rows.taken_Q + takes_W.sum(dtype=jnp.int32)[None],
        sample_W=sample_W,
        token_W=token_W,
        length_W=jnp.where(takes_W, 1, rows.length_W),
        accept_rate_W=None if rows.accept_rate_W is None else jnp.where(takes_W, 0, rows.accept_rate_W),
        active_W=rows.active_W | (takes_W & ~stops_W),
        waiting_W=rows.waiting_W | (takes_W & stops_W),
    )


def _write_back(rows: Rows, new: NewTokens, accepted_W: Array | int = 0, *, options: SampleOptions) -> Rows:
    """Record the slots' new tokens. Samples that finish leave their slots to others; with turns, a stop token waits.

    Args:
      new: the tokens of M positions; a slot gets the first `1 + accepted_W` of them.
      accepted_W: int32, the drafts that each slot accepted; 0 in a pass without drafts.
    """
    C, gets_W = rows.tokens_BC.shape[1], new.gets_W
    last_W1 = jnp.broadcast_to(accepted_W, gets_W.shape)[:, None]
    stop_state_WM, stops_WM = _follow(rows, new.token_WM, options)

    def last(x_WM: Array) -> Array:
        return jnp.take_along_axis(x_WM, last_W1, axis=1)[:, 0]

    token_W, stops_W, length_W = last(new.token_WM), last(stops_WM), rows.length_W + accepted_W
    if rows.limit_B is not None:
        stops_W |= length_W + 1 >= rows.limit_B[rows.sample_W]
    stops_W &= gets_W
    sample_W = None
    if not at_one_position(rows, options):
        sample_W = jnp.where(gets_W, rows.sample_W, len(rows.length_B))  # B, which a scatter drops, for the other slots
    index_1M = jnp.arange(new.token_WM.shape[1])[None]
    dropped = C + 1  # a scatter drops it, and the position before it, where the token's experts are
    place_WM = jnp.where(index_1M <= last_W1, rows.length_W[:, None] + index_1M, dropped)

    def record(x_BC: PyTree, x_WM: Array | None, back: int = 0) -> PyTree:
        """Record the values of the new tokens' positions; elsewhere keep those before."""
        if x_BC is None or x_WM is None:
            return x_BC
        if sample_W is None:
            return jax.lax.dynamic_update_slice_in_dim(x_BC, x_WM.astype(x_BC.dtype), new.step + 1 - back, axis=1)
        return x_BC.at[sample_W[:, None], place_WM - back].set(x_WM.astype(x_BC.dtype), mode="drop")

    def of_sample(x_B: Array, x_W: Array) -> Array:
        return jnp.where(gets_W, x_W, x_B) if sample_W is None else x_B.at[sample_W].set(x_W, mode="drop")

    rows = replace(
        rows,
        tokens_BC=record(rows.tokens_BC, new.token_WM),
        logp_BC=record(rows.logp_BC, new.logp_WM),
        sampled_BC=record(rows.sampled_BC, jnp.broadcast_to(gets_W[:, None], place_WM.shape)),
        expert_BCLA=record(rows.expert_BCLA, new.expert_WMLA, back=1),
        version_BC=record(rows.version_BC, jnp.broadcast_to(new.version, place_WM.shape)),
        kept_BCK=record(rows.kept_BCK, new.kept_WMK),
        cut_BC=record(rows.cut_BC, new.cut_WM),
        passes_B=None if rows.passes_B is None else rows.passes_B.at[sample_W].add(1, mode="drop"),
        length_B=of_sample(rows.length_B, length_W + 1),
        finished_B=rows.finished_B if options.turns else of_sample(rows.finished_B, stops_W),
        stop_state_B=jax.tree.map(of_sample, rows.stop_state_B, None if stop_state_WM is None else last(stop_state_WM)),
        token_W=jnp.where(gets_W, token_W, rows.token_W),
        length_W=length_W + gets_W,
        active_W=jnp.where(gets_W, ~stops_W & (length_W + 1 < C), rows.active_W),
        waiting_W=rows.waiting_W | stops_W if options.turns else rows.waiting_W,
    )
    return _refill(rows, options) if has_queue(rows, options) else rows


def resume(
    params: Params, state: State, replies: Replies, key: Array, options: SampleOptions, version: Array | int = 0
) -> State:
    """Append the replies, sample the first token of each next turn, and give the slots of finished samples to others.

    With `SampleOptions.turns` a stop token ends a turn, not a sample: the slot then waits with its cache, while others
    continue or take further samples. Nothing is tokenized again. The key of a token is that of (sample id, position),
    so neither the other samples nor the time at which a reply arrives changes it.

    Args:
      replies: of all samples, from `sampler.pad_replies`; each leaves room for a token of the next turn.
      version: of the parameters, which the next tokens are sampled with.
    """
    rows = state.rows
    if rows.limit_B is not None and replies.turn_limit_B is not None:
        limit_B = rows.length_B + replies.count_B + replies.turn_limit_B
        rows = replace(rows, limit_B=jnp.where(replies.count_B > 0, limit_B, rows.limit_B))
    reply_WX, count_W = on_devices(_replies_of_slots, options, rows, replies.tokens_BX, replies.count_B)
    slots, ids_W = _describe_slots(rows, options)
    resumed_W = count_W > 0
    hidden_WD, cache, expert_WYLA = decoding.extend(
        params,
        options.model,
        jnp.concatenate([rows.token_W[:, None], reply_WX], axis=1),  # the stop token is not in the cache yet
        state.cache,
        slots._replace(count_W=jnp.where(resumed_W, count_W + 1, 0)),
        mesh=options.mesh,
    )
    position_W = slots.prompt_length_W + rows.length_W + count_W
    sampled_W1 = _sample_block(params, hidden_WD[:, None], key, ids_W, position_W, options)
    new = NewTokens(resumed_W, *sampled_W1, None, state.step, jnp.asarray(version, jnp.int32))
    write = partial(_write_replies, options=options)
    rows = on_devices(write, options, rows, (reply_WX, count_W, expert_WYLA), new)
    return replace(state, rows=rows, cache=cache)


def _replies_of_slots(rows: Rows, reply_BX: Array, count_B: Array) -> tuple[Array, Array]:
    """Return the replies to the samples of waiting slots."""
    return reply_BX[rows.sample_W], jnp.where(rows.waiting_W, count_B[rows.sample_W], 0)


def _write_replies(rows: Rows, replies: tuple[Array, Array, Array], new: NewTokens, *, options: SampleOptions) -> Rows:
    """Record the replies, outside the mask, and the tokens after them; others are finished, or go on waiting."""
    reply_WX, count_W, expert_WYLA = replies
    C, sample_W1, expert_BCLA = rows.tokens_BC.shape[1], rows.sample_W[:, None], rows.expert_BCLA
    index_1Y = jnp.arange(expert_WYLA.shape[1])[None]
    # of the stop token and of a reply after it; the others are dropped
    run_WY = (index_1Y <= count_W[:, None]) & new.gets_W[:, None]
    place_WY = jnp.where(run_WY, rows.length_W[:, None] - 1 + index_1Y, C)
    if expert_BCLA is not None:
        expert_BCLA = expert_BCLA.at[sample_W1, place_WY].set(expert_WYLA.astype(expert_BCLA.dtype), mode="drop")
    rows = replace(
        rows,
        tokens_BC=rows.tokens_BC.at[sample_W1, place_WY[:, 1:]].set(reply_WX, mode="drop"),
        expert_BCLA=expert_BCLA,
        finished_B=rows.finished_B | of_samples(rows, rows.waiting_W & (count_W == 0)),
        stop_state_B=stops.reset(rows.stop_state_B, of_samples(rows, new.gets_W), options.matcher),
        length_W=rows.length_W + jnp.maximum(count_W, 0),
        waiting_W=rows.waiting_W & (count_W < 0),
    )
    return _write_back(rows, new, options=options)
