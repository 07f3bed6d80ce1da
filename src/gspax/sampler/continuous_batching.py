"""Continuous batching: slots that get one token in each pass, and take the next sample when theirs has finished.

`start` prefills all prompts once and samples the first token of every sample; `advance` decodes until no slot is
active; `admit` puts new groups in the places of finished ones while the others continue; `resume` continues samples
whose turn has ended with an environment's replies. Samples without a slot are in a queue of indices on the devices, so
the loop runs without the host. On a mesh a device's slots take samples of the device's own rows, so that no cache is
moved.

A slot is active (its sample gets a token in each pass), waiting (its sample's turn has ended, and an environment is to
reply) or free. A waiting slot keeps its sample and its cache.

With a slot for every sample there is no queue: slot b has sample b, and all slots are at one position. With fewer,
where groups are admitted, with turns, and with drafts, each slot has a position of its own.

Axes: P prompts, G samples per prompt, B = P·G samples, W slots, Q devices that have rows of their own, S prompt
positions, C positions after the prompt (with turns: those of turns and replies), X tokens of the longest reply, Y =
X + 1 with the stop token before it, V vocabulary, K tokens of a sampling mask, T = S + C, H as in `drafts`, M = 1 + the
drafts of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, Sampling, expert_id_dtype, layer_windows, token_id_dtype
from gspax.model import decoding
from gspax.model.decoding import Cache, Slots
from gspax.model.sizes import sampler_sizes
from gspax.parallel.sharding import batch_shards, constrain, sample_axis, spec
from gspax.sampler import drafts, stops
from gspax.sampler.stops import Matcher
from gspax.sampler.token_sampling import Draw, sample_at
from gspax.types import Array, Params, PyTree

T = TypeVar("T")
CHECK_EVERY = 16  # passes without drafts: one of them looks up what it would have drafted


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How prompts are sampled; the sampler's programs are compiled for it."""

    model: ModelConfig
    sampling: Sampling  # `prompts` and `group` are those of a batch (`sampler.split_groups`)
    stop_ids: tuple[int, ...]  # a stop token ends its sample, or its turn, and belongs to it
    mesh: jax.sharding.Mesh
    matcher: Matcher | None = None  # a token that completes a stop string is as a stop token; None: there are none
    greedy: int = 0  # how many of each prompt's samples, the last ones, are greedy, with log-probs at temperature 1
    keep_experts: bool = False  # record the chosen experts
    keep_versions: bool = False  # record the version of the weights that each token was sampled with
    mask_size: int = 0  # K: the most tokens that are recorded of those that each token was chosen from; 0: none
    admits: bool = False  # groups are put in the places of others (`admit`)
    turns: bool = False  # a sample is a conversation, which waits for a reply after a stop token


class Prompts(NamedTuple):
    """Right-padded prompts."""

    tokens_PS: Array  # int32
    length_P: Array  # int32
    id_P: Array  # uint32, of each prompt's first sample; its others have the ids after it
    earlier_PGC: Array | None = None  # int32, with drafts: what followed the prompt in an earlier epoch, then -1
    most_P: Array | None = None  # int32, the most tokens of a first turn; None: turns have no limits of their own


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples, slots, and the queue (`has_queue`). Indices of samples and prompts count on their own device."""

    prompt_B: Array  # int32
    prompt_length_B: Array  # int32
    id_B: Array  # uint32
    greedy_B: Array | None  # bool     decoded greedily; None: no sample is
    tokens_BC: Array  # int32
    logp_BC: Array  # float32
    sampled_BC: Array | None  # bool     sampled by the policy, not a reply's; None: all tokens are
    length_B: Array  # int32    tokens after the prompt
    finished_B: Array  # bool     complete: ended with a stop token
    matched_B: Array | None  # int32    with stop strings, the matcher's state after the sample's last token
    limit_B: Array | None  # int32    the length at which the sample's turn ends without a stop; None: turns have none
    expert_BCLA: Array | None  # uint8 or wider, of the tokens that were decoded; `num_experts` elsewhere
    version_BC: Array | None  # int32
    kept_BCK: Array | None  # uint8 or wider    as in `Rollout`
    cut_BC: Array | None  # bool
    text_BH: Array | None  # int32    with drafts, the texts that they come from (`drafts.join_texts`)
    passes_B: Array | None  # int32    with drafts, as in `Rollout`
    right_W: Array | None  # float32    with `Sampling.draft_cost`, the share of the sample's drafts that are right
    order_B: Array  # int32    queued samples, which have no slot; only the first `queued_Q` count
    queued_Q: Array  # int32
    taken_Q: Array  # int32    of those, the samples that have got a slot since
    sample_W: Array  # int32    the slot's sample; not read where all slots are at one position
    token_W: Array  # int32    the sample's last token, which is not in the cache yet
    length_W: Array  # int32    the sample's tokens after the prompt
    active_W: Array  # bool     the sample gets tokens
    waiting_W: Array  # bool     the sample's turn has ended: it waits for a reply


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """The state of decoding between two tokens."""

    rows: Rows
    step: Array  # int32    decoding passes so far
    cache: Cache
    prompt_expert_PSLA: Array | None  # as `Rows.expert_BCLA`


class Sampled(NamedTuple):
    """Tokens at M positions of some slots."""

    gets_W: Array  # bool     the slot gets some
    draw: Draw  # [W, M, ...]
    expert_WMLA: Array | None  # of the tokens before them
    step: Array  # int32 []  decoding passes before
    version: Array  # int32 []  of the parameters


class Replies(NamedTuple):
    """The replies to the turns that have ended, for each sample."""

    tokens_BX: Array | np.ndarray  # int32
    count_B: Array | np.ndarray  # int32; 0 finishes a waiting sample, -1 lets it wait; the others are left as they are
    most_B: Array | np.ndarray | None = None  # int32, the most tokens of the next turn, where turns have limits


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
    G, C, sizes = sampling.group, sampling.max_tokens, sampler_sizes(model, sampling, dict(mesh.shape))
    B, W = P * G, sizes.slots
    with jax.named_scope("prefill"):
        last_PD, cached, expert_PSLA = decoding.prefill(
            params, model, *prompts[:2], chunk=sizes.prefill_chunk, kv_cache_dtype=sampling.kv_cache_dtype, mesh=mesh
        )
    number_B = jnp.tile(jnp.arange(G, dtype=jnp.uint32), P)  # of a prompt's samples
    id_B = jnp.repeat(prompts.id_P, G) + number_B
    greedy_B = number_B >= G - options.greedy if options.greedy else None
    prompt_length_B, logits_PV = jnp.repeat(prompts.length_P, G), decoding.logits(params, last_PD, model.logit_cap)
    draw = _sample_next(jnp.repeat(logits_PV, G, axis=0), key, id_B, prompt_length_B, greedy_B, options)
    matched_B, stops_B = stops.follow_first(draw.token_B, options.stop_ids, options.matcher)
    kept_PSLA = expert_PSLA.astype(expert_id_dtype(model)) if options.keep_experts else None
    zeros_Q, zeros_W = jnp.zeros(_row_shards(mesh, B, W), jnp.int32), jnp.zeros(W, jnp.int32)

    def first(x_B: Array) -> Array:
        return jnp.zeros((B, C, *x_B.shape[1:]), x_B.dtype).at[:, 0].set(x_B)

    rows = Rows(
        prompt_B=jnp.arange(B, dtype=jnp.int32) // G % (P // batch_shards(mesh)),
        prompt_length_B=prompt_length_B,
        id_B=id_B,
        greedy_B=greedy_B,
        tokens_BC=first(draw.token_B),
        logp_BC=first(draw.logp_B),
        sampled_BC=first(jnp.ones(B, bool)) if options.turns else None,
        length_B=jnp.ones(B, jnp.int32),
        finished_B=jnp.zeros(B, bool) if options.turns else stops_B,
        matched_B=matched_B,
        limit_B=None if prompts.most_P is None else jnp.repeat(prompts.most_P, G),
        expert_BCLA=jax.tree.map(lambda x: jnp.full((B, C, *x.shape[2:]), model.num_experts, x.dtype), kept_PSLA),
        version_BC=first(jnp.full(B, version, jnp.int32)) if options.keep_versions else None,
        kept_BCK=jax.tree.map(first, draw.kept_BK),
        cut_BC=jax.tree.map(first, draw.cut_B),
        text_BH=None if prompts.earlier_PGC is None else drafts.join_texts(*prompts[:2], prompts.earlier_PGC),
        passes_B=jnp.ones(B, jnp.int32) if sampling.drafts else None,
        right_W=jnp.zeros(W) if sampling.drafts and sampling.draft_cost else None,
        order_B=jnp.zeros(B, jnp.int32),
        queued_Q=zeros_Q,
        taken_Q=zeros_Q,
        sample_W=jnp.arange(W, dtype=jnp.int32) % (W // len(zeros_Q)) if sampling.drafts else zeros_W,
        token_W=draw.token_B[:W],
        length_W=zeros_W + 1,
        active_W=jnp.zeros(W, bool),
        waiting_W=jnp.zeros(W, bool),
    )
    if not has_queue(rows, options):
        rows = replace(rows, active_W=~stops_B & (C > 1))
    rows = jax.tree.map(lambda leaf: constrain(leaf, mesh, row_axis(mesh, B, W)), rows)
    cache = decoding.new_cache(cached, model, W, C, kv_cache_dtype=sampling.kv_cache_dtype, mesh=mesh)
    return State(rows=rows, step=jnp.int32(0), cache=cache, prompt_expert_PSLA=kept_PSLA)


def _sample_next(
    logits_BV: Array, key: Array, id_B: Array, position_B: Array, greedy_B: Array | None, options: SampleOptions
) -> Draw:
    """Sample by `sample_at` with the options; ids of sampling masks get the dtype that they are kept in."""
    draw = sample_at(logits_BV, key, id_B, position_B, options.sampling, greedy_B, kept=options.mask_size)
    dtype = token_id_dtype(options.model)
    return draw._replace(kept_BK=jax.tree.map(lambda kept_BK: kept_BK.astype(dtype), draw.kept_BK))


def has_queue(rows: Rows, options: SampleOptions) -> bool:
    """Return whether slots take samples from a queue. Otherwise slot b has sample b."""
    return len(rows.active_W) < len(rows.length_B) or options.admits or options.turns


def at_one_position(rows: Rows, options: SampleOptions) -> bool:
    """Return whether all slots are at one position: slot b has sample b, and each pass gives it one token."""
    return not has_queue(rows, options) and not options.sampling.drafts


def advance(
    params: Params,
    state: State,
    key: Array,
    options: SampleOptions,
    tokens: int = 0,
    version: Array | int = 0,
) -> State:
    """Decode until no slot is active, or `tokens` times unless that is 0; with drafts a pass may give several tokens.

    With `Sampling.draft_cost` passes have drafts only while these pay (`_drafts_pay`).

    The parameters may be newer than at earlier tokens, whose cached keys and values are not recomputed.
    """
    last = state.step + (tokens or 2**30)
    decode, decode_tentatively = (
        partial(_decode_pass, params, key=key, options=options, version=version, drafted=drafted)
        for drafted in (False, True)
    )

    def goes_on(state: State) -> Array:
        return (state.step < last) & state.rows.active_W.any()

    def alternate(state: State) -> State:
        def pays(state: State) -> Array:
            return _drafts_pay(state.rows, options)

        state = jax.lax.while_loop(lambda state: goes_on(state) & pays(state), decode_tentatively, state)
        return jax.lax.while_loop(lambda state: goes_on(state) & ~pays(state), decode, state)

    run = decode_tentatively if options.sampling.drafts else decode
    return jax.lax.while_loop(goes_on, run if state.rows.right_W is None else alternate, state)


def _decode_pass(
    params: Params, state: State, key: Array, options: SampleOptions, version: Array | int, *, drafted: bool
) -> State:
    """Run the model over the active slots' last tokens, and over drafts of the next ones."""
    rows, model, mesh = state.rows, options.model, options.mesh
    slots, id_W, greedy_W = describe_slots(rows, options)
    if drafted:
        draft_WK, count_W = on_devices(partial(_draft, options=options), options, rows)
        tokens_WM = jnp.concatenate([rows.token_W[:, None], draft_WK], axis=1)
        slots = slots._replace(count_W=slots.count_W * (1 + count_W))
        with jax.named_scope("decode"):
            hidden_WMD, keep, expert_WMLA = decoding.decode_block(params, model, tokens_WM, state.cache, slots, mesh)
    else:
        if at_one_position(rows, options):
            slots = slots._replace(first=state.step)
        with jax.named_scope("decode"):
            hidden_WD, cache, expert_WLA = decoding.decode(params, model, rows.token_W, state.cache, slots, mesh=mesh)
        hidden_WMD, expert_WMLA = hidden_WD[:, None], expert_WLA[:, None]
    W, M, D = hidden_WMD.shape
    each = partial(jnp.repeat, repeats=M, axis=0)
    position_WM = (slots.prompt_length_W + rows.length_W)[:, None] + jnp.arange(M)[None]
    logits_BV = decoding.logits(params, hidden_WMD.reshape(W * M, D), model.logit_cap)
    draw_B = _sample_next(logits_BV, key, each(id_W), position_WM.reshape(-1), jax.tree.map(each, greedy_W), options)
    draw_WM = jax.tree.map(lambda x_B: x_B.reshape(W, M, *x_B.shape[1:]), draw_B)
    kept_WMLA, at_version = expert_WMLA if options.keep_experts else None, jnp.asarray(version, jnp.int32)
    sampled = Sampled(rows.active_W, draw_WM, kept_WMLA, state.step, at_version)
    if drafted:
        rows, kept_W = on_devices(partial(_write_drafted, options=options), options, rows, draft_WK, count_W, sampled)
        cache = keep(kept_W)
    else:
        rows = on_devices(partial(_write_sampled, options=options), options, rows, sampled)
    return replace(state, rows=rows, step=state.step + 1, cache=cache)


def _drafts_pay(rows: Rows, options: SampleOptions) -> Array:
    """Return whether a pass with drafts is expected to give more tokens than it costs.

    While samples wait for slots, the mean of the active slots counts. After that the slowest one does, because the loop
    runs until the last sample finishes.
    """
    assert rows.right_W is not None
    tokens_W = drafts.expected_tokens(rows.right_W, options.sampling.drafts)
    mean = jnp.mean(tokens_W, where=rows.active_W)
    least = jnp.min(tokens_W, where=rows.active_W, initial=jnp.inf)
    return jnp.where((rows.taken_Q < rows.queued_Q).any(), mean, least) > options.sampling.draft_cost


def _draft(rows: Rows, *, options: SampleOptions) -> tuple[Array, Array]:
    """Look up drafts for the samples of the slots."""
    assert rows.text_BH is not None, "see `Prompts.earlier_PGC`"
    text_WH, tokens_WC = rows.text_BH, rows.tokens_BC
    if has_queue(rows, options):
        text_WH, tokens_WC = text_WH[rows.sample_W], tokens_WC[rows.sample_W]
    texts = min(options.sampling.group, drafts.TEXTS)
    return drafts.look_up(text_WH, texts, tokens_WC, rows.length_W, options.sampling.drafts)


def _write_sampled(rows: Rows, sampled: Sampled, *, options: SampleOptions) -> Rows:
    """Write back a pass without drafts; now and then look some up, to know whether they would be right."""
    if (share_W := rows.right_W) is None:
        return _write_back(rows, sampled, options=options)
    gets_W, token_W = sampled.gets_W, sampled.draw.token_B[:, 0]
    renewed_W = jax.lax.cond(
        sampled.step % CHECK_EVERY == 0,
        lambda: drafts.renew_share(share_W, gets_W, *_draft(rows, options=options), token_W),
        lambda: share_W,
    )
    return _write_back(replace(rows, right_W=renewed_W), sampled, options=options)


def _write_drafted(
    rows: Rows, draft_WK: Array, count_W: Array, sampled: Sampled, *, options: SampleOptions
) -> tuple[Rows, Array]:
    """Write back a pass, up to the first wrong draft or a turn's end; return how many run tokens a slot keeps, too."""
    token_WM, index_1K = sampled.draw.token_B, jnp.arange(draft_WK.shape[1])[None]
    _, stops_WM = _follow(rows, token_WM, options)
    right_WK = (draft_WK == token_WM[:, :-1]) & (index_1K < count_W[:, None]) & ~stops_WM[:, :-1]
    right_W = jnp.cumprod(right_WK, axis=1, dtype=jnp.int32).sum(axis=1) * sampled.gets_W
    if rows.right_W is not None:
        rows = replace(
            rows, right_W=drafts.renew_share(rows.right_W, sampled.gets_W, draft_WK, count_W, token_WM[:, 0])
        )
    return _write_back(rows, sampled, right_W, options=options), (1 + right_W) * sampled.gets_W


def _follow(rows: Rows, token_WM: Array, options: SampleOptions) -> tuple[Array | None, Array]:
    """Follow the stops through the next tokens of the slots' samples."""
    matched_W = rows.matched_B
    if matched_W is not None and not at_one_position(rows, options):
        matched_W = matched_W[rows.sample_W]
    return stops.follow(matched_W, token_WM, options.stop_ids, options.matcher)


def describe_slots(rows: Rows, options: SampleOptions) -> tuple[Slots, Array, Array | None]:
    """Describe where active slots' next tokens go, the ids of the slots' samples, and which samples are greedy."""

    def describe(rows: Rows) -> tuple[Slots, Array, Array | None]:
        of_sample = rows.prompt_length_B, rows.prompt_B, rows.id_B, rows.greedy_B
        if has_queue(rows, options):
            of_sample = jax.tree.map(lambda x_B: x_B[rows.sample_W], of_sample)
        prompt_length_W, prompt_W, id_W, greedy_W = of_sample
        return Slots(prompt_length_W, prompt_W, rows.length_W - 1, rows.active_W.astype(jnp.int32)), id_W, greedy_W

    slots, id_W, greedy_W = on_devices(describe, options, rows)
    in_order = len(rows.active_W) == len(rows.length_B) and not options.admits  # slot b has sample b
    one_view = at_one_position(rows, options) or not layer_windows(options.model)  # a prompt's slots see the same of it
    if in_order and one_view and options.mesh.shape["context"] == 1:
        slots = slots._replace(prompt_W=None)  # each prompt is read once for all its slots
    return slots, id_W, greedy_W


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


def of_samples(rows: Rows, slots_W: Array) -> Array:
    """Mark the samples of these slots, bool [B]."""
    B = len(rows.length_B)
    return jnp.zeros(B, bool).at[jnp.where(slots_W, rows.sample_W, B)].set(True, mode="drop")


def _refill(rows: Rows, options: SampleOptions) -> Rows:
    """Give each free slot the next sample, whose first token is sampled already; with turns, that may end the first."""
    free_W = ~(rows.active_W | rows.waiting_W)
    turn_W = rows.taken_Q + jnp.cumsum(free_W, dtype=jnp.int32) - 1
    takes_W = free_W & (turn_W < rows.queued_Q)
    sample_W = jnp.where(takes_W, rows.order_B.at[turn_W].get(mode="clip"), rows.sample_W)
    token_W = jnp.where(takes_W, rows.tokens_BC[sample_W, 0], rows.token_W)
    matched_W = None if rows.matched_B is None else rows.matched_B[sample_W]
    stops_W = stops.has_ended(matched_W, token_W, options.stop_ids, options.matcher)
    if rows.limit_B is not None:
        stops_W |= rows.limit_B[sample_W] <= 1
    return replace(
        rows,
        taken_Q=rows.taken_Q + takes_W.sum(dtype=jnp.int32)[None],
        sample_W=sample_W,
        token_W=token_W,
        length_W=jnp.where(takes_W, 1, rows.length_W),
        right_W=None if rows.right_W is None else jnp.where(takes_W, 0, rows.right_W),
        active_W=rows.active_W | (takes_W & ~stops_W),
        waiting_W=rows.waiting_W | (takes_W & stops_W),
    )


def _write_back(rows: Rows, sampled: Sampled, right_W: Array | int = 0, *, options: SampleOptions) -> Rows:
    """Record the slots' new tokens. Samples that finish leave their slots to others; with turns, a stop token waits.

    Args:
      sampled: with values for M positions of each slot, of which those up to number `right_W` count.
    """
    C, gets_W, draw = rows.tokens_BC.shape[1], sampled.gets_W, sampled.draw
    at_W1 = jnp.broadcast_to(right_W, gets_W.shape)[:, None]
    matched_WM, stops_WM = _follow(rows, draw.token_B, options)

    def last(x_WM: Array) -> Array:
        return jnp.take_along_axis(x_WM, at_W1, axis=1)[:, 0]

    token_W, stops_W, length_W = last(draw.token_B), last(stops_WM), rows.length_W + right_W
    if rows.limit_B is not None:
        stops_W |= length_W + 1 >= rows.limit_B[rows.sample_W]
    stops_W &= gets_W
    sample_W = None
    if not at_one_position(rows, options):
        sample_W = jnp.where(gets_W, rows.sample_W, len(rows.length_B))  # of the other slots: dropped
    index_1M = jnp.arange(draw.token_B.shape[1])[None]
    beyond = C + 1  # so is the position before it: both are dropped
    place_WM = jnp.where(index_1M <= at_W1, rows.length_W[:, None] + index_1M, beyond)

    def record(x_BC: PyTree, x_WM: Array | None, back: int = 0) -> PyTree:
        """Record the values of the new tokens' positions; elsewhere keep those before."""
        if x_BC is None or x_WM is None:
            return x_BC
        if sample_W is None:
            return jax.lax.dynamic_update_slice_in_dim(x_BC, x_WM.astype(x_BC.dtype), sampled.step + 1 - back, axis=1)
        return x_BC.at[sample_W[:, None], place_WM - back].set(x_WM.astype(x_BC.dtype), mode="drop")

    def of_sample(x_B: Array, x_W: Array) -> Array:
        return jnp.where(gets_W, x_W, x_B) if sample_W is None else x_B.at[sample_W].set(x_W, mode="drop")

    rows = replace(
        rows,
        tokens_BC=record(rows.tokens_BC, draw.token_B),
        logp_BC=record(rows.logp_BC, draw.logp_B),
        sampled_BC=record(rows.sampled_BC, jnp.broadcast_to(gets_W[:, None], place_WM.shape)),
        expert_BCLA=record(rows.expert_BCLA, sampled.expert_WMLA, back=1),
        version_BC=record(rows.version_BC, jnp.broadcast_to(sampled.version, place_WM.shape)),
        kept_BCK=record(rows.kept_BCK, draw.kept_BK),
        cut_BC=record(rows.cut_BC, draw.cut_B),
        passes_B=None if rows.passes_B is None else rows.passes_B.at[sample_W].add(1, mode="drop"),
        length_B=of_sample(rows.length_B, length_W + 1),
        finished_B=rows.finished_B if options.turns else of_sample(rows.finished_B, stops_W),
        matched_B=jax.tree.map(of_sample, rows.matched_B, None if matched_WM is None else last(matched_WM)),
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
    if rows.limit_B is not None and replies.most_B is not None:
        limit_B = rows.length_B + replies.count_B + replies.most_B
        rows = replace(rows, limit_B=jnp.where(replies.count_B > 0, limit_B, rows.limit_B))
    reply_WX, count_W = on_devices(_replies_of_slots, options, rows, replies.tokens_BX, replies.count_B)
    slots, id_W, greedy_W = describe_slots(rows, options)
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
    logits_WV = decoding.logits(params, hidden_WD, options.model.logit_cap)
    draw_W = _sample_next(logits_WV, key, id_W, position_W, greedy_W, options)
    draw_W1 = jax.tree.map(lambda x_W: x_W[:, None], draw_W)
    sampled = Sampled(resumed_W, draw_W1, None, state.step, jnp.asarray(version, jnp.int32))
    write = partial(_write_replies, options=options)
    rows = on_devices(write, options, rows, (reply_WX, count_W, expert_WYLA), sampled)
    return replace(state, rows=rows, cache=cache)


def _replies_of_slots(rows: Rows, reply_BX: Array, count_B: Array) -> tuple[Array, Array]:
    """Return the replies to the samples of waiting slots."""
    return reply_BX[rows.sample_W], jnp.where(rows.waiting_W, count_B[rows.sample_W], 0)


def _write_replies(
    rows: Rows, replies: tuple[Array, Array, Array], sampled: Sampled, *, options: SampleOptions
) -> Rows:
    """Record the replies, outside the mask, and the tokens after them; others are finished, or go on waiting."""
    reply_WX, count_W, expert_WYLA = replies
    C, sample_W1, expert_BCLA = rows.tokens_BC.shape[1], rows.sample_W[:, None], rows.expert_BCLA
    index_1Y = jnp.arange(expert_WYLA.shape[1])[None]
    # of the stop token and of a reply after it; the others are dropped
    run_WY = (index_1Y <= count_W[:, None]) & sampled.gets_W[:, None]
    place_WY = jnp.where(run_WY, rows.length_W[:, None] - 1 + index_1Y, C)
    if expert_BCLA is not None:
        expert_BCLA = expert_BCLA.at[sample_W1, place_WY].set(expert_WYLA.astype(expert_BCLA.dtype), mode="drop")
    rows = replace(
        rows,
        tokens_BC=rows.tokens_BC.at[sample_W1, place_WY[:, 1:]].set(reply_WX, mode="drop"),
        expert_BCLA=expert_BCLA,
        finished_B=rows.finished_B | of_samples(rows, rows.waiting_W & (count_W == 0)),
        matched_B=stops.begin(rows.matched_B, of_samples(rows, sampled.gets_W), options.matcher),
        length_W=rows.length_W + jnp.maximum(count_W, 0),
        waiting_W=rows.waiting_W & (count_W < 0),
    )
    return _write_back(rows, sampled, options=options)


def row_axis(mesh: jax.sharding.Mesh, B: int, W: int) -> str:
    """Return the logical axis of samples and slots."""
    return "sample" if sample_axis(mesh, B) == sample_axis(mesh, W) == "sample" else "batch"


def _row_shards(mesh: jax.sharding.Mesh, B: int, W: int) -> int:
    """Count the Q devices that have rows of their own."""
    return batch_shards(mesh) * (mesh.shape["context"] if row_axis(mesh, B, W) == "sample" else 1)


def on_devices(function: Callable[..., T], options: SampleOptions, *args: PyTree) -> T:
    """Run `function(*args)` on each device's own rows. The first argument is `Rows`.

    Arguments but scalars, and all results, have a leading axis of rows.
    """
    mesh, rows = options.mesh, args[0]
    if mesh.size == 1:
        return function(*args)
    by_row = spec(row_axis(mesh, len(rows.length_B), len(rows.active_W)))
    specs = jax.tree.map(lambda leaf: by_row if jnp.ndim(leaf) else PartitionSpec(), args)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=by_row, check_vma=False)(*args)
