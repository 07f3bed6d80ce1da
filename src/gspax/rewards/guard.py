"""Guards a reward that may fail: calls it in a worker process with a deadline, so that only the bad sample is lost.

    reward=partial(guard, reward=my_rewards.score, timeout=2.0)

Without it, a reward runs in a thread of the trainer (`rewards.calls`): one that holds the interpreter's lock cannot
be interrupted there, and a reward that kills its process ends the run.
"""

from __future__ import annotations

import base64
import pickle
import sys

from gspax.config.protocols import Reward
from gspax.config.ranges import Positive, PositiveInt
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import Failure, concurrent
from gspax.rewards.scores import Grade, Scores, Tally, unpack
from gspax.rewards.workers.pool import shared

_tally = Tally()
counts = _tally.counts  # the number of completions that this process has guarded, by outcome


@concurrent(8)
def guard(
    problem: Problem,
    completion: str,
    *,
    reward: Reward,
    timeout: Positive = 10.0,
    workers: PositiveInt = 2,
    failed: float = 0.0,
) -> Scores:
    """Call `reward` in a worker; return `failed` if it raises, returns no finite number, hangs or kills its process.

    Args:
      problem: passed to the reward.
      completion: passed to the reward.
      reward: a function of an importable module, or a `functools.partial` of one: the workers are new processes, which
        import it. They see no accelerator.
      timeout: seconds for one call. The first call of a worker includes its imports.
      workers: worker processes of this process, shared by all guards with the same number.
      failed: the reward of a completion for which `reward` fails.
    """
    task = sys.path, _pickled(reward), _pickled(problem), completion
    answer = shared("guard", workers=workers).ask(task, timeout=timeout)
    outcome, given = (answer.reason, "") if isinstance(answer, Failure) else answer
    if outcome == "unusable":
        raise UserError(f"reward: wanted a function that a new process can import, got {reward!r}: {given}")
    if outcome == "refused":
        raise UserError(given)
    grade = Grade(failed, outcome, "" if outcome == "done" else given)
    _tally.add([grade])
    return unpack(given) if outcome == "done" else grade.score


def _pickled(value: object) -> str:
    try:
        return base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:  # pickle calls the object's own code: any type
        raise UserError(f"reward: wanted a function that can be pickled, got {value!r}: {error}") from error
