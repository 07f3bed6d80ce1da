"""Problems, drawn by a pure function of (seed, split, index), so that a run resumes from one integer.

The hash of a prompt's text decides its split. No list of held-out prompts has to be stored, and no seed, range or
version of a task can move a prompt from one split to the other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from gspax.config.protocols import Message as Message
from gspax.config.protocols import Problem
from gspax.errors import UserError, place_of

HELDOUT_SHARE = 8  # one prompt in 8 is held out
_TRIES = 1000  # unsuccessful draws in a row after which a task has too few prompts


class Source(Protocol):
    """A task to draw problems from: a frozen dataclass, so that equal fields make equal sources."""

    @property
    def seed(self) -> int: ...

    def draw(self, rng: np.random.Generator) -> Problem: ...

    def __hash__(self) -> int: ...


def digest(text: str) -> int:
    """A 128-bit hash of the text, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def is_heldout(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split."""
    return digest(prompt) % HELDOUT_SHARE == 0


def train_problem(source: Source, index: int) -> Problem:
    """Training problem number `index` of the source's seed, redrawn until its prompt is not held out."""
    if index < 0:
        raise ValueError(f"a problem's index must be at least 0; got {index}")
    rng = np.random.default_rng(digest(f"train {source.seed} {index}"))
    for _ in range(_TRIES):
        problem = source.draw(rng)
        if not is_heldout(problem.prompt):
            return problem
    raise ValueError(f"{_TRIES} draws in a row gave a held-out prompt: the task has too few prompts")


def heldout_problem(source: Source, index: int) -> Problem:
    """Held-out problem number `index`, the same for every seed. All are distinct until the task runs out of them; then
    the list repeats."""
    if index < 0:
        raise ValueError(f"a problem's index must be at least 0; got {index}")
    problems = _distinct_heldout(source, 1 << max(8, index.bit_length()))
    return problems[index % len(problems)]


@functools.lru_cache(maxsize=16)
def _distinct_heldout(source: Source, count: int) -> tuple[Problem, ...]:
    """Up to `count` distinct held-out problems; a larger count extends the list of a smaller one."""
    rng = np.random.default_rng(digest("heldout"))
    problems: dict[Problem, None] = {}
    tries = 0
    while len(problems) < count and tries < HELDOUT_SHARE * _TRIES:
        problem = source.draw(rng)
        tries += 1
        if is_heldout(problem.prompt) and problem not in problems:
            problems[problem] = None
            tries = 0
    if not problems:
        raise ValueError(f"{tries} draws gave no held-out prompt: the task has too few prompts")
    return tuple(problems)


def read_problem(read: Callable[[int], Problem], index: int) -> Problem:
    """`read(index)`, where `read` is the method `train` or `heldout` of any source.

    UserError if it raises, or gives anything but a problem.
    """
    name = getattr(read, "__qualname__", type(read).__name__)
    try:
        problem = read(index)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a source may be a user's code
        raise UserError(f"data: {name}({index}) raised {type(error).__name__}: {error}{place_of(error)}") from error
    if not isinstance(getattr(problem, "prompt", None), str) or not hasattr(problem, "answer"):
        raise UserError(f"data: {name}({index}): wanted a Problem whose prompt is text, got {repr(problem)[:100]}")
    return problem


def encode_prompt(tokenizer: Any, problem: Problem) -> Sequence[int]:
    """The token ids of a problem's prompt, and of the chat before it, which takes a chat tokenizer (`data.hf_chat`)."""
    if not problem.context:
        return tokenizer.encode(problem.prompt)
    return tokenizer.encode(problem.prompt, problem.context)


def data_problems(data: Any) -> Iterator[str]:
    """Why a data source cannot be used, one sentence each."""
    missing = [name for name in ("train", "heldout") if not callable(getattr(data, name, None))]
    if isinstance(data, type):
        yield f"data: wanted an instance, got the class {data.__name__} (write {data.__name__}(...))"
    elif missing:
        yield f"data: wanted an object with train and heldout, {type(data).__name__} has no {missing[0]}"
