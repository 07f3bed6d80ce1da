"""Defines what is graded: a completion with its rewards, and a rollout of them, each built once and never modified.

Advantages are not part of a completion: they are arrays with one value per completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gspax.config.protocols import Problem
from gspax.parallel import multihost
from gspax.types import Rollout


class Texts(NamedTuple):
    """The texts of a completion, its prompt, and the problem's answer."""

    prompt: str
    answer: str
    completion: str


class GradedTurns(NamedTuple):
    """The turns of a multi-turn rollout and their rewards."""

    spans: tuple[tuple[int, int], ...]  # from the end of the prompt; the ends are exclusive
    rewards: tuple[float, ...]
    environment: Mapping[str, float]  # metrics: sums of `Step.metrics` over the turns, and the tokens of replies


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample of a prompt with its rewards."""

    length: int  # tokens that the policy sampled
    finished: bool  # False: truncated
    rewards: tuple[float, ...]
    parts: Mapping[str, float] = field(default_factory=dict)  # rewards by name
    reason: str = ""  # for the reward (`rewards.scores.Score`)
    error: str = ""  # if the reward function failed, or what `blamed` says
    blamed: str = ""
    turns: GradedTurns | None = None
    sources: tuple[int, ...] = ()  # the servers that sampled it, from 1, in the order of their first tokens
    texts: Texts | None = None  # None on a process that does not own the row

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


@dataclass(frozen=True)
class GradedBatch:
    """A rollout with its rewards, ready for training."""

    version: int  # of the weights that sampled it: the number of rollouts that they were trained on
    taken: int  # problems of the data: more than P if groups were replaced or problems skipped
    rollout: Rollout  # on the learner's mesh
    completions: Sequence[Completion]
    problems: Sequence[Problem | None]  # of the groups; None where this process has no row of it
    skipped: int = 0  # of these problems
    metrics: dict[str, float] = field(default_factory=dict)  # of partial rollouts or dynamic sampling
    replaced: Sequence[Completion] = ()  # that were sampled too, and are not trained on


class Samples(NamedTuple):
    """The completions of a training step with their advantages."""

    completions: Sequence[Completion]
    advantage_B: np.ndarray  # float32
    turn_advantages: Sequence[Sequence[float]] | None = None  # for each completion, one for each of its turns

    def failed(self) -> Samples:
        """Return the samples for which the reward function failed."""
        rows = [row for row, completion in enumerate(self.completions) if completion.error]
        turns = self.turn_advantages and [self.turn_advantages[row] for row in rows]
        return Samples([self.completions[row] for row in rows], self.advantage_B[rows], turns)

    def to_json(self) -> list[dict[str, object]]:
        """Return one JSON object per completion. Collective."""
        lines = [to_json(completion) for completion in gather_texts(self.completions)]
        for row, line in enumerate(lines):
            if self.turn_advantages is not None:
                line["turn_advantages"] = list(self.turn_advantages[row])
            line["advantage"] = float(self.advantage_B[row])
        return lines


def to_json(completion: Completion) -> dict[str, object]:
    """Convert a completion with its texts to a JSON object; empty parts, reason, error and sources are left out."""
    assert completion.texts is not None, "see gather_texts"
    line: dict[str, object] = completion.texts._asdict()
    line |= {"reward": completion.reward, "length": completion.length, "finished": completion.finished}
    if (turns := completion.turns) is not None:
        line |= {"turn_spans": turns.spans, "turn_rewards": turns.rewards, "environment": turns.environment}
    if len(completion.rewards) > 1:
        line["rewards"] = completion.rewards
    optional: dict[str, object] = {"parts": completion.parts, "reason": completion.reason, "error": completion.error}
    optional["servers"] = completion.sources
    return line | {name: value for name, value in optional.items() if value}


def from_dict(record: Mapping[str, Any]) -> Completion:
    """Build a completion from what `dataclasses.asdict` made of it; tuples may be lists, as in JSON."""
    made, turns, texts = dict(record), record["turns"], record["texts"]
    if turns is not None:
        spans, rewards, environment = turns
        made["turns"] = GradedTurns(tuple(map(tuple, spans)), tuple(rewards), environment)
    if texts is not None:
        made["texts"] = Texts(*texts)
    return Completion(**made | {name: tuple(record[name]) for name in ("rewards", "sources") if name in record})


def gather_texts(completions: Sequence[Completion]) -> list[Completion]:
    """Gather the texts of all completions from all processes. Collective."""
    own = {row: tuple(one.texts) for row, one in enumerate(completions) if one.texts is not None}
    texts = multihost.gather_rows(own, len(completions))
    return [replace(completion, texts=Texts(*own)) for completion, own in zip(completions, texts, strict=True)]
