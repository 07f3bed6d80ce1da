"""Completions of problems for an evaluation: drawn and rewarded chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from gspax.config import ModelConfig, Sampling
from gspax.config.protocols import Tokenizer
from gspax.data.problem import Problem
from gspax.errors import UserError, warn_once
from gspax.parallel.sharding import named_sharding
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result
from gspax.rollout.episodes import Interaction, Ready, sample_conversations
from gspax.rollout.grading import Row, reward_completions
from gspax.rollout.problems import attempt, name_problems, prepare
from gspax.sampler.engine import SampleOptions
from gspax.sampler.sampler import lengths_to_host, sample
from gspax.types import Array, Params


@dataclass(frozen=True)
class Policy:
    """What is evaluated."""

    params: Params  # a serving copy (`sampler.inference_weights`)
    model: ModelConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    interaction: Interaction | None = None  # with an environment, what conversations are held with


def fill_chunks(total: int, size: int, shards: int) -> list[list[int]]:
    """The indices of `total` problems in chunks of one size: at most `size`, rounded up to a multiple of `shards`.

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
) -> list[Row | None]:
    """One row for each of the `sampling.group` completions of these problems, in their order. Collective.

    Problems that cannot be read or whose prompts do not fit are left out, with a warning: their rows are None.

    Args:
      policy: what draws.
      key: as for `sampler.sample`.
      read: gives the problem of an id.
      ids: a multiple of the devices that rows are sharded over.
      sampling: how completions are drawn.
      rewards: rewards them, or the last message of each conversation.
      greedy: so many of each group, the last ones, are decoded greedily.
      name: of the evaluation, for the warning.

    Returns:
      Rows of `rewards.reward_completions`: texts only of this process's own.
    """
    ids, ready, left_out = _read(policy, read, ids, sampling.max_prompt_tokens, name)
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
        rows = reward(rollout, started=started)
    else:
        prompts = [each and each.prompt for each in ready]
        rows = reward(lengths_to_host(sample(policy.params, prompts, ids, key, options)))
    return [None if number // sampling.group in left_out else row for number, row in enumerate(rows)]


def _read(
    policy: Policy, read: Callable[[int], Problem], ids: Sequence[int], limit: int, name: str
) -> tuple[list[int], list[Ready | None], set[int]]:
    """The problems of this process's rows, and the places that are left out, where there is another problem.

    The ids with those of the other problem. Without any problem that can be used all places are left out.
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
    ids, made, failed = list(ids), *attempt(make, dict(enumerate(ids)), len(ids), by_row)
    if failed:
        found = {ids[place]: reason for place, reason in failed.items()}
        if jax.process_index() == 0:
            warn_once(f"{name}: {name_problems(found)}: left out of the evaluation")
        usable = next((index for index in ids if index not in found), None)
        if usable is None:
            return ids, [], set(failed)
        ids = [usable if place in failed else index for place, index in enumerate(ids)]
        filled, again = attempt(make, dict.fromkeys(failed, usable), len(ids), by_row)
        if again:
            raise UserError(f"{name}: problem {usable} could be read only once: {next(iter(again.values()))}")
        made |= filled
    return ids, [made.get(place) for place in range(len(ids))], set(failed)
