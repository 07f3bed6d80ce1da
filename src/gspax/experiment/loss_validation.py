"""What must hold between an experiment's loss and all that is added to it; jax is not imported.

Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspax.config import Experiment, is_sparse
from gspax.experiment.description import keywords, parameters, show, unwrap

SEQUENCE_RATIOS = ("gspo", "gspo_token", "luspo")  # the losses that clip the ratio of a sequence
INERT_CLIP = 0.05  # sequence ratios hardly leave [0.95, 1.05], so a GSPO band of this width clips nothing


def problems(experiment: Experiment) -> Iterator[str]:
    """What is wrong with an experiment whose fields have the right types and signatures."""
    yield from _clip_range(experiment)
    yield from _penalties(experiment)
    yield from _routers(experiment)
    loss = keywords(experiment.loss)
    for field in ("correction", "rejection"):
        if getattr(experiment, field) is not None and "correction" not in loss:
            yield f"{field}: wanted a loss that takes a `correction`, {_name(experiment.loss)} does not"
    if experiment.filter_overlong and _positional(experiment.advantage) < 2:
        yield (
            "filter_overlong: wanted an advantage of (rewards, mask), so that the responses left out do not count "
            f"in their groups; {_name(experiment.advantage)} takes no mask"
        )


def warnings(experiment: Experiment) -> Iterator[str]:
    """What runs but is probably not meant."""
    clip = {name: value for name, value in keywords(experiment.loss).items() if name in ("clip_low", "clip_high")}
    wide = {name: value for name, value in clip.items() if value >= INERT_CLIP}
    if _name(experiment.loss) in SEQUENCE_RATIOS and wide and experiment.calibration is None:
        yield (
            f"{', '.join(f'loss.{name}={show(value)}' for name, value in wide.items())}: GSPO's ratio is a mean over "
            "the sequence and stays close to 1, so so wide a band clips nothing (the paper's are 3e-4 and 4e-4)"
        )


def _clip_range(experiment: Experiment) -> Iterator[str]:
    settings = keywords(experiment.loss)
    for name in ("clip_low", "clip_high"):
        value = settings.get(name, 0.0)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not ok or (name == "clip_low" and value >= 1 and _name(experiment.loss) != "cispo"):
            words = "at least 0 and below 1" if name == "clip_low" else "at least 0"
            yield f"loss.{name}: wanted a number {words}, got {value!r}"
        elif experiment.calibration is not None and not 0 < value < float("inf"):
            yield f"loss.{name}: wanted a finite number above 0 for the calibration to start from, got {value!r}"
    if experiment.calibration is None:
        return
    if _name(experiment.loss) not in SEQUENCE_RATIOS:
        wanted = f"{', '.join(SEQUENCE_RATIOS[:-1])} or {SEQUENCE_RATIOS[-1]}"
        yield f"calibration: wanted a loss that clips the ratio of a sequence ({wanted}), got {_name(experiment.loss)}"
    if experiment.schedule.minibatches < 2:
        yield (
            "calibration: wanted at least 2 schedule.minibatches, as in a rollout batch's first one every ratio is 1, "
            f"got {experiment.schedule.minibatches}"
        )


def _penalties(experiment: Experiment) -> Iterator[str]:
    """What joins the loss is aggregated as the loss is, so the loss must say how."""
    reference = experiment.reference
    if reference is not None and reference.loss is not None and reference.reward is not None:
        yield "reference: wanted the KL in the loss or in the reward, got both"
    on = [f"regularizers.{name}" for name, value in vars(experiment.regularizers).items() if value]
    if reference is not None and reference.loss is not None:
        on.append("reference.loss")
    aggregate = keywords(experiment.loss).get("aggregate")
    if on and aggregate is None:
        yield f"{on[0]}: wanted a loss with an `aggregate`, by which it is added up, {_name(experiment.loss)} has none"
    kl = None if reference is None else reference.loss
    if kl is not None and "aggregate" not in keywords(kl) and aggregate is not None and _name(aggregate) == "by_token":
        yield (
            f"reference.loss: {_name(kl)} weighs sequences equally; wanted a loss aggregated by_sequence or "
            "by_constant, got by_token"
        )


def _routers(experiment: Experiment) -> Iterator[str]:
    on = [f"regularizers.{name}" for name in ("load_balance", "router_z") if getattr(experiment.regularizers, name)]
    on += ["routing_replay"] if experiment.routing_replay else []
    model = experiment.model
    if on and not any(is_sparse(model, layer) for layer in range(model.num_hidden_layers)):
        yield f"{on[0]}: wanted a model with experts, got none in {model.num_hidden_layers} layers"


def _positional(function: Any) -> int:
    kinds = [each.kind for each in parameters(unwrap(function)).values()]
    return sum(kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _name(function: Any) -> str:
    return str(getattr(unwrap(function), "__name__", function))
