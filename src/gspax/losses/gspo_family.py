"""GSPO and its relatives, with one ratio per sequence: GSPO-token, LUSPO, GMPO, and VESPO.

Each loss is a pure function of arrays. The following holds for every policy loss, `grpo_family` included.

Axes: B rows, T tokens. `x_BT[b, t]` belongs to token t of row b; `mask` is True on the response tokens, which the
policy chose, and |y_i| is their number in sequence i. Values outside the mask never matter, NaN and infinity included.
A sequence without a response token weighs nothing.

Each loss maximizes an objective J, so `value` is its negative. For GSPO and GRPO J is the mean over the non-empty
sequences i of a clipped objective:

    r_it = π(y_it)/π_old(y_it)             token ratio
    s_i  = exp(1/|y_i| Σ_t log r_it)       sequence ratio, the geometric mean of the token ratios
    min(x A, clip(x, 1 - clip_low, 1 + clip_high) A)     with x = s_i, s_it or r_it

Every loss of the family is called as `f(logp, old_logp, advantage, mask, *, ...) -> Terms` and shares these keywords:

- `aggregate`: the function from values per token to values and weights per row, `by_sequence`, `by_token` or
  `by_constant` (see `terms`), or any other that is linear in the values. The default is the paper's.
- `segment_ids`: int32 [B, T] if several sequences share a row: 1, 2, ... up to T number the sequences of a row, 0 is
  padding. Then `advantage` is float32 [B, T], the same for all response tokens of a
  sequence (for GSPO-token it need not be). Σ value, Σ weight, gradient and metrics equal those of the unpacked batch.
- `correction`: float32 [B, T], or [B] if not packed. A constant that multiplies each token's objective before it is
  aggregated, to correct for a sampler that differs from the learner. The weights do not change. Losses with one
  objective per sequence (GSPO, LUSPO, GMPO) put the mean of a sequence's factors into its gradient, GSPO-token each.

Differences from the papers:
1. The mean runs over the non-empty sequences of the whole batch rather than over G of one prompt and then over
   prompts. That is the same number as long as every group has the same number of non-empty sequences.
2. There is no KL term (GRPO's β is 0), as in GSPO's own experiments.
3. A log-ratio is clipped to ±25 before `exp`, to avoid overflow in float32. Beyond, it has no gradient. No clip
   range in use reaches this far (e^25 is 7e10).
4. `old_logp` and `advantage` are constants: no gradient flows through them, so `old_logp=logp` gives the on-policy
   gradient.

The metrics are listed in docs/losses.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks, sequences
from gspax.losses.formulas import formula
from gspax.losses.surrogate import (
    CLIPPED,
    LOG_RATIO_LIMIT,
    clipped,
    exp,
    of_sequences,
    policy_terms,
    prepare,
    sequence_log_ratio,
)
from gspax.losses.terms import Aggregate, Terms, by_constant, by_sequence, by_token, reduce
from gspax.losses.traits import Traits, has_traits

Array = jax.Array


@formula(f"ratio = exp(mean_t(logp - old_logp))\n{CLIPPED}")
@has_traits(Traits(ratio="sequence", clip_range=True, correction="sequence", aggregate=by_sequence))
def gspo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the GSPO loss, Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5 to 7): one ratio per sequence.

    J = 1/N Σ_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),   s_i = exp(1/|y_i| Σ_t log r_it).

    Every token of a sequence has the same weight in the gradient, s_i A_i / |y_i|, or none if s_i is clipped.

    >>> logp = jnp.log(jnp.array([[1.0, 0.5, 0.5]]))
    >>> old_logp = jnp.log(jnp.array([[1.0, 0.4, 0.4]]))
    >>> mask = jnp.array([[False, True, True]])
    >>> gspo(logp, old_logp, jnp.ones(1), mask).value.tolist()  # s = 1.25, clipped at 1 + 4e-4
    [-1.0003999471664429]
    >>> gspo(logp, old_logp, -jnp.ones(1), mask).value.tolist()
    [1.25]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is the paper's (Section 5.1).
      clip_high: width of the band above 1, at least 0. The default is the paper's (Section 5.1).
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_sequence`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -min(...), weight = 1; both 0 for a row without response tokens.

    Raises:
      TypeError: an argument is not an array, or of another dtype; a clip width is not a Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    ratio_BU = exp(sequence_log_ratio(x))
    objective_BU, high_BU, low_BU = clipped(ratio_BU, x.advantage_BU, clip_low, clip_high)
    return policy_terms(objective_BU, x, aggregate, high_BU=high_BU, low_BU=low_BU, share=of_sequences)


def gspo_loss(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Compute `reduce(gspo(...))`: the loss and the metrics of one whole batch. Any other loss: `reduce(grpo(...))`."""
    return reduce(
        gspo(
            logp,
            old_logp,
            advantage,
            mask,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregate=aggregate,
            segment_ids=segment_ids,
            correction=correction,
        )
    )


@formula(f"ratio = exp(sg(mean_t(logp - old_logp)) + logp - sg(logp))\n{CLIPPED}")
@has_traits(Traits(ratio="sequence", clip_range=True, correction="token", token_advantage=True, aggregate=by_sequence))
def gspo_token(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the GSPO-token loss (arXiv 2507.18071, eq. 13 and 14): a sequence ratio, an advantage for every token.

    J = 1/N Σ_i 1/|y_i| Σ_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it),
    s_it = sg[s_i] π_it / sg[π_it].

    s_it has the value of s_i and, in the gradient, belongs to token t alone: its weight is s_i A_it / |y_i|, or none if
    clipped. With one advantage for all tokens this is `gspo` in value, clipped set and gradient.

    >>> logp = jnp.log(jnp.array([[1.0, 0.5, 0.5]]))
    >>> old_logp = jnp.log(jnp.array([[1.0, 0.4, 0.4]]))
    >>> mask = jnp.array([[False, True, True]])
    >>> gspo_token(logp, old_logp, jnp.array([[0.0, 1.0, -1.0]]), mask, clip_high=0.05).value.round(3).tolist()
    [0.1]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B, T], or [B] for one advantage per sequence.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is the paper's (Section 5.1).
      clip_high: width of the band above 1, at least 0. The default is the paper's (Section 5.1).
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_sequence`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -1/|y_i| Σ_t min(...), weight = 1; both 0 for an empty row.

    Raises:
      TypeError: an argument is no array, or of another dtype; a clip width is no Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction, advantage_axes=("B", "BT"))
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    log_s_BU = stop_gradient(sequence_log_ratio(x))
    ratio_BT = exp(log_s_BU + (x.logp_BT - stop_gradient(x.logp_BT)))
    objective_BT, high_BT, low_BT = clipped(ratio_BT, x.advantage_BU, clip_low, clip_high)
    return policy_terms(objective_BT, x, aggregate, high_BU=high_BT, low_BU=low_BT, share=of_sequences)


@formula(f"ratio = exp(mean_t(logp - old_logp))\n{CLIPPED}")
@has_traits(Traits(ratio="sequence", clip_range=True, correction="sequence", aggregate=by_constant))
def luspo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    aggregate: Aggregate = by_constant,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the loss of Length-Unbiased Sequence Policy Optimization (arXiv 2602.05261): GSPO times the length.

    J = 1/N Σ_i |y_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),   s_i = exp(1/|y_i| Σ_t log r_it).

    Every token of every sequence weighs s_i A_i in the gradient, or nothing if s_i is clipped: the length is gone from
    it. This is `gspo` summed over tokens: only the widths and the `aggregate` differ.

    >>> logp, mask = jnp.zeros((1, 4)), jnp.array([[False, True, True, True]])
    >>> luspo(logp, logp, jnp.ones(1), mask).value.tolist()
    [-3.0]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is the paper's (Section 5.1).
      clip_high: width of the band above 1, at least 0. The default is the paper's (Section 5.1).
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_constant`, a sum over the tokens.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -|y_i| min(...), weight = 1; both 0 for an empty row.
    """
    return gspo(
        logp,
        old_logp,
        advantage,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        aggregate=aggregate,
        segment_ids=segment_ids,
        correction=correction,
    )


@formula(
    "log_ratio = logp - old_logp\n"
    "held = where(advantage > 0, min(log_ratio, clip_high), max(log_ratio, -clip_low))\n"
    "exp(mean_t(held)) * advantage"
)
@has_traits(Traits(ratio="token", clip_range=True, correction="sequence", aggregate=by_sequence))
def gmpo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the GMPO loss, Geometric-Mean Policy Optimization (arXiv 2507.20673, eq. 4): clip tokens, average logs.

    J = 1/N Σ_i A_i exp(1/|y_i| Σ_t l_it),
    l_it = min(log r_it, clip_high) if A_i > 0,   max(log r_it, -clip_low) if A_i < 0.

    That is GSPO with the clip on each token before the mean. A token weighs g_i A_i / |y_i|, where g_i is the
    geometric mean of the clipped ratios, or nothing if it is clipped itself.

    >>> logp, mask = jnp.array([[0.0, 1.0, 0.2]]), jnp.array([[False, True, True]])
    >>> gmpo(logp, jnp.zeros((1, 3)), jnp.ones(1), mask).value.round(4).tolist()  # exp((0.4 + 0.2) / 2)
    [-1.3499]

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      clip_low: how far log r may fall, at least 0: the ratio's bound is e^-clip_low. The default is the paper's.
      clip_high: how far log r may rise, at least 0: the ratio's bound is e^clip_high. The default is the paper's.
      aggregate: values [B, T] -> value and weight [B]. The paper's is `by_sequence`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -A_i exp(...), weight = 1; both 0 for an empty row.

    Differs from the paper: the mean of the logs, not each log, is clipped to ±25.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    high_BT = (x.advantage_BU > 0) & (x.log_ratio_BT > clip_high)
    low_BT = (x.advantage_BU < 0) & (x.log_ratio_BT < -clip_low)
    held_BT = jnp.where(high_BT, clip_high, jnp.where(low_BT, -clip_low, x.log_ratio_BT))
    mean_BS = sequences.mean(held_BT, x.mask_BT, x.segment_BT)
    objective_BU = exp(sequences.at_tokens(mean_BS, x.segment_BT)) * x.advantage_BU
    return policy_terms(objective_BU, x, aggregate, high_BU=high_BT, low_BU=low_BT)


@formula(
    "log_product = sg(sum_t(logp - old_logp))\n"
    "k = where(advantage >= 0, k_positive, k_negative)\n"
    "rate = where(advantage >= 0, lambda_positive, lambda_negative)\n"
    "exp(k * log_product + rate * (1 - exp(log_product))) * advantage * logp"
)
@has_traits(Traits(ratio="sequence", correction="token", aggregate=by_token))
def vespo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    aggregate: Aggregate = by_token,
    segment_ids: Array | None = None,
    correction: Array | None = None,
) -> Terms:
    """Compute the VESPO loss, Variational Sequence-level Soft Policy Optimization (arXiv 2602.10693, its kernel φ).

    J = 1/Σ_i |y_i| Σ_i Σ_t sg[φ(W_i)] A_i log π_it,   φ(W) = W^k e^(λ(1 - W)),   W_i = Π_t r_it,

    with one pair k, λ for A ≥ 0 and one for A < 0. φ(1) = 1, and φ is largest at W = k/λ. Every token of a sequence has
    the same weight in the gradient, φ(W_i) A_i. W is the product of the ratios, not their geometric mean.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout started from.
      advantage: float32 [B], one per sequence; [B, T] for packed rows.
      mask: bool [B, T], True on response tokens.
      k_positive, lambda_positive: k and λ where A ≥ 0, at least 0. The defaults are from the authors' code.
      k_negative, lambda_negative: k and λ where A < 0, at least 0. The defaults are from the authors' code.
      aggregate: values [B, T] -> value and weight [B]. The authors' is `by_token`.
      segment_ids: None, or int32 [B, T] for packed rows.
      correction: None, or float32 [B] or [B, T], a constant factor of the objective.

    Returns:
      Terms with float32 [B] leaves: value = -Σ_t φ(W_i) A_i log π_it, weight = |y_i|.

    Differs from the paper: log W, not each log r, is clipped to ±25, and log φ is at most 25; the authors put a
    correction into W, where φ softens it too, while `correction` multiplies the objective as in every other loss.
    """
    x = prepare(logp, old_logp, advantage, mask, segment_ids, correction)
    k_positive = checks.finite_at_least_0("k_positive", k_positive)
    k_negative = checks.finite_at_least_0("k_negative", k_negative)
    lambda_positive = checks.finite_at_least_0("lambda_positive", lambda_positive)
    lambda_negative = checks.finite_at_least_0("lambda_negative", lambda_negative)

    log_w_BS = sequences.total(stop_gradient(x.log_ratio_BT), x.mask_BT, x.segment_BT)
    log_w_BU = sequences.at_tokens(log_w_BS, x.segment_BT)
    log_w_BU = jnp.clip(log_w_BU, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k_BU = jnp.where(x.advantage_BU >= 0, k_positive, k_negative)
    lambda_BU = jnp.where(x.advantage_BU >= 0, lambda_positive, lambda_negative)
    log_weight_BU = k_BU * log_w_BU + lambda_BU * -jnp.expm1(log_w_BU)  # expm1(log W) is W - 1
    weight_BU = jnp.exp(jnp.minimum(log_weight_BU, LOG_RATIO_LIMIT))
    return policy_terms(weight_BU * x.advantage_BU * x.logp_BT, x, aggregate)
