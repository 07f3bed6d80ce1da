"""What a graded completion is, and a count of them by outcome."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gspax.rewards.calls import Failed, Graded

FAILED = ("late", "crashed", "raised", "not finite")  # the grading failed, whatever the completion is worth


@dataclass(frozen=True)
class Grade:
    """The reward of a completion, and why."""

    reward: float
    outcome: str  # one of a few words, to be counted; those of FAILED in every module
    detail: str = ""  # what a reader of samples wants to see

    @property
    def reason(self) -> str:
        """The outcome, with its detail if there is one."""
        return f"{self.outcome}: {self.detail}" if self.detail else self.outcome

    @property
    def as_reward(self) -> float:
        """The reward with its reason, or as a failure if the grading failed."""
        return (Failed if self.outcome in FAILED else Graded)(self.reward, self.reason)


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
