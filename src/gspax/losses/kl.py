"""KL to a reference policy, KL(π‖π_ref): as a value, and as a loss term. The two are different things.

Axes: B rows (one sequence each, unless packed), T tokens. `logp` is of the policy that is trained, `ref_logp` of the
reference, a constant; both of tokens that the policy sampled. For a token let x = log π - log π_ref. Then (Schulman
2020, "Approximating KL divergence")

    k1 = x,   k2 = x²/2,   k3 = exp(-x) - 1 + x

are estimates of its KL: k1 and k3 are unbiased, k3 is never negative and varies less, k2 is biased.

**As values** `k1`, `k2`, `k3` give [B, T] without a gradient, for metrics or to be subtracted from a reward. None of
them is a loss: what matters there is the expectation of the gradient. That of k1 is E[∇ log π] = 0, the reference
drops out; that of k3 is the gradient of KL(π_ref‖π), the other direction; that of k2 is E[x ∇ log π], which is the
right one (arXiv 2510.01555, 2512.21852).

**As loss terms** three functions give `Terms` whose gradient is written out, whatever the value:

- `token_kl`: the KL of each next token, in the given contexts. Joins a loss of the same aggregation.
- `sequence_kl`: the KL of whole sequences, in which a token also accounts for the contexts it leads to.
- `grpo_kl`: the term of GRPO as published, for comparison.

`add_penalty(terms, penalty, coefficient=...)` adds one to a policy loss. Tests compare the first two with the exact
gradient of the KL of a small policy, by enumeration of all sequences.

Difference from the sources: x is clipped to ±25, in the value and as a factor of the gradient, so that `exp` cannot
overflow; such a token is still pulled back.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from gspax.losses import checks, sequences
from gspax.losses.formulas import formula
from gspax.losses.surrogate import compare_logp, k3_of, sampling_ratio, with_gradient
from gspax.losses.terms import Aggregate, Metrics, Terms, by_constant, by_sequence, mean_over

Array = jax.Array


@formula("k1(logp - ref_logp)")
def k1(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """Compute log π - log π_ref, float32 [B, T], 0 outside the mask, without a gradient. Unbiased; can be negative.

    >>> logp, ref_logp = jnp.log(jnp.array([[1.0, 0.5]])), jnp.log(jnp.array([[1.0, 0.25]]))
    >>> [float(k(logp, ref_logp, jnp.array([[False, True]]))[0, 1].round(3)) for k in (k1, k2, k3)]
    [0.693, 0.24, 0.193]
    """
    return compare_logp(logp, ref_logp, mask, None)[1]


@formula("k2(logp - ref_logp)")
def k2(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """Compute (log π - log π_ref)² / 2, float32 [B, T], 0 outside the mask, no gradient. Biased; never negative."""
    return k1(logp, ref_logp, mask) ** 2 / 2


@formula("k3(logp - ref_logp)")
def k3(logp: Array, ref_logp: Array, mask: Array) -> Array:
    """Compute π_ref/π - 1 - log(π_ref/π), float32 [B, T], 0 outside the mask, no gradient. Unbiased; never negative."""
    return k3_of(k1(logp, ref_logp, mask))


@formula(lambda keywords: f"exp(logp - {'sg(logp)' if 'old_logp' in keywords else 'old_logp'}) * k3(logp - ref_logp)")
def token_kl(
    logp: Array,
    ref_logp: Array,
    mask: Array,
    *,
    old_logp: Array | None = None,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute Σ_t KL(π(·|c_t)‖π_ref(·|c_t)) over the given contexts c_t, aggregated like the policy loss it joins.

    The value is k3 of each token and the gradient x ∇ log π, as for k2. For a token sampled from π in its context the
    expected value is the KL of the next token and the expected gradient is its gradient. Contexts are data here:
    what a token does to the contexts after it is left out, as in all losses per token (`sequence_kl` includes it).

    With `old_logp` the tokens are taken as sampled from π_old, and value and gradient are multiplied by r = π/π_old.
    Both expectations then stay right after updates; contexts are still sampled from π_old. This is the unbiased KL
    estimate of DeepSeek-V3.2 (arXiv 2512.02556, eq. 7): the gradient of r·k3 through both is r x ∇ log π.

    >>> logp, ref_logp = jnp.log(jnp.array([[1.0, 0.5]])), jnp.log(jnp.array([[1.0, 0.25]]))
    >>> mask = jnp.array([[False, True]])
    >>> token_kl(logp, ref_logp, mask).value.round(3).tolist()
    [0.193]
    >>> jax.grad(lambda logp: token_kl(logp, ref_logp, mask).value.sum())(logp).round(3).tolist()
    [[0.0, 0.693]]

    Args:
      logp: float32 [B, T], of the policy that is trained.
      ref_logp: float32 [B, T], of the reference; a constant.
      mask: bool [B, T], True on response tokens.
      old_logp: float32 [B, T], of the policy that sampled the tokens; a constant. None: the policy that is trained.
      aggregate: values [B, T] -> value and weight [B], the one of the policy loss.
      segment_ids: None, or int32 [B, T] for packed rows.

    Returns:
      Terms with float32 [B] leaves and the metrics `ref_kl` (k3) and `ref_kl_k1`, means over the response tokens.

    Raises:
      TypeError, ValueError: an argument is no array, or of another dtype or shape.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, ref_logp, mask, segment_ids)
    ratio_BT = sampling_ratio(logp_BT, old_logp, mask_BT)
    value_BT = with_gradient(ratio_BT * k3_of(x_BT), ratio_BT * x_BT, logp_BT)
    return Terms(*aggregate(value_BT, mask_BT, segment_BT), _metrics(x_BT, mask_BT))


@formula("sg(logp - ref_logp) + sg(from_t(logp - ref_logp)) * (logp - sg(logp))")
def sequence_kl(logp: Array, ref_logp: Array, mask: Array, *, segment_ids: Array | None = None) -> Terms:
    """Compute KL(π‖π_ref) of whole sequences: E[Σ_t x_t], of sequences sampled from π.

    Its gradient is E[Σ_t (Σ_{u≥t} x_u) ∇ log π_t]: what a token does to the tokens after it counts. Earlier ones are
    left out because their expectation is 0. The value is Σ_t x_t (k1), and so can be negative.

    Sums over tokens are not divided by their number, which the policy influences: every non-empty sequence has the
    weight 1. So this joins losses aggregated by sequence, and its scale against them grows with the length. The
    expectation is right for sequences of the policy itself, that is before the rollout's first update. The
    tokens of a packed sequence need not be adjacent, but must be in order.

    Args, Raises:
      as `token_kl`.

    Returns:
      Terms with float32 [B] leaves and the metrics `ref_kl` (k3) and `ref_kl_k1`, means over the response tokens.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, ref_logp, mask, segment_ids)
    value_BT = with_gradient(x_BT, sequences.to_go(x_BT, segment_BT), logp_BT)
    return Terms(*by_constant(value_BT, mask_BT, segment_BT), _metrics(x_BT, mask_BT))


@formula("k3(logp - ref_logp)")
def grpo_kl(
    logp: Array,
    ref_logp: Array,
    mask: Array,
    *,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute the KL term of GRPO as published: k3, differentiated (arXiv 2402.03300, eq. 4).

    Its gradient (1 - π_ref/π) ∇ log π has the expectation ∇ KL(π_ref‖π), the KL of the other direction, not of
    the KL which k3 estimates. The two agree to first order where π is near π_ref. To regularize, use `token_kl`.

    Args, Returns, Raises:
      as `token_kl`.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, ref_logp, mask, segment_ids)
    value_BT = with_gradient(k3_of(x_BT), -jnp.expm1(-x_BT), logp_BT)
    return Terms(*aggregate(value_BT, mask_BT, segment_BT), _metrics(x_BT, mask_BT))


def add_penalty(terms: Terms, penalty: Terms, *, coefficient: float) -> Terms:
    """Add `coefficient` times a penalty of the same aggregation to the policy loss, row by row, and join the metrics.

    The sum is divided by the weights of `terms`, so the penalty's must be equal: both aggregated by sequence, or
    both by token. Rows stay rows, so any split into microbatches gives the same gradient.

    >>> one = jnp.ones(1)
    >>> add_penalty(Terms(3 * one, one, {}), Terms(2 * one, one, {}), coefficient=0.5).value.tolist()
    [4.0]

    Raises:
      TypeError: coefficient is no Python number.
      ValueError: numbers of rows differ; coefficient is not finite; a metric is in both.
    """
    checks.number("coefficient", coefficient)
    if not math.isfinite(coefficient):
        raise ValueError(f"coefficient must be finite; got {coefficient}")
    checks.same_shape("penalty", penalty.value, "terms in its rows", terms.value.shape)
    if both := sorted(terms.metrics.keys() & penalty.metrics.keys()):
        raise ValueError(f"penalty must not have metrics that terms has; got {both} in both")
    value_B = terms.value + float(coefficient) * penalty.value
    return Terms(value_B, terms.weight, {**terms.metrics, **penalty.metrics})


def _metrics(x_BT: Array, mask_BT: Array) -> Metrics:
    return {"ref_kl": mean_over(k3_of(x_BT), mask_BT), "ref_kl_k1": mean_over(x_BT, mask_BT)}
