"""Alarms and collapses: synthetic metrics by hand, and what a run does about a collapse, whole or resumed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_experiment import experiment

from gspax import config
from gspax.commands import main
from gspax.config import Collapse, Guard
from gspax.errors import CollapsedError, DivergedError
from gspax.run import record
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir
from gspax.training import alarms, loop
from gspax.training.alarms import Watch

EXPERIMENT = str(Path(__file__).parents[1] / "small_experiment.py")
P, M = experiment.sampling.prompts, experiment.schedule.minibatches
SETTINGS = Collapse(steps=3, window=2)
GUARD = Guard(collapse=SETTINGS)
FALL = [0.2, 0.6, 0.8, 0.8, 0.3, 0.3, 0.3, 0.3, 0.3]  # means of two: 0.4, 0.7, 0.8, 0.55, 0.3 ...


def watches(guard, rewards, start=None, first=1, **more):
    start, found = start or Watch(), []
    for step, reward in enumerate(rewards, first):
        start = alarms.follow(guard, start, step, {"reward/mean": reward} | more)
        found.append(start)
    return found


def collapses(guard, found):
    return [step for step, watch in enumerate(found, 1) if alarms.find_collapse(guard.collapse, watch)]


def test_a_reward_below_half_of_its_best_mean_is_an_alarm_and_after_some_steps_a_collapse(capsys):
    found = watches(GUARD, FALL)
    assert [watch.lasting.get("reward", 0) for watch in found] == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert collapses(GUARD, found) == [8], "once, at its beginning"
    assert found[-1].best == 0.8 and [watch.mean(2) for watch in found[:2]] == [None, 0.4]
    assert [alarms.alarm_metrics(GUARD, watch)["alarm/collapse"] for watch in found] == [0] * 7 + [1] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "reward/mean over 2 steps is 0.3, below guard.collapse.reward (0.5) of its best, 0.8" in line


def test_the_sound_step_is_the_last_one_before_the_decline():
    assert [watch.sound for watch in watches(GUARD, FALL)] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    stale = watches(GUARD, FALL, **{"rollout/staleness_max": 2.0})
    assert [watch.sound for watch in stale] == [0, 0, 0, 1, 1, 1, 1, 1, 1], "older parameters drew the samples"
    gradual = watches(GUARD, [1.0, 1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6])
    assert gradual[-1].sound == 3, "the mean of 0.9 and 0.85 is below nine tenths of the best"


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
    assert collapses(guard, found) == [3] and found[-1].sound == 0
    other = replace(guard, collapse=replace(guard.collapse, alarms=("reward",)))
    assert collapses(other, watches(other, [0.5] * 4, **metrics)) == []


def test_alarms_must_last_without_a_gap():
    found, on = Watch(), {"policy/entropy": 0.001}
    guard = Guard(collapse=replace(SETTINGS, alarms=("entropy",)))
    for step, metrics in enumerate([on, on, {"policy/entropy": 1.0}, on, on, on], 1):
        found = alarms.follow(guard, found, step, metrics)
        assert bool(alarms.find_collapse(guard.collapse, found)) == (step == 6)


@pytest.mark.parametrize("stop", range(1, len(FALL)))
def test_a_watch_that_is_stored_and_restored_finds_the_collapse_at_the_same_step(stop):
    first = watches(GUARD, FALL[:stop])
    restored = alarms.from_json(json.loads(json.dumps(alarms.to_json(first[-1]))))
    assert restored == first[-1]
    assert first + watches(GUARD, FALL[stop:], restored, stop + 1) == watches(GUARD, FALL)


def test_without_the_setting_there_are_the_alarms_alone():
    found = watches(Guard(), FALL)
    assert found[-1] == Watch() and alarms.alarm_metrics(Guard(), found[-1]).keys() == {"alarm/entropy", "alarm/length"}
    assert alarms.answer_collapse(None, Watch(lasting={"entropy": 99}), 1, None) == Watch(lasting={"entropy": 99})
    assert alarms.from_json(None) == Watch(), "a checkpoint of an older version"


def test_a_lower_rate_waits_for_the_alarm_to_last_again(capsys):
    settings, watch, lowered = replace(SETTINGS, action="lower_rate", rate_factor=0.25), Watch(), []
    for step, reward in enumerate(FALL + [0.3] * 4, 1):
        watch = alarms.follow(Guard(collapse=settings), watch, step, {"reward/mean": reward})
        watch = alarms.answer_collapse(settings, watch, step, None)
        lowered.append(watch.rate)
    assert lowered == [1] * 7 + [0.25] * 3 + [0.0625] * 3
    assert "got so many. The learning rate is now 0.25 times" in capsys.readouterr().err


QUIET = replace(
    experiment,
    warm_start=None,
    schedule=config.Schedule(steps=12, minibatches=M, eval_every=0, checkpoint_every=2, keep_checkpoints=1),
)


def with_action(action, **changes):
    return replace(QUIET, guard=Guard(collapse=replace(SETTINGS, action=action, **changes)))


@pytest.fixture
def falling(monkeypatch):
    """Steps that only count; those with `low(step, batch)` have low rewards. The (step, batch, rate) of each."""
    seen = []

    def install(low=lambda step, batch: step > 5, stop_after=99):
        def run_step(learner, state, reference, ahead):
            if len(seen) == stop_after:
                raise KeyboardInterrupt
            step, batch = int(state.step) // M + 1, int(state.position) // P
            seen.append((step, batch, learner.experiment.optimizer.learning_rate))
            state = replace(state, step=state.step + M, position=state.position + P)
            return state, {"reward/mean": 0.1 if low(step, batch) else 0.8}, []

        monkeypatch.setattr(loop, "run_step", run_step)
        monkeypatch.setattr(loop, "record_evaluation", lambda *args: None)
        return seen

    return install


def some_batches(step, batch):
    return 5 <= batch <= 8


def checkpoints_of(path):
    with Checkpoints(RunDir(path).checkpoints) as checkpoints:
        return checkpoints.steps()


RATE = QUIET.optimizer.learning_rate


def test_a_collapse_can_be_a_warning(falling, tmp_path, capsys):
    seen = falling(some_batches)
    loop.train(with_action("warn"), tmp_path / "run")
    assert [step for step, *_ in seen] == [*range(1, 13)] and {rate for *_, rate in seen} == {RATE}
    assert capsys.readouterr().err.count("guard.collapse: wanted fewer than 3 steps") == 1
    rows = record.read_metrics(RunDir(tmp_path / "run").metrics)
    assert [row["step"] for row in rows if row["alarm/collapse"]] == [9]


def test_a_collapse_can_stop_the_run_and_spares_the_checkpoint_before_it(falling, tmp_path):
    seen = falling()
    for attempt in (9, 11):  # the second one starts at step 8
        with pytest.raises(CollapsedError, match="3 steps in a row with alarm/reward") as caught:
            loop.train(with_action("stop"), tmp_path / "run")
        assert (caught.value.step, caught.value.exit_code, len(seen)) == (9, 3, attempt - (attempt == 11))
        assert checkpoints_of(tmp_path / "run") == [4, 8], "one is kept, and the newest one that is sound"


@pytest.mark.slow
def test_a_collapse_can_lower_the_rate_and_a_resumed_run_does_the_same(falling, tmp_path):
    seen = falling()
    loop.train(with_action("lower_rate"), tmp_path / "run")
    rates = [rate / RATE for *_, rate in seen]
    assert rates == [1] * 9 + [0.5] * 3
    whole = list(seen)
    for stop in (9, 11):
        seen.clear()
        falling(stop_after=stop)
        with pytest.raises(KeyboardInterrupt):
            loop.train(with_action("lower_rate"), tmp_path / str(stop))
        falling()
        loop.train(with_action("lower_rate"), tmp_path / str(stop))
        assert seen[stop:] == whole[stop // 2 * 2 :], "from the newest checkpoint"


def test_a_collapse_can_go_back_to_the_checkpoint_before_it_with_other_problems(falling, tmp_path, capsys):
    seen = falling(some_batches)
    loop.train(with_action("roll_back"), tmp_path / "run")
    assert seen[:9] == [(step, step - 1, RATE) for step in range(1, 10)]
    assert seen[9:] == [(step, step + 4, RATE / 2) for step in range(5, 13)], "past the problems since checkpoint 4"
    run = RunDir(tmp_path / "run")
    (entry,) = record.read_rows(run.path / "rollbacks.jsonl")
    assert (entry["step"], entry["to"], entry["position"], entry["rate"]) == (9, 4, 9 * P, 0.5)
    assert "Going back to checkpoint 4" in capsys.readouterr().err
    rows = record.read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [*range(1, 13)] and not any(row["alarm/collapse"] for row in rows)

    whole = list(seen)
    for stop, newest in ((9, 9), (12, 11)):  # once it went back; after the first checkpoint since
        seen.clear()
        falling(some_batches, stop)
        with pytest.raises(KeyboardInterrupt):
            loop.train(with_action("roll_back"), tmp_path / str(stop))
        falling(some_batches)
        loop.train(with_action("roll_back"), tmp_path / str(stop))
        assert seen[stop:] == whole[newest:]


def test_without_a_sound_checkpoint_a_run_goes_back_to_its_start_and_not_for_ever(falling, tmp_path):
    seen = falling()
    late = with_action("roll_back")
    late = replace(late, schedule=replace(late.schedule, checkpoint_every=6))
    with pytest.raises(DivergedError, match=r"went back to checkpoint 0 2 times"):
        loop.train(late, tmp_path / "run")
    assert [step for step, *_ in seen] == [*range(1, 10)] * 3
    assert [seen[start][1:] for start in (0, 9, 18)] == [(0, RATE), (9, RATE / 2), (18, RATE / 4)]


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
        "guard.collapse.rate_factor=0.001",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "steps"), [("warn", 0, 14), ("stop", 3, None), ("lower_rate", 0, 14), ("roll_back", 0, 14)]
)
def test_a_real_run_that_collapses(action, code, steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "record_evaluation", lambda *args: None)
    overrides = [*wrong_after(0.3), f"guard.collapse.action={action}"]
    assert main.main(["train", EXPERIMENT, "--workdir", str(tmp_path / "run"), *overrides]) == code
    rows = record.read_metrics(RunDir(tmp_path / "run").metrics)
    rates = [row["optim/learning_rate"] for row in rows]
    lines = [line for line in capsys.readouterr().err.splitlines() if "steps in a row with alarm/reward" in line]
    assert lines and "Traceback" not in lines[0]
    if steps:
        assert rows[-1]["step"] == steps
    assert (min(rates) < 0.3) == (action in ("lower_rate", "roll_back"))
    if action == "roll_back":
        assert not any(row["alarm/collapse"] for row in rows), "what collapsed is no longer part of the run"
        assert rows[-1]["reward/mean"] > 0.5 * rows[0]["reward/mean"]
