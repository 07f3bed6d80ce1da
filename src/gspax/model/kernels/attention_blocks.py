"""Attention over whole rows on CPU: blocks of queries, each against the blocks of keys that it attends to.

Half of a row's blocks of scores lie in the future, and in packed rows most of the others are between responses. They
are found from the numbers of the segments and skipped, forward and backward. How many are computed is data, so one
compiled program serves every packing. A block's scores stay in the processor's cache; the backward pass computes them
again.

Axes: B rows, T queries, S keys, N query heads, K key heads, R = N/K, H head; X blocks of queries and Y of keys, of all
rows, C positions each, Q = R·C queries of a key head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gspax.model.kernels.online_softmax import MASKED, OnlineSoftmax

BLOCK = 64  # positions at most
LAST = jnp.iinfo(jnp.int32).max


class Blocks(NamedTuple):
    """What the queries attend to, and in which blocks that is; int32."""

    segment_XC: Array
    prefix_XC: Array  # 0: none
    segment_YC: Array
    first: Array | int  # position of a row's first query
    window: Array
    key_XJ: Array  # the blocks of keys in a row of J: those that a block of queries needs come first
    count_X: Array  # how many those are

    def number(self, x: Array, n: Array) -> Array:
        """The n-th block of keys that a block of queries needs, among all."""
        return x // self._queries() * self.key_XJ.shape[1] + self.key_XJ[x, n]

    def visible(self, x: Array, n: Array) -> Array:
        """Which of its keys they attend to, [C, C]."""
        size = self.segment_XC.shape[1]
        segment_C1, prefix_C1 = self.segment_XC[x][:, None], self.prefix_XC[x][:, None]
        segment_1C = self.segment_YC[self.number(x, n)][None]
        related_CC = (segment_C1 == segment_1C) | ((prefix_C1 > 0) & (prefix_C1 == segment_1C))
        between = self.first + (x % self._queries() - self.key_XJ[x, n]) * size
        back_CC = between + jnp.arange(size)[:, None] - jnp.arange(size)[None]
        return related_CC & (back_CC >= 0) & (back_CC < self.window)

    def _queries(self) -> int:
        """Blocks of queries in a row."""
        return self.count_X.shape[0] * self.key_XJ.shape[1] // self.segment_YC.shape[0]


def attend(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    *,
    segment_BT: Array,
    prefix_BT: Array | None,
    segment_BS: Array,
    first: Array | int,
    window: Array,
) -> Array:
    """softmax(q k / √H) v over what each token attends to, `[B, T, N, H]` in q's dtype.

    Blocks of padding alone are skipped too: their results are 0.

    Args:
      prefix_BT: a segment that each query attends to besides its own; 0: none.
      first: position of the first query among the keys.
      window: how many tokens a query attends to, itself included.
    """
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    size = block_size(T)

    def split(x_BT: Array) -> Array:
        """[B, T, ...] to [X, C, ...]."""
        padded = jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2)))
        return padded.reshape(-1, size, *x_BT.shape[2:])

    prefix_BT = jnp.zeros_like(segment_BT) if prefix_BT is None else prefix_BT
    segment_XC, prefix_XC, segment_YC = (split(x) for x in (segment_BT, prefix_BT, segment_BS))
    needed = _needed(segment_XC, prefix_XC, segment_YC, first, window, rows=B)
    blocks = Blocks(segment_XC, prefix_XC, segment_YC, first, window, *needed)
    q_XKQH = split(q_BTNH).reshape(-1, size, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(-1, K, N // K * size, H)
    k_YKSH, v_YKSH = (split(x).swapaxes(1, 2) for x in (k_BSKH, v_BSKH))
    context_XKQH = _attend(q_XKQH, k_YKSH, v_YKSH, blocks)
    context_XCKRH = context_XKQH.reshape(-1, K, N // K, size, H).transpose(0, 3, 1, 2, 4)
    return context_XCKRH.reshape(B, -1, N, H)[:, :T]


def block_size(T: int) -> int:
    """Positions of a block: equal ones of at most `BLOCK`, in multiples of 8."""
    return -(-T // -(-T // BLOCK) // 8) * 8


def _needed(segment_XC, prefix_XC, segment_YC, first, window, *, rows: int) -> tuple[Array, Array]:
    """`Blocks.key_XJ` and `count_X`.

    A block of keys is left out if the numbers of its segments are outside the range of those that are attended to.
    """
    size = segment_XC.shape[1]
    own, earlier, keys = (_range(x.reshape(rows, -1, size)) for x in (segment_XC, prefix_XC, segment_YC))
    queries, others = own[0].shape[1], keys[0].shape[1]
    between_IJ = first + (jnp.arange(queries)[:, None] - jnp.arange(others)[None]) * size  # of their first positions
    reachable_IJ = (between_IJ > -size) & (between_IJ < window + size - 1)
    needed_BIJ = (_overlap(own, keys) | _overlap(earlier, keys)) & reachable_IJ[None]
    key_BIJ = jnp.argsort(~needed_BIJ, axis=2, stable=True).astype(jnp.int32)
    return key_BIJ.reshape(-1, others), needed_BIJ.sum(axis=2, dtype=jnp.int32).reshape(-1)


def _range(number_BIC: Array) -> tuple[Array, Array]:
    """The least and the greatest number of each block other than 0; without one, the least is the greater."""
    return jnp.where(number_BIC > 0, number_BIC, LAST).min(axis=2), number_BIC.max(axis=2)


def _overlap(queries: tuple[Array, Array], keys: tuple[Array, Array]) -> Array:
    """Whether two ranges have a number in common, [B, I, J]."""
    (low_BI, high_BI), (low_BJ, high_BJ) = queries, keys
    return (low_BI[:, :, None] <= high_BJ[:, None]) & (low_BJ[:, None] <= high_BI[:, :, None])


@jax.custom_vjp
def _attend(q_XKQH: Array, k_YKSH: Array, v_YKSH: Array, blocks: Blocks) -> Array:
    return _attend_forward(q_XKQH, k_YKSH, v_YKSH, blocks)[0]


def _attend_forward(q_XKQH, k_YKSH, v_YKSH, blocks):
    repeats = q_XKQH.shape[2] // blocks.segment_XC.shape[1]

    def of_queries(x):
        q_KQH = q_XKQH[x]

        def add(n, so_far):
            y, visible_1QS = blocks.number(x, n), jnp.tile(blocks.visible(x, n), (repeats, 1))[None]
            return so_far.add(q_KQH, k_YKSH[y], v_YKSH[y], visible_1QS)

        return lax.fori_loop(0, blocks.count_X[x], add, OnlineSoftmax.begin(q_KQH)).result()

    context_XKQH, logsumexp_XKQ1 = lax.map(of_queries, jnp.arange(len(q_XKQH)))
    return context_XKQH.astype(q_XKQH.dtype), (q_XKQH, k_YKSH, v_YKSH, blocks, context_XKQH, logsumexp_XKQ1)


def _attend_backward(kept, dcontext_XKQH):
    q_XKQH, k_YKSH, v_YKSH, blocks, context_XKQH, logsumexp_XKQ1 = kept
    repeats, scale, dtype = q_XKQH.shape[2] // blocks.segment_XC.shape[1], q_XKQH.shape[3] ** -0.5, q_XKQH.dtype
    shared_XKQ1 = (context_XKQH * dcontext_XKQH).sum(axis=-1, keepdims=True)

    def product(subscripts, *factors):
        return jnp.einsum(subscripts, *(x.astype(dtype) for x in factors), preferred_element_type=jnp.float32)

    def of_queries(dkeys, x):
        q_KQH, dcontext_KQH = q_XKQH[x], dcontext_XKQH[x]

        def add(n, so_far):
            dq_KQH, dk_YKSH, dv_YKSH = so_far
            y, visible_1QS = blocks.number(x, n), jnp.tile(blocks.visible(x, n), (repeats, 1))[None]
            k_KSH, v_KSH = k_YKSH[y], v_YKSH[y]
            score_KQS = product("kqh,ksh->kqs", q_KQH, k_KSH) * scale
            weight_KQS = jnp.exp(jnp.where(visible_1QS, score_KQS - logsumexp_XKQ1[x], MASKED))
            dweight_KQS = product("kqh,ksh->kqs", dcontext_KQH, v_KSH)
            dscore_KQS = weight_KQS * (dweight_KQS - shared_XKQ1[x]) * scale
            return (
                dq_KQH + product("kqs,ksh->kqh", dscore_KQS, k_KSH),
                _add_to(dk_YKSH, y, product("kqs,kqh->ksh", dscore_KQS, q_KQH)),
                _add_to(dv_YKSH, y, product("kqs,kqh->ksh", weight_KQS, dcontext_KQH)),
            )

        zero_KQH = jnp.zeros(q_KQH.shape, jnp.float32)
        dq_KQH, *dkeys = lax.fori_loop(0, blocks.count_X[x], add, (zero_KQH, *dkeys))
        return tuple(dkeys), dq_KQH.astype(dtype)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_YKSH, v_YKSH))
    (dk_YKSH, dv_YKSH), dq_XKQH = lax.scan(of_queries, start, jnp.arange(len(q_XKQH)))
    return dq_XKQH, dk_YKSH.astype(k_YKSH.dtype), dv_YKSH.astype(v_YKSH.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def _add_to(x_YKSH: Array, y: Array, more_KSH: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x_YKSH, x_YKSH[y] + more_KSH, y, 0)
