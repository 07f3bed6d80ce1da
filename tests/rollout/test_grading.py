"""The completions of a rollout: texts, rewards, length, and whether the sample finished."""

import contextlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from api import (
    Compared,
    Completion,
    Episode,
    FailedRewardsError,
    Rollout,
    Texts,
    _take_step,
    check_batch,
    compute_advantages,
    encode_problem,
    reward_completions,
    reward_metrics,
)
from small_experiment import experiment

from gspax import advantages
from gspax.config import Grading, Turns
from gspax.data import CharChat, CharTokenizer, Problem
from gspax.errors import UserError
from gspax.rewards.calls import Batched
from gspax.rewards.environments import Step
from gspax.rewards.scores import Score, reward_calls

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


def test_completions_have_prompt_answer_text_and_length(calls):
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(experiment.reward))
    assert [each.texts.prompt for each in samples] == ["21=", "21=", "9870=", "9870="]
    assert [each.texts.answer for each in samples] == ["12", "12", "0789", "0789"]
    assert [each.texts.completion for each in samples] == ["12", "211", "0", "078"]
    assert [each.length for each in samples] == [3, 3, 2, 3]
    assert [each.finished for each in samples] == [True, False, True, False]
    assert all(type(each.length) is int and type(each.finished) is bool for each in samples)


def test_reward_gets_the_problem_and_the_completion_without_its_stop_token(calls):
    seen = []

    def reward(problem, completion):
        seen.append((problem, completion))
        return np.float32(len(seen))

    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(reward))
    assert seen == [(PROBLEMS[0], "12"), (PROBLEMS[0], "211"), (PROBLEMS[1], "0"), (PROBLEMS[1], "078")]
    assert [each.reward for each in samples] == [1.0, 2.0, 3.0, 4.0]
    assert all(type(each.reward) is float for each in samples)


def fails_for_211(problem, completion):
    if completion == "211":
        raise KeyError("unit")
    return 1.0, 0.5


def test_failed_reward_gets_the_configured_value_for_each_reward(calls):
    given = calls(fails_for_211, failed=-1.0, max_failed=0.25)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [each.rewards for each in samples] == [(1.0, 0.5), (-1.0, -1.0), (1.0, 0.5), (1.0, 0.5)]
    assert [each.reward for each in samples] == [1.5, -2.0, 1.5, 1.5]
    assert [each.error.partition(" (")[0] for each in samples] == ["", "KeyError: 'unit'", "", ""]


def test_failure_with_its_own_value_keeps_it_and_is_counted(calls):
    def late_for_211(problem, completion):
        return Score(-0.5, error="late") if completion == "211" else 1.0

    given = calls(late_for_211, failed=-1.0, max_failed=0.25)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [each.reward for each in samples] == [1.0, -0.5, 1.0, 1.0]
    assert [each.error for each in samples] == ["", "late", "", ""]
    assert reward_metrics(samples, 2)["reward/failed"] == 0.25
    with pytest.raises(UserError, match=r"failed for 1 of 4 completions .* allows 0 %\): late for "):
        check_batch(samples, calls(late_for_211, max_failed=0.0))


def test_single_value_of_a_failure_fills_several_rewards(calls):
    def late_for_211(problem, completion):
        return Score(-0.5, error="late") if completion == "211" else {"b": 1.0, "a": 0.5}

    given = calls(late_for_211, failed=-1.0)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [each.rewards for each in samples] == [(0.5, 1.0), (-0.5, -0.5), (0.5, 1.0), (0.5, 1.0)]
    assert [each.error for each in samples] == ["", "late", "", ""]


def only_the_answer_counts(samples):
    """Advantages [B], and the columns of `rewards`."""
    advantage_B, _ = compute_advantages(partial(advantages.gdpo, weights=(1, 0)), Compared(samples, 4))
    return advantage_B.round(2).tolist()


def test_named_rewards_are_matched_by_name_in_any_order(calls):
    def reward(problem, completion):
        right = float(completion == "12")
        return {"format": 0.0, "answer": right} if right else {"answer": right, "format": 1.0}

    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(reward))
    assert [each.rewards for each in samples] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    assert only_the_answer_counts(samples) == [1.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"answer": 1.0, "style": 1.0}, "wanted rewards answer, format; got rewards answer, style"),
        ({"answer": 1.0}, "wanted rewards answer, format; got one number"),
        ((1.0, 0.0), "wanted rewards answer, format; got 2 numbers without names"),
        ({"answer": 1.0, "style": Score(1.0, error="late")}, "style: late"),
    ],
)
def test_completion_with_other_reward_names_than_most_fails(calls, other, error):
    def reward(problem, completion):
        return other if completion == "12" else {"format": 1.0, "answer": 0.0}

    given = calls(reward, failed=-1.0)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [each.rewards for each in samples] == [(-1.0, -1.0), *[(0.0, 1.0)] * 3]
    assert [each.error for each in samples] == [error, "", "", ""]
    assert reward_metrics(samples, 4)["rewards/answer"] == 0.0, "a failure has no parts"


def test_completion_with_another_number_of_rewards_than_most_fails(calls):
    samples = reward_completions(
        PROBLEMS,
        rollout(),
        tokenizer=experiment.tokenizer,
        calls=calls(lambda problem, completion: 1.0 if completion == "12" else (1.0, 0.0)),
    )
    assert [each.rewards for each in samples] == [(0.0, 0.0), *[(1.0, 0.0)] * 3]
    assert samples[0].error == "wanted 2 numbers without names; got one number"


def test_unsorted_reward_names_warn_once(calls, capsys):
    told = "gspax: warning: reward: the advantage gets the rewards in the alphabetical order of their names: x, y\n"
    for order, expected in ("xy", ""), ("yx", told), ("yx", ""):
        reward = calls(lambda problem, completion, order=order: dict.fromkeys(order, 1.0))
        samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=reward)
        only_the_answer_counts(samples)
        assert capsys.readouterr().err == expected


def test_too_many_failures_in_a_batch_raise_with_prompt_and_completion(calls):
    message = (
        r"^reward: test_grading\.fails_for_211 failed for 1 of 4 completions \(grading\.max_failed allows 0 %\): "
        r"KeyError: 'unit' \(tests/rollout/test_grading\.py:\d+\) for the prompt '21=' and the completion '211'$"
    )
    given = calls(fails_for_211, max_failed=0.0)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    with pytest.raises(FailedRewardsError, match=message) as raised:
        check_batch(samples, given)
    assert raised.value.completions == [samples[1]]
    stepped = replace(samples[1], blamed="environment: its step")
    with pytest.raises(FailedRewardsError, match=r"^environment: its step failed for 1 of 1 completions \("):
        check_batch([stepped], given)


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
def test_few_failures_are_allowed_unless_all_failed_or_none_may(calls, share, total, most):
    given = calls(fails_for_211, max_failed=share)

    def samples(failures):
        sample = Completion(length=1, finished=True, rewards=(0.0,), texts=Texts("?", "", "!"))
        return [replace(sample, error="late")] * failures + [sample] * (total - failures)

    check_batch(samples(most), given)
    if most < total:
        with pytest.raises(UserError, match=f"failed for {most + 1} of {total} completions"):
            check_batch(samples(most + 1), given)


def test_batched_reward_gets_all_completions_at_once(calls):
    seen = []

    def lengths(problems, completions):
        seen.append((problems, completions))
        return [len(each) for each in completions]

    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=calls(Batched(lengths)))
    assert [each.reward for each in samples] == [2.0, 3.0, 1.0, 3.0]
    ((problems, completions),) = seen
    assert list(problems) == [PROBLEMS[0], PROBLEMS[0], PROBLEMS[1], PROBLEMS[1]]
    assert list(completions) == ["12", "211", "0", "078"]


def test_named_rewards_are_metrics(calls):
    def named(problem, completion):
        return {"length": len(completion), "one": 1.0} if completion != "211" else 1 / 0

    given = calls(named)
    samples = reward_completions(PROBLEMS, rollout(), tokenizer=experiment.tokenizer, calls=given)
    assert [each.rewards for each in samples] == [(2.0, 1.0), (0.0, 0.0), (1.0, 1.0), (3.0, 1.0)]
    metrics = reward_metrics(samples, 2)
    assert (metrics["rewards/length"], metrics["rewards/one"], metrics["reward/failed"]) == (2.0, 1.0, 0.25)
    assert metrics["reward/mean"] == (3 + 0 + 2 + 4) / 4
    assert metrics["reward/zero_std_groups"] == 0


def test_reward_metrics_by_hand():
    samples = [Completion(length=1, finished=True, rewards=(float(each),)) for each in (0, 1, 1, 1, 0, 0, 0, 1)]
    assert reward_metrics(samples, 2) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/zero_std_groups": 0.5,
        "reward/failed": 0.0,
    }


@pytest.mark.filterwarnings("error")
def test_metrics_of_rewards_near_the_largest_float32_are_finite():
    samples = [Completion(length=1, finished=True, rewards=(each,)) for each in (3e38, 3e38, -3e38, 3e38)]
    metrics = reward_metrics(samples, 2)
    assert metrics["reward/mean"] == pytest.approx(1.5e38) and metrics["reward/std"] == pytest.approx(3**0.5 * 1.5e38)


def test_a_completion_has_the_thinking_that_its_prompt_opened(calls):
    """Whether its reward starts after the rollout or while others are sampled."""
    tokenizer, problem = CharTokenizer("<think>/\n1234567890?"), Problem(prompt="1?<think>\n", answer="12")
    prompt, drawn = tokenizer.encode(problem.prompt), tokenizer.encode("12")
    one = Rollout(
        tokens_BT=np.array([prompt + drawn], np.int32),
        mask_BT=None,
        logp_BT=None,
        prompt_length_B=np.array([len(prompt)], np.int32),
        length_B=np.array([len(drawn)], np.int32),
        finished_B=np.array([False]),
    )
    given = calls(lambda problem, completion: 1.0)
    (sample,) = reward_completions([problem], one, tokenizer=tokenizer, calls=given)
    assert sample.texts.completion == "<think>\n12"
    assert encode_problem(problem, tokenizer).opening == "<think>\n"


class OpensThinking(CharChat):
    """A template that opens thinking after every reply."""

    def encode_reply(self, messages):
        return [*super().encode_reply(messages), *self.encode_completion("<think>\n")]


def test_a_turn_has_the_thinking_that_the_reply_before_it_opened():
    tokenizer, problem = OpensThinking("<think>/\n1234567890?"), Problem(prompt="1?", answer="12")
    interaction = SimpleNamespace(tokenizer=tokenizer, turns=Turns(limit=2))
    episode = Episode(problem, None, spans=[(0, 1)])
    step = Step(None, [{"role": "user", "content": "2?"}])
    reply, error = _take_step(interaction, episode, step, tokenizer.turn_end, tokenizer.vocab_size)
    assert reply and not error and episode.opening == "<think>\n"
