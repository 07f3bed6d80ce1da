"""The clip range of a run, from the metrics of its updates."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from small_experiment import experiment

from gspax import losses
from gspax.config import Calibration
from gspax.learner import clipping, objective
from gspax.losses import calibration
from gspax.types import Batch

SETTINGS = Calibration(share=0.25, tolerance=0.05, gain=1.0)
LOSS = partial(losses.gspo, clip_low=0.01, clip_high=0.02)
START = jnp.array([0.01, 0.02], jnp.float32)


def update(noise=0.0, low=0.0, high=0.0, live=0.0):
    """The metrics of an update, as numbers."""
    return {
        "ratio_deviation": noise,
        "clip_low_measured": low,
        "clip_high_measured": high,
        "clip_fraction_live": live,
    }


def adapt(updates, growth=(1, 1, 1)):
    return clipping.adapt_range(SETTINGS, START, updates, growth)


def test_the_start_is_the_range_of_the_loss_or_zeros_that_nothing_reads():
    np.testing.assert_array_equal(clipping.initial_range(LOSS, SETTINGS), START)
    np.testing.assert_array_equal(clipping.initial_range(LOSS, None), [0, 0])


def test_the_noise_floor_is_the_deviation_of_the_first_update():
    assert clipping.noise_floor(update(noise=1e-4)) == 1e-4
    assert clipping.noise_floor(update(noise=0.0)) == 2.0**-23, "the resolution of float32 next to 1"


def test_the_range_becomes_what_the_updates_after_the_first_measured():
    updates = [update(low=9.0, high=9.0, live=1.0), update(0, 0.001, 0.002, 0.5), update(0, 0.003, 0.006, 0.4)]
    found = adapt(updates)
    np.testing.assert_allclose(found, [3**0.5 * 0.001, 12**0.5 * 0.001], rtol=1e-6)


def test_the_range_stays_while_the_share_is_within_the_tolerance():
    updates = [update(), update(0, 0.001, 0.002, 0.22), update(0, 0.001, 0.002, 0.28)]
    np.testing.assert_array_equal(adapt(updates), START)


def test_what_has_not_moved_measures_nothing():
    """With a warm-up the learning rate of the run's first update is 0: the second minibatch still has ratios of 1."""
    still = [update(noise=2e-7), update(0, 1e-7, 1e-7), update(0, -1e-7, 1e-7)]
    assert adapt(still) is START
    moved = [*still[:2], update(0, 0.001, 0.002, 0.5)]
    np.testing.assert_allclose(adapt(moved), [0.001, 0.002], rtol=1e-6)


def test_a_side_without_sequences_stays():
    updates = [update(), update(0, 0.0, 0.002, 0.5)]
    np.testing.assert_allclose(adapt(updates), [0.01, 0.002], rtol=1e-6)


def test_the_range_is_held_between_the_noise_and_a_lower_bound_of_0():
    updates = [update(noise=0.015), update(0, 0.02, 3.0, 0.5)]
    np.testing.assert_allclose(adapt(updates), [0.02, 1.0], rtol=1e-6)
    still = [update(noise=0.015), update(0, 0.02, 0.02, 0.25)]
    np.testing.assert_allclose(adapt(still), [0.015, 0.02], rtol=1e-6)


def test_the_range_grows_with_the_learning_rate():
    assert clipping.expected_growth([1, 1, 1, 1, 1, 1]) == [1, 1, 1]
    assert clipping.expected_growth([0, 1, 2, 3, 4, 5]) == [1, 1, 3], (
        "0 before the second update, 1 and 7 before the third"
    )
    assert clipping.expected_growth([2, 2, 1, 1]) == [1, 0.5]
    updates = [update(), update(0, 0.001, 0.002, 0.24), update(0, 0.001, 0.002, 0.24)]
    np.testing.assert_allclose(adapt(updates, (1, 2, 2)), [0.002, 0.004], rtol=1e-6)


T = 12


def minibatch(rng, spread, rows=128):
    """Log-probs of a minibatch whose sequence ratios have this spread, and the batch; four fifths are live."""
    length = rng.integers(2, T, rows)
    mask = (np.arange(T)[None] > 0) & (np.arange(T)[None] <= length[:, None])
    old = np.zeros((rows, T), np.float32)
    s = spread * rng.standard_normal((rows, 1)) + 1e-7 * rng.standard_normal((rows, 1))
    advantage = np.where(rng.random(rows) < 0.8, rng.standard_normal(rows), 0)
    batch = Batch(
        tokens_BT=jnp.zeros((rows, T), jnp.int32),
        segment_BT=jnp.ones((rows, T), jnp.int32),
        mask_BT=jnp.asarray(mask),
        old_logp_BT=jnp.asarray(old),
        advantage_B=jnp.asarray(advantage, jnp.float32),
    )
    return jnp.asarray(np.where(mask, old + s, 0), jnp.float32), batch


def shares(rate, rollouts, minibatches=4, outlier=None, seed=0):
    """The clipped share of the live sequences after each rollout batch's first update, and the ranges.

    Ratios spread by the sum of the learning rates of the rollout batch's updates so far, as with Adam.
    """
    rng = np.random.default_rng(seed)
    minimised = objective.make_objective(losses.gspo, calibration=Calibration())
    clip_range, found, ranges = jnp.array([3e-4, 4e-4], jnp.float32), [], []
    for rollout in range(rollouts):
        updates = []
        for k in range(minibatches):
            moved = sum(rate(rollout * minibatches + j) for j in range(k))
            logp, batch = minibatch(rng, 3e-3 * moved)
            if outlier == (rollout, k):
                logp = logp.at[0].add(np.log(1.03) * batch.mask_BT[0])
            outputs = objective.Outputs(logp, logp, None)
            constants = objective.UpdateConstants(clip_range, None)
            _, metrics = losses.reduce(minimised(outputs, batch, constants))
            updates.append({name: float(value) for name, value in metrics.items()})
        found.append(np.mean([each["clip_fraction_live"] for each in updates[1:]]))
        ranges.append(np.asarray(clip_range))
        growth = clipping.expected_growth([rate(rollout * minibatches + j) for j in range(2 * minibatches)])
        clip_range = clipping.adapt_range(Calibration(), clip_range, updates, growth)
    return np.array(found), np.array(ranges)


@pytest.mark.parametrize("warmup", (0, 10, 40))
def test_within_ten_updates_the_share_is_within_a_factor_of_2_with_and_without_a_warm_up(warmup):
    found, ranges = shares(lambda n: min(n / warmup, 1) if warmup else 1.0, rollouts=6)
    assert ((found[2:] > 0.075) & (found[2:] < 0.3)).all(), found
    assert ranges.min() > 1e-5, "ratios of exactly 1 at a learning rate of 0 are not measured"


def test_one_outlier_does_not_open_the_range():
    usual, outlier = (shares(lambda n: 1.0, rollouts=4, outlier=at)[1] for at in (None, (2, 0)))
    np.testing.assert_allclose(outlier, usual, rtol=1e-6)


def test_one_outlier_is_not_the_noise_floor():
    logp, batch = minibatch(np.random.default_rng(0), 0.0)
    logp = logp.at[0].add(np.log(1.03) * batch.mask_BT[0])
    _, metrics = losses.reduce(losses.gspo(logp, batch.old_logp_BT, batch.advantage_B, batch.mask_BT))
    assert metrics["ratio_max"] == pytest.approx(1.03)
    assert clipping.noise_floor(metrics) < 1e-6


def test_the_noise_floor_counts_sequences_by_their_length():
    noise = np.log1p(np.array([3e-5, 2e-5, 1e-5, 1e-3, 1e-3], np.float32))
    assert calibration.noise_floor(noise, np.array([400, 400, 300, 5, 5])) == pytest.approx(3e-5, rel=1e-3)
    assert calibration.noise_floor(noise) == pytest.approx(1e-3, rel=1e-3), "as many short ones as long ones"


def test_noise_warnings_are_for_sequence_ratios():
    (sentence,) = clipping.noise_warnings(LOSS, 0.015)
    assert sentence.startswith("clip_low is 0.01, below the noise floor 0.015")
    assert clipping.noise_warnings(LOSS, 0.001) == ()
    wide = partial(losses.gspo, clip_low=0.2, clip_high=0.2)
    assert clipping.noise_warnings(wide, 0.015) == ()  # such a range is warned of before the run
    assert clipping.noise_warnings(losses.grpo, 0.5) == ()
    assert clipping.noise_warnings(experiment.loss, 1e-6) == ()
