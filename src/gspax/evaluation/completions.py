"""Completions of problems for an evaluation: drawn and rewarded chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from gspax.config import ModelConfig, Sampling
from gspax.data.problem import Problem
from gspax.distributed import multihost
from gspax.protocols import Tokenizer
from gspax.rewards.calls import RewardCalls
from gspax.rollout.episodes import Interaction, hold_conversations
from gspax.rollout.rewards import Row, encode_prompts, reward_completions
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.sharding import named_sharding
from gspax.types import Array, Params


@dataclass(frozen=True)
class Policy:
    """What is evaluated."""

    params: Params  # a serving copy (`rollout.serving`)
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
    rewards: RewardCalls,
    greedy: int = 0,
) -> list[Row]:
    """One row for each of the `sampling.group` completions of these problems, in their order. Collective.

    Args:
      policy: what draws.
      key: as for `sampler.sample`.
      read: gives the problem of an id.
      ids: a multiple of the devices that rows are sharded over.
      sampling: how completions are drawn.
      rewards: rewards them, or the last message of each conversation.
      greedy: so many of each group, the last ones, are decoded greedily.

    Returns:
      Rows of `rewards.reward_completions`: texts only of this process's own.
    """
    problems = multihost.all_or_raise(partial(multihost.local_rows, read, ids, named_sharding(policy.mesh, "batch")))
    reward = partial(reward_completions, problems, tokenizer=policy.tokenizer, calls=rewards)
    if policy.interaction is not None:
        drawn = hold_conversations(
            replace(policy.interaction, rewards=rewards),
            policy.params,
            policy.model,
            problems,
            ids,
            key,
            sampling=sampling,
            mesh=policy.mesh,
            greedy=greedy,
        )
        return reward(drawn[0], started=drawn[1])
    rollout = sample(
        policy.params,
        policy.model,
        encode_prompts(policy.tokenizer, problems, policy.model.vocab_size),
        ids,
        key,
        sampling=sampling,
        stop_ids=policy.tokenizer.stop_ids,
        mesh=policy.mesh,
        greedy=greedy,
    )
    return reward(lengths_to_host(rollout))
