"""Partial rollouts train on groups that have finished while the sampler goes on with others (`rollout.pool`).

No group is carried over a checkpoint: before one, only the problems are sampled that the rollouts up to it need, and
the last rollout waits for all of them. A resumed run therefore starts with an empty pool, as the uninterrupted one did.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gspax.model.sizes.counts import with_carried
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.episodes import set_finished
from gspax.rollout.grading import start_rewards
from gspax.rollout.pool import (
    FREE,
    Pool,
    Weights,
    admit,
    choose_groups,
    find_ended,
    new_pool,
    next_problems,
    reply,
    sample_chunk,
    take,
)
from gspax.rollout.problems import read_usable
from gspax.run import interrupt, progress
from gspax.sampler.chunks import hand_over
from gspax.sampler.engine import SampleOptions
from gspax.sampler.placement import find_last_ahead
from gspax.sampler.sampler import lengths_to_host, split_groups
from gspax.training.in_flight import RolloutBatch, sampling_key
from gspax.training.runtime import Runtime, count_rollouts, prepare_problem
from gspax.types import TrainState


def next_partial(runtime: Runtime, state: TrainState, pool: Pool | None) -> tuple[RolloutBatch, Pool]:
    """The next rollout, on the learner's mesh, and the pool that the sampler works on during the updates.

    Args:
      pool: after the rollout before; None in the first step and after a restore.
    """
    experiment, placement = runtime.experiment, runtime.experiment.placement
    sampling, schedule = experiment.sampling, experiment.schedule
    assert placement is not None and placement.partial is not None
    done, P = count_rollouts(runtime, state), sampling.prompts
    options, places = make_options(runtime), with_carried(sampling, placement).prompts
    weights = Weights(runtime.sampler.push(state.params), done)

    def due(batch: int) -> bool:
        return progress.is_due(batch, schedule.checkpoint_every, schedule.steps)

    def fill(pool: Pool, batch: int) -> Pool:
        """Add groups up to the number that may be there while a rollout is sampled."""
        most = min(places, P * (1 + find_last_ahead(1, batch, due) - batch))
        return admit_problems(runtime, pool, most - pool.count(), weights, options)

    if pool is None:
        first = int(multihost.to_host(state.position))
        pool = new_pool(places, sampling.group, first, sampling_key(state))
    pool = fill(pool, done)
    while True:
        pool = end_samples(runtime, pool, weights, options)
        chosen = choose_groups(pool, find_ended(pool), P, done - placement.staleness)
        if chosen is not None:
            break
        interrupt.stop_point()
        pool = sample_chunk(pool, weights, options)
    batch, pool = take_batch(runtime, state, pool, chosen, options)
    if not due(done + 1):
        pool = fill(pool, done + 1) if placement.partial.ahead else pool
        for _ in range(placement.partial.ahead):
            pool = sample_chunk(pool, weights, options)
    return batch, pool


def make_options(runtime: Runtime) -> SampleOptions:
    """The options that the sampler's programs are compiled with."""
    experiment, mesh = runtime.experiment, runtime.sampler.mesh
    return SampleOptions(
        model=experiment.model,
        sampling=split_groups(with_carried(experiment.sampling, experiment.placement), mesh),
        stop_ids=experiment.tokenizer.stop_ids,
        mesh=mesh,
        keep_experts=experiment.routing_replay == "sampler",
        keep_versions=True,
        admits=True,
        turns=runtime.interaction is not None,
    )


def admit_problems(runtime: Runtime, pool: Pool, groups: int, weights: Weights, options: SampleOptions) -> Pool:
    """Add a number of groups to the pool."""
    if groups <= 0:
        return pool
    index_R = next_problems(pool, groups)
    ids, ready = read_usable(
        partial(prepare_problem, runtime),
        {place: index for place, index in enumerate(index_R.tolist()) if index != FREE},
        len(index_R),
        named_sharding(runtime.sampler.mesh, "batch"),
        runtime.skipped,
        group=runtime.experiment.sampling.group,
    )
    index_R[list(ids)] = list(ids.values())
    return admit(pool, index_R, [ready.get(place) for place in range(len(index_R))], weights, options)


def end_samples(runtime: Runtime, pool: Pool, weights: Weights, options: SampleOptions) -> Pool:
    """Start the rewards of finished samples; with an environment, reply to the turns that have ended."""
    if runtime.interaction is not None:
        return reply(runtime.interaction, pool, weights, options)
    assert pool.progress is not None
    problems = [ready and ready.problem for ready in pool.rows.ready]
    start = partial(start_rewards, problems, pool.rows.started, tokenizer=runtime.experiment.tokenizer)
    group = runtime.experiment.sampling.group
    hand_over(pool.progress, pool.rows.ended_B, partial(start, calls=runtime.rewards, group=group))
    return pool


def take_batch(
    runtime: Runtime, state: TrainState, pool: Pool, places: np.ndarray, options: SampleOptions
) -> tuple[RolloutBatch, Pool]:
    """Take the groups in these places out of the pool, as a rollout on the learner's mesh.

    Problems count as taken once they are in a rollout, together with those that were skipped until then.
    """
    policy = int(pool.policy_R[places].min())
    problems = [ready and ready.problem for ready in (pool.rows.ready[place] for place in places)]
    pool, rollout, started = take(pool, places, options)
    sampled = lengths_to_host(rollout) if runtime.interaction is None else set_finished(rollout, started)
    taken = pool.next_problem - pool.count() - int(multihost.to_host(state.position))
    metrics = {"rollout/carried": float(pool.count())}
    return RolloutBatch(policy, taken, problems, sampled, runtime.sampler.fetch(sampled), started, metrics), pool
