"""Completions of problems for an evaluation, sampled and rewarded chunk by chunk."""

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
from gspax.rollout.completion import Completion
from gspax.rollout.episodes import Interaction, Ready, sample_conversations
from gspax.rollout.grading import reward_completions
from gspax.rollout.problems import attempt, name_problems, prepare
from gspax.sampler.engine import SampleOptions
from gspax.sampler.sampler import lengths_to_host, sample
from gspax.types import Array, Params


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
