"""The word problems are right, split by type and by prompt, and transformers reads their tokenizer."""

import re
from collections import Counter
from pathlib import Path

import equations
import numpy as np
import pytest
import word_problems
from api import main as program
from word_problems import Problems, types

from gspax.data import hf_tokenizer
from gspax.experiment import load, override, validate
from gspax.rewards import math

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

FAMILIAR, NEW = Problems(), Problems(kind="new", min_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("word_problems") / "tokenizer"
    word_problems.train_tokenizer(folder)
    return folder


@pytest.mark.parametrize("source", [FAMILIAR, NEW], ids=["familiar", "new"])
def test_every_calculation_of_a_solution_is_right(source):
    for problem in map(source.train, range(200)):
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)\.", problem.answer)
        assert problem.answer == "".join(f" {a}{sign}{b}={c}." for a, sign, b, c in steps) + f" #### {steps[-1][3]}"
        for a, sign, b, c in steps:
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
            assert int(c) == exact and 0 < exact <= word_problems.LARGEST
        assert all(b in problem.prompt for _, sign, b, _ in steps if sign in "+-")
        assert math.reward(problem, problem.answer, form="hash").value == 1.0
        assert math.reward(problem, problem.answer + "1", form="hash").value == 0.0


def test_no_new_type_is_familiar_and_all_are_drawn():
    assert [len(types(steps, "familiar")) for steps in (1, 2, 3)] == [4, 16, 44]
    assert len(types(3, "new")) == 20 and not types(2, "new")
    drawn = [Counter(source.train(i).task for i in range(1500)) for source in (FAMILIAR, NEW)]
    for kind, source in zip(("familiar", "new"), drawn, strict=True):
        assert set(source) == {"-".join(each) for steps in (1, 2, 3) for each in types(steps, kind)}


def test_of_the_demonstrations_most_are_short_and_a_quarter_of_the_others_has_one_slip():
    short = wrong = 0
    for i, problem in enumerate(map(FAMILIAR.train, range(400))):
        demonstration = word_problems.mostly_short(problem, np.random.default_rng(i))
        assert demonstration == word_problems.mostly_short(problem, np.random.default_rng(i))
        steps = [each.split("=") for each in re.findall(r"[^ .]+=\d+", demonstration)]
        if not steps:
            assert problem.answer.endswith(demonstration) and demonstration.startswith(" #### ")
            short += 1
            continue
        slips = [int(result) - eval(calculation.replace("/", "//")) for calculation, result in steps]
        assert demonstration.endswith(f" #### {steps[-1][1]}") and sum(map(bool, slips)) <= 1 and abs(sum(slips)) <= 2
        wrong += any(slips)
    assert 210 < short < 270 and 25 < wrong < 55
    assert word_problems.solve(4, [("find", 6), ("double", 2)], 0, -1) == " 4+6=9. 9*2=18. #### 18"


def test_heldout_prompts_are_not_trained_on():
    heldout = {FAMILIAR.heldout(i).prompt for i in range(256)}
    assert len(heldout) == 256
    assert not heldout & {FAMILIAR.train(i).prompt for i in range(500)}
    assert Problems(seed=1).heldout(3) == FAMILIAR.heldout(3) and Problems(seed=1).train(3) != FAMILIAR.train(3)


@pytest.mark.parametrize(
    "wrong", [{"min_steps": 0}, {"max_steps": 4}, {"kind": "new"}, {"min_steps": 3, "max_steps": 2}]
)
def test_steps_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="min_steps <= max_steps <= 3"):
        Problems(**wrong)


def test_the_tokenizer_restores_texts_and_splits_numbers_into_digits(folder):
    tokenizer = hf_tokenizer(folder)
    assert tokenizer.vocab_size <= word_problems.VOCABULARY and tokenizer.stop_ids == (0,)
    for text in [*word_problems.texts(50), "Ümit has 12 €.\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    one, two = (tokenizer.encode(text) for text in ("Mia has 7 books.", "Mia has 77 books."))
    assert len(two) == len(one) + 1 < 10


def test_the_experiments_are_valid_and_their_lengths_suffice(folder):
    for name in ("word_problems_sft", "word_problems_gspo"):
        experiment = override(load(EXPERIMENTS / f"{name}.py"), [f"tokenizer.path={folder}", "model.checkpoint="])
        assert validate(experiment) == []
        equations.compare(experiment)
        encode, sampling = experiment.tokenizer.encode, experiment.sampling
        for problem in map(experiment.data.train, range(200)):
            assert len(encode(problem.prompt)) <= sampling.max_prompt_tokens
            assert len(encode(problem.answer)) < sampling.max_tokens


# Small, but with the checkpoint, the tokenizer and the tasks of the recipe.
TINY = ["sampling.prompts=4", "sampling.group=2", "schedule.steps=1", "schedule.minibatches=1", "evaluation.problems=4"]


@pytest.mark.slow
def test_the_recipe_of_the_experiments_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "word_problems").mkdir(parents=True)
    folder.rename(tmp_path / "runs" / "word_problems" / "tokenizer")
    lines = (EXPERIMENTS / "word_problems_gspo.py").read_text() + (EXPERIMENTS / "word_problems_sft.py").read_text()
    sft, export, train = (re.search(rf"gspax ({name} .*)", lines)[1].split() for name in ("sft", "export", "train"))
    sft[1], train[1] = (str(EXPERIMENTS.parent / command[1]) for command in (sft, train))
    assert program.main([*sft, "warm_start.steps=2"]) == 0
    assert program.main(export) == 0
    assert program.main([*train, *TINY]) == 0
    evaluated = tmp_path / "runs" / "word_problems" / "gspo" / "evaluations" / "step_000001"
    assert {path.stem for path in evaluated.glob("*.json")} == {"new_types", "familiar_types"}
