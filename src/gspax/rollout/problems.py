"""Loads problems: unusable ones are skipped and counted, and the run goes on.

A problem cannot be used if loading or encoding it raises, if it is no `Problem`, or if its prompt does not fit. In a
rollout the next problem takes its place, so the problems of a rollout depend on the data and on the first index alone:
a resumed run loads the same ones. Each process loads those of its own rows; all are told which of them failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import Sharding

from gspax.config import ModelConfig
from gspax.config.protocols import Tokenizer
from gspax.data.problem import Problem, read_problem
from gspax.data.tokenizer import check_ids
from gspax.errors import UserError, describe_error, warn
from gspax.parallel import multihost
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.episodes import EncodedProblem, Interaction, begin_conversation, encode_problem
from gspax.run.folders import write_atomically
from gspax.run.record import read_rows, to_line
from gspax.sampler.sampler import check_length

T = TypeVar("T")

FIRST = 1000  # problems; the allowed share of skipped ones is a share of these, or of all if more were loaded
_SHOWN = 3  # problems that a sentence names
_LONGEST = 300  # characters of a reason


def list_problems(encoded: Mapping[int, EncodedProblem], places: Iterable[int]) -> list[Problem | None]:
    """Return the problems of these places; None where this process has none."""
    return [encoded[place].problem if place in encoded else None for place in places]


def prepare(
    read: Callable[[int], Problem],
    index: int,
    *,
    tokenizer: Tokenizer,
    model: ModelConfig,
    limit: int,
    interaction: Interaction | AgentInteraction | None = None,
    teachers: Sequence[str] = (),
) -> EncodedProblem:
    """Load a problem and the 1 to `limit` tokens of its prompt. Raises if it cannot be loaded or encoded.

    Args:
      teachers: the names that a problem's `teacher` may have; none: it is not read.
    """
    if isinstance(interaction, AgentInteraction):
        return EncodedProblem(read_problem(read, index), ())  # its agents write the prompts
    problem = read_problem(read, index)
    encoded = encode_problem(problem, tokenizer) if interaction is None else begin_conversation(problem, interaction)
    check_ids(encoded.prompt, model.vocab_size, encoded.problem.prompt)
    check_length(encoded.prompt, limit)
    if teachers and (name := getattr(encoded.problem, "teacher", "")) not in teachers:
        raise UserError(f"Problem.teacher: wanted one of teacher.models ({', '.join(teachers)}), got {name!r}")
    return encoded


@dataclass
class Skipped:
    """The skipped training problems of a run, with reasons.

    Attributes:
      share: the largest allowed share of the problems that were loaded (`sampling.max_failed`).
      reasons: by index.
      path: a file of JSON lines, which records them.
    """

    share: float = 0.0
    reasons: dict[int, str] = field(default_factory=dict)
    path: Path | None = None

    def load(self, path: Path) -> None:
        """Load the problems that the run has skipped earlier. Collective."""
        self.path = path
        rows = read_rows(path) if jax.process_index() == 0 and path.is_file() else []
        known = {row["problem"]: str(row.get("reason")) for row in rows if isinstance(row.get("problem"), int)}
        self.reasons = multihost.gather(known)[0] | self.reasons

    def add(self, failed: Mapping[int, str], loaded: int) -> None:
        """Record skipped problems, and warn of them.

        Args:
          failed: reasons by index.
          loaded: the number of problems that the run has loaded, these included.

        Raises:
          UserError: more than `share` of them were skipped.
        """
        if not failed:
            return
        self.reasons |= failed
        if self.path is not None and jax.process_index() == 0:
            lines = [to_line({"problem": index, "reason": reason}) for index, reason in sorted(self.reasons.items())]
            try:
                write_atomically(self.path, "".join(lines))
            except OSError as error:  # a full disk costs a line of a log, not the run
                warn(f"{self.path} could not be written: {error.strerror}; the run goes on")
        allowed = int(self.share * max(loaded, FIRST))
        if len(self.reasons) > allowed:
            raise UserError(
                f"data: {len(self.reasons)} of {loaded} problems cannot be used (sampling.max_failed="
                f"{100 * self.share:g} % allows {allowed}): {name_problems(self.reasons)}"
            )
        more = "" if self.path is None else f" ({len(self.reasons)} so far, all in {self.path.name})"
        multihost.warn_from_primary(f"data: {name_problems(failed)}: skipped{more}")


def read_usable(
    make: Callable[[int], T],
    ids: Mapping[int, int],
    places: int,
    sharding: Sharding,
    skipped: Skipped,
    *,
    group: int = 1,
) -> tuple[dict[int, int], dict[int, T]]:
    """Call `make(id)` for the slots of this process, and take the next ids in place of failing ones. Collective.

    Args:
      ids: the first id of each slot to fill; replacements are taken after the largest.
      places: the number of slots in all.
      sharding: the sharding of an array in which each slot has `group` adjacent rows.
      skipped: counts the problems for which `make` raises.

    Returns:
      The id of each filled slot, and the result of `make` for slots with a row on this process's devices.

    Raises:
      UserError: more problems fail than `skipped` allows.
    """
    left, ids, made = dict(ids), dict(ids), dict[int, T]()
    while left:
        usable, failed = attempt(make, left, places, sharding, group=group)
        made |= usable
        following = max(ids.values()) + 1
        skipped.add({left[place]: reason for place, reason in failed.items()}, loaded=following)
        left = dict(zip(sorted(failed), count(following)))
        ids |= left
    return ids, made


def attempt(
    make: Callable[[int], T], ids: Mapping[int, int], places: int, sharding: Sharding, *, group: int = 1
) -> tuple[dict[int, T], dict[int, str]]:
    """Call `make(id)` for the slots of this process, and gather the reasons of failures from all processes. Collective.

    Takes the arguments of `read_usable`.
    """
    made, failed = dict[int, T](), dict[int, str]()

    def try_place(place: int) -> None:
        try:
            if place in ids:
                made[place] = make(ids[place])
        except (Exception, SystemExit) as error:  # data is anybody's code
            sentence = str(error) if isinstance(error, UserError) else describe_error(error)
            failed[place] = sentence[:_LONGEST]

    multihost.local_rows(try_place, range(places), sharding, group=group)
    everywhere = dict[int, str]()
    for part in multihost.gather(failed):
        everywhere = part | everywhere
    return {place: value for place, value in made.items() if place not in everywhere}, everywhere


def name_problems(reasons: Mapping[int, str]) -> str:
    """Return a phrase with the first of these problems, each with its reason."""
    sentences = [f"problem {index}: {reasons[index]}" for index in sorted(reasons)[:_SHOWN]]
    more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
    return "; ".join(sentences + more)
