"""From an objective per token to `Terms`: correction, aggregation and the metrics that every policy loss gives.

The metrics are about the whole batch once reduced, and no gradient flows through them:

- `clip_fraction_tokens`: share of the response tokens at which the loss holds something at a bound. For all losses but
  CISPO this means that their gradient is cut; for CISPO that their weight is held. GSPO cuts all tokens of a sequence.
- `clip_fraction_sequences`: share of the non-empty sequences with at least one such token.
- `clip_fraction_high`, `clip_fraction_low`: the part held from above and from below. Shares of sequences for GSPO,
  GSPO-token and LUSPO (with advantages of both signs a sequence can be in both), else of tokens.
- `ratio_mean`, `ratio_min`, `ratio_max`: the sequence ratio s_i over the non-empty sequences.
- `kl`: mean over the response tokens of r - 1 - log r (the k3 estimate of KL(π_old‖π), tokens drawn from π_old).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax import masked
from gspax.losses import checks, sequences
from gspax.losses.surrogate import LOG_RATIO_LIMIT, Inputs, exp
from gspax.losses.terms import Share, Spread, Terms, share_of_sequences, share_of_tokens

Array = jax.Array


def policy_terms(
    objective_BT: Array,
    x: Inputs,
    aggregate: Callable[[Array, Array, Array | None], tuple[Array, Array]],
    *,
    high_BT: Array | None = None,
    low_BT: Array | None = None,
    share: Callable[..., Share] = share_of_tokens,
) -> Terms:
    """Terms of the loss that maximises the aggregate of `objective_BT`; None for high and low: nothing is held."""
    checks.function("aggregate", aggregate)
    corrected_BT = objective_BT if x.correction_BT is None else objective_BT * x.correction_BT
    value_B, weight_B = aggregate(-corrected_BT, x.mask_BT, x.segment_BT)
    nowhere_BT = jnp.zeros_like(x.mask_BT)
    high_BT = nowhere_BT if high_BT is None else high_BT
    low_BT = nowhere_BT if low_BT is None else low_BT
    return Terms(value_B, weight_B, policy_metrics(x, high_BT, low_BT, share))


def policy_metrics(x: Inputs, high_BT: Array, low_BT: Array, share: Callable[..., Share]) -> dict[str, Share | Spread]:
    """The metrics that the module's docstring lists; `share` says what high and low are shares of."""
    log_ratio_BT, mask_BT, segment_BT = stop_gradient(x.log_ratio_BT), x.mask_BT, x.segment_BT
    ratio_BS = exp(sequences.mean(log_ratio_BT, mask_BT, segment_BT))
    keep_BS = sequences.count(mask_BT, segment_BT) > 0
    held_BT = jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_BT = jnp.expm1(held_BT) - held_BT  # expm1: near 0 the difference r - 1 would cancel
    unpacked = segment_BT is None
    return {
        "clip_fraction_tokens": share_of_tokens(high_BT | low_BT, mask_BT, segment_BT),
        "clip_fraction_sequences": share_of_sequences(high_BT | low_BT, mask_BT, segment_BT),
        "clip_fraction_high": share(high_BT, mask_BT, segment_BT),
        "clip_fraction_low": share(low_BT, mask_BT, segment_BT),
        "ratio": Spread(ratio_BS[:, 0], keep_BS[:, 0]) if unpacked else Spread(ratio_BS, keep_BS),
        "kl": Share(masked.sum(k3_BT, mask_BT, axis=-1), jnp.sum(mask_BT, -1, dtype=jnp.float32)),
    }
