"""The compiled functions of the learner, from an experiment, and which minibatches are scored."""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax

from gspax.config import Experiment, has_experts, row_shape
from gspax.learner.diagnostics import Measure, make_measure
from gspax.learner.objective import make_objective
from gspax.learner.train_step import (
    Gradient,
    Route,
    Score,
    StepSettings,
    Update,
    make_gradient,
    make_route,
    make_score,
    make_update,
)
from gspax.model.sizes.old_policy import find_scored, keeps_experts
from gspax.parallel.sharding import batch_shards


class Steps(NamedTuple):
    """The compiled functions of the learner."""

    update: Update
    score: Score
    route: Route | None  # None for a dense model
    gradient: Gradient  # of the update, not compiled
    scored: range  # the minibatches of a rollout batch that are scored before the first update
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
    keep = keeps_experts(experiment.regularizers, experiment.routing_replay, experiment.router_shift)
    objective = make_objective(
        experiment.loss,
        correction=experiment.correction,
        rejection=experiment.rejection,
        reference=experiment.reference,
        regularizers=experiment.regularizers,
        calibration=experiment.calibration,
        router_shift=experiment.router_shift,
    )
    scored = find_scored(
        schedule.minibatches,
        experiment.reference,
        experiment.regularizers,
        experiment.calibration,
        old_logp=experiment.old_logp,
        routing_replay=experiment.routing_replay,
        router_shift=experiment.router_shift,
    )
    instruments = experiment.instruments
    return Steps(
        make_update(settings, objective, optimizer, experiment.guard),
        make_score(settings, keep_experts=keep, keep_router_logp=experiment.router_shift is not None),
        make_route(model, mesh) if has_experts(model) else None,
        make_gradient(settings, objective),
        scored,
        None if instruments is None else make_measure(settings, objective, experiment.loss, instruments),
    )
