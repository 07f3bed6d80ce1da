"""The clip range of a run that measures it: where it starts, and how it follows the ratios (`losses.calibration`).

Shares are of the live sequences, those with an advantage: the others are never clipped, and how many there are depends
on the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspax.config import Calibration
from gspax.experiment.description import keywords
from gspax.losses import calibration
from gspax.losses.traits import traits_of
from gspax.types import Array

WIDEST = 1.0  # a lower bound of 0
RESOLUTION = 2.0**-23  # of float32 next to 1: a narrower range clips everything


def initial_range(loss: Callable[..., Any], settings: Calibration | None) -> Array:
    """The widths bound to the loss, float32 [2], before anything is measured; zeros without calibration."""
    if settings is None:
        return jnp.zeros(2)
    options = keywords(loss)
    return jnp.array([options["clip_low"], options["clip_high"]], jnp.float32)


def noise_floor(first_update: dict[str, Any]) -> float:
    """The noise floor of s: `ratio_deviation` of a rollout batch's first update, where only rounding moves s from 1."""
    return max(float(first_update["ratio_deviation"]), RESOLUTION)


def expected_growth(rates: Sequence[float]) -> list[float]:
    """How much further each update's ratios will spread in the next rollout batch, as its learning rates are larger.

    Ratios spread in proportion to the sum of the learning rates of their rollout batch's updates so far. Growth is
    limited to a factor of 3, because moments that have seen few gradients make the first updates larger than that.

    Args:
      rates: the learning rates of the last rollout batch's updates, then those of the next one's.
    """
    last, following = np.split(np.asarray(rates, np.float64), 2)
    before, after = (np.concatenate([[0], np.cumsum(each)[:-1]]) for each in (last, following))
    return [min(float(b / a), 3.0) if a > 0 else 1.0 for a, b in zip(before, after, strict=True)]


def adapt_range(
    settings: Calibration, clip_range: Array, updates: list[dict[str, Any]], growth: Sequence[float]
) -> Array:
    """The range for the next rollout batch, float32 [2], from the metrics of the updates by one.

    The target is the geometric mean of the ranges that the updates measured (`calibration.range_metrics`), each times
    its `expected_growth`. The first update is left out, as every ratio is 1 there, and so is each side whose ratios
    have not left the noise floor: while the learning rate is 0 there is nothing to measure.
    """
    floor = min(noise_floor(updates[0]), WIDEST)
    measured = [(float(update["clip_low_measured"]), float(update["clip_high_measured"])) for update in updates]
    moved = [k for k in range(1, len(updates)) if max(measured[k]) > floor]
    if not moved:
        return clip_range
    low, high = (
        _geometric_mean([growth[k] * measured[k][side] for k in moved if measured[k][side] > floor]) for side in (0, 1)
    )
    if max(growth[k] for k in moved) > 1.1:  # during a warm-up the last share says nothing about the next
        settings = replace(settings, tolerance=0.0)
    clip_low, clip_high = map(float, clip_range)
    widths = calibration.next_range(
        (clip_low, clip_high),
        (low, high),
        cut=float(np.mean([updates[k]["clip_fraction_live"] for k in moved])),
        share=settings.share,
        tolerance=settings.tolerance,
        gain=settings.gain,
        floor=floor,
        ceiling=WIDEST,  # short responses leave 1 further than `calibration.INERT`
    )
    return jnp.array(widths, jnp.float32)


def _geometric_mean(widths: list[float]) -> float:
    """0 of none."""
    return float(np.exp(np.mean(np.log(widths)))) if widths else 0.0


def noise_warnings(loss: Callable[..., Any], floor: float) -> tuple[str, ...]:
    """A sentence for each side of a loss's own clip range on sequence ratios that is below the noise floor."""
    traits, options = traits_of(loss), keywords(loss)
    if traits.ratio != "sequence" or not traits.clip_range or not {"clip_low", "clip_high"} <= options.keys():
        return ()
    widths = options["clip_low"], options["clip_high"]
    before = calibration.range_warnings(*widths)  # given before the run, by `experiment.warnings`
    return tuple(each for each in calibration.range_warnings(*widths, floor=floor) if each not in before)
