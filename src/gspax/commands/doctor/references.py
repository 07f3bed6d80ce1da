"""The kernels in float64 numpy, written from their equations. The tests of the kernels compare with them too.

Axes: B rows, T queries, S keys, N query heads, K key heads, H head, U head of values, R rows and A choices of experts,
D model, F width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

MASKED = -1e30


def visible(segment_BT: np.ndarray, window: int, prefix_BT: np.ndarray | None = None) -> np.ndarray:
    """Which tokens of its row a token attends to, bool [B, T, T]: the last ones of its segment, or of its prefix."""
    position_T = np.arange(segment_BT.shape[1])
    back_TS = position_T[:, None] - position_T[None]
    related_BTS = segment_BT[:, :, None] == segment_BT[:, None]
    if prefix_BT is not None:
        related_BTS |= (prefix_BT[:, :, None] > 0) & (prefix_BT[:, :, None] == segment_BT[:, None])
    return related_BTS & (back_TS >= 0) & (back_TS < window)


def attention(
    q_BTNH: ArrayLike,
    k_BSKH: ArrayLike,
    v_BSKU: ArrayLike,
    visible_BTS: np.ndarray,
    dcontext_BTNU: ArrayLike = 0.0,
    sinks_N: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """softmax(q k / √H) v over the visible keys, the log-sum-exp, and the gradients of Σ context · dcontext.

    A query without a key has the context 0 and a log-sum-exp of about `MASKED`. Sinks are scores without a value.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH, v_BSKU))
    dcontext = np.broadcast_to(np.asarray(dcontext_BTNU, np.float64), (*q.shape[:3], v.shape[3]))
    heads, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    k, v = np.repeat(k, heads, axis=2), np.repeat(v, heads, axis=2)
    seen = visible_BTS[:, None]
    score = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) * scale, MASKED)
    logsumexp = np.logaddexp.reduce(score, axis=3)
    if sinks_N is not None:
        logsumexp = np.logaddexp(logsumexp, np.asarray(sinks_N, np.float64)[None, :, None])
    weight = np.where(seen, np.exp(score - logsumexp[..., None]), 0)
    dweight = np.einsum("btnh,bsnh->bnts", dcontext, v)
    dscore = weight * (dweight - (weight * dweight).sum(3, keepdims=True)) * scale
    dk, dv = np.einsum("bnts,btnh->bsnh", dscore, q), np.einsum("bnts,btnh->bsnh", weight, dcontext)
    dk, dv = (x.reshape(*x.shape[:2], -1, heads, x.shape[3]).sum(3) for x in (dk, dv))
    gradients = np.einsum("bnts,bsnh->btnh", dscore, k), dk, dv
    return np.einsum("bnts,bsnh->btnh", weight, v), logsumexp.swapaxes(1, 2), gradients


def experts(
    x_RD: ArrayLike, expert_RA: ArrayLike, gate_RA: ArrayLike, weights: Sequence[ArrayLike], dy_RD: ArrayLike
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Σ_a gate_a · (silu(x W_gate) * (x W_up)) W_down of the row's experts, one row and one choice at a time.

    The expert E drops the choice. `weights` are the three matrices, [E, D, F] twice and [E, F, D]. The second result is
    the gradients of Σ y · dy with respect to x, the gates, and the matrices.
    """
    x, gate, w_gate, w_up, w_down, dy = (np.asarray(each, np.float64) for each in (x_RD, gate_RA, *weights, dy_RD))
    y, *gradients = map(np.zeros_like, (x, x, gate, w_gate, w_up, w_down))
    dx, dgate, dw_gate, dw_up, dw_down = gradients
    for (n, a), e in np.ndenumerate(np.asarray(expert_RA)):
        if e == len(w_gate):
            continue
        u, v = x[n] @ w_gate[e], x[n] @ w_up[e]
        s = 1 / (1 + np.exp(-u))
        h = u * s * v
        y[n] += gate[n, a] * (h @ w_down[e])
        dgate[n, a] = h @ w_down[e] @ dy[n]
        dh = gate[n, a] * (w_down[e] @ dy[n])
        du, dv = dh * v * (s + u * s * (1 - s)), dh * u * s
        dx[n] += w_gate[e] @ du + w_up[e] @ dv
        dw_gate[e] += np.outer(x[n], du)
        dw_up[e] += np.outer(x[n], dv)
        dw_down[e] += gate[n, a] * np.outer(h, dy[n])
    return y, gradients


def rounded(x: ArrayLike, axis: int) -> np.ndarray:
    """The numbers that integers of 8 bits with one scale along an axis stand for."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.asarray(np.round(x / scale) * scale)
