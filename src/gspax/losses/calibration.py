"""A clip range for sequence ratios that a run measures instead of guessing.

A range does not carry over to another model, response length, or learning rate: s is a geometric mean over tokens, and
its distance from 1 falls with the square root of the length. Inside the train step, `range_metrics` measures the widths
that would have clipped a given share of the sequences; `next_range` follows them from update to update.

This is not from a paper. GSPO's (arXiv 2507.18071) reports that about 15 % of the tokens were clipped under 3e-4 and
4e-4, hence the default share; nothing shows that 15 % is best.

Axes: B rows (one sequence each, unless packed), T tokens, S sequences of a row.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from gspax.losses import checks, sequences
from gspax.losses.surrogate import log_ratio
from gspax.losses.terms import Metrics, Quantile, Share

Array = jax.Array

INERT = 0.05  # a geometric mean practically never leaves 1 by that much


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
    """Return the metrics of a minibatch from which the clip range adapts; compiled as part of the train step.

    - `clip_fraction_nonzero`: clipped sequences over those with an advantage other than 0.
    - `clip_low_measured`, `clip_high_measured`: the widths that would have clipped `share` of the sequences with a
      negative advantage from below, and of the sequences with a positive one from above; 0 for fewer than two.

    Args:
      logp, old_logp, mask, segment_ids: as of a policy loss.
      advantage: float32 [B]; [B, T] for packed rows.
      clipped: `clip_fraction_sequences` of the loss's metrics.
      share: the wanted share, above 0 and below 1.
    """
    log_ratio_BT, mask_BT, segment_BT = log_ratio("logp", logp, "old_logp", old_logp, mask, segment_ids)
    some_BS = sequences.count(mask_BT, segment_BT) > 0
    advantage_BU = stop_gradient(advantage if advantage.ndim == 2 else advantage[:, None])
    advantage_BS = advantage_BU if segment_BT is None else sequences.mean(advantage_BU, mask_BT, segment_BT)
    above_BS = jnp.expm1(sequences.mean(log_ratio_BT, mask_BT, segment_BT))

    def width(deviation_BS: Array, sign_BS: Array) -> Quantile:
        weight_BS = (some_BS & sign_BS).astype(jnp.float32)
        return Quantile(value=deviation_BS, weight=weight_BS, above=share, at_least=1.0)  # clips one sequence at least

    live_B = jnp.sum(some_BS & (advantage_BS != 0), axis=-1, dtype=jnp.float32)
    return {
        "clip_fraction_nonzero": Share(clipped.part, live_B),
        "clip_low_measured": width(-above_BS, advantage_BS < 0),
        "clip_high_measured": width(above_BS, advantage_BS > 0),
    }


def next_range(
    clip_range: tuple[float, float],
    measured: tuple[float, float],
    *,
    clipped: float,
    share: float = 0.15,
    tolerance: float = 0.05,
    gain: float = 0.5,
    floor: float = 0.0,
    ceiling: float = INERT,
) -> tuple[float, float]:
    """Compute (clip_low, clip_high) for the next updates from what the last ones measured.

    width · (measured / width)^gain, clipped to [floor, ceiling]: an average of the logarithms in which a measurement
    loses weight by a factor of 1 - gain with each one that follows. A width at the ceiling clips nothing yet, so the
    measured one replaces it. Nothing changes while `clipped` is within `tolerance` of `share`, nor a side that measured
    nothing above the floor: its ratios have not moved.

    >>> next_range((4e-4, INERT), (1e-4, 2e-3), clipped=0.45)
    (0.0002, 0.002)
    >>> next_range((3e-4, 4e-4), (1e-3, 2e-3), clipped=0.16)
    (0.0003, 0.0004)

    Args:
      clip_range: (clip_low, clip_high) of the last updates, both above 0.
      measured: the widths that would have clipped the wanted share, such as the metrics of `range_metrics`; 0 for a
        side without sequences.
      clipped: the share of the sequences that was clipped, each rollout's first minibatch excluded.
      share: the wanted share.
      tolerance: how far the share may be off.
      gain: 1 goes all of the way to the measured width, less follows it more slowly but with less noise.
      floor, ceiling: the narrowest width, such as the noise floor, and the widest, at which nothing is clipped.

    Raises:
      TypeError: an argument is no Python number.
      ValueError: one is out of range; a width is 0, from which no factor leads away.
    """
    clip_low, clip_high = checks.known_clip_range(*clip_range)
    if not (clip_low > 0 and clip_high > 0):
        raise ValueError(f"clip_low and clip_high must be above 0 to be scaled; got {clip_low} and {clip_high}")
    _check_settings(clipped, share, tolerance=tolerance, gain=gain, floor=floor, ceiling=ceiling)
    for width in measured:
        if not math.isfinite(checks.number("measured", width)):
            raise ValueError(f"measured must be two finite widths; got {measured}")

    def follow(width: float, wanted: float) -> float:
        if wanted > floor and width >= ceiling:
            width = wanted
        elif wanted > floor and abs(clipped - share) > tolerance:
            width *= (wanted / width) ** gain
        return min(max(width, float(floor)), float(ceiling))

    return follow(clip_low, measured[0]), follow(clip_high, measured[1])


def _check_settings(clipped: float, share: float, **sizes: float) -> None:
    for name, size in sizes.items():
        if not 0 <= checks.number(name, size) < math.inf:
            raise ValueError(f"{name} must be finite and at least 0; got {size}")
    if sizes["floor"] > sizes["ceiling"]:
        raise ValueError(f"floor must not be above ceiling {sizes['ceiling']}; got {sizes['floor']}")
    if not 0 <= checks.number("clipped", clipped) <= 1:
        raise ValueError(f"clipped must be a share from 0 to 1; got {clipped}")
    if not 0 < checks.number("share", share) < 1:
        raise ValueError(f"share must be above 0 and below 1; got {share}")


def range_warnings(clip_low: float, clip_high: float, *, floor: float | None = None) -> tuple[str, ...]:
    """Return warnings about a range for GSPO, a sentence each: it hardly ever clips, or it clips noise.

    >>> range_warnings(3e-4, 4e-4)
    ()

    Args:
      clip_low, clip_high: the range.
      floor: `noise_floor` of a repeat with the same weights; None if it was not measured.
    """
    sentences = []
    for name, width in zip(("clip_low", "clip_high"), checks.known_clip_range(clip_low, clip_high), strict=True):
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
