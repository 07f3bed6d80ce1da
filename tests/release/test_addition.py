import re

import addition
import numpy as np
import pytest

from gspax.data import Problem

PROBLEM = Problem("a4+b7+c3=", "14")
RIGHT = "00+a4=04,04+b7=11,11+c3=14,#14"
STEP = re.compile(r"([0-9]{2})\+([a-k])([0-9])=([0-9]{2}),")
TERM = re.compile(r"([a-k])([0-9])")


def pairs(count):
    rng = np.random.default_rng(0)
    problems = [addition.Problems().train(i) for i in range(count)]
    return [(problem, addition.half_wrong(problem, rng)) for problem in problems]


def slips(problem, completion):
    """Indices of the steps that do not follow from the previous one (len(terms) for the answer); None if the completion
    is not a scratchpad of this problem."""
    steps = STEP.findall(completion)
    terms = TERM.findall(problem.prompt)
    written = "".join("{}+{}{}={},".format(*step) for step in steps)
    answer = completion.removeprefix(written)
    if len(steps) != len(terms) or not re.fullmatch(r"#[0-9]{2}", answer):
        return None
    wrong, total = [], 0
    for i, ((name, digit), (before, step_name, step_digit, after)) in enumerate(zip(terms, steps, strict=True)):
        if (int(before), step_name, step_digit, int(after)) != (total, name, digit, total + int(digit)):
            wrong.append(i)
        total = int(after)
    return wrong + [len(terms)] * (int(answer[1:]) != total)


def test_the_problems_are_those_of_recorded_runs():
    """If these change, old and new runs cannot be compared: give other problems a new task name."""
    assert addition.Problems(seed=0).train(0) == Problem("a9+b4+c5+d3+e3+f5=", "29")
    assert addition.Problems(seed=0).heldout(0) == Problem("a9+b9+c3+d3+e5+f2=", "31")


def test_the_answer_is_the_sum_of_six_to_eleven_named_digits():
    for i in range(500):
        problem = addition.Problems().train(i)
        terms = problem.prompt.removesuffix("=").split("+")
        assert [term[0] for term in terms] == list("abcdefghijk"[: len(terms)])
        assert 6 <= len(terms) <= 11
        assert int(problem.answer) == sum(int(term[1:]) for term in terms)
        assert re.fullmatch("[0-9]{2}", problem.answer)


def test_responses_are_long_and_of_many_lengths():
    lengths = [len(addition.tokenizer.encode(text)) + 1 for _, text in pairs(1000)]
    assert (min(lengths), max(lengths)) == (58, 103)  # the module's docstring says so
    assert np.mean(lengths) == pytest.approx(80.5, abs=2)
    assert len(set(lengths)) == 6
    assert max(len(addition.Problems().train(i).prompt) for i in range(1000)) == 33


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (RIGHT, 1.0),
        ("#14", 1.0),  # the scratchpad is not graded
        ("00+a4=05,#14", 1.0),
        ("", 0.0),
        ("14", 0.0),
        ("#", 0.0),
        ("#15", 0.0),
        ("#014", 0.0),
        ("#14,", 0.0),
        ("# 14", 0.0),
        ("#15#14", 0.0),  # a second answer is not accepted
        ("#14#14", 0.0),
        ("#١٤", 0.0),
    ],
)
def test_reward(completion, expected):
    assert addition.reward(PROBLEM, completion) == expected


def test_half_of_the_demonstrations_are_correct_at_every_length():
    problems = pairs(6000)
    rewards = np.array([addition.reward(*pair) for pair in problems])
    terms = np.array([len(problem.prompt) // 3 for problem, _ in problems])
    for count in range(6, 12):
        assert rewards[terms == count].mean() == pytest.approx(0.5, abs=0.06)


def test_a_wrong_demonstration_makes_one_slip_and_continues_from_it():
    slipped = []
    for problem, text in pairs(2000):
        wrong = slips(problem, text)
        assert wrong is not None
        assert len(wrong) == (addition.reward(problem, text) == 0.0)
        assert not wrong or wrong[0] < len(problem.prompt) // 3  # computed from the sum, never a copied answer
        slipped += wrong
    assert set(slipped) == set(range(11))


def test_a_slip_is_off_by_one_or_by_a_carry():
    misses = {int(text[-2:]) - int(problem.answer) for problem, text in pairs(2000)}
    assert misses == {-10, -1, 0, 1, 10}


@pytest.mark.parametrize("prompt", ["+".join(f"{name}{digit}" for name in addition.NAMES) + "=" for digit in "09"])
def test_every_sum_has_two_digits(prompt):
    rng = np.random.default_rng(0)
    problem = Problem(prompt, f"{11 * int(prompt[1]):02d}")
    rewards = []
    for _ in range(500):
        text = addition.half_wrong(problem, rng)
        assert slips(problem, text) is not None and len(text) == 9 * 11 + 3
        rewards.append(addition.reward(problem, text))
    assert np.mean(rewards) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (RIGHT, []),
        ("00+a4=05,05+b7=12,12+c3=15,#15", [0]),
        ("00+a4=04,04+b7=01,01+c3=04,#04", [1]),
        ("00+a4=04,05+b7=12,12+c3=15,#15", [1]),  # copied a wrong running sum
        ("00+a4=04,04+b8=12,12+c3=15,#15", [1]),  # a wrong digit
        ("00+a4=04,04+c3=07,07+b7=14,#14", [1, 2]),  # another order
        ("00+a4=04,04+b7=11,11+c3=14,#15", [3]),
        ("00+a4=05,05+b7=12,12+c3=14,#15", [0, 2, 3]),
        ("00+a4=04,04+b7=11,#11", None),
        ("00+a4=04,04+b7=11,11+c3=14,", None),
        ("00+a4=04,04+b7=11,11+c3=14,#14,", None),
        ("+00+a4=04,04+b7=11,11+c3=14,#14", None),
        ("00+a4=04,,04+b7=11,11+c3=14,#14", None),
        ("#14", None),
        ("", None),
    ],
)
def test_slips_lists_the_wrong_steps(completion, expected):
    assert slips(PROBLEM, completion) == expected


@pytest.mark.parametrize("limits", [(1, 6), (7, 6), (6, 12), (0, 0)])
def test_impossible_numbers_of_terms_are_rejected(limits):
    low, high = limits
    with pytest.raises(ValueError, match=rf"<= max_terms <= 11; got min_terms={low}, max_terms={high}"):
        addition.Problems(min_terms=low, max_terms=high)


def test_the_alphabet_fits_a_vocabulary_of_32():
    assert addition.tokenizer.vocab_size == 26
