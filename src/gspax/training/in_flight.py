"""Rollouts in flight are sampled on the sampler's mesh and fetched to the learner's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import jax

from gspax.data.problem import Problem
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.episodes import sample_conversations
from gspax.rollout.grading import Started, start_rewards
from gspax.rollout.pool import Pool
from gspax.rollout.problems import read_usable
from gspax.run import progress
from gspax.sampler.engine import SampleOptions
from gspax.sampler.placement import find_last_ahead
from gspax.sampler.sampler import lengths_to_host, sample
from gspax.training.runtime import Runtime, count_rollouts, prepare_problem
from gspax.types import Array, Params, Rollout, TrainState

SAMPLING = 1  # folded into the run's key


@dataclass(frozen=True)
class PendingRollout:
    """A rollout in flight: the sampler works on it, or has finished it."""

    policy: int  # number of rollouts that the sampling parameters were trained on
    taken: int  # problems, including skipped ones
    problems: list[Problem | None]
    rollout: Rollout  # on the sampler's mesh
    started: Started  # rewards


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout that has arrived; its lengths are on the host."""

    policy: int
    taken: int  # problems, including skipped ones
    problems: list[Problem | None]
    sampled: Rollout  # on the sampler's mesh, where each process has the rows of its own problems
    rollout: Rollout  # the same on the learner's mesh
    started: Started
    metrics: dict[str, float] = field(default_factory=dict)  # of partial rollouts


@dataclass
class InFlight:
    """The rollouts that one step leaves for the next; none before the first step and after a restore."""

    batches: deque[PendingRollout] = field(default_factory=deque)  # that the sampler works on, the next one first
    pool: Pool | None = None  # instead, for partial rollouts


def next_rollout(runtime: Runtime, state: TrainState, ahead: deque[PendingRollout]) -> RolloutBatch:
    """Fetch the next rollout to the learner's mesh, and then start the sampler on those that it may sample ahead.

    The order matters: between processes, fetching a rollout waits for everything that the sampler was given before.
    """
    schedule, placement = runtime.experiment.schedule, runtime.experiment.placement
    done = count_rollouts(runtime, state)
    staleness = placement.staleness if placement is not None else 0
    last = find_last_ahead(staleness, done, lambda n: progress.is_due(n, schedule.checkpoint_every, schedule.steps))
    first = int(multihost.to_host(state.position))
    if not ahead:
        draw_ahead(runtime, state, 1, first, ahead)
    pending = ahead.popleft()
    batch, first = receive(runtime, pending), first + pending.taken
    draw_ahead(runtime, state, last - done - len(ahead), first + sum(each.taken for each in ahead), ahead)
    return batch


def draw_ahead(runtime: Runtime, state: TrainState, batches: int, first: int, ahead: deque[PendingRollout]) -> None:
    """Start the sampler on a number of rollouts, from problem `first` on, with the state's parameters."""
    params = runtime.sampler.push(state.params) if batches > 0 else None
    for _ in range(batches):
        ahead.append(draw(runtime, params, state, first))
        first += ahead[-1].taken


def draw(runtime: Runtime, params: Params, state: TrainState, first: int) -> PendingRollout:
    """Start sampling the usable problems from `first` on, with the sampler's parameters.

    It waits for the samples with `sampling.chunk`, and with an environment, whose replies the sampler needs.
    """
    experiment, sampler = runtime.experiment, runtime.sampler
    P, group, tokenizer = experiment.sampling.prompts, experiment.sampling.group, experiment.tokenizer
    ids, ready = read_usable(
        partial(prepare_problem, runtime),
        dict(enumerate(range(first, first + P))),
        P,
        named_sharding(sampler.mesh, "batch"),
        runtime.skipped,
        group=group,
    )
    prompt_ids, own = [ids[place] for place in range(P)], [ready.get(place) for place in range(P)]
    problems, started, taken = [each and each.problem for each in own], Started(), max(prompt_ids) + 1 - first
    key = sampling_key(state)
    options = SampleOptions(
        model=experiment.model,
        sampling=experiment.sampling,
        stop_ids=tokenizer.stop_ids,
        mesh=sampler.mesh,
        keep_experts=experiment.routing_replay == "sampler",
    )
    if runtime.interaction is not None:
        rollout, started = sample_conversations(runtime.interaction, params, own, prompt_ids, key, options)
        return PendingRollout(count_rollouts(runtime, state), taken, problems, rollout, started)
    begin = partial(start_rewards, problems, started, tokenizer=tokenizer, calls=runtime.rewards, group=group)
    rollout = sample(params, [each and each.prompt for each in own], prompt_ids, key, options, ended=begin)
    return PendingRollout(count_rollouts(runtime, state), taken, problems, rollout, started)


def sampling_key(state: TrainState) -> Array:
    """The key that all samples of a run depend on, on the host."""
    return jax.random.fold_in(multihost.key_to_host(state.key), SAMPLING)


def receive(runtime: Runtime, pending: PendingRollout) -> RolloutBatch:
    """Wait for a rollout, and fetch it to the learner's mesh."""
    sampled = lengths_to_host(pending.rollout)
    fetched = runtime.sampler.fetch(sampled)
    return RolloutBatch(pending.policy, pending.taken, pending.problems, sampled, fetched, pending.started)
