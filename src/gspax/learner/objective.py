"""Defines the objective of an update: the policy loss and the terms added to it.

An objective is `(outputs, batch, constants) -> losses.Terms`: the policy's outputs for the rows of one microbatch,
those rows, and the values shared by all microbatches. `make_objective` combines a loss with a correction for the
sampler, a KL to the reference, a teacher, penalties (`Regularizers`) and a calibrated clip range, each optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.config import Calibration, Regularizers, Router, RouterShift, Teacher, Term
from gspax.learner.distillation import divergence_terms, mix_advantage
from gspax.losses.calibration import range_metrics
from gspax.losses.correction import multiplied, weight_metrics
from gspax.losses.kl import add_penalty
from gspax.losses.ratio_spread import ratio_metrics
from gspax.losses.regularizers import entropy_bonus, load_balance, log_ratio_size, log_ratio_square, router_z
from gspax.losses.router_shift import log_factor
from gspax.losses.terms import mean_over
from gspax.losses.traits import aggregate_of, traits_of
from gspax.model.moe import Routing, log_scores, scores_of, softmax_logits
from gspax.types import Adapted, Array, Batch, Params, PyTree, known, packed, segment_ids

PolicyLoss = Callable[..., losses.Terms]  # (logp, old_logp, advantage, mask, *, ...)

NO_REGULARIZERS = Regularizers()
SOFTMAX = Router()


class Outputs(NamedTuple):
    """The outputs of the trained policy for a batch's tokens."""

    logp_BT: Array  # float32  log-prob of the token; column 0 is 0
    entropy_BT: Array  # float32  of the distribution that the token was sampled from
    routing: Routing  # of the sparse layers
    compared: PyTree = None  # with a teacher, what `distillation.make_compare` computed of each token: [B, T, ...]


class Scores(NamedTuple):
    """The log-probs, entropies, and routing of the policy on a minibatch."""

    logp_BT: Array  # float32
    entropy_BT: Array  # float32
    expert_BLTA: Array | None = None  # as in `Batch`
    router_logp_BLTA: Array | None = None  # as in `Batch`
    score_norm_BT: Array | None = None  # float32  `losses.score_norm` of the token; 0 outside the mask
    count_LE: Array | None = None  # int32  tokens that each layer sent to each expert
    fallbacks: Array | None = None  # int32  exchanges of rows, a layer's of a microbatch, that fell back to the ring


class UpdateConstants(NamedTuple):
    """The values shared by all microbatches of an update."""

    adapted: Adapted  # `TrainState.adapted`
    load_LE: Array | None  # float32 [L, E]  each expert's share of the response tokens' choices, 1 if balanced
    updates: Array | int = 0  # int32: `TrainState.step`, for losses that take it
    teacher_heads: tuple[Params, ...] = ()  # what `transformer.head` reads of each teacher whose logits are computed


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
    correction: Callable[..., Array] | None = None,
    rejection: Callable[..., Array] | None = None,
    teacher: Teacher | None = None,
    regularizers: Regularizers = NO_REGULARIZERS,
    calibration: Calibration | None = None,
    routing: RoutingSettings = SOFTMAX_ROUTING,
) -> Objective:
    """Make the objective of a policy loss and its terms; the other arguments are the fields of `Experiment`.

    Adds the metrics of `ratio_metrics` that the loss does not report, `token_ratio` only if the loss has no sequence
    ratio. With `calibration` the clip range is in `constants.adapted`, and the metrics of `range_metrics` are added.
    """
    traits, aggregate = traits_of(loss), aggregate_of(loss)

    def objective(outputs: Outputs, batch: Batch, constants: UpdateConstants) -> losses.Terms:
        batch, added = mix_advantage(teacher, batch)
        old_logp_BT, ids, mask_BT = known(batch, "old_logp_BT"), segment_ids(batch), batch.mask_BT
        log_factor_BT = None
        if routing.shift is not None:
            log_factor_BT = shift_factor(routing.shift, routing.router, outputs.routing, batch)
        if log_factor_BT is not None:
            old_logp_BT = old_logp_BT - log_factor_BT
        rows = outputs.logp_BT, old_logp_BT, known(batch, "advantage"), mask_BT
        weight = correction_weight(correction, rejection, outputs.logp_BT, batch)
        options: dict[str, Array | int] = {**packed(batch)}
        if weight is not None:
            options["correction"] = weight
        if traits.updates:
            options["updates"] = constants.updates
        if calibration is not None:
            options |= {"clip_low": constants.adapted.clip_low, "clip_high": constants.adapted.clip_high}
        total = loss(*rows, **options)
        metrics = ratio_metrics(outputs.logp_BT, old_logp_BT, mask_BT, segment_ids=ids)
        if traits.ratio == "sequence":
            del metrics["token_ratio"]
        metrics |= total.metrics
        if weight is not None:
            metrics |= weight_metrics(weight, mask_BT, segment_ids=ids)
        if log_factor_BT is not None:
            metrics["router_shift"] = mean_over(jnp.exp(log_factor_BT), mask_BT)
        if calibration is not None:
            clipped = metrics["clip_fraction_sequences"]
            assert isinstance(clipped, losses.Share)
            metrics |= range_metrics(*rows, clipped=clipped, share=calibration.share, segment_ids=ids)
        total = total._replace(metrics=metrics | added)
        found = chain.from_iterable(term.penalties(outputs, batch, constants, aggregate) for term in terms)
        more = penalties(regularizers, teacher, outputs, batch, constants, aggregate, router=routing.router)
        for coefficient, penalty in chain(found, more):
            total = add_penalty(total, penalty, coefficient=coefficient)
        return total

    return objective


def shift_factor(settings: RouterShift, router: Router, routing: Routing, batch: Batch) -> Array:
    """Compute log γ of each token, float32 [B, T] (`losses.router_shift`)."""
    now_BLTA = router_logp(routing, known(batch, "expert_BLTA"), router)
    return log_factor(now_BLTA, known(batch, "router_logp_BLTA"), batch.mask_BT, floor=settings.floor)


def router_logp(routing: Routing, expert_BLTA: Array, router: Router = SOFTMAX) -> Array:
    """Compute the log of the routers' scores of the given experts, float32 [B, L, T, A]; 0 where none is known."""
    return scores_of(log_scores(routing.logits, router).swapaxes(0, 1), expert_BLTA)


def correction_weight(
    correction: Callable[..., Array] | None, rejection: Callable[..., Array] | None, logp_BT: Array, batch: Batch
) -> Array | None:
    """Compute the constant factor of the objective, float32 [B] or [B, T]; None if nothing is corrected."""
    weights, mask_BT, keywords = [], batch.mask_BT, packed(batch)
    if correction is not None:
        weights.append(correction(known(batch, "old_logp_BT"), known(batch, "sampler_logp_BT"), mask_BT, **keywords))
    if batch.selected_BT is not None:
        weights.append(batch.selected_BT)
    if rejection is not None:
        weights.append(rejection(logp_BT, known(batch, "sampler_logp_BT"), batch.advantage, mask_BT, **keywords))
    return multiplied(weights) if weights else None


def penalties(
    regularizers: Regularizers,
    teacher: Teacher | None,
    outputs: Outputs,
    batch: Batch,
    constants: UpdateConstants,
    aggregate: losses.Aggregate | None,
    *,
    router: Router = SOFTMAX,
) -> Iterator[tuple[float, losses.Terms]]:
    """Yield (coefficient, penalty) of the teacher and of each active regularizer, aggregated like the policy loss.

    Where the router's scores are sigmoids, the load balance takes their shares of the sum (arXiv 2412.19437, eq. 19).
    """
    mask_BT, ids, aggregate = batch.mask_BT, segment_ids(batch), aggregate or losses.by_sequence
    if teacher is not None and not teacher.as_advantage:
        of_tokens = outputs.logp_BT, outputs.compared
        yield teacher.coefficient, divergence_terms(teacher, *of_tokens, batch, aggregate=aggregate, segment_ids=ids)
    if regularizers.entropy or regularizers.adaptive_entropy is not None:
        bonus = entropy_bonus(outputs.entropy_BT, mask_BT, aggregate=aggregate, segment_ids=ids)
        if regularizers.adaptive_entropy is None:
            yield regularizers.entropy, bonus
        else:
            yield 1.0, bonus._replace(value=constants.adapted.entropy * bonus.value)
    if regularizers.kl_cov is not None:
        given = outputs.logp_BT, known(batch, "old_logp_BT"), known(batch, "penalized_BT"), mask_BT
        yield regularizers.kl_cov.coefficient, log_ratio_size(*given, aggregate=aggregate, segment_ids=ids)
    if regularizers.log_ratio_square:
        sampler_logp_BT = known(batch, "sampler_logp_BT")
        penalty = log_ratio_square(outputs.logp_BT, sampler_logp_BT, mask_BT, aggregate=aggregate, segment_ids=ids)
        yield regularizers.log_ratio_square, penalty
    if regularizers.load_balance:
        assert constants.load_LE is not None, "the batch has no experts"
        prob_LBTE = jax.nn.softmax(softmax_logits(outputs.routing.logits, router))
        penalty = load_balance(prob_LBTE, constants.load_LE, mask_BT, aggregate=aggregate, segment_ids=ids)
        yield regularizers.load_balance, penalty
    if regularizers.router_z:
        penalty = router_z(outputs.routing.logits, mask_BT, aggregate=aggregate, segment_ids=ids)
        yield regularizers.router_z, penalty
