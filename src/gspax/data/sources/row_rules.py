"""Rules for `checks` and `filters`. A rule is any function that returns the reason to reject a problem, or None."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from gspax.config.protocols import Tokenizer
from gspax.data.problem import Problem, digest, encode_prompt
from gspax.data.sources.tables import JsonLines
from gspax.errors import UserError, brief
from gspax.storage.paths import to_path


@dataclass(frozen=True)
class PromptTokens:
    """Rejects prompts that, with the messages before them, have more than `most` tokens.

    Attributes:
      tokenizer: the tokenizer of the experiment.
      most: the limit: `sampling.max_prompt_tokens`, or fewer.
    """

    tokenizer: Tokenizer
    most: int

    def __call__(self, problem: Problem) -> str | None:
        try:
            tokens = len(encode_prompt(self.tokenizer, problem))
        except (UserError, ValueError) as error:  # such as a character outside the tokenizer's alphabet
            return f"the prompt cannot be encoded: {brief(error)}"
        return f"the prompt has {tokens} tokens, more than {self.most}" if tokens > self.most else None


@dataclass(frozen=True)
class AnswerMatches:
    r"""Rejects answers without a match of a regular expression: `AnswerMatches(r"#### -?[\d,]+$")`."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: wanted a regular expression, got {self.pattern!r} ({error})") from error

    def __call__(self, problem: Problem) -> str | None:
        if re.search(self.pattern, problem.answer):
            return None
        return f"the answer does not match {self.pattern!r}: {problem.answer[-60:]!r}"


@dataclass(frozen=True)
class PassRate:
    """Rejects prompts whose mean reward in earlier samples is outside [low, high].

    Attributes:
      path: JSON lines with `prompt` and `reward`, as in a run's folder `samples`, or a folder of such files. Samples
        whose reward failed (`error`) do not count. Prompts are compared as the policy read them, so the run must have
        had the same `template`.
      low: the smallest mean reward that is accepted.
      high: the largest mean reward that is accepted.
      unseen: whether to "drop" or "keep" a prompt without samples.
    """

    path: str
    low: float = 0.0
    high: float = 1.0
    unseen: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low: wanted at most high={self.high}, got {self.low}")
        if self.unseen not in ("drop", "keep"):
            raise ValueError(f"unseen: wanted 'drop' or 'keep', got {self.unseen!r}")

    def __call__(self, problem: Problem) -> str | None:
        rate = self._rates[1].get(digest(problem.prompt))
        if rate is None:
            return None if self.unseen == "keep" else f"there is no sample of this prompt in {self.path}"
        return None if self.low <= rate <= self.high else f"the pass rate is {rate:.3g}, outside the range"

    @property
    def paths(self) -> tuple[str, ...]:
        """The file or folder of the samples."""
        return (str(self.path),)

    def described(self) -> dict[str, object]:
        """Describe the rule for `experiment.describe`: the content of the samples, not their path."""
        return {"samples": self._rates[0], "low": self.low, "high": self.high, "unseen": self.unseen}

    @functools.cached_property
    def _rates(self) -> tuple[str, dict[int, float]]:
        """A hash of the samples, and the mean reward of each prompt by its digest."""
        path = to_path(self.path)
        rewards = defaultdict[int, list[float]](list)
        files = [path]
        if path.is_dir():  # failed_STEP.jsonl has the failures of every step, but none of its other samples
            files = sorted(file for file in path.glob("*.jsonl") if not file.name.startswith("failed_"))
        if not files:
            raise UserError(f"data: wanted samples in {self.path}, got a folder without .jsonl files")
        table = JsonLines(tuple(map(str, files)))
        for i, row in enumerate(table.rows()):
            try:
                if "error" not in row:
                    rewards[digest(row["prompt"])].append(float(row["reward"]))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"data: {table.where(i)}: wanted a sample with prompt and reward, got {row!r:.60}"
                ) from error
        return table.content, {prompt: sum(values) / len(values) for prompt, values in rewards.items()}
