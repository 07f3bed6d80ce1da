"""The built-in rewards in an experiment."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gspax import experiment as experiments
from gspax import rewards
from gspax.config import Evaluation, Grading, Task
from gspax.data import reward_answer
from gspax.experiment import describe
from gspax.rewards import code, format, length, math
from gspax.rewards.calls import Batched
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.guard import guard

ROOT = Path(__file__).parents[2]
SEVERAL = {"answer": math.reward, "format": format.match_tags}


@pytest.mark.parametrize(
    "reward",
    [
        math.reward,
        partial(math.reward, form="boxed", timeout=2.0),
        partial(code.reward, allow_code_execution=True, limits=code.Limits(timeout=2.0)),
        partial(format.match, pattern=".*"),
        partial(length.within, at_most=10),
        partial(combine, rewards=SEVERAL),
        partial(weighted_sum, rewards=SEVERAL, weights={"format": 0.1}),
        partial(guard, reward=math.reward),
    ],
)
def test_an_experiment_with_each_reward_is_valid_and_described(reward):
    experiment = replace(experiments.load(ROOT / "experiments" / "sort_gspo.py"), reward=reward)
    assert experiments.validate(experiment) == []
    assert "0x" not in str(describe(experiment))


async def ask(problem, completion):
    return 1.0


@pytest.mark.parametrize(
    ("reward", "composition"),
    [
        (partial(combine, rewards={"answer": math.reward, "judge": ask}), "gspax.rewards.combination.combine"),
        (
            partial(reward_answer, reward=partial(weighted_sum, rewards={"judge": partial(ask)})),
            "gspax.rewards.combination.weighted_sum",
        ),
        (partial(reward_answer, reward=Batched(ask)), "gspax.data.reward_answer"),
        (partial(guard, reward=ask), "gspax.rewards.guard.guard"),
    ],
)
def test_an_async_reward_inside_another_one_is_refused(reward, composition):
    experiment = experiments.load(ROOT / "experiments" / "sort_gspo.py")
    sentence = f"wanted plain functions inside {composition}, got the async"
    (found,) = experiments.validate(replace(experiment, reward=reward))
    assert found == f"reward: {sentence} {__name__}.ask"
    task = Task(name="own", data=experiment.data, problems=2, reward=reward)
    (found,) = experiments.validate(replace(experiment, evaluation=Evaluation(tasks=(task,))))
    assert found == f"evaluation.tasks.own.reward: {sentence} {__name__}.ask"
    assert experiments.validate(replace(experiment, reward=ask)) == []


@pytest.mark.parametrize("concurrency", [-1, 1025, 100_000_000])
def test_threads_are_bounded(concurrency):
    experiment = experiments.load(ROOT / "experiments" / "sort_gspo.py")
    (found,) = experiments.validate(replace(experiment, grading=Grading(concurrency=concurrency)))
    assert found.startswith("grading.concurrency: wanted at ") and found.endswith(f", got {concurrency}")


def test_modules_are_attributes_of_the_package():
    """In a process in which no other module has imported them."""
    code = "from gspax import rewards; print(rewards.format.__name__, hasattr(rewards, 'maths'))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "gspax.rewards.format False\n"
    assert all(getattr(rewards, name).__name__ == f"gspax.rewards.{name}" for name in rewards._MODULES)
