"""Penalties on entropy, on the distance from the sampler, and on routers: `Terms` that `kl.add_penalty` adds to a loss.

None is part of any loss unless it is added. For reinforcement learning of a trained model all are off by default, and
the sources that each function cites disagree about those on routers.

Axes: L layers, B rows, T tokens, E experts. `aggregate` and `segment_ids` (None, or int32 [B, T] for packed rows) are
as in the policy loss. Values outside the mask never matter, NaN included. The metrics are means over the mask's
tokens. All raise TypeError and ValueError, naming the argument, for another dtype or shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspax.losses import checks, explicit, sequences
from gspax.losses.formulas import formula
from gspax.losses.surrogate import compare_logp, squared, with_gradient
from gspax.losses.terms import Aggregate, Terms, by_sequence, mean_over

Array = jax.Array


@formula("-entropy")
def entropy_bonus(
    entropy: Array, mask: Array, *, aggregate: Aggregate = by_sequence, segment_ids: Array | None = None
) -> Terms:
    """Compute -H(π(·|context)) of each token: a coefficient above 0 rewards entropy (PPO, arXiv 1707.06347, eq. 9).

    Long runs on verifiable rewards lose entropy, and with it exploration. A fixed bonus is sensitive to its coefficient
    (`next_coefficient` adapts it); a wider upper clip range is the more usual remedy (arXiv 2503.14476).

    The gradient flows through the entropy alone: contexts are data, as in `kl.token_kl`.

    >>> mask = jnp.array([[False, True, True]])
    >>> terms = entropy_bonus(jnp.array([[9.0, 0.5, 1.5]]), mask)
    >>> terms.value.tolist(), terms.weight.tolist()
    ([-1.0], [1.0])

    Args:
      entropy: float32 [B, T], with its gradient, such as `chunked_token_logp` gives.
      mask: bool [B, T], True on response tokens.

    Returns:
      Terms with float32 [B] leaves and the metric `entropy_bonus`, the mean entropy.
    """
    entropy_BT = checks.array("entropy", entropy, jnp.float32, "BT")
    mask_BT = checks.array("mask", mask, jnp.bool_, "BT")
    checks.same_shape("mask", mask_BT, "entropy", entropy_BT.shape)
    return _terms("entropy_bonus", -entropy_BT, mask_BT, aggregate, segment_ids, sign=-1)


def next_coefficient(
    coefficient: ArrayLike, entropy: ArrayLike, *, target: float = 0.2, step: float = 0.005, highest: float = 1.0
) -> Array:
    """Compute the coefficient of `entropy_bonus` after an update, a float32 scalar (Skywork-OR1, arXiv 2505.22312).

    It rises by a step if the mean entropy of the update's tokens was below the target, else falls, within 0 and
    `highest`. The defaults are TRL's; the best target depends on the model and its task.

    >>> [round(float(next_coefficient(0.01, entropy)), 4) for entropy in (0.1, 0.3)]
    [0.015, 0.005]

    Differs from the paper: the coefficient changes with each update and not with each rollout, by the policy that is
    trained, and the bonus is added above the target too, until its coefficient has fallen to 0.
    """
    change = jnp.where(jnp.asarray(entropy, jnp.float32) < target, jnp.float32(step), jnp.float32(-step))
    return jnp.clip(jnp.asarray(coefficient, jnp.float32) + change, 0.0, highest)


@formula("(logp - sampler_logp)**2")
def log_ratio_square(
    logp: Array,
    sampler_logp: Array,
    mask: Array,
    *,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute log²(π/μ) of each response token: it holds π near the sampler's policy, also where a mask cuts the loss.

    Until autumn 2026 prime-rl added 1e-3 of it, and named Kimi K2.5 (arXiv 2602.02276) as its source. Its default then
    was `dppo_tv` with the threshold 0.2 and `old_logp="sampler"`. The gradient is 2 log(π/μ) ∇log π,
    twice the gradient of `kl.token_kl` to μ.

    >>> logp, sampler_logp = jnp.array([[0.0, -1.0, -1.5]]), jnp.array([[0.0, -1.0, -2.0]])
    >>> log_ratio_square(logp, sampler_logp, jnp.array([[False, True, True]])).value.tolist()
    [0.125]

    Args:
      logp: float32 [B, T], of the policy that is trained.
      sampler_logp: float32 [B, T], of the policy that sampled the tokens; a constant.
      mask: bool [B, T], True on response tokens.

    Returns:
      Terms with float32 [B] leaves and the metric `log_ratio_square`.

    Differs from the source: the log-ratio is clipped to ±25, in the value and as a factor of the gradient.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, sampler_logp, mask, segment_ids, other_name="sampler_logp")
    return _terms("log_ratio_square", squared(x_BT, logp_BT), mask_BT, aggregate, segment_BT)


@formula("weight * abs(logp - old_logp)")
def log_ratio_size(
    logp: Array,
    old_logp: Array,
    weight: Array,
    mask: Array,
    *,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute w |log π - log π_old| of each token: KL-Cov's penalty (arXiv 2505.22617), w = 1 for `selection.top_cov`.

    verl's `kl_cov` is this with the coefficient 1 and `importance_sampling`, whose ratio nothing bounds: it leaves
    the few tokens that cost most entropy where they are, and no other. The gradient is w times the sign of the
    log-ratio times ∇log π, however small that is: in a rollout's first update rounding chooses the sign.

    Args:
      logp: float32 [B, T], of the policy that is trained.
      old_logp: float32 [B, T], of the policy before the updates; a constant.
      weight: float32 [B, T], a constant.
      mask: bool [B, T], True on response tokens.

    Returns:
      Terms with float32 [B] leaves and the metric `kl_cov`, the mean over all response tokens.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, old_logp, mask, segment_ids, other_name="old_logp")
    weight_BT = checks.array("weight", weight, jnp.float32, "BT")
    checks.same_shape("weight", weight_BT, "logp", x_BT.shape)
    weight_BT = stop_gradient(jnp.where(mask_BT, weight_BT, 0))
    value_BT = with_gradient(weight_BT * jnp.abs(x_BT), weight_BT * jnp.sign(x_BT), logp_BT)
    return _terms("kl_cov", value_BT, mask_BT, aggregate, segment_BT)


@formula("mean_l(sum_e(load * router_prob))")
def load_balance(
    prob: Array,
    load: Array,
    mask: Array,
    *,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute E Σ_e f_e P_e of the routers, averaged over layers (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

    f_e is the share of the expert choices that went to e, a constant, and P_e the mean probability of e. `load` is
    E f_e: pass the whole batch's with every microbatch; the sum over tokens is then linear in the probabilities,
    so any split gives the same gradient (balance over the global batch, arXiv 2501.11873). It is 1 if balanced.

    In pre-training it makes routers use all experts, with the coefficient 0.01. In RL it works against the reward: verl
    leaves it off because it hurts, NeMo-RL because log-probabilities then diverge more between engines; TRL uses
    0.001. The load can be measured without it (`learner.metrics.expert_load`).

    >>> prob, load = jnp.full((1, 1, 2, 4), 0.25), jnp.ones((1, 4))
    >>> load_balance(prob, load, jnp.array([[True, True]])).value.tolist()
    [1.0]

    Args:
      prob: float32 [L, B, T, E], softmax of the router's logits over all experts.
      load: float32 [L, E], each expert's tokens over the mean of its layer, as `learner.metrics.expert_load` gives.
      mask: bool [B, T], True on the tokens that count, prompt tokens included if `load` counts them.

    Returns:
      Terms with float32 [B] leaves and the metric `load_balance`.
    """
    prob_LBTE, mask_BT = _routers("prob", prob, mask)
    load_LE = checks.array("load", load, jnp.float32, "LE")
    checks.same_shape("load", load_LE, "prob in L and E", (prob_LBTE.shape[0], prob_LBTE.shape[-1]))
    prob_LBTE, load_LE = explicit.whole(prob_LBTE, 0, 3), explicit.whole(stop_gradient(load_LE))
    value_BT = jnp.einsum("lbte,le->bt", prob_LBTE, load_LE) / prob_LBTE.shape[0]
    return _terms("load_balance", value_BT, mask_BT, aggregate, segment_ids)


@formula("mean_l(logsumexp_e(router_logits)**2)")
def router_z(
    logits: Array, mask: Array, *, aggregate: Aggregate = by_sequence, segment_ids: Array | None = None
) -> Terms:
    """Compute (log Σ_e exp x_e)² of the router's logits x, averaged over layers (ST-MoE, arXiv 2202.08906, eq. 5).

    It keeps the logits small, where rounding changes the choice of experts less often. ST-MoE pre-trains with a
    coefficient of 0.001. For RL the sources above show no benefit; float32 routers achieve the same for free.

    >>> router_z(jnp.zeros((1, 1, 2, 4)), jnp.array([[True, True]])).value.round(4).tolist()  # (log 4)²
    [1.9218]

    Args:
      logits: float32 [L, B, T, E], of the routers, before the softmax.
      mask: bool [B, T], True on the tokens that count.

    Returns:
      Terms with float32 [B] leaves and the metric `router_z`.
    """
    logits_LBTE, mask_BT = _routers("logits", logits, mask)
    value_BT = jnp.mean(jax.nn.logsumexp(logits_LBTE, axis=-1) ** 2, axis=0)
    return _terms("router_z", value_BT, mask_BT, aggregate, segment_ids)


def _routers(name: str, value: ArrayLike, mask: ArrayLike) -> tuple[Array, Array]:
    """Check the routers' probabilities or logits and return them, 0 outside the mask, and the mask."""
    value_LBTE = checks.array(name, value, jnp.float32, "LBTE")
    mask_BT = checks.array("mask", mask, jnp.bool_, "BT")
    checks.same_shape("mask", mask_BT, f"{name} in [B, T]", value_LBTE.shape[1:3])
    return jnp.where(mask_BT[None, :, :, None], value_LBTE, 0), mask_BT


def _terms(
    name: str,
    value_BT: Array,
    mask_BT: Array,
    aggregate: Aggregate,
    segment_ids: ArrayLike | None,
    sign: int = 1,
) -> Terms:
    segment_BT = checks.segment_ids(segment_ids, mask_BT.shape, "mask")
    mask_BT = sequences.response(mask_BT, segment_BT)
    metric = mean_over(sign * stop_gradient(value_BT), mask_BT)
    return Terms(*aggregate(value_BT, mask_BT, segment_BT), {name: metric})
