"""Rewards for the format and the length of a completion."""

import time
from functools import partial

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import format, length

PROBLEM = Problem("?", "!")


@pytest.mark.parametrize(
    ("pattern", "completion", "reward"),
    [
        (r"\d+", "42", 1.0),
        (r"\d+", "42 ", 0.0),
        (r"\d+", "x42", 0.0),
        (r"a.*b", "a\n\nb", 1.0),
    ],
)
def test_the_pattern_must_match_the_full_completion(pattern, completion, reward):
    assert format.match(PROBLEM, completion, pattern=pattern) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na < b\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a<answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("well: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> Bye", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("</think><think>a</think><answer>b</answer>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b </think></answer>", 0.0),
        ("<think>a</answer></think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_each_tag_must_appear_once_and_in_order(completion, reward):
    assert format.match_tags(PROBLEM, completion) == reward


def test_the_prompt_may_open_the_first_tag():
    assert format.match_tags(PROBLEM, "a</think><answer>b</answer>", opened=True) == 1.0
    assert format.match_tags(PROBLEM, "<think>a</think><answer>b</answer>", opened=True) == 1.0  # as texts of a run
    assert format.match_tags(PROBLEM, "<think><think>a</think><answer>b</answer>", opened=True) == 0.0
    assert format.match_tags(PROBLEM, "<a>1</a>", tags=("a",)) == 1.0


def test_adversarial_completions_are_graded_quickly():
    began = time.process_time()
    for text in ("<think>", "</think>", "<think></think>", "<"):
        assert format.match_tags(PROBLEM, text * 100_000) == 0.0
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("words", "reward"), [(0, 0.0), (1, 0.0), (2, 1 / 3), (3, 2 / 3), (4, 1), (6, 1), (7, 2 / 3), (9, 0)]
)
def test_the_penalty_outside_the_range_is_linear(words, reward):
    assert length.within(PROBLEM, "word " * words, at_least=4, at_most=6, slack=2) == pytest.approx(reward)


@pytest.mark.parametrize(("unit", "count"), [("words", 3), ("characters", 9), ("lines", 2)])
def test_lengths_are_counted_in_each_unit(unit, count):
    text = "a bc\n\ndef"
    assert length.within(PROBLEM, text, at_least=count, at_most=count, unit=unit) == 1.0
    assert length.within(PROBLEM, text, at_least=count + 1, unit=unit) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "tokens"}, "unit: wanted one of words, characters, lines, got 'tokens'"),
        ({"at_least": 2, "at_most": 1}, "wanted 0 <= at_least <= at_most and slack >= 0, got at_least=2, at_most=1"),
        ({"slack": -1}, "slack=-1"),
    ],
)
def test_impossible_lengths_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        length.within(PROBLEM, "", **settings)


def test_an_experiment_describes_the_settings():
    described = describe(partial(format.match_tags, opened=True))
    assert described == {"function": "gspax.rewards.format.match_tags", "tags": ["think", "answer"], "opened": True}
