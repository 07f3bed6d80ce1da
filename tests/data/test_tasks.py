"""Properties of every task. Add a new task to the list to test it."""

from dataclasses import dataclass
from itertools import pairwise

import addition
import numpy as np
import pytest

from gspax.data import GeneratedProblems, Problem
from gspax.data.problem import is_heldout
from gspax.data.tasks import sort

TASKS = [sort, addition]
COUNT = 3000


@pytest.fixture(params=TASKS, ids=lambda task: task.__name__.rpartition(".")[2])
def task(request):
    return request.param


def demonstrations(task, count):
    problems = [task.Problems().train(i) for i in range(count)]
    rng = np.random.default_rng(0)
    return [(problem, task.half_wrong(problem, rng)) for problem in problems]


def test_a_problem_depends_only_on_seed_split_and_index(task):
    forwards = [task.Problems(seed=3).train(i) for i in range(50)]
    source = task.Problems(seed=3)
    backwards = [source.train(i) for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert [source.heldout(i) for i in (7, 400, 7)] == [task.Problems(seed=3).heldout(i) for i in (7, 400, 7)]


def test_the_seed_changes_training_but_not_held_out_problems(task):
    first, second = task.Problems(seed=0), task.Problems(seed=1)
    assert sum(first.train(i) == second.train(i) for i in range(500)) < 10
    assert [first.heldout(i) for i in range(500)] == [second.heldout(i) for i in range(500)]


def test_training_and_held_out_prompts_are_disjoint(task):
    train = {task.Problems(seed=seed).train(i).prompt for seed in (0, 1) for i in range(COUNT)}
    heldout = {task.Problems().heldout(i).prompt for i in range(COUNT)}
    assert len(train) > COUNT
    assert not train & heldout
    assert all(map(is_heldout, heldout)) and not any(map(is_heldout, train))


def test_held_out_problems_are_distinct_and_a_longer_list_extends_a_shorter_one(task):
    problems = [task.Problems().heldout(i) for i in range(COUNT)]
    assert len({problem.prompt for problem in problems}) == COUNT
    fresh = task.Problems(seed=99)
    fresh.heldout(COUNT)  # the long list is made first
    assert [fresh.heldout(i) for i in range(10)] == problems[:10]


def test_about_one_prompt_in_eight_is_held_out(task):
    rng = np.random.default_rng(0)
    share = np.mean([is_heldout(task.Problems().generate(rng).prompt) for _ in range(COUNT)])
    assert share == pytest.approx(1 / 8, abs=0.02)


def test_only_the_right_answer_is_rewarded(task):
    pairs = demonstrations(task, 400)
    rewards = [task.reward(problem, text) for problem, text in pairs]
    assert set(rewards) == {0.0, 1.0}
    right = [(problem, text) for (problem, text), value in zip(pairs, rewards, strict=True) if value == 1.0]
    for problem, text in right:
        assert all(isinstance(task.reward(problem, text), float) for _ in range(2))
        for other in (
            "",
            text[:-1],
            text + "0",
            text + "=",
            " " + text + " ",
            problem.prompt,
            text + "\N{REPLACEMENT CHARACTER}",
        ):
            assert task.reward(problem, other) == 0.0, (problem, other)


def test_prompts_and_demonstrations_use_the_alphabet(task):
    for problem, text in demonstrations(task, 400):
        for part in (problem.prompt, text, problem.answer):
            assert part and task.tokenizer.decode(task.tokenizer.encode(part)) == part


def test_a_demonstration_depends_only_on_the_generator(task):
    problem = task.Problems().train(0)
    first, second = ([task.half_wrong(problem, rng) for _ in range(20)] for rng in map(np.random.default_rng, (5, 5)))
    assert first == second and len(set(first)) > 1


def test_sizes_are_uniform(task):
    lengths = [len(task.Problems().train(i).prompt) for i in range(COUNT)]
    _, counts = np.unique(lengths, return_counts=True)
    assert counts.min() > 0.85 * COUNT / len(counts)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_negative_index_is_rejected(task, split):
    with pytest.raises(ValueError, match=r"index must be at least 0; got -1"):
        getattr(task.Problems(), split)(-1)


def test_an_exhausted_held_out_list_repeats():
    source = sort.Problems(min_digits=2, max_digits=2)
    problems = [source.heldout(i) for i in range(300)]
    every = {f"{a}{b}=" for a in range(10) for b in range(10)}
    assert {problem.prompt for problem in problems} == set(filter(is_heldout, every))
    distinct = len(set(problems))
    assert problems[distinct : 2 * distinct] == problems[:distinct]


@dataclass(frozen=True)
class OnePrompt(GeneratedProblems):
    prompt: str = ""

    def generate(self, rng):
        return Problem(self.prompt, "")


def test_a_task_with_too_few_prompts_is_rejected_instead_of_looping():
    inside = next(prompt for prompt in map(str, range(1000)) if is_heldout(prompt))
    outside = next(prompt for prompt in map(str, range(1000)) if not is_heldout(prompt))
    assert OnePrompt(prompt=outside).train(5).prompt == outside
    assert OnePrompt(prompt=inside).heldout(5).prompt == inside
    with pytest.raises(ValueError, match="too few prompts"):
        OnePrompt(prompt=inside).train(0)
    with pytest.raises(ValueError, match="too few prompts"):
        OnePrompt(prompt=outside).heldout(0)


def test_a_problem_is_frozen_and_hashable():
    problem = Problem("1=", "1")
    assert hash(problem) == hash(Problem("1=", "1"))
    with pytest.raises(AttributeError):
        problem.answer = "2"


def test_adjacent_seeds_are_not_shifted_copies():
    series = [[sort.Problems(seed=seed).train(i).prompt for i in range(200)] for seed in range(3)]
    for one, next_one in pairwise(series):
        assert sum(a == b for a, b in zip(one[1:], next_one, strict=False)) < 5
