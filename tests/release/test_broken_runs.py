"""`gspax diagnose` names what was broken on purpose in a run, and nothing in one that learns."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_experiment
from api import train

from gspax import losses
from gspax.config import Optimizer
from gspax.tools.diagnosis import find_causes, read_record

pytestmark = pytest.mark.usefixtures("one_device")

small = small_experiment.experiment
experiment = replace(
    small,
    model=replace(small.model, num_hidden_layers=1),
    warm_start=replace(small.warm_start, steps=60, rows=64),
    schedule=replace(small.schedule, steps=10, minibatches=2, eval_every=5, checkpoint_every=0),
    sampling=replace(small.sampling, max_tokens=5),
)


def boxed(problem, completion):
    """Expects a box around the answer, which no prompt asks for."""
    return float(completion == rf"\boxed{{{problem.answer}}}")


def wrong_sign(problem, completion):
    return 1.0 - small.reward(problem, completion)


def noise(problem, completion):
    return float(next(COINS))


often = replace(experiment.schedule, eval_every=1)  # so that there are enough recorded completions
COINS = iter(np.random.default_rng(0).integers(0, 2, 10_000))
BROKEN = {
    "": {},
    "The reward's parser never matches": {"reward": boxed},
    "The reward is higher without the answer": {"reward": wrong_sign, "schedule": often},
    "The reward is noise": {"reward": noise, "schedule": often},
    "Responses are truncated at the limit": {
        "warm_start": None,
        "sampling": replace(experiment.sampling, max_tokens=3),
    },
    "The learning rate has no effect": {"optimizer": Optimizer(learning_rate=1e-8)},
    "The clip range clips nothing": {"loss": partial(losses.gspo, clip_low=0.9, clip_high=9.0)},
    "The clip range clips nearly everything": {"loss": partial(losses.gspo, clip_low=1e-9, clip_high=1e-9)},
    "Rewards within groups are equal": {"reward": lambda problem, completion: float(problem.answer[0] == "0")},
}


@pytest.mark.parametrize("cause", BROKEN)
def test_a_run_that_is_broken_on_purpose(cause, tmp_path):
    train(replace(experiment, **BROKEN[cause]), tmp_path / "run")
    found, missing = find_causes(read_record(tmp_path / "run"))
    assert [finding.cause for finding in found] == [cause] * bool(cause), found
    assert missing == []
