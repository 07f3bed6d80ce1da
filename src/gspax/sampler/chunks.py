"""The decoding loop in chunks: the host looks at the samples between two of them.

`sample_in_chunks` hands over the samples that have ended while others go on. The next chunk is started before the
samples that ended in the last one are fetched, so the devices do not wait for the host. Tokens and log-probs are those
of the whole loop, unless the weights are renewed between two chunks.

Axes: as in `sampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.run import interrupt
from gspax.sampler import conversations, engine
from gspax.sampler.engine import Prompts, SampleOptions
from gspax.types import Array, Params

Ended = Callable[[dict[int, np.ndarray]], None]  # gets this process's completions, stop token included, by row


class Progress(NamedTuple):
    """What is fetched after a chunk; the rows are sharded as those of a rollout."""

    tokens_BC: Array
    length_B: Array
    ended_B: Array  # bool: no token follows
    waiting_B: Array  # bool: the sample's turn has ended, and it waits for a reply
    left: Array  # bool: a sample has not ended


def sample_in_chunks(
    params: Params,
    prompts: Prompts,
    key: Array,
    options: SampleOptions,
    *,
    ended: Ended | None = None,
    renew: Callable[[], tuple[Params, int]] | None = None,
) -> engine.State:
    """The state in which all samples have ended, and a call of `ended` after each chunk in which some did.

    Args:
      ended: each row once. What it raises is raised on every process.
      renew: called before every chunk but the first: newer parameters and their version; those given have version 0.
    """
    version = 0
    state, progress = start(params, prompts, key, options=options)
    handed_over = np.zeros(progress.length_B.shape, bool)
    while True:
        interrupt.stop_point()
        before, left = progress, bool(multihost.to_host(progress.left))
        if left:
            state, progress = advance_chunk(params, state, key, np.int32(version), options=options)
        if ended is not None:
            hand_over(before, handed_over, ended)
        if not left:
            return state
        if renew is not None:
            params, version = renew()


def hand_over(progress: Progress, handed_over: np.ndarray, ended: Ended) -> None:
    """Call `ended` with the rows that have ended since the last time."""
    length_B, ended_B = multihost.to_host((progress.length_B, progress.ended_B))
    new_B = ended_B & ~handed_over
    handed_over |= new_B
    if new_B.any():

        def work() -> None:
            rows = multihost.owned_rows(progress.tokens_BC)
            if new := {row: tokens[: length_B[row]] for row, tokens in rows.items() if new_B[row]}:
                ended(new)

        multihost.all_or_raise(work)


@partial(jax.jit, static_argnames="options")
def start(params: Params, prompts: Prompts, key: Array, *, options: SampleOptions) -> tuple[engine.State, Progress]:
    """`engine.start`."""
    state = engine.start(params, prompts, key, options)
    return state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options", donate_argnames="state")
def advance_chunk(
    params: Params, state: engine.State, key: Array, version: Array | int, *, options: SampleOptions
) -> tuple[engine.State, Progress]:
    """`engine.advance` by `sampling.chunk` tokens of each slot; without a chunk until no slot is active."""
    state = engine.advance(params, state, key, options, options.sampling.chunk or 2**30, version)
    return state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options", donate_argnames="state")
def resume(
    params: Params,
    state: engine.State,
    replies: conversations.Replies,
    key: Array,
    version: Array | int,
    *,
    options: SampleOptions,
) -> tuple[engine.State, Progress]:
    """`conversations.resume`."""
    state = conversations.resume(params, state, replies, key, options, version)
    return state, describe_progress(state, options)


def describe_progress(state: engine.State, options: SampleOptions) -> Progress:
    """What the host looks at."""
    rows, waiting_B = state.rows, jnp.zeros_like(state.rows.finished_B)
    if options.turns:
        waiting_B = engine.on_devices(engine.of_samples, options, rows)(rows, rows.waiting_W)
    ended_B = rows.finished_B | ((rows.length_B >= rows.tokens_BC.shape[1]) & ~waiting_B)
    by_row = rows.tokens_BC, rows.length_B, ended_B, waiting_B
    by_row = jax.lax.with_sharding_constraint(by_row, named_sharding(options.mesh, "batch"))
    tokens_BC, length_B, ended_B, waiting_B = by_row
    return Progress(tokens_BC, length_B, ended_B, waiting_B, left=(~ended_B).any())
