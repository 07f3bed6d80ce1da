"""Alarms and collapses: synthetic metrics by hand, and what a run does about a collapse, whole or resumed."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from api import Checkpoints, RunDir, Samples, StepResult, loop, main, record
from small_experiment import experiment

from gspax import config
from gspax.config import Collapse, Guard
from gspax.errors import DivergedError
from gspax.training import run_guard as guards
from gspax.training.run_guard import Watch

pytestmark = pytest.mark.usefixtures("one_device", "unevaluated")

EXPERIMENT = str(Path(__file__).parents[1] / "small_experiment.py")
P, M = experiment.sampling.prompts, experiment.schedule.minibatches
SETTINGS = Collapse(steps=3, window=2)
GUARD = Guard(collapse=SETTINGS)
FALL = [0.2, 0.6, 0.8, 0.8, 0.3, 0.3, 0.3, 0.3, 0.3]  # means of two: 0.4, 0.7, 0.8, 0.55, 0.3 ...


def watches(guard, rewards, start=None, **more):
    start, found = start or Watch(), []
    for reward in rewards:
        start = guards.follow(guard, start, {"reward/mean": reward} | more)
        found.append(start)
    return found


def collapses(guard, found):
    return [step for step, watch in enumerate(found, 1) if guards.find_collapse(guard.collapse, watch)]


def test_a_reward_below_half_of_its_best_mean_is_an_alarm_and_after_some_steps_a_collapse(capsys):
    found = watches(GUARD, FALL)
    assert [watch.lasting.get("reward", 0) for watch in found] == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert collapses(GUARD, found) == [8], "once, at its beginning"
    assert found[-1].best == 0.8 and [watch.mean(2) for watch in found[:2]] == [None, 0.4]
    assert [guards.alarm_metrics(GUARD, watch)["alarm/collapse"] for watch in found] == [0] * 7 + [1] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "reward/mean over 2 steps is 0.3, below guard.collapse.reward (0.5) of its best, 0.8" in line


@pytest.mark.parametrize("rewards", [[0.2, 0.6, 0.8, 0.1, 0.8, 0.1, 0.8, 0.1], [-0.2, -0.1, -0.1, -0.9, -0.9, -0.9]])
def test_a_dip_or_a_negative_reward_is_no_collapse(rewards):
    assert collapses(GUARD, watches(GUARD, rewards)) == []


@pytest.mark.parametrize(
    ("alarm", "metrics"),
    [
        ("entropy", {"policy/entropy": 0.001}),
        ("length", {"response/truncated": 0.95}),
        ("gradient", {"optim/grad_norm": 6.0}),
        ("gradient", {"optim/grad_norm": np.nan}),
    ],
)
def test_the_alarms_that_count_can_be_chosen(alarm, metrics):
    guard = Guard(collapse=replace(SETTINGS, alarms=(alarm,), grad_norm=5.0))
    found = watches(guard, [0.5] * 4, **metrics)
    assert collapses(guard, found) == [3]
    other = replace(guard, collapse=replace(guard.collapse, alarms=("reward",)))
    assert collapses(other, watches(other, [0.5] * 4, **metrics)) == []


def test_alarms_must_last_without_a_gap():
    found, on = Watch(), {"policy/entropy": 0.001}
    guard = Guard(collapse=replace(SETTINGS, alarms=("entropy",)))
    for step, metrics in enumerate([on, on, {"policy/entropy": 1.0}, on, on, on], 1):
        found = guards.follow(guard, found, metrics)
        assert bool(guards.find_collapse(guard.collapse, found)) == (step == 6)


@pytest.mark.parametrize("stop", range(1, len(FALL)))
def test_a_watch_that_is_stored_and_restored_finds_the_collapse_at_the_same_step(stop):
    first = watches(GUARD, FALL[:stop])
    restored = Watch(**json.loads(json.dumps(asdict(first[-1]))))
    assert restored == first[-1]
    assert first + watches(GUARD, FALL[stop:], restored) == watches(GUARD, FALL)


def test_without_the_setting_there_are_the_alarms_alone():
    found = watches(Guard(), FALL)
    assert found[-1] == Watch() and guards.alarm_metrics(Guard(), found[-1]).keys() == {"alarm/entropy", "alarm/length"}
    guard = guards.RunGuard(QUIET, None, None, Watch(lasting={"entropy": 99}))
    assert guard.after_step(1, StepResult(None, {}, Samples([], np.zeros(0))))[1] is None


def of_updates(skipped, advantage):
    updates = [{"skipped": float(flag), "loss": 0.0, "grad_norm": 0.0} for flag in skipped]
    state, samples = SimpleNamespace(position=np.int32(0)), Samples([None] * len(advantage), np.array(advantage))
    return StepResult(state, {}, samples, updates)


@pytest.mark.parametrize(
    ("steps", "advantage", "said"),
    [
        (2, [np.nan] * 2, "wanted an update that is applied, got 4 skipped ones and no other by step 2, the last one"),
        (2, [np.nan] * 2, "advantage: wanted finite numbers, got others for 2 of the 2 completions of step 2"),
        (2, [1.0, -1.0], "their loss or gradient is not finite, or beyond the guard's limits"),
        (9, [np.nan, 1.0], "wanted fewer than 5 skipped updates in a row, got 6 by step 3: advantage: wanted finite"),
    ],
)
def test_a_run_without_an_applied_update_has_diverged_however_short_it_is(steps, advantage, said):
    schedule = config.Schedule(steps=steps, minibatches=2, max_skipped=5)
    guard = guards.RunGuard(replace(QUIET, schedule=schedule), None, None)
    *before, last = [guard.after_step(n, of_updates([True] * 2, advantage))[1] for n in range(1, min(steps, 3) + 1)]
    assert before == [None] * len(before) and said in str(last)


def test_a_short_run_with_an_applied_update_ends_well():
    guard = guards.RunGuard(replace(QUIET, schedule=config.Schedule(steps=2, minibatches=1, max_skipped=5)), None, None)
    assert [guard.after_step(n, of_updates([n == 2], [1.0]))[1] for n in (1, 2)] == [None, None]


QUIET = replace(
    experiment,
    warm_start=None,
    schedule=config.Schedule(steps=12, minibatches=M, eval_every=0, checkpoint_every=2, keep_checkpoints=1),
)


def with_action(action):
    return replace(QUIET, guard=Guard(collapse=replace(SETTINGS, action=action)))


@pytest.fixture
def falling(monkeypatch):
    """Steps that only count; those with `low(step, batch)` have low rewards. The (step, batch) of each."""
    seen = []

    def install(low=lambda step, batch: step > 5):
        def run_step(runtime, state, in_flight, teacher=None):
            step, batch = int(state.step) // M + 1, int(state.position) // P
            seen.append((step, batch))
            state = replace(state, step=state.step + M, position=state.position + P)
            return StepResult(state, {"reward/mean": 0.1 if low(step, batch) else 0.8}, Samples([], np.zeros(0)))

        monkeypatch.setattr(loop, "run_step", run_step)
        return seen

    return install


def some_batches(step, batch):
    return 5 <= batch <= 8


def checkpoints_of(path):
    with Checkpoints(RunDir(path).checkpoints) as checkpoints:
        return checkpoints.steps()


def test_a_collapse_can_be_a_warning(falling, tmp_path, capsys):
    seen = falling(some_batches)
    loop.train(with_action("warn"), tmp_path / "run")
    assert [step for step, _ in seen] == [*range(1, 13)]
    assert capsys.readouterr().err.count("guard.collapse: wanted fewer than 3 steps") == 1
    rows = record.read_metrics(RunDir(tmp_path / "run").metrics)
    assert [row["step"] for row in rows if row["alarm/collapse"]] == [9]


def test_run_stops_at_a_collapse_and_again_after_a_resume(falling, tmp_path):
    seen = falling()
    for attempt in (9, 11):  # the second one starts at step 8
        with pytest.raises(DivergedError, match="3 steps in a row with alarm/reward") as caught:
            loop.train(with_action("stop"), tmp_path / "run")
        assert (caught.value.step, caught.value.exit_code, len(seen)) == (9, 3, attempt - (attempt == 11))
        assert checkpoints_of(tmp_path / "run") == [8], "it does not go back, and saves nothing more"


def wrong_after(learning_rate):
    """Command-line settings of a real run whose learning rate destroys the policy that the warm start made."""
    return [
        f"optimizer.learning_rate={learning_rate}",
        "optimizer.max_grad_norm=0",
        "warm_start.steps=30",
        "schedule.steps=14",
        "schedule.eval_every=0",
        "schedule.checkpoint_every=1",
        "guard.collapse=gspax.config.Collapse",
        "guard.collapse.steps=2",
        "guard.collapse.window=2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "code"), [("warn", 0), ("stop", 3)])
def test_a_real_run_that_collapses(action, code, tmp_path, monkeypatch, capsys):
    overrides = [*wrong_after(0.3), f"guard.collapse.action={action}"]
    assert main.main(["train", EXPERIMENT, "--workdir", str(tmp_path / "run"), *overrides]) == code
    rows = record.read_metrics(RunDir(tmp_path / "run").metrics)
    lines = [line for line in capsys.readouterr().err.splitlines() if "steps in a row with alarm/reward" in line]
    assert lines and "Traceback" not in lines[0]
    assert (rows[-1]["step"] == 14) == (action == "warn")
