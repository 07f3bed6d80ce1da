"""GRPO and its relatives, with one ratio per token: Dr. GRPO, DAPO, importance sampling, CISPO, SAPO, and DPPO.

The axes, the keywords that every loss takes, and the differences from the papers are described in `losses.gspo_family`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks
from gspax.losses.formulas import formula
from gspax.losses.surrogate import CLIPPED, Inputs, clipped, exp, policy_terms, prepare, weighted_terms
from gspax.losses.terms import Aggregate, Terms, by_constant, by_sequence, by_token
from gspax.losses.traits import Traits, has_traits

Array = jax.Array

_STOPPED = (  # of DPPO, with `far`
    "onward = advantage * (logp - old_logp) > 0\n"
    "sg(where(far & onward, 0, min(exp(logp - old_logp), ratio_limit))) * advantage * logp"
)


def _clipped_tokens(keywords: Mapping[str, Any]) -> str:
    """Return the formula of losses with a clipped ratio per token."""
    ratio = "ratio = exp(logp - old_logp)\n"
    if keywords.get("dual_clip") is None:
        return ratio + CLIPPED
    return f"{ratio}held = {CLIPPED}\nwhere(advantage < 0, max(held, dual_clip * advantage), held)"


@formula(_clipped_tokens)
@has_traits(Traits(ratio="token", clip_range=True, correction="token", aggregate=by_sequence))
def grpo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    dual_clip: float | None = None,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the loss of Group Relative Policy Optimization (arXiv 2402.03300, eq. 3, β = 0): a ratio per token.

    J = 1/N Σ_i 1/|y_i| Σ_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i),   r_it = π_it / π_old,it.

    A token's weight in the gradient is r_it A_i / |y_i|, or none if r_it is clipped. With `dual_clip` c the objective
    of a token with A_i < 0 is max(min(...), c A_i) (dual-clip PPO, arXiv 1912.09729): none either if r_it > c.

    >>> logp = jnp.log(jnp.array([[1.0, 0.5, 0.3]]))
    >>> old_logp = jnp.log(jnp.array([[1.0, 0.4, 0.4]]))
    >>> mask = jnp.array([[False, True, True]])
    >>> grpo(logp, old_logp, jnp.ones(1), mask, clip_high=0.2).value.round(3).tolist()  # (1.2 + 0.75) / 2
    [-0.975]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is from the GSPO paper's GRPO (Section 5.1).
      clip_high: width of the band above 1, at least 0. The default is from the GSPO paper's GRPO (Section 5.1).
      dual_clip: None, or the largest ratio that matters where A < 0, above 1. It bounds the ratio itself: 3 means 3.
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_sequence`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -1/|y_i| Σ_t min(...), weight = 1; both 0 for an empty row.

    Raises:
      TypeError: an argument is no array, or of another dtype; a clip width is no Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)
    dual_clip = checks.dual_clip(dual_clip)

    ratio_BT = exp(x.log_ratio_BT)
    objective_BT, high_BT, low_BT = clipped(ratio_BT, x.advantage_BU, clip_low, clip_high, dual_clip)
    return policy_terms(objective_BT, x, aggregate, high_BU=high_BT, low_BU=low_BT)


@formula(_clipped_tokens)
@has_traits(Traits(ratio="token", clip_range=True, correction="token", aggregate=by_constant))
def dr_grpo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregate: Aggregate = by_constant,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the Dr. GRPO loss (arXiv 2503.20783, Section 3.2): GRPO without 1/|y_i|, so lengths change no weights.

    J = 1/N Σ_i Σ_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i).

    A token's weight in the gradient is r_it A_i, or none if r_it is clipped. The paper also leaves out the division of
    the advantages by their standard deviation: pass `advantages.center`, not `advantages.standardize`.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low, clip_high: widths of the band below and above 1, at least 0. The defaults are the paper's (Table 6).
      dual_clip: None, or the largest ratio that matters where A < 0, above 1; see `grpo`.
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_constant`; its code divides by the longest
        response allowed, `functools.partial(by_constant, length=...)`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    return grpo(
        logp,
        old_logp,
        advantage,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        aggregate=aggregate,
        segment_ids=segment_ids,
        correction=correction,
    )


@formula(_clipped_tokens)
@has_traits(Traits(ratio="token", clip_range=True, correction="token", aggregate=by_token))
def dapo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute DAPO's loss (arXiv 2503.14476, eq. 8 and 12): GRPO with a higher upper bound, all tokens weigh the same.

    J = 1/Σ_i |y_i| Σ_i Σ_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i).

    A token's weight in the gradient is r_it A_i, or none if r_it is clipped. The rest of DAPO is about the batch:
    dynamic sampling drops groups of equal rewards, and overlong responses are punished or masked.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low, clip_high: widths of the band below and above 1, at least 0. The defaults are the paper's (Section 4.1).
      dual_clip: None, or the largest ratio that matters where A < 0, above 1; see `grpo`.
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_token`; its sum runs over one group, ours
        over the batch.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    return grpo(
        logp,
        old_logp,
        advantage,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        aggregate=aggregate,
        segment_ids=segment_ids,
        correction=correction,
    )


@formula("exp(logp - old_logp) * advantage")
@has_traits(Traits(ratio="token", correction="token", aggregate=by_sequence))
def importance_sampling(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the importance-weighted policy gradient loss, without any bound: the reference for all others.

    J = 1/N Σ_i 1/|y_i| Σ_t r_it A_i.

    A token's weight in the gradient is r_it A_i / |y_i|. On policy, where r = 1, this is the gradient of REINFORCE
    (Williams, Machine Learning 8, 1992), 1/|y_i| Σ_t A_i ∇log π_it, as is the gradient of every loss of the family with
    the same `aggregate`.

    >>> old_logp, logp = jnp.log(jnp.array([[1.0, 0.25]])), jnp.log(jnp.array([[1.0, 0.5]]))
    >>> importance_sampling(logp, old_logp, jnp.ones(1), jnp.array([[False, True]])).value.tolist()
    [-2.0]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      aggregate: values [B, T] -> value and weight [B]; `by_sequence` as in GRPO.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    return policy_terms(exp(x.log_ratio_BT) * x.advantage_BU, x, aggregate)


@formula("sg(clip(exp(logp - old_logp), 1 - clip_low, 1 + clip_high)) * advantage * logp")
@has_traits(Traits(ratio="token", clip_range=True, clip_low_limit=math.inf, correction="token", aggregate=by_token))
def cispo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the CISPO loss (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): clip the weight, cut no token's gradient.

    J = 1/Σ_i |y_i| Σ_i Σ_t sg[clip(r_it, 1 - clip_low, 1 + clip_high)] A_i log π_it.

    A token's weight in the gradient is clip(r_it) A_i, whatever the sign of A_i.

    >>> old_logp, logp = jnp.log(jnp.array([[1.0, 0.1]])), jnp.log(jnp.array([[1.0, 0.8]]))
    >>> mask = jnp.array([[False, True]])
    >>> jax.grad(lambda logp: cispo(logp, old_logp, jnp.ones(1), mask).value.sum())(logp).tolist()  # r = 8, held at 5
    [[0.0, -5.0]]

    Both widths are distances from 1, as in the paper: the default 4 bounds the weight by 5. Some frameworks call the
    bound itself `epsilon_high`; their 5 is 4 here. The metrics `clip_fraction_*` count tokens with a clipped weight.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. With 1 or more there is no lower bound, as in the paper.
      clip_high: width of the band above 1, at least 0. The paper tunes it and gives no number; 4 is a common choice.
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_token`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    ratio_BT = stop_gradient(exp(x.log_ratio_BT))
    weight_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    objective_BT = weight_BT * x.advantage_BU * x.logp_BT
    return policy_terms(objective_BT, x, aggregate, high_BU=ratio_BT > 1 + clip_high, low_BU=ratio_BT < 1 - clip_low)


@formula(
    "tau = where(advantage > 0, tau_positive, tau_negative)\n"
    "4 / tau * sigmoid(tau * (exp(logp - old_logp) - 1)) * advantage"
)
@has_traits(Traits(ratio="token", correction="token", aggregate=by_sequence))
def sapo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the loss of Soft Adaptive Policy Optimization (arXiv 2511.20347, eq. 5 and 6): a gate instead of a clip.

    J = 1/N Σ_i 1/|y_i| Σ_t f(r_it) A_i,   f(r) = 4/τ σ(τ (r - 1)),   τ = tau_positive if A_i > 0, else tau_negative.

    A token's weight in the gradient is 4 p (1 - p) r_it A_i / |y_i| with p = σ(τ (r_it - 1)): r_it near 1, and less and
    less away from it, the sooner the larger τ (eq. 7 and 8). f(1) is 2/τ: only the gradient equals the other losses' on
    policy.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      tau_positive, tau_negative: temperatures, finite and above 0. The defaults are the paper's (Section 5.1).
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_sequence`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    tau_positive = checks.positive("tau_positive", tau_positive)
    tau_negative = checks.positive("tau_negative", tau_negative)

    tau_BU = jnp.where(x.advantage_BU > 0, tau_positive, tau_negative)
    gate_BT = 4 / tau_BU * jax.nn.sigmoid(tau_BU * (exp(x.log_ratio_BT) - 1))
    return policy_terms(gate_BT * x.advantage_BU, x, aggregate)


@formula(f"far = abs(exp(logp) - exp(old_logp)) > threshold\n{_STOPPED}")
@has_traits(Traits(ratio="token", correction="token", aggregate=by_token))
def dppo_tv(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    threshold: float = 0.15,
    ratio_limit: float = 20.0,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the loss of Divergence Proximal Policy Optimization with binary total variation (arXiv 2602.04879).

    J = 1/Σ_i |y_i| Σ_i Σ_t M_it sg[min(r_it, c)] A_i log π_it,   D_it = |π_it - π_old,it|,
    M_it = 0 if D_it > threshold and the update would move on: r_it > 1 with A_i > 0, or r_it < 1 with A_i < 0; else 1.

    A token's weight in the gradient is min(r_it, c) A_i, or none where M_it = 0. The bound is on how far the
    probability of the sampled token moved, not its ratio: a rare token may become many times as likely, while a
    frequent one is stopped at a ratio near 1.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      threshold: largest divergence, at least 0. The default is from verl's example; SkyRL's is 0.2.
      ratio_limit: c, finite and above 0. The default is verl's.
      aggregate: values [B, T] -> value and weight [B]. `by_token` as in two published implementations.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Differs from the paper: only its binary divergences are here, which need the probability of the sampled token alone.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    return _dppo(_binary_tv, x, threshold, ratio_limit, aggregate)


@formula(
    f"p = exp(old_logp)\nq = exp(logp)\nfar = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)) > threshold\n{_STOPPED}"
)
@has_traits(Traits(ratio="token", correction="token", aggregate=by_token))
def dppo_kl(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    threshold: float = 0.05,
    ratio_limit: float = 20.0,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the loss of Divergence Proximal Policy Optimization with binary KL (arXiv 2602.04879); see `dppo_tv`.

    D_it = p log(p/q) + (1 - p) log((1 - p)/(1 - q))   with p = π_old,it and q = π_it.

    A token's weight in the gradient is min(r_it, c) A_i, or none where D_it > threshold and the update would move on.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      threshold: largest divergence, at least 0. The default is from verl's example and SkyRL.
      ratio_limit: c, finite and above 0. The default is verl's.
      aggregate: values [B, T] -> value and weight [B]. `by_token` as in two published implementations.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Differs from the paper: in D, 1 - p and 1 - q are at least 2^-24, so that none is 0.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    return _dppo(_binary_kl, x, threshold, ratio_limit, aggregate)


def _binary_kl(log_p_BT: Array, log_q_BT: Array) -> Array:
    p_BT, q_BT = jnp.exp(log_p_BT), jnp.exp(log_q_BT)
    not_p_BT, not_q_BT = (jnp.maximum(1 - x_BT, 2.0**-24) for x_BT in (p_BT, q_BT))
    return p_BT * (log_p_BT - log_q_BT) + not_p_BT * jnp.log(not_p_BT / not_q_BT)


def _binary_tv(log_p_BT: Array, log_q_BT: Array) -> Array:
    return jnp.abs(jnp.exp(log_q_BT) - jnp.exp(log_p_BT))


def _dppo(
    divergence: Callable[[Array, Array], Array], x: Inputs, threshold: float, ratio_limit: float, aggregate: Aggregate
) -> Terms:
    """Compute the loss of `dppo_tv` and `dppo_kl`; `divergence` is D from log π_old and log π, both at most 0."""
    threshold = checks.at_least_0("threshold", threshold)
    ratio_limit = checks.positive("ratio_limit", ratio_limit)

    log_p_BT, log_q_BT = jnp.minimum(x.old_logp_BT, 0), jnp.minimum(stop_gradient(x.logp_BT), 0)
    far_BT = divergence(log_p_BT, log_q_BT) > threshold
    high_BT = far_BT & (x.advantage_BU > 0) & (x.log_ratio_BT > 0)
    low_BT = far_BT & (x.advantage_BU < 0) & (x.log_ratio_BT < 0)
    ratio_BT = jnp.minimum(stop_gradient(exp(x.log_ratio_BT)), ratio_limit)
    return weighted_terms(ratio_BT, x, aggregate, high_BT=high_BT, low_BT=low_BT)
