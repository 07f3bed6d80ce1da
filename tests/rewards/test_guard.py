"""`guard`: rewards that fail."""

import pickle
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import guard as module
from gspax.rewards.guard import guard
from gspax.rewards.scores import Result, to_result
from gspax.rewards.workers import pool as workers

REWARDS = """
import os, time
from gspax.errors import UserError
from gspax.rewards.scores import Score
def score(problem, completion, *, scale=1):
    print("noise")
    if completion == "raise":
        raise ValueError("no such unit")
    if completion == "hang":
        time.sleep(60)
    if completion == "die":
        os._exit(1)
    if completion == "graded":
        return Score(0.5, "half")
    if completion == "failed":
        return Score(0.25, error="no judge")
    if completion == "parts":
        return Score(0.5, "half", parts={"a": 2})
    if completion == "named":
        return {"b": Score(1, "whole"), "a": 0.5}
    if completion == "several":
        return 1, Score(0.5, "half")
    if completion == "nothing":
        return None
    if completion == "refused":
        raise UserError("score: wanted a judge")
    if completion == "platform":
        return os.environ["JAX_PLATFORMS"] == "cpu"
    return scale * (float(completion) if completion in ("nan", "inf") else len(problem.answer + completion))
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_the_test.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import rewards_of_the_test

        yield rewards_of_the_test


@pytest.fixture
def tally(monkeypatch):
    monkeypatch.setattr(module._tally, "_counts", Counter())


def test_rewards_that_do_not_fail_are_unchanged(rewards, tally):
    reward = partial(guard, reward=partial(rewards.score, scale=2))
    assert reward(Problem("?", "12"), "345").value == 10.0
    assert module.counts() == {"done": 1}
    assert pickle.loads(pickle.dumps(reward))(Problem("?", "12"), "3").value == 6.0


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("raise", "raised"),
        ("hang", "late"),
        ("die", "crashed"),
        ("nan", "no number"),
        ("inf", "no number"),
        ("nothing", "no number"),
    ],
)
def test_a_failure_gives_the_failure_value_to_that_sample_only(rewards, tally, completion, outcome):
    reward = partial(guard, reward=rewards.score, failed=-1.0)
    assert reward(Problem("?", ""), "ok").value == 2.0
    began = time.monotonic()
    value = reward(Problem("?", ""), completion, timeout=0.5)
    assert value.value == -1.0 and value.error.startswith(outcome)
    assert time.monotonic() - began < 10
    assert reward(Problem("?", ""), "ok").value == 2.0
    assert module.counts() == {"done": 2, outcome: 1}


def test_an_exception_names_the_line_of_the_users_function(rewards, tally):
    (found,) = [number for number, line in enumerate(REWARDS.split("\n"), 1) if "no such unit" in line]
    score = guard(Problem("?", ""), "raise", reward=rewards.score)
    assert score.error == f"raised: ValueError: no such unit ({rewards.__file__}:{found})"


def test_reasons_and_failures_of_the_function_itself_come_through(rewards, tally):
    reward = partial(guard, reward=rewards.score)
    assert to_result(reward(Problem("?", ""), "graded")) == Result((0.5,), reason="half")
    assert to_result(reward(Problem("?", ""), "failed")) == Result((0.25,), "no judge")
    assert module.counts() == {"done": 2}


@pytest.mark.parametrize("completion", ["parts", "named", "several", "graded", "failed", "ok"])
def test_a_guarded_reward_gives_what_it_gives_unguarded(rewards, tally, completion):
    problem = Problem("?", "12")
    assert to_result(guard(problem, completion, reward=rewards.score)) == to_result(rewards.score(problem, completion))
    assert module.counts() == {"done": 1}


def test_a_wrong_setting_in_a_guarded_reward_stops_the_run(rewards, tally):
    with pytest.raises(UserError, match=r"^score: wanted a judge$"):
        guard(Problem("?", ""), "refused", reward=rewards.score)


def test_the_reward_process_uses_no_accelerator(rewards, tally):
    assert guard(Problem("?", ""), "platform", reward=rewards.score).value == 1.0


def test_a_reward_that_cannot_be_pickled_or_imported_is_rejected(rewards):
    with pytest.raises(UserError, match="reward: wanted a function that can be pickled, got <function"):
        guard(Problem("?", ""), "", reward=lambda problem, completion: 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [path for path in sys.path if path != str(Path(rewards.__file__).parent)])
        with pytest.raises(UserError, match=r"wanted a function that a new process can import, .* ModuleNotFoundError"):
            guard(Problem("?", ""), "", reward=rewards.score, workers=1)  # has not imported it yet
    workers.shared("guard", workers=1).close()


def test_an_experiment_describes_the_guarded_reward(rewards):
    described = describe(partial(guard, reward=rewards.score))
    assert described["function"] == "gspax.rewards.guard.guard"
    assert described["reward"]["function"] == "rewards_of_the_test.score"
    assert described["reward"]["scale"] == 1
