"""Grades of completions, and a count of them by outcome."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gspax.rewards.scores import Score

FAILED = ("late", "crashed", "raised", "not finite")  # the grading failed, whatever the completion is worth


@dataclass(frozen=True)
class Grade:
    """The reward of a completion, and why."""

    reward: float
    outcome: str  # one of a few words, to be counted; those of FAILED mean the same in every module
    detail: str = ""  # for readers of samples

    @property
    def score(self) -> Score:
        """The reward with its outcome and detail: as an error if the grading failed, else as a reason."""
        text = f"{self.outcome}: {self.detail}" if self.detail else self.outcome
        failed = self.outcome in FAILED
        return Score(self.reward, reason="" if failed else text, error=text if failed else "")


class Tally:
    """How many completions a process has graded, by outcome. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, grades: Sequence[Grade]) -> None:
        with self._lock:
            self._counts.update(grade.outcome for grade in grades)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
