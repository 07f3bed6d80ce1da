"""The task of the experiment on a published model, without the model; tests/real has what holds of its weights."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import equations
import pytest
from api import main as program
from api import presets, to_json
from chat_folder import write_folder

from gspax.data import Problem
from gspax.experiment import load, validate

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "smollm2_constraints.py"


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The experiment, with a small model in the place of the published one."""
    folder = tmp_path / ".cache" / "smollm2"
    folder.mkdir(parents=True)
    write_folder(folder)
    (folder / "config.json").write_text(json.dumps(to_json(replace(presets.tiny_moe, vocab_size=262))))
    monkeypatch.chdir(tmp_path)
    return load(FILE)


def test_the_experiment_is_valid_and_holds_pairs_out(experiment):
    assert validate(experiment) == []
    equations.compare(experiment)
    trained, heldout = (
        [split(index) for index in range(200)] for split in (experiment.data.train, experiment.data.heldout)
    )
    pairs = [{tuple(kind for kind, _ in each.metadata["wanted"]) for each in split} for split in (trained, heldout)]
    assert pairs == [{(0, 1), (0, 3), (1, 2), (2, 3)}, {(0, 2), (1, 3)}]
    assert trained[0].prompt.startswith("Write one sentence about ") and trained[0] == experiment.data.train(0)


@pytest.mark.parametrize(
    ("wanted", "completion", "kept"),
    [
        ([(0, "Today"), (2, "an exclamation")], " Today it rains! ", 1.0),
        ([(0, "Today"), (2, "an exclamation")], "It rains today!", 0.5),
        ([(0, "My"), (2, "a question")], "Is it my rain?", 0.5),
        ([(0, "My"), (2, "a question")], "The rain is mine.", 0.0),
        ([(1, "old"), (3, "eight")], "An OLD tree stands.", 1.0),
        ([(1, "old"), (3, "eight")], "A golden tree stands, and we told a tale.", 0.0),
        ([(1, "old"), (3, "eight")], "Old tree", 0.0),  # too short for a sentence
        ([(1, "old"), (3, "eight")], "", 0.0),
    ],
)
def test_the_reward_is_the_share_of_instructions_that_are_kept(wanted, completion, kept, experiment):
    assert experiment.reward(Problem(prompt="", metadata={"wanted": wanted}), completion) == kept


@pytest.mark.parametrize("name", ["real_model", "real_masks"])
def test_the_studies_of_the_model_are_valid(name, experiment, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "studies"))
    import common

    common.check_study(common.load_study(name))


@pytest.mark.parametrize(
    ("kind", "completion", "kept"),
    [
        (0, "it rains today", 1.0),
        (0, "It rains today", 0.0),
        (1, "IT RAINS TODAY.", 1.0),
        (2, ' "It rains today." ', 1.0),
        (2, '"It rains" today.', 0.0),
        (3, "It rains. Z", 0.0),
        (4, "one " * 15, 1.0),
        (4, "one " * 14, 0.0),
        (5, "Today, it rains.", 1.0),
        (5, ",", 0.0),  # too short for a sentence
    ],
)
def test_an_instruction_that_is_not_trained_is_checked(kind, completion, kept, experiment):
    task = load(ROOT / "experiments" / "studies" / "real_model" / "experiment.py").evaluation.tasks[0]
    problem = task.data.heldout(8 * kind)
    assert problem.metadata == {"kind": kind} and task.reward(problem, completion) == kept


def test_without_the_model_a_dry_run_names_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(["train", str(FILE), "--dry-run"]) == 2
    assert ".cache/smollm2: wanted the folder of a checkpoint" in capsys.readouterr().err


@pytest.fixture
def clone(tmp_path):
    """The Makefile, with an environment whose programs write down that they were called and do what a file says."""
    for name in ("Makefile", "requirements.txt", "requirements-real.txt", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "gspax"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> called\n. ./{name}.sh\n')
        (programs / name).chmod(0o755)
        (tmp_path / f"{name}.sh").touch()
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def make_real(clone):
    """The exit code, the lines of standard error, and the programs that were called."""
    (clone / "called").write_text("")
    done = subprocess.run(["make", "real"], cwd=clone, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()[:-1], (clone / "called").read_text().splitlines()


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("No matching distribution found (from versions: none)", ["without a network pip finds no package"]),
        ("THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", []),
    ],
)
def test_weights_that_are_not_fetched_are_one_sentence_and_leave_nothing(said, hint, clone):
    (clone / "python.sh").write_text(f"echo 'ERROR: {said}'; echo ' Got abc'; exit 1\n")
    code, errors, called = make_real(clone)
    sentence = f"requirements-real.txt was not installed: ERROR: {said} (see .venv/pip.log)"
    assert (code, errors, len(called)) == (2, [sentence, *hint], 1) and "--require-hashes" in called[0]
    assert not (clone / ".venv" / "real").exists() and not (clone / ".cache").exists()


def test_weights_that_are_not_converted_are_not_fetched_again(clone):
    (clone / "gspax.sh").write_text("mkdir .cache/.smollm2-x; echo 'gspax: the disk is full' >&2; exit 1\n")
    code, errors, called = make_real(clone)
    assert (code, errors) == (2, ["gspax: the disk is full"])
    assert [line.split()[0] for line in called] == ["python", "gspax"]
    (clone / "gspax.sh").write_text(
        "ls -A .cache >> called; mkdir -p .cache/smollm2; touch .cache/smollm2/config.json\n"
    )
    code, errors, called = make_real(clone)
    assert (code, [line.split()[:2] for line in called]) == (0, [["gspax", "convert"], ["gspax", "train"], ["smollm2"]])
