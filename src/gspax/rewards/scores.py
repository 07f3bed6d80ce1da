"""Scores of completions: what a reward function may return, and the numbers that training reads from it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from gspax.config import Grading
from gspax.config.protocols import Reward, Step
from gspax.errors import shorten
from gspax.rewards.calls import Calls, Failure

FAILED = (
    "late",
    "crashed",
    "raised",
    "not finite",
)  # outcomes of a grading that failed, whatever the completion is worth
LARGEST = 1e18  # magnitude of a reward: advantages sum squares of rewards in float32, which ends at 3.4e38


@dataclass(frozen=True)
class Score:
    """A reward with more to say than its number. A reward function may return it in place of a number.

    Attributes:
      value: the reward.
      reason: a text that is kept with the completion.
      error: why the reward could not be computed. The completion then counts as failed, also toward
        `grading.max_failed`, but gets `value` in place of `grading.failed`.
      parts: numbers by name, each of which is a metric.
    """

    value: float
    reason: str = ""
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


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


class Result(NamedTuple):
    """The rewards of one completion, or the error because of which there are none."""

    rewards: tuple[float, ...]
    error: str = ""  # with rewards, the errors of their scores
    parts: Mapping[str, float] = {}
    reason: str = ""
    names: tuple[str, ...] = ()  # of `rewards`, if the function returned a mapping


def reward_calls(reward: Reward, grading: Grading) -> Calls[Result]:
    """Calls of a reward function. The result of a failed call has an error and no rewards."""
    return Calls(reward, grading, read=to_result, fail=partial(Result, ()))


def to_score(value: object) -> Score:
    """A number or a `Score` as a `Score` of floats. TypeError or ValueError for anything else."""
    if not isinstance(value, Score):
        return Score(float(value))  # type: ignore[arg-type]
    return replace(value, value=float(value.value), parts={name: float(part) for name, part in value.parts.items()})


def add_up(scores: Mapping[str, Score]) -> Score:
    """The sum of named scores, which become its parts, with all their reasons and errors."""
    parts = {name: score.value for name, score in scores.items()}
    reason = _join((name, score.reason) for name, score in scores.items())
    return Score(sum(parts.values()), reason, _join((name, score.error) for name, score in scores.items()), parts)


def to_result(value: object) -> Result:
    """The rewards in a function's return value: finite numbers up to ±`LARGEST`, or an error.

    The numbers of a mapping are in the alphabetical order of their names, whatever their order in the mapping.
    """
    names: tuple[str, ...] = ()
    try:
        if isinstance(value, Mapping):
            whole = add_up({str(name): to_score(member) for name, member in value.items()})
            names = tuple(sorted(whole.parts))
            rewards = tuple(whole.parts[name] for name in names)
        elif isinstance(value, tuple):
            scores = [to_score(member) for member in value]
            whole = Score(
                0.0, _join(("", score.reason) for score in scores), _join(("", score.error) for score in scores)
            )
            rewards = tuple(score.value for score in scores)
        else:
            whole = to_score(value)
            rewards = (whole.value,)
    except Exception:
        return Result((), f"wanted a number, a tuple or a mapping of numbers, got {shorten(repr(value))}")
    if not rewards or not all(abs(number) <= LARGEST for number in (*rewards, *whole.parts.values())):  # false for NaN
        return Result((), f"wanted finite numbers up to ±1e18, got {shorten(repr(value))}")
    return Result(rewards, whole.error, whole.parts, whole.reason, names)


def read_step(value: object) -> Step | Failure:
    """The return value of `step`, with its reward and metrics as floats, or what is wrong with it."""
    if not isinstance(value, Step):
        return Failure(f"wanted a gspax.rewards.environments.Step, got {type(value).__name__}")
    result = to_result(value.reward)
    if result.error or len(result.rewards) != 1:
        return Failure(f"reward: {result.error or 'wanted one number, got several'}")
    try:
        metrics = {str(name): float(number) for name, number in value.metrics.items()}
    except Exception:
        return Failure(f"metrics: wanted numbers by name, got {shorten(repr(value.metrics))}")
    return value._replace(reward=result.rewards[0], metrics=metrics)


def _join(texts: Iterable[tuple[str, str]]) -> str:
    """Texts, each after its name if it has one; empty ones are left out."""
    return "; ".join(f"{name}: {text}" if name else text for name, text in texts if text)
