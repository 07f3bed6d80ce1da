"""Scores of completions: values that a reward function may return, and the numbers that training reads from them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gspax.config import Grading
from gspax.config.protocols import Reward, Step
from gspax.errors import shorten
from gspax.rewards.calls import Calls, Failure

FAILED = (
    "late",
    "crashed",
    "raised",
    "no number",
)  # outcomes of a failed grading, which say nothing about the completion
LARGEST = 1e18  # magnitude of a reward: advantages sum squares of rewards in float32, which ends at 3.4e38


@dataclass(frozen=True)
class Score:
    """A reward with more information than its number. A reward function may return it instead of a number.

    Attributes:
      value: the reward.
      reason: a text that is saved with the completion.
      error: why the reward could not be computed. The completion then counts as failed, also toward
        `grading.max_failed`, but gets `value` instead of `grading.failed`.
      parts: numbers by name, each of which becomes a metric.
    """

    value: float
    reason: str = ""
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """The reward of a completion, and the reason for it."""

    reward: float
    outcome: str  # one of a few words, to be counted; the words in FAILED mean the same in every module
    detail: str = ""  # for readers of samples

    @property
    def score(self) -> Score:
        """The reward with its outcome and detail: as an error if the grading failed, else as a reason."""
        text = f"{self.outcome}: {self.detail}" if self.detail else self.outcome
        failed = self.outcome in FAILED
        return Score(self.reward, reason="" if failed else text, error=text if failed else "")


class Tally:
    """A counter of the completions that a process has graded, by outcome. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, grades: Sequence[Grade]) -> None:
        """Count the outcomes of completions."""
        with self._lock:
            self._counts.update(grade.outcome for grade in grades)

    def counts(self) -> dict[str, int]:
        """Return the number of completions by outcome."""
        with self._lock:
            return dict(self._counts)


class Result(NamedTuple):
    """The rewards of one completion, or the error that prevented them."""

    rewards: tuple[float, ...]
    error: str = ""  # if there are rewards, the errors of their scores
    parts: Mapping[str, float] = {}
    reason: str = ""
    names: tuple[str, ...] = ()  # the names of `rewards`, if the function returned a mapping
    blamed: str = ""  # what failed, if it was not the reward function


def reward_calls(reward: Reward, grading: Grading) -> Calls[Result]:
    """Make the calls of a reward function. The result of a failed call has an error and no rewards."""
    return Calls(reward, grading, read=to_result, fail=partial(Result, ()))


def to_score(value: object) -> Score:
    """Convert a number or a `Score` to a `Score` of floats. TypeError or ValueError for anything else."""
    if not isinstance(value, Score):
        return Score(to_number(value))
    parts = {str(name): to_number(part) for name, part in value.parts.items()}
    return Score(to_number(value.value), str(value.reason), str(value.error), parts)


def to_number(value: object) -> float:
    """Convert a number to a float. TypeError or ValueError for anything else, including the text of a number."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"wanted a number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def add_up(scores: Mapping[str, Score]) -> Score:
    """Add up named scores; they become the parts of the sum, which has all their reasons and errors."""
    parts = {name: score.value for name, score in scores.items()}
    reason = _join((name, score.reason) for name, score in scores.items())
    return Score(sum(parts.values()), reason, _join((name, score.error) for name, score in scores.items()), parts)


Scores = Score | tuple[Score, ...] | dict[str, Score]  # one reward, several, or several by name


def to_scores(value: object) -> Scores:
    """Convert the value of a reward function to scores. TypeError or ValueError if it is not valid.

    The scores of a mapping keep its order, so that a reader can warn about it.
    """
    if isinstance(value, Mapping):
        return {str(name): to_score(member) for name, member in value.items()}
    return tuple(map(to_score, value)) if isinstance(value, tuple) else to_score(value)


def to_result(value: object) -> Result:
    """Convert the value of a reward function to rewards: finite numbers up to ±`LARGEST`, or an error.

    The rewards of a mapping are in the alphabetical order of their names; the parts keep the mapping's order.
    """
    try:
        scores = to_scores(value)
    except Exception:
        return Result((), f"wanted a number, a tuple or a mapping of numbers, got {shorten(repr(value))}")
    names: tuple[str, ...] = ()
    if isinstance(scores, dict):
        names, whole = tuple(sorted(scores)), add_up(scores)
        rewards = tuple(whole.parts[name] for name in names)
    elif isinstance(scores, tuple):
        reasons, errors = (_join(("", getattr(score, kind)) for score in scores) for kind in ("reason", "error"))
        whole, rewards = Score(0.0, reasons, errors), tuple(score.value for score in scores)
    else:
        whole, rewards = scores, (scores.value,)
    if not rewards or not all(abs(number) <= LARGEST for number in (*rewards, *whole.parts.values())):  # false for NaN
        return Result((), f"wanted finite numbers up to ±1e18, got {shorten(repr(value))}")
    return Result(rewards, whole.error, whole.parts, whole.reason, names)


def pack(value: object) -> list[object]:
    """Convert a valid return value to JSON values, for `unpack`."""
    scores = to_scores(value)
    rows = [scores] if isinstance(scores, Score) else [*scores.values()] if isinstance(scores, dict) else [*scores]
    names = [*scores] if isinstance(scores, dict) else None
    return [isinstance(scores, Score), names, [vars(score) for score in rows]]


def unpack(packed: Sequence[Any]) -> Scores:
    """Invert `pack`."""
    is_single, names, rows = packed
    scores = [Score(**row) for row in rows]
    return scores[0] if is_single else tuple(scores) if names is None else dict(zip(names, scores, strict=True))


def read_step(value: object) -> Step | Failure:
    """Convert the return value of `step` to a step with floats, or to a `Failure` that says what is wrong."""
    if not isinstance(value, Step):
        return Failure(f"wanted a gspax.rewards.environments.Step, got {type(value).__name__}")
    result = to_result(value.reward)
    if result.error or len(result.rewards) != 1:
        return Failure(f"reward: {result.error or 'wanted one number, got several'}")
    try:
        metrics = {str(name): to_number(number) for name, number in value.metrics.items()}
    except Exception:
        return Failure(f"metrics: wanted numbers by name, got {shorten(repr(value.metrics))}")
    return value._replace(reward=result.rewards[0], metrics=metrics)


def _join(texts: Iterable[tuple[str, str]]) -> str:
    """Join texts, each after its name if it has one; empty texts are left out."""
    return "; ".join(f"{name}: {text}" if name else text for name, text in texts if text)
