"""Generated problems, each a pure function of (seed, split, index), so that a run resumes from one integer.

The hash of a prompt's text decides its split. No list of held-out prompts has to be stored, and no seed, range or
version of a task can move a prompt from one split to the other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gspax.config.protocols import HeldoutProblems, Problem, Tokenizer
from gspax.config.protocols import Message as Message
from gspax.errors import UserError, describe_error

HELDOUT_SHARE = 8  # one prompt in 8 is held out
_TRIES = 1000  # unsuccessful tries in a row after which a task has too few prompts


def digest(text: str) -> int:
    """Return a 128-bit hash of the text, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def is_heldout(prompt: str) -> bool:
    """Return whether a prompt belongs to the held-out split."""
    return digest(prompt) % HELDOUT_SHARE == 0


@dataclass(frozen=True)
class GeneratedProblems:
    """The base class of generated tasks: frozen dataclasses, so that equal fields give equal problems.

    Attributes:
      seed: the seed of the training problems; held-out problems do not depend on it.
    """

    seed: int = 0

    def generate(self, rng: np.random.Generator) -> Problem:
        """Generate a random problem, of either split."""
        raise NotImplementedError(f"{type(self).__name__}.generate")

    def train(self, index: int) -> Problem:
        """Return training problem number `index`: the first generated problem whose prompt is not held out."""
        rng = np.random.default_rng(digest(f"train {self.seed} {at_least_0(index)}"))
        for _ in range(_TRIES):
            if not is_heldout((problem := self.generate(rng)).prompt):
                return problem
        raise ValueError(f"{_TRIES} generated problems in a row are held out: the task has too few prompts")

    def heldout(self, index: int) -> Problem:
        """Return held-out problem number `index`. All are distinct until the task runs out; then the list repeats."""
        problems = _distinct_heldout(self, _enough(at_least_0(index)))
        return problems[index % len(problems)]

    def count_heldout(self, most: int) -> int:
        """Count the distinct held-out problems, up to `most`."""
        return min(most, len(_distinct_heldout(self, _enough(most))))


def _enough(count: int) -> int:
    """Return a power of 2 above `count`, so that few different lists are generated."""
    return 1 << max(8, count.bit_length())


@functools.lru_cache(maxsize=16)
def _distinct_heldout(source: GeneratedProblems, count: int) -> tuple[Problem, ...]:
    """Generate up to `count` distinct held-out problems; a larger count extends the list of a smaller one."""
    rng = np.random.default_rng(digest("heldout"))
    problems: dict[Problem, None] = {}
    tries = 0
    while len(problems) < count and tries < HELDOUT_SHARE * _TRIES:
        problem = source.generate(rng)
        tries += 1
        if is_heldout(problem.prompt) and problem not in problems:
            problems[problem] = None
            tries = 0
    if not problems:
        raise ValueError(f"none of {tries} generated problems is held out: the task has too few prompts")
    return tuple(problems)


def count_distinct(source: HeldoutProblems, most: int) -> int:
    """Count a source's held-out problems before its list repeats, up to `most`.

    A source declares the number as a property `heldout_count` or, if it has to count, a method `count_heldout(most)`.
    """
    available: int | None = getattr(source, "heldout_count", None)
    count: Callable[[int], int] | None = getattr(source, "count_heldout", None)
    if available is None:
        return most if count is None else count(most)
    return min(most, available)


def at_least_0(index: int) -> int:
    """Return the index of a problem. ValueError if it is negative."""
    if index < 0:
        raise ValueError(f"a problem's index must be at least 0; got {index}")
    return index


def read_problem(read: Callable[[int], Problem], index: int) -> Problem:
    """Return `read(index)`, where `read` is the method `train` or `heldout` of any source.

    Raises:
      UserError: the method raises an exception, or returns anything but a problem.
    """
    name = f"{type(getattr(read, '__self__', read)).__name__}.{getattr(read, '__name__', '__call__')}"
    try:
        problem = read(index)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a source may be a user's code
        raise UserError(f"data: {name}({index}) raised {describe_error(error)}") from error
    if not isinstance(getattr(problem, "prompt", None), str) or not hasattr(problem, "answer"):
        raise UserError(f"data: {name}({index}): wanted a Problem whose prompt is text, got {repr(problem)[:100]}")
    return problem


def chat_of(problem: Problem) -> list[Message]:
    """Return the messages of a problem: its context, then its prompt as the user's message."""
    return [*problem.context, {"role": "user", "content": problem.prompt}]


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> Sequence[int]:
    """Encode a problem's prompt, with the chat before it if any, which needs a chat tokenizer (`data.hf_chat`)."""
    encode: Callable[..., Sequence[int]] = tokenizer.encode
    return encode(problem.prompt, problem.context) if problem.context else encode(problem.prompt)
