"""Computes a teacher's divergence from the policy on the policy's samples, within an update.

The teacher's log-probs of the sampled tokens are computed before the updates, like a reference policy's.
Where other tokens of the vocabulary are compared as well, its last hidden states are, and every chunk of
`forward.head_logp` multiplies them with the teacher's head in addition to the policy's.

Axes: as in docs/architecture.md; K kept tokens, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.config import Teacher
from gspax.config.protocols import Divergence
from gspax.losses import distill
from gspax.losses.kl import k3
from gspax.losses.terms import mean_over
from gspax.types import Array, Batch, PyTree, known

# (the policy's logits [C, V], the teacher's, the sampled tokens [C], their sampling masks) -> arrays [C, ...], float32
Compare = Callable[[Array, Array, Array, Array | None], PyTree]


class KeptLogp(NamedTuple):
    """The float32 log-probs of policy and teacher that `distill.reverse_kl` takes."""

    policy_CK: Array  # of the kept tokens, differentiable
    teacher_CK: Array
    sampled_C: Array  # the teacher's of the sampled token
    has_sampled_C: Array  # 1 where the sampled token is a kept one, else 0


def make_compare(teacher: Teacher | None) -> Compare | None:
    """Make the function that compares a chunk's logits; None if log-probs of the sampled tokens suffice."""
    if teacher is None:
        return None
    if teacher.divergence is not None:
        return partial(_compare_all, teacher.divergence)
    return partial(_compare_kept, teacher.kept, teacher.kept_by == "policy") if teacher.kept else None


def _compare_all(divergence: Divergence, logits_CV: Array, teacher_CV: Array, *_: Array | None) -> Array:
    return divergence(jax.nn.log_softmax(logits_CV), jax.nn.log_softmax(teacher_CV))


def _compare_kept(
    count: int, by_policy: bool, logits_CV: Array, teacher_CV: Array, token_C: Array, _: Array | None
) -> KeptLogp:
    kept_CK = jax.lax.top_k(jax.lax.stop_gradient(logits_CV if by_policy else teacher_CV), count)[1]

    def of(logits_CV: Array, ids_CK: Array) -> Array:
        return distill.select_logp(logits_CV[None], ids_CK[None].astype(jnp.int32))[0]

    return KeptLogp(
        of(logits_CV, kept_CK),
        of(teacher_CV, kept_CK),
        of(teacher_CV, token_C[:, None])[:, 0],
        (kept_CK == token_C[:, None]).any(-1).astype(jnp.float32),
    )


def divergence_terms(
    teacher: Teacher,
    logp_BT: Array,
    compared: PyTree,
    batch: Batch,
    *,
    aggregate: losses.Aggregate,
    segment_ids: Array | None,
) -> losses.Terms:
    """Compute the teacher's divergence over the response tokens, aggregated like the policy loss.

    Args:
      compared: the result of `make_compare`'s function for each token, [B, T, ...]; None with `batch.teacher_logp_BT`.
    """
    mask_BT = batch.mask_BT
    if teacher.divergence is not None:
        return distill.mean_divergence(compared, mask_BT, aggregate=aggregate, segment_ids=segment_ids)
    if teacher.kept:
        teacher_logp_BT = compared.sampled_C
        kept = distill.Kept(compared.policy_CK, compared.teacher_CK, compared.has_sampled_C > 0)
    else:
        teacher_logp_BT, none_BTK = known(batch, "teacher_logp_BT"), jnp.zeros((*mask_BT.shape, 0), jnp.float32)
        kept = distill.Kept(none_BTK, none_BTK, jnp.zeros_like(mask_BT))
    terms = distill.reverse_kl(
        logp_BT,
        teacher_logp_BT,
        mask_BT,
        kept,
        old_logp=known(batch, "old_logp_BT"),
        aggregate=aggregate,
        segment_ids=segment_ids,
    )
    return terms if teacher.kept else terms._replace(metrics={"teacher_kl": terms.metrics["teacher_kl"]})


def mix_advantage(teacher: Teacher | None, batch: Batch) -> tuple[Batch, losses.Metrics]:
    """Add the teacher's advantage to the batch's if `as_advantage`, and return its KL as a metric."""
    if teacher is None or not teacher.as_advantage:
        return batch, {}
    logp_BT, teacher_logp_BT = known(batch, "old_logp_BT"), known(batch, "teacher_logp_BT")
    mixed_BT = distill.mixed_advantage(
        known(batch, "advantage"), logp_BT, teacher_logp_BT, batch.mask_BT, coefficient=teacher.coefficient
    )
    kl_BT = k3(logp_BT, teacher_logp_BT, batch.mask_BT)
    return replace(batch, advantage=mixed_BT), {"teacher_kl": mean_over(kl_BT, batch.mask_BT)}
