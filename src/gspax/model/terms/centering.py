"""Score centering (arXiv 2609.20807): what the sampler alone would do to the policy is taken out of the loss.

With q the law that a token y was sampled from and w its weight, a policy loss has the gradient -A w_y ∇log p_y. In a
context its mean is -(E_q[A] μ + Cov_q(A, w ∇log p)) with μ = Σ_v q_v w_v ∇log p_v: without the second term it imitates
or avoids the sampler, by the mean of A. The penalty A Σ_v sg(q_v w_v) log p_v removes μ. It is exact over the
vocabulary, or over the recorded sampling mask.

w is the loss's own weight, read off its gradient: a clip, a bound, or a gate acts on every v as it acts on y.

Axes: as in docs/architecture.md; C tokens of a chunk, S tokens of a sampling mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.nn import log_softmax

from gspax import losses
from gspax.config.functions import title_of
from gspax.config.term import Comparison, Formula, Term
from gspax.losses import explicit
from gspax.losses.terms import mean_over
from gspax.losses.traits import traits_of, weight_level
from gspax.model.terms.rules import stale_problems
from gspax.types import Array, Batch, Params, TrainState, known, segment_ids

if TYPE_CHECKING:
    from gspax.model.passes import Passes

Loss = Callable[..., losses.Terms]  # (logp, old_logp, advantage, mask, *, aggregate)
FIELD = "center_scores"


class Center(NamedTuple):
    """What is subtracted from a token's score for advantages of one sign, [...]."""

    score: Array  # Σ_v sg(q_v w_v) log p_v, differentiable
    size: Array  # how far the weights are from those that need no centering: 1/2 Σ_v |q_v w_v - p_v Σ_u q_u w_u|


class Centers(NamedTuple):
    """The centers of a token; weights depend on the advantage by its sign alone."""

    positive: Center
    negative: Center


@dataclass(frozen=True, kw_only=True)
class CenteringTerm(Term):
    """`Experiment.center_scores`: subtract from each token's score its mean under the policy that sampled."""

    loss: Loss

    needs = frozenset({"sampler_hidden_BTE"})
    penalized = (FIELD,)

    @property
    def comparison(self) -> Comparison:
        return Comparison(CompareWithSampler(self.loss), sampler_states, own_parameters)

    def problems(self, passes: Passes) -> Iterator[str]:
        experiment, traits = passes.experiment, traits_of(self.loss)
        sampling = experiment.sampling
        if "sequence" in (traits.ratio, weight_level(self.loss)):
            yield (
                f"{FIELD}: wanted a loss with a weight for each token, got {title_of(self.loss)}, whose weight is that "
                "of a whole sequence: its mean needs the futures of tokens that were not sampled"
            )
        elif traits.ratio is None:
            yield f"{FIELD}: wanted a loss with a ratio for each token (losses.Traits), got {title_of(self.loss)}"
        if others := [term.weighs for term in passes.terms if term.weighs]:
            got = " and ".join(others)
            yield f"{FIELD}: wanted the weights of the loss alone, which are known for all tokens, got {got}"
        if name := passes.unrecorded_filter:
            yield (
                f"sampling.mask_replay: wanted the tokens that sampling.{name} leaves with {FIELD}, which takes a mean "
                "over them, got 0"
            )
        yield from stale_problems(FIELD, passes)
        if experiment.staleness and (experiment.partial is not None or sampling.max_refills):
            got = (
                "partial rollouts" if experiment.partial is not None else f"sampling.max_refills={sampling.max_refills}"
            )
            yield f"{FIELD}: wanted one policy that sampled a whole rollout with {passes.staleness_setting}, got {got}"

    @property
    def formula(self) -> Formula:
        weight = "the weight of a token v in the gradient of `objective`: its derivative by logp, over the advantage, "
        return Formula(
            penalty="mean(advantage * sum_v(sg(exp(sampler_logp_v) * weight_v) * logp_v))",
            words={"weight_v": f"{weight}at logp_v with sampler_logp_v as old_logp; a constant"},
        )

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: losses.Aggregate
    ) -> Iterator[tuple[float, losses.Terms]]:
        centers, advantage, mask_BT = outputs.compared, known(batch, "advantage"), batch.mask_BT
        advantage_BU = advantage if advantage.ndim == 2 else advantage[:, None]
        score_BT, size_BT = (
            jnp.where(advantage_BU > 0, positive, negative)
            for positive, negative in zip(centers.positive, centers.negative, strict=True)
        )
        value, weight = aggregate(advantage_BU * score_BT, mask_BT, segment_ids(batch))
        yield 1.0, losses.Terms(value, weight, {"centering": mean_over(stop_gradient(size_BT), mask_BT)})


def sampler_states(batch: Batch) -> tuple[Array, None]:
    """Return the last hidden states of the policy that sampled."""
    return known(batch, "sampler_hidden_BTE"), None


def own_parameters(state: TrainState) -> Params:
    """Return the policy's parameters: `gspax replay` has no other head."""
    return state.params


@dataclass(frozen=True)
class CompareWithSampler:
    """Computes the centers of a chunk."""

    loss: Loss

    def __call__(self, logits_CV: Array, sampler_CV: Array, *target: Array | None) -> Centers:
        (_, kept_CS), inside_CV = target, jnp.ones(logits_CV.shape, bool)
        if kept_CS is not None:  # a column of V or more is not used
            inside_CV = kept_CS < logits_CV.shape[-1]
            ids_CS = jnp.where(inside_CV, kept_CS, 0).astype(jnp.int32)
            logits_CV, sampler_CV = (
                jnp.take_along_axis(explicit.whole(x_CV, -1), ids_CS, axis=-1) for x_CV in (logits_CV, sampler_CV)
            )
        logps = (log_softmax(x_CV, where=inside_CV) for x_CV in (logits_CV, sampler_CV))
        logp_CV, sampler_logp_CV = (jnp.where(inside_CV, x_CV, 0) for x_CV in logps)
        return Centers(*(center(self.loss, logp_CV, sampler_logp_CV, inside_CV, sign) for sign in (1.0, -1.0)))


def center(loss: Loss, logp_CV: Array, sampler_logp_CV: Array, inside_CV: Array, sign: float) -> Center:
    """Compute the center of each token's score for advantages of one sign; `inside_CV`: the tokens to sum over."""
    q_CV, p_CV = (jnp.where(inside_CV, stop_gradient(jnp.exp(x_CV)), 0) for x_CV in (sampler_logp_CV, logp_CV))
    weight_CV = stop_gradient(q_CV * token_weight(loss, logp_CV, sampler_logp_CV, sign))
    distance_CV = jnp.abs(weight_CV - p_CV * weight_CV.sum(-1, keepdims=True))
    return Center((weight_CV * logp_CV).sum(-1), distance_CV.sum(-1) / 2)


def token_weight(loss: Loss, logp_CV: Array, old_logp_CV: Array, sign: float) -> Array:
    """Compute the weight w of each token in the gradient -A w ∇log p of a loss, a constant."""
    old_logp_CV, mask_CV = old_logp_CV.astype(jnp.float32), jnp.ones(logp_CV.shape, bool)
    advantage_C = jnp.full(logp_CV.shape[:1], sign, jnp.float32)

    def total(logp_CV: Array) -> Array:
        return loss(logp_CV, old_logp_CV, advantage_C, mask_CV, aggregate=_sum).value.sum()

    slope_CV = jax.grad(total)(stop_gradient(logp_CV).astype(jnp.float32))
    return (-sign * slope_CV).astype(logp_CV.dtype)


def _sum(value_CV: Array, *_: Array | None) -> tuple[Array, Array]:
    return value_CV.sum(-1), jnp.ones(value_CV.shape[:1], jnp.float32)
