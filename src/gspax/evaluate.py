"""Held-out accuracy: sampled at temperature 1, and greedy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from gspax.config import Experiment, Sampling
from gspax.distributed import multihost
from gspax.experiment.description import describe
from gspax.learner.optimizer import optimizer_of
from gspax.learner.restore import restore_state
from gspax.rollout.placement import make_meshes
from gspax.rollout.rewards import encode_prompts, gather_texts, reward_completions
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import find_run
from gspax.sharding import batch_shards, named_sharding
from gspax.types import Array, Params

EVALUATION = 2  # folded into the run's key
SHOWN = 16  # problems whose first sample is kept for the report


def run(experiment: Experiment, workdir: Path, step: int | None) -> None:
    """`gspax eval`: measure a checkpoint (the newest, or that of `step`), print it and add it to evaluations.jsonl."""
    mesh, _ = make_meshes(experiment)
    paths = find_run(workdir, describe(experiment))
    optimizer = optimizer_of(experiment)
    with Checkpoints(paths.checkpoints, mesh=mesh) as checkpoints:
        step = checkpoints.latest() if step is None else step
        state = restore_state(experiment, paths, checkpoints, optimizer, mesh, step)
    metrics, _ = evaluate(experiment, state.params, state.key, mesh)
    if jax.process_index() != 0:
        return
    settings = describe(experiment.evaluation)
    with paths.evaluations.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **metrics, "evaluation": settings}) + "\n")
    print(f"step {step}, {experiment.evaluation.problems} held-out problems")
    for name, value in metrics.items():
        print(f"  {name:22} {value:.4f}")


def evaluate(
    experiment: Experiment, params: Params, key: Array, mesh: jax.sharding.Mesh
) -> tuple[dict[str, float], list[dict]]:
    """Mean held-out rewards, and the first samples as rows for the report.

    `key` is the run's. Every evaluation draws with the same noise, so that two differ by the policy alone.
    """
    settings, key = experiment.evaluation, jax.random.fold_in(key, EVALUATION)
    plain = replace(
        experiment.sampling,
        max_tokens=settings.max_tokens or experiment.sampling.max_tokens,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
    )
    sampled = _rewards(experiment, params, key, mesh, replace(plain, group=settings.samples, temperature=1.0))
    greedy = _rewards(experiment, params, key, mesh, replace(plain, group=1, temperature=0.0))
    metrics = {
        "eval/accuracy": float(np.mean([row["reward"] for row in sampled])),
        "eval/greedy_accuracy": float(np.mean([row["reward"] for row in greedy])),
        "eval/truncated": float(np.mean([not row["finished"] for row in sampled])),
    }
    return metrics, gather_texts(sampled[:: settings.samples][:SHOWN])


def _rewards(
    experiment: Experiment, params: Params, key: Array, mesh: jax.sharding.Mesh, sampling: Sampling
) -> list[dict]:
    """One row per completion of the held-out problems, in chunks of about a rollout batch's rows."""
    total = experiment.evaluation.problems
    shards = batch_shards(mesh)
    chunk = max(1, min(total, experiment.sampling.prompts * experiment.sampling.group // sampling.group))
    chunk = -(-chunk // shards) * shards
    rows: list[dict] = []
    for first in range(0, total, chunk):
        ids = range(first, first + chunk)  # past the end: the last chunk is filled up and cut
        problems = multihost.all_or_raise(
            partial(multihost.local_rows, experiment.data.heldout, ids, named_sharding(mesh, "batch"))
        )
        rollout = sample(
            params,
            experiment.model,
            encode_prompts(experiment, problems),
            ids,
            key,
            sampling=sampling,
            stop_ids=experiment.tokenizer.stop_ids,
            mesh=mesh,
        )
        rows += reward_completions(experiment, problems, lengths_to_host(rollout))
    return rows[: total * sampling.group]
