"""The clip range of a run that measures it: its start, and how it follows the ratios (`losses.calibration`).

Each update measures the widths that would have clipped the wanted share, and the next one uses their running average,
so a run has a range after its first ratios other than 1, in its first rollout. Until then it clips nothing.

Shares are of the sequences with an advantage: the others are never clipped, and their number depends on the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from gspax.config import Calibration
from gspax.config.functions import keywords
from gspax.losses import Terms, calibration
from gspax.losses.traits import traits_of
from gspax.parallel import multihost
from gspax.types import Array

WIDEST = 1.0  # a lower bound of 0: clips nothing
RESOLUTION = 2.0**-23  # of float32 next to 1: a narrower range clips everything


def initial_range(settings: Calibration | None) -> Array:
    """The widths before anything is measured, float32 [2]: `WIDEST`, which clips nothing; zeros without calibration."""
    # a weakly typed array would compile the update twice
    return jnp.zeros(2) if settings is None else jnp.full(2, WIDEST, jnp.float32)


def noise_floor(first_update: Mapping[str, float]) -> float:
    """The noise floor of s: `ratio_deviation` of a rollout's first update, where only rounding moves s from 1."""
    return max(float(first_update["ratio_deviation"]), RESOLUTION)


def adapt_range(
    settings: Calibration,
    clip_range: tuple[float, float],
    updates: Sequence[Mapping[str, float]],
    rates: Sequence[float],
) -> tuple[float, float]:
    """The range after the last of `updates`, the updates of a rollout so far.

    Sequence ratios spread in proportion to the sum of the learning rates of the rollout's updates before. So the widths
    that an update measured (`calibration.range_metrics`) are scaled by the sum that is typical of a rollout over that
    update's own, and the range by how much the typical sum grows from one rollout to the next. Nothing is measured by a
    rollout's first update, by updates with only learning rates of 0 before them, and from the first update on that was
    not applied.

    Args:
      updates: the metrics of each update on the host.
      rates: the learning rates of this rollout's updates if all are applied, then those of the next rollout's.
    """
    before, following = (np.cumsum([0, *half[:-1]]) for half in np.split(np.asarray(rates, np.float64), 2))
    typical, this = _geometric_mean(before), len(updates) - 1
    if before[this] > 0 and not any(update["skipped"] or update["empty"] for update in updates):
        floor = min(noise_floor(updates[0]), WIDEST)
        measured = [float(updates[this][f"clip_{side}_measured"]) for side in ("low", "high")]
        low, high = (width * typical / float(before[this]) if width > floor else 0.0 for width in measured)
        clip_range = calibration.next_range(
            clip_range,
            (low, high),
            clipped=float(updates[this]["clip_fraction_live"]),
            share=settings.share,
            tolerance=settings.tolerance,
            gain=settings.gain,
            floor=floor,
            ceiling=WIDEST,  # short responses leave 1 further than `calibration.INERT`
        )
    if this == len(before) - 1 and typical > 0 and (growth := _geometric_mean(following) / typical) > 0:
        low, high = (width if width >= WIDEST else min(growth * width, WIDEST) for width in clip_range)
        return low, high
    return clip_range


def _geometric_mean(sums: np.ndarray) -> float:
    """The geometric mean of the sums above 0; 0 if there are none."""
    return float(np.exp(np.mean(np.log(sums[sums > 0])))) if (sums > 0).any() else 0.0


def noise_warnings(loss: Callable[..., Terms], floor: float) -> tuple[str, ...]:
    """A sentence for each side of a loss's own clip range on sequence ratios that is below the noise floor."""
    traits, options = traits_of(loss), keywords(loss)
    if traits.ratio != "sequence" or not traits.clip_range or not {"clip_low", "clip_high"} <= options.keys():
        return ()
    widths = options["clip_low"], options["clip_high"]
    before = calibration.range_warnings(*widths)  # given before the run, by `experiment.warnings`
    return tuple(line for line in calibration.range_warnings(*widths, floor=floor) if line not in before)


def warn_of_noise(loss: Callable[..., Terms], settings: Calibration | None, metrics: Mapping[str, float]) -> None:
    """Warn if rounding alone can leave a loss's own clip range."""
    if settings is not None:
        return
    for sentence in noise_warnings(loss, metrics.get("policy/noise_floor", 0.0)):
        multihost.warn_from_primary(sentence)
