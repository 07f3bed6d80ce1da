"""Drawing the turns of conversations: `start` prefills the prompts, `advance` draws turns, `resume` appends replies.

Every conversation has a slot of its own, whose cache is kept between its turns. `advance` ends a conversation's turn at
a stop token; it then waits until `resume` runs the tokens of a reply after it and draws the first token of the next
turn. What the policy has drawn is never tokenised again. The key of a token is that of (sample id, position) as in
`engine`, so neither the other conversations nor the time at which a reply arrives changes it.

Axes: P prompts, G samples per prompt, B = P·G conversations, S prompt positions, C positions after the prompt (turns
and replies), X tokens of the longest reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import layer_windows
from gspax.model import decoding
from gspax.model.decoding import Cache, Slots
from gspax.model.extension import NewTokens, extend
from gspax.rollout.drawing import draw_at, is_stop
from gspax.rollout.engine import Settings, prefill
from gspax.sharding import batch_shards, constrain, named_sharding, sample_axis
from gspax.types import Array, Params, Rollout

SMALLEST_REPLY = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the conversations hold after their prompts."""

    tokens_BC: Array  # int32
    logp_BC: Array  # float32  0 where the policy did not draw the token
    drawn_BC: Array  # bool     drawn by the policy
    length_B: Array  # int32
    stopped_B: Array  # bool     the last token is a stop token
    drawing_B: Array  # bool     in a turn of the policy
    prompt_length_B: Array  # int32
    id_B: Array  # uint32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """The conversations between two tokens. The last token of each is not yet in the cache."""

    rows: Rows
    cache: Cache


@partial(jax.jit, static_argnames="settings")
def start(params: Params, tokens_PS: Array, length_P: Array, id_P: Array, key: Array, *, settings: Settings) -> State:
    """Prefill the prompts and draw the first token of every conversation. `id_P`: of each prompt's first one."""
    config, sampling, _, mesh = settings[:4]
    P, G, C = tokens_PS.shape[0], sampling.group, sampling.max_tokens
    B = P * G
    with jax.named_scope("prefill"):
        last_PD, prompts, _ = prefill(params, tokens_PS, length_P, settings)
    logits_BV = jnp.repeat(decoding.logits(params, last_PD), G, axis=0)
    number_B = jnp.tile(jnp.arange(G, dtype=jnp.uint32), P)  # of a prompt's conversations
    rows = Rows(
        tokens_BC=jnp.zeros((B, C), jnp.int32),
        logp_BC=jnp.zeros((B, C), jnp.float32),
        drawn_BC=jnp.zeros((B, C), bool),
        length_B=jnp.zeros(B, jnp.int32),
        stopped_B=jnp.zeros(B, bool),
        drawing_B=jnp.ones(B, bool),
        prompt_length_B=jnp.repeat(length_P, G),
        id_B=jnp.repeat(id_P, G) + number_B,
    )
    rows = _draw(rows, logits_BV, rows.drawing_B, key, settings)
    rows = jax.tree.map(lambda leaf: constrain(leaf, mesh, sample_axis(mesh, B)), rows)
    dtype = sampling.kv_cache_dtype
    return State(rows=rows, cache=decoding.new_cache(prompts, config, B, C, kv_cache_dtype=dtype, mesh=mesh))


@partial(jax.jit, static_argnames="settings", donate_argnames="state")
def advance(params: Params, state: State, key: Array, *, settings: Settings) -> State:
    """Draw until every turn has ended, or `sampling.chunk` tokens if that is not 0."""
    config, sampling, _, mesh = settings[:4]
    limit = sampling.chunk or 2**30

    def decode(carry: tuple[Array, State]) -> tuple[Array, State]:
        step, state = carry
        rows = state.rows
        last_B1 = jnp.maximum(rows.length_B - 1, 0)[:, None]
        token_B = jnp.take_along_axis(rows.tokens_BC, last_B1, axis=1)[:, 0]
        slots = Slots(rows.prompt_length_B, _prompt_of_slot(settings, rows), last_B1[:, 0], rows.drawing_B)
        with jax.named_scope("decode"):
            hidden_BD, cache, _ = decoding.decode(params, config, token_B, state.cache, slots, mesh=mesh)
        rows = _draw(rows, decoding.logits(params, hidden_BD), rows.drawing_B, key, settings)
        return step + 1, State(rows=rows, cache=cache)

    def going(carry: tuple[Array, State]) -> Array:
        return (carry[0] < limit) & carry[1].rows.drawing_B.any()

    return jax.lax.while_loop(going, decode, (jnp.int32(0), state))[1]


@partial(jax.jit, static_argnames="settings", donate_argnames="state")
def resume(params: Params, state: State, reply_BX: Array, count_B: Array, key: Array, *, settings: Settings) -> State:
    """Append replies to conversations whose turn has ended, and draw the first token of their next turn.

    Args:
      reply_BX: int32, with X from `pad_replies`.
      count_B: int32, tokens of the reply; 0: the conversation is left as it is. A reply leaves room for a token.
    """
    config, mesh, rows = settings.config, settings.mesh, state.rows
    (B, C), X = rows.tokens_BC.shape, reply_BX.shape[1]
    last_B1 = jnp.maximum(rows.length_B - 1, 0)[:, None]
    last_token_B1 = jnp.take_along_axis(rows.tokens_BC, last_B1, axis=1)
    new = NewTokens(
        rows.prompt_length_B, _prompt_of_slot(settings, rows), last_B1[:, 0], jnp.where(count_B > 0, count_B + 1, 0)
    )
    tokens_BX = jnp.concatenate([last_token_B1, reply_BX], axis=1)
    hidden_BD, cache = extend(params, config, tokens_BX, state.cache, new, mesh=mesh)
    place_BX = rows.length_B[:, None] + jnp.arange(X)[None]
    place_BX = jnp.where(jnp.arange(X)[None] < count_B[:, None], place_BX, C)  # the others are dropped
    resumed_B = count_B > 0
    rows = replace(
        rows,
        tokens_BC=rows.tokens_BC.at[jnp.arange(B)[:, None], place_BX].set(reply_BX, mode="drop"),
        length_B=rows.length_B + count_B,
        drawing_B=rows.drawing_B | resumed_B,
    )
    rows = _draw(rows, decoding.logits(params, hidden_BD), resumed_B, key, settings)
    return State(rows=rows, cache=cache)


class Progress(NamedTuple):
    """What the host reads between turns; rows are sharded as those of a rollout."""

    tokens_BC: Array
    length_B: Array
    stopped_B: Array
    drawing_B: Array


@partial(jax.jit, static_argnames="mesh")
def describe(rows: Rows, *, mesh: jax.sharding.Mesh | None) -> Progress:
    """How far the conversations are."""
    progress = Progress(rows.tokens_BC, rows.length_B, rows.stopped_B, rows.drawing_B)
    return progress if mesh is None else jax.lax.with_sharding_constraint(progress, named_sharding(mesh, "batch"))


@partial(jax.jit, static_argnames="settings")
def assemble(tokens_PS: Array, rows: Rows, *, settings: Settings) -> Rollout:
    """The rollout of the conversations; `finished_B` is whether the last token is a stop token."""
    (B, C), (P, S), mesh = rows.tokens_BC.shape, tokens_PS.shape, settings.mesh
    index_BT = jnp.broadcast_to(jnp.arange(S + C)[None], (B, S + C))
    after_BT = index_BT - rows.prompt_length_B[:, None]
    within_BT = (after_BT >= 0) & (after_BT < rows.length_B[:, None])
    place_BT = jnp.clip(after_BT, 0, C - 1)

    def after_prompt(x_BC: Array) -> Array:
        return jnp.where(within_BT, jnp.take_along_axis(x_BC, place_BT, axis=1), jnp.zeros((), x_BC.dtype))

    prompt_BT = jnp.pad(jnp.repeat(tokens_PS, B // P, axis=0), ((0, 0), (0, C)))
    rollout = Rollout(
        tokens_BT=jnp.where(after_BT < 0, prompt_BT, after_prompt(rows.tokens_BC)),
        mask_BT=after_prompt(rows.drawn_BC),
        logp_BT=after_prompt(rows.logp_BC),
        prompt_length_B=rows.prompt_length_B,
        length_B=rows.length_B,
        finished_B=rows.stopped_B,
        reply_B=rows.length_B - rows.drawn_BC.sum(axis=1, dtype=jnp.int32),
    )
    return rollout if mesh is None else jax.lax.with_sharding_constraint(rollout, named_sharding(mesh, "batch"))


@partial(jax.jit, static_argnames=("group", "mesh"))
def join(rollouts: list[Rollout], *, group: int, mesh: jax.sharding.Mesh | None) -> Rollout:
    """One rollout of several with equal prompts: the rows of a prompt follow one another, in the order of the rollouts.

    No row leaves its device.

    Args:
      group: rows of a prompt in each of them.
    """

    def of_all(*parts: Array) -> Array:
        grouped = [part.reshape(-1, group, *part.shape[1:]) for part in parts]
        joined = jnp.concatenate(grouped, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    rollout = jax.tree.map(of_all, *rollouts)
    return rollout if mesh is None else jax.lax.with_sharding_constraint(rollout, named_sharding(mesh, "batch"))


def pad_replies(replies: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded int32 tokens `[B, X]` and lengths `[B]`. With the stop token before it, a row of X + 1 tokens is 8,
    16, 32, 64, … long, so that few programs are compiled; `extend` runs no more blocks than there are tokens for."""
    longest, size = max(map(len, replies)) + 1, SMALLEST_REPLY
    while size < longest:
        size *= 2
    padded_BX = np.zeros((len(replies), size - 1), np.int32)
    for row, reply in enumerate(replies):
        padded_BX[row, : len(reply)] = reply
    return padded_BX, np.array([*map(len, replies)], np.int32)


def _prompt_of_slot(settings: Settings, rows: Rows) -> Array | None:
    """As `Slots.prompt_W`: None where the slots of a prompt are adjacent on one device and see all of it."""
    mesh, B = settings.mesh, len(rows.length_B)
    if (mesh is None or mesh.shape["context"] == 1) and not layer_windows(settings.config):
        return None
    P = B // settings.sampling.group // (1 if mesh is None else batch_shards(mesh))
    return jnp.arange(B, dtype=jnp.int32) // settings.sampling.group % P


def _draw(rows: Rows, logits_BV: Array, turn_B: Array, key: Array, settings: Settings) -> Rows:
    """Record a token for each of these conversations; a turn ends with a stop token or at the last position."""
    B, C = rows.tokens_BC.shape
    position_B, greedy_B = rows.prompt_length_B + rows.length_B, None
    if settings.greedy:
        greedy_B = jnp.arange(B) % settings.sampling.group >= settings.sampling.group - settings.greedy
    token_B, logp_B = draw_at(logits_BV, key, rows.id_B, position_B, settings.sampling, greedy_B)
    place_B = jnp.where(turn_B, rows.length_B, C)  # the others are dropped
    stops_B = is_stop(token_B, settings.stop_ids)
    length_B = rows.length_B + turn_B

    def record(x_BC: Array, x_B: Array) -> Array:
        return x_BC.at[jnp.arange(B), place_B].set(x_B, mode="drop")

    return replace(
        rows,
        tokens_BC=record(rows.tokens_BC, token_B),
        logp_BC=record(rows.logp_BC, logp_B),
        drawn_BC=record(rows.drawn_BC, turn_B),
        length_B=length_B,
        stopped_B=jnp.where(turn_B, stops_B, rows.stopped_B),
        drawing_B=jnp.where(turn_B, ~stops_B & (length_B < C), rows.drawing_B),
    )
