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
from gspax.losses.surrogate import LOG_RATIO_LIMIT, Inputs, exp, k3_of
from gspax.losses.terms import Share, Spread, Terms

Array = jax.Array


def of_tokens(held_BS: Array, tokens_BS: Array) -> Share:
    """The share of response tokens that are held, from their number in each sequence."""
    return Share(jnp.sum(held_BS, -1), jnp.sum(tokens_BS, -1))


def of_sequences(held_BS: Array, tokens_BS: Array) -> Share:
    """The share of non-empty sequences with at least one token that is held."""
    return Share(*(jnp.sum(tokens > 0, -1, dtype=jnp.float32) for tokens in (held_BS, tokens_BS)))


def policy_terms(
    objective_BU: Array,
    x: Inputs,
    aggregate: Callable[[Array, Array, Array | None], tuple[Array, Array]],
    *,
    high_BU: Array | None = None,
    low_BU: Array | None = None,
    share: Callable[[Array, Array], Share] = of_tokens,
) -> Terms:
    """Terms of the loss that maximises the aggregate of an objective; None for high and low: nothing is held."""
    checks.function("aggregate", aggregate)
    if x.correction_BU is not None:
        objective_BU = objective_BU * x.correction_BU
    if objective_BU.shape == x.mask_BT.shape:
        value_B, weight_B = aggregate(-objective_BU, x.mask_BT, x.segment_BT)
    else:  # one number for all tokens of a row comes out of the sum over them
        share_B, weight_B = aggregate(jnp.ones(x.mask_BT.shape, jnp.float32), x.mask_BT, x.segment_BT)
        value_B = -objective_BU[:, 0] * share_B
    return Terms(value_B, weight_B, policy_metrics(x, high_BU, low_BU, share))


def policy_metrics(
    x: Inputs, high_BU: Array | None, low_BU: Array | None, share: Callable[[Array, Array], Share]
) -> dict[str, Share | Spread]:
    """The metrics that the module's docstring lists; `share` says what high and low are shares of."""
    log_ratio_BT, mask_BT, segment_BT = stop_gradient(x.log_ratio_BT), x.mask_BT, x.segment_BT
    tokens_BS = sequences.count(mask_BT, segment_BT)
    high_BS, low_BS = (
        jnp.zeros_like(tokens_BS) if flag is None else sequences.total(flag.astype(jnp.float32), mask_BT, segment_BT)
        for flag in (high_BU, low_BU)
    )  # no token is held from above and from below, so the two may be added
    ratio_BS, keep_BS = exp(sequences.mean(log_ratio_BT, mask_BT, segment_BT)), tokens_BS > 0
    k3_BT = k3_of(-jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "clip_fraction_tokens": of_tokens(high_BS + low_BS, tokens_BS),
        "clip_fraction_sequences": of_sequences(high_BS + low_BS, tokens_BS),
        "clip_fraction_high": share(high_BS, tokens_BS),
        "clip_fraction_low": share(low_BS, tokens_BS),
        "ratio": Spread(ratio_BS[:, 0], keep_BS[:, 0]) if segment_BT is None else Spread(ratio_BS, keep_BS),
        "kl": Share(masked.sum(k3_BT, mask_BT, axis=-1), jnp.sum(tokens_BS, -1)),
    }
