"""Rollouts in flight: sampled on the sampler's mesh while the learner updates, fetched to the learner's, and graded.

Partial rollouts train on groups that have finished while the sampler goes on with others (`rollout.group_pool`).

No rollout and no group is carried over a checkpoint: before one, only the problems are sampled that the rollouts up to
it need, and the last of these waits for all of them. A resumed run therefore starts with nothing in flight, as the
uninterrupted one did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from gspax.config import sampling_mask_size
from gspax.data.problem import Problem
from gspax.learner.metrics import Clock
from gspax.model.sizes import with_carried
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.completion import GradedBatch
from gspax.rollout.contract import Request, Weights
from gspax.rollout.dynamic_sampling import refill
from gspax.rollout.earlier import EarlierTexts
from gspax.rollout.episodes import EncodedProblem, answer, set_finished
from gspax.rollout.grading import Started, check_batch, reward_completions, start_rewards
from gspax.rollout.group_pool import Pool, admit, choose_groups, find_ended, new_pool, next_problems, take
from gspax.rollout.problems import Skipped, list_problems, prepare, read_usable
from gspax.rollout.runtime import Runtime, count_rollouts
from gspax.run import interrupt, progress
from gspax.sampler.placement import find_last_ahead
from gspax.sampler.sampler import OnEnded, hand_over, lengths_to_host, make_options
from gspax.sampler.state import SampleOptions
from gspax.types import Array, JsonObject, Rollout, Stream, TrainState


@dataclass(frozen=True, kw_only=True)
class PendingBatch:
    """A rollout that the sampler works on, with its problems and their rewards to come."""

    version: int  # of the weights: the number of rollouts that they were trained on
    taken: int  # problems of the data, including skipped ones
    problems: list[Problem | None]  # None where this process has no row of it
    samples: Future[tuple[Rollout, Started]]  # on the sampler's mesh, and rewards that come with them
    started: Started  # rewards that start while other samples are unfinished
    metrics: dict[str, float]  # of the push


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """A rollout that has arrived, with its problems and their rewards to come."""

    version: int  # as in `PendingBatch`, like the next two
    taken: int
    problems: list[Problem | None]
    sampled: Rollout  # on the sampler's mesh, where each process has the rows of its own problems
    rollout: Rollout  # the same on the learner's mesh
    started: Started  # rewards
    metrics: dict[str, float]  # of the push, and of partial rollouts


@dataclass
class InFlight:
    """Samples and grades the rollouts of a run (`rollouts.Rollouts`), with those that one step leaves for the next."""

    skipped: Skipped = field(default_factory=Skipped)
    batches: deque[PendingBatch] = field(default_factory=deque)  # the next one first
    pool: Pool | None = None  # instead, for partial rollouts; None before the first step and after a restore
    earlier: EarlierTexts = field(default_factory=EarlierTexts)  # of the problems, which drafts come from

    @property
    def can_evaluate(self) -> bool:
        """Return True."""
        return True

    def begin(self, skipped: Skipped, entries: JsonObject) -> None:
        """Begin with nothing in flight, and with the texts that the checkpoint has."""
        self.skipped, self.batches, self.pool, self.earlier = skipped, deque(), None, EarlierTexts()
        self.earlier.load(entries)

    def take(self, runtime: Runtime, state: TrainState, clock: Clock) -> GradedBatch:
        """Sample the rollout of a step, unless it was sampled ahead, and grade it."""
        progress.phase("sampling")  # a group of completions for each prompt, now or ahead of this step
        batch = next_rollout(runtime, state, self)
        clock.lap("rollout")
        return grade_and_refill(runtime, state, self, batch, clock)

    def take_again(self, runtime: Runtime, state: TrainState, wrong: Mapping[int, str], clock: Clock) -> GradedBatch:
        """Set the sources aside that sampled wrongly, and sample again without them."""
        runtime.sampler.set_aside.add(wrong)
        return grade_and_refill(runtime, state, self, sample_again(runtime, state, self), clock)

    def after_updates(self, runtime: Runtime, graded: GradedBatch) -> None:
        """Keep the completions, which the problems' next samples may draft from."""
        self.earlier.keep(graded.rollout, runtime.experiment.sampling.group)

    def entries(self) -> dict[str, str]:
        """Return the completions of the problems so far."""
        return self.earlier.dump()


def grade_and_refill(
    runtime: Runtime, state: TrainState, in_flight: InFlight, batch: SampledBatch, clock: Clock
) -> GradedBatch:
    """Compute the rewards of a rollout, and replace its groups of equal rewards if the experiment says so."""
    progress.phase("grading")  # rewards on the host, many of which started while other samples were unfinished
    graded = grade(runtime, batch)
    clock.lap("reward")

    if runtime.experiment.sampling.max_refills:
        progress.phase("sampling again")  # groups of equal rewards would add nothing to the gradient
        graded = replace_constant_groups(runtime, state, graded, in_flight)
        clock.lap("refill")
    return graded


def grade(runtime: Runtime, batch: SampledBatch) -> GradedBatch:
    """Compute the rewards of a rollout that has arrived. FailedRewardsError if too many of them have failed."""
    completions = reward_completions(
        batch.problems,
        batch.sampled,
        tokenizer=runtime.experiment.tokenizer,
        calls=runtime.rewards,
        started=batch.started,
    )
    check_batch(completions, runtime.rewards)
    skipped = batch.taken - len(batch.problems)
    return GradedBatch(
        batch.version, batch.taken, batch.rollout, completions, batch.problems, skipped, metrics=batch.metrics
    )


def replace_constant_groups(
    runtime: Runtime, state: TrainState, batch: GradedBatch, in_flight: InFlight
) -> GradedBatch:
    """Sample more prompts in place of the groups whose rewards are all equal (`rollout.dynamic_sampling`)."""
    experiment, first = runtime.experiment, int(multihost.to_host(state.position))

    def sample(taken: int) -> GradedBatch:
        weights = runtime.sampler.push(state.params, count_rollouts(runtime, state))
        pending = start_rollout(runtime, weights, state, first + taken, in_flight)
        return grade(runtime, receive(runtime, pending))

    return refill(
        batch,
        sample,
        experiment.sampling,
        runtime.mesh,
        without_overlong=experiment.filter_overlong,
        by_turn=experiment.turns.credit == "turn",
    )


def next_rollout(runtime: Runtime, state: TrainState, in_flight: InFlight) -> SampledBatch:
    """Fetch the next rollout to the learner's mesh, and then start the sampler on those that it may sample ahead.

    The order matters: between processes, fetching a rollout waits for all that the sampler was told to do before.
    """
    experiment, done, ahead = runtime.experiment, count_rollouts(runtime, state), in_flight.batches
    if experiment.partial is not None:
        return next_partial(runtime, state, in_flight, ahead=experiment.partial.ahead)
    first = int(multihost.to_host(state.position))
    if not ahead:
        ahead.append(start_rollout(runtime, runtime.sampler.push(state.params, done), state, first, in_flight))
    batch = receive(runtime, ahead.popleft())
    first += batch.taken + sum(pending.taken for pending in ahead)
    last = find_last_ahead(experiment.staleness, done, partial(is_saved, runtime))
    if missing := range(last - done - len(ahead)):
        weights = runtime.sampler.push(state.params, done)
        for _ in missing:
            ahead.append(start_rollout(runtime, weights, state, first, in_flight))
            first += ahead[-1].taken
    return batch


def sample_again(runtime: Runtime, state: TrainState, in_flight: InFlight) -> SampledBatch:
    """Sample the problems of the next rollout again, with the newest weights; partial rollouts take other groups."""
    if (settings := runtime.experiment.partial) is not None:
        return next_partial(runtime, state, in_flight, ahead=settings.ahead)
    weights = runtime.sampler.push(state.params, count_rollouts(runtime, state))
    first = int(multihost.to_host(state.position))
    return receive(runtime, start_rollout(runtime, weights, state, first, in_flight))


def is_saved(runtime: Runtime, done: int) -> bool:
    """Return whether a checkpoint is saved after this number of rollouts."""
    schedule = runtime.experiment.schedule
    return progress.is_due(done, schedule.checkpoint_every, schedule.steps)


def start_rollout(
    runtime: Runtime, weights: Weights, state: TrainState, first: int, in_flight: InFlight
) -> PendingBatch:
    """Start sampling the usable problems from `first` on.

    In this process it waits for the samples with `sampling.chunk`, and with an environment, whose replies the sampler
    needs.
    """
    places = range(runtime.experiment.sampling.prompts)
    ids, encoded = read_prompts(runtime, {place: first + place for place in places}, len(places), in_flight)
    prompt_ids, taken = [ids[place] for place in places], max(ids.values()) + 1 - first
    started = Started()
    request = Request(
        encoded=encoded,
        prompt_ids=prompt_ids,
        key=sampling_key(state),
        options=sample_options(runtime),
        interaction=runtime.interaction,
        on_ended=rewarder(runtime, encoded, started) if runtime.interaction is None else None,
    )
    return PendingBatch(
        version=weights.version,
        taken=taken,
        problems=list_problems(encoded, places),
        samples=runtime.sampler.sample(weights, request),
        started=started,
        metrics=weights.metrics,
    )


def sample_options(runtime: Runtime) -> SampleOptions:
    """Make the options that the sampler's programs are compiled with."""
    experiment, mesh = runtime.experiment, runtime.sampler.mesh
    options = replace(
        make_options(experiment.model, experiment.tokenizer, experiment.sampling, mesh),
        keep_experts=runtime.passes.samples_experts,
        mask_size=sampling_mask_size(experiment.sampling, experiment.model.vocab_size),
    )
    if experiment.partial is None:
        return options
    return replace(
        options,
        sampling=with_carried(experiment.sampling, experiment.separate_sampler),
        keep_versions=True,
        admits=True,
        turns=runtime.interaction is not None,
    )


def read_prompts(
    runtime: Runtime, indices: Mapping[int, int], places: int, in_flight: InFlight
) -> tuple[dict[int, int], dict[int, EncodedProblem]]:
    """Read the training problems of these places, with the next ones in place of those that cannot be used. Collective.

    Returns:
      The index of each place's problem, and by place the problems that this process has rows of.
    """
    experiment = runtime.experiment
    read = partial(
        prepare,
        experiment.data.train,
        tokenizer=experiment.tokenizer,
        model=experiment.model,
        limit=experiment.sampling.max_prompt_tokens,
        interaction=runtime.interaction,
        teachers=() if experiment.teacher is None else tuple(experiment.teacher.models),
    )
    sharding, group = named_sharding(runtime.sampler.mesh, "batch"), experiment.sampling.group
    ids, encoded = read_usable(read, indices, places, sharding, in_flight.skipped, group=group)
    return ids, {place: one._replace(earlier=in_flight.earlier.find(one.prompt)) for place, one in encoded.items()}


def rewarder(runtime: Runtime, encoded: Mapping[int, EncodedProblem], started: Started) -> OnEnded:
    """Make a function that starts the rewards of finished samples and adds them to `started`."""
    experiment = runtime.experiment
    return partial(
        start_rewards,
        {place: one.problem for place, one in encoded.items()},
        started,
        tokenizer=experiment.tokenizer,
        calls=runtime.rewards,
        group=experiment.sampling.group,
        openings={place: one.opening for place, one in encoded.items()},
    )


def sampling_key(state: TrainState) -> Array:
    """Make the key that all samples of a run depend on, on the host."""
    return jax.random.fold_in(multihost.key_to_host(state.key), Stream.SAMPLING)


def receive(runtime: Runtime, batch: PendingBatch) -> SampledBatch:
    """Wait for a rollout, and fetch it to the learner's mesh."""
    if not batch.samples.done():
        interrupt.wait([batch.samples])
    rollout, started = batch.samples.result()
    sampled = lengths_to_host(rollout)
    return SampledBatch(
        version=batch.version,
        taken=batch.taken,
        problems=batch.problems,
        sampled=sampled,
        rollout=runtime.sampler.fetch(sampled),
        started=batch.started | started,
        metrics=batch.metrics,
    )


def next_partial(runtime: Runtime, state: TrainState, in_flight: InFlight, *, ahead: int) -> SampledBatch:
    """Take the next rollout out of the pool, and leave the pool that the sampler works on during the updates.

    Args:
      ahead: the chunks that it samples meanwhile (`PartialRollouts.ahead`).
    """
    experiment, sampling, done = runtime.experiment, runtime.experiment.sampling, count_rollouts(runtime, state)
    weights, pool = runtime.sampler.push(state.params, done), in_flight.pool
    if pool is None:
        options, first = sample_options(runtime), int(multihost.to_host(state.position))
        held = runtime.sampler.hold(sampling_key(state), options)
        pool = new_pool(options.sampling.prompts, sampling.group, first, held)
    pool = fill(runtime, pool, done, weights, in_flight)
    while True:
        end_samples(runtime, pool, weights)
        chosen = choose_groups(pool, find_ended(pool), sampling.prompts, done - experiment.staleness)
        if chosen is not None:
            break
        interrupt.stop_point()
        pool.held.advance(weights)
    batch, pool = take_batch(runtime, state, pool, chosen, weights)
    if not is_saved(runtime, done + 1):
        if ahead:
            pool = fill(runtime, pool, done + 1, weights, in_flight)
        for _ in range(ahead):
            pool.held.advance(weights)
    in_flight.pool = pool
    return batch


def fill(runtime: Runtime, pool: Pool, done: int, weights: Weights, in_flight: InFlight) -> Pool:
    """Add groups to the pool, up to the number that it may have once `done` rollouts have been taken out of it."""
    rollouts = 1 + find_last_ahead(1, done, partial(is_saved, runtime)) - done
    groups = min(len(pool.problem_R), rollouts * runtime.experiment.sampling.prompts) - pool.count()
    if groups <= 0:
        return pool
    ids, encoded = read_prompts(runtime, next_problems(pool, groups), len(pool.problem_R), in_flight)
    return admit(pool, ids, encoded, weights)


def end_samples(runtime: Runtime, pool: Pool, weights: Weights) -> None:
    """Start the rewards of finished samples; with an environment, reply to the turns that have ended. Waits."""
    reached = pool.held.progress()
    assert not isinstance(runtime.interaction, AgentInteraction), "validation refuses them in partial rollouts"
    if runtime.interaction is None:
        hand_over(reached, pool.rows.ended_B, rewarder(runtime, pool.rows.encoded, pool.rows.started))
    elif (replies := answer(runtime.interaction, pool.rows, reached, sample_options(runtime))) is not None:
        pool.held.reply(replies, weights)


def take_batch(
    runtime: Runtime, state: TrainState, pool: Pool, places: np.ndarray, weights: Weights
) -> tuple[SampledBatch, Pool]:
    """Take the groups in these places out of the pool, and fetch them to the learner's mesh.

    Problems count as taken once they are in a rollout, together with those that were skipped until then.
    """
    problems = list_problems(pool.rows.encoded, places.tolist())
    pool, rollout, started = take(pool, places)
    sampled = lengths_to_host(rollout if runtime.interaction is None else set_finished(rollout, started))
    batch = SampledBatch(
        version=int(pool.version_R[places].min()),
        taken=pool.next_problem - pool.count() - int(multihost.to_host(state.position)),
        problems=problems,
        sampled=sampled,
        rollout=runtime.sampler.fetch(sampled),
        started=started,
        metrics=weights.metrics | {"rollout/carried": float(pool.count())},
    )
    return batch, pool
