"""Held-out reward: sampled at temperature 1, and greedy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from gspax.config import Experiment, Sampling, trained_dtype
from gspax.data.problem import read_problem
from gspax.distributed import multihost
from gspax.experiment.description import describe
from gspax.learner.optimizer import make_optimizer
from gspax.learner.restore import restore_state
from gspax.rewards.calls import RewardCalls
from gspax.rollout.placement import make_meshes
from gspax.rollout.rewards import Row, encode_prompts, gather_texts, reward_completions
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.rollout.serving import make_serving_copy
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import find_run
from gspax.sharding import batch_shards, named_sharding
from gspax.types import Array, Params

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # problems whose first sample the report shows


def run(experiment: Experiment, workdir: Path, step: int | None) -> None:
    """`gspax eval`: evaluate a checkpoint (`step`, or the newest), print it and append it to evaluations.jsonl."""
    mesh, _ = make_meshes(experiment)
    paths = find_run(workdir, describe(experiment))
    with Checkpoints(paths.checkpoints, mesh=mesh) as checkpoints:
        step = checkpoints.latest() if step is None else step
        state = restore_state(
            paths,
            checkpoints,
            experiment.model,
            make_optimizer(experiment.optimizer, trained_dtype(experiment.model, experiment.lora)),
            mesh,
            lora=experiment.lora,
            step=step,
        )
    with RewardCalls(experiment.reward, experiment.grading) as rewards:
        metrics, _ = evaluate(experiment, state.params, state.key, mesh, rewards)
    if jax.process_index() != 0:
        return
    settings = describe(experiment.evaluation)
    with paths.evaluations.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **metrics, "evaluation": settings}) + "\n")
    print(f"step {step}, {experiment.evaluation.problems} held-out problems")
    for name, value in metrics.items():
        print(f"  {name:22} {value:.4f}")


def evaluate(
    experiment: Experiment, params: Params, key: Array, mesh: jax.sharding.Mesh, rewards: RewardCalls
) -> tuple[dict[str, float], list[Row]]:
    """Mean held-out rewards, and the first samples as rows for the report.

    `key` is the run's. Every evaluation draws with the same noise, so that two differ by the policy alone.
    """
    settings, key = experiment.evaluation, jax.random.fold_in(key, EVALUATION)
    read = partial(read_problem, experiment.data.heldout)
    serving = make_serving_copy(params, experiment.model, mesh)
    plain = replace(
        experiment.sampling,
        max_tokens=settings.max_tokens or experiment.sampling.max_tokens,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
    )

    def complete(sampling: Sampling) -> list[Row]:
        """One row per completion of the held-out problems, in chunks of about a rollout batch's rows."""
        rows: list[Row] = []
        for ids in _chunks(settings.problems, experiment.sampling, sampling.group, batch_shards(mesh)):
            problems = multihost.all_or_raise(partial(multihost.local_rows, read, ids, named_sharding(mesh, "batch")))
            rollout = sample(
                serving,
                experiment.model,
                encode_prompts(experiment.tokenizer, problems, experiment.model.vocab_size),
                ids,
                key,
                sampling=sampling,
                stop_ids=experiment.tokenizer.stop_ids,
                mesh=mesh,
            )
            rows += reward_completions(
                problems, lengths_to_host(rollout), tokenizer=experiment.tokenizer, calls=rewards
            )
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
