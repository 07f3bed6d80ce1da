"""Arithmetic with a calculator: expressions that a small model cannot compute, but can write as calls.

    prompt       37*46+58?
    message      [37*46]         a call of the tool
    reply        =1702
    message      [1702+58]
    reply        =1760
    message      1760            the answer

A message without brackets is the answer, and it alone is rewarded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gspax.data.chat import CharChat
from gspax.data.problem import GeneratedProblems, Problem

DIGITS = "0123456789"
tokenizer = CharChat(DIGITS + "+-*=?![]", user="{}?", tool="={}")


@dataclass(frozen=True)
class Problems(GeneratedProblems):
    """A product of two numbers of two digits, plus or minus a third one. Held-out problems ignore the seed."""

    def generate(self, rng: np.random.Generator) -> Problem:
        a, b, c = rng.integers(10, 100, 3).tolist()
        sign = "+-"[rng.integers(2)]
        return Problem(prompt=f"{a}*{b}{sign}{c}", answer=str(a * b + (c if sign == "+" else -c)))


def reward(problem: Problem, completion: str) -> float:
    """1 if the last message is the value of the expression."""
    return 1.0 if completion == problem.answer else 0.0


def half_wrong(problem: Problem, rng: np.random.Generator) -> list[str]:
    """The messages of a demonstration: right half of the time, otherwise with one slip.

    A slip is a wrong digit in the first call, in the second one or in the answer, or a call without its end.
    """
    product, rest = problem.prompt[:5], problem.prompt[5:]
    slip = int(rng.integers(4)) if rng.random() < 0.5 else None
    first = _misread(product, rng) if slip == 0 else product
    a, b = map(int, first.split("*"))
    second = f"{a * b}{rest}"
    second = _misread(second, rng) if slip == 1 else second
    number, sign, other = second.partition(rest[0])
    answer = str(int(number) + int(sign + other))
    answer = _misread(answer, rng) if slip == 2 else answer
    if slip == 3:
        return [f"[{first}", f"[{first}]", f"[{second}]", answer]
    return [f"[{first}]", f"[{second}]", answer]


def _misread(text: str, rng: np.random.Generator) -> str:
    """The text with another digit in place of one; the first digit of a number does not become 0."""
    place = int(rng.choice([i for i, character in enumerate(text) if character in DIGITS]))
    others = [digit for digit in DIGITS[1:] if digit != text[place]]
    return text[:place] + str(rng.choice(others)) + text[place + 1 :]
