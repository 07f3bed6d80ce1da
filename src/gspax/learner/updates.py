"""The compiled functions of the learner, and the optimizer updates of a rollout, one minibatch after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import optax

from gspax.config import Calibration, Experiment, has_experts, row_shape
from gspax.learner import clipping
from gspax.learner.diagnostics import Measure, Readings, Route, make_measure, make_route
from gspax.learner.objective import make_objective
from gspax.learner.state import applied_updates
from gspax.learner.train_step import (
    Gradient,
    Score,
    Scores,
    StepSettings,
    Update,
    fill_old_logp,
    make_gradient,
    make_score,
    make_update,
)
from gspax.model.sizes import reads_experts
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.types import Array, Batch, PyTree, TrainState


class Steps(NamedTuple):
    """The compiled functions of the learner."""

    update: Update
    score: Score
    route: Route | None  # None for a dense model
    gradient: Gradient  # of the update, not compiled
    scored: range  # the minibatches of a rollout whose old log-probs are computed before the first update
    measure: Measure | None = None  # with `Experiment.instruments`


def make_steps(
    experiment: Experiment,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    worst_case: bool = False,
) -> Steps:
    """The compiled functions of an experiment, all with the same `StepSettings`."""
    sampling, schedule, model = experiment.sampling, experiment.schedule, experiment.model
    settings = StepSettings(
        config=model,
        mesh=mesh,
        temperature=sampling.temperature,
        microbatch_rows=row_shape(sampling, schedule, batch_shards(mesh)).microbatch,
        packed=schedule.microbatch_tokens > 0,
        worst_case=worst_case,
        routing_replay=experiment.routing_replay != "off",
    )
    # The sampler's experts are in the rollout; the old policy's are found by the pass that computes its log-probs.
    reference, replay, shift = experiment.reference, experiment.routing_replay, experiment.router_shift
    keep = replay != "sampler" and reads_experts(experiment.regularizers, replay, shift)
    # The first minibatch's update computes its own old log-probs, unless they are read before it: by a KL in the
    # reward, for the routing that updates read, or for a calibrated clip range, which needs to know how differently
    # the two passes round.
    rewarded = reference is not None and reference.reward is not None
    first = 0 if rewarded or keep or shift is not None or experiment.calibration is not None else 1
    scored = range(first, schedule.minibatches) if experiment.old_logp == "scored" else range(0)
    objective = make_objective(
        experiment.loss,
        correction=experiment.correction,
        rejection=experiment.rejection,
        reference=experiment.reference,
        regularizers=experiment.regularizers,
        calibration=experiment.calibration,
        router_shift=experiment.router_shift,
    )
    instruments = experiment.instruments
    return Steps(
        make_update(settings, objective, optimizer, experiment.guard),
        make_score(settings, keep_experts=keep, keep_router_logp=shift is not None),
        make_route(model, mesh) if has_experts(model) else None,
        make_gradient(settings, objective),
        scored,
        None if instruments is None else make_measure(settings, objective, experiment.loss, instruments),
    )


class Updated(NamedTuple):
    """The result of the updates of a rollout."""

    state: TrainState
    metrics: list[Mapping[str, float]]  # of each update, on the host
    scored: list[tuple[Batch, Scores]]  # the minibatches whose log-probs under the old policy are known, with these
    routing: tuple[Array, Array, Array] | None  # the arguments of `metrics.routing_metrics`; None for a dense model
    readings: Readings | None = None  # of the instruments, on the host
    skipped_batch: Batch | None = None  # the minibatch of the last update that was skipped


def run_updates(
    steps: Steps,
    state: TrainState,
    batches: Sequence[Batch],
    scores: Sequence[Scores | None],
    *,
    epochs: int,
    rate: optax.Schedule,
    calibration: Calibration | None = None,
    measure: Measure | None = None,
) -> Updated:
    """One optimizer update per minibatch and epoch, after each of which a calibrated clip range is adapted.

    Args:
      batches, scores: from `score_minibatches`. What the first minibatch lacks its own update computes.
      rate: the learning rate as a function of the updates applied.
      measure: instruments around the last update; None: not in this step.
    """
    batches, scores, was_scored = list(batches), list(scores), scores[0] is not None
    first, count = applied_updates(state), epochs * len(batches)
    arrays = batches[0].tokens_BT, batches[0].segment_BT, batches[0].prefix_BT
    before = None if steps.route is None else steps.route(state.params, *arrays)
    updates: list[PyTree] = []  # their metrics
    readings = None
    for number in range(count):
        batch, on_policy = fill_old_logp(batches[number % len(batches)])
        if measure is not None and number == count - 1:
            state, metrics, own, readings = measure(steps.update, state, batch, on_policy)
        else:
            state, metrics, own = steps.update(state, batch, on_policy)
        if number == 0:
            scores[0], count_LE = scores[0] or own, own.count_LE
            batches[0] = replace(batch, old_logp_BT=own.logp_BT) if on_policy else batch
        updates.append(metrics)
        if calibration is not None:
            done = applied_updates(state)
            rates = [float(rate(n)) for start in (first, done) for n in range(start, start + count)]
            state = _adapt_range(calibration, state, updates, rates)
    updates, readings = multihost.to_host((updates, readings))
    if updates[-1]["empty"] and readings is not None:
        readings = readings._replace(gradient={}, ratio={})  # of nothing
    earliest: Mapping[str, float] = next((metrics for metrics in updates if not metrics["empty"]), {})
    if was_scored and "ratio_deviation" in earliest:
        updates = [{**metrics, "noise_floor": clipping.noise_floor(earliest)} for metrics in updates]
    routing = None
    if steps.route is not None and before is not None and count_LE is not None:
        routing = count_LE, before, steps.route(state.params, *arrays)
    skipped = [index for index, metrics in enumerate(updates) if metrics["skipped"]]
    last_skipped = batches[skipped[-1] % len(batches)] if skipped else None
    scored = [(batch, known) for batch, known in zip(batches, scores, strict=True) if known is not None]
    return Updated(state, updates, scored, routing, readings, last_skipped)


def _adapt_range(settings: Calibration, state: TrainState, updates: list[PyTree], rates: Sequence[float]) -> TrainState:
    """The state with the clip range for its next update; that of the last of `updates` joins its metrics."""
    low, high = map(float, multihost.to_host(state.clip_range))
    updates[-1] = {**multihost.to_host(updates[-1]), "clip_low": low, "clip_high": high}
    adapted = np.array(clipping.adapt_range(settings, (low, high), updates, rates), np.float32)
    return replace(state, clip_range=multihost.to_devices(adapted, state.clip_range.sharding))
