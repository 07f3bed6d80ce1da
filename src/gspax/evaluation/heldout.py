"""Held-out reward: sampled at temperature 1, and greedy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from gspax.config import Evaluation, Sampling
from gspax.data.problem import read_problem
from gspax.distributed import multihost
from gspax.evaluation.benchmark import Policy
from gspax.protocols import DataSource
from gspax.rewards.calls import RewardCalls
from gspax.rollout.rewards import Row, encode_prompts, gather_texts, reward_completions
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.sharding import batch_shards, named_sharding
from gspax.types import Array

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # problems whose first sample the report shows


def evaluate(
    policy: Policy, key: Array, data: DataSource, rewards: RewardCalls, *, settings: Evaluation, training: Sampling
) -> tuple[dict[str, float], list[Row]]:
    """Mean held-out rewards, and the first samples as rows for the report.

    `key` is the run's. Every evaluation draws with the same noise, so that two differ by the policy alone.
    """
    key, read = jax.random.fold_in(key, EVALUATION), partial(read_problem, data.heldout)
    mesh, tokenizer = policy.mesh, policy.tokenizer
    plain = replace(
        training,
        max_tokens=settings.max_tokens or training.max_tokens,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
    )

    def complete(sampling: Sampling) -> list[Row]:
        """One row per completion of the held-out problems, in chunks of about a rollout batch's rows."""
        rows: list[Row] = []
        for ids in _chunks(settings.problems, training, sampling.group, batch_shards(mesh)):
            problems = multihost.all_or_raise(partial(multihost.local_rows, read, ids, named_sharding(mesh, "batch")))
            rollout = sample(
                policy.params,
                policy.model,
                encode_prompts(tokenizer, problems, policy.model.vocab_size),
                ids,
                key,
                sampling=sampling,
                stop_ids=tokenizer.stop_ids,
                mesh=mesh,
            )
            rows += reward_completions(problems, lengths_to_host(rollout), tokenizer=tokenizer, calls=rewards)
        return rows[: settings.problems * sampling.group]

    sampled = complete(replace(plain, group=settings.samples, temperature=1.0))
    greedy = complete(replace(plain, group=1, temperature=0.0))
    metrics = {
        "eval/reward": float(np.mean([row["reward"] for row in sampled])),
        "eval/greedy_reward": float(np.mean([row["reward"] for row in greedy])),
        "eval/truncated": float(np.mean([not row["finished"] for row in sampled])),
        "eval/reward_failed": float(np.mean(["error" in row for row in sampled + greedy])),
    }
    return metrics, gather_texts(sampled[:: settings.samples][:SHOWN])


def _chunks(total: int, training: Sampling, group: int, shards: int) -> list[list[int]]:
    """The indices of `total` problems in chunks of one size, a multiple of `shards` and about a training rollout batch.

    The last chunk is filled up from the first index on: there may be no problem past the end.
    """
    size = max(1, min(total, training.prompts * training.group // group))
    size = -(-size // shards) * shards
    return [[index % total for index in range(first, first + size)] for first in range(0, total, size)]
