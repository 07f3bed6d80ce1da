"""The decoding loop in chunks: samples that have ended are handed over while the others are still being drawn.

The loop is left every `sampling.chunk` tokens. The next chunk is started before the samples that ended in the
last one are fetched, so the devices do not wait for the host. Tokens and log-probs are those of the whole loop, unless
the weights are renewed between two chunks.

Axes: as in `sampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gspax.distributed import multihost
from gspax.rollout import engine
from gspax.run import interrupt
from gspax.types import Array, Params


class Progress(NamedTuple):
    """What is fetched after a chunk."""

    tokens_BC: Array
    length_B: Array
    finished_B: Array
    left: Array  # bool: samples are still being drawn


def draw_in_chunks(
    params: Params,
    tokens_PS: Array,
    length_P: Array,
    id_P: Array,
    key: Array,
    *,
    settings: engine.Settings,
    ended: Callable[[dict[int, np.ndarray]], None] | None = None,
    renew: Callable[[], tuple[Params, int]] | None = None,
) -> engine.State:
    """The state in which all samples have ended, and a call of `ended` after each chunk in which some did.

    Args:
      ended: gets the tokens of this process's completions, stop token included, by row; each row once. What it raises
        is raised on every process.
      renew: called before every chunk but the first: newer parameters and their version; those given have version 0.
    """
    version = 0
    state, progress = _start(params, tokens_PS, length_P, id_P, key, settings=settings)
    handed_over = np.zeros(progress.length_B.shape, bool)
    while True:
        interrupt.stop_point()
        before, going = progress, bool(multihost.to_host(progress.left))
        if going:
            state, progress = advance_chunk(params, state, key, np.int32(version), settings=settings)
        if ended is not None:
            hand_over(before, handed_over, settings.sampling.max_tokens, ended)
        if not going:
            return state
        if renew is not None:
            params, version = renew()


def hand_over(progress: Progress, handed_over: np.ndarray, longest: int, ended: Callable[..., None]) -> None:
    """Call `ended` with the rows that have ended since the last time."""
    length_B, finished_B = multihost.to_host((progress.length_B, progress.finished_B))
    new_B = (finished_B | (length_B >= longest)) & ~handed_over
    handed_over |= new_B
    if new_B.any():

        def work() -> None:
            rows = multihost.owned_rows(progress.tokens_BC)
            if found := {row: tokens[: length_B[row]] for row, tokens in rows.items() if new_B[row]}:
                ended(found)

        multihost.all_or_raise(work)


@partial(jax.jit, static_argnames="settings")
def _start(params, tokens_PS, length_P, id_P, key, *, settings) -> Any:
    state = engine.start(params, tokens_PS, length_P, id_P, key, settings)
    return state, describe_progress(state)


@partial(jax.jit, static_argnames="settings", donate_argnames="state")
def advance_chunk(params, state, key, version, *, settings) -> Any:
    """The state and its `Progress` after `sampling.chunk` more tokens of each slot."""
    state = engine.advance(params, state, key, settings, settings.sampling.chunk, version)
    return state, describe_progress(state)


def describe_progress(state: engine.State) -> Progress:
    """What the host looks at."""
    rows = state.rows
    return Progress(rows.tokens_BC, rows.length_B, rows.finished_B, rows.live_W.any())
