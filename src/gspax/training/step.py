"""One training step, in the order of time: sample, grade, old log-probs, advantages, updates.

One rollout from prompt to gradient: `training/step.py`, `sampler/sampler.py`, `advantages.py`, `learner/train_step.py`,
`losses/logprobs.py`, `losses/gspo_family.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import ModelConfig, layers_of, row_shape, updates_per_step
from gspax.learner import minibatches
from gspax.learner.diagnostics import diagnostic_metrics, measure_nothing
from gspax.learner.metrics import (
    Clock,
    ages,
    response_metrics,
    routing_metrics,
    sampling_mask_metrics,
    score_metrics,
    staleness_metrics,
    update_metrics,
)
from gspax.learner.minibatches import Layout
from gspax.learner.objective import Scores
from gspax.learner.optimizer import learning_rate
from gspax.learner.state import applied_updates, count_updates
from gspax.learner.updates import Updated, bind_heads, run_updates
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rollout.completion import GradedBatch, Samples
from gspax.rollout.grading import (
    Compared,
    compute_advantages,
    compute_token_advantages,
    count_sampled,
    credit_turns,
    reward_metrics,
    shape_rewards,
)
from gspax.rollout.lost_samples import lost_metrics
from gspax.rollout.runtime import Runtime, count_rollouts
from gspax.run import interrupt, progress
from gspax.training import judging
from gspax.training.open_term import GradedStep, OpenTerm
from gspax.training.open_terms import after_step, heads_of
from gspax.training.rollouts import Rollouts
from gspax.types import Batch, Rollout, Stream, TrainState


class StepResult(NamedTuple):
    """The result of one step."""

    state: TrainState
    metrics: dict[str, float]
    samples: Samples
    updates: Sequence[Mapping[str, float]] = ()  # the metrics of each update with response tokens
    skipped_batch: Batch | None = None  # the minibatch of the last update that was skipped


class Prepared(NamedTuple):
    """The minibatches of a rollout before its updates."""

    batches: list[Batch]
    scores: dict[int, Scores]  # by the number of each minibatch that the pass has read
    layouts: list[Layout]


def run_step(runtime: Runtime, state: TrainState, rollouts: Rollouts, opened: Sequence[OpenTerm] = ()) -> StepResult:
    """Sample one rollout, grade it, and update the policy with it.

    Args:
      rollouts: what gives the rollout; updated to what comes after this step.
      opened: from `open_terms`, and the `FirstPolicy` if a term reads it.
    """
    experiment, clock, done = runtime.experiment, Clock(), count_rollouts(runtime, state)
    prepare = partial(prepare_minibatches, runtime, state, opened)
    graded, (batches, scores, layouts), by_source = take_trusted(runtime, state, rollouts, prepare, clock)
    interrupt.stop_point()  # the last one before the state is donated
    clock.lap("old_logp")

    progress.phase("updating")  # advantages compare the completions of a prompt; then an update per minibatch
    batches, samples, shaping_metrics = assign_advantages(runtime, graded, batches, scores, layouts)
    batches = select_tokens(runtime, state, batches, scores)
    updated = update_policy(runtime, state, opened, batches, scores)
    state = after_step(opened, updated.state, done + 1)
    state = replace(state, position=state.position + graded.taken)
    jax.block_until_ready(state)
    rollouts.after_updates(runtime, graded)  # not before: a step may be begun again
    clock.lap("train")

    metrics = {
        **rollout_metrics(graded, experiment.sampling.group, experiment.model.vocab_size),
        **age_metrics(runtime, graded, done),
        **shaping_metrics,
        **by_source,
        **judging.measure(runtime, graded.rollout, scores, updated.scored, layouts),
        **learner_metrics(updated, layouts, experiment.model),
        "optim/learning_rate": float(learning_rate(experiment.optimizer)(max(applied_updates(state) - 1, 0))),
        **clock.metrics(int(count_sampled(graded.rollout).sum())),
    }
    updates = [update for update in updated.metrics if not update["empty"]]
    return StepResult(state, metrics, samples, updates, updated.skipped_batch)


def take_trusted(
    runtime: Runtime,
    state: TrainState,
    rollouts: Rollouts,
    prepare: Callable[[GradedBatch], Prepared],
    clock: Clock,
) -> tuple[GradedBatch, Prepared, dict[str, float]]:
    """Take a rollout and compute its log-probs, until they show nothing wrong with what sampled it.

    Returns:
      The rollout, its minibatches, and the metrics of what sampled it.
    """
    graded = rollouts.take(runtime, state, clock)
    while True:
        progress.phase("computing log-probs")  # of the policy before its updates: their ratios start from these
        prepared = prepare(graded)
        by_source, wrong = judging.judge(runtime, state.params, graded.rollout, *prepared)
        again = rollouts.take_again(runtime, state, wrong, clock) if wrong else None
        if again is None:
            return graded, prepared, by_source
        graded = again


def update_policy(
    runtime: Runtime,
    state: TrainState,
    opened: Sequence[OpenTerm],
    batches: Sequence[Batch],
    scores: Mapping[int, Scores],
) -> Updated:
    """Update the policy with the minibatches, in each epoch once. Donates the state."""
    experiment, steps = runtime.experiment, bind_heads(runtime.steps, heads_of(opened))
    return run_updates(
        steps,
        state,
        batches,
        scores,
        epochs=experiment.schedule.epochs,
        rate=learning_rate(experiment.optimizer),
        calibration=experiment.calibration,
        measure=steps.measure if diagnostics_due(runtime, count_rollouts(runtime, state)) else measure_nothing,
    )


def with_versions(runtime: Runtime, graded: GradedBatch) -> Rollout:
    """Add the version of the weights that sampled each token, if old log-probs are interpolated by it."""
    rollout = graded.rollout
    if runtime.passes.old_logp != "update":
        return replace(rollout, version_BT=None)
    if rollout.version_BT is not None:
        return rollout
    return replace(rollout, version_BT=jnp.full_like(rollout.tokens_BT, graded.version))


def prepare_minibatches(
    runtime: Runtime, state: TrainState, opened: Sequence[OpenTerm], graded: GradedBatch
) -> Prepared:
    """Split a rollout into minibatches, and compute what the old policy and opened terms say of them.

    The first update computes the old log-probs of its minibatch itself. With `old_logp="sampler"`, or a loss that
    demands it, they are the sampler's; with "interpolated" each update replaces these by its own. `Steps.scored` are
    the minibatches that need a pass of their own.
    """
    experiment, schedule, scored = runtime.experiment, runtime.experiment.schedule, runtime.steps.scored
    batches, layouts = minibatches.split_minibatches(
        with_versions(runtime, graded),
        schedule.minibatches,
        row_shape(experiment.sampling, schedule, batch_shards(runtime.mesh)),
        runtime.mesh,
        without_overlong=experiment.filter_overlong,
        sharing=experiment.sampling.group if schedule.share_prompts else 0,
        deep_prefixes=all(layer.mixer.deep_prefixes for layer in layers_of(experiment.model)),
    )
    if runtime.passes.old_logp != "pass":
        batches = minibatches.take_sampler_logp(batches)
    elif count_updates(state) == 0 and updates_per_step(schedule) > 1:
        scored = range(len(batches))  # a run's first step measures the noise floor, to warn of it
    batches, scores = minibatches.score_minibatches(runtime.steps.score, state.params, batches, scored)
    jax.block_until_ready(batches)
    for term in opened:
        batches = term.fill(GradedStep(runtime, state, graded, layouts), batches)
    return Prepared(batches, scores, layouts)


def assign_advantages(
    runtime: Runtime,
    graded: GradedBatch,
    batches: Sequence[Batch],
    scores: Mapping[int, Scores],
    layouts: Sequence[Layout],
) -> tuple[list[Batch], Samples, dict[str, float]]:
    """Compute the advantages from the rewards, after the KL penalty and the length reward are added to them.

    Returns:
      The minibatches with the advantages of their responses, or of tokens, with credit for each turn or an advantage
      function that gives them; the completions with theirs; and the metrics of the terms that were added.
    """
    experiment, rollout, turns = runtime.experiment, graded.rollout, None
    penalties = minibatches.sum_penalties(runtime.passes.terms, batches, layouts)
    added_B, metrics = shape_rewards(rollout, penalties, length_reward=experiment.length_reward)
    finished_B = rollout.finished_B if experiment.filter_overlong else None
    compared = Compared(graded.completions, experiment.sampling.group, added_B, finished_B)
    norm_BT = minibatches.gather_measured(scores, layouts, rollout.tokens_BT.shape)
    advantage = experiment.advantage
    if norm_BT is None:
        value_B, more = compute_advantages(advantage, compared)
        assigned = value_B
    else:
        assigned, value_B, more = compute_token_advantages(advantage, compared, rollout, norm_BT)
    if experiment.turns.credit == "turn":
        assigned, turns = credit_turns(advantage, compared, rollout, discount=experiment.turns.discount)
    batches = minibatches.set_advantages(batches, layouts, assigned, runtime.mesh)
    return batches, Samples(graded.completions, value_B, turns), metrics | more


def select_tokens(
    runtime: Runtime, state: TrainState, batches: list[Batch], scores: Mapping[int, Scores]
) -> list[Batch]:
    """Give the minibatches the weights of selections, if there are any."""
    if runtime.steps.select is None:
        return batches
    key = jax.random.fold_in(multihost.key_to_host(state.key), Stream.SELECTION)
    key = jax.random.fold_in(key, count_rollouts(runtime, state))
    return minibatches.select_tokens(runtime.steps.select, batches, scores, key)


def rollout_metrics(graded: GradedBatch, group: int, vocab_size: int) -> dict[str, float]:
    """Compute the metrics of the rewards and the responses of a rollout."""
    sampled_B, passes_B = count_sampled(graded.rollout), graded.rollout.passes_B
    return {
        **reward_metrics(graded.completions, group),
        **graded.metrics,
        "data/skipped": float(graded.skipped),
        **response_metrics(sampled_B, graded.rollout.finished_B),
        **({} if passes_B is None else {"sampling/tokens_per_pass": float(sampled_B.sum() / passes_B.sum())}),
        **sampling_mask_metrics(graded.rollout, vocab_size),
    }


def age_metrics(runtime: Runtime, graded: GradedBatch, done: int) -> dict[str, float]:
    """Compute the staleness of a rollout, where it may be of older weights, and what its lost samples are like."""
    without_overlong, of_ages, age_B = runtime.experiment.filter_overlong, dict[str, float](), np.zeros(0)
    if runtime.experiment.separate_sampler is not None:
        of_ages = staleness_metrics(graded.rollout, done, graded.version)
        age_B = ages(graded.rollout, done, graded.version)
    lost = lost_metrics(graded.completions, graded.replaced, age_B=age_B.tolist(), without_overlong=without_overlong)
    return of_ages | lost


def learner_metrics(updated: Updated, layouts: Sequence[Layout], model: ModelConfig) -> dict[str, float]:
    """Compute the metrics of minibatches, updates, the old policy, MoE routing, and, if due, the diagnostics."""
    return {
        "learner/tokens": float(sum(layout.tokens for layout in layouts)),
        "learner/packing_efficiency": minibatches.packing_efficiency(layouts),
        **update_metrics(updated.metrics),
        **score_metrics(updated.scored),
        **(routing_metrics(*updated.routing) if updated.routing else {}),
        **diagnostic_metrics(updated.readings, model),
    }


def diagnostics_due(runtime: Runtime, done: int) -> bool:
    """Return whether diagnostics are due in the step after this number of rollouts."""
    diagnostics, last = runtime.experiment.diagnostics, runtime.experiment.schedule.steps
    return diagnostics is not None and progress.is_due(done + 1, diagnostics.every, last)
