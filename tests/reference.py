"""The losses and advantages again: slow, in float64, with loops, written from the papers alone.

Nothing here imports gspax. A loss comes with its analytic gradient, which the papers give too; `test_reference.py`
holds that against finite differences. Names: J is maximised, so `value` is minus a sequence's part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EXP_LIMIT = 25.0  # a log-ratio is held within ±25 before exp, and has no gradient beyond


@dataclass
class Result:
    value: np.ndarray  # [B]     minus the sequence's objective; 0 for an empty row
    weight: np.ndarray  # [B]     1, or 0 for an empty row
    gradient: np.ndarray  # [B, T]  of the sum of `value` by each log-probability
    high: np.ndarray  # [B, T]  response token cut from above
    low: np.ndarray  # [B, T]  response token cut from below
    ratio: np.ndarray  # [B]     sequence ratio s_i; 1 for an empty row
    k3: np.ndarray  # [B, T]  r - 1 - log r of the response tokens
    mask: np.ndarray  # [B, T]
    margin: float  # smallest distance of a ratio from a bound of its clip range

    @property
    def loss(self) -> float:
        return self.value.sum() / self.weight.sum() if self.weight.sum() else 0.0

    @property
    def loss_gradient(self) -> np.ndarray:
        return self.gradient / max(self.weight.sum(), 1)

    def metrics(self, split: str) -> dict[str, float]:
        """The reduced metrics; `split` ("tokens" or "sequences") is what high and low are shares of."""
        rows = [b for b in range(len(self.value)) if self.weight[b]]
        tokens = self.mask.sum()
        cut = self.high | self.low

        def share(flag: np.ndarray, of: str) -> float:
            if of == "tokens":
                return flag.sum() / tokens if tokens else 0.0
            return sum(flag[b].any() for b in rows) / len(rows) if rows else 0.0

        ratios = [self.ratio[b] for b in rows] or [0.0]
        return {
            "clip_fraction_tokens": share(cut, "tokens"),
            "clip_fraction_sequences": share(cut, "sequences"),
            "clip_fraction_high": share(self.high, split),
            "clip_fraction_low": share(self.low, split),
            "ratio_mean": sum(ratios) / len(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "kl": self.k3.sum() / tokens if tokens else 0.0,
        }


def gspo(logp, old_logp, advantage, mask, clip_low, clip_high) -> Result:
    """GSPO, eq. 5 to 7; its gradient is s_i A_i 1/|y_i| Σ_t ∇log π where the minimum is the first of its two."""
    result, ratios = _begin(logp, old_logp, mask)
    for i, tokens in _sequences(mask):
        s, derivative = ratios[i]
        surrogate, kept = _clip(result, s, advantage[i], clip_low, clip_high)
        result.value[i] = -surrogate
        for t in tokens:
            if kept:
                result.gradient[i, t] = -derivative * advantage[i] / len(tokens)
            else:
                (result.high if advantage[i] > 0 else result.low)[i, t] = True
    return result


def gspo_token(logp, old_logp, advantage, mask, clip_low, clip_high) -> Result:
    """GSPO-token, eq. 13 and 14; `advantage` [B, T]. The gradient is 1/|y_i| Σ_t s_i A_it ∇log π(y_it)."""
    result, ratios = _begin(logp, old_logp, mask)
    for i, tokens in _sequences(mask):
        s, derivative = ratios[i]
        for t in tokens:
            surrogate, kept = _clip(result, s, advantage[i, t], clip_low, clip_high)
            result.value[i] -= surrogate / len(tokens)
            if kept:
                result.gradient[i, t] = -derivative * advantage[i, t] / len(tokens)
            else:
                (result.high if advantage[i, t] > 0 else result.low)[i, t] = True
    return result


def grpo(logp, old_logp, advantage, mask, clip_low, clip_high) -> Result:
    """GRPO, eq. 3 with β = 0; the gradient is 1/|y_i| Σ_t r_it A_i ∇log π(y_it)."""
    result, _ = _begin(logp, old_logp, mask)
    for i, tokens in _sequences(mask):
        for t in tokens:
            r, derivative = _ratio(logp[i, t] - old_logp[i, t])
            surrogate, kept = _clip(result, r, advantage[i], clip_low, clip_high)
            result.value[i] -= surrogate / len(tokens)
            if kept:
                result.gradient[i, t] = -derivative * advantage[i] / len(tokens)
            else:
                (result.high if advantage[i] > 0 else result.low)[i, t] = True
    return result


def token_logp(logits, tokens, temperature):
    """log softmax(logits[t - 1] / temperature) at tokens[t], and the entropy of that distribution; 0 in column 0."""
    logits = np.asarray(logits, np.float64) / temperature
    logp, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            row = logits[b, t - 1]
            p = np.exp(row - row.max())
            p = p / p.sum()
            logp[b, t] = math.log(p[tokens[b, t]])
            entropy[b, t] = -sum(x * math.log(x) for x in p if x > 0)
    return logp, entropy


def standardize(rewards, ddof, eps):
    """(R - mean) / (std + eps) in each group, zeros if all rewards are equal."""
    out = np.zeros(np.shape(rewards))
    for p, group in enumerate(rewards):
        group = [float(r) for r in group]
        if all(r == group[0] for r in group):
            continue
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (len(group) - ddof))
        out[p] = [(r - mean) / (std + eps) for r in group]
    return out


def center(rewards):
    """R - mean in each group."""
    return np.array([[float(r) - math.fsum(group) / len(group) for r in group] for group in np.asarray(rewards, float)])


def leave_one_out(rewards):
    """R minus the mean of the others in its group; 0 in a group of one."""
    out = np.zeros(np.shape(rewards))
    for p, group in enumerate(np.asarray(rewards, float)):
        for i in range(len(group)):
            others = [r for j, r in enumerate(group) if j != i]
            out[p, i] = group[i] - math.fsum(others) / len(others) if others else 0.0
    return out


def _sequences(mask):
    """(row, its response tokens) for every row that has any."""
    for i in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        if tokens:
            yield i, tokens


def _ratio(log_ratio: float) -> tuple[float, float]:
    """A ratio and its derivative by the log-ratio, which is the ratio itself, or 0 where it is held."""
    if abs(log_ratio) > EXP_LIMIT:
        return math.exp(math.copysign(EXP_LIMIT, log_ratio)), 0.0
    return math.exp(log_ratio), math.exp(log_ratio)


def _clip(result: Result, x: float, advantage: float, clip_low: float, clip_high: float) -> tuple[float, bool]:
    """min(x A, clip(x) A), and whether it still depends on x."""
    clipped = min(max(x, 1 - clip_low), 1 + clip_high)
    result.margin = min(result.margin, abs(x - (1 - clip_low)), abs(x - (1 + clip_high)))
    return min(x * advantage, clipped * advantage), x * advantage <= clipped * advantage


def _begin(logp, old_logp, mask) -> tuple[Result, dict[int, tuple[float, float]]]:
    """An empty result with the metrics that all losses share, and {row: (s_i, its derivative)}."""
    B, T = mask.shape
    result = Result(
        value=np.zeros(B),
        weight=np.zeros(B),
        gradient=np.zeros((B, T)),
        high=np.zeros((B, T), bool),
        low=np.zeros((B, T), bool),
        ratio=np.ones(B),
        k3=np.zeros((B, T)),
        mask=mask,
        margin=math.inf,
    )
    ratios = {}
    for i, tokens in _sequences(mask):
        total = 0.0
        for t in tokens:
            log_ratio = logp[i, t] - old_logp[i, t]
            total += log_ratio
            held = min(max(log_ratio, -EXP_LIMIT), EXP_LIMIT)
            result.k3[i, t] = math.expm1(held) - held
        ratios[i] = _ratio(total / len(tokens))
        result.ratio[i] = ratios[i][0]
        result.weight[i] = 1.0
    return result, ratios
