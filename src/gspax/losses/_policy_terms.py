"""From an objective per token to `Terms`: correction, aggregation and the metrics that every policy loss gives.

Reduced, the metrics are those of the whole batch; no gradient flows through them:

- `clip_fraction_tokens`: share of the response tokens at which the loss holds something at a bound. For all losses but
  CISPO this cuts their gradient; CISPO only limits their weight. GSPO clips all tokens of a sequence at once.
- `clip_fraction_sequences`: share of the non-empty sequences with at least one such token.
- `clip_fraction_high`, `clip_fraction_low`: those clipped from above and from below. Shares of sequences for GSPO,
  GSPO-token and LUSPO (with advantages of both signs a sequence can be in both), else of tokens.
- `ratio_mean`, `ratio_min`, `ratio_max`: the sequence ratio s_i over the non-empty sequences.
- `ratio_deviation`: the |s_i - 1| that the sequences of nine tenths of the response tokens stay within. In the first
  update of a rollout batch, where both policies are the same, it is the noise floor of s_i (`calibration`).
- `kl`: mean over the response tokens of r - 1 - log r (the k3 estimate of KL(π_old‖π), tokens drawn from π_old).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax import masked
from gspax.losses import _checks, _sequences
from gspax.losses._surrogate import LOG_RATIO_LIMIT, Inputs, exp, k3_of
from gspax.losses._terms import Aggregate, Metrics, Quantile, Share, Spread, Terms

Array = jax.Array

NOISE_ABOVE = 0.1  # share of the tokens whose sequences may lie beyond the noise floor


def of_tokens(held_BS: Array, tokens_BS: Array) -> Share:
    """The share of response tokens that are clipped, from their number in each sequence."""
    return Share(jnp.sum(held_BS, -1), jnp.sum(tokens_BS, -1))


def of_sequences(held_BS: Array, tokens_BS: Array) -> Share:
    """The share of non-empty sequences with at least one clipped token."""
    return Share(*(jnp.sum(tokens > 0, -1, dtype=jnp.float32) for tokens in (held_BS, tokens_BS)))


def policy_terms(
    objective_BU: Array,
    x: Inputs,
    aggregate: Aggregate,
    *,
    high_BU: Array | None = None,
    low_BU: Array | None = None,
    share: Callable[[Array, Array], Share] = of_tokens,
) -> Terms:
    """Terms of the loss that maximises the aggregate of an objective; high and low None: nothing is clipped."""
    _checks.function("aggregate", aggregate)
    if x.correction_BU is not None:
        objective_BU = objective_BU * x.correction_BU
    if objective_BU.shape == x.mask_BT.shape:
        value_B, weight_B = aggregate(-objective_BU, x.mask_BT, x.segment_BT)
    else:  # the same for all tokens of a row: factored out of the sum over them
        share_B, weight_B = aggregate(jnp.ones(x.mask_BT.shape, jnp.float32), x.mask_BT, x.segment_BT)
        value_B = -objective_BU[:, 0] * share_B
    return Terms(value_B, weight_B, policy_metrics(x, high_BU, low_BU, share))


def policy_metrics(
    x: Inputs, high_BU: Array | None, low_BU: Array | None, share: Callable[[Array, Array], Share]
) -> Metrics:
    """The metrics that the module's docstring lists; `share` is `of_tokens` or `of_sequences`, for high and low."""
    log_ratio_BT, mask_BT, segment_BT = stop_gradient(x.log_ratio_BT), x.mask_BT, x.segment_BT
    tokens_BS = _sequences.count(mask_BT, segment_BT)
    high_BS, low_BS = (
        jnp.zeros_like(tokens_BS) if flag is None else _sequences.total(flag.astype(jnp.float32), mask_BT, segment_BT)
        for flag in (high_BU, low_BU)
    )  # no token is clipped from above and from below, so the two may be added
    log_s_BS, keep_BS = _sequences.mean(log_ratio_BT, mask_BT, segment_BT), tokens_BS > 0
    ratio_BS = exp(log_s_BS)
    deviation_BS = jnp.abs(jnp.expm1(jnp.clip(log_s_BS, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
    k3_BT = k3_of(-jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "clip_fraction_tokens": of_tokens(high_BS + low_BS, tokens_BS),
        "clip_fraction_sequences": of_sequences(high_BS + low_BS, tokens_BS),
        "clip_fraction_high": share(high_BS, tokens_BS),
        "clip_fraction_low": share(low_BS, tokens_BS),
        "ratio": Spread(ratio_BS, keep_BS),
        "ratio_deviation": Quantile(value=deviation_BS, weight=tokens_BS, above=NOISE_ABOVE),
        "kl": Share(masked.sum(k3_BT, mask_BT, axis=-1), jnp.sum(tokens_BS, -1)),
    }
