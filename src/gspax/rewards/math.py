r"""Mathematical answers: 1 if a completion's final answer equals the problem's, else 0.

    reward=rewards.math.reward
    reward=partial(rewards.math.reward, form="boxed", timeout=2.0)

Equal strings and rational numbers are compared here. The rest is compared by math-verify (the extra
`rewards`), in worker processes with a deadline: it raises in a thread, and `7^{10^9}` would exhaust the memory.
A sample whose comparison is late or crashes its worker gets `failed` and is recorded with the reason. It is counted in
`counts()`, in the metric `reward/failed` and towards `grading.max_failed`, which stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.answers import compare, extract, join_digits, reference
from gspax.rewards.calls import Failure, concurrent
from gspax.rewards.grades import Grade, Tally
from gspax.rewards.scores import Score
from gspax.rewards.workers.pool import shared

_LONGEST = 2000  # characters; a longer answer is no answer
_tally = Tally()


@concurrent(8)
def reward(
    problem: Problem,
    completion: str,
    *,
    form: str | None = None,
    timeout: float = 5.0,
    workers: int = 2,
    failed: float = 0.0,
) -> Score:
    r"""1.0 if the completion's final answer equals `problem.answer`, else 0.0.

    Args:
      problem: its answer is bare, or a solution that ends in `\boxed{}` or `####`.
      completion: any text.
      form: where the answer stands, as for `answers.extract`.
      timeout: seconds for one comparison.
      workers: processes for the comparisons of this process, shared by everything that gives the same number.
      failed: the reward of a completion whose comparison is late or crashes.
    """
    grades = grade([problem.answer], [completion], form=form, timeout=timeout, workers=workers, failed=failed)
    return grades[0].score


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
    """Grades of a batch of completions, each against the answer of the same index.

    Outcomes are "equal", "different", "no answer", "late" and "crashed".

    The arguments are those of `reward`, and `batch_timeout`, seconds for the whole batch: what has not been compared by
    then is late.
    """
    if len(answers) != len(completions):
        raise UserError(f"answers: wanted one for each of {len(completions)} completions, got {len(answers)}")
    grades: list[Grade | tuple[str, str]] = []  # a pair where math-verify decides
    for expected, completion in zip(map(reference, answers), completions, strict=True):
        answer = extract(completion, form=form)
        if answer is None or len(answer) > _LONGEST:
            grades.append(Grade(0.0, "no answer"))
        else:
            equal = compare(expected, answer)
            pair = join_digits(expected), join_digits(answer)
            grades.append(pair if equal is None else _grade(equal, failed))
    pairs = list(dict.fromkeys(each for each in grades if isinstance(each, tuple)))  # samples repeat each other
    decided = dict(zip(pairs, _ask(pairs, timeout, batch_timeout, workers), strict=True))
    done = [_grade(decided[each], failed) if isinstance(each, tuple) else each for each in grades]
    _tally.add(done)
    return done


def counts() -> dict[str, int]:
    """How many completions this process has graded, by outcome."""
    return _tally.counts()


def _grade(result: bool | Failure, failed: float) -> Grade:
    if isinstance(result, Failure):
        return Grade(failed, result.reason)
    return Grade(1.0, "equal") if result else Grade(0.0, "different")


def _ask(pairs: Sequence[tuple[str, str]], timeout: float, batch_timeout: float, workers: int) -> list[bool | Failure]:
    if not pairs:
        return []
    pool = shared("math_worker.py", workers=workers)
    deadline = time.monotonic() + batch_timeout

    def compare_pair(pair: tuple[str, str]) -> bool | Failure:
        seconds = min(timeout, deadline - time.monotonic())
        return Failure("late") if seconds <= 0 else pool.ask((*pair, seconds), timeout=seconds)

    return pool.map(compare_pair, pairs)
