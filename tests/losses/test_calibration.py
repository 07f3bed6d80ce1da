"""The measured clip range: its widths clip the requested share of the sequences."""

import math

import numpy as np
import pytest
from pair_cases import pair

from gspax import losses
from gspax.losses import calibration


def batch(B=200, T=40, scale=0.01, positive=0.5, seed=0):
    """(logp, old_logp, mask, advantage): ragged rows of which the given share has a positive advantage."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[None] < rng.integers(2, T, (B, 1))
    mask[:, 0] = False
    x = pair(mask, scale, seed)
    size = rng.exponential(1.0, B) + 0.1
    return x.logp, x.other, mask, np.where(rng.random(B) < positive, size, -size).astype(np.float32)


def test_the_next_range():
    step = calibration.next_range
    old, measured = (3e-4, 4e-4), (6e-4, 1e-4)
    assert step(old, measured, clipped=0.19) == old  # within the tolerance
    assert step(old, measured, clipped=0.35) == pytest.approx(((3e-4 * 6e-4) ** 0.5, (4e-4 * 1e-4) ** 0.5))
    assert step(old, measured, clipped=0.35, gain=1.0) == pytest.approx(measured)
    assert step(old, measured, clipped=0.35, gain=0.0) == old
    assert step((0.05, 4e-4), measured, clipped=0.15) == (6e-4, 4e-4), "the widest range has clipped nothing yet"
    assert step(old, (0.0, -1e-3), clipped=0.35) == old, "nothing was measured"
    assert step(old, measured, clipped=0.35, gain=1.0, floor=2e-4) == pytest.approx((6e-4, 4e-4)), "1e-4 is noise"
    assert step(old, measured, clipped=0.15, floor=3.9e-4) == (3.9e-4, 4e-4)
    assert step((0.04, 0.049), (0.09, 9.0), clipped=0.5) == (0.05, 0.05), "the ceiling"


def log_ratios(logp, old_logp, mask):
    """log s of each row, float64 [B]."""
    return np.array([np.mean(row[keep], dtype=np.float64) for row, keep in zip(logp - old_logp, mask, strict=True)])


def widths(log_ratio, advantage, share=0.15):
    """(clip_low, clip_high) as `range_metrics` measures them, for one token a sequence."""
    arrays = log_ratio[:, None].astype(np.float32), np.zeros((len(log_ratio), 1), np.float32)
    mask = np.ones((len(log_ratio), 1), bool)
    clipped = losses.Share(*np.zeros((2, 1), np.float32))
    metrics = calibration.range_metrics(*arrays, advantage.astype(np.float32), mask, clipped=clipped, share=share)
    found = losses.reduce(losses.Terms(*np.zeros((2, 1), np.float32), metrics))[1]
    return tuple(float(found[f"clip_{side}_measured"]) for side in ("low", "high"))


def clipped_share(log_ratio, advantage, clip):
    above = np.expm1(log_ratio)
    return float(np.mean(((advantage > 0) & (above > clip[1])) | ((advantage < 0) & (-above > clip[0]))))


@pytest.mark.parametrize(("start", "found_after"), [(1e-5, 7), (calibration.INERT, 1)])
def test_the_range_converges_to_the_share_and_stays(start, found_after):
    """Ratios whose spread trebles half-way: found from either end, at once from the widest range, then kept."""
    rng = np.random.default_rng(0)
    clip, shares, ranges = (start, start), [], set()
    for step in range(60):
        log_ratio = rng.normal(0, 3e-4 if step < 30 else 9e-4, 400)
        advantage = np.where(rng.random(400) < 0.5, 1.0, -1.0)
        shares.append(clipped_share(log_ratio, advantage, clip))
        ranges.add(clip)
        clip = calibration.next_range(clip, widths(log_ratio, advantage), clipped=shares[-1], share=0.15)
    settled = [*shares[found_after:30], *shares[32:]]
    assert min(settled) > 0.075 and max(settled) < 0.3
    assert np.mean(settled) == pytest.approx(0.15, abs=0.03) and len(ranges) < 15


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
    above = np.expm1(log_ratios(logp, old_logp, mask))
    for name, deviation, live in (("high", above, advantage > 0), ("low", -above, advantage < 0)):
        width = float(found[f"clip_{name}_measured"])
        assert np.sum(deviation[live] > width * (1 + 1e-6)) == math.floor(0.2 * live.sum())
    share = np.sum(clipped.part) / np.sum(advantage != 0)
    assert float(found["clip_fraction_nonzero"]) == pytest.approx(share)


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
    x = np.zeros(3, np.float32)
    following, w = calibration.next_range, (3e-4, 4e-4)
    cases = (
        (
            lambda: following((0.0, 4e-4), w, clipped=0.1),
            ValueError,
            r"^clip_low and clip_high must be above 0.*got 0\.0",
        ),
        (lambda: following(w, w, clipped=1.5), ValueError, r"^clipped must be a share from 0 to 1; got 1\.5"),
        (lambda: following(w, w, clipped=float("nan")), ValueError, r"^clipped must be a share from 0 to 1; got nan"),
        (lambda: following(w, (1.0, float("nan")), clipped=0.1), ValueError, r"^measured must be two finite widths"),
        (lambda: following(w, w, clipped=0.1, gain=-1.0), ValueError, r"^gain must be finite and at least 0; got -1"),
        (
            lambda: following(w, w, clipped=0.1, floor=0.1),
            ValueError,
            r"^floor must not be above ceiling 0\.05; got 0\.1",
        ),
        (lambda: calibration.range_warnings(-1.0, 0.1), ValueError, r"^clip_low must be at least 0.*got -1"),
        (
            lambda: calibration.range_metrics(x, x, x, x > 0, clipped=losses.Share(x, x), share=0.1),
            ValueError,
            r"^logp must be a float32 array \[B, T\]",
        ),
    )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
