"""From a rollout on the host to the batches of its optimiser updates: cut, scored, given advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from gspax.config import Experiment
from gspax.shaping import filter_overlong
from gspax.sharding import named
from gspax.types import Array, Batch, Params, Rollout

Score = tuple[Array, Array, Array]  # log-probs, entropies, experts: see `train_step.make_score`


def cut(experiment: Experiment, rollout: Rollout, mesh: jax.sharding.Mesh) -> list[Batch]:
    """`schedule.minibatches` runs of adjacent rows, placed on the mesh. Old log-probs and advantages are zeros."""
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    mask_BT = np.asarray(rollout.mask_BT)
    if experiment.filter_overlong:
        mask_BT = np.asarray(filter_overlong(rollout.mask_BT, ~rollout.finished_B))
    columns: dict[str, Any] = dict(
        tokens_BT=rollout.tokens_BT,
        segment_BT=(np.arange(rollout.tokens_BT.shape[1])[None] < total_B1).astype(np.int32),
        mask_BT=mask_BT,
        old_logp_BT=np.zeros_like(rollout.logp_BT),
        advantage_B=np.zeros(len(mask_BT), np.float32),
        sampler_logp_BT=rollout.logp_BT,
    )
    batch = Batch(**columns)
    size = len(mask_BT) // experiment.schedule.minibatches
    parts = [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(experiment.schedule.minibatches)
    ]
    return [jax.device_put(part, named(mesh, "batch")) for part in parts]


def scored(
    experiment: Experiment,
    score: Callable[[Params, Batch], Score],
    params: Params,
    reference: Params | None,
    batches: list[Batch],
) -> tuple[list[Batch], list[Score]]:
    """The batches with the log-probs and, where updates read them, the experts of the policy and of the reference."""
    scores = [score(params, batch) for batch in batches]
    filled = []
    for batch, (logp_BT, _, expert_LBTA) in zip(batches, scores, strict=True):
        batch = replace(batch, old_logp_BT=logp_BT)
        if experiment.routing_replay or experiment.regularizers.load_balance:
            batch = replace(batch, expert_BLTA=expert_LBTA.swapaxes(0, 1))
        if reference is not None:
            batch = replace(batch, ref_logp_BT=score(reference, batch)[0])
        filled.append(batch)
    return filled, scores


def with_advantages(batches: list[Batch], advantage_B: np.ndarray, mesh: jax.sharding.Mesh) -> list[Batch]:
    """The batches with their rows' advantages."""
    parts: list[Any] = np.split(advantage_B.astype(np.float32), len(batches))
    placed = [jax.device_put(part, named(mesh, "batch")) for part in parts]
    return [replace(batch, advantage_B=part) for batch, part in zip(batches, placed, strict=True)]
