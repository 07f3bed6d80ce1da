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
from gspax.rollout.completion import Completion, gather_texts
from gspax.rollout.grading import check_evaluation, find_failed
from gspax.run.progress import Bar
from gspax.types import Array

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # problems whose first sample the report shows


def evaluate(
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
