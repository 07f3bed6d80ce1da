"""Samples one token per row from its logits: temperature, top-k, top-p and min-p.

Axes: B rows, V vocabulary = N entries x M blocks, K tokens of a sampling mask.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.types import Array


class SampledTokens(NamedTuple):
    """One sampled token per row."""

    token_B: Array  # int32
    logp_B: Array  # float32
    kept_BK: Array | None = None  # as in `Rollout`
    cut_B: Array | None = None


def sample_at(
    logits_BV: Array,
    key: Array,
    id_B: Array,
    position_B: Array,
    sampling: Sampling,
    greedy_B: Array | None,
    *,
    kept: int = 0,
) -> SampledTokens:
    """Sample the token at a position of each sample, with its log-prob: a function of (key, sample id, position).

    With `kept`, the log-prob is over the tokens that it was sampled from, at most `kept` of them (`sample_from_sets`).
    """
    with jax.named_scope("sample"):
        key_B = jax.vmap(lambda id_, position: jax.random.fold_in(jax.random.fold_in(key, id_), position))(
            id_B, position_B
        )
        if kept:
            assert greedy_B is None, "greedy tokens are chosen from the whole vocabulary"
            return sample_from_sets(logits_BV, key_B, sampling, kept)
        return SampledTokens(*sample_tokens(logits_BV, key_B, sampling, greedy_B))


def is_stop(token_B: Array, stop_ids: tuple[int, ...]) -> Array:
    """Return whether each token is one of the stop ids, bool [B]."""
    return (token_B[:, None] == jnp.asarray(stop_ids, jnp.int32)[None]).any(axis=-1)


def sample_tokens(
    logits_BV: Array, key_B: Array, sampling: Sampling, greedy_B: Array | None = None
) -> tuple[Array, Array]:
    """Sample one token per row, int32, from the filtered distribution; return its unfiltered float32 log-prob too.

    The rows of `greedy_B`, bool, take the most probable token and have log-probs at temperature 1, as all rows do at
    temperature 0.
    """
    temperature = sampling.temperature or 1.0
    scaled_BV = logits_BV / (temperature if greedy_B is None else jnp.where(greedy_B, 1.0, temperature)[:, None])
    if sampling.temperature == 0:
        token_B, total_B = _argmax(scaled_BV), jax.nn.logsumexp(scaled_BV, axis=-1)
    else:
        filtered_BV = filter_logits(scaled_BV, sampling)
        token_B, total_B = _sample(filtered_BV, key_B)
        if filtered_BV is not scaled_BV:
            total_B = jax.nn.logsumexp(scaled_BV, axis=-1)
        if greedy_B is not None:
            token_B = jnp.where(greedy_B, _argmax(scaled_BV), token_B)
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - total_B


def sample_from_sets(logits_BV: Array, key_B: Array, sampling: Sampling, size: int) -> SampledTokens:
    """Sample tokens as `sample_tokens` does, and return the set each is sampled from, with log-probs over this set.

    A set has at most `size` tokens: if a filter leaves more, the most probable ones are kept, so that the set is always
    the whole support of its token. If all fit, the token is that of `sample_tokens`. Of equal logits, smaller ids come
    first, so that a set has no more than `top_k` tokens.
    """
    V = logits_BV.shape[-1]
    filtered_BV = filter_logits(logits_BV / sampling.temperature, sampling)
    best_BK, id_BK = jax.lax.top_k(filtered_BV, size)
    index_BV = jax.lax.broadcasted_iota(jnp.int32, filtered_BV.shape, 1)
    last_B1, last_id_B1 = best_BK[:, -1:], id_BK[:, -1:]
    fits_BV = (filtered_BV > last_B1) | ((filtered_BV == last_B1) & (index_BV <= last_id_B1))
    token_B, _ = _sample(jnp.where(fits_BV, filtered_BV, -jnp.inf), key_B)
    chosen_B = jnp.take_along_axis(filtered_BV, token_B[:, None], axis=-1)[:, 0]
    return SampledTokens(
        token_B,
        chosen_B - jax.nn.logsumexp(best_BK, axis=-1),
        jnp.where(best_BK > -jnp.inf, id_BK, V),
        (filtered_BV > -jnp.inf).sum(axis=-1) > size,
    )


def _sample(logits_BV: Array, key_B: Array) -> tuple[Array, Array]:
    """Sample an index of each row with probability softmax(logits), int32; return the row's logsumexp too, float32.

    Gumbel-max twice: one of M blocks by its mass, then one of the block's N entries. The distribution is the same as
    with one noise for each of V logits, whose hashes would take ten times as long as the rest at V = 151,936. Block m
    has the entries m, M + m, 2M + m, …: N is a power of two, which divides a vocabulary that is sharded over a mesh.
    """
    B, V = logits_BV.shape
    N = math.gcd(V, 2 ** round(math.log2(V) / 2))
    M = V // N
    noise_BH = jax.vmap(partial(jax.random.gumbel, shape=(M + N,)))(key_B)
    logits_BNM = logits_BV.reshape(B, N, M)
    largest_B = logits_BV.max(axis=1)
    mass_BM = jnp.exp(logits_BNM - largest_B[:, None, None]).sum(axis=1)
    mass_BM = jax.lax.optimization_barrier(mass_BM)  # else XLA sums V exponentials for the logsumexp once more
    block_B = _argmax(jnp.log(mass_BM) + noise_BH[:, :M])
    logits_BN = jnp.take_along_axis(logits_BNM, block_B[:, None, None], axis=2)[:, :, 0]
    return _argmax(logits_BN + noise_BH[:, M:]) * M + block_B, largest_B + jnp.log(mass_BM.sum(axis=1))


def _argmax(score_BV: Array) -> Array:
    """Return the first index of the largest score, int32. Two reductions: XLA:CPU does not vectorize argmax."""
    V = score_BV.shape[-1]
    index_BV = jax.lax.broadcasted_iota(jnp.int32, score_BV.shape, 1)
    largest_BV = jnp.where(score_BV == score_BV.max(axis=-1, keepdims=True), index_BV, V - 1)
    return largest_BV.min(axis=-1)


def filter_logits(logits_BV: Array, sampling: Sampling) -> Array:
    """Set the logits of tokens that top-k, then top-p, then min-p exclude to -inf, each applied to what is left.

    Top-p (nucleus, arXiv 1904.09751) keeps the smallest set of the most probable tokens whose mass reaches p;
    min-p (arXiv 2407.01082) keeps tokens at least min_p times as probable as the best. Ties at the threshold are kept.
    """
    V = logits_BV.shape[-1]
    if 0 < sampling.top_k < V:
        edge_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1.0:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
        kept_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV < sampling.top_p  # probability mass before this token
        edge_B1 = jnp.where(kept_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    if sampling.min_p > 0.0:
        edge_B1 = logits_BV.max(axis=-1, keepdims=True) + np.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    return logits_BV
