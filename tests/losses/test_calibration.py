"""Calibration of the clip range: the loss clips the requested share of sequences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pair_cases import CASES, pair

from gspax import losses
from gspax.losses import calibration

over_cases = pytest.mark.parametrize("case", CASES)


def batch(B=200, T=40, scale=0.01, positive=0.5, seed=0):
    """(logp, old_logp, mask, advantage): ragged rows of which the given share has a positive advantage."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[None] < rng.integers(2, T, (B, 1))
    mask[:, 0] = False
    x = pair(mask, scale, seed)
    size = rng.exponential(1.0, B) + 0.1
    return x.logp, x.other, mask, np.where(rng.random(B) < positive, size, -size).astype(np.float32)


@over_cases
def test_sequence_log_ratio_equals_a_loop(case):
    x = CASES[case]
    wanted = np.zeros(len(x.mask))
    for b, tokens, ratios in x.sequences():
        wanted[b] = math.fsum(ratios) / len(tokens)
    for garbage in (0.0, np.nan, np.inf):
        y = x.fill(garbage)
        got = jax.jit(calibration.sequence_log_ratio)(y.logp, y.other, y.mask)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7 * np.abs(wanted).max(initial=0))


@pytest.mark.parametrize("share", (0.02, 0.15, 0.3))
@pytest.mark.parametrize("positive", (0.5, 0.1))
@pytest.mark.parametrize("scale", (3e-4, 0.01, 0.3))
def test_gspo_clips_the_requested_share(share, positive, scale):
    logp, old_logp, mask, advantage = batch(scale=scale, positive=positive)
    log_ratio = calibration.sequence_log_ratio(logp, old_logp, mask)
    proposed = calibration.propose(log_ratio, advantage, share=share)
    clip = {"clip_low": proposed.clip_low, "clip_high": proposed.clip_high}
    _, metrics = losses.gspo_loss(logp, old_logp, advantage, mask, **clip)
    assert metrics["clip_fraction_sequences"] == pytest.approx(share, abs=1e-6)
    assert proposed.share == pytest.approx(share, abs=1e-9)
    assert calibration.cut_share(log_ratio, advantage, **clip) == proposed.share
    # Both signs have the same share.
    high, low = float(metrics["clip_fraction_high"]), float(metrics["clip_fraction_low"])
    assert high / np.mean(advantage > 0) == pytest.approx(low / np.mean(advantage < 0), abs=0.05)


def loop_cut_share(log_ratio, advantage, clip_low, clip_high):
    cut = 0
    for x, a in zip(log_ratio, advantage, strict=True):
        above = math.expm1(float(x))  # s - 1, also where exp rounds to 1
        cut += (a > 0 and above > clip_high) or (a < 0 and above < -clip_low)
    return cut / len(log_ratio)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, 12, elements=st.floats(-25, 25, width=32)),
    hnp.arrays(np.float32, 12, elements=st.sampled_from([-1.0, 0.0, 0.5])),
    st.floats(0.01, 0.99),
    st.sampled_from([0.0, 1e-3]),
)
def test_any_measurement_gives_a_valid_range(log_ratio, advantage, share, floor):
    if not advantage.any():
        advantage[0] = 1
    got = calibration.propose(log_ratio, advantage, share=share, floor=floor)
    assert floor <= got.clip_low < math.inf and floor <= got.clip_high < math.inf
    assert got.share <= round(share * 12) / 12 + 1e-9
    assert got.share == pytest.approx(loop_cut_share(log_ratio, advantage, got.clip_low, got.clip_high), abs=1e-9)


def test_a_width_is_midway_between_two_deviations_or_one_and_0():
    advantage = np.ones(4, np.float32)
    above = calibration.propose(np.log1p([0.04, 0.02, 0.01, -0.5]), advantage, share=0.5)
    assert above.clip_high == pytest.approx(0.015) and above.share == 0.5
    above = calibration.propose(np.log1p([0.04, -0.02, -0.01, -0.5]), advantage, share=0.25)
    assert above.clip_high == pytest.approx(0.02) and above.share == 0.25


def test_the_noise_floor_ignores_the_sign():
    noise = np.log1p([-1e-4] * 10)
    assert calibration.noise_floor(noise) == pytest.approx(1e-4)


def test_an_unreachable_share_is_reported():
    """Half of all ratios are on the side that is never clipped."""
    logp, old_logp, mask, advantage = batch()
    log_ratio = calibration.sequence_log_ratio(logp, old_logp, mask)
    got = calibration.propose(log_ratio, advantage, share=0.9)
    assert got.clip_low == got.clip_high == 0 and 0.4 < got.share < 0.6


def test_advantages_of_one_sign_give_both_widths():
    logp, old_logp, mask, advantage = batch()
    log_ratio = calibration.sequence_log_ratio(logp, old_logp, mask)
    got = calibration.propose(log_ratio, np.abs(advantage), share=0.15)
    assert got.clip_low == got.clip_high > 0 and got.share == 0.15
    with pytest.raises(ValueError, match="advantage must have an entry that is not 0"):
        calibration.propose(log_ratio, 0 * advantage)


def test_widths_stay_above_the_bfloat16_noise_floor():
    """Rounding alone moves s. The share reports what remains."""
    logp, _, mask, advantage = batch()
    rounded = np.asarray(jnp.asarray(logp).astype(jnp.bfloat16).astype(jnp.float32))
    noise = calibration.sequence_log_ratio(rounded, logp, mask)
    floor = calibration.noise_floor(noise)
    deviation = np.sort(np.abs(np.expm1(np.asarray(noise, np.float64))))
    assert floor == pytest.approx(deviation[179], rel=1e-6) and floor > 1e-4
    log_ratio = noise + calibration.sequence_log_ratio(
        logp, logp + np.float32(1e-6) * mask, mask
    )  # an update smaller than that
    got = calibration.propose(log_ratio, advantage, share=0.15, floor=floor)
    assert got.clip_low == got.clip_high == got.noise_floor == floor and got.share < 0.1
    assert calibration.noise_floor(jnp.zeros(4)) == 0


def test_equal_policies_have_no_noise_floor():
    logp, _, mask, _ = batch()
    assert calibration.noise_floor(calibration.sequence_log_ratio(logp, logp, mask)) == 0


def share_of(log_ratio, advantage, clip):
    return calibration.cut_share(log_ratio, advantage, clip_low=clip[0], clip_high=clip[1])


@pytest.mark.parametrize(("start", "found_after"), [(1e-5, 7), (calibration.INERT, 1)])
def test_the_range_converges_to_the_share_and_stays(start, found_after):
    """Ratios whose spread trebles half-way: found from either end, at once from the widest range, then kept."""
    rng = np.random.default_rng(0)
    clip, shares, ranges = (start, start), [], set()
    for step in range(60):
        log_ratio = rng.normal(0, 3e-4 if step < 30 else 9e-4, 400)
        advantage = np.where(rng.random(400) < 0.5, 1.0, -1.0)
        shares.append(share_of(log_ratio, advantage, clip))
        ranges.add(clip)
        found = calibration.propose(log_ratio, advantage, share=0.15)
        clip = calibration.next_range(clip, (found.clip_low, found.clip_high), cut=shares[-1], share=0.15)
    settled = [*shares[found_after:30], *shares[32:]]
    assert min(settled) > 0.075 and max(settled) < 0.3
    assert np.mean(settled) == pytest.approx(0.15, abs=0.03) and len(ranges) < 15


def test_the_next_range():
    step = calibration.next_range
    old, measured = (3e-4, 4e-4), (6e-4, 1e-4)
    assert step(old, measured, cut=0.19) == old  # within the tolerance
    assert step(old, measured, cut=0.35) == pytest.approx(((3e-4 * 6e-4) ** 0.5, (4e-4 * 1e-4) ** 0.5))
    assert step(old, measured, cut=0.35, gain=1.0) == pytest.approx(measured)
    assert step(old, measured, cut=0.35, gain=0.0) == old
    assert step((0.05, 4e-4), measured, cut=0.15) == (6e-4, 4e-4), "the widest range has clipped nothing yet"
    assert step(old, (0.0, -1e-3), cut=0.35) == old, "nothing was measured"
    assert step(old, measured, cut=0.35, gain=1.0, floor=2e-4) == pytest.approx((6e-4, 4e-4)), "1e-4 is noise"
    assert step(old, measured, cut=0.15, floor=3.9e-4) == (3.9e-4, 4e-4)
    assert step((0.04, 0.049), (0.09, 9.0), cut=0.5) == (0.05, 0.05), "the ceiling"


PACKED = np.array([[0, 1, 2, 2, 1, 1], [0, 3, 3, 3, 1, 0]], np.int32)


def test_range_metrics_give_the_widths_that_clip_the_share():
    logp, old_logp, mask, advantage = batch()
    advantage[:40] = 0
    clipped = losses.gspo(logp, old_logp, advantage, mask).metrics["clip_fraction_sequences"]
    terms = losses.Terms(
        *np.zeros((2, 1), np.float32),
        calibration.range_metrics(logp, old_logp, advantage, mask, clipped=clipped, share=0.2),
    )
    _, found = losses.reduce(terms)
    above = np.expm1(np.asarray(calibration.sequence_log_ratio(logp, old_logp, mask), np.float64))
    for name, deviation, live in (("high", above, advantage > 0), ("low", -above, advantage < 0)):
        width = float(found[f"clip_{name}_measured"])
        assert np.sum(deviation[live] > width * (1 + 1e-6)) == math.floor(0.2 * live.sum())
    share = np.sum(clipped.part) / np.sum(advantage != 0)
    assert float(found["clip_fraction_live"]) == pytest.approx(share)


def test_range_metrics_of_packed_rows_equal_one_row_per_sequence():
    rng = np.random.default_rng(0)
    logp, old_logp = (rng.standard_normal(PACKED.shape).astype(np.float32) for _ in range(2))
    of_sequence = {(0, 1): 0.5, (0, 2): -1.0, (1, 3): 2.0, (1, 1): 0.0}
    advantage, rows = np.zeros(PACKED.shape, np.float32), []
    for (b, s), a in of_sequence.items():
        advantage[b, PACKED[b] == s] = a
        rows.append(np.where(PACKED[b] == s, b, -1))
    row = np.array([b for b, _ in of_sequence])
    unpacked = (logp[row], old_logp[row], np.array([*of_sequence.values()], np.float32), np.array(rows) >= 0)
    packed = (logp, old_logp, advantage, PACKED > 0)

    def found(*arrays, **segments):
        clipped = losses.gspo(*arrays, **segments).metrics["clip_fraction_sequences"]
        metrics = calibration.range_metrics(*arrays, clipped=clipped, share=0.2, **segments)
        return losses.reduce(losses.Terms(*np.zeros((2, 1), np.float32), metrics))[1]

    wanted, got = found(*unpacked), found(*packed, segment_ids=PACKED)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, err_msg=name)


def test_warnings():
    assert calibration.range_warnings(3e-4, 4e-4) == ()
    assert calibration.range_warnings(3e-4, 4e-4, floor=1e-5) == ()
    for low, high in ((0.05, 4e-4), (3e-4, 0.2)):
        (sentence,) = calibration.range_warnings(low, high)
        assert "hardly ever 0.05 away from 1" in sentence
    assert [s.split()[0] for s in calibration.range_warnings(0.2, 0.27)] == ["clip_low", "clip_high"]
    (sentence,) = calibration.range_warnings(3e-4, 4e-4, floor=3.5e-4)
    assert sentence.startswith("clip_low is 0.0003, below the noise floor 0.00035")
    assert calibration.range_warnings(0.049, 0.049) == ()


def test_invalid_arguments_are_rejected():
    x, a = np.zeros(3, np.float32), np.ones(3, np.float32)
    nan = np.array([0, np.nan, np.inf], np.float32)
    propose, following, w = calibration.propose, calibration.next_range, (3e-4, 4e-4)
    cases = (
        (lambda: propose([0.0], a), TypeError, r"^log_ratio must be an array \[B\]; got list"),
        (lambda: propose(x, a.astype(int)), TypeError, r"^advantage must hold floats; got int64 \[3\]"),
        (lambda: propose(x, a[:2]), ValueError, r"^advantage must have shape \[3\], as log_ratio has; got \[2\]"),
        (lambda: propose(x[None], a), ValueError, r"^log_ratio must be \[B\] with at least one.*got float32 \[1, 3\]"),
        (lambda: propose(x[:0], a[:0]), ValueError, r"^log_ratio must be \[B\] with at least one.*got float32 \[0\]"),
        (lambda: propose(nan, a), ValueError, r"^log_ratio must be finite; got 2 entries that are not"),
        (lambda: propose(x, a, share=0.0), ValueError, r"^share must be above 0 and below 1; got 0"),
        (lambda: propose(x, a, share="0.1"), TypeError, r"^share must be a Python number.*got str"),
        (lambda: propose(x, a, floor=-1.0), ValueError, r"^floor must be finite and at least 0; got -1"),
        (lambda: calibration.noise_floor(x, above=1.0), ValueError, r"^above must be above 0 and below 1; got 1"),
        (lambda: calibration.noise_floor(x, a[:2]), ValueError, r"^length must have shape \[3\].*got \[2\]"),
        (lambda: following((0.0, 4e-4), w, cut=0.1), ValueError, r"^clip_low and clip_high must be above 0.*got 0\.0"),
        (lambda: following(w, w, cut=1.5), ValueError, r"^cut must be a share from 0 to 1; got 1\.5"),
        (lambda: following(w, w, cut=float("nan")), ValueError, r"^cut must be a share from 0 to 1; got nan"),
        (lambda: following(w, (1.0, float("nan")), cut=0.1), ValueError, r"^measured must be two finite widths"),
        (lambda: following(w, w, cut=0.1, gain=-1.0), ValueError, r"^gain must be finite and at least 0; got -1"),
        (lambda: following(w, w, cut=0.1, floor=0.1), ValueError, r"^floor must not be above ceiling 0\.05; got 0\.1"),
        (lambda: calibration.range_warnings(-1.0, 0.1), ValueError, r"^clip_low must be at least 0.*got -1"),
        (lambda: calibration.sequence_log_ratio(x, x, x > 0), ValueError, r"^logp must be a float32 array \[B, T\]"),
    )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
