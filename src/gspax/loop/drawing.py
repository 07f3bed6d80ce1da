"""Rollout batches in flight: sampled on the sampler's mesh, fetched to the learner's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import jax

from gspax.data.problem import Problem, read_problem
from gspax.distributed import multihost
from gspax.loop.learner import Learner, count_rollouts
from gspax.rollout.episodes import hold_conversations
from gspax.rollout.placement import find_last_ahead
from gspax.rollout.pool import Pool
from gspax.rollout.rewards import Started, encode_prompts, start_rewards
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.run import progress
from gspax.sharding import named_sharding
from gspax.types import Array, Params, Rollout, TrainState

SAMPLING = 1  # folded into the run's key


@dataclass(frozen=True)
class PendingRollout:
    """A rollout batch in flight: the sampler has it, or is working on it."""

    policy: int  # rollout batches that the parameters it is drawn with had learnt from
    problems: list[Problem | None]
    rollout: Rollout  # on the sampler's mesh
    started: Started  # rewards


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch that has arrived; its lengths are on the host."""

    policy: int
    problems: list[Problem | None]
    sampled: Rollout  # on the sampler's mesh, where each process has the rows whose problems it has
    rollout: Rollout  # the same on the learner's mesh
    started: Started
    metrics: dict[str, float] = field(default_factory=dict)  # of partial rollouts


@dataclass
class InFlight:
    """What the sampler is drawing between two steps; nothing before the first one and after a restore."""

    batches: deque[PendingRollout] = field(default_factory=deque)  # the next one first
    pool: Pool | None = None  # instead, for partial rollouts


def next_rollout(learner: Learner, state: TrainState, ahead: deque[PendingRollout]) -> RolloutBatch:
    """The next rollout batch, on the learner's mesh; the sampler then starts on those that it may draw ahead.

    In this order, because between processes fetching a batch waits for all that the sampler was given before.
    """
    schedule, placement = learner.experiment.schedule, learner.experiment.placement
    done = count_rollouts(learner, state)
    staleness = placement.staleness if placement is not None else 0
    last = find_last_ahead(staleness, done, lambda n: progress.is_due(n, schedule.checkpoint_every, schedule.steps))
    if not ahead:
        draw_ahead(learner, state, range(1), ahead)
    batch = receive(learner, ahead.popleft())
    draw_ahead(learner, state, range(1 + len(ahead), last - done + 1), ahead)
    return batch


def draw_ahead(learner: Learner, state: TrainState, batches: range, ahead: deque[PendingRollout]) -> None:
    """Start the sampler on these rollout batches, counted from the state's next one, with the state's parameters."""
    if batches:
        params, first = learner.sampler.push(state.params), int(multihost.to_host(state.position))
        P = learner.experiment.sampling.prompts
        ahead.extend(draw(learner, params, state, first + batch * P) for batch in batches)


def draw(learner: Learner, params: Params, state: TrainState, first: int) -> PendingRollout:
    """Start sampling the problems from `first` on, with the sampler's parameters.

    Waits with `sampling.chunk`, and with an environment, whose replies the sampler needs.
    """
    experiment, sampler = learner.experiment, learner.sampler
    ids = range(first, first + experiment.sampling.prompts)
    tokenizer, group, started = experiment.tokenizer, experiment.sampling.group, Started()
    read, by_row = partial(read_problem, experiment.data.train), named_sharding(sampler.mesh, "batch")
    problems = multihost.all_or_raise(lambda: multihost.local_rows(read, ids, by_row, group=group))
    key = sampling_key(state)
    if learner.interaction is not None:
        rollout, started = hold_conversations(
            learner.interaction,
            params,
            experiment.model,
            problems,
            ids,
            key,
            sampling=experiment.sampling,
            mesh=sampler.mesh,
        )
        return PendingRollout(count_rollouts(learner, state), problems, rollout, started)
    begin = partial(start_rewards, problems, started, tokenizer=tokenizer, calls=learner.rewards, group=group)
    rollout = sample(
        params,
        experiment.model,
        encode_prompts(tokenizer, problems, experiment.model.vocab_size),
        ids,
        key,
        sampling=experiment.sampling,
        stop_ids=tokenizer.stop_ids,
        mesh=sampler.mesh,
        ended=begin,
        keep_experts=experiment.routing_replay == "sampler",
    )
    return PendingRollout(count_rollouts(learner, state), problems, rollout, started)


def sampling_key(state: TrainState) -> Array:
    """The key of a run's samples, on the host."""
    return jax.random.fold_in(multihost.key_to_host(state.key), SAMPLING)


def receive(learner: Learner, pending: PendingRollout) -> RolloutBatch:
    """Wait for a rollout batch, and bring it to the learner's mesh."""
    sampled = lengths_to_host(pending.rollout)
    return RolloutBatch(pending.policy, pending.problems, sampled, learner.sampler.fetch(sampled), pending.started)
