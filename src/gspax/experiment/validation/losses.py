"""Rules between an experiment's loss and the corrections, penalties and schedules around it.

Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gspax.config import (
    Calibration,
    ModelConfig,
    OldLogp,
    Reference,
    Regularizers,
    RouterShift,
    RoutingReplay,
    Schedule,
    Turns,
    is_sparse,
    updates_per_step,
)
from gspax.config.functions import Function, keywords
from gspax.config.protocols import Advantage, Correction, Loss, Rejection
from gspax.experiment.description import show
from gspax.experiment.validation.fields import positional_count, short_name, takes_segments
from gspax.losses.calibration import INERT
from gspax.losses.traits import aggregate_of, level_of, traits_of

Terms = Mapping[str, Function | None]  # the functions besides the loss: correction, rejection, reference.loss


def terms_of(correction: Correction | None, rejection: Rejection | None, reference: Reference | None) -> Terms:
    kl = None if reference is None else reference.loss
    return {"correction": correction, "rejection": rejection, "reference.loss": kl}


def warnings(loss: Loss, correction: Correction | None, calibration: Calibration | None) -> Iterator[str]:
    """Settings that run but are probably not meant."""
    traits = traits_of(loss)
    clip = {name: value for name, value in keywords(loss).items() if name in ("clip_low", "clip_high")}
    wide = {name: value for name, value in clip.items() if value >= INERT}
    if traits.ratio == "sequence" and wide and calibration is None:
        yield (
            f"{', '.join(f'loss.{name}={show(value)}' for name, value in wide.items())}: GSPO's ratio is a mean over "
            "the sequence and stays close to 1, so this band clips nothing (the paper's widths are 3e-4 and 4e-4)"
        )
    if correction is not None and level_of(correction) == "token" and traits.correction == "sequence":
        yield (
            f"correction: {short_name(correction)} weights each token, but the gradient of {short_name(loss)} has one "
            "weight per sequence, the mean of these; gspo_token applies them token by token, and a correction such as "
            "truncate_geometric weights whole sequences"
        )


def clip_range_problems(loss: Loss) -> Iterator[str]:
    settings, limit = keywords(loss), traits_of(loss).clip_low_limit
    for name in ("clip_low", "clip_high"):
        value = settings.get(name, 0.0)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not ok or (name == "clip_low" and value >= limit):
            words = "at least 0 and below 1" if name == "clip_low" and limit == 1 else "at least 0"
            yield f"loss.{name}: wanted a number {words}, got {value!r}"


def calibration_problems(loss: Loss, calibration: Calibration | None, schedule: Schedule) -> Iterator[str]:
    if calibration is None:
        return
    traits = traits_of(loss)
    if not (traits.ratio == "sequence" and traits.clip_range):
        yield (
            "calibration: wanted a loss that clips the ratio of a sequence (gspo, gspo_token, luspo, or one with such "
            f"`losses.Traits`), got {short_name(loss)}"
        )
    if (updates := updates_per_step(schedule)) < 2:
        yield (
            "calibration: wanted at least 2 schedule.minibatches or schedule.epochs, as every ratio is 1 in a rollout "
            f"batch's first update, got {updates}"
        )


def penalty_problems(loss: Loss, reference: Reference | None, regularizers: Regularizers) -> Iterator[str]:
    """Penalties are aggregated as the loss is, so the loss must have an aggregation."""
    if reference is not None and reference.loss is not None and reference.reward is not None:
        yield "reference: wanted the KL in the loss or in the reward, got both"
    on = [f"regularizers.{name}" for name, value in vars(regularizers).items() if value]
    if reference is not None and reference.loss is not None:
        on.append("reference.loss")
    aggregate = aggregate_of(loss)
    if on and aggregate is None:
        yield f"{on[0]}: wanted a loss with an `aggregate`, to aggregate it likewise, {short_name(loss)} has none"
    kl = None if reference is None else reference.loss
    if kl is None or aggregate is None or "aggregate" in keywords(kl):
        return
    if level_of(aggregate) == "token":
        yield (
            f"reference.loss: {short_name(kl)} weighs sequences equally; wanted a loss aggregated by_sequence or "
            f"by_constant, got {short_name(aggregate)}"
        )


def packing_problems(schedule: Schedule, loss: Loss, terms: Terms) -> Iterator[str]:
    """Functions that sum over a response can tell the responses of a packed row apart."""
    if not schedule.microbatch_tokens:
        return
    for field, function in {"loss": loss, **terms}.items():
        if function is not None and not takes_segments(function):
            yield (
                f"schedule.microbatch_tokens: wanted a {field} that takes `segment_ids`, for packed rows; "
                f"{short_name(function)} does not"
            )


def router_problems(
    model: ModelConfig, regularizers: Regularizers, routing_replay: RoutingReplay, router_shift: RouterShift | None
) -> Iterator[str]:
    on = [f"regularizers.{name}" for name in ("load_balance", "router_z") if getattr(regularizers, name)]
    on += ["routing_replay"] if routing_replay != "off" else []
    on += ["router_shift"] if router_shift is not None else []
    if on and not any(is_sparse(model, layer) for layer in range(model.num_hidden_layers)):
        yield f"{on[0]}: wanted a model with experts, got none in {model.num_hidden_layers} layers"


def unscored_problems(
    old_logp: OldLogp,
    correction: Correction | None,
    calibration: Calibration | None,
    router_shift: RouterShift | None,
    routing_replay: RoutingReplay,
    regularizers: Regularizers,
) -> Iterator[str]:
    """Without computed old log-probs, nothing reads them."""
    read_from_scores = {
        "correction": correction is not None,
        "calibration": calibration is not None,
        "router_shift": router_shift is not None,
        "routing_replay": routing_replay == "old",
        "regularizers.load_balance": regularizers.load_balance > 0 and routing_replay != "sampler",
    }
    for field in (name for name, given in read_from_scores.items() if given and old_logp == "sampler"):
        yield f"{field}: wanted old_logp=scored, got sampler, with which nothing is scored before the updates"


def weight_problems(loss: Loss, correction: Correction | None, rejection: Rejection | None) -> Iterator[str]:
    """A loss takes the weights of a correction."""
    for field, function in {"correction": correction, "rejection": rejection}.items():
        if function is not None and traits_of(loss).correction is None:
            yield f"{field}: wanted a loss that takes a `correction`, {short_name(loss)} does not"


def overlong_problems(advantage: Advantage, *, filter_overlong: bool) -> Iterator[str]:
    """An advantage can leave samples out of their group."""
    if filter_overlong and positional_count(advantage) < 2:
        yield (
            "filter_overlong: wanted an advantage of (rewards, mask), so that the responses left out do not count "
            f"in their groups; {short_name(advantage)} takes no mask"
        )


def credit_problems(turns: Turns, loss: Loss, advantage: Advantage, terms: Terms) -> Iterator[str]:
    """Advantages of turns need a loss that takes those of tokens, and an advantage function that takes a mask."""
    if turns.credit != "turn":
        return
    if not traits_of(loss).token_advantage:
        yield f"turns.credit: wanted a loss with advantages of tokens (losses.gspo_token), got {short_name(loss)}"
    for field, function in terms.items():
        if function is not None and not takes_segments(function):
            yield f"turns.credit: wanted a {field} that takes `segment_ids`, {short_name(function)} does not"
    if positional_count(advantage) < 2:
        yield (
            "turns.credit: wanted an advantage of (rewards, mask), because not every conversation has every turn; "
            f"{short_name(advantage)} takes no mask"
        )
