"""Completions of problems for an evaluation, sampled and graded chunk by chunk, and the held-out rewards of a run.

Held-out problems are sampled at temperature 1 and decoded greedily, side by side in one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from gspax.config import Evaluation, ModelConfig, Sampling
from gspax.config.protocols import DataSource, Tokenizer
from gspax.data.problem import Problem
from gspax.errors import UserError, warn_once
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result
from gspax.rollout.completion import Completion, gather_texts
from gspax.rollout.episodes import Interaction, Ready, sample_conversations
from gspax.rollout.grading import check_evaluation, find_failed, reward_completions
from gspax.rollout.problems import attempt, name_problems, prepare
from gspax.run.progress import Bar
from gspax.sampler.engine import SampleOptions
from gspax.sampler.sampler import lengths_to_host, sample
from gspax.types import Array, Params

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # held-out problems whose first sample the report shows


@dataclass(frozen=True)
class Policy:
    """The policy that is evaluated."""

    params: Params  # inference weights (`sampler.inference_weights`)
    model: ModelConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    interaction: Interaction | None = None  # for multi-turn rollouts


def fill_chunks(total: int, size: int, shards: int) -> list[list[int]]:
    """The indices of `total` problems in chunks of equal size: at most `size`, rounded up to a multiple of `shards`.

    The last chunk is filled up from the first index on: there may be no problem past the end.
    """
    size = -(-max(1, min(total, size)) // shards) * shards
    return [[index % total for index in range(first, first + size)] for first in range(0, total, size)]


def complete(
    policy: Policy,
    key: Array,
    read: Callable[[int], Problem],
    ids: Sequence[int],
    *,
    sampling: Sampling,
    rewards: Calls[Result],
    greedy: int = 0,
    name: str = "evaluation",
) -> list[Completion | None]:
    """The `sampling.group` completions of each of these problems, in their order. Collective.

    Problems that cannot be loaded or whose prompts do not fit are left out, with a warning: theirs are None.

    Args:
      policy: the model, its tokenizer and its mesh.
      key: as for `sampler.sample`.
      read: loads the problem of an id.
      ids: a multiple of the devices that rows are sharded over.
      sampling: how completions are sampled.
      rewards: calls of the reward, of completions or of the last message of each multi-turn rollout.
      greedy: the number of completions in each group, the last ones, that are decoded greedily.
      name: of the evaluation, for the warning.

    Returns:
      Completions of `grading.reward_completions`, with texts on the process that owns the row.
    """
    ids, ready, left_out = _load(policy, read, ids, sampling.max_prompt_tokens, name)
    if len(left_out) == len(ids):
        return [None for _ in range(len(ids) * sampling.group)]
    problems = [each and each.problem for each in ready]
    reward = partial(reward_completions, problems, tokenizer=policy.tokenizer, calls=rewards)
    options = SampleOptions(
        model=policy.model,
        sampling=sampling,
        stop_ids=policy.tokenizer.stop_ids,
        mesh=policy.mesh,
        greedy=greedy,
    )
    if policy.interaction is not None:
        interaction = replace(policy.interaction, rewards=rewards)
        rollout, started = sample_conversations(interaction, policy.params, ready, ids, key, options)
        completions = reward(rollout, started=started)
    else:
        prompts = [each and each.prompt for each in ready]
        completions = reward(lengths_to_host(sample(policy.params, prompts, ids, key, options)))
    return [None if row // sampling.group in left_out else each for row, each in enumerate(completions)]


def _load(
    policy: Policy, read: Callable[[int], Problem], ids: Sequence[int], limit: int, name: str
) -> tuple[list[int], list[Ready | None], set[int]]:
    """The ids, the problems of this process's rows, and the places that are left out.

    In places that are left out there is another problem, and its id. If no problem can be used, all are left out.
    """
    make = partial(
        prepare,
        read,
        tokenizer=policy.tokenizer,
        model=policy.model,
        limit=limit,
        interaction=policy.interaction,
    )
    by_row = named_sharding(policy.mesh, "batch")
    ids, ready, failed = list(ids), *attempt(make, dict(enumerate(ids)), len(ids), by_row)
    if failed:
        reasons = {ids[place]: reason for place, reason in failed.items()}
        if jax.process_index() == 0:
            warn_once(f"{name}: {name_problems(reasons)}: left out of the evaluation")
        usable = next((index for index in ids if index not in reasons), None)
        if usable is None:
            return ids, [], set(failed)
        ids = [usable if place in failed else index for place, index in enumerate(ids)]
        filled, again = attempt(make, dict.fromkeys(failed, usable), len(ids), by_row)
        if again:
            raise UserError(f"{name}: problem {usable} could be read only once: {next(iter(again.values()))}")
        ready |= filled
    return ids, [ready.get(place) for place in range(len(ids))], set(failed)


def evaluate_heldout(
    policy: Policy,
    key: Array,
    data: DataSource,
    rewards: Calls[Result],
    *,
    settings: Evaluation,
    training: Sampling,
    bar: Bar | None = None,
) -> tuple[dict[str, float], list[Completion], list[Completion]]:
    """Mean held-out rewards, the first samples for the report, and the completions whose rewards failed. Collective.

    `key` is the run's. Every evaluation samples with the same noise, so that two differ by the policy alone. A chunk
    has about the rows of a rollout; `bar` shows the problems after each.

    Raises:
      UserError: no problem can be used, or every reward has failed (`FailedRewardsError`).
    """
    group, key = settings.samples + 1, jax.random.fold_in(key, EVALUATION)  # the last of a group is greedy
    max_tokens = settings.max_tokens or training.max_tokens
    plain = replace(training, group=group, max_tokens=max_tokens, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    rows: list[Completion | None] = []
    usable: list[Completion] = []
    total = settings.problems * group
    size = training.prompts * training.group // group
    for ids in fill_chunks(settings.problems, size, batch_shards(policy.mesh)):
        rows += complete(policy, key, data.heldout, ids, sampling=plain, rewards=rewards, greedy=1)
        usable = [each for each in rows[:total] if each is not None]
        check_evaluation(usable, rewards, "evaluation", is_last=len(rows) >= total)
        if bar is not None and usable:
            reward = sum(each.reward for each in usable) / len(usable)
            bar.update(min(len(rows), total) // group, {"reward": reward})
    if not usable:
        raise UserError(f"evaluation: wanted held-out problems, got none of {settings.problems} that can be used")
    greedy = usable[settings.samples :: group]
    sampled = [each for number, each in enumerate(usable) if number % group < settings.samples]
    metrics = {
        "eval/reward": float(np.mean([each.reward for each in sampled])),
        "eval/greedy_reward": float(np.mean([each.reward for each in greedy])),
        "eval/truncated": float(np.mean([not each.finished for each in sampled])),
        "eval/skipped": float(settings.problems - len(usable) // group),
        "eval/reward_failed": float(np.mean([bool(each.error) for each in usable])),
    }
    return metrics, gather_texts(usable[::group][:SHOWN]), find_failed(usable)
