"""Evaluates a policy on the held-out problems of a run and on benchmark tasks: sample, compute rewards, summarize.

Problems come in chunks, whose prompts are prefilled together. Held-out problems are sampled at temperature 1 and
decoded greedily, side by side in one program. The samples of a task's chunk share the slots of a training rollout
(`Sampling.slots`), so their number is limited by time, not by memory. A sample depends only on the run's key, the
task's name, its problem and its number.

Axes: P problems, N samples of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NotRequired, TypedDict

import jax
import numpy as np

from gspax.config import Evaluation, Experiment, Published, Sampling, Task
from gspax.config.protocols import HeldoutProblems
from gspax.data.problem import Problem, count_distinct, digest
from gspax.errors import UserError, describe_error, warn_once
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.report import statistics
from gspax.report.statistics import Interval
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result, reward_calls
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.completion import Completion, gather_texts
from gspax.rollout.completion import to_json as completion_to_json
from gspax.rollout.contract import Request, RolloutSampler, Weights
from gspax.rollout.episodes import EncodedProblem, Interaction
from gspax.rollout.grading import check_evaluation, find_failed, reward_completions
from gspax.rollout.problems import attempt, list_problems, name_problems, prepare
from gspax.run import interrupt
from gspax.run.progress import Bar, PhaseBar
from gspax.sampler.sampler import lengths_to_host, make_options
from gspax.types import Array, Stream

# the fields of `Sampling` that a task sets
OF_TASK = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "max_prompt_tokens")
_LONGEST_ANSWER = 2000  # characters that are kept: the tests of a program can be megabytes
SHOWN = 16  # held-out problems whose first sample the report shows


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy to evaluate, with its model and tokenizer and the settings of evaluations."""

    sampler: RolloutSampler
    weights: Weights
    settings: Experiment | Published
    interaction: Interaction | AgentInteraction | None = None  # for multi-turn rollouts


class Tokens(TypedDict):
    """Statistics of the lengths of completions, in tokens."""

    mean: float
    max: int
    total: int


Summary = TypedDict(
    "Summary",
    {
        "problems": int,
        "skipped": int,
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
    vote: object = None  # from `Task.vote`; None without such a function, or if the completion gives no answer


@dataclass
class LeftOut:
    """The problems that an evaluation could not use, and the reasons."""

    name: str  # the evaluation's name in messages
    reasons: dict[int, str] = field(default_factory=dict)

    def warn(self, problems: int) -> None:
        """Warn once about all of them, at the end of an evaluation of `problems` problems."""
        if self.reasons and jax.process_index() == 0:
            count = f"{len(self.reasons):,} of {problems:,} problems left out of the evaluation"
            warn_once(f"{self.name}: {name_problems(self.reasons)}: {count}")


def split_problems(problems: int, most: int, shards: int) -> tuple[list[range], int]:
    """Split problem indices into chunks, the last of which may be smaller, and return them with the chunk size.

    The size is at most `most`, rounded up to a multiple of `shards`.
    """
    size = -(-max(1, min(problems, most)) // shards) * shards
    return [range(first, min(first + size, problems)) for first in range(0, problems, size)], size


def complete(
    policy: EvaluatedPolicy,
    key: Array,
    read: Callable[[int], Problem],
    ids: Sequence[int],
    *,
    sampling: Sampling,
    rewards: Calls[Result],
    left_out: LeftOut,
    greedy: int = 0,
) -> dict[tuple[int, int], Completion]:
    """Sample the completions of problems, and return them by (id, number of the sample), in this order. Collective.

    Problems that cannot be loaded or whose prompts do not fit are left out.

    Args:
      policy: the policy that samples.
      key: the random key, as for `sampler.sample`.
      read: loads the problem with an id.
      ids: the ids, at most `sampling.prompts`.
      sampling: how completions are sampled; its `prompts` is a multiple of the devices that rows are sharded over.
      rewards: the pool of reward calls, for completions or for the last message of each multi-turn rollout.
      left_out: collects the problems that are left out.
      greedy: the number of completions at the end of each group that are decoded greedily.

    Returns:
      Completions as from `grading.reward_completions`, with texts on the process that owns the row.
    """
    placed, encoded, usable = _load(policy, read, ids, sampling, left_out)
    if not usable:
        return {}
    model, tokenizer = policy.settings.model, policy.settings.tokenizer
    problems = list_problems(encoded, range(len(placed)))
    reward = partial(reward_completions, problems, tokenizer=tokenizer, calls=rewards)
    mesh, interaction = policy.sampler.mesh, policy.interaction and replace(policy.interaction, rewards=rewards)
    sampling = sampling.for_new_prompts()
    options = replace(make_options(model, tokenizer, sampling, mesh), greedy=greedy)
    request = Request(encoded=encoded, prompt_ids=placed, key=key, options=options, interaction=interaction)
    sampled = policy.sampler.sample(policy.weights, request)
    if not sampled.done():
        interrupt.wait([sampled])
    rollout, started = sampled.result()
    completions = reward(lengths_to_host(rollout), started=started)
    group = sampling.group
    return {(ids[place], n): completions[place * group + n] for place in usable for n in range(group)}


def _load(
    policy: EvaluatedPolicy, read: Callable[[int], Problem], ids: Sequence[int], sampling: Sampling, left_out: LeftOut
) -> tuple[list[int], dict[int, EncodedProblem], list[int]]:
    """Load a chunk: return the problem id of each of the `sampling.prompts` prompts, the problems of this process's
    rows, and the positions of the `ids` that can be used, in their order.

    The other positions are filled with the first problem that can be used.
    """
    make = partial(
        prepare,
        read,
        tokenizer=policy.settings.tokenizer,
        model=policy.settings.model,
        limit=sampling.max_prompt_tokens,
        interaction=policy.interaction,
    )
    places, by_row = sampling.prompts, named_sharding(policy.sampler.mesh, "batch")
    encoded, failed = attempt(make, dict(enumerate(ids)), places, by_row)
    left_out.reasons |= {ids[place]: reason for place, reason in failed.items()}
    usable = [place for place in range(len(ids)) if place not in failed]
    if not usable:
        return [], {}, []
    filler = ids[usable[0]]
    filled, again = attempt(make, dict.fromkeys({*range(places)}.difference(usable), filler), places, by_row)
    if again:
        raise UserError(f"{left_out.name}: problem {filler} could be read only once: {next(iter(again.values()))}")
    placed = [ids[place] if place in usable else filler for place in range(places)]
    return placed, encoded | filled, usable


def count_heldout(evaluation: Evaluation, data: HeldoutProblems) -> int:
    """Count the held-out problems of an evaluation: `evaluation.problems`, or all if there are fewer."""
    return _at_most(evaluation.problems, data)


def _at_most(problems: int, data: HeldoutProblems) -> int:
    """Return the smaller of `problems` and the data's number of problems; that number if `problems` is 0."""
    return count_distinct(data, problems) if problems else getattr(data, "heldout_count")  # noqa: B009 (only finite sources have it)


def evaluate_heldout(
    policy: EvaluatedPolicy, key: Array, data: HeldoutProblems, rewards: Calls[Result], bar: Bar | PhaseBar
) -> tuple[dict[str, float], list[Completion], list[Completion]]:
    """Compute mean held-out rewards; return them, samples for the report, and failed completions. Collective.

    `key` is the run's key. Every evaluation samples with the same noise, so that two differ only by the policy. A chunk
    has about as many rows as a rollout; `bar` shows progress after each chunk.

    Raises:
      UserError: no problem can be used, or every reward has failed (`FailedRewardsError`).
    """
    settings, training = policy.settings.evaluation, policy.settings.sampling
    group, key = settings.samples + 1, jax.random.fold_in(key, Stream.EVALUATION)  # the last of a group is greedy
    most = training.prompts * training.group // group
    problems = count_heldout(settings, data)
    chunks, size = split_problems(problems, most, batch_shards(policy.sampler.mesh))
    max_tokens = settings.max_tokens or training.max_tokens
    sampling = replace(training, prompts=size, group=group, max_tokens=max_tokens)
    sampling = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    usable, left_out = list[Completion](), LeftOut("evaluation")
    for ids in chunks:
        found = complete(
            policy, key, data.heldout, ids, sampling=sampling, rewards=rewards, left_out=left_out, greedy=1
        )
        usable += found.values()
        if ids.stop == problems:
            left_out.warn(problems)
        check_evaluation(usable, rewards, "evaluation", is_last=ids.stop == problems)
        if usable:
            bar.update(ids.stop, {"reward": sum(completion.reward for completion in usable) / len(usable)})
    if not usable:
        raise UserError(f"evaluation: wanted held-out problems, got none of {problems} that can be used")
    greedy = usable[settings.samples :: group]
    sampled = [completion for number, completion in enumerate(usable) if number % group < settings.samples]
    reward_B = np.array([completion.reward for completion in sampled])
    interval = statistics.to_json(statistics.estimate(reward_B.reshape(-1, settings.samples).mean(axis=1)))
    bounds = {"eval/reward_low": interval["low"], "eval/reward_high": interval["high"]}
    metrics = {
        "eval/reward": float(np.mean(reward_B)),
        **{name: bound for name, bound in bounds.items() if bound is not None},
        "eval/greedy_reward": float(np.mean([completion.reward for completion in greedy])),
        "eval/truncated": float(np.mean([not completion.finished for completion in sampled])),
        "eval/skipped": float(problems - len(usable) // group),
        "eval/reward_failed": float(np.mean([bool(completion.error) for completion in usable])),
    }
    return metrics, gather_texts(usable[::group][:SHOWN]), find_failed(usable)


def apply_defaults(task: Task, policy: EvaluatedPolicy) -> Task:
    """Fill in a task's number of problems, and the lengths that it does not set from the policy's settings.

    The number is `task.problems`, or all problems if that is 0 or more than there are.
    """
    evaluation, sampling = policy.settings.evaluation, policy.settings.sampling
    return replace(
        task,
        problems=_at_most(task.problems, task.data),
        max_tokens=task.max_tokens or evaluation.max_tokens or sampling.max_tokens,
        max_prompt_tokens=task.max_prompt_tokens or sampling.max_prompt_tokens,
    )


def run_task(task: Task, policy: EvaluatedPolicy, key: Array, bar: Bar | PhaseBar) -> Iterator[list[TaskSample]]:
    """Sample a task in chunks of whole problems, with the N samples of a problem adjacent. Collective.

    Args:
      task: a task from `apply_defaults`.
      policy: the policy that samples; the size of a training rollout limits the samples in memory.
      key: the run's key; every evaluation samples with the same noise.
      bar: shows progress after each chunk.

    Yields:
      Samples with texts. Problems that cannot be used are left out.

    Raises:
      FailedRewardsError: the task's reward failed for every completion.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, Stream.BENCHMARKS), digest(task.name) % 2**32)
    chunks, sampling = plan_chunks(task, policy.settings.sampling, batch_shards(policy.sampler.mesh))
    read, name = task.data.heldout, f"task {task.name}"
    completions, left_out = list[Completion](), LeftOut(name)
    with reward_calls(task.reward, policy.settings.grading) as rewards:
        for ids in chunks:
            sampled = complete(policy, key, read, ids, sampling=sampling, rewards=rewards, left_out=left_out)
            if ids.stop == task.problems:
                left_out.warn(task.problems)
            chunk = gather_texts(list(sampled.values()))
            completions += chunk
            if completions:
                bar.update(
                    ids.stop, {"reward": sum(completion.reward for completion in completions) / len(completions)}
                )
            yield [_make_sample(task, *place, completion) for place, completion in zip(sampled, chunk, strict=True)]
            check_evaluation(completions, rewards, name, is_last=ids.stop == task.problems)


def plan_chunks(task: Task, training: Sampling, shards: int) -> tuple[list[range], Sampling]:
    """Split a task's problems into chunks, and return them with their sampling settings.

    A chunk has at most the prompts of a training rollout, rounded up to a multiple of `shards`; its samples share at
    most the slots of a training rollout.
    """
    chunks, size = split_problems(task.problems, training.prompts, shards)
    rows = size * task.samples
    slots = -(-min(training.slots or training.prompts * training.group, rows) // shards) * shards
    own = {name: getattr(task, name) for name in OF_TASK}
    return chunks, replace(training, prompts=size, group=task.samples, slots=slots if slots < rows else 0, **own)


def _make_sample(task: Task, problem: int, number: int, completion: Completion) -> TaskSample:
    assert completion.texts is not None
    texts = completion.texts._replace(answer=str(completion.texts.answer)[:_LONGEST_ANSWER])
    return TaskSample(problem, number, replace(completion, texts=texts), _vote(task, texts.completion))


def _vote(task: Task, completion: str) -> object:
    """Return the completion's vote; None if the task has no votes, or if its function fails or finds no answer."""
    try:
        return None if task.vote is None else task.vote(completion)
    except Exception as problem:
        warn_once(f"evaluation: {task.name}: vote failed, and its completion has none: {describe_error(problem)}")
        return None


def to_json(task: Task, sample: TaskSample) -> dict[str, object]:
    """Convert a sample to a JSON object, with a vote if the task has votes."""
    vote = {} if task.vote is None else {"vote": sample.vote}
    return {"problem": sample.problem, "sample": sample.sample} | vote | completion_to_json(sample.completion)


def summarize(task: Task, samples: Sequence[TaskSample]) -> Summary:
    """Summarize a task's samples as a JSON object.

    `reward` is the mean reward. `pass` is pass@k by k, for rewards that are all 0 or 1; `majority` is maj@k, for tasks
    with a vote. Each is a mean over problems with a 95 % interval, clustered by problem. `truncated` and `failed` are
    shares of the completions: truncated by the length limit, and without a reward. `tokens` has statistics of the
    lengths of completions.
    `skipped` counts the problems of the task that could not be used.
    """

    def to_interval(value_P: np.ndarray) -> Interval:
        return statistics.to_json(statistics.estimate(value_P))

    completions, N = [sample.completion for sample in samples], task.samples
    reward_PN = np.array([completion.reward for completion in completions], np.float64).reshape(-1, N)
    length_B = np.array([completion.length for completion in completions])
    summary: Summary = {
        "problems": len(reward_PN),
        "skipped": max(0, task.problems - len(reward_PN)),
        "samples": N,
        "reward": to_interval(reward_PN.mean(axis=1)),
        "truncated": float(np.mean([not completion.finished for completion in completions])),
        "failed": float(np.mean([bool(completion.error) for completion in completions])),
        "tokens": {"mean": float(length_B.mean()), "max": int(length_B.max()), "total": int(length_B.sum())},
    }
    sizes = statistics.sizes(N)
    if np.isin(reward_PN, (0.0, 1.0)).all():
        summary["pass"] = {str(k): to_interval(statistics.pass_at_k(reward_PN == 1, k)) for k in sizes}
    if task.vote is not None:
        vote_PN = [[sample.vote for sample in samples[i : i + N]] for i in range(0, len(samples), N)]
        summary["majority"] = {
            str(k): to_interval(statistics.majority_at_k(vote_PN, reward_PN, k)) for k in sizes if k > 2
        }
    return summary


def metrics(name: str, summary: Summary) -> dict[str, float]:
    """Convert a summary to metrics of a training run: `eval/NAME/reward`, `eval/NAME/pass_at_4`, …"""
    values = {
        "reward": summary["reward"]["mean"],
        "reward_low": summary["reward"]["low"],
        "reward_high": summary["reward"]["high"],
        "truncated": summary["truncated"],
        "reward_failed": summary["failed"],
        "tokens": summary["tokens"]["mean"],
    }
    values |= {f"pass_at_{k}": interval["mean"] for k, interval in summary.get("pass", {}).items() if k != "1"}
    values |= {f"maj_at_{k}": interval["mean"] for k, interval in summary.get("majority", {}).items()}
    return {f"eval/{name}/{metric}": value for metric, value in values.items() if value is not None}
