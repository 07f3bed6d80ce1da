import numpy as np
import pytest

from gspax.data import Problem
from gspax.data.tasks import sort


def test_the_problems_are_those_of_recorded_runs():
    """If these change, old and new runs cannot be compared: give other problems a new task name."""
    source = sort.Problems(seed=0)
    assert [source.train(i).prompt for i in range(3)] == ["945=", "164233=", "4517="]
    assert [source.heldout(i).prompt for i in range(3)] == ["1178=", "280917=", "4206="]


def test_the_answer_is_the_sorted_digits():
    for i in range(500):
        problem = sort.Problems().train(i)
        digits = problem.prompt.removesuffix("=")
        assert 3 <= len(digits) <= 6 and digits.isdecimal()
        assert sorted(digits) == list(problem.answer)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1234", 1.0),
        ("1243", 0.0),
        ("123", 0.0),
        ("12344", 0.0),
        ("", 0.0),
        ("=1234", 0.0),
        ("1234=", 0.0),
        (" 1234", 0.0),
        ("١٢٣٤", 0.0),
    ],
)
def test_reward(completion, expected):
    assert sort.reward(Problem("3142=", "1234"), completion) == expected


def test_half_of_the_demonstrations_are_correct_and_all_permute_the_digits():
    rng = np.random.default_rng(0)
    problem = Problem("605218=", "012568")
    texts = [sort.half_wrong(problem, rng) for _ in range(4000)]
    right = np.mean([sort.reward(problem, text) for text in texts])
    assert right == pytest.approx(0.5 + 0.5 / 720, abs=0.03)
    assert {"".join(sorted(text)) for text in texts} == {problem.answer}
    assert len(set(texts)) > 600  # the wrong ones are spread over the 720 orders


@pytest.mark.parametrize("limits", [(1, 3), (0, 0), (5, 4), (-2, 6)])
def test_impossible_lengths_are_rejected(limits):
    low, high = limits
    with pytest.raises(ValueError, match=rf"max_digits <= 1000; got min_digits={low}, max_digits={high}"):
        sort.Problems(min_digits=low, max_digits=high)


def test_lengths_can_be_set():
    source = sort.Problems(seed=4, min_digits=8, max_digits=9)
    assert {len(source.train(i).answer) for i in range(50)} == {8, 9}
    assert {len(source.heldout(i).answer) for i in range(50)} == {8, 9}
