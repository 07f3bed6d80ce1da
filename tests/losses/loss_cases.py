"""The family of losses, and the batches that its tests go over.

A loss that joins `FAMILY` inherits every law in `test_laws.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference

from gspax import losses


@dataclass(frozen=True)
class Member:
    name: str
    terms: Callable[..., losses.Terms]
    loss: Callable[..., Any]
    reference: Callable[..., reference.Result]
    split: str  # what clip_fraction_high and _low are shares of
    clip: tuple[float, float]  # the defaults, low and high
    token_advantage: bool = False  # the advantage is [B, T]

    def __str__(self) -> str:
        return self.name


GSPO = Member("gspo", losses.gspo, losses.gspo_loss, reference.gspo, "sequences", (3e-4, 4e-4))
GSPO_TOKEN = Member(
    "gspo_token", losses.gspo_token, losses.gspo_token_loss, reference.gspo_token, "sequences", (3e-4, 4e-4), True
)
GRPO = Member("grpo", losses.grpo, losses.grpo_loss, reference.grpo, "tokens", (0.2, 0.27))
FAMILY = (GSPO, GSPO_TOKEN, GRPO)


@dataclass(frozen=True)
class Case:
    """A batch in float32. The tokens outside the mask hold numbers like any other."""

    logp: np.ndarray  # [B, T]
    old_logp: np.ndarray  # [B, T]
    advantage: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]

    def arguments(self, member: Member) -> tuple[np.ndarray, ...]:
        """As the loss takes them."""
        advantage = self.advantage if member.token_advantage else self.advantage[:, 0]
        return self.logp, self.old_logp, advantage, self.mask

    def reference(self, member: Member) -> reference.Result:
        arguments = [np.asarray(x, bool if x.dtype == bool else np.float64) for x in self.arguments(member)]
        return member.reference(*arguments, *member.clip)


def case(mask: np.ndarray, scale: float, seed: int = 0) -> Case:
    """Log-ratios with the given standard deviation over an old policy's log-probabilities; advantages of both signs."""
    rng = np.random.default_rng(seed)
    old_logp = -rng.exponential(1.0, mask.shape)
    logp = old_logp + scale * rng.standard_normal(mask.shape)
    advantage = rng.standard_normal(mask.shape)
    return Case(*(x.astype(np.float32) for x in (logp, old_logp, advantage)), mask)


def extreme() -> Case:
    """One log-ratio per row: at ±25, just outside and far outside, with both signs of the advantage."""
    log_ratio = np.array([25, -25, 24.5, -24.5, 26, -26, 1e4, -1e4], np.float32)
    log_ratio = np.tile(np.concatenate([log_ratio, log_ratio])[:, None], (1, 3))
    advantage = np.where(np.arange(16)[:, None] < 8, 1.5, -0.5) * np.ones((1, 3))
    mask = np.tile([[False, True, True]], (16, 1))
    return Case(log_ratio, np.zeros_like(log_ratio), advantage.astype(np.float32), mask)


def _lengths(*spans: tuple[int, int], T: int = 9) -> np.ndarray:
    mask = np.zeros((len(spans), T), bool)
    for row, (start, stop) in zip(mask, spans, strict=True):
        row[start:stop] = True
    return mask


def _holes() -> np.ndarray:
    mask = _lengths(*[(1, 9)] * 8)
    mask[:, 3] = mask[::2, 5] = mask[1::3, 6:8] = False
    return mask


MASKS = {
    "full": _lengths(*[(1, 9)] * 8),
    "padded": _lengths(*[(3, 7)] * 8),
    "ragged": _lengths((1, 9), (2, 3), (1, 5), (4, 9), (8, 9), (3, 6), (1, 2), (2, 8)),
    "holes": _holes(),
    "length_one": _lengths(*[(t, t + 1) for t in (1, 2, 3, 4, 5, 6, 7, 8)]),
    "some_empty": _lengths((1, 9), (0, 0), (1, 5), (0, 0), (8, 9), (3, 6), (0, 0), (2, 8)),
    "all_empty": _lengths(*[(0, 0)] * 8),
}
# The scales put some ratios of each loss inside its clip range and some outside: sequences at 1e-3, tokens at 0.3.
CASES = {f"{name}-{scale:g}": case(mask, scale) for name, mask in MASKS.items() for scale in (1e-3, 0.3)}
CASES["extreme"] = extreme()
