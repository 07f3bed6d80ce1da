"""One task: draw its completions, reward them, and summarise.

Problems are drawn in chunks, whose prompts are prefilled together; a chunk's samples share the slots of a training
rollout batch (`Sampling.slots`), so their number is bounded by time, not by memory. A sample depends on the run's key,
the task's name, its problem and its number alone.

Axes: P problems, N samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from gspax.config import Evaluation, Grading, Sampling, Task
from gspax.data.problem import digest
from gspax.evaluation.completions import Policy, complete, fill_chunks
from gspax.parallel.sharding import batch_shards
from gspax.report import statistics
from gspax.rewards.scores import reward_calls
from gspax.rollout.grading import Row, check_evaluation, gather_texts
from gspax.types import Array

BENCHMARKS = 3  # folded into the run's key
# the fields of `Sampling` that a task sets
OF_TASK = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "max_prompt_tokens")
_LONGEST_ANSWER = 2000  # characters that a row keeps: the tests of a program can be megabytes


def apply_defaults(task: Task, evaluation: Evaluation, sampling: Sampling) -> Task:
    """The task with what it leaves to the experiment: lengths, and the number of problems."""
    return replace(
        task,
        problems=count_problems(task),
        max_tokens=task.max_tokens or evaluation.max_tokens or sampling.max_tokens,
        max_prompt_tokens=task.max_prompt_tokens or sampling.max_prompt_tokens,
    )


def count_problems(task: Task) -> int:
    """How many problems a task evaluates: `task.problems`, or all if that is 0 or more than there are."""
    available = getattr(task.data, "heldout_count", None)
    return min(task.problems or available, available) if available is not None else task.problems


def run_task(task: Task, policy: Policy, key: Array, *, training: Sampling, grading: Grading) -> Iterator[list[Row]]:
    """The completions of a task in chunks of whole problems, the N rows of a problem adjacent. Collective.

    Args:
      task: from `apply_defaults`.
      policy: the model and its tokenizer.
      key: of the run; every evaluation draws with the same noise.
      training: how many prompts and samples are in memory at one time.
      grading: how the task's reward is called.

    Yields:
      Rows of `rewards.reward_completions` with texts, and `problem` and `sample`, numbers from 0. Problems that cannot
      be used are left out.

    Raises:
      FailedRewardsError: the task's reward failed for every completion.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, BENCHMARKS), digest(task.name) % 2**32)
    chunks, slots = plan_chunks(task.problems, task.samples, training, batch_shards(policy.mesh))
    own = {name: getattr(task, name) for name in OF_TASK}
    sampling = replace(training, group=task.samples, slots=slots, **own)
    left, read, name = task.problems, task.data.heldout, f"task {task.name}"
    found: list[Row] = []
    with reward_calls(task.reward, grading) as rewards:
        for ids in chunks:
            rows = complete(policy, key, read, ids, sampling=sampling, rewards=rewards, name=name)
            kept = {number: row for number, row in enumerate(rows[: left * task.samples]) if row is not None}
            texts = gather_texts(list(kept.values()))
            yield [_finish(row, task, ids, number) for number, row in zip(kept, texts, strict=True)]
            left -= len(ids)
            found += texts
            check_evaluation(found, rewards, name, ended=left <= 0)


def plan_chunks(problems: int, samples: int, training: Sampling, shards: int) -> tuple[list[list[int]], int]:
    """The problems of each chunk, and the slots of its samples (0: one for each).

    A chunk has at most the prompts of a training rollout batch, rounded up to a multiple of `shards`; the slots are at
    most its samples.
    """
    chunks = fill_chunks(problems, training.prompts, shards)
    rows = len(chunks[0]) * samples
    slots = -(-min(training.slots or training.prompts * training.group, rows) // shards) * shards
    return chunks, slots if slots < rows else 0


def _finish(row: Row, task: Task, ids: Sequence[int], number: int) -> Row:
    extra: Row = {"problem": ids[number // task.samples], "sample": number % task.samples}
    if task.vote is not None:
        extra["vote"] = task.vote(row["completion"])
    return extra | row | {"answer": str(row["answer"])[:_LONGEST_ANSWER]}


def summarise(rows: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """What the rows of a task show, as JSON-serialisable data.

    `reward` is the mean reward. `pass` is pass@k by k, for rewards that are all 0 or 1; `majority` is maj@k, for tasks
    with a vote. These have a mean over problems and a 95 % interval, clustered by problem. `truncated` and `failed` are
    shares of the completions: cut at the length limit, and without a reward. `tokens` counts those of completions.
    """
    reward_PN = np.array([row["reward"] for row in rows], np.float64).reshape(-1, samples)
    length_B = np.array([row["length"] for row in rows])
    summary: dict[str, Any] = {
        "problems": len(reward_PN),
        "samples": samples,
        "reward": _estimate(reward_PN.mean(axis=1)),
        "truncated": float(np.mean([not row["finished"] for row in rows])),
        "failed": float(np.mean(["error" in row for row in rows])),
        "tokens": {"mean": float(length_B.mean()), "max": int(length_B.max()), "total": int(length_B.sum())},
    }
    sizes = statistics.sizes(samples)
    if np.isin(reward_PN, (0.0, 1.0)).all():
        summary["pass"] = {str(k): _estimate(statistics.pass_at_k(reward_PN == 1, k)) for k in sizes}
    if all("vote" in row for row in rows):
        vote_PN = [[row["vote"] for row in rows[i : i + samples]] for i in range(0, len(rows), samples)]
        summary["majority"] = {
            str(k): _estimate(statistics.majority_at_k(vote_PN, reward_PN, k)) for k in sizes if k > 2
        }
    return summary


def metrics(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary as metrics of a training run: `eval/NAME/reward`, `eval/NAME/pass_at_4`, …"""
    found = {
        "reward": summary["reward"]["mean"],
        "reward_low": summary["reward"]["low"],
        "reward_high": summary["reward"]["high"],
        "truncated": summary["truncated"],
        "reward_failed": summary["failed"],
        "tokens": summary["tokens"]["mean"],
    }
    found |= {f"pass_at_{k}": each["mean"] for k, each in summary.get("pass", {}).items() if k != "1"}
    found |= {f"maj_at_{k}": each["mean"] for k, each in summary.get("majority", {}).items()}
    return {f"eval/{name}/{metric}": value for metric, value in found.items() if value is not None}


def _estimate(value_P: np.ndarray) -> dict[str, float | None]:
    """The estimate as JSON, which has no NaN."""
    found = asdict(statistics.estimate(value_P))
    return {name: None if math.isnan(value) else value for name, value in found.items()}
