"""Complete runs: their files, bit-exact resumption, interruption and failures."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_experiment
from api import (
    Checkpoints,
    InFlight,
    Rollout,
    RunDir,
    Runtime,
    Samples,
    Skipped,
    StepResult,
    Steps,
    StepSettings,
    TrainedPolicy,
    TrainState,
    abstract_state,
    checkpoint,
    evaluate_run,
    in_process,
    interrupt,
    loop,
    make_mesh,
    make_runtime,
    make_steps,
    manifest,
    minibatches,
    open_run,
    placement,
    progress,
    record,
    run_step,
    train_step,
    updates,
    warm_start,
)
from fake_trackers import install

from gspax import config, losses
from gspax.config import RowShape
from gspax.data import Problem
from gspax.data.tasks import sort
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.losses import kl
from gspax.rewards.scores import reward_calls
from gspax.training import open_training, run_guard, run_log
from gspax.training import replay as replaying
from gspax.training.run_log import RunLog

pytestmark = pytest.mark.usefixtures("one_device")

EXPERIMENT = str(Path(__file__).parents[1] / "small_experiment.py")
CLOCKS = ("time/", "cpu/", "perf/")
experiment = replace(
    small_experiment.experiment,
    model=replace(small_experiment.experiment.model, num_hidden_layers=1),
    schedule=replace(small_experiment.experiment.schedule, record_rollouts=True, timeline=True),
)


def with_schedule(**changes):
    return replace(experiment, schedule=replace(experiment.schedule, **changes))


@pytest.fixture(scope="module")
def runtime():
    """The runtime of the runs of `experiment`, which share its compiled programs."""
    return make_runtime(experiment)


@pytest.fixture(scope="module")
def whole(runtime, tmp_path_factory):
    """An uninterrupted run of four steps."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_runtime", lambda _: runtime)
        loop.train(experiment, workdir)
    return RunDir(workdir)


def final_state(run, step=None, experiment=experiment):
    runtime = make_runtime(experiment)
    with Checkpoints(run.checkpoints) as checkpoints:
        wanted = abstract_state(runtime.policy)
        state, _ = checkpoints.restore(wanted, step)
    return jax.device_get(replace(state, key=jax.random.key_data(state.key)))


def timeless(run):
    rows = record.read_metrics(run.metrics)
    return [{name: x for name, x in row.items() if not name.startswith(CLOCKS)} for row in rows]


def assert_same_run(run, other, experiment=experiment):
    states = (final_state(each, experiment=experiment) for each in (run, other))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert timeless(run) == timeless(other)
    for folder, same in ((run.samples, other.samples), (run.rollouts, other.rollouts)):
        for path in same.glob("*"):
            assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_run_writes_its_files(whole):
    assert json.loads(whole.experiment.read_text())["name"] == "small"
    for path in (whole.environment, whole.report, whole.before, whole.after, whole.warm_start.metrics):
        assert path.stat().st_size > 0
    assert any(whole.tensorboard.iterdir())
    with Checkpoints(whole.checkpoints) as checkpoints:
        assert checkpoints.steps() == [2, 4]


def test_a_run_writes_its_timeline_and_where_its_time_went(whole):
    read = json.loads(whole.timeline.read_text().removesuffix(",\n") + "]")
    lanes = {event["tid"]: event["args"]["name"] for event in read if event["ph"] == "M"}
    events = [(lanes[event["tid"]], event["name"], event["dur"] / 1e6) for event in read if event["ph"] == "X"]
    count = Counter((lane, name) for lane, name, _ in events)
    assert count["phases", "sampling"] == count["phases", "grading"] == count["phases", "computing log-probs"] == 4
    assert count["phases", "saving a checkpoint"] == 2 and count["phases", "evaluating"] == 3
    assert count["learner's devices", "update"] == 4 * 2 and count["pushes", "version 3"] >= 1
    assert count["sampler's devices", "rollout"] >= 4
    assert sum(n for (lane, _), n in count.items() if lane == "calls") >= 4 * 32, count

    rows = record.read_metrics(whole.metrics)
    steps = [row for row in rows if "time/step" in row]
    updates = [seconds for lane, name, seconds in events if (lane, name) == ("phases", "updating")]
    train, step = (sum(row[f"time/{part}"] for row in steps) for part in ("train", "step"))
    assert train < sum(updates[-4:]) < step
    elapsed = [row["time/elapsed"] for row in steps]
    assert step < elapsed[-1] and elapsed == sorted(elapsed)
    assert f"Goodput: {100 * step / elapsed[-1]:.1f} %" in whole.report.read_text()


def test_a_replay_trains_on_the_recorded_rollouts(whole, runtime, tmp_path, monkeypatch):
    """Bit for bit as the run did, from its checkpoint or from the start; with another loss on the same rows."""

    def no_sampler(*given):
        raise AssertionError("a replay samples nothing")

    monkeypatch.setattr(in_process, "sample", no_sampler)
    other = replace(experiment, loss=partial(losses.gspo, clip_low=0.01, clip_high=0.01), warm_start=None)

    for steps, name, settings in (
        (range(3, 5), "later", experiment),
        (range(1, 3), "first", experiment),
        (range(3, 4), "loss", other),
    ):
        run = RunDir(tmp_path / name)
        own = make_runtime(other) if settings is other else replace(runtime, experiment=experiment)
        replaying.replay(own, whole, steps, run.path)
        wanted = {row["step"]: row for row in timeless(whole) if "reward/mean" in row and row["step"] in steps}
        replayed = {row["step"]: row for row in timeless(run)}
        last, states = steps[-1], (final_state(run), final_state(whole, steps[-1] if settings is experiment else 2))
        if settings is experiment:
            assert replayed == wanted
            jax.tree.map(np.testing.assert_array_equal, *states)
        else:
            assert replayed[last]["reward/mean"] == wanted[last]["reward/mean"]
            assert replayed[last]["policy/clip_fraction_sequences"] != wanted[last]["policy/clip_fraction_sequences"]
            assert states[0].step == states[1].step + experiment.schedule.minibatches


@pytest.mark.slow
def test_a_run_of_adapters_in_a_bucket_is_replayed_there(bucket):
    run = RunDir(bucket[0])
    adapted = replace(with_schedule(steps=2, eval_every=0), lora=config.Lora(rank=2))
    loop.train(adapted, run.path)
    again = RunDir(run.path.parent / "again")
    replaying.replay(make_runtime(adapted), run, range(1, 3), again.path)
    first, second = ([row for row in timeless(each) if "reward/mean" in row] for each in (run, again))
    keep = [{name: x for name, x in row.items() if not name.startswith("bucket/")} for row in (*first, *second)]
    assert keep[:2] == keep[2:] and len(keep) == 4


@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        ((1, 6), {}, "wanted the rollouts of steps 1 to 5, got none of 1 of them, the first 5"),
        ((2, 5), {}, "wanted a checkpoint before the first replayed step, after 1, got after steps 2, 4"),
        ((3, 5), {"sampling": replace(experiment.sampling, group=2)}, "undo: sampling.group: 4 -> 2"),
        ((3, 5), {"tokenizer": replace(experiment.tokenizer, alphabet="abc")}, "undo: tokenizer"),
        ((3, 5), {"routing_replay": "sampler"}, "routing_replay: wanted rollouts with the sampler's experts"),
    ],
)
def test_a_replay_is_refused_in_a_sentence(steps, change, message, whole, runtime, tmp_path):
    changed = replace(runtime, experiment=replace(experiment, **change))
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        replaying.replay(changed, whole, range(*steps), tmp_path / "run")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("start", ["warm", "random"])
def test_run_compiles_its_update_once(start, tmp_path, caplog, made):
    """Its first and later minibatches, and states after a start and after an update, have the same types."""
    made.clear()  # no other run's update
    short = with_schedule(steps=1, eval_every=0, **({} if start == "warm" else {"microbatch_tokens": 128}))
    short = short if start == "warm" else replace(short, warm_start=None)
    jax.config.update("jax_log_compiles", True)
    try:
        loop.train(short, tmp_path / "run")
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [line for line in caplog.messages if line.startswith("Finished XLA compilation of jit(update)")]
    assert len(compiled) == 1


def test_every_step_records_the_documented_metrics(whole):
    rows = record.read_metrics(whole.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3, 4, 4]
    step = rows[1]
    wanted = {
        *("reward/mean", "reward/std", "reward/zero_std_groups"),
        *(
            "policy/loss",
            "policy/clip_fraction_tokens",
            "policy/clip_fraction_sequences",
            "policy/kl",
            "policy/entropy",
        ),
        *("policy/ratio_mean", "policy/ratio_min", "policy/ratio_max", "optim/grad_norm", "optim/learning_rate"),
        *("response/length_mean", "response/length_min", "response/length_max", "response/truncated"),
        *("mismatch/kl", "mismatch/k3", "mismatch/abs_diff", "mismatch/abs_diff_largest_max"),
        *("mismatch/ess_tokens", "mismatch/ess_sequences", "mismatch/chi2_tokens", "mismatch/extreme_tokens"),
        *("routing/load_max", "routing/load_min", "routing/changed"),
        *("time/rollout", "time/reward", "time/old_logp", "time/train", "time/step", "perf/tokens_per_second"),
    }
    assert wanted <= set(step)
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert 0 <= step["mismatch/abs_diff_largest_max"] < 1e-4
    assert 0 < step["policy/noise_floor"] < 1e-4
    assert step["policy/ratio_min"] < 1 < step["policy/ratio_max"], "the second minibatch is off-policy"
    assert 0 < step["policy/entropy"] < np.log(12)
    assert step["routing/load_min"] < 1 < step["routing/load_max"]
    assert 1 <= step["response/length_min"] <= step["response/length_mean"] <= step["response/length_max"] <= 4
    assert {"eval/reward", "eval/greedy_reward", "eval/truncated"} <= set(rows[0])


def test_samples_record_reward_and_advantage(whole):
    rows = record.read_rows(whole.samples / "step_000004.jsonl")
    assert len(rows) == 32
    advantages = np.array([row["advantage"] for row in rows]).reshape(8, 4)
    rewards = np.array([row["reward"] for row in rows]).reshape(8, 4)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-5)
    assert (advantages[rewards.std(axis=1) == 0] == 0).all()
    before, after = record.read_rows(whole.before), record.read_rows(whole.after)
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]


def test_parameters_change_and_the_state_counts_updates(whole):
    start, end = final_state(whole, 2), final_state(whole, 4)
    assert (start.step, end.step) == (4, 8), "two updates per rollout batch"
    assert (start.position, end.position) == (48 + 16, 48 + 32), "after the demonstrated problems"
    np.testing.assert_array_equal(start.key, end.key)
    assert not np.array_equal(start.params["embedding"], end.params["embedding"])


def test_resumption_is_bit_exact(whole, runtime, monkeypatch, tmp_path, capsys):
    """After a kill in the fourth step. Records after the checkpoint are dropped. Each long phase is announced."""
    run = RunDir(Path(shutil.copytree(whole.path, tmp_path / "run")))
    shutil.rmtree(run.checkpoints / "4")
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "reward/mean": 99}\n{"step": 6, "rew')
    monkeypatch.setattr(loop, "make_runtime", lambda _: runtime)
    loop.train(experiment, run.path)
    assert_same_run(run, whole)
    assert len(json.loads(run.environment.read_text())) == 2
    said = capsys.readouterr().out.splitlines()
    assert "continuing from step 2 of 4" in said and said[-1] == "writing the report"
    assert f"step 4: evaluating {experiment.evaluation.problems} held-out problems" in said
    loop.train(experiment, run.path)
    assert "already at step 4 of 4" in capsys.readouterr().out.splitlines()


@dataclass(frozen=True)
class Dirty:
    """Two training problems of the warm start and two of the run cannot be used, and a held-out one is too long."""

    inner: sort.Problems = experiment.data

    def train(self, index):
        if index == 17:
            return {"prompt": "12=", "answer": "12"}
        if index in (60, 76):
            return Problem(prompt="12345=", answer="12345")
        if index == 20:
            raise SystemExit(0)
        return self.inner.train(index)

    def heldout(self, index):
        return Problem(prompt="12345=", answer="12345") if index == 3 else self.inner.heldout(index)


def test_problems_that_cannot_be_used_are_skipped(runtime, monkeypatch, tmp_path, capsys):
    dirty = replace(experiment, data=Dirty())
    monkeypatch.setattr(
        loop,
        "make_runtime",
        lambda _: replace(runtime, experiment=dirty),
    )
    loop.train(dirty, tmp_path / "whole")
    whole = RunDir(tmp_path / "whole")
    steps = [row for row in timeless(whole) if "policy/loss" in row]
    assert [row["data/skipped"] for row in steps] == [0, 1, 0, 1], "50 problems of the warm start come before"
    assert final_state(whole).position == 48 + 32 + 4
    evaluated = [row for row in timeless(whole) if "eval/reward" in row]
    assert [row["eval/skipped"] for row in evaluated] == [1, 1, 1]
    assert "12345=" not in whole.after.read_text() and len(record.read_rows(whole.after)) == 15
    rows = record.read_rows(whole.skipped)
    assert [row["problem"] for row in rows] == [17, 20, 60, 76]
    assert "wanted a Problem whose prompt is text" in rows[0]["reason"] and "raised SystemExit" in rows[1]["reason"]
    assert "wanted a prompt of 1 to 4 tokens" in rows[2]["reason"]
    said = capsys.readouterr().err
    assert said.count("evaluation: problem 3: wanted a prompt of 1 to 4 tokens") == 1
    assert re.search(r"data: problem 60: .* got 6: skipped \(3 so far, all in skipped_problems.jsonl\)", said)


@pytest.mark.slow
def test_problems_are_skipped_with_slots_and_in_refills(tmp_path):
    dirty = replace(experiment, data=Dirty(), warm_start=None)
    dirty = replace(dirty, sampling=replace(dirty.sampling, slots=16, max_refills=2))
    whole, resumed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "resumed")
    loop.train(dirty, whole.path)
    steps = [row for row in timeless(whole) if "policy/loss" in row]
    consumed, skipped = (sum(row[name] for row in steps) for name in ("sampling/prompts", "data/skipped"))
    assert consumed > 32 + skipped, "some groups were replaced"
    assert skipped == len(record.read_rows(whole.skipped)) >= 2
    assert final_state(whole, experiment=dirty).position == consumed
    shutil.copytree(whole.path, resumed.path)
    shutil.rmtree(resumed.checkpoints / "4")
    loop.train(dirty, resumed.path)
    assert_same_run(resumed, whole, experiment=dirty)


def test_signal_during_updates_ends_the_run_after_the_step_with_a_save(whole, runtime, monkeypatch, tmp_path):
    """SIGTERM before the first of the third step's two updates. The evaluation after this step begins on resume."""
    updates, evaluated = [], []

    def evaluate(*arguments):
        evaluated.append(len(updates))
        return checkpoint.evaluate(*arguments)

    def update(*arguments):
        updates.append(arguments)
        if len(updates) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return runtime.steps.update(*arguments)

    run = RunDir(tmp_path / "run")
    signalled = replace(runtime, steps=runtime.steps._replace(update=update))
    monkeypatch.setattr(loop, "make_runtime", lambda _: signalled)
    monkeypatch.setattr(run_log, "evaluate", evaluate)
    with pytest.raises(interrupt.Interrupted, match="SIGTERM: completed steps are saved"):
        loop.train(experiment, run.path)
    assert evaluated == [0], "before the first step alone"
    assert len(updates) == 6 and manifest.finished_steps(run.checkpoints)[-1] == 3
    monkeypatch.setattr(loop, "make_runtime", lambda _: runtime)
    loop.train(experiment, run.path)
    assert_same_run(run, whole)


def test_another_experiment_is_rejected_and_nothing_changes(whole):
    files = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"optimizer.learning_rate: 0.001 -> 0.002"):
        loop.train(replace(experiment, optimizer=config.Optimizer(learning_rate=2e-3)), whole.path)
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == files


@pytest.mark.slow
def test_sft_alone_equals_the_warm_start_of_a_run(whole, tmp_path):
    warm_start.run(experiment, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    assert timeless(run.warm_start) == timeless(whole.warm_start)
    assert not run.metrics.exists()
    loop.train(experiment, tmp_path / "run")
    assert_same_run(run, whole)


def test_eval_reproduces_the_recorded_metrics_and_says_that_it_runs(whole, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    monkeypatch.setattr(checkpoint, "evaluate_heldout", slowly(checkpoint.evaluate_heldout))
    evaluate_run(experiment, whole.path, 4)
    recorded = next(row for row in timeless(whole) if row["step"] == 4 and "eval/reward" in row)
    measured = record.read_rows(whole.evaluations)[-1]
    assert {name: measured[name] for name in recorded} == recorded
    first, *said = capsys.readouterr().out.splitlines()
    assert first == f"step 4: evaluating {experiment.evaluation.problems} held-out problems"
    assert f"  eval/reward            {recorded['eval/reward']:.4f}" in said
    count = experiment.evaluation.problems
    assert any(line.startswith(f"held-out problems 0/{count}  evaluating") and "so far" in line for line in said)
    assert any(line.startswith(f"held-out problems {count}/{count}  reward ") for line in said)


def test_eval_before_the_first_checkpoint_is_of_the_warm_start(whole, tmp_path):
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints)
    evaluate_run(experiment, run.path, None)
    recorded = next(row for row in timeless(whole) if row["step"] == 0 and "eval/reward" in row)
    (measured,) = record.read_rows(run.warm_start.evaluations)
    assert measured | {"step": 0} == recorded | {"step": 0, "evaluation": measured["evaluation"]}
    assert measured["step"] == experiment.warm_start.steps


def slowly(function):
    """The function after a pause: an evaluation may end before anything is said of it."""

    def call(*arguments):
        time.sleep(0.2)
        return function(*arguments)

    return call


def test_eval_of_a_missing_checkpoint_is_rejected(whole, tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint 3 .* only 2, 4"):
        evaluate_run(experiment, whole.path, 3)
    with pytest.raises(UserError, match="is not a gspax run"):
        evaluate_run(experiment, tmp_path, None)


def raises(problem, completion):
    raise KeyError("answer")


def gives_nan(problem, completion):
    return float("nan")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"reward": raises},
            r"reward: test_loop.raises: KeyError: 'answer' \(tests/training/test_loop.py:\d+\) "
            r"for the prompt '\d+='",
        ),
        (
            {"reward": gives_nan},
            "reward: test_loop.gives_nan: wanted finite numbers up to ±1e18, got nan",
        ),
        (
            {"sampling": replace(experiment.sampling, max_prompt_tokens=3)},
            r"problem \d+: wanted a prompt of 1 to 3 tokens .* got 4",
        ),
    ],
)
def test_invalid_input_is_rejected_in_one_sentence(tmp_path, broken, said):
    with pytest.raises(UserError, match=said):
        loop.train(replace(experiment, warm_start=None, **broken), tmp_path / "run")


def failures(workdir, step):
    return record.read_rows(workdir / f"samples/failed_{step:06d}.jsonl")


@pytest.mark.parametrize("step", [0, 1])
def test_failed_rewards_that_end_a_run_are_recorded_first(runtime, monkeypatch, tmp_path, step):
    """In the first evaluation, and in the first rollout batch."""
    failing = [step == 0]

    def reward(problem, completion):
        if failing[0]:
            raise KeyError(completion)
        return 1.0

    def fail_from_now_on(*args):
        failing[0] = True
        return run_step(*args)

    monkeypatch.setattr(loop, "run_step", fail_from_now_on)
    rewards = reward_calls(reward, experiment.grading)
    monkeypatch.setattr(loop, "make_runtime", lambda _: replace(runtime, rewards=rewards))
    place = r"\(tests/training/test_loop.py:\d+\)"
    with pytest.raises(UserError, match=rf"reward failed for 32 of 32 .*: KeyError: .* {place}"):
        loop.train(experiment, tmp_path / "run")
    rows = failures(tmp_path / "run", step)
    assert len(rows) == 32
    where = "(tests/training/test_loop.py:"
    assert all(row["error"].startswith(f"KeyError: {row['completion']!r} {where}") for row in rows)


def test_an_evaluation_with_some_failed_rewards_ends_no_run(runtime, monkeypatch, tmp_path, capsys):
    """Neither a run nor each of its restarts: the evaluation is the same every time."""

    def reward(problem, completion):
        if problem.prompt in heldout[:4]:
            raise TimeoutError("judge")
        return 1.0

    heldout = [experiment.data.heldout(index).prompt for index in range(16)]
    rewards = reward_calls(reward, experiment.grading)
    monkeypatch.setattr(loop, "make_runtime", lambda _: replace(runtime, rewards=rewards))
    loop.train(experiment, tmp_path / "run")
    shares = [row.get("eval/reward_failed") for row in timeless(RunDir(tmp_path / "run"))]
    assert [share for share in shares if share is not None] == [0.25] * 3
    assert [len(failures(tmp_path / "run", step)) for step in (0, 3, 4)] == [8] * 3
    told = r"warning: evaluation: reward: test_loop\.\S+ failed for 8 of 32 completions .*: TimeoutError: judge "
    assert len(re.findall(told, capsys.readouterr().err)) == 3


@pytest.mark.parametrize("allowed", [0.05, 1.0])
def test_rewards_beyond_the_range_end_the_run_or_count_as_failed(runtime, monkeypatch, tmp_path, allowed):
    def huge(problem, completion):
        return 1e38 if len(completion) % 2 else -1e38

    rewards = reward_calls(huge, replace(experiment.grading, max_failed=allowed))
    monkeypatch.setattr(loop, "make_runtime", lambda _: replace(runtime, rewards=rewards))
    if allowed < 1:
        with pytest.raises(UserError, match=r"huge failed for .* wanted finite numbers up to ±1e18, got -?1e\+38 for"):
            loop.train(experiment, tmp_path / "run")
        return
    loop.train(experiment, tmp_path / "run")
    rows = [row for row in timeless(RunDir(tmp_path / "run")) if "optim/skipped" in row]
    assert [(row["reward/failed"], row["reward/mean"], row["optim/skipped"]) for row in rows] == [(1, 0, 0)] * 4


def test_an_empty_prompt_is_rejected(tmp_path):
    mute = replace(experiment, warm_start=None, tokenizer=replace(experiment.tokenizer))
    object.__setattr__(mute.tokenizer, "encode", lambda text: [])
    with pytest.raises(
        UserError, match="data: held-out prompts: 16 of 16 cannot be encoded: wanted at least one token"
    ):
        loop.train(mute, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [losses.grpo, losses.gspo_token])
def test_other_losses_train_and_record_their_metrics(tmp_path, loss):
    loop.train(replace(with_schedule(steps=1), loss=loss, warm_start=None), tmp_path / "run")
    rows = record.read_metrics(RunDir(tmp_path / "run").metrics)
    assert "policy/clip_fraction_sequences" in rows[1]


# Halves the CPU time of a short run; XLA aborts on a flag that it does not have.
QUICK_TO_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | (
    {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"} if jax.__version_info__[:2] == (0, 10) else {}
)


def gspax(*arguments, **variables):
    """`gspax` in a subprocess, on one device."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        **variables,
    }
    command = [sys.executable, "-m", "gspax", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process, timeout=300):
    out, error = process.communicate(timeout=timeout)
    return process.returncode, out, error


def test_gspo_learns_to_sort(tmp_path):
    """The default experiment, shortened: held-out reward rises clearly above the warm start."""
    overrides = [
        *("model.num_hidden_layers=1", "model.num_experts=0", "model.intermediate_size=64"),
        *("sampling.prompts=32", "sampling.group=8", "schedule.steps=40", "schedule.minibatches=4"),
        *("schedule.eval_every=0", "schedule.checkpoint_every=0", "evaluation.problems=200"),
        "reward=gspax.data.tasks.sort.reward",
        *("warm_start.steps=80", "warm_start.rows=64", "warm_start.optimizer.learning_rate=1e-2"),
        "optimizer.learning_rate=2e-3",
    ]
    workdir = str(tmp_path / "run")
    code, _, error = finished(gspax("train", EXPERIMENT, "--workdir", workdir, *overrides, **QUICK_TO_COMPILE))
    assert code == 0, error
    reward = [row["eval/reward"] for row in timeless(RunDir(tmp_path / "run")) if "eval/reward" in row]
    assert reward[-1] > reward[0] + 0.25


@pytest.mark.slow
def test_a_clip_range_below_the_noise_floor_warns_once(tmp_path, capsys):
    narrow = replace(with_schedule(steps=2, eval_every=0), loss=partial(losses.gspo, clip_low=0.0), warm_start=None)
    loop.train(narrow, tmp_path / "run")
    assert capsys.readouterr().err.count("clip_low is 0, below the noise floor") == 1
    loop.train(replace(narrow, schedule=replace(narrow.schedule, steps=3)), tmp_path / "run")
    assert "noise floor" not in capsys.readouterr().err


def a_rollout():
    """Eight rows with distinct tokens."""
    tokens = np.arange(64, dtype=np.int32).reshape(8, 8)
    return Rollout(
        tokens_BT=tokens,
        mask_BT=tokens % 3 == 0,
        logp_BT=-tokens.astype(np.float32),
        prompt_length_B=np.array([1, 1, 2, 2, 3, 3, 4, 4], np.int32),
        length_B=np.array([1, 2, 3, 4, 4, 4, 4, 2], np.int32),
        finished_B=np.array([True, True, True, False, False, True, True, True]),
    )


def test_minibatches_hold_each_row_once_in_order():
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    rollout, advantage = a_rollout(), np.arange(8) / 8
    batches, layouts = minibatches.split_minibatches(rollout, 4, RowShape(2, 8, 2, False), mesh)
    batches = minibatches.set_advantages(batches, layouts, advantage, mesh)
    assert minibatches.packing_efficiency(layouts) == 44 / 64
    assert [len(batch.tokens_BT) for batch in batches] == [2, 2, 2, 2]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    np.testing.assert_array_equal(joined.tokens_BT, rollout.tokens_BT)
    np.testing.assert_array_equal(joined.mask_BT, rollout.mask_BT)
    np.testing.assert_array_equal(joined.sampler_logp_BT, rollout.logp_BT)
    np.testing.assert_array_equal(joined.advantage, advantage)
    np.testing.assert_array_equal(joined.segment_BT.sum(axis=1), rollout.prompt_length_B + rollout.length_B)
    assert (np.diff(joined.segment_BT, axis=1) <= 0).all(), "the sequence first, then padding"


@pytest.mark.parametrize(("during", "every"), [("step", 0), ("step", 1), ("step", 2), ("save", 1), ("save", 2)])
def test_a_signal_ends_the_run_after_the_current_step(monkeypatch, tmp_path, during, every):
    """Also if every step saves, and if the signal arrives during a save."""
    save, killed = Checkpoints.save, []

    def kill():
        if not killed:  # a second signal may end this process
            killed.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    def run_step(runtime, state, in_flight, teacher=None):
        state = replace(state, step=state.step + runtime.experiment.schedule.minibatches)
        if during == "step" and state.step == 4:
            kill()
        return StepResult(state, {}, Samples([], np.zeros(0)))

    def killed_save(self, step, state, *args, **options):
        save(self, step, state, *args, **options)
        if during == "save" and step == 2:
            kill()

    monkeypatch.setattr(loop, "run_step", run_step)
    monkeypatch.setattr(RunLog, "write_evaluation", lambda *args: None)
    monkeypatch.setattr(Checkpoints, "save", killed_save)
    run = tmp_path / "run"
    with pytest.raises(interrupt.Interrupted, match="SIGTERM"):
        loop.train(replace(with_schedule(steps=5, eval_every=0, checkpoint_every=every), warm_start=None), run)
    with Checkpoints(RunDir(run).checkpoints) as checkpoints:
        assert checkpoints.latest() == 2


def test_event_files_have_every_metric_of_a_step_before_it_is_saved(monkeypatch, tmp_path):
    """A run that is killed right after a save has lost no metrics up to its checkpoint."""
    run, written = RunDir(tmp_path / "run"), []

    def run_step(runtime, state, in_flight, teacher=None):
        state = replace(state, step=state.step + runtime.experiment.schedule.minibatches)
        return StepResult(state, {f"of_step_{int(state.step)}": 1.0}, Samples([], np.zeros(0, np.float32)))

    def save(checkpoints, step, state, extra, wait_for_log, *, is_last):
        (events,) = run.tensorboard.iterdir()
        written.append(f"of_step_{int(state.step)}".encode() in events.read_bytes())

    monkeypatch.setattr(loop, "run_step", run_step)
    monkeypatch.setattr(RunLog, "write_evaluation", lambda *args: None)
    monkeypatch.setattr(run_guard, "save_checkpoint", save)
    loop.train(replace(with_schedule(steps=3, eval_every=0, checkpoint_every=1), warm_start=None), run.path)
    assert written == [True] * 3


def test_trackers_get_every_step_of_a_run_and_a_resumed_one_continues(monkeypatch, tmp_path, capsys):
    """The first report finds no space, which costs a warning."""
    runs, experiment = install(monkeypatch, "wandb"), replace(with_schedule(eval_every=0), warm_start=None)

    def run_step(runtime, state, in_flight, teacher=None):
        state = replace(state, step=state.step + runtime.experiment.schedule.minibatches)
        return StepResult(state, {"step_of_state": float(state.step)}, Samples([], np.zeros(0, np.float32)))

    def write(workdir):
        if not has_space.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        (workdir / "report.html").write_text("a report")
        return workdir / "report.html"

    monkeypatch.setattr(loop, "run_step", run_step)
    monkeypatch.setattr(RunLog, "write_evaluation", lambda *args: None)
    monkeypatch.setattr(open_training, "run_page", SimpleNamespace(write=write))
    has_space = [True, False]
    for steps in (2, 3):
        changed = replace(experiment, schedule=replace(experiment.schedule, steps=steps, checkpoint_every=1))
        loop.train(changed, tmp_path / "run", ("wandb",))
    (record,) = runs.values()
    assert [step for step, _ in record.rows] == [1, 2, 3] and record.rows[0][1]["step_of_state"] == 2.0
    assert (record.attempts, record.report, record.config["schedule.steps"]) == (2, "a report", 3)
    path = RunDir(tmp_path / "run").report
    assert f"gspax: warning: {path} was not written: No space left on device\n" in capsys.readouterr().err
    assert not RunDir(tmp_path / "run").tensorboard.exists()


def test_a_signal_within_a_step_or_an_evaluation_costs_that_work_alone(whole, runtime, monkeypatch, tmp_path):
    """While rewards are waited for, in an evaluation, after scoring; the resumed run repeats what was left out."""
    run = RunDir(Path(shutil.copytree(whole.path, tmp_path / "run")))
    shutil.rmtree(run.checkpoints / "4")
    calls = 0

    def reward(problem, completion, *, at):
        nonlocal calls
        if (calls := calls + 1) == at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # the wait for it ends first
        return experiment.reward(problem, completion)

    def score(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return runtime.steps.score(*args, **options)

    def stop(latest, **changes):
        nonlocal calls
        calls = 0
        monkeypatch.setattr(loop, "make_runtime", lambda _: replace(runtime, **changes))
        with pytest.raises(interrupt.Interrupted):
            loop.train(experiment, run.path)
        with Checkpoints(run.checkpoints) as checkpoints:
            assert checkpoints.latest() == latest
        return len(timeless(run))

    def rewards(at):
        return reward_calls(partial(reward, at=at), experiment.grading)

    assert stop(2, rewards=rewards(at=1)) == 3
    assert stop(3, rewards=rewards(at=33)) == 4, "without the evaluation of step 3"
    assert stop(3, steps=runtime.steps._replace(score=score)) == 5
    monkeypatch.setattr(loop, "make_runtime", lambda _: runtime)
    loop.train(experiment, run.path)
    assert_same_run(run, whole)


@pytest.mark.parametrize(("every", "due"), [(0, [7]), (3, [3, 6, 7]), (7, [7]), (10, [7])])
def test_periodic_work_is_also_due_at_the_end(every, due):
    assert [done for done in range(1, 8) if progress.is_due(done, every, 7)] == due


def test_a_step_of_the_loop(monkeypatch):
    """Parameters are a counter of updates, so each result shows which parameters made it."""
    small = replace(
        experiment,
        sampling=replace(experiment.sampling, prompts=4, group=2),
        schedule=replace(experiment.schedule, minibatches=2),
        optimizer=config.Optimizer(learning_rate=1.0, warmup_updates=8),
        advantage=lambda reward_PG: jnp.arange(8.0).reshape(4, 2),
    )
    given, updated = {}, []

    def sample(params, prompts, ids, key, options, **kwargs):
        given.update(params=params, prompts=prompts, ids=list(ids), key=key, sampling=options.sampling)
        rollout = a_rollout()
        return replace(rollout, logp_BT=np.where(rollout.mask_BT, -0.25, 0.0).astype(np.float32))

    def score(params, tokens_BT, segment_BT, mask_BT, expert_BLTA=None, prefix_BT=None, kept_BTK=None):
        return train_step.Scores(jnp.where(mask_BT, params + 0.25, 100.0), jnp.where(mask_BT, 2.0, 100.0))

    def route(params, tokens_BT, segment_BT, prefix_BT):
        experts = jnp.stack([jnp.zeros((1, 4, 8), jnp.int32), jnp.full((1, 4, 8), 1 + params)], -1)
        return experts.astype(jnp.int32)

    def update(state, batch, on_policy):
        updated.append((batch, on_policy))
        scores = score(state.params, batch.tokens_BT, batch.segment_BT, batch.mask_BT)
        scores = scores._replace(count_LE=jnp.array([[2, 2, 0, 0]]), response_LE=jnp.array([[2, 0, 0, 0]]))
        skipped = len(updated) == 1  # the optimizer's count stays
        metrics = {"loss": jnp.float32(len(updated)), "skipped": jnp.float32(skipped), "empty": jnp.float32(0)}
        done = optax.ScaleByScheduleState(state.opt_state.count + (not skipped))
        return replace(state, step=state.step + 1, params=state.params + 1, opt_state=done), metrics, scores

    monkeypatch.setattr(in_process, "sample", sample)
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    sampler = placement.Sampler(mesh, lambda params: params, lambda rollout: rollout)
    steps = Steps(None, update, score, route, None, make_steps(small, None, mesh).scored)
    policy, rewards = TrainedPolicy(small.model, mesh), reward_calls(small.reward, small.grading)
    runtime = Runtime(small, policy, steps, in_process.InProcess(sampler), rewards)
    key = jax.random.key(5)
    done = optax.ScaleByScheduleState(jnp.int32(3))  # one of four updates was skipped
    state = TrainState(
        step=jnp.int32(4), position=jnp.int32(40), key=key, params=jnp.float32(0), opt_state=done, adapted=None
    )
    state, metrics, samples, *_ = run_step(runtime, state, InFlight())

    assert given["params"] == 0 and given["ids"] == [40, 41, 42, 43] and given["sampling"] == small.sampling
    assert given["prompts"] == [small.tokenizer.encode(small.data.train(index).prompt) for index in range(40, 44)]
    assert given["key"] not in (key, jax.random.fold_in(key, 2)), "neither the run's key nor the evaluation's"
    assert (state.step, state.position, state.params) == (6, 44, 2) and state.key == key
    assert [on_policy for _, on_policy in updated] == [True, False]
    for part, (batch, _) in enumerate(updated):
        np.testing.assert_array_equal(batch.tokens_BT, a_rollout().tokens_BT[4 * part : 4 * part + 4])
        np.testing.assert_array_equal(batch.advantage, np.arange(4.0) + 4 * part)
        wanted = 0.25 if part else np.nan  # the first minibatch has none yet
        np.testing.assert_array_equal(np.asarray(batch.old_logp_BT)[batch.mask_BT], wanted)
    assert samples.advantage_B.tolist() == list(range(8))
    assert metrics["policy/loss"] == 1.5 and metrics["policy/entropy"] == 2.0
    assert metrics["mismatch/abs_diff"] == metrics["mismatch/abs_diff_largest_max"] == 0.5
    assert metrics["optim/learning_rate"] == 3 / 8, "of the last update, the sixth, after three applied ones"
    assert metrics["routing/changed"] == 0.5, "one of two experts is another one after two updates"
    assert (
        metrics["routing/load_max"] == metrics["routing/response_load_max"] == 2.0
        and metrics["routing/load_min"] == 0.0
    )


def test_a_dense_model_has_no_routing_metrics_and_no_forward_pass_for_them():
    dense = replace(experiment, model=replace(experiment.model, num_experts=0, intermediate_size=8))
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    assert make_steps(dense, None, mesh).route is None


@pytest.mark.parametrize(("first", "scored"), [(0, [0, 32]), (1, [32])])
def test_minibatches_are_scored_unless_the_first_update_does(first, scored):
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    batches, _ = minibatches.split_minibatches(a_rollout(), 2, RowShape(4, 8, 4, False), mesh)
    seen = []

    def score(params, tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT, kept_BTK):
        seen.append(int(tokens_BT[0, 0]))
        value = jnp.full(tokens_BT.shape, 1.0 + seen[-1])
        return train_step.Scores(value, -value, jnp.full((4, 1, 8, 2), seen[-1]))

    filled, scores = minibatches.score_minibatches(score, None, batches, range(first, 2))
    assert seen == scored
    assert filled[1].old_logp_BT[0, 0] == 33 and filled[1].expert_BLTA.max() == 32
    assert scores[1].entropy_BT[0, 0] == -33
    if first:
        assert filled[0].old_logp_BT is None and 0 not in scores
    else:
        assert filled[0].old_logp_BT[0, 0] == 1 and scores[0].entropy_BT[0, 0] == -1


def test_a_signal_ends_the_run_between_two_minibatches_that_are_scored(capfd):
    batches, _ = minibatches.split_minibatches(
        a_rollout(), 2, RowShape(4, 8, 4, False), make_mesh(config.Mesh(), jax.devices()[:1])
    )
    seen = []

    def score(params, tokens_BT, *_, **__):
        seen.append(params)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step.Scores(jnp.zeros(tokens_BT.shape), jnp.zeros(tokens_BT.shape))

    for at in (1, 3):
        seen.clear()
        with interrupt.listen(), pytest.raises(interrupt.Interrupted):
            filled, _ = minibatches.score_minibatches(score, "policy", batches, range(2))
            minibatches.score_first(score, "reference", filled)
        assert seen == ["policy", "policy", "reference"][:at]


def test_without_scoring_the_first_update_measures_the_policy():
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    batches, _ = minibatches.split_minibatches(a_rollout(), 2, RowShape(4, 8, 4, False), mesh)
    taken = minibatches.take_sampler_logp(batches)
    filled, scores = minibatches.score_minibatches(None, None, taken, range(0))
    assert scores == {}
    for batch, before in zip(filled, batches, strict=True):
        np.testing.assert_array_equal(batch.old_logp_BT, before.sampler_logp_BT)
    given, own = [], train_step.Scores(*jnp.full((2, 4, 8), 7.0))

    def update(state, batch, on_policy):
        given.append((batch, on_policy))
        return state, {"empty": 0.0, "skipped": 1.0}, own

    state = TrainState(step=jnp.int32(0), position=None, key=None, params=None, opt_state=(), adapted=None)
    steps = Steps(None, update, None, None, None, range(0))
    updated = updates.run_updates(steps, state, filled, scores, epochs=1, rate=float)
    assert given == [(batch, False) for batch in filled], "its ratios stay those to the sampler"
    assert [(batch is filled[0], scores is own) for batch, scores in updated.scored] == [(True, True)]


@pytest.mark.parametrize(
    ("changes", "scored"),
    [
        ({}, range(1, 4)),
        ({"reference": config.Reference(loss=kl.token_kl)}, range(1, 4)),
        ({"regularizers": config.Regularizers(router_z=0.1, entropy=0.1)}, range(1, 4)),
        ({"reference": config.Reference(reward=kl.k1)}, range(4)),
        ({"calibration": config.Calibration()}, range(4)),
        ({"routing_replay": "old"}, range(4)),
        ({"routing_replay": "sampler"}, range(1, 4)),
        ({"router_shift": config.RouterShift()}, range(4)),
        ({"router_shift": config.RouterShift(), "routing_replay": "sampler"}, range(4)),
        ({"old_logp": "sampler", "reference": config.Reference(reward=kl.k1)}, range(0)),
        ({"regularizers": config.Regularizers(load_balance=0.1)}, range(4)),
    ],
)
def test_what_needs_old_log_probs_before_the_first_update(changes, scored):
    schedule = replace(experiment.schedule, minibatches=4)
    variant = replace(experiment, schedule=schedule, **changes)
    assert make_steps(variant, optax.sgd(1.0), make_mesh(config.Mesh(), jax.devices()[:1])).scored == scored


def test_score_and_update_share_temperature_and_microbatches(monkeypatch):
    given = []
    for name in ("make_update", "make_score"):
        monkeypatch.setattr(updates, name, lambda settings, *args, **kwargs: given.append(settings))
    runtime = make_runtime(
        replace(with_schedule(microbatch_rows=8), sampling=replace(experiment.sampling, temperature=0.7))
    )
    wanted = StepSettings(config=experiment.model, mesh=runtime.mesh, temperature=0.7, microbatch_rows=8)
    assert given == [wanted, wanted] and runtime.mesh.size == jax.device_count()


@pytest.mark.parametrize("warm", [True, False])
def test_a_run_starts_with_the_key_of_its_seed(monkeypatch, tmp_path, warm):
    def update(state, batch):
        return replace(state, step=state.step + 1), {"loss": jnp.float32(1), "skipped": jnp.float32(0)}

    monkeypatch.setattr(warm_start, "make_train_step", lambda *args, **kwargs: update)
    seeded = replace(experiment, seed=3, warm_start=experiment.warm_start if warm else None)
    runtime, run = make_runtime(seeded), open_run(tmp_path / "run", describe(seeded))
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
        state = loop.restore_or_start(runtime, run, checkpoints, Skipped())
    assert state.key == jax.random.key(3)
    assert (state.step, state.position) == (0, 48 if warm else 0)
