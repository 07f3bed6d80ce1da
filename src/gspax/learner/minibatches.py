"""From a rollout to the minibatches of its optimiser updates: split, score, set advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.distributed import multihost
from gspax.learner.train_step import Score
from gspax.shaping import filter_overlong
from gspax.sharding import named_sharding
from gspax.types import Array, Batch, Params, Rollout


@dataclass(frozen=True)
class Scored:
    """Minibatches with the learner's log-probs, and what only the metrics read."""

    batches: list[Batch]
    entropies: list[Array]  # float32 [B, T] of each minibatch
    first_expert_LBTA: Array  # the experts that the first minibatch's tokens chose


def split_minibatches(
    rollout: Rollout, count: int, mesh: jax.sharding.Mesh, *, without_overlong: bool = False
) -> list[Batch]:
    """`count` minibatches of adjacent rows, sharded over the mesh. Old log-probs and advantages are zeros.

    With `without_overlong` the loss leaves out completions that were truncated at the maximum length.
    """
    # rows that one device drew are redistributed over all of them without passing through the host
    split = jax.jit(_split, static_argnums=(1, 2), out_shardings=named_sharding(mesh, "batch"))
    return split(rollout, count, without_overlong)


def _split(rollout: Rollout, count: int, without_overlong: bool) -> list[Batch]:
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
    size = rows // count
    return [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(count)]


def score_minibatches(
    score: Score, params: Params, reference: Params | None, batches: Sequence[Batch], *, keep_experts: bool = False
) -> Scored:
    """Fill in the old log-probs, the reference's if there is one, and with `keep_experts` the experts for the updates.

    The experts of the other minibatches are not kept: in a large model they weigh more than all the log-probs.
    """
    filled, entropies = [], []
    experts: list[Array] = []
    for batch in batches:
        logp_BT, entropy_BT, expert_LBTA = score(params, batch.tokens_BT, batch.segment_BT)
        batch = replace(batch, old_logp_BT=logp_BT)
        if keep_experts:
            batch = replace(batch, expert_BLTA=expert_LBTA.swapaxes(0, 1))
        experts = experts or [expert_LBTA]
        filled.append(batch)
        entropies.append(entropy_BT)
    if reference is not None:
        filled = [
            replace(batch, ref_logp_BT=score(reference, batch.tokens_BT, batch.segment_BT)[0]) for batch in filled
        ]
    return Scored(filled, entropies, experts[0])


def set_advantages(batches: Sequence[Batch], advantage_B: np.ndarray, mesh: jax.sharding.Mesh) -> list[Batch]:
    """The minibatches with the advantages of their rows."""
    parts: list[Any] = np.split(advantage_B.astype(np.float32), len(batches))
    parts = multihost.to_devices(parts, named_sharding(mesh, "batch"))
    return [replace(batch, advantage_B=part) for batch, part in zip(batches, parts, strict=True)]
