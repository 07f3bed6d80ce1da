"""The task of the experiment on a published model, without the model; tests/real has what holds of its weights."""

import json
from dataclasses import replace
from pathlib import Path

import equations
import pytest
from chat_folder import write_folder

from gspax.commands import main as program
from gspax.data import Problem
from gspax.experiment import load, validate
from gspax.hf.config_json import to_json
from gspax.model import presets

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


def test_the_study_of_the_model_is_valid(experiment, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "studies"))
    import common

    common.check_study(common.load_study("real_model"))


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
