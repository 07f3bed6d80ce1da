"""What a graded completion is, and the tally that stops a run whose grading fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gspax.errors import UserError
from gspax.rewards.calls import Failed, Graded

FAILED = ("late", "crashed", "raised", "not finite")  # the grading failed, whatever the completion is worth
_ENOUGH = 200  # graded completions before the share that failed can stop a run


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

    def __init__(self, name: str):
        self._name, self._lock, self._counts = name, threading.Lock(), Counter[str]()
        self._detail = ""  # of the last completion that failed

    def add(self, grades: Sequence[Grade]) -> None:
        with self._lock:
            self._counts.update(grade.outcome for grade in grades)
            details = [grade.detail for grade in grades if grade.outcome in FAILED and grade.detail]
            self._detail = details[-1] if details else self._detail

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def check(self, most: float) -> None:
        """UserError if more than this share of many completions failed to be graded."""
        counts = self.counts()
        total, failed = sum(counts.values()), sum(counts.get(outcome, 0) for outcome in FAILED)
        if total >= _ENOUGH and failed > most * total:
            each = ", ".join(f"{counts[outcome]} {outcome}" for outcome in FAILED if outcome in counts)
            last = f"; the last one: {self._detail}" if self._detail else ""
            share = f"{100 * most:g}%"
            raise UserError(
                f"reward: wanted {self._name} to fail for at most {share}, got {failed} of {total} ({each}){last}"
            )
