"""Compiles the learner's functions, and runs the optimizer updates of a rollout, one minibatch after the other.

A run can calibrate its clip range (`losses.calibration`). Each update measures the widths that would have clipped the
wanted share, and the next one uses their running average, so a run has a range after its first ratios other than 1, in
its first rollout. Until then it clips nothing. Shares are of the sequences with an advantage: the others are never
clipped, and their number depends on the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspax.config import Calibration, Experiment, Regularizers, has_experts, row_shape, updates_per_step
from gspax.config.functions import keywords
from gspax.learner.diagnostics import Measure, Readings, Route, make_measure, make_route, measure_nothing
from gspax.learner.minibatches import Select, make_select
from gspax.learner.objective import RoutingSettings, Scores, make_objective
from gspax.learner.state import applied_updates
from gspax.learner.train_step import (
    Gradient,
    Score,
    StepSettings,
    Update,
    fill_old_logp,
    make_gradient,
    make_score,
    make_update,
)
from gspax.losses import Terms
from gspax.losses.calibration import next_range, range_warnings
from gspax.losses.traits import traits_of
from gspax.model.passes import Passes
from gspax.parallel import multihost, timeline
from gspax.parallel.sharding import batch_shards
from gspax.types import Adapted, Array, Batch, Params, PyTree, TrainState

WIDEST = 1.0  # a lower bound of 0: clips nothing
RESOLUTION = 2.0**-23  # of float32 next to 1: a narrower range clips everything


class Steps(NamedTuple):
    """The compiled functions of the learner, and the settings that they share."""

    settings: StepSettings
    update: Update
    score: Score
    route: Route | None  # None for a dense model
    gradient: Gradient  # of the update, not compiled
    scored: range  # the minibatches of a rollout whose old log-probs are computed before the first update
    measure: Measure = measure_nothing  # with `Experiment.diagnostics`
    select: Select | None = None  # with `Term.selections`


def bind_heads(steps: Steps, heads: tuple[Params, ...]) -> Steps:
    """Bind the heads of other models, whose logits updates compare, to the update and the diagnostics."""
    if not heads:
        return steps

    def update(state: TrainState, batch: Batch, on_policy: bool) -> tuple[TrainState, dict[str, Array], Scores]:
        return steps.update(state, batch, on_policy, heads)

    return steps._replace(update=update, measure=partial(steps.measure, other_heads=heads))


def make_steps(
    experiment: Experiment,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    worst_case: bool = False,
) -> Steps:
    """Compile the functions of an experiment, all with the same `StepSettings`."""
    sampling, schedule, model = experiment.sampling, experiment.schedule, experiment.model
    passes = Passes(experiment)
    settings = StepSettings(
        config=model,
        mesh=mesh,
        temperature=sampling.temperature,
        microbatch_rows=row_shape(sampling, schedule, batch_shards(mesh)).microbatch,
        packed=schedule.microbatch_tokens > 0,
        worst_case=worst_case,
        routing_replay=experiment.routing_replay != "off",
        updates_per_rollout=updates_per_step(schedule) if passes.old_logp == "update" else 1,
        comparison=passes.comparison,
        bias_update_speed=experiment.optimizer.bias_update_speed,
    )
    objective = make_objective(
        experiment.loss,
        passes.terms,
        calibration=experiment.calibration,
        routing=RoutingSettings(model.router, experiment.router_shift),
    )
    measure = measure_nothing
    if (diagnostics := experiment.diagnostics) is not None:
        measure = make_measure(settings, objective, experiment.loss, diagnostics)
    return Steps(
        settings,
        make_update(settings, objective, optimizer, experiment.guard, experiment.regularizers),
        make_score(
            settings,
            keep_experts=passes.keeps_experts,
            keep_router_logp=passes.keeps_router_logp,
            measure=passes.measure,
        ),
        make_route(model, mesh) if has_experts(model) else None,
        make_gradient(settings, objective),
        passes.scored,
        measure,
        make_select(passes, mesh) if passes.selections else None,
    )


class Updated(NamedTuple):
    """The result of the updates of a rollout."""

    state: TrainState
    metrics: list[Mapping[str, float]]  # of each update, on the host
    scored: list[tuple[Batch, Scores]]  # minibatches with known log-probs under the old policy, and these scores
    routing: tuple[Array, Array, Array, Array] | None  # arguments of `metrics.routing_metrics`; None for a dense model
    readings: Readings  # of the diagnostics, on the host
    skipped_batch: Batch | None = None  # the minibatch of the last update that was skipped


def run_updates(
    steps: Steps,
    state: TrainState,
    batches: Sequence[Batch],
    scores: Mapping[int, Scores],
    *,
    epochs: int,
    rate: optax.Schedule,
    calibration: Calibration | None = None,
    measure: Measure = measure_nothing,
) -> Updated:
    """Run one optimizer update per minibatch and epoch, and adapt a calibrated clip range after each update.

    Args:
      batches, scores: from `score_minibatches`. The first update computes the scores that the first minibatch lacks.
      rate: the learning rate as a function of the updates applied.
      measure: diagnostics around the last update.
    """
    batches, scores, was_scored = list(batches), dict(scores), 0 in scores
    first, count = applied_updates(state), epochs * len(batches)
    arrays = batches[0].tokens_BT, batches[0].segment_BT, batches[0].prefix_BT
    before = None if steps.route is None else steps.route(state.params, *arrays)
    updates: list[PyTree] = []  # their metrics
    for number in range(count):
        batch, on_policy = fill_old_logp(batches[number % len(batches)])
        around, began = measure if number == count - 1 else measure_nothing, time.monotonic()
        state, metrics, computed, readings = around(steps.update, state, batch, on_policy)
        timeline.watch(timeline.LEARNER, "update", began, metrics)
        if number == 0:
            scores.setdefault(0, computed)
            counts = computed.count_LE, computed.response_LE
            batches[0] = replace(batch, old_logp_BT=computed.logp_BT) if on_policy else batch
        updates.append(metrics)
        if calibration is not None:
            done = applied_updates(state)
            rates = [float(rate(n)) for start in (first, done) for n in range(start, start + count)]
            state = _calibrate(calibration, state, updates, rates)
    updates, readings = multihost.to_host((updates, readings))
    if updates[-1]["empty"]:
        readings = readings._replace(gradient={}, ratio={})  # of nothing
    earliest: Mapping[str, float] = next((metrics for metrics in updates if not metrics["empty"]), {})
    if was_scored and "ratio_deviation" in earliest:
        updates = [{**metrics, "noise_floor": noise_floor(earliest)} for metrics in updates]
    routing = None
    if steps.route is not None and before is not None and counts[0] is not None and counts[1] is not None:
        routing = counts[0], counts[1], before, steps.route(state.params, *arrays)
    skipped = [index for index, metrics in enumerate(updates) if metrics["skipped"]]
    last_skipped = batches[skipped[-1] % len(batches)] if skipped else None
    scored = [(batches[number], scores[number]) for number in sorted(scores)]
    return Updated(state, updates, scored, routing, readings, last_skipped)


def first_adapted(settings: Calibration | None, regularizers: Regularizers) -> Adapted:
    """Return `TrainState.adapted` before any measurement: a calibrated clip range is `WIDEST`, which clips nothing."""
    width = 0.0 if settings is None else WIDEST
    entropy = 0.0 if regularizers.adaptive_entropy is None else regularizers.entropy
    return Adapted(jnp.float32(width), jnp.float32(width), jnp.float32(entropy))


def noise_floor(first_update: Mapping[str, float]) -> float:
    """Return the noise floor of s: `ratio_deviation` of a rollout's first update, which deviates by rounding alone."""
    return max(float(first_update["ratio_deviation"]), RESOLUTION)


def _calibrate(settings: Calibration, state: TrainState, updates: list[PyTree], rates: Sequence[float]) -> TrainState:
    """Set the clip range for the state's next update, and add the current one to the last update's metrics."""
    low, high, _ = map(float, multihost.to_host(state.adapted))
    updates[-1] = {**multihost.to_host(updates[-1]), "clip_low": low, "clip_high": high}
    own, sharding = state.adapted, state.adapted.clip_low.sharding
    low, high = adapt_range(settings, (low, high), updates, rates)
    clip_low, clip_high = multihost.to_devices((np.float32(low), np.float32(high)), sharding)
    return replace(state, adapted=own._replace(clip_low=clip_low, clip_high=clip_high))


def adapt_range(
    settings: Calibration,
    clip_range: tuple[float, float],
    updates: Sequence[Mapping[str, float]],
    rates: Sequence[float],
) -> tuple[float, float]:
    """Return the clip range after the last of `updates`, the updates of a rollout so far.

    Sequence ratios spread in proportion to the sum of the learning rates of the rollout's updates before. So the widths
    that an update measured (`calibration.range_metrics`) are scaled by the sum that is typical of a rollout over that
    update's own, and the range by how much the typical sum grows from one rollout to the next. Nothing is measured by a
    rollout's first update, by updates with only learning rates of 0 before them, and from the first update on that was
    not applied.

    Args:
      updates: the metrics of each update on the host.
      rates: the learning rates of this rollout's updates if all are applied, then of the next rollout's.
    """
    before, following = (np.cumsum([0, *half[:-1]]) for half in np.split(np.asarray(rates, np.float64), 2))
    typical, this = _geometric_mean(before), len(updates) - 1
    if before[this] > 0 and not any(update["skipped"] or update["empty"] for update in updates):
        floor = min(noise_floor(updates[0]), WIDEST)
        measured = [float(updates[this][f"clip_{side}_measured"]) for side in ("low", "high")]
        low, high = (width * typical / float(before[this]) if width > floor else 0.0 for width in measured)
        clip_range = next_range(
            clip_range,
            (low, high),
            clipped=float(updates[this]["clip_fraction_nonzero"]),
            share=settings.share,
            tolerance=settings.tolerance,
            gain=settings.gain,
            floor=floor,
            ceiling=WIDEST,  # short responses leave 1 further than `calibration.INERT`
        )
    if this == len(before) - 1 and typical > 0 and (growth := _geometric_mean(following) / typical) > 0:
        low, high = (width if width >= WIDEST else min(growth * width, WIDEST) for width in clip_range)
        return low, high
    return clip_range


def _geometric_mean(sums: np.ndarray) -> float:
    """Compute the geometric mean of the sums above 0; 0 if there are none."""
    return float(np.exp(np.mean(np.log(sums[sums > 0])))) if (sums > 0).any() else 0.0


def first_warnings(passes: Passes, metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return `noise_warnings` of a run's first step; none with a calibrated range."""
    if passes.experiment.calibration is not None:
        return ()
    return noise_warnings(passes.experiment.loss, metrics.get("policy/noise_floor", 0.0))


def noise_warnings(loss: Callable[..., Terms], floor: float) -> tuple[str, ...]:
    """Return a sentence for each side of a loss's fixed clip range on sequence ratios that is below the noise floor."""
    traits, options = traits_of(loss), keywords(loss)
    if traits.ratio != "sequence" or not traits.clip_range or not {"clip_low", "clip_high"} <= options.keys():
        return ()
    widths = options["clip_low"], options["clip_high"]
    before = range_warnings(*widths)  # given before the run, by `experiment.warnings`
    return tuple(line for line in range_warnings(*widths, floor=floor) if line not in before)
