"""GSPO's clip range, measured: from the sequence ratios of rollouts to the range that clips a wanted share of them.

A range does not carry over to another model, another response length or another learning rate: s is a geometric
mean, and its distance from 1 falls with the square root of the length. So measure it.

1. Take a rollout batch and update on its first minibatches. `sequence_log_ratio` of the next minibatch is what the clip
   range will see. (In the first minibatch every ratio is 1.)
2. Compute the log-probabilities of some rows twice with the same weights, the second time as the update does, in its
   shapes. `noise_floor` of the log-ratio between the two is how far rounding alone moves s from 1.
3. `propose` gives the range. `range_warnings` lists what is wrong with a given one, `next_range` follows a drift.

A training step measures the same in compiled code: `ratio_deviation` of a policy loss's metrics is the noise floor, and
`range_metrics` gives the widths.

This is not from a paper. GSPO's (arXiv 2507.18071) reports that about 15 % of the tokens were clipped under 3e-4 and
4e-4, hence the default share; nothing shows that 15 % is best, so report a curve of `cut_share` too.

Axes: B rows (one sequence each, unless packed), T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from gspax.losses import _checks, _sequences
from gspax.losses._policy_terms import NOISE_ABOVE
from gspax.losses._terms import Metrics, Quantile, Share, Terms, reduce

Array = jax.Array

INERT = 0.05  # a geometric mean practically never leaves 1 by that much


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """A proposed range, and what it would have clipped of the sequences it was measured on."""

    clip_low: float
    clip_high: float
    share: float  # of the measured sequences that it clips
    noise_floor: float  # 0 if it was not measured


def sequence_log_ratio(logp: Array, old_logp: Array, mask: Array, segment_ids: Array | None = None) -> Array:
    """log s = 1/|y| Σ_t log(π/π_old), float32 [B], 0 for a row without response tokens (leave such rows out).

    Packed, float32 [B, T + 1] with sequence s of a row in column s. For two computations with the same weights it is
    the numerical noise of log s.

    >>> logp = jnp.log(jnp.array([[1.0, 0.5, 0.5], [1.0, 0.5, 0.5]]))
    >>> mask = jnp.array([[False, True, True], [False, True, False]])
    >>> jnp.exp(sequence_log_ratio(logp, logp - 0.01, mask)).round(4).tolist()
    [1.0101, 1.0101]
    """
    log_ratio_BT, mask_BT, segment_BT = _log_ratio(logp, old_logp, mask, segment_ids)
    log_s_BS = _sequences.mean(log_ratio_BT, mask_BT, segment_BT)
    return log_s_BS[:, 0] if segment_BT is None else log_s_BS


def range_metrics(
    logp: Array,
    old_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    clipped: Share,
    share: float,
    segment_ids: Array | None = None,
) -> Metrics:
    """Metrics of a minibatch that its run's clip range is adapted by; compiled as part of the train step.

    - `clip_fraction_live`: clipped sequences over those with an advantage other than 0.
    - `clip_low_measured`, `clip_high_measured`: the widths that would have clipped `share` of the sequences with a
      negative advantage from below, and of those with a positive one from above; 0 for fewer than two of them.

    Args:
      logp, old_logp, mask, segment_ids: as of a policy loss.
      advantage: float32 [B]; [B, T] for packed rows.
      clipped: `clip_fraction_sequences` of the loss's metrics.
      share: the wanted share, above 0 and below 1.
    """
    log_ratio_BT, mask_BT, segment_BT = _log_ratio(logp, old_logp, mask, segment_ids)
    some_BS = _sequences.count(mask_BT, segment_BT) > 0
    advantage_BU = stop_gradient(advantage if advantage.ndim == 2 else advantage[:, None])
    advantage_BS = advantage_BU if segment_BT is None else _sequences.mean(advantage_BU, mask_BT, segment_BT)
    above_BS = jnp.expm1(_sequences.mean(log_ratio_BT, mask_BT, segment_BT))

    def width(deviation_BS: Array, sign_BS: Array) -> Quantile:
        return Quantile(value=deviation_BS, weight=(some_BS & sign_BS).astype(jnp.float32), above=share)

    live_B = jnp.sum(some_BS & (advantage_BS != 0), axis=-1, dtype=jnp.float32)
    return {
        "clip_fraction_live": Share(clipped.part, live_B),
        "clip_low_measured": width(-above_BS, advantage_BS < 0),
        "clip_high_measured": width(above_BS, advantage_BS > 0),
    }


def noise_floor(log_ratio: Array, length: Array | None = None, *, above: float = NOISE_ABOVE) -> float:
    """The |s - 1| beyond which lies at most the share `above` of the tokens, for two runs with the same weights.

    Sequences count by their length, because the noise of a short one is larger and says little of the others; the
    largest deviation is left out in any case.

    >>> noise = jnp.log1p(jnp.array([1e-5, -2e-5, 1e-5, 2e-5, -1e-5, 0.03]))
    >>> f"{noise_floor(noise):.0e}"
    '2e-05'

    Args:
      log_ratio: [B], log s; rows without response tokens left out.
      length: [B], response tokens; None for equal lengths.
      above: above 0 and below 1.
    """
    log_ratio_B = _measured("log_ratio", log_ratio)
    length_B = np.ones_like(log_ratio_B) if length is None else np.asarray(length, np.float64)
    if length_B.shape != log_ratio_B.shape:
        raise ValueError(
            f"length must have shape {list(log_ratio_B.shape)}, as log_ratio has; got {list(length_B.shape)}"
        )
    deviation = Quantile(
        value=jnp.asarray(np.abs(np.expm1(log_ratio_B)), jnp.float32),
        weight=jnp.asarray(length_B, jnp.float32),
        above=_between("above", above, 0, 1),
    )
    return float(reduce(Terms(jnp.zeros(1), jnp.zeros(1), {"deviation": deviation}))[1]["deviation"])


def cut_share(log_ratio: Array, advantage: Array, *, clip_low: float, clip_high: float) -> float:
    """Share of the sequences that GSPO clips: A > 0 and s > 1 + clip_high, or A < 0 and s < 1 - clip_low.

    >>> log_ratio = jnp.log(jnp.array([1.01, 1.03, 0.97, 0.99]))
    >>> cut_share(log_ratio, jnp.array([1.0, 1.0, -1.0, -1.0]), clip_low=0.02, clip_high=0.02)
    0.5
    """
    above_B, advantage_B = _deviation(log_ratio, advantage)
    clip_low, clip_high = _checks.known_clip_range(clip_low, clip_high)
    high_B = (advantage_B > 0) & (above_B > clip_high)
    return float(np.mean(high_B | ((advantage_B < 0) & (-above_B > clip_low))))


def propose(log_ratio: Array, advantage: Array, *, share: float = 0.15, floor: float = 0.0) -> ClipRange:
    """The range that clips `share` of these sequences, no side narrower than `floor`.

    The same share of the sequences with A > 0 is clipped from above as of those with A < 0 from below. About half of
    all ratios lie on the side that is never clipped, and sequences with an advantage of 0 never are, so a large share
    may be out of reach: then the widths are as narrow as possible, and the result's `share` is what that clips.

    >>> log_ratio = jnp.log(jnp.array([1.01, 1.03, 0.97, 0.99]))
    >>> found = propose(log_ratio, jnp.array([1.0, 1.0, -1.0, -1.0]), share=0.5)
    >>> f"{found.clip_low:.3f} {found.clip_high:.3f} {found.share}"
    '0.020 0.020 0.5'

    Args:
      log_ratio: [B], log s of a minibatch after the first; rows without response tokens left out.
      advantage: [B], of the same sequences.
      share: the wanted share of sequences, above 0 and below 1.
      floor: `noise_floor` of a repeat with the same weights, 0 if there is none.

    Raises:
      TypeError: an argument is no array, or no number.
      ValueError: shapes do not fit; a measured number is not finite; every advantage is 0; a number is out of range.
    """
    above_B, advantage_B = _deviation(log_ratio, advantage)
    share = _between("share", share, 0, 1)
    _checks.number("floor", floor)
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
    clip_range: tuple[float, float],
    measured: tuple[float, float],
    *,
    cut: float,
    share: float = 0.15,
    tolerance: float = 0.05,
    gain: float = 0.5,
    floor: float = 0.0,
    ceiling: float = INERT,
) -> tuple[float, float]:
    """(clip_low, clip_high) for the next updates, from what the last ones measured.

    width · (measured / width)^gain, held within [floor, ceiling]: an average of the logarithms in which a measurement
    loses weight by a factor of 1 - gain with each one that follows. A width at the ceiling clips nothing yet, so the
    measured one replaces it. Nothing changes while `cut` is within `tolerance` of `share`, nor a side that measured
    nothing above the floor: its ratios have not moved.

    >>> next_range((4e-4, INERT), (1e-4, 2e-3), cut=0.45)
    (0.0002, 0.002)
    >>> next_range((3e-4, 4e-4), (1e-3, 2e-3), cut=0.16)
    (0.0003, 0.0004)

    Args:
      clip_range: (clip_low, clip_high) of the last updates, both above 0.
      measured: the widths that would have clipped the wanted share, such as the metrics of `range_metrics`; 0 for a
        side without sequences.
      cut: the share of the sequences that was clipped, without those of each rollout batch's first minibatch.
      share: the wanted share.
      tolerance: how far the share may be off.
      gain: 1 goes all of the way to the measured width, less follows it more slowly but with less noise.
      floor, ceiling: the narrowest width, such as the noise floor, and the widest, at which nothing is clipped.

    Raises:
      TypeError: an argument is no Python number.
      ValueError: one is out of range; a width is 0, from which no factor leads away.
    """
    clip_low, clip_high = _checks.known_clip_range(*clip_range)
    if not (clip_low > 0 and clip_high > 0):
        raise ValueError(f"clip_low and clip_high must be above 0 to be scaled; got {clip_low} and {clip_high}")
    for name, number in (("tolerance", tolerance), ("gain", gain), ("floor", floor), ("ceiling", ceiling)):
        _checks.number(name, number)
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and at least 0; got {number}")
    if floor > ceiling:
        raise ValueError(f"floor must not be above ceiling {ceiling}; got {floor}")
    for width in measured:
        _checks.number("measured", width)
        if not math.isfinite(width):
            raise ValueError(f"measured must be two finite widths; got {measured}")
    _checks.number("cut", cut)
    if not 0 <= cut <= 1:
        raise ValueError(f"cut must be a share from 0 to 1; got {cut}")
    off = abs(cut - _between("share", share, 0, 1)) > tolerance

    def follow(width: float, wanted: float) -> float:
        if wanted > floor and width >= ceiling:
            width = wanted
        elif wanted > floor and off:
            width *= (wanted / width) ** gain
        return min(max(width, float(floor)), float(ceiling))

    return follow(clip_low, measured[0]), follow(clip_high, measured[1])


def range_warnings(clip_low: float, clip_high: float, *, floor: float | None = None) -> tuple[str, ...]:
    """What is wrong with a range for GSPO, a sentence each: it hardly ever clips, or it clips what is only noise.

    >>> range_warnings(3e-4, 4e-4)
    ()

    Args:
      clip_low, clip_high: the range.
      floor: `noise_floor` of a repeat with the same weights; None if it was not measured.
    """
    sentences = []
    for name, width in zip(("clip_low", "clip_high"), _checks.known_clip_range(clip_low, clip_high), strict=True):
        if width >= INERT:
            sentences.append(
                f"{name} is {width:g}: a sequence ratio is a geometric mean and hardly ever {INERT:g} away from 1, so "
                "GSPO clips nothing there (the paper's range is 3e-4 / 4e-4)"
            )
        if floor is not None and width < floor:
            sentences.append(
                f"{name} is {width:g}, below the noise floor {floor:g}: two computations with the same weights differ "
                "by more, so GSPO clips noise there"
            )
    return tuple(sentences)


def _width(deviation: np.ndarray, cut: int) -> float | None:
    """A width that the `cut` largest deviations exceed, or fewer if some are equal; None if there are none at all.

    It lies midway between two deviations, so that float32 rounding does not decide which side one is on. Negative if
    all that could be clipped is not enough.
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


def _log_ratio(logp: Any, old_logp: Any, mask: Any, segment_ids: Any) -> tuple[Array, Array, Array | None]:
    """(log r without a gradient, anything outside the mask; the mask; the segments)."""
    found = _checks.two_policies("logp", logp, "old_logp", old_logp, mask, segment_ids)
    logp_BT, old_logp_BT, mask_BT, segment_BT = found
    return stop_gradient(logp_BT - old_logp_BT), _sequences.response(mask_BT, segment_BT), segment_BT


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
    _checks.number(name, value)
    if not low < value < high:
        raise ValueError(f"{name} must be above {low} and below {high}; got {value}")
    return float(value)
