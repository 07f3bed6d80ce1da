"""The family of policy losses, and the batches of their tests.

A loss added to `FAMILY` is tested against every law in `test_laws.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference

from gspax import losses


@dataclass(frozen=True)
class Member:
    name: str
    function: Callable[..., losses.Terms]
    of_sequence: Callable[..., None]  # the reference
    options: tuple[tuple[str, float], ...] = ()  # given to both; most are the defaults
    aggregate: str = "by_sequence"  # the default
    split: str = "tokens"  # what clip_fraction_high and _low are shares of
    token_advantage: bool = False  # the advantage is [B, T] without packing

    def __str__(self) -> str:
        return self.name

    def terms(self, logp: Any, old_logp: Any, advantage: Any, mask: Any, **keywords: Any) -> losses.Terms:
        return self.function(logp, old_logp, advantage, mask, **dict(self.options) | keywords)

    def loss(self, logp: Any, old_logp: Any, advantage: Any, mask: Any, **keywords: Any) -> Any:
        return losses.reduce(self.terms(logp, old_logp, advantage, mask, **keywords))

    @property
    def clip(self) -> tuple[float, float]:
        return dict(self.options)["clip_low"], dict(self.options)["clip_high"]


def band(low: float, high: float) -> tuple[tuple[str, float], ...]:
    return ("clip_low", low), ("clip_high", high)


def _dppo(divergence: Callable[[float, float], float]) -> Callable[..., None]:
    return functools.partial(reference.dppo, divergence=divergence)


GSPO = Member("gspo", losses.gspo, reference.gspo, band(3e-4, 4e-4), split="sequences")
GSPO_TOKEN = Member(
    "gspo_token", losses.gspo_token, reference.gspo_token, band(3e-4, 4e-4), split="sequences", token_advantage=True
)
LUSPO = Member("luspo", losses.luspo, reference.gspo, band(2e-3, 2.5e-3), "by_constant", "sequences")
GRPO = Member("grpo", losses.grpo, reference.grpo, band(0.2, 0.27))
DUAL = Member("grpo_dual_clip", losses.grpo, reference.grpo, (*band(0.2, 0.27), ("dual_clip", 1.4)))
DR_GRPO = Member("dr_grpo", losses.dr_grpo, reference.grpo, band(0.2, 0.2), "by_constant")
DAPO = Member("dapo", losses.dapo, reference.grpo, band(0.2, 0.28), "by_token")
IMPORTANCE = Member("importance_sampling", losses.importance_sampling, reference.importance_sampling)
CISPO = Member("cispo", losses.cispo, reference.cispo, band(0.3, 0.4), "by_token")  # not the defaults: both bounds
SAPO = Member("sapo", losses.sapo, reference.sapo, (("tau_positive", 1.0), ("tau_negative", 1.05)))
GMPO = Member("gmpo", losses.gmpo, reference.gmpo, band(0.4, 0.4))
VESPO = Member(
    "vespo",
    losses.vespo,
    reference.vespo,
    (("k_positive", 2.0), ("lambda_positive", 3.0), ("k_negative", 3.0), ("lambda_negative", 2.0)),
    "by_token",
)
DPPO_TV = Member(
    "dppo_tv", losses.dppo_tv, _dppo(reference.binary_tv), (("threshold", 0.15), ("ratio_limit", 20.0)), "by_token"
)
DPPO_KL = Member(
    "dppo_kl", losses.dppo_kl, _dppo(reference.binary_kl), (("threshold", 0.05), ("ratio_limit", 20.0)), "by_token"
)
DIS = Member("dis", losses.dis, reference.dis, band(0.3, 0.4), "by_token")  # not the defaults: both bounds
IPO = Member("ipo", losses.ipo, reference.ipo, (("threshold", 0.1),), "by_token")
DRO = Member("dro", losses.dro, reference.dro, (("beta", 0.1),), "by_token")
FAMILY = (
    *(GSPO, GSPO_TOKEN, LUSPO, GRPO, DUAL, DR_GRPO, DAPO),
    *(IMPORTANCE, CISPO, SAPO, GMPO, VESPO, DPPO_TV, DPPO_KL, DIS, IPO, DRO),
)
MINIMUM = (GSPO, GSPO_TOKEN, LUSPO, GRPO, DR_GRPO, DAPO)  # min(x A, clip(x) A) of a ratio x
BOUNDED = tuple(member for member in FAMILY if member not in (IMPORTANCE, SAPO, VESPO, DRO))  # losses with a bound
SEQUENCE = (GSPO, GSPO_TOKEN, LUSPO, VESPO)  # all tokens of a sequence have one weight


@dataclass(frozen=True)
class Case:
    """A float32 batch. Tokens outside the mask hold ordinary numbers."""

    logp: np.ndarray  # [B, T]
    old_logp: np.ndarray  # [B, T]
    advantage: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]

    def arguments(self, member: Member) -> tuple[np.ndarray, ...]:
        """The arguments of the loss."""
        advantage = self.advantage if member.token_advantage else self.advantage[:, 0]
        return self.logp, self.old_logp, advantage, self.mask

    def reference(self, member: Member, **keywords: Any) -> reference.Result:
        """Options, `aggregate` and `correction` may be overridden."""
        arguments = [np.asarray(x, bool if x.dtype == bool else np.float64) for x in self.arguments(member)]
        keywords = {"aggregate": member.aggregate} | dict(member.options) | keywords
        return reference.policy(member.of_sequence, keywords.pop("aggregate"), *arguments, **keywords)


def case(mask: np.ndarray, scale: float, seed: int = 0) -> Case:
    """Log-ratios with the given standard deviation over an old policy's log-probabilities; advantages of both signs."""
    rng = np.random.default_rng(seed)
    old_logp = -rng.exponential(1.0, mask.shape)
    logp = old_logp + scale * rng.standard_normal(mask.shape)
    advantage = rng.standard_normal(mask.shape)
    return Case(*(x.astype(np.float32) for x in (logp, old_logp, advantage)), mask)


def extreme(sign: float) -> Case:
    """One log-ratio per row: at ±25, just inside and far outside. Rows alternate the sign of the advantage in pairs."""
    log_ratio = np.array([25, -25, 24.5, -24.5, 26, -26, 1e4, -1e4], np.float32)[:, None] * np.ones((1, 9), np.float32)
    advantage = sign * np.array([1.5, 1.5, -0.5, -0.5, 1.5, 1.5, -0.5, -0.5], np.float32)[:, None] * np.ones((1, 9))
    mask = np.isin(np.arange(9), (1, 2)) & np.ones((8, 1), bool)
    return Case(log_ratio, np.zeros_like(log_ratio), advantage.astype(np.float32), mask)


@dataclass(frozen=True)
class Packed:
    """A case with several sequences per row, their tokens shuffled."""

    case: Case
    sequences_per_row: int

    def pack(self, value: np.ndarray) -> np.ndarray:
        """[B, T] of the case -> [B / sequences, T · sequences]."""
        rows = value.reshape(len(value) // self.sequences_per_row, -1)
        return rows[:, np.random.default_rng(0).permutation(rows.shape[1])]

    def unpack(self, value: np.ndarray) -> np.ndarray:
        order = np.random.default_rng(0).permutation(value.shape[1])
        return np.asarray(value)[:, np.argsort(order)].reshape(self.case.mask.shape)

    @property
    def segment_ids(self) -> np.ndarray:
        """Unordered ids with gaps. Half of the tokens outside the mask have their sequence's id, half have 0."""
        B, T = self.case.mask.shape
        ids = np.array([5, 2, 9, 1], np.int32)[np.arange(B) % self.sequences_per_row][:, None] * np.ones(
            (1, T), np.int32
        )
        return self.pack(np.where(self.case.mask | (np.arange(T) % 2 == 0), ids, 0))

    def arguments(self, member: Member) -> tuple[np.ndarray, ...]:
        x = self.case
        advantage = x.advantage if member.token_advantage else np.broadcast_to(x.advantage[:, :1], x.mask.shape)
        return tuple(self.pack(a) for a in (x.logp, x.old_logp, advantage, x.mask))


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
CASES |= {"extreme": extreme(1), "extreme, other signs": extreme(-1)}
