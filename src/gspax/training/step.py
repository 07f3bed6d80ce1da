"""One step, read top down: sample, reward, advantage, old log-probs, updates.

One rollout from prompt to gradient: `training/step.py`, `sampler/sampler.py`, `advantages.py`, `learner/train_step.py`,
`losses/logprobs.py`, `losses/gspo_family.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from gspax.config import row_shape, updates_per_step
from gspax.learner import minibatches
from gspax.learner.diagnostics import instrument_metrics
from gspax.learner.metrics import (
    Clock,
    response_metrics,
    routing_metrics,
    score_metrics,
    staleness_metrics,
    update_metrics,
)
from gspax.learner.optimizer import learning_rate
from gspax.learner.state import applied_updates, count_updates
from gspax.learner.updates import run_updates
from gspax.model.low_rank import combine, partition
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rollout.completion import Samples
from gspax.rollout.credit import credit_turns
from gspax.rollout.dynamic_sampling import GradedBatch, refill
from gspax.rollout.grading import (
    check_batch,
    compute_advantages,
    count_sampled,
    reward_completions,
    reward_metrics,
    shape_rewards,
)
from gspax.run import interrupt, progress
from gspax.training.in_flight import InFlight, RolloutBatch, draw, next_rollout, receive
from gspax.training.partial import next_partial
from gspax.training.runtime import Runtime, count_rollouts
from gspax.types import Batch, Params, TrainState


class StepResult(NamedTuple):
    """The result of one step."""

    state: TrainState
    metrics: dict[str, float]
    samples: Samples
    updates: Sequence[Mapping[str, float]] = ()  # the metrics of each update with response tokens
    skipped_batch: Batch | None = None  # the minibatch of the last update that was skipped


def run_step(runtime: Runtime, state: TrainState, reference: Params | None, in_flight: InFlight) -> StepResult:
    """Sample one rollout batch, grade it, and update the policy with it.

    Args:
      reference: from `load_reference`.
      in_flight: updated to what the sampler is drawing after this step.
    """
    experiment, clock = runtime.experiment, Clock()
    progress.phase("sampling")
    if experiment.placement is not None and experiment.placement.partial is not None:
        batch, in_flight.pool = next_partial(runtime, state, in_flight.pool)
    else:
        batch = next_rollout(runtime, state, in_flight.batches)
    clock.lap("rollout")
    progress.phase("grading")
    graded = grade(runtime, batch)
    clock.lap("reward")
    if experiment.sampling.max_refills:
        progress.phase("sampling again")
        draw_more = partial(draw_graded, runtime, state)
        graded = refill(
            graded,
            draw_more,
            experiment.sampling,
            runtime.mesh,
            without_overlong=experiment.filter_overlong,
            by_turn=experiment.turns.credit == "turn",
        )
        clock.lap("refill")
    progress.phase("computing log-probs")
    return learn(runtime, state, reference, graded, clock)


def draw_graded(runtime: Runtime, state: TrainState, taken: int) -> GradedBatch:
    """The batch after so many of the prompts that the state has not learnt from, drawn at once and rewarded."""
    first = int(multihost.to_host(state.position)) + taken
    return grade(runtime, receive(runtime, draw(runtime, runtime.sampler.push(state.params), state, first)))


def grade(runtime: Runtime, batch: RolloutBatch) -> GradedBatch:
    """A rollout batch with its rewards. FailedRewardsError if too many of them have failed."""
    reward = partial(reward_completions, tokenizer=runtime.experiment.tokenizer, calls=runtime.rewards)
    completions = reward(batch.problems, batch.sampled, started=batch.started)
    check_batch(completions, runtime.rewards)
    skipped = batch.taken - len(batch.problems)
    return GradedBatch(batch.policy, batch.taken, batch.rollout, completions, skipped, batch.metrics)


def learn(
    runtime: Runtime, state: TrainState, reference: Params | None, batch: GradedBatch, clock: Clock
) -> StepResult:
    """Update the policy with a graded rollout batch; see `run_step`."""
    experiment, rollout, completions = runtime.experiment, batch.rollout, batch.completions
    G, overlong = experiment.sampling.group, experiment.filter_overlong
    shape = row_shape(experiment.sampling, experiment.schedule, batch_shards(runtime.mesh))
    batches, layouts = minibatches.split_minibatches(
        rollout,
        experiment.schedule.minibatches,
        shape,
        runtime.mesh,
        without_overlong=overlong,
        sharing=G if experiment.schedule.share_prompts else 0,
    )
    if reference is not None:
        reference = combine(reference, partition(state.params)[1])
    which = runtime.steps.scored
    if experiment.old_logp == "sampler":
        batches = minibatches.take_sampler_logp(batches)
    elif count_updates(state) == 0 and updates_per_step(experiment.schedule) > 1:
        which = range(len(batches))  # a run's first step measures the noise floor, to warn of it
    scored = minibatches.score_minibatches(runtime.steps.score, state.params, reference, batches, which)
    jax.block_until_ready(scored.batches)
    interrupt.stop_point()  # the last one before the state is donated
    clock.lap("old_logp")
    progress.phase("updating")

    added_B, added = shape_rewards(
        rollout,
        minibatches.reference_kl(experiment.reference, scored.batches, layouts),
        length_reward=experiment.length_reward,
        coefficient=experiment.reference.coefficient if experiment.reference else 0.0,
    )
    options: dict[str, Any] = {"group": G, "finished_B": rollout.finished_B if overlong else None}
    advantage_B, with_added = compute_advantages(experiment.advantage, completions, added_B, **options)
    advantage, turn_advantages = advantage_B, None
    if experiment.turns.credit == "turn":
        options |= {"discount": experiment.turns.discount}
        advantage, turn_advantages = credit_turns(experiment.advantage, completions, rollout, added_B, **options)
    batches = minibatches.set_advantages(scored.batches, layouts, advantage, runtime.mesh)
    scored = replace(scored, batches=batches)
    stale = staleness_metrics(rollout, count_rollouts(runtime, state), batch.policy) if experiment.placement else {}
    rate = learning_rate(experiment.optimizer)
    updated = run_updates(
        runtime.steps,
        state,
        scored,
        runtime.mesh,
        epochs=experiment.schedule.epochs,
        rate=rate,
        calibration=experiment.calibration,
        measure=runtime.steps.measure if is_measured(runtime, state) else None,
    )
    state = replace(updated.state, position=updated.state.position + batch.prompts)
    jax.block_until_ready(state)
    clock.lap("train")

    metrics = {
        **reward_metrics(completions, G),
        **added,
        **with_added,
        **stale,
        **batch.metrics,
        "data/skipped": float(batch.skipped),
        **response_metrics(count_sampled(rollout), rollout.finished_B),
        "learner/tokens": float(sum(layout.tokens for layout in layouts)),
        "learner/packing_efficiency": minibatches.packing_efficiency(layouts),
        **update_metrics(updated.metrics),
        "optim/learning_rate": float(rate(max(applied_updates(state) - 1, 0))),
        **score_metrics(updated.scored.batches, updated.scored.entropies),
        **(routing_metrics(*updated.routing) if updated.routing else {}),
        **(instrument_metrics(updated.readings, experiment.model) if updated.readings else {}),
        **clock.metrics(int(count_sampled(rollout).sum())),
    }
    samples = Samples(completions, advantage_B, turn_advantages)
    updates = [update for update in updated.metrics if not update["empty"]]
    return StepResult(state, metrics, samples, updates, updated.skipped_batch)


def is_measured(runtime: Runtime, state: TrainState) -> bool:
    """Whether the instruments measure the step that learns from this state."""
    settings, last = runtime.experiment.instruments, runtime.experiment.schedule.steps
    return settings is not None and progress.is_due(count_rollouts(runtime, state) + 1, settings.every, last)
