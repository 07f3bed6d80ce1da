"""GSPO's clip range, measured: from the sequence ratios of real rollouts to the range that cuts a wished share of them.

A range does not carry over from another model, another length of response or another learning rate: s is a geometric
mean, and its distance from 1 falls with the square root of the length. So measure it.

1. Take one rollout batch and do the update of its first mini-batch. `sequence_log_ratio` of the second mini-batch is
   what the clip will see. (In the first one every ratio is 1.)
2. Compute the log-probabilities of some rows twice with the same weights, the second time as the update does, in its
   shapes. `noise_floor` of the log-ratio between the two is what arithmetic alone does to s.
3. `propose` gives the range. `range_warnings` says what is wrong with one, `next_range` follows a drift.

This is not from a paper. GSPO's (arXiv 2507.18071) reports that about 15 % of the tokens were cut under 3e-4 / 4e-4,
which is where the default share comes from; nothing says that 15 % is best, so report a curve of `cut_share` too.

Everything but `sequence_log_ratio` works on measured numbers, outside of compiled code, in float64. A new range is a
new constant of the loss and compiles the step anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from gspax import masked
from gspax.losses import checks

Array = jax.Array

INERT = 0.05  # a geometric mean practically never leaves 1 by that much


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """A proposed range, and what it would have done to the sequences it was measured on."""

    clip_low: float
    clip_high: float
    share: float  # of the measured sequences that it cuts
    noise_floor: float  # 0 if it was not measured


def sequence_log_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """log s = 1/|y| Σ_t log(π/π_old), float32 [B], 0 for a row without response tokens (leave such rows out).

    Of two computations with the same weights it is the numerical noise of s.
    """
    logp_BT = checks.array("logp", logp, jnp.float32, "BT")
    old_logp_BT = checks.array("old_logp", old_logp, jnp.float32, "BT")
    checks.same_shape("old_logp", old_logp_BT, "logp", logp_BT.shape)
    mask_BT = checks.array("mask", mask, jnp.bool_, "BT")
    checks.same_shape("mask", mask_BT, "logp", logp_BT.shape)
    return stop_gradient(masked.mean(logp_BT - old_logp_BT, mask_BT, axis=-1))


def noise_floor(log_ratio: Array, *, quantile: float = 0.99) -> float:
    """The |s - 1| that `quantile` of the sequences stay within, log s being that of two runs of the same weights."""
    deviation_B = np.abs(np.expm1(_measured("log_ratio", log_ratio)))
    return float(np.quantile(deviation_B, _between("quantile", quantile, 0, 1)))


def cut_share(log_ratio: Array, advantage: Array, *, clip_low: float, clip_high: float) -> float:
    """Share of the sequences that GSPO cuts: A > 0 and s > 1 + clip_high, or A < 0 and s < 1 - clip_low."""
    above_B, advantage_B = _deviation(log_ratio, advantage)
    clip_low, clip_high = checks.known_clip_range(clip_low, clip_high)
    high_B = (advantage_B > 0) & (above_B > clip_high)
    return float(np.mean(high_B | ((advantage_B < 0) & (-above_B > clip_low))))


def propose(log_ratio: Array, advantage: Array, *, share: float = 0.15, floor: float = 0.0) -> ClipRange:
    """The range that cuts `share` of these sequences, no side narrower than `floor`.

    The same share of the sequences with A > 0 is cut from above as of those with A < 0 from below. About half of all
    ratios lie on the side that is never cut, and advantages of 0 are never, so a large share may be out of reach: then
    the widths are as narrow as they can be, and the result's `share` says what that cuts.

    Args:
      log_ratio: [B], log s of the second mini-batch; rows without response tokens left out.
      advantage: [B], of the same sequences.
      share: the wished share of sequences, above 0 and below 1.
      floor: `noise_floor` of a repeat with the same weights, 0 if there is none.

    Raises:
      TypeError: an argument is no array, or no number.
      ValueError: shapes do not fit; a measured number is not finite; every advantage is 0; a number is out of range.
    """
    above_B, advantage_B = _deviation(log_ratio, advantage)
    share = _between("share", share, 0, 1)
    checks.number("floor", floor)
    if not 0 <= floor < math.inf:
        raise ValueError(f"floor must be finite and at least 0; got {floor}")
    high, low = above_B[advantage_B > 0], -above_B[advantage_B < 0]
    if not (high.size or low.size):
        raise ValueError("advantage must have an entry that is not 0: nothing else is ever cut")
    cut = round(share * above_B.size)
    cut_high = round(cut * high.size / (high.size + low.size))
    clip_high, clip_low = _width(high, cut_high), _width(low, cut - cut_high)
    clip_high = clip_low if clip_high is None else clip_high
    clip_low = clip_high if clip_low is None else clip_low
    assert clip_low is not None and clip_high is not None
    clip_low, clip_high = max(clip_low, float(floor)), max(clip_high, float(floor))
    got = cut_share(log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return ClipRange(clip_low=clip_low, clip_high=clip_high, share=got, noise_floor=float(floor))


def next_range(
    clip_low: float,
    clip_high: float,
    measured: float,
    *,
    share: float = 0.15,
    tolerance: float = 0.05,
    gain: float = 1.0,
    floor: float = 0.0,
    ceiling: float = INERT,
) -> tuple[float, float]:
    """(clip_low, clip_high) for the next updates: both wider if too much was cut, narrower if too little.

    width · exp(gain · (measured - share)), held within [floor, ceiling], and just the same numbers while `measured` is
    within `tolerance` of `share`, so that the step is compiled anew only after a drift. Give it
    `clip_fraction_sequences` as a mean over the mini-batches after each batch's first: one mini-batch is noisy, and
    the first cuts nothing.

    Raises:
      TypeError: an argument is no Python number.
      ValueError: one is out of range; a width is 0, from which no factor leads away.
    """
    clip_low, clip_high = checks.known_clip_range(clip_low, clip_high)
    if not (clip_low > 0 and clip_high > 0):
        raise ValueError(f"clip_low and clip_high must be above 0 to be scaled; got {clip_low} and {clip_high}")
    for name, number in (("tolerance", tolerance), ("gain", gain), ("floor", floor), ("ceiling", ceiling)):
        checks.number(name, number)
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and at least 0; got {number}")
    if floor > ceiling:
        raise ValueError(f"floor must not be above ceiling {ceiling}; got {floor}")
    checks.number("measured", measured)
    if not 0 <= measured <= 1:
        raise ValueError(f"measured must be a share from 0 to 1; got {measured}")
    away = measured - _between("share", share, 0, 1)
    factor = math.exp(gain * away) if abs(away) > tolerance else 1.0
    return tuple(min(max(width * factor, float(floor)), float(ceiling)) for width in (clip_low, clip_high))  # type: ignore[return-value]


def range_warnings(clip_low: float, clip_high: float, *, floor: float | None = None) -> tuple[str, ...]:
    """What is wrong with a range for GSPO, a sentence each: it can hardly ever cut, or it cuts what is only noise.

    Args:
      clip_low, clip_high: the range.
      floor: `noise_floor` of a repeat with the same weights; None if it was not measured.
    """
    sentences = []
    for name, width in zip(("clip_low", "clip_high"), checks.known_clip_range(clip_low, clip_high), strict=True):
        if width >= INERT:
            sentences.append(
                f"{name} is {width:g}: a sequence ratio is a geometric mean and hardly ever {INERT:g} away from 1, so "
                "GSPO cuts nothing there (the paper's range is 3e-4 / 4e-4)"
            )
        if floor is not None and width < floor:
            sentences.append(
                f"{name} is {width:g}, below the noise floor {floor:g}: two computations with the same weights differ "
                "by more, so what GSPO cuts there is chance"
            )
    return tuple(sentences)


def _width(deviation: np.ndarray, cut: int) -> float | None:
    """A width that the `cut` largest deviations exceed, or fewer if some are equal; None if there are none at all.

    It lies midway between two deviations, so that float32 does not decide which side one is on. Below 0 if all that
    could be cut still is not enough.
    """
    if not deviation.size:
        return None
    falling = np.sort(deviation)[::-1]
    below = falling[cut] if cut < deviation.size else -math.inf
    above = falling[falling > below][-1] if falling[0] > below else below + abs(below) / 50
    return float((above + max(below, 0.0)) / 2)


def _deviation(log_ratio: Any, advantage: Any) -> tuple[np.ndarray, np.ndarray]:
    """(s - 1, A), float64 [B]."""
    log_ratio_B = _measured("log_ratio", log_ratio)
    advantage_B = _measured("advantage", advantage)
    if log_ratio_B.shape != advantage_B.shape:
        raise ValueError(
            f"advantage must have shape {list(log_ratio_B.shape)}, as log_ratio has; got {list(advantage_B.shape)}"
        )
    return np.expm1(log_ratio_B), advantage_B


def _measured(name: str, value: Any) -> np.ndarray:
    """A non-empty array [B] of finite numbers as float64."""
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        raise TypeError(f"{name} must be an array [B]; got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} must hold floats; got {value.dtype} {list(value.shape)}")
    if len(value.shape) != 1 or not value.shape[0]:
        raise ValueError(f"{name} must be [B] with at least one sequence; got {value.dtype} {list(value.shape)}")
    value_B = np.asarray(value, np.float64)
    if not np.isfinite(value_B).all():
        raise ValueError(f"{name} must be finite; got {int((~np.isfinite(value_B)).sum())} entries that are not")
    return value_B


def _between(name: str, value: Any, low: float, high: float) -> float:
    checks.number(name, value)
    if not low < value < high:
        raise ValueError(f"{name} must be above {low} and below {high}; got {value}")
    return float(value)
