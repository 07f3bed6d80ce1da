"""The clip range of a run, on batches made by hand."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from small_experiment import experiment

from gspax import losses
from gspax.config import Calibration
from gspax.learner import clipping
from gspax.types import Batch

WISHED = Calibration(share=0.25, tolerance=0.05, gain=1.0)
MEASURED = replace(experiment, loss=partial(losses.gspo, clip_low=0.01, clip_high=0.02), calibration=WISHED)


def a_batch(advantage, tokens=3):
    """Rows of as many response tokens each as `tokens` says; old log-probs of 0."""
    advantage = np.asarray(advantage, np.float32)
    length = np.broadcast_to(tokens, advantage.shape)
    mask = np.arange(4)[None] < length[:, None]
    zeros = jnp.zeros(mask.shape)
    return Batch(
        tokens_BT=zeros.astype(int),
        segment_BT=zeros.astype(int),
        mask_BT=jnp.asarray(mask),
        old_logp_BT=zeros,
        advantage_B=jnp.asarray(advantage),
    )


def test_the_start_is_the_range_of_the_loss_or_zeros_that_nothing_reads():
    np.testing.assert_array_equal(clipping.initial_range(MEASURED), np.float32([0.01, 0.02]))
    np.testing.assert_array_equal(clipping.initial_range(experiment), [0, 0])


@pytest.mark.parametrize(("low", "high", "floor"), [(0.9, 1.01, 0.1), (0.99, 1.2, 0.2), (1.0, 1.0, 2.0**-23)])
def test_noise_is_the_largest_deviation_of_a_first_update(low, high, floor):
    assert clipping.ratio_noise({"ratio_min": low, "ratio_max": high}) == pytest.approx(floor)


def test_the_first_range_cuts_the_wished_share_of_the_live_rows():
    advantage = np.where(np.arange(80) % 2, 1.0, -1.0)
    dead, empty = np.zeros(40), np.ones(40)
    batch = a_batch(np.concatenate([advantage, dead, empty]), np.repeat([3, 3, 0], [80, 40, 40]))
    log_ratio = np.concatenate([np.linspace(-0.1, 0.1, 80), np.full(80, 5.0)]).astype(np.float32)
    logp_BT = jnp.broadcast_to(log_ratio[:, None], batch.mask_BT.shape)
    low, high = clipping.measure_range(MEASURED, 0.0, logp_BT, batch)
    s = np.exp(log_ratio[:80])
    cut = ((advantage > 0) & (s > 1 + high)) | ((advantage < 0) & (s < 1 - low))
    assert cut.sum() == 20
    floor = clipping.measure_range(MEASURED, 0.5, logp_BT, batch)
    np.testing.assert_array_equal(floor, [0.5, 0.5])


def test_a_batch_without_advantages_teaches_nothing():
    batch = a_batch(np.zeros(8))
    start = clipping.initial_range(MEASURED)
    np.testing.assert_array_equal(clipping.measure_range(MEASURED, 0.0, batch.old_logp_BT, batch), start)
    updates = [{"ratio_min": 1.0, "ratio_max": 1.0, "clip_fraction_sequences": 0.0}] * 2
    assert clipping.adapt_range(MEASURED, start, [batch, batch], updates) is start


@pytest.mark.parametrize(
    ("fraction", "factor"),
    [(0.25, np.exp(0.25)), (0.0, np.exp(-0.25)), (0.13, 1.0), (0.5, np.exp(0.75))],
)
def test_the_range_follows_the_share_of_the_live_rows_after_the_first_mini_batch(fraction, factor):
    batches = [a_batch(np.ones(8)), a_batch([1, -1, 0, 0, 1, -1, 0, 0])]
    updates = [
        {"ratio_min": 1.0, "ratio_max": 1.0, "clip_fraction_sequences": 1.0},
        {"ratio_min": 0.9, "ratio_max": 1.1, "clip_fraction_sequences": fraction},
    ]
    found = clipping.adapt_range(MEASURED, clipping.initial_range(MEASURED), batches, updates)
    np.testing.assert_allclose(found, np.array([0.01, 0.02]) * factor, rtol=1e-5)


def test_a_wide_range_stays_wide():
    batches = [a_batch(np.ones(8))] * 2
    updates = [{"ratio_min": 1.0, "ratio_max": 1.0, "clip_fraction_sequences": 0.25}] * 2
    found = clipping.adapt_range(MEASURED, jnp.array([0.2, 0.3]), batches, updates)
    np.testing.assert_allclose(found, [0.2, 0.3], rtol=1e-6)


def test_the_range_does_not_fall_below_the_noise():
    batches = [a_batch(np.ones(8))] * 2
    updates = [
        {"ratio_min": 0.985, "ratio_max": 1.0, "clip_fraction_sequences": 0.0},
        {"ratio_min": 0.9, "ratio_max": 1.1, "clip_fraction_sequences": 0.0},
    ]
    found = clipping.adapt_range(MEASURED, clipping.initial_range(MEASURED), batches, updates)
    np.testing.assert_allclose(found, [0.015, 0.02 * np.exp(-0.25)], rtol=1e-5)


def test_noise_warnings_are_for_fixed_ranges_of_sequence_ratios():
    narrow = replace(MEASURED, calibration=None)
    (sentence,) = clipping.noise_warnings(narrow, 0.015)
    assert sentence.startswith("clip_low is 0.01, below the noise floor 0.015")
    assert clipping.noise_warnings(narrow, 0.001) == ()
    assert clipping.noise_warnings(MEASURED, 0.015) == ()
    wide = replace(narrow, loss=partial(losses.gspo, clip_low=0.2, clip_high=0.2))
    assert clipping.noise_warnings(wide, 0.015) == ()  # that such a range hardly cuts was said before the run
    assert clipping.noise_warnings(replace(narrow, loss=losses.grpo), 0.5) == ()
