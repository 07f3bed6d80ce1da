"""Several rewards as one."""

import pickle
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from gspax import advantages
from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import format, length, math
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.scores import Result, Score, to_result

REWARD = partial(
    combine,
    rewards={
        "answer": partial(math.reward, form="tag"),
        "format": format.match_tags,
        "short": partial(length.within, at_most=2),
    },
    weights={"format": 0.25, "short": 0.5},
)


@pytest.mark.parametrize(
    ("completion", "values"),
    [
        ("<think>a</think><answer>4</answer>", (1.0, 0.25, 0.5)),
        ("<think>a b c</think><answer>4</answer>", (1.0, 0.25, 0.0)),
        ("<answer>5</answer>", (0.0, 0.0, 0.5)),
    ],
)
def test_rewards_are_returned_in_order_with_their_weights(completion, values):
    found = REWARD(Problem("2 + 2", "4"), completion)
    parts = dict(zip(("answer", "format", "short"), values, strict=True))
    assert [(name, score.value) for name, score in found.items()] == list(parts.items())
    total = partial(weighted_sum, **REWARD.keywords)(Problem("2 + 2", "4"), completion)
    assert total.value == sum(values) and total.parts == parts
    assert pickle.loads(pickle.dumps(total)) == total
    assert pickle.loads(pickle.dumps(REWARD))(Problem("2 + 2", "4"), completion) == found
    reason = f"answer: {'equal' if values[0] else 'different'}"
    assert to_result(found) == Result(values, parts=parts, reason=reason, names=("answer", "format", "short"))
    assert to_result(total) == Result((sum(values),), parts=parts, reason=reason)


def test_a_failure_of_one_reward_is_a_failure_of_the_whole():
    def late(problem, completion):
        return Score(-1.0, error="late")

    rewards = {"answer": late, "short": partial(length.within, at_most=2)}
    total = weighted_sum(Problem("?", ""), "a", rewards=rewards, weights={"answer": 2.0})
    parts = {"answer": -2.0, "short": 1.0}
    assert to_result(total) == to_result(pickle.loads(pickle.dumps(total))) == Result((-1.0,), "answer: late", parts)
    assert to_result(combine(Problem("?", ""), "a", rewards=rewards)) == Result(
        (-1.0, 1.0), "answer: late", {"answer": -1.0, "short": 1.0}, names=("answer", "short")
    )


def test_an_experiment_describes_names_and_weights():
    described = describe(REWARD)
    assert described["weights"] == {"format": 0.25, "short": 0.5}
    assert list(described["rewards"]) == ["answer", "format", "short"]
    assert described["rewards"]["short"]["at_most"] == 2


def test_several_rewards_give_one_advantage():
    texts = ["<think>a</think><answer>4</answer>", "<answer>4</answer>", "4"]
    reward_PGR = np.array(
        [[[score.value for score in REWARD(Problem("2 + 2", "4"), text).values()] for text in texts]], np.float32
    )
    advantage_PG = advantages.gdpo(jnp.asarray(reward_PGR))
    assert advantage_PG.shape == (1, 3) and list(np.argsort(advantage_PG[0])) == [2, 1, 0]


def test_a_weight_without_a_reward_is_rejected():
    with pytest.raises(UserError, match=r"weights: wanted names of rewards \(short\), got long, shot"):
        combine(Problem("", ""), "", rewards={"short": length.within}, weights={"shot": 1.0, "long": 1.0})


@pytest.mark.parametrize("value", [np.float32(0.5), np.True_, np.array(2.0)])
def test_a_number_may_be_one_of_numpy(value):
    scores = combine(Problem("", ""), "", rewards={"a": lambda problem, completion: value}, weights={"a": 2.0})
    assert scores["a"].value == 2 * float(value)


def test_each_reward_must_return_one_number():
    with pytest.raises(UserError, match=r"rewards: wanted one number from 'both', got \{'a': 1.0\}"):
        combine(Problem("", ""), "", rewards={"both": lambda problem, completion: {"a": 1.0}})
