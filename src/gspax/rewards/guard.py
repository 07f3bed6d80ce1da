"""A reward that may fail: called in a worker process with a deadline, so that a bad sample costs that sample only.

    reward=partial(guard, reward=my_rewards.score, timeout=2.0)

Without it, a reward runs in a thread of the trainer (`rewards.calls`): one that holds the interpreter's lock cannot be
interrupted there, and one that ends its process ends the run.
"""

from __future__ import annotations

import base64
import math
import pickle
import sys
from collections.abc import Callable

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import Failure, concurrent
from gspax.rewards.grades import Grade, Tally
from gspax.rewards.scores import Score
from gspax.rewards.workers.pool import shared

_tally = Tally()


@concurrent(8)
def guard(
    problem: Problem,
    completion: str,
    *,
    reward: Callable[[Problem, str], float | Score],
    timeout: float = 10.0,
    workers: int = 2,
    failed: float = 0.0,
) -> Score:
    """What `reward` gives, or `failed` where it raises, gives no finite number, hangs or kills its process.

    Args:
      problem: for the reward.
      completion: for the reward.
      reward: a function of an importable module, or a `functools.partial` of one: the workers are new processes, which
        import it. They see no accelerator.
      timeout: seconds for one call. The first call of a worker includes its imports.
      workers: processes, of this process, shared by everything that gives the same number.
      failed: the reward of a completion for which `reward` fails.
    """
    answer = shared("guard_worker.py", workers=workers).ask(
        {
            "reward": _pickled(reward),
            "problem": _pickled(problem),
            "completion": completion,
            "seconds": timeout,
            "path": sys.path,
        },
        timeout=timeout,
    )
    if isinstance(answer, Failure):
        grade = Grade(failed, answer.reason)
    elif "unusable" in answer:
        raise UserError(
            f"reward: wanted a function that a new process can import, got {reward!r}: {answer['unusable']}"
        )
    elif "raised" in answer:
        grade = Grade(failed, "raised", answer["raised"])
    elif not math.isfinite(answer["value"]):
        grade = Grade(failed, "not finite", str(answer["value"]))
    else:
        grade = Grade(answer["value"], "done")
    _tally.add([grade])
    return grade.score if grade.outcome != "done" else Score(grade.reward, answer["reason"], answer["error"])


def counts() -> dict[str, int]:
    """How many completions this process has guarded, by outcome."""
    return _tally.counts()


def _pickled(value: object) -> str:
    try:
        return base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:  # pickle calls the object's own code: any type
        raise UserError(f"reward: wanted a function that can be pickled, got {value!r}: {error}") from error
