"""The updates of a rollout batch when some of them are not applied: skipped, or without response tokens."""

from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from api import Adapted, Batch, Readings, Scores, Steps, TrainState, run_updates
from api import updates as updating

from gspax.config import Calibration

ZERO_BT = jnp.zeros((1, 2))
BATCH = Batch(tokens_BT=ZERO_BT, segment_BT=ZERO_BT, mask_BT=ZERO_BT, old_logp_BT=ZERO_BT, advantage=ZERO_BT)

OLD = Scores(ZERO_BT, ZERO_BT)
SCORED = dict.fromkeys(range(3), OLD)


def run(skipped=(0, 0, 0), empty=(0, 0, 0), batches=(BATCH,) * 3, scores=SCORED, **options):
    """Three updates from the state after five applied ones; their noise is 0.1, 0.2, 0.3, and 0 for empty ones."""
    seen = []

    def update(state, batch, on_policy):
        n = len(seen)
        seen.append(n)
        done = optax.ScaleByScheduleState(state.opt_state.count + (not (skipped[n] or empty[n])))
        noise = 0.0 if empty[n] else (n + 1) / 10
        metrics = {"skipped": skipped[n], "empty": empty[n], "ratio_deviation": noise}
        return replace(state, step=state.step + 1, opt_state=done), metrics, Scores(ZERO_BT - n, ZERO_BT)

    state = TrainState(
        step=jnp.int32(9),
        position=jnp.int32(0),
        key=None,
        params=None,
        opt_state=optax.ScaleByScheduleState(jnp.int32(5)),
        adapted=Adapted(jnp.float32(1), jnp.float32(1), jnp.float32(0)),
    )
    steps = Steps(None, update, None, None, None, range(3))
    return run_updates(steps, state, batches, scores, epochs=1, rate=float, **options)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, [5, 6, 7, 8, 9, 10]),
        ({"skipped": (0, 1, 0)}, [5, 6, 7, 7, 8, 9]),
        ({"skipped": (1, 0, 0), "empty": (0, 0, 1)}, [5, 6, 7, 6, 7, 8]),
    ],
)
def test_calibration_is_given_the_rates_of_the_schedule(monkeypatch, flags, wanted):
    given = []
    monkeypatch.setattr(updating, "adapt_range", lambda settings, widths, updates, rates: given.append(rates) or widths)
    run(**flags, calibration=Calibration())
    assert given[-1] == wanted, "of these updates and the next three"


@pytest.mark.parametrize(("empty", "floor"), [((0, 0, 0), 0.1), ((1, 0, 0), 0.2), ((1, 1, 0), 0.3)])
def test_the_noise_floor_is_of_the_first_update_with_a_token(empty, floor):
    assert {each["noise_floor"] for each in run(empty=empty).metrics} == {floor}, "nothing was applied before it"
    assert all("noise_floor" not in each for each in run(empty=(1, 1, 1)).metrics)


@pytest.mark.parametrize(("empty", "found"), [(0, {"gradient/cosine": 1.0}), (1, {})])
def test_nothing_is_measured_of_an_update_without_tokens(empty, found):
    def measure(update, *given):
        return *update(*given), Readings({}, {"gradient/cosine": 1.0}, {})

    assert run(empty=(0, 0, empty), measure=measure).readings.gradient == found


@pytest.mark.parametrize(("skipped", "minibatch"), [((0, 0, 0), None), ((1, 1, 0), 1), ((0, 0, 1), 2), ((1, 0, 0), 0)])
def test_the_last_skipped_minibatch_is_returned_with_its_old_logp(skipped, minibatch):
    batches = [replace(BATCH, tokens_BT=ZERO_BT + n, old_logp_BT=ZERO_BT + 10 * n + 5) for n in range(3)]
    batches[0] = replace(batches[0], old_logp_BT=None)
    found = run(skipped, batches=batches, scores={1: OLD, 2: OLD}).skipped_batch
    if minibatch is None:
        assert found is None
        return
    wanted = batches[minibatch] if minibatch else replace(BATCH, old_logp_BT=ZERO_BT)  # its own update computed it
    for name in ("tokens_BT", "old_logp_BT"):
        assert (getattr(found, name) == getattr(wanted, name)).all()
