"""The clip range of a run that measures it: where it starts, and how it follows a drift (`losses.calibration`).

Shares are of the live sequences, those with an advantage: the others are never cut, and how many there are depends on
the task.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gspax.config import Experiment
from gspax.distributed import multihost
from gspax.experiment.description import keywords, unwrap
from gspax.experiment.loss_validation import SEQUENCE_RATIOS
from gspax.losses import calibration
from gspax.types import Array, Batch

WIDEST = 1.0  # a lower bound of 0
RESOLUTION = 2.0**-23  # float32 next to 1: a range below it is none


def initial_range(experiment: Experiment) -> Array:
    """The widths that the loss has before anything is measured, float32 [2]; zeros if nothing is to be measured."""
    if experiment.calibration is None:
        return jnp.zeros(2)
    settings = keywords(experiment.loss)
    return jnp.array([settings["clip_low"], settings["clip_high"]], jnp.float32)


def ratio_noise(first_update: dict[str, Any]) -> float:
    """The largest |s - 1| in a rollout batch's first update, where policies are equal and only arithmetic differs."""
    return max(float(first_update["ratio_max"]) - 1, 1 - float(first_update["ratio_min"]), RESOLUTION)


def measure_range(experiment: Experiment, floor: float, logp_BT: Array, batch: Batch) -> Array:
    """The range that cuts the wished share of a run's second mini-batch, float32 [2].

    Args:
      floor: `noise_floor` of the run's first update.
      logp_BT: log-probs of the second mini-batch's tokens after that update.
    """
    assert experiment.calibration is not None
    _, live_B = _some_and_live(batch)
    if not live_B.any():
        return initial_range(experiment)
    log_ratio_B = calibration.sequence_log_ratio(logp_BT, batch.old_logp_BT, batch.mask_BT)
    log_ratio_B, advantage_B = (each[live_B] for each in multihost.to_host((log_ratio_B, batch.advantage_B)))
    got = calibration.propose(log_ratio_B, advantage_B, share=experiment.calibration.share, floor=floor)
    return jnp.array([got.clip_low, got.clip_high], jnp.float32)


def adapt_range(
    experiment: Experiment, clip_range: Array, batches: list[Batch], updates: list[dict[str, Any]]
) -> Array:
    """The range of the next rollout batch, after the updates by the batches of one, float32 [2]."""
    settings = experiment.calibration
    assert settings is not None
    live, cut = 0, 0.0
    for batch, update in zip(batches[1:], updates[1:], strict=True):  # in the first one every ratio is 1
        some_B, live_B = _some_and_live(batch)
        live += live_B.sum()
        cut += float(update["clip_fraction_sequences"]) * some_B.sum()
    if not live:
        return clip_range
    clip_low, clip_high = map(float, clip_range)
    widths = calibration.next_range(
        clip_low,
        clip_high,
        min(float(cut / live), 1.0),
        share=settings.share,
        tolerance=settings.tolerance,
        gain=settings.gain,
        floor=min(ratio_noise(updates[0]), WIDEST),
        ceiling=WIDEST,  # short responses leave 1 further than `calibration.INERT`
    )
    return jnp.array(widths, jnp.float32)


def _some_and_live(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The rows with response tokens, and those of them that can be cut, both bool [B]."""
    mask_BT, advantage_B = multihost.to_host((batch.mask_BT, batch.advantage_B))
    some_B = mask_BT.any(axis=-1)
    return some_B, some_B & (advantage_B != 0)


def noise_warnings(experiment: Experiment, floor: float) -> tuple[str, ...]:
    """What the noise floor of a run's first update says against the range of its loss, a sentence each."""
    if unwrap(experiment.loss).__name__ not in SEQUENCE_RATIOS or experiment.calibration is not None:
        return ()
    settings = keywords(experiment.loss)
    widths = settings["clip_low"], settings["clip_high"]
    told = calibration.range_warnings(*widths)  # before the run, by `validation.warnings`
    return tuple(sentence for sentence in calibration.range_warnings(*widths, floor=floor) if sentence not in told)
