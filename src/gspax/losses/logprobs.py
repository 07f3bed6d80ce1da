"""Log-probabilities of given tokens, from logits or from hidden states in chunks.

`logp_BT[b, t]` is the log-probability of `tokens_BT[b, t]`. A model's output at position t predicts token t + 1;
`shift` is the only place that shifts. Nothing predicts column 0: it holds 0 and is never masked in.

A token that was sampled through a filter (top-k, top-p, min-p at a temperature τ) is distributed over a smaller
vocabulary: with S the tokens that the filter kept and z the logits, log π(y) = z_y/τ - log Σ_{v∈S} exp(z_v/τ).
`kept_BTK` is S for each token ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3). It is data: S does
not move with the policy that is trained, and no logit outside of S gets a gradient.

Axes: B rows, T tokens, N chunks, C positions of a chunk, K tokens of a kept set, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gspax.losses import checks, explicit

Array = jax.Array
Scored = TypeVar("Scored")  # a tree of arrays [B, T]
Output = TypeVar("Output")  # a tree of arrays [B, T, ...]

_LEAST = -1e3  # a log-probability: its exponential is 0 in float32, and no cotangent makes a product of it overflow
_FINER = " (log-probabilities need float32: cast the logits, or better, let the last matrix product accumulate in it)"


def token_logp(
    logits_BTV: Array, tokens_BT: Array, *, temperature: float = 1.0, kept_BTK: Array | None = None
) -> Array:
    """Compute log π(tokens_BT[b, t] | the tokens before it), float32 [B, T], column 0 being 0.

    >>> logits = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5]]]))
    >>> jnp.exp(token_logp(logits, jnp.array([[0, 1]], jnp.int32))).round(4).tolist()
    [[1.0, 0.75]]

    Args:
      logits_BTV: float32 [B, T, V], the model's outputs; column t predicts token t + 1, the last column nothing.
      tokens_BT: int32 [B, T], each in [0, V).
      temperature: the logits are divided by it. For a policy ratio use the one that the tokens were sampled with.
      kept_BTK: None, or the set of tokens that each token was chosen from, which includes it: ids [B, T, K] of an
        integer dtype, no token twice, and V or above in unused columns. The set of a token outside every
        mask may hold anything.

    Raises:
      TypeError: logits that are not float32, tokens that are not int32, ids that are no integers, a temperature that
        is not a Python number.
      ValueError: shapes do not fit; temperature not above 0.
    """
    logits_BTV = checks.array("logits_BTV", logits_BTV, jnp.float32, "BTV", _FINER)
    tokens_BT = _tokens(tokens_BT, "logits_BTV", logits_BTV)
    temperature = checks.positive("temperature", temperature)

    def score(logits_BTV: Array, tokens_BT: Array, kept_BTK: Array | None) -> Array:
        return logp_and_entropy(logits_BTV, tokens_BT, temperature, kept_BTK)[0]

    return shift(score, logits_BTV, tokens_BT, _sets(kept_BTK, tokens_BT))


def chunked_token_logp(
    project: Callable[[Array], Array],
    hidden_BTD: Array,
    tokens_BT: Array,
    *,
    temperature: float = 1.0,
    kept_BTK: Array | None = None,
    chunk: int,
) -> tuple[Array, Array]:
    """Compute `token_logp(project(hidden_BTD), tokens_BT)` and the entropy, a chunk of positions at a time.

    Logits are computed for `chunk` positions at a time and recomputed in the backward pass, so memory for them is
    B·chunk·V instead of B·T·V, at the price of a second projection. With chunk ≥ T - 1 there is no loop and nothing is
    computed twice.

    Args:
      project: [B, C, D] -> float32 logits [B, C, V], position by position. Parameters it closes over get gradients.
      hidden_BTD: [B, T, D], any float dtype.
      tokens_BT: int32 [B, T], each in [0, V).
      temperature, kept_BTK: as for `token_logp`.
      chunk: positions at a time, at least 1; need not divide T.

    Returns:
      logp_BT and entropy_BT, float32 [B, T]. `entropy_BT[b, t]` (in nats) is of the distribution that
      `tokens_BT[b, t]` was sampled from; column 0 of both is 0. Both can be differentiated.

    Raises:
      TypeError: logits that are not float32, tokens that are not int32, ids that are no integers, a number of the
        wrong type.
      ValueError: shapes do not fit; temperature not above 0; chunk below 1.
    """
    hidden_BTD, tokens_BT = _hidden_and_tokens(hidden_BTD, tokens_BT)
    temperature, chunk = checks.positive("temperature", temperature), checks.count("chunk", chunk)

    def scores(hidden_BCD: Array, tokens_BC: Array, kept_BCK: Array | None) -> tuple[Array, Array]:
        return logp_and_entropy(checked_logits(project, hidden_BCD), tokens_BC, temperature, kept_BCK)

    return shift(partial(in_chunks, scores, chunk), hidden_BTD, tokens_BT, _sets(kept_BTK, tokens_BT))


def checked_logits(project: Callable[[Array], Array], hidden_BCD: Array) -> Array:
    """Return `project(hidden_BCD)`. TypeError, ValueError: the result is no float32 logits [B, C, V]."""
    logits_BCV = checks.array("the result of project", project(hidden_BCD), jnp.float32, "BCV", _FINER)
    if logits_BCV.shape[:2] != hidden_BCD.shape[:2]:
        wanted = f"the result of project must have shape {list(hidden_BCD.shape[:2])}, as its argument [B, C] has"
        raise ValueError(f"{wanted}; got {list(logits_BCV.shape[:2])}")
    return logits_BCV


def shift(score: Callable[..., Scored], output: Output, *targets: object, keep_length: bool = False) -> Scored:
    """Score token t + 1 with the model's output at t, and put the result in column t + 1. The only shift in gspax.

    With `keep_length`, for a time axis that is sharded over devices, all T outputs are scored, the last one with the
    first token, and that result is dropped.

    Args:
      score: (output [B, T', ...], *targets') -> arrays [B, T', ...], position by position; T' is T - 1 or, kept, T.
      output: arrays [B, T, ...].
      targets: the tokens, int32 [B, T], and further trees of arrays [B, T, ...] about each of them.
    """
    if keep_length or any(explicit.is_split(x, 1) for x in jax.tree.leaves(output)):
        next_ones = jax.tree.map(lambda x: explicit.like(jnp.roll(explicit.whole(x, 1), -1, axis=1), x), targets)
        scored = jax.tree.map(lambda x: explicit.whole(x, 1)[:, :-1], score(output, *next_ones))
    else:
        before_last = jax.tree.map(lambda x: x[:, :-1], output)
        scored = score(before_last, *jax.tree.map(lambda x: x[:, 1:], targets))
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2))), scored)


def logp_and_entropy(
    logits_XV: Array, tokens_X: Array, temperature: float, kept_XK: Array | None = None
) -> tuple[Array, Array]:
    """Compute the log-probability of each token and the entropy of its logits' distribution; X is any axes.

    The distribution is over the vocabulary or, with `kept_XK`, over these tokens (`token_logp`). The entropy is
    -Σ p·log p, where log p = logit - logsumexp is at least `_LEAST`: 0·log 0 is 0. In this form XLA computes
    exponential, product, and sum in one pass: on CPU a fifth of the time of logsumexp - Σ p·logit.
    """
    logits_XV = logits_XV / temperature
    summed_XV = logits_XV if kept_XK is None else _take_sets(logits_XV, kept_XK)
    lse_X = jax.nn.logsumexp(summed_XV, axis=-1)
    logit_X = _take(logits_XV, tokens_X)
    logp_XV = jnp.maximum(summed_XV - lse_X[..., None], _LEAST)
    return logit_X - lse_X, -jnp.sum(jnp.exp(logp_XV) * logp_XV, axis=-1)


def score_norm(logits_XV: Array, tokens_X: Array, kept_XK: Array | None = None) -> Array:
    """Compute ‖∇ log π(y)‖² with respect to the logits, 1 - 2π(y) + Σ_v π(v)², float32; X is any axes.

    The distribution π is over the vocabulary or, with `kept_XK`, over these tokens (`token_logp`).

    >>> score_norm(jnp.log(jnp.array([[0.25, 0.75]])), jnp.array([0])).round(4).tolist()
    [1.125]
    """
    if kept_XK is None:
        gradient_XK = jax.nn.one_hot(tokens_X, logits_XV.shape[-1]) - jax.nn.softmax(logits_XV)
    else:
        gradient_XK = (kept_XK == tokens_X[..., None]) - jax.nn.softmax(_take_sets(logits_XV, kept_XK))
    return jnp.sum(gradient_XK**2, axis=-1)  # unlike 1 - 2π + Σπ², never below 0


def _take(logits_XV: Array, tokens_X: Array) -> Array:
    """Return the logit of each token, without gathering a vocabulary that is split over devices."""
    if explicit.is_split(logits_XV, -1):
        of_token_XV = jax.lax.broadcasted_iota(jnp.int32, logits_XV.shape, logits_XV.ndim - 1) == tokens_X[..., None]
        return jnp.sum(jnp.where(explicit.like(of_token_XV, logits_XV), logits_XV, 0), axis=-1)
    return jnp.take_along_axis(logits_XV, tokens_X[..., None], axis=-1)[..., 0]


def _take_sets(logits_XV: Array, kept_XK: Array) -> Array:
    """Return the logits of the tokens of each set, [X, K], and -inf in unused columns.

    K logits are gathered: their exponentials cost less than for V masked logits, and no mask [X, V] is made.
    """
    V, kept_XK = logits_XV.shape[-1], kept_XK.astype(jnp.int32)
    logits_XV = explicit.whole(logits_XV, -1)
    taken_XK = jnp.take_along_axis(logits_XV, jnp.minimum(kept_XK, V - 1), axis=-1)
    return jnp.where(kept_XK < V, taken_XK, -jnp.inf)


def in_chunks(scores: Callable[..., Scored], chunk: int, hidden_BTD: Array, *arrays: Array | None) -> Scored:
    """Compute `scores(hidden_BTD, *arrays)`, `chunk` positions at a time and recomputed in the backward pass.

    Args:
      scores: arrays [B, C, ...] -> a tree of arrays [B, C], position by position.
      arrays: [B, T, ...] as `hidden_BTD`, or None.
    """
    B, T = hidden_BTD.shape[:2]
    if chunk >= T:
        return scores(hidden_BTD, *arrays)
    N = -(-T // chunk)

    def split(x: Array) -> Array:
        # Padded with the last position, not with zeros: there the projection and its derivative are finite.
        x = explicit.whole(x, 1)
        x = jnp.concatenate([x, jnp.repeat(x[:, -1:], N * chunk - T, axis=1)], axis=1)
        return x.reshape(B, N, chunk, *x.shape[2:]).swapaxes(0, 1)

    # prevent_cse only matters outside a loop; inside one it hinders the compiler.
    body = jax.checkpoint(scores, prevent_cse=False)
    _, scores_NBC = jax.lax.scan(lambda carry, x: (carry, body(*x)), None, jax.tree.map(split, (hidden_BTD, *arrays)))
    return jax.tree.map(lambda x_NBC: x_NBC.swapaxes(0, 1).reshape(B, N * chunk)[:, :T], scores_NBC)


def _hidden_and_tokens(hidden_BTD: Array, tokens_BT: ArrayLike) -> tuple[Array, Array]:
    if getattr(hidden_BTD, "ndim", None) != 3:
        raise ValueError(f"hidden_BTD must be an array [B, T, D]; got {checks.describe(hidden_BTD)}")
    return hidden_BTD, _tokens(tokens_BT, "hidden_BTD", hidden_BTD)


def _tokens(tokens_BT: ArrayLike, name: str, output: Array) -> Array:
    array_BT = checks.array("tokens_BT", tokens_BT, jnp.int32, "BT")
    checks.same_shape("tokens_BT", array_BT, f"{name} in [B, T]", output.shape[:2])
    return array_BT


def _sets(kept_BTK: ArrayLike | None, tokens_BT: Array) -> Array | None:
    if kept_BTK is None:
        return None
    array_BTK = jnp.asarray(checks.numbers("kept_BTK", kept_BTK, "token ids", [jnp.integer], "BTK"))
    if array_BTK.shape[:2] != tokens_BT.shape or not array_BTK.shape[2]:
        wanted = f"kept_BTK must have the rows and tokens {list(tokens_BT.shape)} of tokens_BT, and room for a token"
        raise ValueError(f"{wanted}; got {list(array_BTK.shape)}")
    return array_BTK
