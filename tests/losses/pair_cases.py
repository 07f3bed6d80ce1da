"""Pairs of log-probabilities of the same tokens: inputs of KL terms, corrections and calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LIMIT = 25.0


@dataclass(frozen=True)
class Pair:
    """A float32 batch. Tokens outside the mask hold ordinary numbers."""

    logp: np.ndarray  # [B, T]
    other: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]

    def fill(self, garbage: float) -> Pair:
        """Replace every float outside the mask."""
        logp, other = (np.where(self.mask, x, np.float32(garbage)) for x in (self.logp, self.other))
        return Pair(logp, other, self.mask)

    def rows(self, index) -> Pair:
        return Pair(self.logp[index], self.other[index], self.mask[index])

    def longer(self) -> Pair:
        """Five more columns of padding."""
        return Pair(*(np.pad(x, ((0, 0), (0, 5))) for x in (self.logp, self.other, self.mask)))

    def sequences(self):
        """(row, its response tokens, log-ratio of each in float64) for every row that has any."""
        for b in range(len(self.mask)):
            if tokens := [t for t in range(self.mask.shape[1]) if self.mask[b, t]]:
                # The difference of two float32 numbers, rounded to float32 as the code's is, then exact.
                yield b, tokens, [float(self.logp[b, t] - self.other[b, t]) for t in tokens]


def pair(mask: np.ndarray, scale: float, seed: int = 0) -> Pair:
    rng = np.random.default_rng(seed)
    other = -rng.exponential(1.0, mask.shape)
    logp = other + scale * rng.standard_normal(mask.shape)
    return Pair(logp.astype(np.float32), other.astype(np.float32), mask)


def held(x: float) -> float:
    return math.copysign(min(abs(x), LIMIT), x)


def exact_k3(x: float) -> float:
    """exp(-x) - 1 + x. Small x by the series: the difference in float64 keeps only 1e-10."""
    return math.fsum((-x) ** n / math.factorial(n) for n in range(2, 20)) if abs(x) < 1 else math.expm1(-x) + x


def _spans(*spans: tuple[int, int], T: int = 9) -> np.ndarray:
    mask = np.zeros((len(spans), T), bool)
    for row, (start, stop) in zip(mask, spans, strict=True):
        row[start:stop] = True
    return mask


def _holes() -> np.ndarray:
    mask = _spans(*[(1, 9)] * 8)
    mask[:, 3] = mask[::2, 5] = mask[1::3, 6:8] = False
    return mask


def _extreme() -> Pair:
    """Log-ratios at ±25, inside, outside and far outside, of both signs."""
    x = np.array([25, -25, 24.5, -24.5, 26, -26, 1e4, -1e4], np.float32)
    logp = np.stack([x, x, -x / 4], 1)
    return Pair(logp, np.zeros_like(logp), np.tile([[False, True, True]], (8, 1)))


MASKS = {
    "full": _spans(*[(1, 9)] * 8),
    "padded": _spans(*[(3, 7)] * 8),
    "ragged": _spans((1, 9), (2, 3), (1, 5), (4, 9), (8, 9), (3, 6), (1, 2), (2, 8)),
    "holes": _holes(),
    "length_one": _spans(*[(t, t + 1) for t in (1, 2, 3, 4, 5, 6, 7, 8)]),
    "some_empty": _spans((1, 9), (0, 0), (1, 5), (0, 0), (8, 9), (3, 6), (0, 0), (2, 8)),
    "all_empty": _spans(*[(0, 0)] * 8),
}
CASES = {f"{name}-{scale:g}": pair(mask, scale) for name, mask in MASKS.items() for scale in (1e-3, 0.3)}
CASES["ragged-3"] = pair(MASKS["ragged"], 3.0)
CASES["extreme"] = _extreme()
