"""Implements the kernels in float64 numpy, from their equations. The kernels' tests compare with them too.

Axes: B rows, T queries, S keys, N query heads, K key heads, H head, U head of values, R rows and A choices of experts,
D model, F width. Of the delta rule: T tokens, H key, U value, B heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

MASKED = -1e30


def visible(segment_BT: np.ndarray, window: int, prefix_BT: np.ndarray | None = None) -> np.ndarray:
    """Return the tokens that one attends to, bool [B, T, T]: recent ones of its segment and of those it continues."""
    position_T = np.arange(segment_BT.shape[1])
    back_TS = position_T[:, None] - position_T[None]
    related_BTS = segment_BT[:, :, None] == segment_BT[:, None]
    if prefix_BT is not None:
        for related_TS, segment_T, above_T in zip(related_BTS, segment_BT, prefix_BT, strict=True):
            parent = {0: 0} | dict(zip(segment_T.tolist(), above_T.tolist(), strict=True))
            while (above_T > 0).any():
                related_TS |= (above_T[:, None] > 0) & (above_T[:, None] == segment_T[None])
                above_T = np.array([parent[above] for above in above_T.tolist()])
    return related_BTS & (back_TS >= 0) & (back_TS < window)


def attention(
    q_BTNH: ArrayLike,
    k_BSKH: ArrayLike,
    v_BSKU: ArrayLike,
    visible_BTS: np.ndarray,
    dcontext_BTNU: ArrayLike = 0.0,
    sinks_N: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Compute softmax(q k / √H) v over the visible keys, the log-sum-exp, and the gradients of Σ context · dcontext.

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
    """Compute Σ_a gate_a · (silu(x W_gate) * (x W_up)) W_down of the row's experts, one row and one choice at a time.

    The expert E drops the choice. `weights` are the three matrices, [E, D, F] twice and [E, F, D], and with another
    product the biases of gate and up [E, F] (`clipped_product`). The second result is the gradients of Σ y · dy with
    respect to x, the gates, and the weights.
    """
    x, gate, *arrays, dy = (np.asarray(each, np.float64) for each in (x_RD, gate_RA, *weights, dy_RD))
    w_gate, w_up, w_down, *biases = arrays
    y, *gradients = map(np.zeros_like, (x, x, gate, *arrays))
    dx, dgate, dw_gate, dw_up, dw_down, *dbiases = gradients
    for (n, a), e in np.ndenumerate(np.asarray(expert_RA)):
        if e == len(w_gate):
            continue
        u, v = x[n] @ w_gate[e], x[n] @ w_up[e]
        h, by_u, by_v = clipped_product(u + biases[0][e], v + biases[1][e]) if biases else gated_product(u, v)
        y[n] += gate[n, a] * (h @ w_down[e])
        dgate[n, a] = h @ w_down[e] @ dy[n]
        dh = gate[n, a] * (w_down[e] @ dy[n])
        du, dv = dh * by_u, dh * by_v
        dx[n] += w_gate[e] @ du + w_up[e] @ dv
        dw_gate[e] += np.outer(x[n], du)
        dw_up[e] += np.outer(x[n], dv)
        dw_down[e] += gate[n, a] * np.outer(h, dy[n])
        for dbias, change in zip(dbiases, (du, dv), strict=False):
            dbias[e] += change
    return y, gradients


def gated_product(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute silu(u) v, and its derivatives with respect to u and v."""
    s = 1 / (1 + np.exp(-u))
    return u * s * v, v * (s + u * s * (1 - s)), u * s


def clipped_product(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute (v + 1) u σ(1.702 u) for u at most 7 and v from -7 to 7 (arXiv 2508.10925), and its derivatives."""
    inside_u, inside_v = u < 7, np.abs(v) < 7
    u, v = np.minimum(u, 7), np.clip(v, -7, 7)
    s = 1 / (1 + np.exp(-1.702 * u))
    return (v + 1) * u * s, inside_u * (v + 1) * (s + 1.702 * u * s * (1 - s)), inside_v * u * s


def delta_rule(
    tokens: Sequence[ArrayLike], segment_T: np.ndarray, dout_TUB: ArrayLike = 0.0
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Compute the gated delta rule (arXiv 2412.06464), one token at a time, for B heads in the last axis.

    `tokens` are q and k [T, H, B], v [T, U, B], decay and beta [T, B]:
    S <- exp(decay) S;  S <- S + beta k (v - S^T k)^T;  output S^T q, with k of length 1 and q of 1 / √H. A segment
    starts from S = 0. The results are the outputs, the last S [H, U, B], and the gradients of Σ output · dout.
    """
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in tokens)
    dout = np.broadcast_to(np.asarray(dout_TUB, np.float64), v.shape)
    units = [x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (q, k)]
    starts = np.diff(segment_T, prepend=segment_T[0] - 1) != 0
    out, S, saved = np.zeros_like(v), np.zeros((k.shape[1], *v.shape[1:])), []
    for t in range(len(v)):
        before = np.exp(decay[t]) * S * (not starts[t])
        wrong = v[t] - np.einsum("hub,hb->ub", before, units[1][t])
        S = before + beta[t] * units[1][t][:, None] * wrong
        out[t] = np.einsum("hub,hb->ub", S, units[0][t]) * len(S) ** -0.5
        saved.append((before, wrong, S))
    dq, dk, dv, ddecay, dbeta = map(np.zeros_like, (q, k, v, decay, beta))
    dS = np.zeros_like(S)
    for t in reversed(range(len(v))):
        before, wrong, after = saved[t]
        unit_q, unit_k = units[0][t] * len(S) ** -0.5, units[1][t]
        dS = dS + unit_q[:, None] * dout[t]
        dq[t] = np.einsum("hub,ub->hb", after, dout[t]) * len(S) ** -0.5
        dbeta[t] = np.einsum("hub,hb,ub->b", dS, unit_k, wrong)
        dwrong = beta[t] * np.einsum("hub,hb->ub", dS, unit_k)
        dv[t] = dwrong
        dk[t] = beta[t] * np.einsum("hub,ub->hb", dS, wrong) - np.einsum("hub,ub->hb", before, dwrong)
        dbefore = dS - unit_k[:, None] * dwrong
        ddecay[t] = (dbefore * before).sum((0, 1))
        dS = np.exp(decay[t]) * dbefore * (not starts[t])
    for x, dx in ((q, dq), (k, dk)):  # through the division by the length
        inverse = 1 / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6)
        dx[:] = inverse * (dx - x * inverse**2 * (x * dx).sum(1, keepdims=True))
    return out, S, [dq, dk, dv, ddecay, dbeta]


def rounded(x: ArrayLike, axis: int) -> np.ndarray:
    """Round numbers to 8-bit integers with one scale along an axis, and return the represented numbers."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.asarray(np.round(x / scale) * scale)
