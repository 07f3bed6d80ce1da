"""What an update minimises: the policy loss of an experiment, with what the experiment adds to it.

An objective is `(outputs, batch, common) -> losses.Terms`: what the policy says of the rows of one micro-batch, those
rows, and what all micro-batches share. `of_loss` makes one of a bare loss, `of_experiment` of all that an experiment
names: correction for the sampler, KL to the reference, entropy bonus, router losses, calibrated clip range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspax import losses, masked
from gspax.config import Experiment
from gspax.experiment.description import keywords
from gspax.losses.kl import add_penalty
from gspax.losses.regularizers import entropy_bonus, load_balance, router_z
from gspax.losses.terms import share_of_tokens
from gspax.model.moe import Routing
from gspax.types import Array, Batch

Loss = Callable[[Array, Array, Array, Array], losses.Terms]


class Outputs(NamedTuple):
    """What the policy that is trained says of a batch's tokens."""

    logp_BT: Array  # float32  log-prob of the token; column 0 is 0
    entropy_BT: Array  # float32  of the distribution that the token was drawn from
    routing: Routing  # of the sparse layers


class Common(NamedTuple):
    """What all micro-batches of an update share."""

    clip_range: Array  # float32 [2]: `TrainState.clip_range`
    load_LE: Array | None  # float32 [L, E]  each expert's share of the response tokens' choices, 1 if balanced


Objective = Callable[[Outputs, Batch, Common], losses.Terms]


def from_loss(loss: Loss) -> Objective:
    """The objective that is only a policy loss."""

    def objective(outputs: Outputs, batch: Batch, common: Common) -> losses.Terms:
        return loss(outputs.logp_BT, batch.old_logp_BT, batch.advantage_B, batch.mask_BT)

    return objective


def from_experiment(experiment: Experiment) -> Objective:
    """The objective of an experiment: its loss, corrected, plus its penalties."""

    def objective(outputs: Outputs, batch: Batch, common: Common) -> losses.Terms:
        loss: Callable[..., losses.Terms] = experiment.loss
        if experiment.calibration is not None:
            loss = partial(loss, clip_low=common.clip_range[0], clip_high=common.clip_range[1])
        weight = correction(experiment, outputs.logp_BT, batch)
        if weight is not None:
            loss = partial(loss, correction=weight)
        terms = from_loss(loss)(outputs, batch, common)
        if weight is not None:
            terms = terms._replace(metrics=terms.metrics | correction_metrics(weight, batch.mask_BT))
        for coefficient, penalty in penalties(experiment, outputs, batch, common):
            terms = add_penalty(terms, penalty, coefficient=coefficient)
        return terms

    return objective


def correction(experiment: Experiment, logp_BT: Array, batch: Batch) -> Array | None:
    """The constant factor of the objective, float32 [B] or [B, T]; None if the experiment corrects nothing."""
    weight = None
    if experiment.correction is not None:
        assert batch.sampler_logp_BT is not None
        weight = experiment.correction(batch.old_logp_BT, batch.sampler_logp_BT, batch.mask_BT)
    if experiment.rejection is not None:
        assert batch.sampler_logp_BT is not None
        kept_B = experiment.rejection(logp_BT, batch.sampler_logp_BT, batch.advantage_B, batch.mask_BT)
        weight = kept_B if weight is None else weight * (kept_B if weight.ndim == 1 else kept_B[:, None])
    return weight


def correction_metrics(weight: Array, mask_BT: Array) -> dict[str, losses.Share | losses.Spread]:
    """`correction` (_mean, _min, _max): mean weight of a sequence; `correction_rejected`: share of tokens with 0."""
    weight_BT = jnp.broadcast_to(weight if weight.ndim == 2 else weight[:, None], mask_BT.shape)
    return {
        "correction": losses.Spread(masked.mean(weight_BT, mask_BT, axis=-1), mask_BT.any(-1)),
        "correction_rejected": share_of_tokens(weight_BT == 0, mask_BT),
    }


def penalties(
    experiment: Experiment, outputs: Outputs, batch: Batch, common: Common
) -> Iterator[tuple[float, losses.Terms]]:
    """(coefficient, penalty) of each one that is on, aggregated as the policy loss is."""
    aggregate = keywords(experiment.loss).get("aggregate", losses.by_sequence)
    mask_BT, regularizers = batch.mask_BT, experiment.regularizers
    if experiment.reference is not None and experiment.reference.loss is not None:
        yield experiment.reference.coefficient, reference_kl(experiment.reference.loss, outputs, batch, aggregate)
    if regularizers.entropy:
        yield regularizers.entropy, entropy_bonus(outputs.entropy_BT, mask_BT, aggregate=aggregate)
    if regularizers.load_balance:
        assert common.load_LE is not None, "the batch has no experts"
        prob_LBTE = jax.nn.softmax(outputs.routing.logits)
        yield regularizers.load_balance, load_balance(prob_LBTE, common.load_LE, mask_BT, aggregate=aggregate)
    if regularizers.router_z:
        yield regularizers.router_z, router_z(outputs.routing.logits, mask_BT, aggregate=aggregate)


def reference_kl(
    kl: Callable[..., losses.Terms], outputs: Outputs, batch: Batch, aggregate: Callable[..., Any]
) -> losses.Terms:
    """The KL term, told what it asks for and was not told yet: how to aggregate, and which policy drew the tokens."""
    told = {"aggregate": aggregate, "old_logp": batch.old_logp_BT}
    open_to = keywords(kl).keys() - getattr(kl, "keywords", {}).keys()
    asked = {name: value for name, value in told.items() if name in open_to}
    return kl(outputs.logp_BT, batch.ref_logp_BT, batch.mask_BT, **asked)
