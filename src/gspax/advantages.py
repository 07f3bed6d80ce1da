"""Rewards [P, G] -> advantages [P, G]: P prompts, G samples of each, a prompt's samples in one row.

Every function takes an optional mask [P, G] of the valid samples: groups of unequal size are padded, and a sample left
out (a truncated one, say) affects nothing, NaN included, and has the advantage 0. Rows in another order, each with the
id of its group, go through `by_group`.

A group whose rewards are all equal carries no signal and gets exact zeros: the group's lowest reward is subtracted
before the mean is taken, because the rounded mean of equal numbers may differ from them. A group of one is such a
group. This also keeps the differences between rewards of any offset, and no variance is ever a difference of two large
numbers.

Rewards are float32, or any other real dtype (bool, integers, other floats), which is converted to float32 first:
rewards are often booleans or counts, and numpy makes Python's numbers float64. Advantages are float32. All functions
are pure and can be compiled. They raise TypeError for anything but an array of real numbers, and ValueError for a rank
other than 2 or an empty group.

Differences from the papers: they specify neither the divisor in the standard deviation nor the number added to it. Here
these are G - ddof with ddof 1, and eps 1e-6. Other differences are noted in each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gspax.losses import checks, explicit, masked, traits
from gspax.losses.formulas import formula

Array = jax.Array

__all__ = [
    "across_groups",
    "best_of_group",
    "by_group",
    "by_turn",
    "center",
    "constant_groups",
    "gdpo",
    "leave_one_out",
    "maxrl",
    "non_negative",
    "opo",
    "otb",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "standardize",
]


Function = TypeVar("Function", bound=Callable[..., Array])


def across_groups(advantage: Function) -> Function:
    """Mark an advantage as comparing the samples of the whole batch instead of a group; a decorator.

    So a group may have one sample, and a group of equal rewards has a signal, which dynamic sampling would remove.
    """
    setattr(advantage, "across_groups", True)  # noqa: B010 (mypy: functions have no such attribute)
    return advantage


def compares_groups(advantage: Callable[..., object]) -> bool:
    """Return whether an advantage, or a function that it wraps (`partial`, `wraps`), is `across_groups`."""
    return any(getattr(layer, "across_groups", False) for layer in traits.layers(advantage))


def non_negative(advantage: Function) -> Function:
    """Mark an advantage as taking no negative rewards, so that no negative number is added to them; a decorator."""
    setattr(advantage, "non_negative", True)  # noqa: B010
    return advantage


def takes_negative(advantage: Callable[..., object]) -> bool:
    """Return whether an advantage takes negative rewards: it is not `non_negative`."""
    return not any(getattr(layer, "non_negative", False) for layer in traits.layers(advantage))


@formula("(reward - mean_g(reward)) / (std_g(reward, ddof) + eps)")
def standardize(reward_PG: Array, mask_PG: Array | None = None, *, ddof: int = 1, eps: float = 1e-6) -> Array:
    """Compute A = (R - mean) / (std + eps) by group, as in GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071, eq. 6).

    >>> standardize(jnp.array([[0.8, 0.4, 0.6], [1.0, 1.0, 1.0]])).round(3).tolist()
    [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]

    Args:
      reward_PG: [P, G].
      mask_PG: bool [P, G], the samples that there are; None for all.
      ddof: the sum of squares is divided by G - ddof; 1 for the sample's standard deviation.
      eps: added to the standard deviation. It bounds the advantages of a group whose rewards hardly differ.

    Raises:
      TypeError, ValueError: see the module; also a ddof outside [0, G), unless G is 1, and a negative eps.
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    _check_scale(ddof, eps, reward_PG.shape[1], "the group size")
    return _standardize(reward_PG, mask_PG, ddof, eps)


@formula("reward - mean_g(reward)")
def center(reward_PG: Array, mask_PG: Array | None = None) -> Array:
    """Compute A = R - mean in each group (Dr. GRPO, arXiv 2503.20783, Section 3.2).

    >>> center(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    return _center(*_rewards(reward_PG, mask_PG))


@formula("(reward - mean_g(reward)) * group / (group - 1)")
def leave_one_out(reward_PG: Array, mask_PG: Array | None = None) -> Array:
    """Compute A_i = R_i - mean of the group's others (RLOO, arXiv 2402.14740), which is (R_i - mean)·G/(G - 1).

    The baseline does not depend on the sample, so the policy gradient is unbiased. There is no leave-one-out standard
    deviation: it is 0 for the one sample that differs from all others.

    >>> leave_one_out(jnp.array([[1.0, 0.0, 0.0]])).tolist()
    [[1.0, -0.5, -0.5]]
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    count_P1 = _count(mask_PG)
    return _center(reward_PG, mask_PG) * (count_P1 / jnp.maximum(count_P1 - 1, 1))


@formula("(reward - mean_b(reward)) / (std_b(reward, ddof) + eps)")
@across_groups
def reinforce_plus_plus(reward_PG: Array, mask_PG: Array | None = None, *, ddof: int = 1, eps: float = 1e-6) -> Array:
    """Compute A = (R - mean) / (std + eps), both over the whole batch (REINFORCE++, arXiv 2501.03262).

    There is no group: any [P, G] of the same rewards gives the same advantages, and G may be 1. Differs from the
    paper: a sequence has one advantage, so the statistics weigh sequences equally and not by their tokens, and there
    is no KL penalty inside. To add one, subtract β Σ_t k1 (`losses.kl`) from the rewards first.

    >>> reinforce_plus_plus(jnp.array([[1.0, 1.0], [0.0, 0.0]]), ddof=0).round(3).tolist()
    [[1.0, 1.0], [-1.0, -1.0]]
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    _check_scale(ddof, eps, reward_PG.size, "the batch size")
    advantage_1N = _standardize(_flat(reward_PG), _flat(mask_PG), ddof, eps)
    return explicit.like(advantage_1N.reshape(reward_PG.shape), reward_PG)


@formula("centered = reward - mean_g(reward)\ncentered / (std_b(centered, ddof) + eps)")
def reinforce_plus_plus_baseline(
    reward_PG: Array, mask_PG: Array | None = None, *, ddof: int = 1, eps: float = 1e-6
) -> Array:
    """Compute A = (R - group mean) / (its std over the batch + eps) (REINFORCE++ w/ baseline, arXiv 2501.03262).

    The paper also subtracts the batch's mean of R - mean of the group, which is 0; here it is left out, so that a group
    of equal rewards has exact zeros. Such groups count in the batch's standard deviation, as in the paper.

    >>> reinforce_plus_plus_baseline(jnp.array([[3.0, 1.0], [2.0, 2.0]]), ddof=0).round(3).tolist()
    [[1.414, -1.414], [0.0, 0.0]]
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    _check_scale(ddof, eps, reward_PG.size, "the batch size")
    return _over_batch_std(_center(reward_PG, mask_PG), mask_PG, ddof, eps)


def _weighted_rewards(keywords: Mapping[str, Any]) -> str:
    weights = keywords.get("weights")
    factor = "" if weights is None else f"weights({', '.join(map(repr, weights))}) * "
    each = "(reward - mean_g(reward)) / (std_g(reward, ddof) + eps)"
    return f"total = sum_r({factor}{each})\ntotal / (std_b(total, ddof) + eps)"


@formula(_weighted_rewards)
def gdpo(
    reward_PGR: Array,
    mask_PG: Array | None = None,
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Array:
    """Standardize each of several rewards in its group, then add them (GDPO, arXiv 2601.05242).

    A_r = (R_r - mean) / (std + eps) in each group;  S = Σ_r w_r A_r;  A = S / (std of S over the batch + eps).
    Adding before standardizing would let the reward with the widest range dominate, and make groups in which one reward
    differs look like groups in which all do. A reward that is constant in a group adds exact zeros there. The batch's
    mean of S, which the paper subtracts, is 0 and left out, for the same exact zeros.

    >>> gdpo(jnp.array([[[1.0, 0.3], [0.0, 0.3]]])).round(4).tolist()  # the second reward is constant
    [[0.7071, -0.7071]]

    Args:
      reward_PGR: [P, G, R], R rewards of each sample.
      mask_PG: bool [P, G], the samples that there are; None for all.
      weights: R finite Python numbers; None for 1 each. Rewards with names are in the alphabetical order of the names.
      ddof, eps: as in `standardize`, in the group and in the batch.

    Raises:
      TypeError, ValueError: see the module; also weights that are not R numbers.
    """
    reward_PGR = _real("reward_PGR", reward_PGR, "PGR")
    P, G, R = reward_PGR.shape
    mask_PG = _mask(mask_PG, "reward_PGR", (P, G))
    _check_scale(ddof, eps, G, "the group size")
    weights = (1.0,) * R if weights is None else tuple(weights)
    for weight in weights:
        checks.number("weights", weight)
    if len(weights) != R or not all(map(math.isfinite, weights)):
        raise ValueError(f"weights must be {R} finite numbers, one for each reward; got {weights}")
    each_R = [_standardize(reward_PGR[..., r], mask_PG, ddof, eps) * float(weights[r]) for r in range(R)]
    return _over_batch_std(sum(each_R[1:], start=each_R[0]), mask_PG, ddof, eps)


@formula("where(mean_g(reward) == 0, 0, (reward - mean_g(reward)) / mean_g(reward))")
@non_negative
def maxrl(reward_PG: Array, mask_PG: Array | None = None) -> Array:
    """Compute A = (R - mean) / mean in each group, 0 if no sample succeeds (MaxRL, arXiv 2602.02710).

    For rewards 0 and 1. The likelihood of success has log p = -Σ_k (1 - pass@k)/k; the usual policy gradient comes from
    the first term alone, and a prompt of success rate p has a weight of about 1/p here, so hard prompts count more.
    With the mean as baseline, the expectation of Σ_i A_i ∇log π(y_i) / G is the gradient of Σ_k pass@k / k for k from 1
    to G - 1, as a test verifies by enumeration. (Without the baseline the sum runs to G.) The loss supplies the 1/G.

    The paper's rewards are 0 and 1. Other non-negative ones also have advantages between -1 and G - 1. With a negative
    one the division is meaningless: ValueError, and while traced, where nothing can be raised, NaN.

    >>> maxrl(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    lowest_P1 = masked.min(reward_PG, mask_PG, axis=-1)[:, None]
    if not isinstance(lowest_P1, jax.core.Tracer) and (lowest_P1 < 0).any():
        raise ValueError(f"reward_PG must not be negative, best 0 or 1, for maxrl; got {float(lowest_P1.min())}")
    mean_P1 = jnp.where(lowest_P1 < 0, jnp.nan, _mean(reward_PG, mask_PG))
    return jnp.where(mean_P1 == 0, 0, _center(reward_PG, mask_PG) / jnp.where(mean_P1 == 0, 1, mean_P1))


@formula("reward - sum_g(length * reward) / sum_g(length)")
def opo(reward_PG: Array, mask_PG: Array | None = None, *, length_PG: Array | None = None) -> Array:
    """Compute A = R - Σ l R / Σ l in each group, with the lengths l (OPO, arXiv 2505.23585, its practical form).

    The baseline that minimizes the variance of the on-policy gradient, if the squared norm of a response's score grows
    with its length and tokens are summed. A run passes the tokens that the policy sampled; there is no division by the
    standard deviation. The baseline contains the sample itself, so unlike in `leave_one_out` it biases the
    gradient: where the better of three responses are longer (1, 4, and 8 tokens), the expectation has a cosine of 0.968
    with the policy gradient at G = 2, and of 0.979 at G = 3.

    >>> opo(jnp.array([[1.0, 0.0, 0.0]]), length_PG=jnp.array([[6, 2, 4]])).tolist()
    [[0.5, -0.5, -0.5]]

    Args:
      reward_PG: [P, G].
      mask_PG: bool [P, G], the samples that there are; None for all.
      length_PG: [P, G], response tokens of each sample.

    Raises:
      TypeError, ValueError: see the module; also without lengths.
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    length_PG = _real("length_PG", length_PG, "PG")
    checks.same_shape("length_PG", length_PG, "reward_PG", reward_PG.shape)
    above_PG = reward_PG - masked.min(reward_PG, mask_PG, axis=-1)[:, None]  # zeros for equal rewards
    total_P1 = masked.sum(length_PG, mask_PG, axis=-1)[:, None]
    baseline_P1 = masked.sum(length_PG * above_PG, mask_PG, axis=-1)[:, None] / jnp.where(total_P1 > 0, total_P1, 1)
    return jnp.where(mask_PG, above_PG - baseline_P1, 0)


@formula("realized = up_to_t(score_norm) + 1e-08\nreward - sum_g(realized * reward) / sum_g(realized)")
def otb(
    reward_PG: Array,
    mask_PG: Array | None = None,
    *,
    length_PG: Array | None = None,
    score_norm_PGN: Array | None = None,
) -> Array:
    """Compute A_t = R - Σ W_t R / Σ W_t by group, float32 [P, G, N] (optimal token baseline, OTB, arXiv 2602.07078).

    W_t sums ‖∇ log π‖² over the tokens up to t: a sample's weight in the baseline is the part of the squared gradient
    that it has realized by then, so the baseline of least variance is one for each token. The sums are over the
    samples with a t-th token. Where a sample is alone, its own reward is the baseline and its advantage is 0; verl
    can take 0 as the baseline there. The baseline contains the sample itself, which biases the gradient: at G = 2 and 3
    its expectation is 5 to 20 % shorter than (G - 1)/G of the policy gradient.

    >>> norm_PGN = jnp.array([[[1.0, 1.0], [3.0, 0.0], [1.0, 2.0]]])
    >>> otb(jnp.array([[1.0, 0.0, 0.0]]), length_PG=jnp.array([[2, 1, 2]]), score_norm_PGN=norm_PGN).round(3).tolist()
    [[[0.8, 0.6], [-0.2, 0.0], [-0.2, -0.4]]]

    Args:
      reward_PG: [P, G].
      mask_PG: bool [P, G], the samples that there are; None for all.
      length_PG: [P, G], response tokens of each sample.
      score_norm_PGN: [P, G, N], `losses.score_norm` of each response token, from the first; any after the last.

    Raises:
      TypeError, ValueError: see the module; also without lengths or norms.
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    length_PG, norm_PGN = _real("length_PG", length_PG, "PG"), _real("score_norm_PGN", score_norm_PGN, "PGN")
    checks.same_shape("length_PG", length_PG, "reward_PG", reward_PG.shape)
    checks.same_shape("score_norm_PGN[..., 0]", norm_PGN[..., 0], "reward_PG", reward_PG.shape)
    there_PGN = mask_PG[..., None] & (jnp.arange(norm_PGN.shape[2])[None, None] < length_PG[..., None])
    weight_PGN = jnp.cumsum(jnp.where(there_PGN, norm_PGN, 0), axis=-1) + 1e-8  # alike where nothing was uncertain
    above_PG1 = (reward_PG - masked.min(reward_PG, mask_PG, axis=-1)[:, None])[..., None]  # zeros for equal rewards
    total_PN = masked.sum(weight_PGN, there_PGN, axis=1)
    baseline_PN = masked.sum(weight_PGN * above_PG1, there_PGN, axis=1) / jnp.where(total_PN > 0, total_PN, 1)
    return jnp.where(there_PGN, above_PG1 - baseline_PN[:, None], 0)


@formula("max(reward - max_others_g(reward), 0)")
def best_of_group(reward_PG: Array, mask_PG: Array | None = None) -> Array:
    """Compute A = max R - max of the others' R, 0 for all but the best (arXiv 2503.19595; verl's `grpo_passk`).

    The objective is the best reward of the group, pass@G for rewards 0 and 1, instead of the mean: a sample gets what
    the group would lose without it. Where several are best, none would be missed. The expectation of Σ A ∇log π over
    the group is the gradient of E[max R], as a test verifies by enumeration. verl divides by the group's standard
    deviation by default.

    >>> best_of_group(jnp.array([[1.0, 0.25, 0.0], [1.0, 1.0, 0.0]])).tolist()
    [[0.75, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    reward_PG, mask_PG = _rewards(reward_PG, mask_PG)
    held_PG = jnp.where(mask_PG, reward_PG, -jnp.inf)
    order_PG = explicit.like(jnp.sort(explicit.whole(held_PG), axis=-1, descending=True), held_PG)
    second_P1 = order_PG[:, min(1, held_PG.shape[1] - 1)][:, None]
    second_P1 = jnp.where(_count(mask_PG) > 1, second_P1, order_PG[:, :1])  # a group of one has nothing to compare with
    return jnp.where(mask_PG, jnp.maximum(reward_PG - second_P1, 0), 0)


def constant_groups(reward_PG: Array, mask_PG: Array | None = None) -> Array:
    """Return bool [P]: all rewards of the group are equal. Its mean is the share of groups without a signal.

    >>> constant_groups(jnp.array([[1.0, 1.0], [1.0, 0.0]])).tolist()
    [True, False]
    """
    return _constant(*_rewards(reward_PG, mask_PG))


@jax.jit
def _constant(reward_PG: Array, mask_PG: Array) -> Array:
    highest_P = jnp.max(jnp.where(mask_PG, reward_PG, -jnp.inf), axis=-1)
    return highest_P <= jnp.min(jnp.where(mask_PG, reward_PG, jnp.inf), axis=-1)


def by_group(
    advantage: Callable[[Array, Array], Array], reward: Array, group_B: Array, *, size: int | None = None
) -> Array:
    """Compute advantages of rows in any order, in groups of any sizes: reward [B] -> advantage float32 [B].

    >>> by_group(center, jnp.array([1.0, 0.0, 0.0, 1.0, 0.5]), jnp.array([7, 3, 7, 3, 3])).tolist()
    [0.5, -0.5, -0.5, 0.5, 0.0]

    Rows with one id are gathered in one row of [P, G] with a mask, and the result is scattered back. P is B, as there
    cannot be more groups; the empty ones do not matter.

    Args:
      advantage: one of this module's functions, or any other (reward_PG, mask_PG) -> advantage_PG.
      reward: [B], or [B, R] for `gdpo`.
      group_B: integer [B], the id of each row's group: any numbers, equal for the samples of one prompt.
      size: G, the rows of the largest group; None for B, which always suffices but needs B² entries.

    Raises:
      TypeError, ValueError: reward and group_B have different lengths; size is not a positive int; a group has more
        rows than `size`. The last cannot be raised while traced: the surplus rows then have the advantage NaN.
    """
    axes = "BR" if len(getattr(reward, "shape", ())) == 2 else "B"
    reward = explicit.whole(_real("reward", reward, axes))
    B = reward.shape[0]
    group_B = explicit.whole(_ids(group_B, B))
    size = B if size is None else size
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size must be a Python int; got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"size must be at least 1; got {size}")

    order_B = jnp.argsort(group_B, stable=True)
    sorted_B = group_B[order_B]
    first_B = jnp.concatenate([jnp.ones(1, bool), sorted_B[1:] != sorted_B[:-1]])
    start_B = jax.lax.cummax(jnp.where(first_B, jnp.arange(B), 0))
    p_B = jnp.zeros(B, jnp.int32).at[order_B].set(jnp.cumsum(first_B, dtype=jnp.int32) - 1)
    g_B = jnp.zeros(B, jnp.int32).at[order_B].set((jnp.arange(B) - start_B).astype(jnp.int32))
    if not isinstance(g_B, jax.core.Tracer) and int(g_B.max()) >= size:
        raise ValueError(f"size must be at least the rows of the largest group, {int(g_B.max()) + 1}; got {size}")

    reward_PG = jnp.zeros((B, size, *reward.shape[1:]), jnp.float32).at[p_B, g_B].set(reward, mode="drop")
    mask_PG = jnp.zeros((B, size), bool).at[p_B, g_B].set(True, mode="drop")
    return advantage(reward_PG, mask_PG).at[p_B, g_B].get(mode="fill", fill_value=jnp.nan)


@formula("to_go(reward, discount)")
def by_turn(
    advantage: Callable[[Array, Array], Array], reward_PGK: Array, mask_PGK: Array, *, discount: float = 1.0
) -> Array:
    """Compute advantages of the turns of conversations, float32 [P, G, K], 0 outside the mask, for `gspo_token`.

    R_k = Σ_{j ≥ k} discount^(j - k) r_j;  A_k = `advantage` of R_k among the group's conversations that have a k-th
    turn. GSPO-token (arXiv 2507.18071, section 4.3) leaves open which advantages tokens have; a turn is credited here
    with its rewards to go, against a baseline that does not depend on the sample's own turn. With one turn, this is
    `advantage` itself.

    >>> reward_PGK = jnp.array([[[0.5, 1.0], [0.0, 1.0]]])
    >>> by_turn(center, reward_PGK, jnp.ones((1, 2, 2), bool)).tolist()  # the second turns do not differ
    [[[0.25, 0.0], [-0.25, 0.0]]]

    Args:
      advantage: one of this module's functions of (reward_PG, mask_PG).
      reward_PGK: [P, G, K], the reward of each turn.
      mask_PGK: bool, the turns that there are: the first ones of each conversation.
      discount: of a later turn's reward, for each turn between.
    """
    reward_PGK = _real("reward_PGK", reward_PGK, "PGK")
    mask_PGK = checks.array("mask_PGK", mask_PGK, jnp.bool_, "PGK")
    checks.same_shape("mask_PGK", mask_PGK, "reward_PGK", reward_PGK.shape)
    advantages, to_go_PG = [], jnp.zeros(reward_PGK.shape[:2])
    for k in reversed(range(reward_PGK.shape[2])):
        mask_PG = mask_PGK[..., k]
        to_go_PG = jnp.where(mask_PG, reward_PGK[..., k] + discount * to_go_PG, 0)
        advantages.append(jnp.where(mask_PG, advantage(to_go_PG, mask_PG), 0))
    return jnp.stack(advantages[::-1], axis=-1)


@jax.jit
def _center(reward_PG: Array, mask_PG: Array) -> Array:
    """Compute R - mean, from the differences to the lowest reward; 0 outside the mask."""
    lowest_P1 = masked.min(reward_PG, mask_PG, axis=-1)[:, None]
    above_PG = reward_PG - lowest_P1
    return jnp.where(mask_PG, above_PG - _mean(above_PG, mask_PG), 0)


@partial(jax.jit, static_argnames=("ddof", "eps"))  # one program instead of one for each operation
def _standardize(reward_PG: Array, mask_PG: Array, ddof: int, eps: float) -> Array:
    """Compute (R - mean) / (std + eps), 0 where that is 0/0."""
    centered_PG = _center(reward_PG, mask_PG)
    scale_P1 = _root_mean_square(centered_PG, mask_PG, ddof) + eps
    return centered_PG / jnp.where(scale_P1 == 0, 1, scale_P1)


def _over_batch_std(centered_PG: Array, mask_PG: Array, ddof: int, eps: float) -> Array:
    """Divide values with mean 0 over the batch by their standard deviation over the batch + eps."""
    scale = _root_mean_square(_flat(centered_PG), _flat(mask_PG), ddof)[0, 0] + eps
    return centered_PG / jnp.where(scale == 0, 1, scale)


def _root_mean_square(centered_PG: Array, mask_PG: Array, ddof: int) -> Array:
    """Compute sqrt(Σ x² / (G - ddof)) of centered numbers: E[x²] - E[x]² would cancel. [P, 1]"""
    return jnp.sqrt(jnp.sum(centered_PG**2, axis=-1, keepdims=True) / jnp.maximum(_count(mask_PG) - ddof, 1))


def _flat(value_PG: Array) -> Array:
    """Put the samples of all prompts in one row, [1, P·G]."""
    return explicit.whole(value_PG).reshape(1, -1)


def _mean(value_PG: Array, mask_PG: Array) -> Array:
    return masked.mean(value_PG, mask_PG, axis=-1)[:, None]


def _count(mask_PG: Array) -> Array:
    return jnp.sum(mask_PG, axis=-1, keepdims=True, dtype=jnp.float32)


def _check_scale(ddof: int, eps: float, size: int, of_what: str) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if ddof < 0 or (ddof >= size and size > 1):
        raise ValueError(f"ddof must be at least 0 and below {of_what} {size}; got {ddof}")


def _rewards(reward_PG: ArrayLike, mask_PG: ArrayLike | None) -> tuple[Array, Array]:
    """Return the rewards as float32 [P, G], and the mask."""
    reward_PG = _real("reward_PG", reward_PG, "PG")
    reward_PG, mask_PG = explicit.alike(reward_PG, _mask(mask_PG, "reward_PG", reward_PG.shape))
    return reward_PG, mask_PG


def _mask(mask_PG: ArrayLike | None, like: str, shape: tuple[int, ...]) -> Array:
    if mask_PG is None:
        return jnp.ones(shape, bool)
    mask_PG = checks.array("mask_PG", mask_PG, jnp.bool_, "PG")
    checks.same_shape("mask_PG", mask_PG, like, shape)
    return mask_PG


def _real(name: str, value: object, axes: str) -> Array:
    """Return a non-empty array of real numbers as float32."""
    array = checks.numbers(name, value, "real numbers", [jnp.floating, jnp.integer, jnp.bool_], axes)
    if 0 in array.shape[1:]:
        raise ValueError(f"{name} must have at least one sample of each prompt; got {checks.describe(value)}")
    return jnp.asarray(array, jnp.float32)


def _ids(group_B: object, B: int) -> Array:
    ids_B = checks.numbers("group_B", group_B, "integers", [jnp.integer], "B")
    checks.same_shape("group_B", ids_B, "reward in its rows", (B,))
    if isinstance(ids_B, np.ndarray):  # jax would drop the upper half of 64-bit ids, such as hashes of prompts
        ids_B = np.unique(ids_B, return_inverse=True)[1].reshape(-1)
    return jnp.asarray(ids_B)
