"""Losses without an old policy: DIS, IPO, and DRO. Their ratio is to the policy that sampled the tokens.

`old_logp` is the sampler's log-probs: in a run, they come with the tokens. No pass of the learner recomputes
them, and one ratio r = π/μ covers the staleness of the samples, rounding, and the updates since, where the other
losses bound π/π_old and leave π_old/μ to a correction. `Traits.old_logp` tells the trainer.

The axes, the keywords that every loss takes, and the differences from the papers are described in `losses.gspo_family`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks
from gspax.losses.formulas import formula
from gspax.losses.surrogate import exp, limited_log_ratio, policy_terms, prepare, squared, weighted_terms
from gspax.losses.terms import Aggregate, Terms, by_token
from gspax.losses.traits import Traits, has_traits

Array = jax.Array


@formula(
    "ratio = sg(exp(logp - old_logp))\n"
    "where((ratio < 1 - clip_low) | (ratio > 1 + clip_high), 0, ratio) * advantage * logp"
)
@has_traits(Traits(ratio="token", clip_range=True, correction="token", old_logp="sampler", aggregate=by_token))
def dis(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.5,
    clip_high: float = 1.0,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the direct double-sided importance sampling loss (GLM-5, arXiv 2602.15763, section 4; SAO, 2607.07508).

    J = 1/Σ_i |y_i| Σ_i Σ_t sg[f(r_it)] A_i log π_it,   f(r) = r if 1 - clip_low ≤ r ≤ 1 + clip_high, else 0.

    A token's weight in the gradient is f(r_it) A_i. Unlike in GRPO, a ratio out of range cuts the gradient whatever the
    sign of A_i: such a token is no longer one that π would sample, or μ is not the policy it was taken for. It stays in
    the denominator.

    >>> old_logp, logp = jnp.log(jnp.array([[1.0, 0.4, 0.1]])), jnp.log(jnp.array([[1.0, 0.5, 0.3]]))
    >>> mask = jnp.array([[False, True, True]])  # r = 1.25 and 3
    >>> jax.grad(lambda logp: dis(logp, old_logp, -jnp.ones(1), mask).value.sum())(logp).tolist()
    [[0.0, 1.25, 0.0]]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that sampled the tokens.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low, clip_high: widths of the band below and above 1, at least 0. Neither paper gives them. The defaults are
        the range from 1/2 to 2 that GLM-5 corrects the sampler's ratio with elsewhere (its eq. 1).
      aggregate: values [B, T] -> value and weight [B]; `by_token`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -Σ_t f(r_it) A_i log π_it, weight = |y_i|.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    ratio_BT = stop_gradient(exp(x.log_ratio_BT))
    return weighted_terms(ratio_BT, x, aggregate, high_BT=ratio_BT > 1 + clip_high, low_BT=ratio_BT < 1 - clip_low)


@formula("moved = abs(exp(logp) - exp(old_logp))\nwhere(moved > threshold, 0, exp(logp - old_logp)) * advantage")
@has_traits(Traits(ratio="token", correction="token", old_logp="sampler", aggregate=by_token))
def ipo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    threshold: float = 0.1,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute prime-rl's `ipo` loss: a token counts while its probability has moved by at most the threshold.

    J = 1/Σ_i |y_i| Σ_i Σ_t M_it r_it A_i,   M_it = 0 if |π_it - μ_it| > threshold, else 1.

    A token's weight in the gradient is M_it r_it A_i. This is `dis` with a band for the probability instead of the
    ratio, so rare tokens count longer and frequent ones stop sooner, and `dppo_tv` with a mask for either sign of A.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that sampled the tokens.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      threshold: largest change of a probability, at least 0. prime-rl's default was 0.1, and is 0.3 in November 2026.
      aggregate: values [B, T] -> value and weight [B]; `by_token`, as in prime-rl.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    threshold = checks.at_least_0("threshold", threshold)

    prob_BT, old_prob_BT = (jnp.exp(jnp.minimum(y_BT, 0)) for y_BT in (stop_gradient(x.logp_BT), x.old_logp_BT))
    moved_BT = prob_BT - old_prob_BT
    high_BT, low_BT = moved_BT > threshold, moved_BT < -threshold
    ratio_BT = jnp.where(high_BT | low_BT, 0, exp(x.log_ratio_BT))
    return policy_terms(ratio_BT * x.advantage_BU, x, aggregate, high_BU=high_BT, low_BU=low_BT)


@formula("advantage * logp - beta / 2 * (logp - old_logp)**2")
@has_traits(Traits(correction="token", old_logp="sampler", aggregate=by_token))
def dro(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    beta: float = 0.1,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the Direct Reward Optimization loss (arXiv 2405.19107) by token, as Kimi k1.5 (arXiv 2501.12599) does.

    J = 1/Σ_i |y_i| Σ_i Σ_t [A_i log π_it - β/2 log²(π_it/μ_it)].

    A token's weight in the gradient is A_i - β log(π_it/μ_it): there is no ratio and no clip. The square pulls a token
    back, the further it has moved the harder, until A_i / β is its log-ratio. Kimi's A is R minus the group's mean
    (`advantages.center`).

    >>> old_logp, logp = jnp.zeros((1, 2)), jnp.array([[0.0, -2.0]])
    >>> mask = jnp.array([[False, True]])
    >>> jax.grad(lambda logp: dro(logp, old_logp, jnp.ones(1), mask, beta=0.5).value.sum())(logp).tolist()
    [[0.0, -2.0]]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that sampled the tokens.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      beta: β, at least 0 and finite. The default is from ROLL's `kimi15` loss.
      aggregate: values [B, T] -> value and weight [B]; `by_token`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Differs from the papers: the square is per token, as in tinker, not of a whole response; a log-ratio is clipped
    to ±25 in the square, and as a factor of its gradient.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    beta = checks.finite_at_least_0("beta", beta)

    square_BT = squared(limited_log_ratio(x.logp_BT, x.old_logp_BT, x.mask_BT), x.logp_BT)
    return policy_terms(x.advantage_BU * x.logp_BT - beta / 2 * square_BT, x, aggregate)
