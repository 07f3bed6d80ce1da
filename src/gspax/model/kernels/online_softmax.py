"""A softmax over keys that come block by block: a running maximum, sum and weighted mean of values, in float32.

No array has the size of all scores.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from gspax.model.kernels.weights import Weight, unpack

MASKED = -1e30  # finite: a fully masked row gives a harmless mean instead of NaN
TINY = 1e-30  # the sum of no weights


class OnlineSoftmax(NamedTuple):
    """The state after some blocks.

    Axes: K key heads, Q queries of a key head, S keys of a block, H head, U head of values; any leading axes, such as
    rows.
    """

    top_KQ1: Array
    sum_KQ1: Array
    context_KQU: Array

    @staticmethod
    def begin(q_KQH: Array, width: int, sink_KQ1: Array | None = None) -> OnlineSoftmax:
        """Return the state before the first block, for values of this width; sinks have scores, but no values."""
        zero_KQU = jnp.zeros((*q_KQH.shape[:-1], width))
        if sink_KQ1 is not None:
            return OnlineSoftmax(sink_KQ1, jnp.ones_like(sink_KQ1), zero_KQU)
        return OnlineSoftmax(zero_KQU[..., :1] + MASKED, zero_KQU[..., :1], zero_KQU)

    def add(self, q_KQH: Array, k_KSH: Weight, v_KSU: Weight, visible_KQS: Array) -> OnlineSoftmax:
        """Return the state after one more block. `visible_KQS` may have axes of size one."""
        (k_KSH, k_KS), (v_KSU, v_KS) = (unpack(x, q_KQH.dtype) for x in (k_KSH, v_KSU))
        score_KQS = jnp.einsum("...qh,...sh->...qs", q_KQH, k_KSH, preferred_element_type=jnp.float32)
        score_KQS = score_KQS if k_KS is None else score_KQS * k_KS[..., None, :]
        score_KQS = jnp.where(visible_KQS, score_KQS * q_KQH.shape[-1] ** -0.5, MASKED)
        top_KQ1 = jnp.maximum(self.top_KQ1, score_KQS.max(axis=-1, keepdims=True))
        weight_KQS = jnp.where(visible_KQS, jnp.exp(score_KQS - top_KQ1), 0.0)
        shrink_KQ1 = jnp.exp(self.top_KQ1 - top_KQ1)
        scaled_KQS = weight_KQS if v_KS is None else weight_KQS * v_KS[..., None, :]
        part_KQU = jnp.einsum(
            "...qs,...su->...qu", scaled_KQS.astype(v_KSU.dtype), v_KSU, preferred_element_type=jnp.float32
        )
        sum_KQ1 = self.sum_KQ1 * shrink_KQ1 + weight_KQS.sum(axis=-1, keepdims=True)
        return OnlineSoftmax(top_KQ1, sum_KQ1, self.context_KQU * shrink_KQ1 + part_KQU)

    def result(self) -> tuple[Array, Array]:
        """Return the context, and the log-sum-exp with a last axis of 1."""
        sum_KQ1 = jnp.maximum(self.sum_KQ1, TINY)
        return self.context_KQU / sum_KQ1, self.top_KQ1 + jnp.log(sum_KQ1)
