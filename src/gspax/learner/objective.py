"""Defines the objective of an update: the policy loss and the terms added to it.

An objective is `(outputs, batch, constants) -> losses.Terms`: the policy's outputs for the rows of one microbatch,
those rows, and the values shared by all microbatches. `make_objective` combines a loss with its terms
(`config.Term`) and a calibrated clip range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from gspax import losses
from gspax.config import Calibration, Router, RouterShift, Term
from gspax.losses.calibration import range_metrics
from gspax.losses.correction import multiplied, weight_metrics
from gspax.losses.kl import add_penalty
from gspax.losses.ratio_spread import ratio_metrics
from gspax.losses.router_shift import log_factor
from gspax.losses.terms import mean_over
from gspax.losses.traits import aggregate_of, traits_of
from gspax.model.moe import Routing, scores_of
from gspax.model.router_scores import log_scores
from gspax.types import Adapted, Array, Batch, Params, PyTree, known, packed, segment_ids

PolicyLoss = Callable[..., losses.Terms]  # (logp, old_logp, advantage, mask, *, ...)

SOFTMAX = Router()


class Outputs(NamedTuple):
    """The outputs of the trained policy for a batch's tokens."""

    logp_BT: Array  # float32  log-prob of the token; column 0 is 0
    entropy_BT: Array  # float32  of the distribution that the token was sampled from
    routing: Routing  # of the sparse layers
    compared: PyTree = None  # with `Term.comparison`, its result of each token: [B, T, ...]


class Scores(NamedTuple):
    """The log-probs, entropies, and routing of the policy on a minibatch."""

    logp_BT: Array  # float32
    entropy_BT: Array  # float32
    expert_BLTA: Array | None = None  # as in `Batch`
    router_logp_BLTA: Array | None = None  # as in `Batch`
    measured_BT: Array | None = None  # float32  `Term.measure` of the token; 0 outside the mask
    count_LE: Array | None = None  # int32  tokens that each layer sent to each expert
    response_LE: Array | None = None  # int32  likewise, of the responses alone
    fallbacks: Array | None = None  # int32  exchanges of rows, a layer's of a microbatch, that fell back to the ring


class UpdateConstants(NamedTuple):
    """The values shared by all microbatches of an update."""

    adapted: Adapted  # `TrainState.adapted`
    load_LE: Array | None  # float32 [L, E]  each expert's share of the response tokens' choices, 1 if balanced
    updates: Array | int = 0  # int32: `TrainState.step`, for losses that take it
    other_heads: tuple[Params, ...] = ()  # what `transformer.head` reads of each other model whose logits are computed


class RoutingSettings(NamedTuple):
    """The router settings of an objective."""

    router: Router = SOFTMAX  # the model's
    shift: RouterShift | None = None  # `Experiment.router_shift`


SOFTMAX_ROUTING = RoutingSettings()
Objective = Callable[[Outputs, Batch, UpdateConstants], losses.Terms]


def make_objective(
    loss: PolicyLoss,
    terms: Sequence[Term] = (),
    *,
    calibration: Calibration | None = None,
    routing: RoutingSettings = SOFTMAX_ROUTING,
) -> Objective:
    """Make the objective of a policy loss and its terms; the other arguments are the fields of `Experiment`.

    Adds the metrics of `ratio_metrics` that the loss does not report, `token_ratio` only if the loss has no sequence
    ratio. With `calibration` the clip range is in `constants.adapted`, and the metrics of `range_metrics` are added.
    """
    traits, aggregate = traits_of(loss), aggregate_of(loss) or losses.by_sequence

    def objective(outputs: Outputs, batch: Batch, constants: UpdateConstants) -> losses.Terms:
        batch, added = mix(terms, batch)
        old_logp_BT, ids, mask_BT = known(batch, "old_logp_BT"), segment_ids(batch), batch.mask_BT
        log_factor_BT = None
        if routing.shift is not None:
            log_factor_BT = shift_factor(routing.shift, routing.router, outputs.routing, batch)
        if log_factor_BT is not None:
            old_logp_BT = old_logp_BT - log_factor_BT
        rows = outputs.logp_BT, old_logp_BT, known(batch, "advantage"), mask_BT
        weights = [each for term in terms if (each := term.weight(outputs.logp_BT, batch)) is not None]
        weight = multiplied(weights) if weights else None
        options: dict[str, Array | int] = {**packed(batch)}
        if weight is not None:
            options["correction"] = weight
        if traits.updates:
            options["updates"] = constants.updates
        if calibration is not None:
            options |= {"clip_low": constants.adapted.clip_low, "clip_high": constants.adapted.clip_high}
        total = loss(*rows, **options)
        metrics = ratio_metrics(outputs.logp_BT, old_logp_BT, mask_BT, segment_ids=ids)
        used = metrics["ratio" if traits.ratio == "sequence" else "token_ratio"]
        assert isinstance(used, losses.Spread)
        if traits.ratio == "sequence":
            del metrics["token_ratio"]
        metrics |= {"weight": losses.Evenness(*used)} | total.metrics
        if weight is not None:
            metrics |= weight_metrics(weight, mask_BT, segment_ids=ids)
        if log_factor_BT is not None:
            metrics["router_shift"] = mean_over(jnp.exp(log_factor_BT), mask_BT)
        if calibration is not None:
            clipped = metrics["clip_fraction_sequences"]
            assert isinstance(clipped, losses.Share)
            metrics |= range_metrics(*rows, clipped=clipped, share=calibration.share, segment_ids=ids)
        total = total._replace(metrics=metrics | added)
        for term in terms:
            for coefficient, penalty in term.penalties(outputs, batch, constants, aggregate):
                total = add_penalty(total, penalty, coefficient=coefficient)
        return total

    return objective


def mix(terms: Sequence[Term], batch: Batch) -> tuple[Batch, losses.Metrics]:
    """Add the advantages of terms to the batch's, and collect their metrics."""
    metrics: losses.Metrics = {}
    for term in terms:
        batch, more = term.mix(batch)
        metrics |= more
    return batch, metrics


def shift_factor(settings: RouterShift, router: Router, routing: Routing, batch: Batch) -> Array:
    """Compute log γ of each token, float32 [B, T] (`losses.router_shift`)."""
    now_BLTA = router_logp(routing, known(batch, "expert_BLTA"), router)
    return log_factor(now_BLTA, known(batch, "router_logp_BLTA"), batch.mask_BT, floor=settings.floor)


def router_logp(routing: Routing, expert_BLTA: Array, router: Router = SOFTMAX) -> Array:
    """Compute the log of the routers' scores of the given experts, float32 [B, L, T, A]; 0 where none is known."""
    return scores_of(log_scores(routing.logits, router).swapaxes(0, 1), expert_BLTA)
