"""Partial rollouts: a pool of groups, out of which a rollout is taken as soon as enough of them have finished.

The others stay, and newer parameters continue them in the next rollout: a few long completions delay nothing. Their
tokens and log-probs are stored, each token with the version of the parameters that sampled it, and so is their cache.
Recomputing the cache with the new parameters would cost a prefill of every carried completion; without that, a token's
log-prob is still the one that it was sampled with, as corrections need (`losses.correction`). Servers do recompute it.

The step at which a rollout is taken depends on lengths alone, never on time, so that a run can be repeated. Every
process has these lengths on its host.

Axes: R slots for groups, P of them in a rollout, B rows of all slots; else as in `continuous_batching`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gspax.rollout.contract import HeldSamples, Weights
from gspax.rollout.episodes import EncodedProblem, RowsOnHost
from gspax.rollout.grading import Started
from gspax.types import Rollout

FREE = -1  # the problem of a slot without a group


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The groups that are being sampled, and the finished groups that wait for a rollout."""

    problem_R: np.ndarray  # int64    index of each slot's problem, or FREE
    version_R: np.ndarray  # int64    version of the parameters that sampled the group's first tokens
    next_problem: int  # the first one that has not been in the pool
    rows: RowsOnHost
    held: HeldSamples  # changes in place

    def count(self) -> int:
        """Return the number of groups in the pool."""
        return int((self.problem_R != FREE).sum())


def new_pool(places: int, group: int, first: int, held: HeldSamples) -> Pool:
    """Make an empty pool, whose first problem will be `first`."""
    return Pool(
        problem_R=np.full(places, FREE, np.int64),
        version_R=np.zeros(places, np.int64),
        next_problem=first,
        rows=RowsOnHost({}, group, np.ones(places * group, bool)),
        held=held,
    )


def next_problems(pool: Pool, groups: int) -> dict[int, int]:
    """Return the indices of the next problems, by the free slot of each."""
    places = np.flatnonzero(pool.problem_R == FREE)[:groups]
    return {int(place): pool.next_problem + number for number, place in enumerate(places)}


def admit(pool: Pool, ids: Mapping[int, int], encoded: Mapping[int, EncodedProblem], weights: Weights) -> Pool:
    """Add new groups to the pool.

    Args:
      ids: from `next_problems`, or later ones where some of these cannot be used.
      encoded: the problems of the slots of `ids` that have rows on this process.
    """
    rows, problem_R, fresh_R = pool.rows, pool.problem_R.copy(), np.zeros(len(pool.problem_R), bool)
    problem_R[list(ids)] = list(ids.values())
    fresh_R[list(ids)] = True
    fresh_B = np.repeat(fresh_R, rows.group)
    pool.held.admit(encoded, np.maximum(problem_R, 0).tolist(), fresh_R, weights)
    others = {place: old for place, old in rows.encoded.items() if not fresh_R[place]}
    return replace(
        pool,
        problem_R=problem_R,
        version_R=np.where(fresh_R, weights.version, pool.version_R),
        next_problem=max(ids.values()) + 1,
        rows=replace(rows, encoded={**others, **encoded}, ended_B=rows.ended_B & ~fresh_B),
    )


def find_ended(pool: Pool) -> np.ndarray:
    """Return bool [R]: all samples of a slot's group have ended, and their rewards have started."""
    return pool.rows.ended_B.reshape(len(pool.problem_R), -1).all(axis=1) & (pool.problem_R != FREE)


def choose_groups(pool: Pool, ended_R: np.ndarray, groups: int, oldest: int) -> np.ndarray | None:
    """Choose the slots of the next rollout, in the order of their problems; None while it must wait.

    Args:
      ended_R: from `find_ended`.
      groups: P; the oldest P groups that have ended are taken.
      oldest: a group with first tokens of this version or an older one cannot wait for another rollout.
    """
    held_R = pool.problem_R != FREE
    if ended_R.sum() < groups or (held_R & (pool.version_R <= oldest) & ~ended_R).any():
        return None
    by_problem = np.argsort(pool.problem_R, kind="stable")
    return by_problem[ended_R[by_problem]][:groups]


def take(pool: Pool, places: np.ndarray) -> tuple[Pool, Rollout, Started]:
    """Remove groups from the pool; return the pool, their rows in the order of `places`, and rewards by these rows."""
    rows, group = pool.rows, pool.rows.group
    row_B = (places[:, None] * group + np.arange(group)).reshape(-1)
    started = {new: rows.started.pop(old) for new, old in enumerate(row_B.tolist()) if old in rows.started}
    rollout, problem_R = pool.held.take(row_B), pool.problem_R.copy()
    problem_R[places] = FREE
    return replace(pool, problem_R=problem_R), rollout, started
