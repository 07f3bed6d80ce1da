"""Reference losses and advantages: float64 numpy loops, slow, written from the papers alone.

Nothing here imports gspax. Every loss has its analytic gradient, as the papers give it; `test_reference.py` checks the
gradients against finite differences. J is maximized, so `value` is minus a sequence's term of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EXP_LIMIT = 25.0  # log-ratios are clamped to ±25 before exp; beyond, the gradient is 0


@dataclass
class Result:
    value: np.ndarray  # [B]     minus the sequence's term of J; 0 for an empty row
    weight: np.ndarray  # [B]     1 or the number of tokens, by aggregation; 0 for an empty row
    gradient: np.ndarray  # [B, T]  of the sum of `value` with respect to each log-prob
    high: np.ndarray  # [B, T]  response token clipped from above
    low: np.ndarray  # [B, T]  response token clipped from below
    ratio: np.ndarray  # [B]     sequence ratio s_i; 1 for an empty row
    k3: np.ndarray  # [B, T]  r - 1 - log r of the response tokens
    mask: np.ndarray  # [B, T]
    margin: float  # smallest distance from a ratio to a clip bound

    @property
    def loss(self) -> float:
        return self.value.sum() / self.weight.sum() if self.weight.sum() else 0.0

    @property
    def loss_gradient(self) -> np.ndarray:
        return self.gradient / max(self.weight.sum(), 1)

    def metrics(self, split: str) -> dict[str, float]:
        """The reduced metrics; clip_fraction_high and _low are shares of `split`, "tokens" or "sequences"."""
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
            "ratio_deviation": quantile([(abs(self.ratio[b] - 1), self.mask[b].sum()) for b in rows], above=0.1),
            "kl": self.k3.sum() / tokens if tokens else 0.0,
        }


def quantile(entries: list[tuple[float, float]], above: float) -> float:
    """The smallest value with at most the share `above` of the weight beyond it."""
    allowed = above * sum(weight for _, weight in entries)
    beyond = 0
    for value, weight in sorted(entries, reverse=True):
        beyond += weight
        if beyond > allowed:
            return value
    return 0.0


@dataclass
class Sequence:
    """One sequence's response tokens and the loss's terms for them. Lists have one entry per response token."""

    logp: list[float]
    old_logp: list[float]
    advantage: list[float]
    objective: list[float]  # J is the aggregate of these
    slope: list[list[float]]  # slope[t][u]: d objective[t] / d logp[u]
    high: list[bool]
    low: list[bool]
    margin: float = math.inf

    @property
    def log_ratio(self) -> list[float]:
        return [new - old for new, old in zip(self.logp, self.old_logp, strict=True)]


# From the number of response tokens: the factor of each token's term, and the sequence's weight.
AGGREGATES = {
    "by_sequence": lambda length: (1 / length, 1.0),
    "by_token": lambda length: (1.0, float(length)),
    "by_constant": lambda length: (1.0, 1.0),
}


def policy(loss, aggregate, logp, old_logp, advantage, mask, correction=None, **options) -> Result:
    """A loss over a batch. `advantage` and `correction` are [B] or [B, T]; `loss` fills in a `Sequence`."""
    result = _begin(logp, old_logp, mask)
    for i, tokens in _sequences(mask):
        n = len(tokens)
        s = Sequence(
            logp=[float(logp[i, t]) for t in tokens],
            old_logp=[float(old_logp[i, t]) for t in tokens],
            advantage=[float(advantage[i] if np.ndim(advantage) == 1 else advantage[i, t]) for t in tokens],
            objective=[0.0] * n,
            slope=[[0.0] * n for _ in tokens],
            high=[False] * n,
            low=[False] * n,
        )
        loss(s, **options)
        share, result.weight[i] = AGGREGATES[aggregate](n)
        for t, at in enumerate(tokens):
            factor = 1.0 if correction is None else float(np.broadcast_to(correction.T, mask.T.shape).T[i, at])
            result.value[i] -= share * factor * s.objective[t]
            for u, other in enumerate(tokens):
                result.gradient[i, other] -= share * factor * s.slope[t][u]
            result.high[i, at], result.low[i, at] = s.high[t], s.low[t]
        result.margin = min(result.margin, s.margin)
    return result


def gspo(s: Sequence, clip_low, clip_high) -> None:
    """GSPO, eq. 5 to 7; where it is not clipped the gradient is s_i A_i 1/|y_i| Σ_t ∇log π."""
    n = len(s.logp)
    ratio, derivative = _ratio(sum(s.log_ratio) / n)
    for t in range(n):
        s.objective[t], kept = _clip(s, t, ratio, clip_low, clip_high)
        s.slope[t] = [derivative * s.advantage[t] / n * kept] * n


def gspo_token(s: Sequence, clip_low, clip_high) -> None:
    """GSPO-token, eq. 13 and 14. The gradient is 1/|y_i| Σ_t s_i A_it ∇log π(y_it)."""
    n = len(s.logp)
    ratio, derivative = _ratio(sum(s.log_ratio) / n)
    for t in range(n):
        s.objective[t], kept = _clip(s, t, ratio, clip_low, clip_high)
        s.slope[t][t] = derivative * s.advantage[t] * kept


def grpo(s: Sequence, clip_low, clip_high, dual_clip=None) -> None:
    """GRPO, eq. 3 with β = 0; the gradient is r_it A_i ∇log π(y_it). Dr. GRPO and DAPO aggregate it differently."""
    for t, log_ratio in enumerate(s.log_ratio):
        ratio, derivative = _ratio(log_ratio)
        s.objective[t], kept = _clip(s, t, ratio, clip_low, clip_high)
        a = s.advantage[t]
        if dual_clip is not None and a < 0:
            s.margin = min(s.margin, abs(ratio - dual_clip))
            if dual_clip * a > s.objective[t]:  # max(min(...), c A)
                s.objective[t], kept, s.high[t] = dual_clip * a, False, True
        s.slope[t][t] = derivative * a * kept


def importance_sampling(s: Sequence) -> None:
    """r A, with the gradient r A ∇log π."""
    for t, log_ratio in enumerate(s.log_ratio):
        ratio, derivative = _ratio(log_ratio)
        s.objective[t], s.slope[t][t] = ratio * s.advantage[t], derivative * s.advantage[t]


def cispo(s: Sequence, clip_low, clip_high) -> None:
    """CISPO, eq. 4 and 5: sg[clip(r)] A log π; the gradient is clip(r) A ∇log π."""
    for t, log_ratio in enumerate(s.log_ratio):
        ratio, _ = _ratio(log_ratio)
        bounds = 1 - clip_low, 1 + clip_high
        s.margin = min(s.margin, *(abs(ratio - bound) for bound in bounds))
        weight = min(max(ratio, bounds[0]), bounds[1])
        s.low[t], s.high[t] = ratio < bounds[0], ratio > bounds[1]
        s.objective[t], s.slope[t][t] = weight * s.advantage[t] * s.logp[t], weight * s.advantage[t]


def sapo(s: Sequence, tau_positive, tau_negative) -> None:
    """SAPO: f(r) A with f(r) = 4/τ σ(τ (r - 1)), whose derivative is 4 σ (1 - σ)."""
    for t, log_ratio in enumerate(s.log_ratio):
        ratio, derivative = _ratio(log_ratio)
        a = s.advantage[t]
        tau = tau_positive if a > 0 else tau_negative
        away = math.exp(-min(tau * (ratio - 1), 700.0))  # 1/σ - 1
        s.objective[t] = 4 / tau / (1 + away) * a
        s.slope[t][t] = 4 * away / (1 + away) ** 2 * derivative * a


def gmpo(s: Sequence, clip_low, clip_high) -> None:
    """GMPO: A times the geometric mean of the ratios, each at most e^high if A > 0, at least e^-low if A < 0.

    Π_t min(r_t^sgn, clip(r_t)^sgn)^sgn, to the power 1/|y|.
    """
    n = len(s.logp)
    total, kept = 0.0, []
    for t, log_ratio in enumerate(s.log_ratio):
        sign = (s.advantage[t] > 0) - (s.advantage[t] < 0)
        clip = min(max(log_ratio, -clip_low), clip_high)
        chosen = sign * min(sign * log_ratio, sign * clip) if sign else log_ratio
        s.margin = min(s.margin, abs(log_ratio + clip_low), abs(log_ratio - clip_high))
        kept.append(chosen == log_ratio)
        s.high[t], s.low[t] = chosen < log_ratio, chosen > log_ratio
        total += chosen
    mean, derivative = _ratio(total / n)
    for t in range(n):
        s.objective[t] = mean * s.advantage[t]
        s.slope[t] = [derivative * s.advantage[t] / n * kept[u] for u in range(n)]


def vespo(s: Sequence, k_positive, lambda_positive, k_negative, lambda_negative) -> None:
    """VESPO: sg[φ(W)] A log π with φ(W) = W^k exp(λ (1 - W)) and W the product of the ratios."""
    log_w = min(max(sum(s.log_ratio), -EXP_LIMIT), EXP_LIMIT)
    for t, a in enumerate(s.advantage):
        k, lam = (k_positive, lambda_positive) if a >= 0 else (k_negative, lambda_negative)
        phi = math.exp(k * log_w) * math.exp(lam * (1 - math.exp(log_w)))
        s.objective[t], s.slope[t][t] = phi * a * s.logp[t], phi * a


def dppo(s: Sequence, divergence, threshold, ratio_limit) -> None:
    """DPPO: M sg[min(r, c)] A log π; M = 0 where the divergence is above the threshold and the update raises it."""
    for t, log_ratio in enumerate(s.log_ratio):
        a, p, q = s.advantage[t], math.exp(min(s.old_logp[t], 0)), math.exp(min(s.logp[t], 0))
        distance = divergence(p, q)
        s.margin = min(s.margin, abs(distance - threshold))
        s.high[t] = distance > threshold and a > 0 and log_ratio > 0
        s.low[t] = distance > threshold and a < 0 and log_ratio < 0
        weight = 0.0 if s.high[t] or s.low[t] else min(_ratio(log_ratio)[0], ratio_limit)
        s.objective[t], s.slope[t][t] = weight * a * s.logp[t], weight * a


def dis(s: Sequence, clip_low, clip_high) -> None:
    """DIS: sg[f(r)] A log π with f(r) = r inside the band, else 0, for either sign of A."""
    for t, log_ratio in enumerate(s.log_ratio):
        ratio, _ = _ratio(log_ratio)
        s.margin = min(s.margin, abs(ratio - (1 - clip_low)), abs(ratio - (1 + clip_high)))
        s.high[t], s.low[t] = ratio > 1 + clip_high, ratio < 1 - clip_low
        weight = 0.0 if s.high[t] or s.low[t] else ratio
        s.objective[t], s.slope[t][t] = weight * s.advantage[t] * s.logp[t], weight * s.advantage[t]


def ipo(s: Sequence, threshold) -> None:
    """IPO: r A where the probability has moved by at most the threshold, else 0."""
    for t, log_ratio in enumerate(s.log_ratio):
        moved = math.exp(min(s.logp[t], 0)) - math.exp(min(s.old_logp[t], 0))
        s.margin = min(s.margin, abs(abs(moved) - threshold))
        s.high[t], s.low[t] = moved > threshold, moved < -threshold
        ratio, derivative = (0.0, 0.0) if abs(moved) > threshold else _ratio(log_ratio)
        s.objective[t], s.slope[t][t] = ratio * s.advantage[t], derivative * s.advantage[t]


def dro(s: Sequence, beta) -> None:
    """DRO: A log π - β/2 log² r."""
    for t, log_ratio in enumerate(s.log_ratio):
        x = min(max(log_ratio, -EXP_LIMIT), EXP_LIMIT)
        s.objective[t], s.slope[t][t] = s.advantage[t] * s.logp[t] - beta / 2 * x**2, s.advantage[t] - beta * x


def binary_tv(p: float, q: float) -> float:
    return abs(p - q)


def binary_kl(p: float, q: float) -> float:
    """KL divergence of two Bernoulli distributions, both probabilities kept below 1."""
    p, q = (min(x, math.exp(-(2.0**-24))) for x in (p, q))
    heads = p * math.log(p / q) if p and q else math.inf if p else 0.0
    return heads + (1 - p) * math.log((1 - p) / (1 - q))


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


def kept_tokens(logits, top_k, top_p, min_p):
    """The tokens kept by top-k, then top-p of the rest, then min-p, as a set of ids."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        order = order[:top_k]
    mass = np.exp([logits[i] for i in order])
    mass = mass / mass.sum()
    if top_p < 1:
        count = next(n for n in range(1, len(order) + 1) if mass[:n].sum() >= top_p or n == len(order))
        order = order[:count]
    return {i for i in order if logits[i] >= logits[order[0]] + (np.log(min_p) if min_p else -np.inf)}


def _sequences(mask):
    """(row, its response tokens) for every row that has any."""
    for i in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        if tokens:
            yield i, tokens


def _ratio(log_ratio: float) -> tuple[float, float]:
    """A ratio and its derivative with respect to the log-ratio: the ratio itself, or 0 where it is clamped."""
    if abs(log_ratio) > EXP_LIMIT:
        return math.exp(math.copysign(EXP_LIMIT, log_ratio)), 0.0
    return math.exp(log_ratio), math.exp(log_ratio)


def _clip(s: Sequence, t: int, x: float, clip_low: float, clip_high: float) -> tuple[float, bool]:
    """min(x A, clip(x) A) for token t, and whether it still depends on x; records the clipping in `s`."""
    a = s.advantage[t]
    clipped = min(max(x, 1 - clip_low), 1 + clip_high)
    s.margin = min(s.margin, abs(x - (1 - clip_low)), abs(x - (1 + clip_high)))
    kept = x * a <= clipped * a
    s.high[t], s.low[t] = not kept and a > 0, not kept and a < 0
    return min(x * a, clipped * a), kept


def _begin(logp, old_logp, mask) -> Result:
    """An empty result with the entries that do not depend on the loss: the ratio and k3."""
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
    for i, tokens in _sequences(mask):
        total = 0.0
        for t in tokens:
            log_ratio = logp[i, t] - old_logp[i, t]
            total += log_ratio
            held = min(max(log_ratio, -EXP_LIMIT), EXP_LIMIT)
            result.k3[i, t] = math.expm1(held) - held
        result.ratio[i] = _ratio(total / len(tokens))[0]
    return result
