"""Runs with a teacher: what it computes, and that they resume with no other."""

import shutil
from dataclasses import dataclass, replace
from functools import partial

import fake_sglang
import fake_vllm
import jax
import numpy as np
import pytest
import small_experiment
from api import RunDir, abstract_params, load_model, loop, record, single_device_mesh
from test_loop import final_state

from gspax import losses
from gspax.config import Sampling, Teacher
from gspax.data.tasks import sort
from gspax.errors import FailureError, UserError
from gspax.experiment import validate
from gspax.hf import hf
from gspax.rollout.servers import scoring
from gspax.training.teaching import score_all

pytestmark = pytest.mark.usefixtures("one_device")

small = replace(
    small_experiment.experiment,
    model=replace(small_experiment.experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=16),
    schedule=replace(small_experiment.experiment.schedule, steps=2, eval_every=0, checkpoint_every=1),
    warm_start=None,
)
wide = replace(
    small, name="wide", model=replace(small.model, hidden_size=48), schedule=replace(small.schedule, steps=1)
)


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    """The directory of a run of a wider model."""
    folder = tmp_path_factory.mktemp("expert") / "run"
    loop.train(wide, folder)
    return folder


def with_answer(problem, completion, feedback):
    """A prompt with what the policy was not told: the answer, and its own completion."""
    return f"{problem.answer}{completion}"[:6] + problem.prompt


@dataclass(frozen=True)
class Taught:
    """Problems of two or three digits, whose teachers differ."""

    inner: sort.Problems

    def train(self, index):
        problem = self.inner.train(index)
        return replace(problem, teacher="long" if len(problem.answer) > 2 else "short")

    def heldout(self, index):
        return self.inner.heldout(index)


def taught_by(folder, **changes):
    """One completion of each prompt, and no reward."""
    return replace(
        small,
        loss=losses.grpo,
        sampling=Sampling(prompts=16, group=1, max_prompt_tokens=4, max_tokens=4),
        teacher=Teacher(model=hf(folder), **changes),
    )


def taught_by_two(folder):
    """Each by its own teacher, which reads the answer before the prompt."""
    model = hf(folder)
    teacher = Teacher(models={"short": model, "long": model}, kept=2, prompt=with_answer, max_prompt_tokens=10)
    schedule = replace(small.schedule, microbatch_tokens=128)
    return replace(taught_by(folder), data=Taught(small.data), teacher=teacher, schedule=schedule)


def train_steps(experiment, folder, steps):
    loop.train(replace(experiment, schedule=replace(experiment.schedule, steps=steps)), folder)
    return RunDir(folder)


def learned(run):
    """The metrics of updates, by step."""
    wanted = "policy/", "optim/"
    rows = [{name: x for name, x in row.items() if name.startswith(wanted)} for row in record.read_metrics(run.metrics)]
    return [row for row in rows if row]


def test_a_run_resumes_only_with_its_teacher(expert, tmp_path):
    """That it has the same bits then is a row of `faults/test_table.py`."""
    teacher = tmp_path / "teacher"
    shutil.copytree(expert, teacher)
    experiment = taught_by_two(teacher)
    assert len(learned(train_steps(experiment, tmp_path / "run", 1))) == 1
    shutil.rmtree(teacher)
    loop.train(replace(wide, seed=1), teacher)
    with pytest.raises(UserError, match=r"teacher.model: wanted the parameters that the run was trained with \(finger"):
        train_steps(experiment, tmp_path / "run", 2)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_teacher_that_follows_the_policy_is_in_the_state(tmp_path, share):
    """It is the policy at the start, then moves after every second step, and a resumed run continues with it."""
    teacher = Teacher(refresh_every=2, refresh_share=share, coefficient=0.1)
    experiment = replace(small, loss=losses.grpo, teacher=teacher)
    whole = train_steps(experiment, tmp_path / "whole", 3)
    for steps in (1, 2):
        halves = train_steps(experiment, tmp_path / "halves", steps)
    states = {step: final_state(halves, step, experiment) for step in (1, 2)}
    start = states[1].teacher
    assert not np.array_equal(start["embedding"], states[1].params["embedding"])
    moved = jax.tree.map(lambda old, new: old + share * (new - old), start, states[2].params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), states[2].teacher, moved)
    halves = train_steps(experiment, tmp_path / "halves", 3)
    jax.tree.map(np.testing.assert_array_equal, *(final_state(run, experiment=experiment) for run in (halves, whole)))
    first, second, _ = learned(whole)
    assert first["policy/teacher_kl"] < second["policy/teacher_kl"] and learned(halves) == learned(whole)


def test_the_same_prompt_in_rows_of_their_own_is_the_same_lesson(expert, tmp_path):
    """Every response, in packed rows of the teacher's or in those of the policy; other prompts give another KL."""
    kl = {}
    for name, prompt in {"own": None, "same": lambda problem, *_: problem.prompt, "other": with_answer}.items():
        teacher = {"prompt": prompt, "max_prompt_tokens": 0 if prompt is None else 10}
        kl[name] = [
            row["policy/teacher_kl"] for row in learned(train_steps(taught_by(expert, **teacher), tmp_path / name, 1))
        ]
    np.testing.assert_allclose(kl["same"], kl["own"], rtol=1e-4)
    assert not np.allclose(kl["other"], kl["own"], rtol=1e-2)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (fake_vllm.Fake, {}),
        pytest.param(fake_sglang.FakeSGLang, {}, marks=pytest.mark.slow),
        pytest.param(fake_vllm.Fake, {"as_advantage": True}, marks=pytest.mark.slow),
        pytest.param(fake_vllm.Fake, {"prompt": with_answer, "max_prompt_tokens": 10}, marks=pytest.mark.slow),
    ],
    ids=["vllm", "sglang", "advantage", "prompt"],
)
def test_servers_teach_what_the_checkpoint_teaches(expert, tmp_path, kind, form):
    model = hf(expert)
    experiment = replace(taught_by(expert, **form), schedule=replace(small.schedule, microbatch_tokens=64))
    with fake_vllm.serve(model, kind) as server, fake_vllm.serve(model, kind) as gone:
        server.params = load_model(model, abstract_params(model, single_device_mesh()))
        gone.faults.dies_after, gone.completions = 1, 1
        score = partial(
            scoring.score,
            addresses=(gone.address, server.address),
            server="sglang" if kind is fake_sglang.FakeSGLang else "vllm",
        )
        asked = replace(experiment, teacher=replace(experiment.teacher, model=None, score=score))
        assert validate(asked) == []
        theirs = learned(train_steps(asked, tmp_path / "served", 2))
    ours = learned(train_steps(experiment, tmp_path / "own", 2))
    assert [row.keys() for row in theirs] == [row.keys() for row in ours] and ours[0]["policy/teacher_kl"] > 0
    for one, other in zip(theirs, ours, strict=True):
        np.testing.assert_allclose([*one.values()], [*other.values()], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("logps", [[-1.0], [-1.0, float("nan")], [-1.0, 0.5], [[-1.0, -1.0]]], ids=str)
def test_log_probs_that_cannot_be_right_end_the_run(logps):
    with pytest.raises(FailureError, match=r"teacher\.score: wanted 2 log-probs of at most 0, got "):
        score_all(lambda sequences: [logps], [[3], [1, 2, 3]])


@pytest.mark.parametrize("answers", [[], [[-1.0], [-1.0]]], ids=["too few", "too many"])
def test_a_teacher_answers_for_each_sequence(answers):
    with pytest.raises(FailureError, match=rf"teacher\.score: .* of 1 sequences, got those of {len(answers)}"):
        score_all(lambda sequences: answers, [[3], [1, 2]])


def test_servers_that_are_gone_are_one_sentence():
    with pytest.raises(
        FailureError, match=r"teacher\.score: no server for 0.1 seconds \(timeout\): http://127.0.0.1:9 is"
    ):
        scoring.score([[1, 2]], addresses=("http://127.0.0.1:9",), timeout=0.1)


@pytest.mark.parametrize(
    ("changes", "temperature", "sentence"),
    [
        ({"kept": 3}, 1.0, "teacher.kept: wanted 0 beside teacher.score, got 3"),
        ({"model": small.model}, 1.0, "teacher.model: wanted null beside teacher.score, got a ModelConfig"),
        ({}, 0.5, "sampling.temperature: wanted 1 with teacher.score, whose log-probs are at 1, got 0.5"),
    ],
    ids=["kept", "model", "temperature"],
)
def test_a_function_that_scores_is_the_whole_teacher(changes, temperature, sentence):
    teacher = Teacher(score=partial(scoring.score, addresses=("http://127.0.0.1:9",)), **changes)
    sampling = replace(small.sampling, temperature=temperature)
    assert any(problem.startswith(sentence) for problem in validate(replace(small, teacher=teacher, sampling=sampling)))
