"""A harder task with long responses: add named digits one at a time in a written scratchpad.

    prompt    a4+b7+c3=
    response  00+a4=04,04+b7=11,11+c3=14,#14

Only the text after `#` is rewarded, so one slip in a chain of 6 to 11 steps costs the whole reward. Each step is local:
the running sum is copied from the previous step, the letter is the next one, the digit follows that letter in the
prompt, and the new sum depends only on the three digits just written. A response has 9 tokens per term and 4 at the end
(`#`, two digits, stop): 58 to 103 with the default range.

A model the size of `presets.tiny_moe` learns the format from about 500 batches of 32 demonstrations at a learning rate
of 6e-3, two minutes on two cores. It then slips as often as they do; reinforcement learning has to remove the slips.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gspax.data.problem import GeneratedProblems, Problem
from gspax.data.tokenizer import CharTokenizer

NAMES = "abcdefghijk"  # eleven terms: the largest sum is 99, which has two digits
tokenizer = CharTokenizer("0123456789+=,#" + NAMES)

_TERM = re.compile(r"([a-k])([0-9])")


@dataclass(frozen=True)
class Problems(GeneratedProblems):
    """Sums of `min_terms` to `max_terms` terms, all numbers of terms equally likely. Held-out problems ignore the
    seed."""

    min_terms: int = 6
    max_terms: int = len(NAMES)

    def __post_init__(self) -> None:
        if not 2 <= self.min_terms <= self.max_terms <= len(NAMES):
            raise ValueError(
                f"wanted 2 <= min_terms <= max_terms <= {len(NAMES)}; "
                f"got min_terms={self.min_terms}, max_terms={self.max_terms}"
            )

    def generate(self, rng: np.random.Generator) -> Problem:
        digits = rng.integers(0, 10, rng.integers(self.min_terms, self.max_terms + 1)).tolist()
        terms = [f"{name}{digit}" for name, digit in zip(NAMES, digits, strict=False)]
        return Problem(prompt="+".join(terms) + "=", answer=f"{sum(digits):02d}")


def reward(problem: Problem, completion: str) -> float:
    """1 if the completion ends in `#` and the two digits of the sum, and has no other `#`; the steps do not count."""
    _, mark, answer = completion.partition("#")
    return 1.0 if mark and answer == problem.answer else 0.0


def half_wrong(problem: Problem, rng: np.random.Generator) -> str:
    """A worked demonstration: all steps correct half of the time, otherwise one step slips and later ones build on it.

    A slip is off by one, or by ten (a carry dropped or added). Later steps never correct it, so half of the
    demonstrations, whatever their length, end in a wrong answer.
    """
    terms = [(name, int(digit)) for name, digit in _TERM.findall(problem.prompt)]
    slip = int(rng.integers(len(terms))) if rng.random() < 0.5 else None
    steps, total, rest = "", 0, sum(digit for _, digit in terms)
    for i, (name, digit) in enumerate(terms):
        before, total, rest = total, total + digit, rest - digit
        if i == slip:  # among the sums that leave all later ones with two digits
            total = int(rng.choice([total + miss for miss in (-10, -1, 1, 10) if 0 <= total + miss <= 99 - rest]))
        steps += f"{before:02d}+{name}{digit}={total:02d},"
    return f"{steps}#{total:02d}"
