"""Rows that `reward_completions` makes of a rollout: text, reward, length, and whether it finished."""

import numpy as np
from small_experiment import experiment

from gspax.data.problem import Problem
from gspax.rollout.rewards import reward_completions
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


def test_rows_hold_prompt_answer_completion_and_length():
    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, reward=experiment.reward)
    assert [row["prompt"] for row in rows] == ["21=", "21=", "9870=", "9870="]
    assert [row["answer"] for row in rows] == ["12", "12", "0789", "0789"]
    assert [row["completion"] for row in rows] == ["12", "211", "0", "078"]
    assert [row["length"] for row in rows] == [3, 3, 2, 3]
    assert [row["finished"] for row in rows] == [True, False, True, False]
    assert all(type(row["length"]) is int and type(row["finished"]) is bool for row in rows)


def test_reward_gets_the_problem_and_the_completion_without_its_stop_token():
    seen = []

    def reward(problem, completion):
        seen.append((problem, completion))
        return np.float32(len(seen))

    rows = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, reward=reward)
    assert seen == [(PROBLEMS[0], "12"), (PROBLEMS[0], "211"), (PROBLEMS[1], "0"), (PROBLEMS[1], "078")]
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert all(type(row["reward"]) is float for row in rows)
