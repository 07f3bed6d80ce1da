"""Whether each split of the data has a problem that a run can begin with. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gspax.config import Evaluation
from gspax.data.problem import read_problem
from gspax.errors import UserError

TRIED = 16  # problems of each split: the first that can be used is enough

_ADVICE = (
    " (the hash of a prompt decides whether it is held out: if prompts are equal because the answer is hidden, begin "
    "them with a number that differs, such as 'Game 42.')"
)


def first_problems(data: Any, environment: Any, evaluation: Evaluation) -> Iterator[str]:
    """A split without a problem that can be read and, with an environment, begun. Nothing is tokenized."""
    for split, count in {"training": TRIED, "held-out": min(TRIED, evaluation.problems)}.items():
        read, first = data.train if split == "training" else data.heldout, ""
        for index in range(count):
            try:
                problem = read_problem(read, index)
                if environment is not None:
                    _check_reset(environment.reset(problem))
                break
            except Exception as error:  # of a user's source or environment
                sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                first = first or " ".join(sentence.split())[:300]
        else:
            advice = _ADVICE if "too few prompts" in first else ""
            yield f"data: wanted {split} problems, got none of the first {count} that can be used: {first}{advice}"


def _check_reset(found: Any) -> None:
    """UserError unless `reset` gave a state and messages."""
    if not (isinstance(found, tuple) and len(found) == 2):
        raise UserError(f"environment: wanted (state, messages) from reset, got {type(found).__name__}")
    messages = list(found[1])
    chats = (isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages)
    if not messages or not all(chats):
        raise UserError(f"environment: wanted messages with role and content from reset, got {str(messages)[:100]}")
