"""The optimiser updates of a rollout batch, one minibatch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspax.config import Calibration
from gspax.learner import clipping
from gspax.learner.diagnostics import Measure, Readings
from gspax.learner.minibatches import Scored
from gspax.learner.programs import Steps
from gspax.learner.state import applied_updates
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.types import Batch, TrainState


@dataclass(frozen=True)
class Updated:
    """The result of the updates of a rollout batch."""

    state: TrainState
    metrics: list[dict[str, Any]]  # of each update, on the host
    scored: Scored  # those that the old policy is known on
    routing: tuple[Any, ...] | None  # the arguments of `metrics.routing_metrics`; None for a dense model
    readings: Readings | None = None  # of the instruments, on the host
    skipped_batch: Batch | None = None  # the minibatch of the last update that was skipped


def run_updates(
    steps: Steps,
    state: TrainState,
    scored: Scored,
    mesh: jax.sharding.Mesh,
    *,
    epochs: int,
    rate: optax.Schedule,
    calibration: Calibration | None = None,
    measure: Measure | None = None,
) -> Updated:
    """One optimiser update per minibatch and epoch, after each of which a calibrated clip range is adapted.

    Args:
      rate: the learning rate as a function of the updates applied.
      measure: instruments around the last update; None: not in this step.
    """
    first, count = applied_updates(state), epochs * len(scored.batches)
    found: list[dict[str, Any]] = []
    was_scored, probe = scored.entropies[0] is not None, scored.batches[0]
    arrays = probe.tokens_BT, probe.segment_BT, probe.prefix_BT
    before = steps.route and steps.route(state.params, *arrays)
    readings = None
    for index in [*range(len(scored.batches))] * epochs:
        given = state, scored.batches[index], scored.on_policy
        if measure is not None and len(found) == count - 1:
            state, metrics, scores, readings = measure(steps.update, *given)
        else:
            state, metrics, scores = steps.update(*given)
        if not found:
            measured, scored, count_LE = scored.measured(scores), scored.complete(scores), scores.count_LE
        found.append(metrics)
        if calibration is not None:
            done = applied_updates(state)
            rates = [float(rate(n)) for start in (first, done) for n in range(start, start + count)]
            state = _adapt_range(calibration, state, found, rates, mesh)
    found, readings = multihost.to_host((found, readings))
    if found[-1]["empty"] and readings is not None:
        readings = readings._replace(gradient={}, ratio={})  # of nothing
    earliest = next((each for each in found if not each["empty"]), {})
    if was_scored and "ratio_deviation" in earliest:
        found = [{**metrics, "noise_floor": clipping.noise_floor(earliest)} for metrics in found]
    routing = None
    if steps.route is not None:
        routing = count_LE, before, steps.route(state.params, *arrays)
    skipped = [index for index, metrics in enumerate(found) if metrics["skipped"]]
    last_skipped = scored.batches[skipped[-1] % len(scored.batches)] if skipped else None
    return Updated(state, found, measured, routing, readings, last_skipped)


def _adapt_range(
    settings: Calibration,
    state: TrainState,
    updates: list[dict[str, Any]],
    rates: Sequence[float],
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """The state with the clip range for its next update; that of the last of `updates` joins its metrics."""
    low, high = map(float, multihost.to_host(state.clip_range))
    updates[-1] = {**multihost.to_host(updates[-1]), "clip_low": low, "clip_high": high}
    adapted = clipping.adapt_range(settings, (low, high), updates, rates)
    return replace(state, clip_range=multihost.to_devices(jnp.array(adapted, jnp.float32), named_sharding(mesh)))
