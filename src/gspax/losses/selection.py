"""Weights of tokens that depend on the whole minibatch: which share of it has the most entropy, or the most mismatch.

A selection is `(Minibatch, *, ...) -> float32 [B, T]`, weights 0 or 1 that multiply the objective of each token, as a
`correction` does; denominators do not change. It reads the policy before the first update alone, so it is computed
once, for the minibatch as a whole, before that is split: its weights do not depend on microbatches or devices, nor,
unless they are random, on packing. Other frameworks recompute a share in every microbatch, under the policy that is
being trained.

Axes: B rows, T tokens, N = B·T. Values outside the mask never matter.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax.losses import checks, explicit, masked
from gspax.losses.formulas import formula
from gspax.losses.traits import at_level

Array = jax.Array

COVARIANCE = "(advantage - average(advantage)) * (old_logp - average(old_logp))"  # the formula of `_covariance`


class Minibatch(NamedTuple):
    """All response tokens of a minibatch, under the policy π_old before the rollout's first update."""

    old_logp_BT: Array  # float32  log π_old
    sampler_logp_BT: Array  # float32  log μ, of the policy that sampled the tokens
    entropy_BT: Array  # float32  of the distribution of π_old that the token was sampled from
    advantage_BT: Array  # float32
    mask_BT: Array  # bool
    key: Array  # PRNG key, for a random selection


@formula("top(old_entropy, share)")
@at_level("token")
def top_entropy(minibatch: Minibatch, *, share: float = 0.2) -> Array:
    """Select (1, else 0) the share of tokens with the largest entropy (arXiv 2506.01939; TRL's `top_entropy_quantile`).

    At such tokens a response could have gone another way; the paper trains on a fifth of the tokens. At
    least one token has the weight 1, and tokens of equal entropy have equal weights.

    >>> x = jnp.zeros((1, 5))
    >>> entropy, mask = jnp.array([[9.0, 0.1, 0.4, 0.3, 0.2]]), jnp.array([[False, True, True, True, True]])
    >>> top_entropy(Minibatch(x, x, entropy, x, mask, jax.random.key(0)), share=0.5).tolist()
    [[0.0, 0.0, 1.0, 1.0, 0.0]]
    """
    mask_BT = minibatch.mask_BT
    return _largest(minibatch.entropy_BT, mask_BT, _count(share, mask_BT)).astype(jnp.float32)


@formula("small_mean((old_logp - sampler_logp)**2, threshold)")
@at_level("token")
def second_moment(minibatch: Minibatch, *, threshold: float = 0.04) -> Array:
    """Reject (0) the tokens with the largest log²(π_old/μ) until the mean of the others is below (M2PO, 2510.01161).

    The mean bounds the second moment of the log-ratios, and with it the variance of importance weights, by cutting few
    tokens: most have a ratio near 1 even in samples that are many updates old. If even the smallest square is not below
    the threshold, only that token has the weight 1, as in AReaL.

    >>> x, mask = jnp.zeros((1, 4)), jnp.array([[False, True, True, True]])
    >>> second_moment(Minibatch(x, jnp.array([[9.0, 0.1, -0.1, 0.9]]), x, x, mask, jax.random.key(0))).tolist()
    [[0.0, 1.0, 1.0, 0.0]]

    Args:
      threshold: τ, finite and above 0. The default is from AReaL's recipe.
    """
    threshold, mask_BT = checks.positive("threshold", threshold), minibatch.mask_BT
    square_BT = jnp.where(mask_BT, jnp.subtract(minibatch.old_logp_BT, minibatch.sampler_logp_BT) ** 2, jnp.inf)
    square_N = jnp.sort(explicit.whole(square_BT).ravel())
    mean_N = jnp.cumsum(square_N) / jnp.arange(1, square_N.size + 1)  # of the n smallest, which grows with n
    kept = jnp.maximum(jnp.sum(mean_N < threshold), 1)
    return (mask_BT & ~(square_BT > square_N[kept - 1])).astype(jnp.float32)


@formula(f"1 - drawn((low < {COVARIANCE}) & ({COVARIANCE} < high), share)")
@at_level("token")
def clip_cov(minibatch: Minibatch, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Array:
    """Reject (0, else 1) a random share of all tokens, among those with low < cov < high (Clip-Cov, arXiv 2505.22617).

    cov = (A - mean A) (log π_old - mean log π_old), means over the minibatch. Entropy falls with the sum of this
    covariance: a likely token with a high advantage becomes likelier still. A few tokens carry most of it.

    Args:
      share: of all tokens, of which at least one is chosen if there is any. The defaults are verl's.
      low, high: bounds of cov, low below high.

    Differs from the paper: π_old replaces the policy that is trained, and tokens that the loss clips count.
    """
    if not checks.number("low", low) < checks.number("high", high):
        raise ValueError(f"low must be below high; got {low} and {high}")
    mask_BT, count, cov_BT = minibatch.mask_BT, _count(share, minibatch.mask_BT), _covariance(minibatch)
    between_BT = mask_BT & (cov_BT > low) & (cov_BT < high)
    drawn_BT = _largest(jax.random.uniform(minibatch.key, mask_BT.shape), between_BT, count)
    return (mask_BT & ~drawn_BT).astype(jnp.float32)


@formula(f"top({COVARIANCE}, share)")
@at_level("token")
def top_cov(minibatch: Minibatch, *, share: float = 2e-4) -> Array:
    """Select the share of tokens with the largest cov, 1, else 0: KL-Cov penalizes them (arXiv 2505.22617).

    cov is as in `clip_cov`. A run adds `regularizers.log_ratio_size` of them to the loss (`config.CovarianceKL`).

    Differs from the paper: π_old replaces the policy that is trained.
    """
    return _largest(_covariance(minibatch), minibatch.mask_BT, _count(share, minibatch.mask_BT)).astype(jnp.float32)


def _covariance(minibatch: Minibatch) -> Array:
    """Compute (A - mean A) (log π_old - mean log π_old) of each token, with the means over the mask."""
    arrays = minibatch.advantage_BT, minibatch.old_logp_BT
    advantage_BT, logp_BT = (x_BT - masked.mean(x_BT, minibatch.mask_BT) for x_BT in arrays)
    return advantage_BT * logp_BT


def _count(share: float, mask_BT: Array) -> Array:
    """Return the number of tokens in a share of the mask, rounded, at least 1; int32."""
    if not 0 < checks.number("share", share) <= 1:
        raise ValueError(f"share must be above 0 and at most 1; got {share}")
    return jnp.maximum(jnp.round(float(share) * jnp.sum(mask_BT)), 1).astype(jnp.int32)


def _largest(value_BT: Array, mask_BT: Array, count: Array) -> Array:
    """Return bool [B, T]: the `count` tokens of the mask with the largest values, and ties with the last of them."""
    descending_N = -jnp.sort(explicit.whole(jnp.where(mask_BT, -value_BT, jnp.inf)).ravel())
    return mask_BT & ~(value_BT < descending_N[jnp.minimum(count, descending_N.size) - 1])
