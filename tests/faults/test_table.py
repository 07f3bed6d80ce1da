"""The table of features x faults: a run that is killed, ended by a signal, or moved is the run that was not.

A row is a feature; what it keeps beside the parameters is at stake. The columns:

- *killed early*: what a kill in the warm start or the first two steps leaves is copied, and begins again there.
- *killed*: what a kill in the third or fourth step leaves is copied, and goes on in this other folder.
- *SIGTERM early*: the signal comes in the warm start, which is saved, or in the first step, of which nothing is.
- *SIGTERM*: the signal comes in the fourth step, so the third is saved, which no schedule asked for. Then it goes on.
- *bucket*: what a kill leaves is copied to a bucket, and goes on there.
- *more devices*: what a kill leaves goes on with twice the learner's devices, which round otherwise.
- *other settings*: what a kill leaves goes on with others of those that a resumed run may change.
- *gone back*: the run diverges in its third step, and goes back to its start with other problems. It is the run that is
  killed there and goes on in a new process.

Other files hold these cells:

- a plain run killed by SIGKILL at any moment: test_kills.py; in a bucket at any request: test_bucket_faults.py
- one of several processes killed: test_killed_hosts.py, in a bucket test_bucket_faults.py
- several processes ended by a signal, or continued by fewer, with a reference, a clip range, and routing:
  parallel/test_processes.py
- the server dies, not the run: rollout/test_server_faults.py; real servers: release/test_vllm.py

No test holds these:

- several processes x most rows: a run of processes takes a minute. Each row's state goes through the same checkpoint.
- a wrong server that was set aside: a new process trusts it again until it is wrong again, as `engine/set_aside` shows.
- samples of real servers, which differ from one start to the next.
- SIGTERM in a chunk of the sampler or a request of an agent: nothing is written there, as at the begin of sampling.

The moment depends on the names of row and column, and on FAULTS_SEED. A cell promises the bits of the whole run, one of
*more devices* its choices and nearly its numbers, unless the row says otherwise.
"""

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_sglang
import fake_vllm
import jax
import numpy as np
import phases
import pytest
import runs
from api import Interrupted, finished_steps, loop, named_leaves, open_array, transformer, write_checkpoint
from few_devices import few_devices
from pair_options import OPTIONS, chat, combined, device_count, length, small
from phases import Moment
from small_experiment import Spoiled
from sorting_agent import solve

from gspax.config import Collapse, Diagnostics, Engine, Guard, Lora, PartialRollouts, Router, Teacher
from gspax.data.tasks import sort
from gspax.errors import DivergedError
from gspax.experiment import validate
from gspax.hf import hf
from gspax.rewards.environments import Agent
from gspax.storage.paths import to_path
from gspax.training.run_guard import RunGuard

SEED = os.environ.get("FAULTS_SEED", "0")
STEPS, SAVED = 4, 2
PHASES = "sampling", "grading", "computing log-probs", "updating"  # of every step
EARLY, KILLED, FIRST, SIGTERM, BUCKET = "killed early", "killed", "SIGTERM early", "SIGTERM", "bucket"
DEVICES, SETTING, BACK = "more devices", "other settings", "gone back"
COLUMNS = EARLY, KILLED, FIRST, SIGTERM, BUCKET, DEVICES, SETTING, BACK


@dataclass(frozen=True)
class Row:
    """A feature.

    Attributes:
      names: settings of `SETTINGS`.
      shows: what a metric is in the steps, if these settings are at work.
      changes: further fields of the experiment, or a function that writes its files and returns them.
      server: the kind of server that samples.
      other: why a cell promises other samples, by column.
      empty: why there is no cell, by column.
    """

    names: list[str]
    shows: dict[str, Callable[[list[float]], bool]]
    changes: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    server: type | None = None
    other: dict[str, str] = field(default_factory=dict)
    empty: dict[str, str] = field(default_factory=dict)


def grows(values):
    return values[0] < 1e-9 < values[1] < values[-1]


def is_carried(values):
    return values == [2, 0, 2, 0]  # nothing passes a checkpoint


class Few(sort.Problems):
    """Eight problems, again and again."""

    def train(self, index):
        return super().train(index % 8)


@dataclass(frozen=True)
class Taught:
    """Problems of two or three digits, whose teachers differ."""

    inner: Any

    def train(self, index):
        problem = self.inner.train(index)
        return replace(problem, teacher="long" if len(problem.answer) > 2 else "short")

    def heldout(self, index):
        return self.inner.heldout(index)


def with_answer(problem, completion, feedback):
    return f"{problem.answer}{completion}"[:6] + problem.prompt


def two_teachers():
    """Each of its own files, with a prompt of its own."""
    models = {}
    for number, name in enumerate(("short", "long")):
        model = replace(combined(["dense"]).model, hidden_size=48)
        params = named_leaves(transformer.init(model, jax.random.key(number)))
        Path(name).mkdir()
        write_checkpoint(Path(name), model, params.__getitem__, dtype="float32")
        models[name] = hf(name)
    return Teacher(models=models, kept=2, prompt=with_answer, max_prompt_tokens=10)


PARTIAL = {"rollout/carried": is_carried, "rollout/staleness_max": lambda ages: ages[::2] == [0, 0] and max(ages) == 1}
AHEAD = {SIGTERM: "what was sampled ahead is sampled again with newer parameters"}
SERVED = Engine(folder="weights", timeout=30.0, probes=2)
PARTLY_SERVED = replace(SERVED, staleness=2, partial=PartialRollouts(carried=2))
SETTINGS = OPTIONS | {
    "lora of deltas": {"lora": Lora(rank=2, delta=True)},
    "repeated": {"data": Few(min_digits=2, max_digits=3), "sampling": {"temperature": 0.3}},
    "agents": chat(lambda: Agent(run=solve), limit=3),
    "router": {"model": {"router": Router()}},
    "recorded": {"schedule": {"record_rollouts": True}},
    "served": {"engine": SERVED},
    "served ahead": {"engine": replace(SERVED, staleness=1)},
    "served partly": {"engine": PARTLY_SERVED, "sampling": {"chunk": 2}},
}
LASTING = Guard(max_truncated=0.0, collapse=Collapse(alarms=("length",), steps=STEPS, action="warn"))
SPOILED = Spoiled(small.data, raising=(3, 9), too_long=(12,))
SKIPPED = Spoiled(small.data, raising=(2, 18), too_long=(27,))  # the first in the warm start
IS_SAMPLED = {"rollout/staleness": lambda ages: ages == [0, 1, 0, 1]}
ROWS = {
    "plain": Row(["dense", "evaluated"], {"policy/loss": any}),
    "sampling masks": Row(
        ["dense", "mask_replay", "loss=grpo", "mesh of fsdp"],
        {"sampling/mask_size": lambda sizes: min(sizes) > 1},
        empty={DEVICES: "its mesh names its devices, and a resumed run may not change it"},
    ),
    "adapters, packed epochs": Row(
        ["dense", "lora", "kl of GRPO", "packed", "epochs"],
        {"reference/kl": grows, "learner/packing_efficiency": lambda share: 0.5 < min(share) <= max(share) <= 1},
    ),
    "routing, a clip range, refills": Row(
        ["replay=old", "calibration", "kl in the loss", "max_refills"],
        {
            "reference/kl": grows,
            "policy/clip_low": lambda low: len({*low}) > 1,
            "sampling/prompts": lambda count: max(count) > 4,
        },
    ),
    "balanced experts": Row(["balancing", "adaptive entropy", "warm start"], {"policy/entropy": all}),
    "turns": Row(["dense", "environment, by turn", "warm start", "evaluated"], {"rollout/turns": all}),
    "drafts": Row(
        ["dense", "drafts in all passes", "repeated"], {"sampling/tokens_per_pass": lambda n: max(n[:2]) < min(n[2:])}
    ),
    "agents": Row(["dense", "agents"], {"rollout/turns": all}),
    "unusable problems": Row(
        ["dense", "warm start"],
        {"data/skipped": lambda count: count == [0, 1, 0, 1]},
        {"data": SKIPPED, "warm_start": replace(small.warm_start, steps=3, rows=4)},
    ),
    "two teachers of their own files": Row(
        ["dense", "packed"], {"policy/teacher_kl": all}, lambda: {"data": Taught(small.data), "teacher": two_teachers()}
    ),
    "stale": Row(["dense", "stale", "loss=grpo"], IS_SAMPLED, other=AHEAD),
    "centered scores, stale": Row(
        ["dense", "stale", "loss=grpo", "old_logp=sampler"], IS_SAMPLED, {"center_scores": True}, other=AHEAD
    ),
    "an alarm that lasts": Row(
        ["dense", "evaluated"], {"alarm/collapse": lambda on: on == [0, 0, 0, 1]}, {"guard": LASTING}
    ),
    "recorded rollouts, tasks": Row(["dense", "recorded", "task", "evaluated", "diagnostics"], {"policy/loss": any}),
    "parameters in bfloat16, a schedule": Row(
        ["dense", "muon", "bfloat16 parameters", "linear"], {"optim/learning_rate": lambda rate: len({*rate}) == STEPS}
    ),
    "frozen parameters, offloaded moments": Row(
        ["dense", "frozen", "offload", "kl in the loss"],
        {"reference/kl": grows},
    ),
    "a teacher's kept tokens": Row(["dense", "teacher, kept"], {"policy/teacher_kl": all}),
    "a teacher's advantages": Row(["dense", "teacher, advantage"], {"policy/loss": any}),
    "a teacher's divergence": Row(["dense", "teacher, forward KL", "mixture"], {"policy/loss": any}),
    "partial, conversations": Row(["dense", "partial", "environment, two turns", "slots"], PARTIAL, other=AHEAD),
    "partial, adapters": Row(
        ["dense", "partial", "lora", "bfloat16"],
        PARTIAL,
        other=AHEAD | {DEVICES: "other rounding in bfloat16 samples other tokens"},
    ),
    "partial, unusable problems": Row(
        ["dense", "partial", "window", "slots"],
        PARTIAL | {"data/skipped": lambda count: sum(count) == 3},
        {"data": SPOILED},
        other=AHEAD,
    ),
    "partial, 8 bits": Row(["dense", "partial", "int8 cache", "int8 weights", "slots"], PARTIAL, other=AHEAD),
    "partial, split groups": Row(
        ["dense", "partial, not ahead", "loss=grpo", "old_logp=interpolated", "truncate_tokens"],
        {"rollout/carried": is_carried},
        other=AHEAD,
    ),
    "partial, sets and a selection": Row(
        ["dense", "partial", "mask_replay", "clip_cov", "loss=grpo", "slots"], PARTIAL, other=AHEAD
    ),
    "partial, states": Row(["dense", "partial", "delta net", "lora of deltas", "slots"], PARTIAL, other=AHEAD),
    "vLLM": Row(
        ["served", "router", "replay=sampler", "max_refills", "evaluated"],
        {"engine/push_bytes": all},
        server=fake_vllm.Fake,
    ),
    "SGLang, stale": Row(["dense", "served ahead"], IS_SAMPLED, server=fake_sglang.FakeSGLang, other=AHEAD),
    "vLLM, partial": Row(["dense", "served partly"], PARTIAL, server=fake_vllm.Fake, other=AHEAD),
    "vLLM, partial, conversations": Row(
        ["dense", "served partly", "environment, two turns"], PARTIAL, server=fake_vllm.Fake, other=AHEAD
    ),
}


def draw(name, column, moments):
    """The moment of a cell."""
    return random.Random(f"{name} {column} {SEED}").choice(moments)


class Whole:
    """A run to which nothing happens, and what a kill would leave of it."""

    def __init__(self, name, folder, server):
        """Train it, in the working directory."""
        self.name, self.row, self.folder, self.path = name, ROWS[name], folder, folder / "whole"
        base = combined(self.row.names, SETTINGS)
        schedule = replace(base.schedule, steps=STEPS, checkpoint_every=SAVED)
        changes = {"reward": length, "schedule": schedule} | (own() if callable(own := self.row.changes) else own)
        if server is not None:
            changes["engine"] = replace(base.engine, server=server.program, addresses=(server.address,))
        self.experiment = replace(base, **changes)
        self.devices = device_count(self.experiment)
        with few_devices(self.devices):
            assert not validate(self.experiment, self.devices)
        early = [Moment(0, "updating")] if base.warm_start else []
        self.leave = {
            EARLY: draw(name, EARLY, [*early, *(Moment(step, phase) for step in (1, 2) for phase in PHASES)]),
            KILLED: draw(name, KILLED, [Moment(step, phase) for step in (3, 4) for phase in PHASES]),
        }
        self.train(self.path, self.copy_at)

    def copy_at(self, moment):
        """Copy what a kill would leave, at two moments."""
        for column, drawn in self.leave.items():
            if moment == drawn and not (self.folder / column).exists():
                while column == KILLED and SAVED not in finished_steps(self.path / "checkpoints"):
                    time.sleep(0.01)  # another thread saves it
                phases.leave(self.path, self.folder / column)

    def train(self, path, act=lambda moment: None, done=0, devices=0, experiment=None):
        """Begin or continue a run."""
        without_report = mock.patch(
            "gspax.training.open_training.run_page", SimpleNamespace(write=lambda workdir: None)
        )
        with few_devices(devices or self.devices), phases.watched(act, done), without_report:
            loop.train(experiment or self.experiment, path, report_to=())

    def after(self, step, name):
        """A copy whose newest checkpoint is that of a step."""
        copy = runs.copy(self.path, self.folder / name)
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(copy / "checkpoints" / str(later), ignore_errors=True)
        return copy

    def steps(self, path):
        """The metrics of the steps of a run."""
        return [row for row in runs.metrics(path) if "policy/loss" in row]


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    folder, row = tmp_path_factory.mktemp("run"), ROWS[request.param]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        server = row.server and stack.enter_context(
            fake_vllm.serve(combined(row.names, SETTINGS).model, row.server, max_tokens=64)
        )
        yield Whole(request.param, folder, server)


def killed_early(whole, server):
    """Parameters that the run has written at its start are there, and no checkpoint."""
    whole.train(whole.folder / EARLY)
    return whole.folder / EARLY


def killed(whole, server):
    whole.train(whole.folder / KILLED)
    return whole.folder / KILLED


def moved_to_a_bucket(whole, server):
    name = f"bucket-{len(server.buckets)}"
    server.buckets[name], server.faults = {}, lambda request: None
    server.copy_from(whole.after(SAVED, "to a bucket"), name, "run")
    whole.train(to_path(f"gs://{name}/run"))
    server.copy_to(name, "run", whole.folder / BUCKET)
    return whole.folder / BUCKET


def ended_early(whole, server):
    """The warm start goes on where it was; nothing is saved of the first step."""
    workdir, experiment = whole.folder / FIRST, whole.experiment
    moments = [Moment(1, phase) for phase in PHASES[:3]]
    if experiment.warm_start:
        moments = [Moment(0, "updating")]
    with pytest.raises(Interrupted):
        whole.train(workdir, phases.once(draw(whole.name, FIRST, moments), phases.terminate))
    assert not finished_steps(workdir / "checkpoints")
    whole.train(workdir)
    return workdir


def ended(whole, server):
    """The signal comes in the fourth step, or at the end of the third, which is saved."""
    workdir, schedule = whole.after(SAVED, SIGTERM), whole.experiment.schedule
    moments = [*(Moment(4, phase) for phase in PHASES[:3]), Moment(3, "updating")]
    if schedule.eval_every == 1:
        moments.append(Moment(3, "evaluating"))
    moment = draw(whole.name, SIGTERM, moments)
    with pytest.raises(Interrupted):
        whole.train(workdir, phases.once(moment, phases.terminate), SAVED)
    assert finished_steps(workdir / "checkpoints")[-1] == 3, moment
    whole.train(workdir)
    return workdir


def on_more_devices(whole, server):
    """A sampler on devices of its own keeps their number."""
    workdir, placement = whole.after(SAVED, DEVICES), whole.experiment.placement
    own = placement.devices if placement else 0
    whole.train(workdir, devices=own + 2 * (whole.devices - own))
    return workdir


def changed(whole, server):
    """No update depends on what a resumed run may change."""
    workdir, run = whole.after(SAVED, SETTING), whole.experiment
    schedule = replace(run.schedule, eval_every=1, record_rollouts=not run.schedule.record_rollouts)
    if not run.staleness:
        schedule = replace(schedule, checkpoint_every=1)
    changes = {"schedule": schedule, "diagnostics": None if run.diagnostics else Diagnostics(every=1)}
    changes["evaluation"] = replace(run.evaluation, problems=3, max_tokens=6)
    if run.engine is not None:
        changes["engine"] = replace(run.engine, folder="others", requests=3)
    whole.train(workdir, experiment=replace(run, **changes))
    return workdir


def gone_back(whole, server):
    """What is in flight then was sampled by parameters that are gone; a new process has nothing in flight."""
    workdir, again, after_step, begun = whole.folder / BACK, whole.folder / "back again", RunGuard.after_step, []
    run = replace(whole.experiment, schedule=replace(whole.experiment.schedule, checkpoint_every=STEPS))

    def diverge(guard, step, result):
        metrics, problem = after_step(guard, step, result)
        if step == 3 and not begun:
            begun.append(step)
            problem = DivergedError("it has diverged", step=step, position=int(result.state.position))
        return metrics, problem

    def kill(moment):
        if begun and not again.exists():
            phases.leave(workdir, again)

    with mock.patch.object(RunGuard, "after_step", diverge):
        whole.train(workdir, kill, experiment=run)
    whole.train(again, experiment=run)
    assert (again / "rollbacks.jsonl").read_text() == (workdir / "rollbacks.jsonl").read_text()
    assert runs.differences(workdir, again, STEPS) == []
    return workdir


CELLS = {
    EARLY: killed_early,
    KILLED: killed,
    FIRST: ended_early,
    SIGTERM: ended,
    BUCKET: moved_to_a_bucket,
    DEVICES: on_more_devices,
    SETTING: changed,
    BACK: gone_back,
}
QUICK = {("plain", column) for column in (KILLED, SIGTERM, DEVICES)}


def cells():
    """The cells of this file; few are in the default tier."""
    for name, row in ROWS.items():
        for column in COLUMNS:
            if column not in row.empty:
                marks = () if (name, column) in QUICK else pytest.mark.slow
                yield pytest.param(name, column, marks=marks, id=f"{name}: {column}")


@pytest.mark.parametrize(("whole", "column"), [*cells()], indirect=["whole"], scope="module")
def test_a_run_is_the_one_that_nothing_happened_to(whole, column, gcs_server):
    rows = whole.steps(whole.path)
    for metric, shows in whole.row.shows.items():
        values = [row[metric] for row in rows]
        assert len(values) == STEPS and shows(values), (metric, values)
    workdir = CELLS[column](whole, gcs_server)
    if column in whole.row.other:
        rows, others = whole.steps(workdir), whole.steps(whole.path)
        same = SAVED if column == DEVICES else SAVED + 1
        assert rows[:same] == others[:same] and [row["step"] for row in rows] == [1, 2, 3, 4]
    elif column == DEVICES:
        check_near(whole, workdir)
    elif column == SETTING:
        assert runs.arrays(workdir, STEPS) == runs.arrays(whole.path, STEPS)
    elif column != BACK:
        assert runs.differences(workdir, whole.path, STEPS) == []
    schedule = whole.experiment.schedule
    updates, position = (open_array(workdir / "checkpoints", STEPS, name, ())[()] for name in ("step", "position"))
    assert updates == schedule.minibatches * schedule.epochs * STEPS
    if column != BACK:
        assert position == open_array(whole.path / "checkpoints", STEPS, "position", ())[()]


def check_near(whole, workdir):
    """The choices are the same, and rewards, losses, and gradients nearly so."""
    rows, others = runs.metrics(workdir), runs.metrics(whole.path)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        for name, value in other.items():
            if name.startswith(("reward/", "response/", "policy/loss", "optim/grad_norm", "eval/")):
                np.testing.assert_allclose(row[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
