"""One benchmark task: sample its completions, compute rewards, and summarize.

Problems come in chunks, whose prompts are prefilled together; a chunk's samples share the slots of a training rollout
(`Sampling.slots`), so their number is bounded by time, not by memory. A sample depends on the run's key, the task's
name, its problem and its number alone.

Axes: P problems, N samples of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

import jax
import numpy as np

from gspax.config import Evaluation, Grading, Sampling, Task
from gspax.data.problem import digest
from gspax.evaluation.completions import Policy, complete, fill_chunks
from gspax.parallel.sharding import batch_shards
from gspax.report import statistics
from gspax.report.statistics import Interval
from gspax.rewards.scores import reward_calls
from gspax.rollout import completion
from gspax.rollout.completion import Completion, gather_texts
from gspax.rollout.grading import check_evaluation
from gspax.types import Array

BENCHMARKS = 3  # folded into the run's key
# the fields of `Sampling` that a task sets
OF_TASK = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "max_prompt_tokens")
_LONGEST_ANSWER = 2000  # characters that are kept: the tests of a program can be megabytes


class Tokens(TypedDict):
    """The lengths of completions."""

    mean: float
    max: int
    total: int


Summary = TypedDict(
    "Summary",
    {
        "problems": int,
        "samples": int,
        "reward": Interval,
        "truncated": float,
        "failed": float,
        "tokens": Tokens,
        "pass": NotRequired[dict[str, Interval]],
        "majority": NotRequired[dict[str, Interval]],
    },
)


@dataclass(frozen=True)
class TaskSample:
    """One sample of a task's problem."""

    problem: int
    sample: int  # its number, from 0
    completion: Completion
    vote: object = None  # from `Task.vote`; None without one, and for a completion that gives no answer


def apply_defaults(task: Task, evaluation: Evaluation, sampling: Sampling) -> Task:
    """The task with the experiment's lengths where it has none, and the number of its problems."""
    return replace(
        task,
        problems=count_problems(task),
        max_tokens=task.max_tokens or evaluation.max_tokens or sampling.max_tokens,
        max_prompt_tokens=task.max_prompt_tokens or sampling.max_prompt_tokens,
    )


def count_problems(task: Task) -> int:
    """The number of problems that a task evaluates: `task.problems`, or all if that is 0 or more than there are."""
    available = getattr(task.data, "heldout_count", None)
    return min(task.problems or available, available) if available is not None else task.problems


def run_task(
    task: Task, policy: Policy, key: Array, *, training: Sampling, grading: Grading
) -> Iterator[list[TaskSample]]:
    """The samples of a task in chunks of whole problems, the N samples of a problem adjacent. Collective.

    Args:
      task: from `apply_defaults`.
      policy: the model and its tokenizer.
      key: of the run; every evaluation samples with the same noise.
      training: the number of prompts and samples that are in memory at one time.
      grading: settings for the calls of the task's reward.

    Yields:
      Samples with texts. Problems that cannot be used are left out.

    Raises:
      FailedRewardsError: the task's reward failed for every completion.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, BENCHMARKS), digest(task.name) % 2**32)
    chunks, slots = plan_chunks(task.problems, task.samples, training, batch_shards(policy.mesh))
    own = {name: getattr(task, name) for name in OF_TASK}
    sampling = replace(training, group=task.samples, slots=slots, **own)
    left, read, name = task.problems, task.data.heldout, f"task {task.name}"
    completions: list[Completion] = []
    with reward_calls(task.reward, grading) as rewards:
        for ids in chunks:
            rows = complete(policy, key, read, ids, sampling=sampling, rewards=rewards, name=name)
            usable = {row: each for row, each in enumerate(rows[: left * task.samples]) if each is not None}
            chunk = gather_texts(list(usable.values()))
            yield [_make_sample(each, task, ids, row) for row, each in zip(usable, chunk, strict=True)]
            left -= len(ids)
            completions += chunk
            check_evaluation(completions, rewards, name, is_last=left <= 0)


def plan_chunks(problems: int, samples: int, training: Sampling, shards: int) -> tuple[list[list[int]], int]:
    """The problems of each chunk, and the slots of its samples (0: one for each).

    A chunk has at most the prompts of a training rollout, rounded up to a multiple of `shards`; the slots are at
    most its samples.
    """
    chunks = fill_chunks(problems, training.prompts, shards)
    rows = len(chunks[0]) * samples
    slots = -(-min(training.slots or training.prompts * training.group, rows) // shards) * shards
    return chunks, slots if slots < rows else 0


def _make_sample(completion: Completion, task: Task, ids: Sequence[int], row: int) -> TaskSample:
    assert completion.texts is not None
    texts = completion.texts._replace(answer=str(completion.texts.answer)[:_LONGEST_ANSWER])
    vote = None if task.vote is None else task.vote(texts.completion)
    return TaskSample(ids[row // task.samples], row % task.samples, replace(completion, texts=texts), vote)


def to_json(task: Task, sample: TaskSample) -> dict[str, object]:
    """A sample as a JSON object, with a vote if the task has votes."""
    vote = {} if task.vote is None else {"vote": sample.vote}
    return {"problem": sample.problem, "sample": sample.sample} | vote | completion.to_json(sample.completion)


def summarize(task: Task, samples: Sequence[TaskSample]) -> Summary:
    """The summary of a task's samples as a JSON object.

    `reward` is the mean reward. `pass` is pass@k by k, for rewards that are all 0 or 1; `majority` is maj@k, for tasks
    with a vote. These have a mean over problems and a 95 % interval, clustered by problem. `truncated` and `failed` are
    shares of the completions: ended by the length limit, and without a reward. `tokens` counts those of completions.
    """

    def to_interval(value_P: np.ndarray) -> Interval:
        return statistics.to_json(statistics.estimate(value_P))

    completions, N = [each.completion for each in samples], task.samples
    reward_PN = np.array([each.reward for each in completions], np.float64).reshape(-1, N)
    length_B = np.array([each.length for each in completions])
    summary: Summary = {
        "problems": len(reward_PN),
        "samples": N,
        "reward": to_interval(reward_PN.mean(axis=1)),
        "truncated": float(np.mean([not each.finished for each in completions])),
        "failed": float(np.mean([bool(each.error) for each in completions])),
        "tokens": {"mean": float(length_B.mean()), "max": int(length_B.max()), "total": int(length_B.sum())},
    }
    sizes = statistics.sizes(N)
    if np.isin(reward_PN, (0.0, 1.0)).all():
        summary["pass"] = {str(k): to_interval(statistics.pass_at_k(reward_PN == 1, k)) for k in sizes}
    if task.vote is not None:
        vote_PN = [[each.vote for each in samples[i : i + N]] for i in range(0, len(samples), N)]
        summary["majority"] = {
            str(k): to_interval(statistics.majority_at_k(vote_PN, reward_PN, k)) for k in sizes if k > 2
        }
    return summary


def metrics(name: str, summary: Summary) -> dict[str, float]:
    """The summary as metrics of a training run: `eval/NAME/reward`, `eval/NAME/pass_at_4`, …"""
    values = {
        "reward": summary["reward"]["mean"],
        "reward_low": summary["reward"]["low"],
        "reward_high": summary["reward"]["high"],
        "truncated": summary["truncated"],
        "reward_failed": summary["failed"],
        "tokens": summary["tokens"]["mean"],
    }
    values |= {f"pass_at_{k}": each["mean"] for k, each in summary.get("pass", {}).items() if k != "1"}
    values |= {f"maj_at_{k}": each["mean"] for k, each in summary.get("majority", {}).items()}
    return {f"eval/{name}/{metric}": value for metric, value in values.items() if value is not None}
