"""The default task: sort the digits of a prompt. The answer to `3142=` is `1234`; only the exact answer is rewarded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gspax.data.problem import GeneratedProblems, Problem
from gspax.data.tokenizer import CharTokenizer

tokenizer = CharTokenizer("0123456789=")


@dataclass(frozen=True)
class Problems(GeneratedProblems):
    """Numbers of `min_digits` to `max_digits` digits, all lengths equally likely. Held-out problems ignore the seed."""

    min_digits: int = 3
    max_digits: int = 6

    def __post_init__(self) -> None:
        if not 2 <= self.min_digits <= self.max_digits <= 1000:
            raise ValueError(
                "wanted 2 <= min_digits <= max_digits <= 1000; "
                f"got min_digits={self.min_digits}, max_digits={self.max_digits}"
            )

    def generate(self, rng: np.random.Generator) -> Problem:
        count = rng.integers(self.min_digits, self.max_digits + 1)
        digits = "".join(map(str, rng.integers(0, 10, count)))
        return Problem(prompt=f"{digits}=", answer="".join(sorted(digits)))


def reward(problem: Problem, completion: str) -> float:
    """Return 1 for exactly the sorted digits, otherwise 0."""
    return 1.0 if completion == problem.answer else 0.0


def half_wrong(problem: Problem, rng: np.random.Generator) -> str:
    """Return a demonstration that teaches the format only: the answer half of the time, otherwise its digits in random
    order (which may happen to be sorted)."""
    if rng.random() < 0.5:
        return problem.answer
    return "".join(rng.permutation(list(problem.answer)))
