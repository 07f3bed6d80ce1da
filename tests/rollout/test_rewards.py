"""Rows that `reward_completions` makes of a rollout: text, reward, length, and whether it finished."""

import contextlib
from functools import partial

import numpy as np
import pytest
from small_experiment import experiment

from gspax import advantages
from gspax.config import Grading
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import Batched
from gspax.rewards.scores import Score, reward_calls
from gspax.rollout.grading import (
    FailedRewardsError,
    check_batch,
    compute_advantages,
    reward_completions,
    reward_metrics,
)
from gspax.types import Rollout

STOP = experiment.tokenizer.stop_ids[0]
PROBLEMS = [Problem(prompt="21=", answer="12"), Problem(prompt="9870=", answer="0789")]


def rollout():
    """Two samples per problem, one of them truncated at three tokens. The padding is not zero."""
    prompts = [experiment.tokenizer.encode(problem.prompt) for problem in PROBLEMS for _ in range(2)]
    drawn = [[1, 2, STOP], [2, 1, 1], [0, STOP], [0, 7, 8]]
    tokens = np.full((4, 8), 5, np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, drawn, strict=True)):
        tokens[row, : len(prompt) + len(completion)] = [*prompt, *completion]
    return Rollout(
        tokens_BT=tokens,
        mask_BT=None,  # unused: the lengths suffice
        logp_BT=None,
        prompt_length_B=np.array([len(prompt) for prompt in prompts], np.int32),
        length_B=np.array([len(completion) for completion in drawn], np.int32),
        finished_B=np.array([True, False, True, False]),
    )


@pytest.fixture
def calls():
    with contextlib.ExitStack() as stack:
        yield lambda reward, **grading: stack.enter_context(reward_calls(reward, Grading(**grading)))


def test_rows_hold_prompt_answer_completion_and_length(calls):
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(experiment.reward))
    assert [row["prompt"] for row in rows] == ["21=", "21=", "9870=", "9870="]
    assert [row["answer"] for row in rows] == ["12", "12", "0789", "0789"]
    assert [row["completion"] for row in rows] == ["12", "211", "0", "078"]
    assert [row["length"] for row in rows] == [3, 3, 2, 3]
    assert [row["finished"] for row in rows] == [True, False, True, False]
    assert all(type(row["length"]) is int and type(row["finished"]) is bool for row in rows)


def test_reward_gets_the_problem_and_the_completion_without_its_stop_token(calls):
    seen = []

    def reward(problem, completion):
        seen.append((problem, completion))
        return np.float32(len(seen))

    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(reward))
    assert seen == [(PROBLEMS[0], "12"), (PROBLEMS[0], "211"), (PROBLEMS[1], "0"), (PROBLEMS[1], "078")]
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert all(type(row["reward"]) is float for row in rows)


def fails_for_211(problem, completion):
    if completion == "211":
        raise KeyError("unit")
    return 1.0, 0.5


def test_a_failed_reward_costs_its_row_the_stated_value_for_each_of_its_rewards(calls):
    given = calls(fails_for_211, failed=-1.0, max_failed=0.25)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [row["rewards"] for row in rows] == [[1.0, 0.5], [-1.0, -1.0], [1.0, 0.5], [1.0, 0.5]]
    assert [row["reward"] for row in rows] == [1.5, -2.0, 1.5, 1.5]
    assert [row.get("error", "").partition(" (")[0] for row in rows] == ["", "KeyError: 'unit'", "", ""]


def test_a_failure_with_a_value_of_its_own_keeps_it_and_is_counted(calls):
    def late_for_211(problem, completion):
        return Score(-0.5, error="late") if completion == "211" else 1.0

    given = calls(late_for_211, failed=-1.0, max_failed=0.25)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [row["reward"] for row in rows] == [1.0, -0.5, 1.0, 1.0]
    assert [row.get("error") for row in rows] == [None, "late", None, None]
    assert reward_metrics(rows, 2)["reward/failed"] == 0.25
    with pytest.raises(UserError, match=r"failed for 1 of 4 completions .* allows 0 %\): late for "):
        check_batch(rows, calls(late_for_211, max_failed=0.0))


def test_one_number_of_a_failure_stands_for_each_of_several_rewards(calls):
    def late_for_211(problem, completion):
        return Score(-0.5, error="late") if completion == "211" else {"b": 1.0, "a": 0.5}

    given = calls(late_for_211, failed=-1.0)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [row["rewards"] for row in rows] == [[0.5, 1.0], [-0.5, -0.5], [0.5, 1.0], [0.5, 1.0]]
    assert [row.get("error") for row in rows] == [None, "late", None, None]


def only_the_answer_counts(rows):
    """Advantages [B], and the columns of `rewards`."""
    advantage_B, _ = compute_advantages(partial(advantages.gdpo, weights=(1, 0)), rows, group=4)
    return advantage_B.round(2).tolist()


def test_named_rewards_are_matched_by_name_whatever_their_order(calls):
    def reward(problem, completion):
        right = float(completion == "12")
        return {"format": 0.0, "answer": right} if right else {"answer": right, "format": 1.0}

    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(reward))
    assert [row["rewards"] for row in rows] == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert only_the_answer_counts(rows) == [1.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"answer": 1.0, "style": 1.0}, "wanted rewards answer, format; got rewards answer, style"),
        ({"answer": 1.0}, "wanted rewards answer, format; got one number"),
        ((1.0, 0.0), "wanted rewards answer, format; got 2 numbers without names"),
        ({"answer": 1.0, "style": Score(1.0, error="late")}, "style: late"),
    ],
)
def test_other_names_than_those_of_most_completions_fail(calls, other, error):
    def reward(problem, completion):
        return other if completion == "12" else {"format": 1.0, "answer": 0.0}

    given = calls(reward, failed=-1.0)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [row["rewards"] for row in rows] == [[-1.0, -1.0], *[[0.0, 1.0]] * 3]
    assert [row.get("error") for row in rows] == [error, None, None, None]
    assert reward_metrics(rows, 4)["rewards/answer"] == 0.0, "a failure has no parts"


def test_other_numbers_than_those_of_most_completions_fail(calls):
    rows = reward_completions(
        PROBLEMS,
        rollout(),
        tokenizer=experiment.tokenizer,
        calls=calls(lambda problem, completion: 1.0 if completion == "12" else (1.0, 0.0)),
    )
    assert [row["rewards"] for row in rows] == [[0.0, 0.0], *[[1.0, 0.0]] * 3]
    assert rows[0]["error"] == "wanted 2 numbers without names; got one number"


def test_another_order_than_that_of_the_names_is_told_once(calls, capsys):
    told = "gspax: warning: reward: the advantage gets the rewards in the alphabetical order of their names: x, y\n"
    for order, expected in ("xy", ""), ("yx", told), ("yx", ""):
        reward = calls(lambda problem, completion, order=order: dict.fromkeys(order, 1.0))
        rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=reward)
        only_the_answer_counts(rows)
        assert capsys.readouterr().err == expected


def test_a_batch_with_too_many_failures_is_an_error_with_prompt_and_completion(calls):
    message = (
        r"^reward: test_rewards\.fails_for_211 failed for 1 of 4 completions \(grading\.max_failed allows 0 %\): "
        r"KeyError: 'unit' \(tests/rollout/test_rewards\.py:\d+\) for the prompt '21=' and the completion '211'$"
    )
    given = calls(fails_for_211, max_failed=0.0)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    with pytest.raises(FailedRewardsError, match=message) as raised:
        check_batch(rows, given)
    assert raised.value.rows == [rows[1]]


@pytest.mark.parametrize(
    ("share", "total", "most"),
    [
        (0.05, 1000, 50),
        (0.05, 100, 5),
        (0.05, 16, 5),
        (0.05, 4, 3),
        (0.05, 1, 1),
        (0.5, 16, 8),
        (0.0, 16, 0),
        (1, 4, 4),
    ],
)
def test_few_failures_end_no_run_unless_all_have_failed_or_none_may(calls, share, total, most):
    given = calls(fails_for_211, max_failed=share)

    def rows(failures):
        row = {"prompt": "?", "completion": "!"}
        return [{**row, "error": "late"}] * failures + [row] * (total - failures)

    check_batch(rows(most), given)
    if most < total:
        with pytest.raises(UserError, match=f"failed for {most + 1} of {total} completions"):
            check_batch(rows(most + 1), given)


def test_a_batched_reward_gets_all_completions_that_are_there(calls):
    seen = []

    def lengths(problems, completions):
        seen.append((problems, completions))
        return [len(each) for each in completions]

    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(Batched(lengths)))
    assert [row["reward"] for row in rows] == [2.0, 3.0, 1.0, 3.0]
    ((problems, completions),) = seen
    assert list(problems) == [PROBLEMS[0], PROBLEMS[0], PROBLEMS[1], PROBLEMS[1]]
    assert list(completions) == ["12", "211", "0", "078"]


def test_named_rewards_are_metrics(calls):
    def named(problem, completion):
        return {"length": len(completion), "one": 1.0} if completion != "211" else 1 / 0

    given = calls(named)
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [row["rewards"] for row in rows] == [[2.0, 1.0], [0.0, 0.0], [1.0, 1.0], [3.0, 1.0]]
    metrics = reward_metrics(rows, 2)
    assert (metrics["rewards/length"], metrics["rewards/one"], metrics["reward/failed"]) == (2.0, 1.0, 0.25)
    assert metrics["reward/mean"] == (3 + 0 + 2 + 4) / 4
    assert metrics["reward/zero_std_groups"] == 0


def test_reward_metrics_by_hand():
    rows = [{"reward": reward} for reward in (0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)]
    assert reward_metrics(rows, 2) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/zero_std_groups": 0.5,
        "reward/failed": 0.0,
    }


@pytest.mark.filterwarnings("error")
def test_metrics_of_rewards_near_the_largest_float32_are_finite():
    rows = [{"reward": reward, "rewards": {"": reward}} for reward in (3e38, 3e38, -3e38, 3e38)]
    metrics = reward_metrics(rows, 2)
    assert metrics["reward/mean"] == pytest.approx(1.5e38) and metrics["reward/std"] == pytest.approx(3**0.5 * 1.5e38)
