"""The spread of the ratios of two policies: their extremes, deviation by response length, effective sample sizes.

For a response y with token log-ratios d_t = log π(y_t)/π_old(y_t), the log of GSPO's sequence ratio is their mean,
log s = 1/|y| Σ_t d_t. If the d_t were independent, its standard deviation would fall as |y|^(-1/2).

Axes: B rows, T tokens, S sequences of a row, K bins of lengths; bin k holds the lengths 2^k to 2^(k+1) - 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gspax.losses import masked, sequences, surrogate
from gspax.losses.terms import Metrics, Spread

Array = jax.Array


def ratio_spread(logp: Array, old_logp: Array, mask: Array, segment_ids: Array | None = None) -> dict[str, Array]:
    """Compute statistics of the ratios, float32 scalars and arrays [K], without a gradient.

    - `token_min`, `token_max`: extremes of the token ratios exp(d_t).
    - `token_std`, `sequence_std`: standard deviations of d_t over the response tokens and of log s over the non-empty
      sequences, with n - 1 in the denominator.
    - `ess_tokens`, `ess_sequences`, `ess_products`: effective sample size (Σ w)² / (n Σ w²) of the token ratios, of
      the sequence ratios s, and of the products of token ratios s^|y|, the exact weights of sequences.
    - `bin_sequences`, `bin_length`, `bin_token_std`, `bin_sequence_std`, [K]: the number of sequences in a bin of
      lengths, their mean length, and the standard deviations within it.

    Without an entry they are 0, and the extremes 1.

    Args:
      logp: float32 [B, T], of the policy that is trained.
      old_logp: float32 [B, T], of the policy in the ratio's denominator.
      mask: bool [B, T], True on response tokens.
      segment_ids: None, or int32 [B, T] for packed rows.
    """
    d_BT, mask_BT, segment_BT = surrogate.log_ratio("logp", logp, "old_logp", old_logp, mask, segment_ids)
    d_BT = jnp.where(mask_BT, d_BT, 0)
    tokens_BS, sum_BS = (sequences.total(x, mask_BT, segment_BT) for x in (jnp.ones(d_BT.shape), d_BT))
    log_s_BS, some_BS = sum_BS / jnp.maximum(tokens_BS, 1), tokens_BS > 0

    def in_bin(shortest: Array) -> dict[str, Array]:
        inside_BS = (tokens_BS >= shortest) & (tokens_BS < 2 * shortest)
        inside_BT = mask_BT & sequences.at_tokens(inside_BS, segment_BT)
        return {
            "bin_sequences": inside_BS.sum(dtype=jnp.int32).astype(jnp.float32),
            "bin_length": masked.mean(tokens_BS, inside_BS),
            "bin_token_std": _deviation(d_BT, inside_BT),
            "bin_sequence_std": _deviation(log_s_BS, inside_BS),
        }

    return {
        "token_min": jnp.exp(masked.min(d_BT, mask_BT)),
        "token_max": jnp.exp(masked.max(d_BT, mask_BT)),
        "token_std": _deviation(d_BT, mask_BT),
        "sequence_std": _deviation(log_s_BS, some_BS),
        "ess_tokens": _effective_size(d_BT, mask_BT),
        "ess_sequences": _effective_size(log_s_BS, some_BS),
        "ess_products": _effective_size(sum_BS, some_BS),
        **jax.vmap(in_bin)(2.0 ** jnp.arange(mask_BT.shape[1].bit_length())),
    }


def ratio_metrics(logp: Array, old_logp: Array, mask: Array, segment_ids: Array | None = None) -> Metrics:
    """Return metrics of the ratios that do not depend on the loss: `ratio`, `ratio_deviation` and `kl`, as every loss
    has them, and `token_ratio`, the ratio of the response tokens. Arguments as for `ratio_spread`; no gradient.
    """
    d_BT, mask_BT, segment_BT = surrogate.log_ratio("logp", logp, "old_logp", old_logp, mask, segment_ids)
    d_BT = jnp.where(mask_BT, d_BT, 0)
    metrics = surrogate.sequence_ratio_metrics(d_BT, mask_BT, segment_BT)
    return {**metrics, "token_ratio": Spread(surrogate.exp(d_BT), mask_BT)}


def fit_exponent(length_K: np.ndarray, deviation_K: np.ndarray, sequences_K: np.ndarray) -> float:
    """Fit the exponent a of the power law deviation ∝ length^a: a line through the logarithms, by least squares.

    A bin of n sequences has the weight n - 1, since the log of a deviation of n values varies as 1 / (2 (n - 1)). NaN
    with fewer than two bins that have two sequences and a deviation above 0.

    >>> round(fit_exponent(np.array([4.0, 16.0, 64.0]), np.array([0.4, 0.2, 0.1]), np.array([9, 9, 9])), 6)
    -0.5
    """
    usable_K = (sequences_K >= 2) & (deviation_K > 0)
    if usable_K.sum() < 2:
        return float("nan")
    x, y, weight = np.log(length_K[usable_K]), np.log(deviation_K[usable_K]), sequences_K[usable_K] - 1.0
    x, y = x - np.average(x, weights=weight), y - np.average(y, weights=weight)
    return float((weight * x * y).sum() / (weight * x * x).sum())


def _deviation(value: Array, keep: Array) -> Array:
    """Compute the standard deviation of the entries in the mask, with n - 1; 0 for fewer than two."""
    count = keep.sum(dtype=jnp.int32)
    squares = masked.sum((value - masked.mean(value, keep)) ** 2, keep)
    return jnp.sqrt(squares / jnp.maximum(count - 1, 1).astype(jnp.float32))


def _effective_size(log_weight: Array, keep: Array) -> Array:
    """Compute (Σ w)² / (n Σ w²) of the entries in the mask: 1 if all weigh the same, 1 / n if one weighs everything."""
    weight = jnp.where(keep, jnp.exp(log_weight - masked.max(log_weight, keep)), 0)
    count = keep.sum(dtype=jnp.int32).astype(jnp.float32)
    return weight.sum() ** 2 / jnp.maximum(count * (weight**2).sum(), 1e-30)
