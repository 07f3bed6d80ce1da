"""The built-in rewards in an experiment."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gspax import experiment as experiments
from gspax.experiment.description import describe
from gspax.rewards import code, format, length, math
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
