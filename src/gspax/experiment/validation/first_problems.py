"""The check that each split of the data has a usable problem. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gspax.config import Evaluation
from gspax.config.protocols import DataSource, Environment
from gspax.data.problem import read_problem
from gspax.errors import UserError, describe_error

TRIED = 16  # problems of each split: the first that can be used is enough

_ADVICE = (
    " (the hash of a prompt decides whether it is held out: if prompts are equal because the answer is hidden, begin "
    "them with a number that differs, such as 'Game 42.')"
)


def first_problems(data: DataSource, environment: Environment | None, evaluation: Evaluation) -> Iterator[str]:
    """One sentence for a split without a problem that loads and that the environment accepts. Nothing is tokenized."""
    for split, count in {"training": TRIED, "held-out": min(TRIED, evaluation.problems)}.items():
        read, first = data.train if split == "training" else data.heldout, ""
        for index in range(count):
            try:
                problem = read_problem(read, index)
                if environment is not None:
                    _check_reset(environment.reset(problem))
                break
            except Exception as error:  # of a user's source or environment
                sentence = str(error) if isinstance(error, UserError) else describe_error(error)
                first = first or " ".join(sentence.split())[:300]
        else:
            advice = _ADVICE if "too few prompts" in first else ""
            yield f"data: wanted {split} problems, got none of the first {count} that can be used: {first}{advice}"


def _check_reset(opening: object) -> None:
    """UserError unless `reset` gave a state and messages."""
    if not (isinstance(opening, tuple) and len(opening) == 2):
        raise UserError(f"environment: wanted (state, messages) from reset, got {type(opening).__name__}")
    messages = list(opening[1])
    chats = (isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    if not messages or not all(chats):
        raise UserError(f"environment: wanted messages with role and content from reset, got {str(messages)[:100]}")
