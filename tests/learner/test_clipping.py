"""The clip range of a run, from the metrics of its updates."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from api import (
    Adapted,
    Batch,
    RunDir,
    adapt_range,
    first_adapted,
    loop,
    noise_floor,
    noise_warnings,
    objective,
    read_metrics,
)
from small_experiment import experiment, objective_with

from gspax import losses
from gspax.config import Calibration, Regularizers
from gspax.experiment import load, override

SETTINGS = Calibration(share=0.25, tolerance=0.05, gain=1.0)
LOSS = partial(losses.gspo, clip_low=0.01, clip_high=0.02)
START = (0.01, 0.02)
STEADY = (1.0,) * 6  # learning rates of three updates, and of the next three


def update(noise=0.0, low=0.0, high=0.0, live=0.0, skipped=0.0, empty=0.0):
    """The metrics of an update, as numbers."""
    return {
        "ratio_deviation": noise,
        "clip_low_measured": low,
        "clip_high_measured": high,
        "clip_fraction_nonzero": live,
        "skipped": skipped,
        "empty": empty,
    }


def adapt(updates, clip_range=START, rates=STEADY):
    return adapt_range(SETTINGS, clip_range, updates, rates)


def test_nothing_is_clipped_at_the_start():
    np.testing.assert_array_equal(first_adapted(SETTINGS, Regularizers()), [1, 1, 0])
    np.testing.assert_array_equal(first_adapted(None, Regularizers()), [0, 0, 0])


def test_the_noise_floor_is_the_deviation_of_the_first_update():
    assert noise_floor(update(noise=1e-4)) == 1e-4
    assert noise_floor(update(noise=0.0)) == 2.0**-23, "the resolution of float32 next to 1"


def test_a_measurement_is_scaled_to_the_middle_of_a_rollout_batch():
    """Ratios spread in proportion to the learning rates so far: 1 before the second update, 2 before the third."""
    typical = 2**0.5
    assert adapt([update()]) == START, "every ratio of a first update is 1"
    second = [update(), update(0, 0.001, 0.002, 0.5)]
    assert adapt(second) == pytest.approx((typical * 0.001, typical * 0.002))
    third = [*second, update(0, 0.003, 0.006, 0.5)]
    assert adapt(third) == pytest.approx((typical / 2 * 0.003, typical / 2 * 0.006))
    half = replace(SETTINGS, gain=0.5)
    widths = adapt_range(half, START, third, STEADY)
    assert widths == pytest.approx(((0.01 * typical / 2 * 0.003) ** 0.5, (0.02 * typical / 2 * 0.006) ** 0.5))


def test_the_first_measurement_replaces_the_widest_range():
    measured = [update(), update(0, 0.001, 0.0, 0.25)]
    low, high = adapt_range(replace(SETTINGS, gain=0.1), (1.0, 1.0), measured, STEADY)
    assert low == pytest.approx(2**0.5 * 0.001) and high == 1, "above, nothing was measured yet"


def test_the_range_stays_while_the_share_is_within_the_tolerance():
    assert adapt([update(), update(0, 0.001, 0.002, 0.22), update(0, 0.001, 0.002, 0.28)]) == START


def test_a_learning_rate_of_0_measures_nothing():
    """With a warm-up that of the run's first update is 0: the second minibatch still has ratios of 1."""
    rates = (0, 1, 2, 3, 4, 5)
    assert adapt([update(), update(0, 1e-7, 1e-7, 1.0)], rates=rates) == START
    found = adapt([update(), update(), update(0, 0.001, 0.002, 0.5)], rates=rates)
    growth = (3 * 7) ** 0.5  # 1 was moved before the third update; 3 and 7 will be in the next rollout batch
    assert found == pytest.approx((growth * 0.001, growth * 0.002))
    assert adapt([update()] * 3, rates=(0,) * 6) == START


def test_an_update_that_is_not_applied_leaves_the_range():
    assert adapt([update(), update(empty=1.0), update(0, 0.001, 0.002, 0.5)]) == START, "moved by one update, not two"
    assert adapt([update(skipped=1.0), update(0, 0.001, 0.002, 0.5)]) == START, "the ratios did not move"
    assert adapt([update(), update(0, np.nan, np.nan, np.nan, skipped=1.0)]) == START


def test_the_range_grows_with_the_learning_rate():
    still = [update(), update(), update(0, 0.0, 0.0, 0.25)]
    assert adapt(still, rates=(2, 2, 2, 1, 1, 1)) == pytest.approx((0.005, 0.01))
    assert adapt(still, rates=(1, 1, 1, 90, 90, 90)) == pytest.approx((0.9, 1.0)), "no further than a lower bound of 0"
    assert adapt(still, clip_range=(1.0, 1.0), rates=(2, 2, 2, 1, 1, 1)) == (1, 1), "not measured yet"


def test_a_side_without_sequences_stays():
    assert adapt([update(), update(0, 0.0, 0.002, 0.5)]) == pytest.approx((0.01, 2**0.5 * 0.002))


def test_the_range_is_held_between_the_noise_and_a_lower_bound_of_0():
    assert adapt([update(noise=0.015), update(0, 0.016, 3.0, 0.5)]) == pytest.approx((2**0.5 * 0.016, 1.0))
    assert adapt([update(noise=0.015), update(0, 0.014, 0.014, 0.5)]) == pytest.approx((0.015, 0.02))


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
        advantage=jnp.asarray(advantage, jnp.float32),
    )
    return jnp.asarray(np.where(mask, old + s, 0), jnp.float32), batch


def shares(rate, rollouts, minibatches=4, outlier=None, seed=0, unsteady=0.0):
    """The clipped share of the live sequences after each rollout batch's first update, and the ranges.

    Ratios spread by the sum of the learning rates of the rollout batch's updates so far; with `unsteady` also by a
    factor that is drawn for each rollout batch, and by more in the first ones, as Adam's first updates are larger.
    """
    rng = np.random.default_rng(seed)
    minimized = objective_with(losses.gspo, calibration=Calibration())
    clip_range, found, ranges = (1.0, 1.0), [], []
    for rollout in range(rollouts):
        updates, first = [], rollout * minibatches
        rates = [rate(first + n) for n in range(2 * minibatches)]
        factor = np.exp(unsteady * rng.standard_normal()) * (1 + 2 * unsteady * 0.5**rollout)
        for k in range(minibatches):
            logp, batch = minibatch(rng, 3e-3 * factor * sum(rates[:k]))
            if outlier == (rollout, k):
                logp = logp.at[0].add(np.log(1.03) * batch.mask_BT[0])
            outputs = objective.Outputs(logp, logp, None)
            constants = objective.UpdateConstants(Adapted(*jnp.array([*clip_range, 0.0])), None)
            _, metrics = losses.reduce(minimized(outputs, batch, constants))
            updates.append({name: float(value) for name, value in metrics.items()} | {"skipped": 0.0, "empty": 0.0})
            ranges.append(clip_range)
            clip_range = adapt_range(Calibration(), clip_range, updates, rates)
        found.append(np.mean([each["clip_fraction_nonzero"] for each in updates[1:]]))
    return np.array(found), np.array(ranges)


@pytest.mark.parametrize("warmup", (0, 10, 40))
def test_within_ten_updates_the_share_is_within_a_factor_of_2_with_and_without_a_warm_up(warmup):
    for seed in range(3):
        found, _ = shares(lambda n: min(n / warmup, 1) if warmup else 1.0, rollouts=7, seed=seed, unsteady=0.3)
        assert ((found[2:] > 0.075) & (found[2:] < 0.3)).all(), (seed, found)


def test_one_outlier_does_not_open_the_range():
    usual, outlier = (shares(lambda n: 1.0, rollouts=4, outlier=at)[1] for at in (None, (2, 0)))
    np.testing.assert_allclose(outlier, usual, rtol=1e-6)


def test_one_outlier_is_not_the_noise_floor():
    logp, batch = minibatch(np.random.default_rng(0), 0.0)
    logp = logp.at[0].add(np.log(1.03) * batch.mask_BT[0])
    _, metrics = losses.reduce(losses.gspo(logp, batch.old_logp_BT, batch.advantage, batch.mask_BT))
    assert metrics["ratio_max"] == pytest.approx(1.03)
    assert noise_floor(metrics) < 1e-6


@pytest.mark.parametrize(
    ("deviation", "length"),
    [
        ([1e-6] + [1e-3] * 19, [1000] + [50] * 19),  # a long response gives no license to the short ones
        ([1e-3, 1e-6], [1000, 1000]),  # nor does the largest deviation, if it is that of half of the tokens
        ([0.03] + [1e-3] * 5, [5] + [40] * 5),  # a short outlier decides nothing
    ],
)
def test_nine_tenths_of_the_tokens_stay_within_the_noise_floor(deviation, length):
    mask = np.arange(1, 1001)[None] <= np.array(length)[:, None]
    logp = mask * np.log1p(np.array(deviation))[:, None]
    ones = np.ones(len(length), np.float32)
    _, metrics = losses.reduce(losses.gspo(jnp.float32(logp), jnp.zeros(mask.shape), jnp.array(ones), jnp.array(mask)))
    floor = noise_floor(metrics)
    beyond = sum(n for each, n in zip(deviation, length, strict=True) if each > floor * (1 + 1e-3))
    assert beyond <= 0.1 * sum(length), f"{beyond / sum(length):.0%} of the tokens lie beyond {floor:.1e}"
    assert floor == pytest.approx(1e-3, rel=1e-3)


def test_noise_warnings_are_for_sequence_ratios():
    (sentence,) = noise_warnings(LOSS, 0.015)
    assert sentence.startswith("clip_low is 0.01, below the noise floor 0.015")
    assert noise_warnings(LOSS, 0.001) == ()
    wide = partial(losses.gspo, clip_low=0.2, clip_high=0.2)
    assert noise_warnings(wide, 0.015) == ()  # such a range is warned of before the run
    assert noise_warnings(losses.grpo, 0.5) == ()
    assert noise_warnings(experiment.loss, 1e-6) == ()


@pytest.mark.slow
@pytest.mark.parametrize("warmup", (0, 10))
def test_the_default_experiment_clips_the_wanted_share_from_its_third_rollout_batch_on(warmup, tmp_path):
    sort_gspo = load(Path(__file__).parents[2] / "experiments" / "sort_gspo.py")
    overrides = [
        *("calibration=gspax.config.Calibration", f"optimizer.warmup_updates={warmup}", "seed=1", "schedule.steps=9"),
        *("schedule.eval_every=0", "schedule.checkpoint_every=0", "evaluation.problems=8"),
    ]
    loop.train(override(sort_gspo, overrides), tmp_path / "run")
    steps = [row for row in read_metrics(RunDir(tmp_path / "run").metrics) if "policy/loss" in row]
    # a mean over four updates, the first of which clips nothing
    share = np.array([row["policy/clip_fraction_nonzero"] for row in steps]) * 4 / 3
    assert ((share[2:] > 0.075) & (share[2:] < 0.3)).all(), share
