"""Updates that go wrong: a run goes back and on with other problems, then stops; its dump is replayed."""

import signal
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import (
    Adapted,
    Batch,
    Checkpoints,
    RunDir,
    Samples,
    StepResult,
    TrainState,
    abstract_state,
    finished_steps,
    interrupt,
    is_healthy,
    loop,
    main,
    make_runtime,
    record,
)
from small_experiment import experiment

from gspax import config
from gspax.config import Guard
from gspax.errors import DivergedError, UserError
from gspax.training import run_guard as guards
from gspax.training.run_guard import Watch, check_finite, count_skipped, is_sound

pytestmark = pytest.mark.usefixtures("one_device", "unevaluated")

EXPERIMENT = str(Path(__file__).parents[1] / "small_experiment.py")
P, M = experiment.sampling.prompts, experiment.schedule.minibatches
QUIET = replace(
    experiment,
    warm_start=None,
    schedule=config.Schedule(steps=5, minibatches=M, eval_every=0, checkpoint_every=2, max_skipped=2 * M),
)


def outcome(skipped, finite=True):
    """The metrics of an update."""
    return {"skipped": skipped, "empty": False, "loss": 1.0 if finite else np.nan, "grad_norm": 1.0}


@pytest.fixture
def counting(monkeypatch):
    """Steps that only count, the (step, position) of each: a problem number in `bad` skips the step's updates.

    A dict names the updates that are skipped.
    """
    seen = []

    def install(bad, stop_after=99):
        which = bad if isinstance(bad, dict) else dict.fromkeys(bad, range(M))

        def run_step(runtime, state, in_flight, teacher=None):
            if len(seen) == stop_after:
                raise KeyboardInterrupt
            position = int(state.position)
            seen.append((int(state.step) // M, position // P))
            these = [which[index] for index in range(position, position + P) if index in which]
            skipped = [any(update in each for each in these) for update in range(M)]
            state = replace(state, step=state.step + M, position=state.position + P)
            metrics = {"optim/skipped": sum(skipped), "policy/loss": 0.0}
            return StepResult(state, metrics, Samples([], np.zeros(0)), [outcome(is_skipped) for is_skipped in skipped])

        monkeypatch.setattr(loop, "run_step", run_step)
        return seen

    return install


def position_of(run):
    runtime = make_runtime(QUIET)
    with Checkpoints(run.checkpoints) as checkpoints:
        state, _ = checkpoints.restore(abstract_state(runtime.policy))
    return int(state.step) // M, int(state.position) // P


def test_after_skipped_updates_a_run_goes_back_and_on_with_other_problems(counting, tmp_path, capsys):
    seen = counting(bad={2 * P, 3 * P + 1})
    loop.train(QUIET, tmp_path / "run")
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (2, 4), (3, 5), (4, 6)], "back to checkpoint 2, past four batches"
    run = RunDir(tmp_path / "run")
    assert position_of(run) == (5, 7)
    rows = [row for row in record.read_metrics(run.metrics) if "policy/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and not any(row["optim/skipped"] for row in rows)
    (entry,) = record.read_rows(run.path / "rollbacks.jsonl")
    assert (entry["step"], entry["to"], entry["position"]) == (4, 2, 4 * P)
    assert f"Going back to checkpoint 2 and on with problem {4 * P} (1 of 2 times)" in capsys.readouterr().err


def test_a_signal_saves_no_state_that_a_run_should_not_go_back_to(counting, tmp_path, monkeypatch):
    """It ends the run after step 3, in which no update was applied."""
    seen, listen = counting(bad={2 * P, 3 * P + 1}), interrupt.stop_point

    def stop_point():
        if len(seen) == 3:
            interrupt._listener.receive(signal.SIGTERM)
        listen()

    monkeypatch.setattr(loop.interrupt, "stop_point", stop_point)
    with pytest.raises(interrupt.Interrupted):
        loop.train(QUIET, tmp_path / "run")
    assert finished_steps(RunDir(tmp_path / "run").checkpoints) == [2]
    monkeypatch.setattr(loop.interrupt, "stop_point", listen)
    loop.train(QUIET, tmp_path / "run")
    assert seen[3:] == [(2, 2), (3, 3), (2, 4), (3, 5), (4, 6)]


@pytest.mark.parametrize("after", (4, 5))
def test_a_run_that_is_killed_after_it_went_back_resumes_with_the_same_problems(counting, tmp_path, after):
    bad = {2 * P, 3 * P}
    seen = counting(bad, stop_after=after)
    with pytest.raises(KeyboardInterrupt):
        loop.train(QUIET, tmp_path / "run")
    counting(bad)
    loop.train(QUIET, tmp_path / "run")
    assert seen[after:] == [(2, 4), (3, 5), (4, 6)]
    assert position_of(RunDir(tmp_path / "run")) == (5, 7)


def test_a_run_goes_back_to_one_checkpoint_a_few_times_then_stops(counting, tmp_path):
    seen = counting(bad=range(10**6))
    with pytest.raises(DivergedError, match=r"fewer than 4 .* got 4 by step 2: .* went back to checkpoint 0 2 times"):
        loop.train(QUIET, tmp_path / "run")
    assert [position for _, position in seen] == [0, 1, 2, 3, 4, 5], "no checkpoint is made amid skipped updates"
    seen.clear()
    with pytest.raises(DivergedError):
        loop.train(QUIET, tmp_path / "run")
    assert seen == [(0, 4), (1, 5)], "started again, it tries once more, where it stopped"


def test_parameters_that_are_not_finite_are_not_saved_and_named(monkeypatch, tmp_path):
    def run_step(runtime, state, in_flight, teacher=None):
        params = jax.tree.map(lambda leaf: leaf if state.step < M else leaf.at[0].set(jnp.inf), state.params)
        return StepResult(replace(state, step=state.step + M, params=params), {}, Samples([], np.zeros(0)))

    monkeypatch.setattr(loop, "run_step", run_step)
    every = replace(QUIET, schedule=replace(QUIET.schedule, checkpoint_every=1))
    with pytest.raises(DivergedError, match=r"checkpoint 2: wanted finite parameters, .* in embedding.* and \d+ more"):
        loop.train(every, tmp_path / "run")
    with Checkpoints(RunDir(tmp_path / "run").checkpoints) as checkpoints:
        assert checkpoints.steps() == [1]


def test_one_parameter_that_is_not_finite_is_found():
    state = TrainState(
        step=jnp.int32(0),
        position=jnp.int32(3),
        key=jax.random.key(0),
        params={"a": jnp.ones(3), "b": {"c": jnp.array([1.0, jnp.nan])}},
        opt_state=(),
        adapted=Adapted(jnp.float32(0), jnp.float32(0), jnp.float32(0)),
    )
    with pytest.raises(DivergedError, match="not in b/c; it is not saved") as caught:
        check_finite(state, 7)
    assert (caught.value.step, caught.value.position) == (7, 3)


def test_skipped_updates_count_in_a_row():
    assert count_skipped(2, [True, True, False, True]) == [3, 4, 0, 1]
    assert count_skipped(2, [False, False]) == [0, 0] and count_skipped(2, []) == []


def test_a_run_whose_updates_are_skipped_one_at_a_time_goes_on_and_saves(counting, tmp_path):
    seen = counting(bad={index: {M - 1} for index in range(0, 10**4, P)})
    loop.train(QUIET, tmp_path / "run")
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4], "each step applied all updates but its last"
    with Checkpoints(RunDir(tmp_path / "run").checkpoints) as checkpoints:
        assert checkpoints.steps() == [4, 5]


def test_updates_skipped_in_a_row_reach_over_steps_and_into_a_resumed_run(counting, tmp_path):
    bad = {P: {M - 1}, 2 * P: {0}, 3 * P: {M - 1}, 4 * P: range(M), 5 * P: {0}}
    counting(bad)
    loop.train(QUIET, tmp_path / "run")
    counting(bad)
    longer = replace(QUIET, schedule=replace(QUIET.schedule, steps=6), guard=Guard(rollbacks=0))
    with pytest.raises(DivergedError, match=r"fewer than 4 .* got 4 by step 6"):
        loop.train(longer, tmp_path / "run")


@pytest.mark.parametrize(
    ("updates", "sound"),
    [
        ([], True),
        ([outcome(False), outcome(False)], True),
        ([outcome(True), outcome(False)], True),
        ([outcome(False), outcome(True)], True),
        ([outcome(False), outcome(True, finite=False)], False),
        ([outcome(True)], False),
    ],
)
def test_a_state_to_go_back_to_had_an_update_applied_and_the_last_one_finite(updates, sound):
    assert is_sound(updates) == sound


def gives_nan_advantages(reward_PG):
    """NaN for one sample, but not with the rewards of the dry run."""
    tried = jnp.all(jnp.abs(reward_PG - 0.5) == 0.25)
    return (reward_PG * 0).at[1, 2].set(jnp.where(tried, 0, jnp.nan))


@pytest.mark.parametrize("is_local", [True, False])
def test_a_run_without_a_finite_update_exits_with_3_and_its_dump_is_replayed(
    is_local, bucket, tmp_path, capsys, monkeypatch
):
    overrides = ["advantage=test_rollback.gives_nan_advantages", "warm_start=null", "guard.rollbacks=0"]
    overrides += ["schedule.steps=9", "schedule.checkpoint_every=1", "schedule.minibatches=1", "schedule.max_skipped=2"]
    overrides += ["model.num_hidden_layers=1", "model.num_experts=0", "model.intermediate_size=8"]
    run = RunDir(tmp_path / "run" if is_local else bucket[0])
    assert main.main(["train", EXPERIMENT, "--workdir", str(run.path), *overrides]) == 3
    folder = run.path / "dumps" / "step_000002"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "schedule.max_skipped" in line]
    assert (
        "wanted fewer than 2 skipped updates in a row, got 2 by step 2" in line
        and f"{folder}, for `gspax replay`" in line
    )
    assert "Traceback" not in line and not list(run.checkpoints.glob("*"))

    # the dump has the settings of the run; only what differs from it is an override
    assert main.main(["replay", EXPERIMENT, str(folder), "optimizer.learning_rate=0.5"]) == 0
    out, err = capsys.readouterr()
    assert "gspax: settings of the run: " in err and "model.num_hidden_layers" in err
    change, *lines = out.splitlines()
    assert change.startswith("changed: optimizer.learning_rate: ") and change.endswith(" -> 0.5")
    assert lines[:3] == ["step 2, a minibatch of 32 rows", "loss           nan", "gradient norm  nan"]
    assert "the update is skipped" in lines and "row 6: not finite in advantage, loss" in lines
    assert "changed" not in lines[0] and any(line.startswith("gradient of embedding: ") for line in lines)
    assert not any(line.startswith("parameter ") for line in lines), "the update was not applied"

    if is_local:  # paths of a bucket list no files below a folder
        (state,) = [
            path for path in (folder / guards.STATE).rglob("*") if path.is_file() and path.name == "manifest.json"
        ]
        part = max((path for path in state.parent.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        whole = part.read_bytes()
        for damage in (whole[:-9], bytes(len(whole))):
            part.write_bytes(damage)
            assert main.main(["replay", EXPERIMENT, str(folder)]) == 2
            err = capsys.readouterr().err
            assert "Traceback" not in err and f"{folder.name}/{guards.STATE}" in err, err
            assert state.is_file(), "reading a dump moves none of its files"
    (folder / guards.MINIBATCH).write_bytes(b"PK")
    assert main.main(["replay", EXPERIMENT, str(folder)]) == 2
    assert "minibatch.npz cannot be read" in capsys.readouterr().err
    (folder / guards.ABOUT).write_text('{"experiment": {}}')
    assert main.main(["replay", EXPERIMENT, str(folder)]) == 2
    assert "about.json: wanted a JSON object with a step and an experiment" in capsys.readouterr().err
    assert main.main(["replay", EXPERIMENT, str(run.path)]) == 2
    assert "wanted a dump of a run" in capsys.readouterr().err


def test_a_dump_holds_the_state_after_its_step(counting, tmp_path, monkeypatch):
    """So updates after the skipped one are in it (docs/howto/diverged.md)."""
    counting(bad={P: [0]})  # the second step's first update is skipped, its second one is applied
    ones_BT, step = np.ones((2, 3), np.float32), loop.run_step
    arrays = dict.fromkeys(("tokens_BT", "segment_BT", "mask_BT", "old_logp_BT", "advantage"), ones_BT)
    batch = Batch(**arrays)
    monkeypatch.setattr(loop, "run_step", lambda *given, **named: step(*given, **named)._replace(skipped_batch=batch))
    limited = replace(QUIET, guard=Guard(rollbacks=0), schedule=replace(QUIET.schedule, max_skipped=1))
    with pytest.raises(DivergedError, match="for `gspax replay`"):
        loop.train(limited, tmp_path / "run")
    (folder,), runtime = RunDir(tmp_path / "run").dumps.iterdir(), make_runtime(QUIET)
    with Checkpoints(folder / guards.STATE) as checkpoints:
        state, _ = checkpoints.restore(abstract_state(runtime.policy))
    assert (folder.name, int(state.step)) == ("step_000002", 2 * M)
    jax.tree.map(np.testing.assert_array_equal, vars(guards.read_minibatch(folder)), vars(batch))


def test_a_damaged_minibatch_is_one_sentence(tmp_path):
    """Every byte changed, in one bit or in all."""
    path, ones_BT = tmp_path / guards.MINIBATCH, np.ones((2, 3), np.float32)
    batch = Batch(tokens_BT=ones_BT, segment_BT=ones_BT, mask_BT=ones_BT, old_logp_BT=ones_BT, advantage=ones_BT[:, 0])
    np.savez(path, **{name: x for name, x in vars(batch).items() if x is not None})
    whole = path.read_bytes()
    for at in range(len(whole)):
        for change in (1 << at % 8, 255):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            try:
                found = guards.read_minibatch(tmp_path)
            except UserError as problem:
                assert "minibatch.npz cannot be read: " in str(problem) and "\n" not in str(problem)
            else:  # a byte that means nothing, such as a date
                jax.tree.map(np.testing.assert_array_equal, found, batch)
    path.write_bytes(whole[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        guards.read_minibatch(tmp_path)


@pytest.mark.parametrize(
    ("guard", "norm", "ratio", "healthy"),
    [
        (Guard(), 1e9, 1e9, True),
        (Guard(), np.nan, 1.0, False),
        (Guard(max_grad_norm=5.0), 5.0, 1.0, True),
        (Guard(max_grad_norm=5.0), 5.1, 1.0, False),
        (Guard(max_ratio=2.0), 1.0, 2.0, True),
        (Guard(max_ratio=2.0), 1.0, 2.1, False),
        (Guard(max_ratio=2.0), 1.0, np.nan, False),
    ],
)
def test_an_update_beyond_a_limit_is_skipped(guard, norm, ratio, healthy):
    metrics = {"ratio_max": jnp.float32(ratio)}
    assert is_healthy(guard, jnp.float32(0.0), jnp.float32(norm), metrics) == healthy


def test_the_limit_of_the_ratio_is_for_tokens_where_the_loss_has_their_ratio():
    metrics = {"ratio_max": jnp.float32(1.1), "token_ratio_max": jnp.float32(1000)}
    assert not is_healthy(Guard(max_ratio=2.0), jnp.float32(0), jnp.float32(0), metrics)


def test_an_update_with_a_loss_that_is_not_finite_is_skipped_whatever_its_gradient():
    assert not is_healthy(Guard(), jnp.float32(jnp.nan), jnp.float32(1.0), {})
    assert is_healthy(Guard(), jnp.float32(-1.0), jnp.float32(1.0), {})


def test_a_limit_of_a_ratio_that_a_loss_does_not_report_is_refused():
    with pytest.raises(UserError, match=r"guard\.max_ratio: wanted a loss with the metric ratio_max"):
        is_healthy(Guard(max_ratio=2.0), jnp.float32(0), jnp.float32(0), {})


def test_a_policy_without_any_entropy_is_an_alarm_and_missing_metrics_are_none():
    assert guards.find_alarms(Guard(), {"policy/entropy": 0.0, "response/truncated": 0.0}, Watch()).keys() == {
        "entropy"
    }
    assert guards.find_alarms(Guard(), {}, Watch()) == {}


def test_alarms_warn_once_while_they_last(capsys):
    on, watch, found = {"policy/entropy": 0.001, "response/truncated": 0.95}, Watch(), []
    for metrics in (on, on, {"policy/entropy": 0.5, "response/truncated": 0.1}, on):
        watch = guards.follow(Guard(), watch, metrics)
        found.append(guards.alarm_metrics(Guard(), watch))
    assert found[0] == found[3] == {"alarm/entropy": 1, "alarm/length": 1}
    assert found[2] == {"alarm/entropy": 0, "alarm/length": 0}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "policy/entropy is 0.001, below guard.min_entropy (0.01)" in lines[0]
    assert "response/truncated is 0.95, above guard.max_truncated (0.9)" in lines[1]
