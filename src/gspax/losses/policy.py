"""The policy losses: GSPO, GSPO-token and GRPO, each a pure function of arrays.

Letters: B rows (one sequence each), T tokens. `x_BT[b, t]` is about token t of row b; `mask` is True on the response
tokens, those that the policy chose, and |y_i| is their number in row i. What stands outside the mask never
matters, NaN and infinity included. A row without a response token weighs nothing.

All three maximise the mean over the non-empty sequences i of a clipped objective, so each `value` is its negative:

    r_it = π(y_it)/π_old(y_it)             token ratio
    s_i  = exp(1/|y_i| Σ_t log r_it)       sequence ratio, the geometric mean of the token ratios
    min(x A, clip(x, 1 - clip_low, 1 + clip_high) A)     with x = s_i, s_it or r_it

Where this leaves the papers:
1. The mean runs over the non-empty sequences of the whole batch rather than over G of one prompt and then over
   prompts. That is the same number as long as every group has the same number of non-empty sequences.
2. There is no KL term (GRPO's β is 0), as in GSPO's own experiments.
3. A log-ratio beyond ±25 is held there before `exp`, for the sake of float32 alone. It then has no gradient. No
   clip range in use reaches this far (e^25 is 7e10).
4. `old_logp` and `advantage` are constants: no gradient flows through them, so `old_logp=logp` gives the on-policy
   gradient.

Metrics of every loss, about the whole batch once reduced:

- `clip_fraction_tokens`: share of the response tokens whose gradient is cut. GSPO cuts all tokens of a sequence.
- `clip_fraction_sequences`: share of the non-empty sequences with at least one such token.
- `clip_fraction_high`, `clip_fraction_low`: the part cut above 1 + clip_high (A > 0) and below 1 - clip_low (A < 0).
  Shares of sequences for GSPO and GSPO-token (with advantages of both signs a sequence can be in both), of tokens
  for GRPO.
- `ratio_mean`, `ratio_min`, `ratio_max`: the sequence ratio s_i over the non-empty sequences.
- `kl`: mean over the response tokens of r - 1 - log r (the k3 estimate of KL(π_old‖π), tokens drawn from π_old).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax import masked
from gspax.losses import checks
from gspax.losses.terms import Share, Spread, Terms, by_sequence, reduce, share_of_sequences, share_of_tokens

Array = jax.Array

LOG_RATIO_LIMIT = 25.0


def gspo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Terms:
    """Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5 to 7): one ratio and one clip per sequence.

    J = 1/N Σ_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),   s_i = exp(1/|y_i| Σ_t log r_it).

    Every token of a sequence has the same weight in the gradient, s_i A_i / |y_i|, or none if s_i is clipped.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout batch started from.
      advantage: float32 [B], one per sequence.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is the paper's.
      clip_high: width of the band above 1, at least 0. The default is the paper's.

    Returns:
      Terms with float32 [B] leaves: value = -min(...), weight = 1; both 0 for a row without response tokens.

    Raises:
      TypeError: an argument is no array, or of another dtype; a clip width is no Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    logp_BT, old_logp_BT, advantage_B, mask_BT = checks.policy_inputs(logp, old_logp, advantage, mask)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)

    log_ratio_BT = _log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_B = _exp(masked.mean(log_ratio_BT, mask_BT, axis=-1))
    objective_B, high_B, low_B = _clipped(ratio_B, stop_gradient(advantage_B), clip_low, clip_high)

    weight_B = mask_BT.any(-1).astype(jnp.float32)
    value_B = jnp.where(weight_B > 0, -objective_B, 0)
    high_BT = jnp.broadcast_to(high_B[:, None], mask_BT.shape)
    low_BT = jnp.broadcast_to(low_B[:, None], mask_BT.shape)
    return Terms(value_B, weight_B, _metrics(log_ratio_BT, high_BT, low_BT, mask_BT, share_of_sequences))


def gspo_token(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Terms:
    """GSPO-token (arXiv 2507.18071, eq. 13 and 14): the sequence ratio, but an advantage for every token.

    J = 1/N Σ_i 1/|y_i| Σ_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it),
    s_it = sg[s_i] π_it / sg[π_it].

    s_it has the value of s_i and, in the gradient, belongs to token t alone: its weight is s_i A_it / |y_i|, or none if
    clipped. With one advantage for all tokens this is `gspo` in value, clipped set and gradient.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout batch started from.
      advantage: float32 [B, T], or [B] for one advantage per sequence.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is the paper's.
      clip_high: width of the band above 1, at least 0. The default is the paper's.

    Returns:
      Terms with float32 [B] leaves: value = -1/|y_i| Σ_t min(...), weight = 1; both 0 for an empty row.

    Raises:
      TypeError: an argument is no array, or of another dtype; a clip width is no Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    logp_BT, old_logp_BT, advantage, mask_BT = checks.policy_inputs(
        logp, old_logp, advantage, mask, advantage_axes=("B", "BT")
    )
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)
    advantage_BT = advantage if advantage.ndim == 2 else jnp.broadcast_to(advantage[:, None], mask_BT.shape)

    log_ratio_BT = _log_ratio(logp_BT, old_logp_BT, mask_BT)
    log_ratio_B = stop_gradient(masked.mean(log_ratio_BT, mask_BT, axis=-1))
    # log(π_it / sg[π_it]) is 0 and carries the gradient.
    own_BT = _log_ratio(logp_BT, logp_BT, mask_BT)
    ratio_BT = _exp(log_ratio_B[:, None] + own_BT)
    objective_BT, high_BT, low_BT = _clipped(ratio_BT, stop_gradient(advantage_BT), clip_low, clip_high)

    value_B, weight_B = by_sequence(-objective_BT, mask_BT)
    return Terms(value_B, weight_B, _metrics(log_ratio_BT, high_BT, low_BT, mask_BT, share_of_sequences))


def grpo(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
) -> Terms:
    """Group Relative Policy Optimization (arXiv 2402.03300, eq. 3, with β = 0): a ratio and a clip per token.

    J = 1/N Σ_i 1/|y_i| Σ_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i),   r_it = π_it / π_old,it.

    A token's weight in the gradient is r_it A_i / |y_i|, or none if r_it is clipped.

    Args:
      logp: float32 [B, T], log-probability of each token under the policy that is trained.
      old_logp: float32 [B, T], the same under the policy that the rollout batch started from.
      advantage: float32 [B], one per sequence.
      mask: bool [B, T], True on response tokens.
      clip_low: width of the band below 1, at least 0. The default is that of the GSPO paper's GRPO baseline.
      clip_high: width of the band above 1, at least 0. The default is that of the GSPO paper's GRPO baseline.

    Returns:
      Terms with float32 [B] leaves: value = -1/|y_i| Σ_t min(...), weight = 1; both 0 for an empty row.

    Raises:
      TypeError: an argument is no array, or of another dtype; a clip width is no Python number.
      ValueError: shapes do not fit; a clip width is negative.
    """
    logp_BT, old_logp_BT, advantage_B, mask_BT = checks.policy_inputs(logp, old_logp, advantage, mask)
    clip_low, clip_high = checks.clip_range(clip_low, clip_high)
    advantage_BT = jnp.broadcast_to(advantage_B[:, None], mask_BT.shape)

    log_ratio_BT = _log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_BT = _exp(log_ratio_BT)
    objective_BT, high_BT, low_BT = _clipped(ratio_BT, stop_gradient(advantage_BT), clip_low, clip_high)

    value_B, weight_B = by_sequence(-objective_BT, mask_BT)
    return Terms(value_B, weight_B, _metrics(log_ratio_BT, high_BT, low_BT, mask_BT, share_of_tokens))


def gspo_loss(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Array, dict[str, Array]]:
    """`reduce(gspo(...))`: the scalar loss and the metrics of one whole batch."""
    return reduce(gspo(logp, old_logp, advantage, mask, clip_low=clip_low, clip_high=clip_high))


def gspo_token_loss(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Array, dict[str, Array]]:
    """`reduce(gspo_token(...))`: the scalar loss and the metrics of one whole batch."""
    return reduce(gspo_token(logp, old_logp, advantage, mask, clip_low=clip_low, clip_high=clip_high))


def grpo_loss(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, *, clip_low: float = 0.2, clip_high: float = 0.27
) -> tuple[Array, dict[str, Array]]:
    """`reduce(grpo(...))`: the scalar loss and the metrics of one whole batch."""
    return reduce(grpo(logp, old_logp, advantage, mask, clip_low=clip_low, clip_high=clip_high))


def _log_ratio(logp_BT: Array, old_logp_BT: Array, mask_BT: Array) -> Array:
    """log r, 0 outside the mask. Masked here, before any `exp`: behind it, a NaN would reach the gradient."""
    return jnp.where(mask_BT, logp_BT - stop_gradient(old_logp_BT), 0)


def _exp(log_ratio: Array) -> Array:
    """exp of a log-ratio held within ±25, so that float32 cannot overflow; ±25 itself still has its gradient."""
    limit = jnp.sign(log_ratio) * LOG_RATIO_LIMIT
    return jnp.exp(jnp.where(jnp.abs(log_ratio) > LOG_RATIO_LIMIT, limit, log_ratio))


def _clipped(ratio: Array, advantage: Array, clip_low: float, clip_high: float) -> tuple[Array, Array, Array]:
    """min(r A, clip(r, 1 - low, 1 + high) A), elementwise, and where it is cut from above and from below.

    Written with the two cases in which the minimum is the constant bound. `jnp.minimum` gives the same value, but
    splits its gradient on ties, and r A rounds to the bound's product before r rounds to the bound: then the
    gradient would be cut in half and the metrics would say that it was cut or that it was not.
    """
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    held = jnp.where(high, 1 + clip_high, jnp.where(low, 1 - clip_low, ratio))
    return held * advantage, high, low


def _metrics(
    log_ratio_BT: Array,
    high_BT: Array,
    low_BT: Array,
    mask_BT: Array,
    share: Callable[[Array, Array], Share],
) -> dict[str, Share | Spread]:
    """The metrics that the module's docstring lists; `share` says what high and low are shares of."""
    log_ratio_BT = stop_gradient(log_ratio_BT)
    ratio_B = _exp(masked.mean(log_ratio_BT, mask_BT, axis=-1))
    held_BT = jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_BT = jnp.expm1(held_BT) - held_BT  # expm1: near 0 the difference r - 1 would cancel
    return {
        "clip_fraction_tokens": share_of_tokens(high_BT | low_BT, mask_BT),
        "clip_fraction_sequences": share_of_sequences(high_BT | low_BT, mask_BT),
        "clip_fraction_high": share(high_BT, mask_BT),
        "clip_fraction_low": share(low_BT, mask_BT),
        "ratio": Spread(ratio_B, mask_BT.any(-1)),
        "kl": Share(masked.sum(k3_BT, mask_BT, axis=-1), jnp.sum(mask_BT, -1, dtype=jnp.float32)),
    }
