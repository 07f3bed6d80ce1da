"""Partial rollouts: a pool of groups, out of which a rollout batch is taken as soon as enough of them have ended.

The others stay and are drawn on, with newer parameters, into the next batch: a few long completions hold up nobody.
Their tokens and log-probs are kept, each token with the version of the parameters that drew it, and so is their cache.
Computing it again with the new parameters would cost a prefill of every carried completion; without that, a token's
log-prob is still the one that it was drawn with, which is what corrections need (`losses.correction`).

When a batch ends depends on lengths alone, never on time, so that a run can be repeated. What decides is on the host
of every process.

Axes: R places for groups, P of them in a rollout batch; else as in `engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.data.problem import Problem
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.grading import Started
from gspax.sampler import engine
from gspax.sampler.chunks import Ended, Progress, advance_chunk, describe_progress, hand_over
from gspax.sampler.engine import Prompts, SampleOptions
from gspax.sampler.sampler import place_prompts
from gspax.types import Array, Params, Rollout

FREE = -1  # the problem of a place without a group


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The groups that are being drawn, and those that have ended and wait for a batch."""

    key: Array  # on the host
    problem_R: np.ndarray  # int64    index of each place's problem, or FREE
    policy_R: np.ndarray  # int64    version of the parameters that drew the group's first tokens
    next_problem: int  # the first one that has not been in the pool
    problems: list[Problem | None]  # of each place; those that this process has rows of
    started: Started  # rewards of samples that have ended, by row of the pool
    handed_over_B: np.ndarray  # bool     the sample has ended, and its reward was started if it is started here
    tokens_RS: Array | None = None  # int32    prompts; None, as the two below: nothing has been drawn
    state: engine.State | None = None
    progress: Progress | None = None

    def count(self) -> int:
        """The groups in it."""
        return int((self.problem_R != FREE).sum())


class Weights(NamedTuple):
    """What the next tokens are drawn with."""

    params: Params  # inference weights
    version: int  # the rollout batches that it has learnt from


def new_pool(places: int, group: int, first: int, key: Array) -> Pool:
    """A pool without groups, whose first problem will be `first`, and whose samples are drawn with this key."""
    return Pool(
        key=key,
        problem_R=np.full(places, FREE, np.int64),
        policy_R=np.zeros(places, np.int64),
        next_problem=first,
        problems=[None] * places,
        started=Started(),
        handed_over_B=np.ones(places * group, bool),
    )


def next_problems(pool: Pool, groups: int) -> np.ndarray:
    """The next so many problems in the free places that they will have, int64 [R]; FREE elsewhere."""
    fresh_R = np.full_like(pool.problem_R, FREE)
    places = np.flatnonzero(pool.problem_R == FREE)[:groups]
    fresh_R[places] = pool.next_problem + np.arange(len(places))
    return fresh_R


def admit(
    pool: Pool,
    index_R: np.ndarray,
    problems: Sequence[Problem | None],
    prompts: Sequence[Sequence[int] | None],
    weights: Weights,
    options: SampleOptions,
) -> Pool:
    """The pool with new groups, and the first token of each of their samples.

    Args:
      index_R: from `next_problems`, or later ones where some of these cannot be used.
      problems: of all R places, those that this process has rows of; None where `index_R` is FREE.
      prompts: their tokens.
    """
    params, version = weights
    fresh_R = index_R != FREE
    problem_R = np.where(fresh_R, index_R, pool.problem_R)
    handed_over_B = pool.handed_over_B & ~np.repeat(fresh_R, len(pool.handed_over_B) // len(fresh_R))
    filled = [prompt if fresh else [0] for prompt, fresh in zip(prompts, fresh_R, strict=True)]  # any prompt does
    placed = place_prompts(filled, np.maximum(problem_R, 0).tolist(), options, widest=True)
    fresh = np.repeat(fresh_R, len(placed.length_P) // len(fresh_R))
    tokens_RS, state, progress = _admit(
        params,
        (pool.tokens_RS, pool.state),
        placed,
        pool.key,
        fresh_R=multihost.to_devices(fresh, named_sharding(options.mesh, "batch")),
        version=np.int32(version),
        options=options,
    )
    return Pool(
        key=pool.key,
        problem_R=problem_R,
        policy_R=np.where(fresh_R, version, pool.policy_R),
        next_problem=max(pool.next_problem, int(index_R.max()) + 1),
        problems=[new if fresh else old for fresh, new, old in zip(fresh_R, problems, pool.problems, strict=True)],
        started=pool.started,
        handed_over_B=handed_over_B,
        tokens_RS=tokens_RS,
        state=state,
        progress=progress,
    )


def sample_chunk(pool: Pool, weights: Weights, options: SampleOptions) -> Pool:
    """The pool after `sampling.chunk` more tokens of each slot. Does not wait."""
    assert pool.state is not None
    params, version = weights
    state, progress = advance_chunk(params, pool.state, pool.key, np.int32(version), options=options)
    return replace(pool, state=state, progress=progress)


def find_ended(pool: Pool, ended: Ended | None) -> np.ndarray:
    """Whether all samples of a place's group have ended, bool [R]. Waits for the last chunk. Collective.

    Args:
      ended: as for `chunks.sample_in_chunks`; rows are those of the pool.
    """
    assert pool.progress is not None
    if ended is not None:
        hand_over(pool.progress, pool.handed_over_B, ended)
    ended_B = multihost.to_host(pool.progress.ended_B)
    return ended_B.reshape(len(pool.problem_R), -1).all(axis=1) & (pool.problem_R != FREE)


def choose_groups(pool: Pool, ended_R: np.ndarray, groups: int, oldest: int) -> np.ndarray | None:
    """The places of the next rollout batch, in the order of their problems; None while it must wait.

    Args:
      groups: P: that many have ended, of which those drawn first are taken.
      oldest: a group whose first tokens are of this version or an older one cannot wait for another batch.
    """
    held_R = pool.problem_R != FREE
    if ended_R.sum() < groups or (held_R & (pool.policy_R <= oldest) & ~ended_R).any():
        return None
    by_problem = np.argsort(pool.problem_R, kind="stable")
    return by_problem[ended_R[by_problem]][:groups]


def take(pool: Pool, places: np.ndarray, options: SampleOptions) -> tuple[Pool, Rollout, Started]:
    """The pool without these groups, their rows in the order of `places`, and their rewards by these rows."""
    group = len(pool.handed_over_B) // len(pool.problem_R)
    row_B = (places[:, None] * group + np.arange(group)).reshape(-1)
    started = {new: pool.started.pop(old) for new, old in enumerate(row_B.tolist()) if old in pool.started}
    on_devices = multihost.to_devices(row_B, named_sharding(options.mesh))
    rollout = _take(pool.tokens_RS, pool.state, on_devices, options=options)
    problem_R = pool.problem_R.copy()
    problem_R[places] = FREE
    return replace(pool, problem_R=problem_R), rollout, started


@partial(jax.jit, static_argnames="options", donate_argnames="held")
def _admit(params: Params, held: Any, prompts: Prompts, key: Array, *, fresh_R, version, options: SampleOptions) -> Any:
    tokens_RS, state = held
    state = engine.admit(params, state, prompts, key, options, fresh_P=fresh_R, version=version)
    tokens_RS = prompts.tokens_PS if tokens_RS is None else jnp.where(fresh_R[:, None], prompts.tokens_PS, tokens_RS)
    return tokens_RS, state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options")
def _take(tokens_RS: Array, state: engine.State, row_B: Array, *, options: SampleOptions) -> Rollout:
    rollout = jax.tree.map(lambda leaf: leaf[row_B], engine.assemble(tokens_RS, state, options))
    return jax.lax.with_sharding_constraint(rollout, named_sharding(options.mesh, "batch"))
