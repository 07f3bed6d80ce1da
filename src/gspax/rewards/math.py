r"""Rewards mathematical answers: 1 if a completion's final answer equals the problem's, else 0.

    reward=rewards.math.reward
    reward=partial(rewards.math.reward, form="boxed", timeout=2.0)

Equal strings and rational numbers are compared here. The rest is compared by math-verify (the extra `rewards`), in
worker processes with a deadline: in a thread it would raise, and `7^{10^9}` would exhaust the memory. A sample whose
comparison is late or crashes its worker gets `failed` and is recorded with the reason. It is counted in `counts()`, in
the metric `reward/failed` and toward `grading.max_failed`, which stops the run.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gspax.config.ranges import Positive, PositiveInt
from gspax.data.problem import Problem
from gspax.errors import UserError, how_to_install
from gspax.rewards.answers import compare, extract, find_problem, reference, write_numbers
from gspax.rewards.calls import Failure, compares_answers, concurrent, needs, require_answer
from gspax.rewards.scores import Grade, Score, Tally
from gspax.rewards.workers.pool import shared

_LONGEST = 2000  # characters; a longer text is not an answer
_tally = Tally()
counts = _tally.counts  # the number of completions that this process has graded, by outcome


def find_missing_parser(settings: Mapping[str, Any]) -> str:
    """Explain what this installation lacks to compare answers; empty if nothing."""
    if importlib.util.find_spec("math_verify") is not None:
        return ""
    return f"wanted the package math-verify, it is not installed: {how_to_install('rewards')}"


@compares_answers
@needs(find_missing_parser)
@concurrent(8)
def reward(
    problem: Problem,
    completion: str,
    *,
    form: Literal["boxed", "hash", "tag", "answer", "number"] | None = None,
    timeout: Positive = 5.0,
    workers: PositiveInt = 2,
    failed: float = 0.0,
) -> Score:
    r"""Compute 1.0 if the completion's final answer equals `problem.answer`, else 0.0.

    Args:
      problem: the problem; its answer is bare, or a solution that ends in `\boxed{}` or `####`.
      completion: any text.
      form: the form of the answer, as for `answers.extract`.
      timeout: seconds for one comparison.
      workers: worker processes for comparisons, shared by everything in this process with the same number.
      failed: the reward of a completion whose comparison is late or crashes.
    """
    answers = [require_answer(problem)]
    return grade(answers, [completion], form=form, timeout=timeout, workers=workers, failed=failed)[0].score


def check(problem: Problem) -> str | None:
    """Explain why a problem's answer has no final answer, or None; one of the `checks` of a data source."""
    return find_problem(str(problem.answer or "")) or None


reward.check_answer = check  # type: ignore[attr-defined]  # for the dry run


def grade(
    answers: Sequence[str],
    completions: Sequence[str],
    *,
    form: str | None = None,
    timeout: float = 5.0,
    batch_timeout: float = 60.0,
    workers: int = 2,
    failed: float = 0.0,
) -> list[Grade]:
    """Grade a batch of completions, each against the answer of the same index.

    Outcomes are "equal", "different", "no answer", "late" and "crashed".

    The arguments are those of `reward`, and `batch_timeout`, seconds for the whole batch: comparisons that have not
    started by then are late.
    """
    if len(answers) != len(completions):
        raise UserError(f"answers: wanted one for each of {len(completions)} completions, got {len(answers)}")
    pool, deadline = shared("math", workers=workers), time.monotonic() + batch_timeout

    def ask(pair: tuple[str, str]) -> Grade:
        seconds = min(timeout, deadline - time.monotonic())
        equal = pool.ask(pair, timeout=seconds) if seconds > 0 else Failure("late")
        return Grade(failed, equal.reason) if isinstance(equal, Failure) else _GRADES[equal]

    extracted = [extract(text, form=form) for text in completions]
    first = [_grade_here(*pair) for pair in zip(map(reference, answers), extracted, strict=True)]
    asked = iter(pool.map(ask, [pair for pair in first if isinstance(pair, tuple)]))
    grades = [next(asked) if isinstance(grade, tuple) else grade for grade in first]
    _tally.add(grades)
    return grades


_GRADES = {True: Grade(1.0, "equal"), False: Grade(0.0, "different")}


def _grade_here(expected: str, answer: str | None) -> Grade | tuple[str, str]:
    """Grade an answer, or return the pair of answers for math-verify to compare."""
    if answer is None or len(answer) > _LONGEST:
        return Grade(0.0, "no answer")
    equal = compare(expected, answer)
    return (write_numbers(expected), write_numbers(answer)) if equal is None else _GRADES[equal]
