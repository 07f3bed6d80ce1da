"""On-policy distillation: the KL to a teacher, on tokens that the student sampled itself.

Let p be the student's and q the teacher's distribution of the next token in a context of the student's, and
k3(x) = exp(-x) - 1 + x with x_v = log p(v) - log q(v). As Σ p = Σ q = 1,

    KL(p‖q) = Σ_v p(v) log(p(v)/q(v)) = Σ_v [p(v) log(p(v)/q(v)) - p(v) + q(v)] = Σ_v p(v) k3(x_v).

Each term of the last two sums is at least 0, and its derivative by p(v) is x_v alone. So the sum may be split at any
set K of tokens: over K it is computed, and outside of it a token y that was sampled from p stands for the rest,

    E_y[ Σ_{v∈K} p(v) k3(x_v) + 1[y∉K] k3(x_y) ]                = KL(p‖q),
    E_y[ Σ_{v∈K} x_v p(v) ∇ log p(v) + 1[y∉K] x_y ∇ log p(y) ]  = ∇ KL(p‖q),

for every K that is chosen without looking at y, if p > 0 where q > 0 outside of it. The gradient is set separately:
the derivative of the sampled value belongs to another divergence. With K empty this is the sampled estimator, an
advantage of log q - log p (Thinking Machines 2025, "On-Policy Distillation"; GLM-5, arXiv 2602.15763, eq. 2); with all
of the vocabulary it is the exact KL (DeepSeek-V4). Two other forms have a biased gradient: a sum over K alone, and
Σ_{v∈K} p log(p/q) with the sampled term for the rest, which adds Σ_{v∈K} ∇p(v).

- `reverse_kl` is the estimate above as `Terms`; `select_logp` gathers its log-probs of the kept tokens.
- `chunked_divergence` compares all of both vocabularies without logits [B, T, V] in memory, by `full_reverse_kl`,
  `full_forward_kl`, or `jensen_shannon`; `mean_divergence` makes `Terms` of its result.
- `mixed_advantage` adds the sampled estimator to a task's advantage.

Contexts are data, as in `kl.token_kl`: what a token does to the contexts after it is left out. Join a policy loss with
`kl.add_penalty`.

Difference from the equation: x is clipped to ±25, in the value and as a factor of the gradient.

Axes: B rows, T tokens, K kept tokens, V vocabulary, D and E model widths, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from gspax.losses import checks, explicit, sequences
from gspax.losses.formulas import formula
from gspax.losses.logprobs import checked_logits, in_chunks
from gspax.losses.surrogate import compare_logp, k3_of, limited_log_ratio, sampling_ratio, with_gradient
from gspax.losses.terms import Aggregate, Metrics, Terms, by_sequence, mean_over

Array = jax.Array

_MIXED = "log(beta * exp(teacher_logp_v) + (1 - beta) * exp(logp_v))"
Divergence = Callable[[Array, Array], Array]
"""(student's log-probs [..., V], teacher's log-probs [..., V], a constant) -> [...], at least 0, differentiable."""


class Kept(NamedTuple):
    """The log-probs of the kept tokens K of the distribution that each token was sampled from."""

    logp_BTK: Array  # float32  of the student, differentiable
    teacher_logp_BTK: Array  # float32  of the teacher, a constant
    has_sampled_BT: Array  # bool     the token that was sampled is one of them


@formula(
    "sum_k(exp(kept_logp) * k3(kept_logp - kept_teacher_logp))"
    " + where(sampled_is_kept, 0, exp(logp - old_logp) * k3(logp - teacher_logp))"
)
def reverse_kl(
    logp: Array,
    teacher_logp: Array,
    mask: Array,
    kept: Kept,
    *,
    old_logp: Array | None = None,
    aggregate: Aggregate = by_sequence,
    segment_ids: Array | None = None,
) -> Terms:
    """Compute KL(student‖teacher) of each next token: exact over the kept tokens, sampled outside of them.

    Value and gradient are unbiased for every set of kept tokens that does not depend on the sampled one (see the
    module). With none it is `kl.token_kl`.

    >>> logp, teacher_logp = jnp.log(jnp.array([[1.0, 0.5]])), jnp.log(jnp.array([[1.0, 0.25]]))
    >>> p_BTK, q_BTK = jnp.array([[[1.0, 1.0], [0.5, 0.5]]]), jnp.array([[[1.0, 1.0], [0.25, 0.75]]])
    >>> both = Kept(jnp.log(p_BTK), jnp.log(q_BTK), jnp.ones((1, 2), bool))
    >>> mask = jnp.array([[False, True]])
    >>> reverse_kl(logp, teacher_logp, mask, both).value.round(4).tolist()  # (log 2 + log 2/3) / 2
    [0.1438]

    Args:
      logp: float32 [B, T], the student's, of the tokens that it sampled.
      teacher_logp: float32 [B, T], the teacher's, of the same tokens; a constant.
      mask: bool [B, T], True on response tokens.
      kept: of each position; K may be 0.
      old_logp: float32 [B, T], of the policy that sampled the tokens; a constant. The sampled rest is multiplied by the
        ratio of the student to it. None: the student itself.
      aggregate: values [B, T] -> value and weight [B], the one of the policy loss that it joins.
      segment_ids: None, or int32 [B, T] for packed rows.

    Returns:
      Terms with float32 [B] leaves and, as means over the response tokens, the metrics `teacher_kl` (the value),
      `kept_mass` (the student's probability of the kept tokens) and `kept_sampled` (the sampled tokens among them).

    Raises:
      TypeError, ValueError: an argument is no array, or of another dtype or shape.
    """
    logp_BT, x_BT, mask_BT, segment_BT = compare_logp(logp, teacher_logp, mask, segment_ids)
    kept_logp_BTK, kept_x_BTK, outside_BT = _kept(kept, mask_BT)
    ratio_BT = sampling_ratio(logp_BT, old_logp, mask_BT)
    p_BTK = stop_gradient(jnp.exp(kept_logp_BTK))
    exact_BT = with_gradient(p_BTK * k3_of(kept_x_BTK), p_BTK * kept_x_BTK, kept_logp_BTK).sum(-1)
    weight_BT = jnp.where(outside_BT, ratio_BT, 0)
    value_BT = exact_BT + with_gradient(weight_BT * k3_of(x_BT), weight_BT * x_BT, logp_BT)
    metrics: Metrics = {
        "teacher_kl": mean_over(stop_gradient(value_BT), mask_BT),
        "kept_mass": mean_over(p_BTK.sum(-1), mask_BT),
        "kept_sampled": mean_over(~outside_BT, mask_BT),
    }
    return Terms(*aggregate(value_BT, mask_BT, segment_BT), metrics)


def select_logp(logits_BCV: Array, kept_BCK: Array, *, temperature: float = 1.0) -> Array:
    """Compute log p of the kept tokens, float32 [B, C, K], without the log-probs of the others.

    Args:
      logits_BCV: float32 [B, C, V].
      kept_BCK: int32 [B, C, K], each in [0, V) and no token twice in a position.
      temperature: the logits are divided by it: the one that the student sampled with, also for the teacher.

    Raises:
      TypeError: logits that are not float32, ids that are not int32, a temperature that is no Python number.
      ValueError: shapes do not fit; K is larger than V; temperature not above 0.
    """
    logits_BCV = checks.array("logits_BCV", logits_BCV, jnp.float32, "BCV")
    kept_BCK = checks.array("kept_BCK", kept_BCK, jnp.int32, "BCK")
    if kept_BCK.shape[:2] != logits_BCV.shape[:2]:
        wanted = f"kept_BCK must have the rows and positions {list(logits_BCV.shape[:2])} of logits_BCV"
        raise ValueError(f"{wanted}; got {list(kept_BCK.shape)}")
    if kept_BCK.shape[2] > logits_BCV.shape[2]:
        raise ValueError(f"kept_BCK must name at most {logits_BCV.shape[2]} tokens; got {kept_BCK.shape[2]}")
    logits_BCV = logits_BCV / checks.positive("temperature", temperature)
    lse_BC1 = jax.nn.logsumexp(logits_BCV, axis=-1, keepdims=True)
    return jnp.take_along_axis(explicit.whole(logits_BCV, -1), kept_BCK, axis=-1) - lse_BC1


def chunked_divergence(
    divergence: Divergence,
    project: Callable[[Array], Array],
    hidden_BTD: Array,
    teacher_project: Callable[[Array], Array],
    teacher_hidden_BTE: Array,
    *,
    temperature: float = 1.0,
    chunk: int,
) -> Array:
    """Compute the divergence of the whole next-token distributions, without logits of all positions at once.

    Logits of `chunk` positions are computed at a time, and again in the backward pass: memory for them is 2·B·chunk·V.
    The models may have different widths, but one vocabulary.

    Args:
      divergence: `full_reverse_kl`, `full_forward_kl`, or `partial(jensen_shannon, beta=0.5)`.
      project: [B, C, D] -> float32 logits [B, C, V] of the student. Parameters it closes over get gradients.
      hidden_BTD: [B, T, D], the student's last hidden states.
      teacher_project: [B, C, E] -> float32 logits [B, C, V] of the teacher; a constant.
      teacher_hidden_BTE: [B, T, E]; a constant.
      temperature: both logits are divided by it.
      chunk: positions at a time, at least 1; need not divide T.

    Returns:
      float32 [B, T]; column t compares the distributions that token t was sampled from, column 0 is 0. Differentiable.

    Raises:
      TypeError: logits that are not float32, a number of the wrong type.
      ValueError: shapes or vocabularies differ; temperature not above 0; chunk below 1.
    """
    if hidden_BTD.shape[:2] != teacher_hidden_BTE.shape[:2]:
        wanted, got = list(hidden_BTD.shape[:2]), list(teacher_hidden_BTE.shape[:2])
        raise ValueError(f"teacher_hidden_BTE must have the rows and tokens {wanted} of hidden_BTD; got {got}")
    temperature, chunk = checks.positive("temperature", temperature), checks.count("chunk", chunk)

    def compare(hidden_BCD: Array, teacher_hidden_BCE: Array) -> Array:
        logits_BCV = checked_logits(project, hidden_BCD)
        teacher_BCV = stop_gradient(checked_logits(teacher_project, teacher_hidden_BCE))
        if logits_BCV.shape != teacher_BCV.shape:
            wanted, got = logits_BCV.shape[2], teacher_BCV.shape[2]
            raise ValueError(f"teacher_project must give the student's {wanted} tokens of the vocabulary; got {got}")
        log_softmax = partial(jax.nn.log_softmax, axis=-1)
        return divergence(log_softmax(logits_BCV / temperature), log_softmax(teacher_BCV / temperature))

    hidden_BTD, teacher_hidden_BTE = (explicit.whole(x, 1) for x in (hidden_BTD, stop_gradient(teacher_hidden_BTE)))
    return jnp.pad(in_chunks(compare, chunk, hidden_BTD[:, :-1], teacher_hidden_BTE[:, :-1]), ((0, 0), (1, 0)))


@formula("sum_v(exp(logp_v) * (logp_v - teacher_logp_v))")
def full_reverse_kl(logp_V: Array, teacher_logp_V: Array) -> Array:
    """Compute KL(p‖q) = Σ p log(p/q): the student stays within the tokens that the teacher finds likely."""
    return _expected(logp_V, logp_V, teacher_logp_V)


@formula("sum_v(exp(teacher_logp_v) * (teacher_logp_v - logp_v))")
def full_forward_kl(logp_V: Array, teacher_logp_V: Array) -> Array:
    """Compute KL(q‖p) = Σ q log(q/p): the student covers all tokens that the teacher finds likely."""
    return _expected(teacher_logp_V, teacher_logp_V, logp_V)


@formula(
    f"sum_v(beta * exp(teacher_logp_v) * (teacher_logp_v - {_MIXED}) + (1 - beta) * exp(logp_v) * (logp_v - {_MIXED}))"
)
def jensen_shannon(logp_V: Array, teacher_logp_V: Array, *, beta: float) -> Array:
    """Compute β KL(q‖m) + (1 - β) KL(p‖m), m = βq + (1 - β)p (GKD, arXiv 2306.13649, eq. 1 with the student as p).

    Divided by β it tends to KL(q‖p) for β → 0, and divided by 1 - β to KL(p‖q) for β → 1.

    Raises:
      TypeError: beta is no Python number.
      ValueError: beta is not between 0 and 1.
    """
    if not 0 < checks.number("beta", beta) < 1:
        raise ValueError(f"beta must be above 0 and below 1 (the ends are the forward and the reverse KL); got {beta}")
    # a token that neither finds possible would give NaN in the derivative of logaddexp
    neither_V = jnp.isneginf(logp_V) & jnp.isneginf(teacher_logp_V)
    p_V, q_V = (jnp.where(neither_V, 0, side_V) for side_V in (logp_V, teacher_logp_V))
    mixed_V = jnp.logaddexp(q_V + jnp.log(beta), p_V + jnp.log1p(-beta))
    return beta * _expected(teacher_logp_V, teacher_logp_V, mixed_V) + (1 - beta) * _expected(logp_V, logp_V, mixed_V)


def mean_divergence(
    value: Array, mask: Array, *, aggregate: Aggregate = by_sequence, segment_ids: Array | None = None
) -> Terms:
    """Make `Terms` of the values of `chunked_divergence`; their mean over the response tokens is `teacher_kl`.

    Args:
      value: float32 [B, T].
      mask: bool [B, T], True on response tokens.
      aggregate: values [B, T] -> value and weight [B], the one of the policy loss that it joins.
      segment_ids: None, or int32 [B, T] for packed rows.
    """
    value_BT, mask_BT, segment_BT = checks.aggregate_inputs(value, mask, segment_ids)
    mask_BT = sequences.response(mask_BT, segment_BT)
    terms = aggregate(value_BT, mask_BT, segment_BT)
    return Terms(*terms, {"teacher_kl": mean_over(stop_gradient(value_BT), mask_BT)})


@formula("advantage - coefficient * (logp - teacher_logp)")
def mixed_advantage(
    advantage: ArrayLike, logp: ArrayLike, teacher_logp: ArrayLike, mask: ArrayLike, *, coefficient: float = 1.0
) -> Array:
    """Compute A_t = A - λ (log p_t - log q_t), float32 [B, T]: a task's advantage plus sampled distillation.

    The second part is the sampled estimator of -∇ KL(p‖q). With A = 0 it is the advantage of distillation alone: then a
    group of one completion is enough. For losses that take an advantage per token.

    >>> logp, teacher_logp = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.5]]))
    >>> mixed_advantage(jnp.ones(1), logp, teacher_logp, jnp.ones((1, 2), bool)).round(3).tolist()
    [[0.307, 1.0]]

    Args:
      advantage: float32 [B] or [B, T], of the task; zeros for distillation alone.
      logp: float32 [B, T], of the policy that sampled the tokens.
      teacher_logp: float32 [B, T].
      mask: bool [B, T]; 0 outside of it.
      coefficient: λ.
    """
    _, x_BT, mask_BT, _ = compare_logp(logp, teacher_logp, mask, None)
    rank = len(getattr(advantage, "shape", ()))
    task = checks.array("advantage", advantage, jnp.float32, "BT" if rank == 2 else "B")
    checks.same_shape("advantage", task, "logp" if rank == 2 else "logp in its rows", x_BT.shape[:rank])
    task_BU = task if rank == 2 else task[:, None]
    return jnp.where(mask_BT, task_BU - float(checks.number("coefficient", coefficient)) * x_BT, 0)


def _kept(kept: Kept, mask_BT: Array) -> tuple[Array, Array, Array]:
    """Return the student's log-probs of the kept tokens, their x, and where the sampled token is none of them."""
    logp_BTK = checks.finite_logp("kept.logp_BTK", kept.logp_BTK, axes="BTK")
    teacher_BTK = checks.finite_logp("kept.teacher_logp_BTK", kept.teacher_logp_BTK, axes="BTK")
    checks.same_shape("kept.teacher_logp_BTK", teacher_BTK, "kept.logp_BTK", logp_BTK.shape)
    sampled_BT = checks.array("kept.has_sampled_BT", kept.has_sampled_BT, jnp.bool_, "BT")
    checks.same_shape("kept.has_sampled_BT", sampled_BT, "mask", mask_BT.shape)
    if logp_BTK.shape[:2] != mask_BT.shape:
        wanted = f"kept.logp_BTK must have the rows and tokens {list(mask_BT.shape)} of mask"
        raise ValueError(f"{wanted}; got {list(logp_BTK.shape)}")
    mask_BT1 = mask_BT[..., None]
    logp_BTK = jnp.where(mask_BT1, logp_BTK, 0)
    return logp_BTK, limited_log_ratio(logp_BTK, teacher_BTK, mask_BT1), mask_BT & ~sampled_BT


def _expected(weight_logp_V: Array, logp_V: Array, other_V: Array) -> Array:
    """Compute Σ_v exp(weight) (logp - other); a token of weight 0 adds nothing, whatever the other log-probs are."""
    p_V = jnp.exp(weight_logp_V)
    logp_V, other_V = (jnp.where(p_V > 0, side_V, 0) for side_V in (logp_V, other_V))
    return jnp.sum(p_V * (logp_V - other_V), axis=-1)
