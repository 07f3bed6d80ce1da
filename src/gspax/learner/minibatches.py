"""From a rollout to the batches of its optimiser updates: cut, scored, given advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Experiment
from gspax.distributed import multihost
from gspax.learner.train_step import Score
from gspax.shaping import filter_overlong
from gspax.sharding import named_sharding
from gspax.types import Batch, Params, Rollout


def split_minibatches(experiment: Experiment, rollout: Rollout, mesh: jax.sharding.Mesh) -> list[Batch]:
    """`schedule.minibatches` runs of adjacent rows, split over the mesh. Old log-probs and advantages are zeros."""
    # rows that one device drew are spread over all of them, without a detour by the host
    spread = jax.jit(_cut, static_argnums=(1, 2), out_shardings=named_sharding(mesh, "batch"))
    return spread(rollout, experiment.schedule.minibatches, experiment.filter_overlong)


def _cut(rollout: Rollout, parts: int, without_overlong: bool) -> list[Batch]:
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    rows, columns = rollout.tokens_BT.shape
    batch = Batch(
        tokens_BT=rollout.tokens_BT,
        segment_BT=(jnp.arange(columns)[None] < total_B1).astype(jnp.int32),
        mask_BT=filter_overlong(rollout.mask_BT, ~rollout.finished_B) if without_overlong else rollout.mask_BT,
        old_logp_BT=jnp.zeros_like(rollout.logp_BT),
        advantage_B=jnp.zeros(rows),
        sampler_logp_BT=rollout.logp_BT,
    )
    size = rows // parts
    return [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(parts)]


def score_minibatches(
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


def set_advantages(batches: list[Batch], advantage_B: np.ndarray, mesh: jax.sharding.Mesh) -> list[Batch]:
    """The batches with their rows' advantages."""
    parts: list[Any] = np.split(advantage_B.astype(np.float32), len(batches))
    placed = multihost.to_devices(parts, named_sharding(mesh, "batch"))
    return [replace(batch, advantage_B=part) for batch, part in zip(batches, placed, strict=True)]
