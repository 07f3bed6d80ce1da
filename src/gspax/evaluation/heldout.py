"""Held-out reward: sampled at temperature 1 and greedy, side by side in one program."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from gspax.config import Evaluation, Sampling
from gspax.config.protocols import DataSource
from gspax.errors import UserError
from gspax.evaluation.completions import Policy, complete, fill_chunks
from gspax.parallel.sharding import batch_shards
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result
from gspax.rollout.grading import Row, check_evaluation, find_failed, gather_texts
from gspax.types import Array

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # problems whose first sample the report shows


def evaluate(
    policy: Policy, key: Array, data: DataSource, rewards: Calls[Result], *, settings: Evaluation, training: Sampling
) -> tuple[dict[str, float], list[Row], list[Row]]:
    """Mean held-out rewards, the first samples as rows for the report, and the rows whose rewards have failed.

    `key` is the run's. Every evaluation draws with the same noise, so that two differ by the policy alone. A chunk has
    about the rows of a rollout batch.

    Raises:
      UserError: no problem can be used, or every reward has failed (`FailedRewardsError`).
    """
    group, key = settings.samples + 1, jax.random.fold_in(key, EVALUATION)  # the last of a group is greedy
    max_tokens = settings.max_tokens or training.max_tokens
    plain = replace(training, group=group, max_tokens=max_tokens, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    found: list[Row | None] = []
    rows: list[Row] = []
    wanted = settings.problems * group
    size = training.prompts * training.group // group
    for ids in fill_chunks(settings.problems, size, batch_shards(policy.mesh)):
        found += complete(policy, key, data.heldout, ids, sampling=plain, rewards=rewards, greedy=1)
        rows = [row for row in found[:wanted] if row is not None]
        check_evaluation(rows, rewards, "evaluation", ended=len(found) >= wanted)
    if not rows:
        raise UserError(f"evaluation: wanted held-out problems, got none of {settings.problems} that can be used")
    greedy = rows[settings.samples :: group]
    sampled = [row for number, row in enumerate(rows) if number % group < settings.samples]
    metrics = {
        "eval/reward": float(np.mean([row["reward"] for row in sampled])),
        "eval/greedy_reward": float(np.mean([row["reward"] for row in greedy])),
        "eval/truncated": float(np.mean([not row["finished"] for row in sampled])),
        "eval/skipped": float(settings.problems - len(rows) // group),
        "eval/reward_failed": float(np.mean(["error" in row for row in rows])),
    }
    return metrics, gather_texts(rows[::group][:SHOWN]), find_failed(rows)
