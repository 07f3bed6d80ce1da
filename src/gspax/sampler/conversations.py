"""Replies in the decoding engine: `resume` goes on with the samples whose turn has ended.

With `SampleOptions.turns` a stop token ends a turn, not a sample: the slot then waits with its cache, while others go
on or take further samples. `resume` runs the tokens of the replies after the turns and samples the first token of each
next turn. Nothing is tokenized again. The key of a token is that of (sample id, position), as everywhere in `engine`,
so neither the other samples nor the time at which a reply arrives changes it.

Axes: as in `engine`; X tokens of the longest reply, Y = X + 1 with the stop token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gspax.model import decoding
from gspax.model.extension import extend
from gspax.sampler.engine import Rows, Sampled, SampleOptions, State, describe_slots, of_samples, on_devices, write_back
from gspax.sampler.token_sampling import sample_at
from gspax.types import Array, Params

SMALLEST_REPLY = 8


class Replies(NamedTuple):
    """What follows the turns that have ended, for each sample."""

    tokens_BX: Array | np.ndarray  # int32
    count_B: Array | np.ndarray  # int32; a waiting sample without a reply is finished, the others are left as they are


def pad_replies(replies: Sequence[Sequence[int]]) -> Replies:
    """Right-padded replies. With the stop token before it, a row of X + 1 tokens is 8, 16, 32, 64, … long, so that few
    programs are compiled; `extend` runs no more blocks than there are tokens for."""
    longest, size = max(map(len, replies)) + 1, SMALLEST_REPLY
    while size < longest:
        size *= 2
    padded_BX = np.zeros((len(replies), size - 1), np.int32)
    for row, reply in enumerate(replies):
        padded_BX[row, : len(reply)] = reply
    return Replies(padded_BX, np.array([*map(len, replies)], np.int32))


def resume(
    params: Params, state: State, replies: Replies, key: Array, options: SampleOptions, version: Array | int = 0
) -> State:
    """Append the replies, sample the first token of each next turn, and give the slots of finished samples to others.

    Args:
      replies: of all samples, from `pad_replies`; each leaves room for a token of the next turn.
      version: of the parameters, which the next tokens are sampled with.
    """
    rows = state.rows
    reply_WX, count_W = on_devices(_of_slots, options, rows)(rows, *replies)
    slots, id_W, greedy_W = describe_slots(rows, options)
    resumed_W = count_W > 0
    hidden_WD, cache, expert_WYLA = extend(
        params,
        options.model,
        jnp.concatenate([rows.token_W[:, None], reply_WX], axis=1),  # the stop token is not in the cache yet
        state.cache,
        slots._replace(count_W=jnp.where(resumed_W, count_W + 1, 0)),
        mesh=options.mesh,
    )
    position_W = slots.prompt_length_W + rows.length_W + count_W
    logits_WV = decoding.logits(params, hidden_WD)
    token_W, logp_W = sample_at(logits_WV, key, id_W, position_W, options.sampling, greedy_W)
    write = on_devices(partial(_write_replies, options=options), options, rows)
    sampled = Sampled(resumed_W, token_W, logp_W, None)
    replies_of_slots = reply_WX, count_W, expert_WYLA
    rows = write(rows, replies_of_slots, sampled, state.step, jnp.asarray(version, jnp.int32))
    return replace(state, rows=rows, cache=cache)


def _of_slots(rows: Rows, reply_BX: Array, count_B: Array) -> tuple[Array, Array]:
    """The replies to the samples of waiting slots."""
    assert rows.queue is not None
    sample_W = rows.queue.sample_W
    return reply_BX[sample_W], jnp.where(rows.waiting_W, count_B[sample_W], 0)


def _write_replies(
    rows: Rows,
    replies: tuple[Array, Array, Array],
    sampled: Sampled,
    step: Array,
    version: Array,
    *,
    options: SampleOptions,
) -> Rows:
    """Record the replies, outside the mask, and the tokens after them; the other waiting samples are finished."""
    assert rows.queue is not None
    reply_WX, count_W, expert_WYLA = replies
    C, sample_W1, expert_BCLA = rows.tokens_BC.shape[1], rows.queue.sample_W[:, None], rows.expert_BCLA
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
        finished_B=rows.finished_B | of_samples(rows, rows.waiting_W & ~sampled.gets_W),
        length_W=rows.length_W + count_W,
        waiting_W=jnp.zeros_like(rows.waiting_W),
    )
    return write_back(rows, sampled, step, version, options=options)
