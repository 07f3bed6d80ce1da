"""Log-probabilities of given tokens, from logits or from hidden states in chunks.

`logp_BT[b, t]` is the log-probability of `tokens_BT[b, t]`. A model's output at position t predicts token t + 1;
`shift` is the only place that shifts. Nothing predicts column 0: it holds 0 and is never masked in.

Axes: B rows, T tokens, K chunks, C positions of a chunk, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gspax.losses import checks

Array = jax.Array
Scored = TypeVar("Scored")  # a tree of arrays [B, T]
Output = TypeVar("Output")  # a tree of arrays [B, T, ...]

_FINER = " (log-probabilities need float32: cast the logits, or better, let the last matrix product accumulate in it)"


def token_logp(logits_BTV: Array, tokens_BT: Array, *, temperature: float = 1.0) -> Array:
    """log π(tokens_BT[b, t] | the tokens before it), float32 [B, T], column 0 being 0.

    >>> logits = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5]]]))
    >>> jnp.exp(token_logp(logits, jnp.array([[0, 1]], jnp.int32))).round(4).tolist()
    [[1.0, 0.75]]

    Args:
      logits_BTV: float32 [B, T, V], the model's outputs; those at t predict token t + 1, the last ones nothing.
      tokens_BT: int32 [B, T], each in [0, V).
      temperature: the logits are divided by it. For a policy ratio use the one that the tokens were sampled with.

    Raises:
      TypeError: logits that are not float32, tokens that are not int32, a temperature that is not a Python number.
      ValueError: shapes do not fit; temperature not above 0.
    """
    logits_BTV = checks.array("logits_BTV", logits_BTV, jnp.float32, "BTV", _FINER)
    tokens_BT = _tokens(tokens_BT, "logits_BTV", logits_BTV)
    temperature = checks.positive("temperature", temperature)
    return shift(lambda logits, tokens: logp_and_entropy(logits, tokens, temperature)[0], logits_BTV, tokens_BT)


def chunked_token_logp(
    project: Callable[[Array], Array],
    hidden_BTD: Array,
    tokens_BT: Array,
    *,
    temperature: float = 1.0,
    chunk: int,
) -> tuple[Array, Array]:
    """`token_logp(project(hidden_BTD), tokens_BT)` and the entropy, without the logits of all positions at once.

    Logits are computed for `chunk` positions at a time and recomputed in the backward pass, so memory for them is
    B·chunk·V instead of B·T·V, at the price of a second projection. With chunk ≥ T - 1 there is no loop and nothing is
    computed twice.

    Args:
      project: [B, C, D] -> float32 logits [B, C, V], position by position. Parameters it closes over get gradients.
      hidden_BTD: [B, T, D], any float dtype.
      tokens_BT: int32 [B, T], each in [0, V).
      temperature: the logits are divided by it.
      chunk: positions at a time, at least 1; need not divide T.

    Returns:
      logp_BT and entropy_BT, float32 [B, T]. `entropy_BT[b, t]` (in nats) is of the distribution that
      `tokens_BT[b, t]` was sampled from; column 0 of both is 0. Both can be differentiated.

    Raises:
      TypeError: logits that are not float32, tokens that are not int32, a number of the wrong type.
      ValueError: shapes do not fit; temperature not above 0; chunk below 1.
    """
    hidden_BTD, tokens_BT = _hidden_and_tokens(hidden_BTD, tokens_BT)
    temperature, chunk = checks.positive("temperature", temperature), checks.count("chunk", chunk)

    def scores(hidden_BCD: Array, tokens_BC: Array) -> tuple[Array, Array]:
        return logp_and_entropy(checked_logits(project, hidden_BCD), tokens_BC, temperature)

    return shift(partial(in_chunks, scores, chunk), hidden_BTD, tokens_BT)


def checked_logits(project: Callable[[Array], Array], hidden_BCD: Array) -> Array:
    """`project(hidden_BCD)`. TypeError, ValueError: they are no float32 logits [B, C, V]."""
    logits_BCV = checks.array("the result of project", project(hidden_BCD), jnp.float32, "BCV", _FINER)
    checks.same_shape("the result of project", logits_BCV[..., 0], "its argument [B, C]", hidden_BCD.shape[:2])
    return logits_BCV


def shift(
    score: Callable[[Output, Array], Scored], output: Output, tokens_BT: Array, *, keep_length: bool = False
) -> Scored:
    """Score token t + 1 with the model's output at t, and put the result in column t + 1. The only shift in gspax.

    With `keep_length`, for a time axis that is sharded over devices, all T outputs are scored, the last one with the
    first token, and that result is dropped.

    Args:
      score: (output [B, T', ...], tokens_BT') -> arrays [B, T', ...], position by position; T' is T - 1 or, kept, T.
      output: arrays [B, T, ...].
    """
    if keep_length:
        scored = jax.tree.map(lambda x: x[:, :-1], score(output, jnp.roll(tokens_BT, -1, axis=1)))
    else:
        scored = score(jax.tree.map(lambda x: x[:, :-1], output), tokens_BT[:, 1:])
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2))), scored)


def logp_and_entropy(logits_XV: Array, tokens_X: Array, temperature: float) -> tuple[Array, Array]:
    """The log-probability of each token and the entropy of the distribution that its logits give; X is any axes.

    The entropy is -Σ p·log p, where log p = logit - logsumexp is kept finite: 0·log 0 is 0. In this form XLA computes
    exponential, product, and sum in one pass: on CPU a fifth of the time of logsumexp - Σ p·logit.
    """
    logits_XV = logits_XV / temperature
    lse_X = jax.nn.logsumexp(logits_XV, axis=-1)
    logit_X = jnp.take_along_axis(logits_XV, tokens_X[..., None], axis=-1)[..., 0]
    logp_XV = jnp.maximum(logits_XV - lse_X[..., None], jnp.finfo(jnp.float32).min)
    return logit_X - lse_X, -jnp.sum(jnp.exp(logp_XV) * logp_XV, axis=-1)


def in_chunks(scores: Callable[..., Scored], chunk: int, *arrays: Array) -> Scored:
    """`scores(*arrays)` of arrays [B, T, ...], `chunk` positions at a time and recomputed in the backward pass.

    Args:
      scores: arrays [B, C, ...] -> a tree of arrays [B, C], position by position.
    """
    B, T = arrays[0].shape[:2]
    if chunk >= T:
        return scores(*arrays)
    K = -(-T // chunk)

    def split(x: Array) -> Array:
        # Padded with the last position, not with zeros: there the projection and its derivative are finite.
        x = jnp.pad(x, ((0, 0), (0, K * chunk - T), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        return x.reshape(B, K, chunk, *x.shape[2:]).swapaxes(0, 1)

    # prevent_cse only matters outside a loop; inside one it hinders the compiler.
    body = jax.checkpoint(scores, prevent_cse=False)
    _, scores_KBC = jax.lax.scan(lambda carry, x: (carry, body(*x)), None, tuple(map(split, arrays)))
    return jax.tree.map(lambda x_KBC: x_KBC.swapaxes(0, 1).reshape(B, K * chunk)[:, :T], scores_KBC)


def _hidden_and_tokens(hidden_BTD: Array, tokens_BT: ArrayLike) -> tuple[Array, Array]:
    if getattr(hidden_BTD, "ndim", None) != 3:
        raise ValueError(f"hidden_BTD must be an array [B, T, D]; got {checks.describe(hidden_BTD)}")
    return hidden_BTD, _tokens(tokens_BT, "hidden_BTD", hidden_BTD)


def _tokens(tokens_BT: ArrayLike, name: str, output: Array) -> Array:
    array_BT = checks.array("tokens_BT", tokens_BT, jnp.int32, "BT")
    checks.same_shape("tokens_BT", array_BT, f"{name} in [B, T]", output.shape[:2])
    return array_BT
