"""Rules of an experiment's objective: the loss, its weights and penalties, and the log-probs that they need.

Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from gspax.config import (
    Schedule,
    has_experts,
    updates_per_step,
)
from gspax.config.functions import Function, keywords, title_of
from gspax.config.protocols import Loss
from gspax.experiment.description import show
from gspax.experiment.validation.fields import takes_segments
from gspax.losses.calibration import INERT
from gspax.losses.traits import aggregate_of, traits_of, weight_level
from gspax.model.passes import Passes
from gspax.model.terms.rules import scored_problems
from gspax.types import Batch


def clip_range_problems(loss: Loss) -> Iterator[str]:
    """Check the widths of a loss's clip range."""
    settings, limit = keywords(loss), traits_of(loss).clip_low_limit
    for name in ("clip_low", "clip_high"):
        value = settings.get(name, 0.0)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not ok or (name == "clip_low" and value >= limit):
            words = "at least 0 and below 1" if name == "clip_low" and limit == 1 else "at least 0"
            yield f"loss.{name}: wanted a number {words}, got {value!r}"


def calibration_problems(loss: Loss, schedule: Schedule) -> Iterator[str]:
    """Check that a run can adapt the clip range."""
    traits = traits_of(loss)
    if not (traits.ratio == "sequence" and traits.clip_range):
        yield (
            "calibration: wanted a loss that clips the ratio of a sequence (gspo, gspo_token, luspo, or one with such "
            f"`losses.Traits`), got {title_of(loss)}"
        )
    if (updates := updates_per_step(schedule)) < 2:
        yield (
            "calibration: wanted at least 2 schedule.minibatches or schedule.epochs, as every ratio is 1 in a rollout "
            f"batch's first update, got {updates}"
        )


def penalty_problems(passes: Passes) -> Iterator[str]:
    """Check that the loss has an aggregation if there are penalties, which are aggregated likewise."""
    loss, on = passes.experiment.loss, [field for term in passes.terms for field in term.penalized]
    if on and aggregate_of(loss) is None:
        yield f"{on[0]}: wanted a loss with an `aggregate`, to aggregate it likewise, {title_of(loss)} has none"


def router_problems(passes: Passes) -> Iterator[str]:
    """Check that the model has experts if a setting is about routers."""
    experiment, model = passes.experiment, passes.experiment.model
    on = ["routing_replay"] if experiment.routing_replay != "off" else []
    on += ["router_shift"] if experiment.router_shift is not None else []
    if on and not has_experts(model):
        yield f"{on[0]}: wanted a model with experts, got none in {model.num_hidden_layers} layers"


def old_policy_problems(passes: Passes) -> Iterator[str]:
    """Check that interpolated log-probs have stale tokens, and that a loss without an old policy makes one pass."""
    sampler = passes.experiment.separate_sampler
    loss, old_logp, schedule = passes.experiment.loss, passes.experiment.old_logp, passes.experiment.schedule
    if old_logp == "interpolated" and not passes.experiment.staleness:
        yield (
            "old_logp: wanted placement.staleness or engine.staleness above 0 with interpolated, which needs tokens of "
            f"older weights, got {'no placement' if sampler is None else 0}"
        )
    if traits_of(loss).old_logp != "sampler":
        return
    if old_logp == "interpolated":
        yield f"old_logp: wanted a loss with a ratio to the old policy, got {title_of(loss)}, which has none"
    if schedule.epochs > 1:
        yield (
            f"schedule.epochs: wanted 1 with {title_of(loss)}, which has no old policy that would bound a second pass "
            f"over the same samples, got {schedule.epochs}"
        )


def token_advantage_problems(key: str, loss: Loss, terms: Mapping[str, Function]) -> Iterator[str]:
    """Check that the loss takes an advantage for each token if `key` provides them, and keeps responses apart."""
    traits = traits_of(loss)
    if not (traits.token_advantage or traits.ratio == weight_level(loss) == "token"):
        yield (
            f"{key}: wanted a loss with an advantage for each token (losses.gspo_token, losses.grpo), "
            f"got {title_of(loss)}"
        )
    for field, function in {"loss": loss, **terms}.items():
        if not takes_segments(function):
            yield f"{key}: wanted a {field} that takes `segment_ids`, {title_of(function)} does not"


def term_problems(passes: Passes) -> Iterator[str]:
    """Check that the loss takes the terms' weights and advantages, and that at most one term reads logits in a pass."""
    loss = passes.experiment.loss
    for member in ("comparison", "measure"):
        having = [type(term).__name__ for term in passes.terms if getattr(term, member) is not None]
        if len(having) > 1:
            yield f"terms: wanted at most one with a `{member}`, got {' and '.join(having)}"
    weighing = {field: each for term in passes.terms if term.weighs for field, each in term.functions.items()}
    columns = {field.name for field in fields(Batch)}
    for term in passes.terms:
        for unknown in sorted(term.needs - columns):
            yield f"terms: {type(term).__name__}.needs: wanted columns of gspax.types.Batch, got {unknown}"
        if term.weighs and weight_level(loss) is None:
            yield f"{term.weighs}: wanted a loss that takes a `correction`, {title_of(loss)} does not"
        if term.of_tokens:
            yield from token_advantage_problems(term.of_tokens, loss, weighing)


def unscored_problems(passes: Passes) -> Iterator[str]:
    """Check that the policy's pass computes old log-probs if a setting needs these, or what comes with them."""
    e = passes.experiment
    needs_computed = {
        "calibration": e.calibration is not None,
        "router_shift": e.router_shift is not None,
        "routing_replay": e.routing_replay == "old",
    }
    for field in (name for name, is_on in needs_computed.items() if is_on):
        yield from scored_problems(field, passes)


def loss_warnings(passes: Passes) -> Iterator[str]:
    """Yield settings of a loss that run but are probably not intended."""
    loss, calibration = passes.experiment.loss, passes.experiment.calibration
    clip = {name: value for name, value in keywords(loss).items() if name in ("clip_low", "clip_high")}
    wide = [f"loss.{name}={show(value)}" for name, value in clip.items() if value >= INERT]
    if traits_of(loss).ratio == "sequence" and wide and calibration is None:
        yield (
            f"{', '.join(wide)}: GSPO's ratio is a mean over the sequence and stays close to 1, so this band clips "
            "nothing (the paper's widths are 3e-4 and 4e-4)"
        )
