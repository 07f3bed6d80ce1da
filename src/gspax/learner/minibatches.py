"""From a rollout to the minibatches of its optimiser updates: split, score, set advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.distributed import multihost
from gspax.learner.train_step import Score, Scores
from gspax.shaping import filter_overlong
from gspax.sharding import named_sharding
from gspax.types import Array, Batch, Params, Rollout


@dataclass(frozen=True)
class Scored:
    """Minibatches with the learner's log-probs; the first may lack the old ones, which its update then computes."""

    batches: list[Batch]
    entropies: list[Array | None]  # float32 [B, T] of each minibatch
    on_policy: bool  # the first minibatch has no old log-probs yet

    def complete(self, first: Scores) -> Scored:
        """With what the first minibatch's update computed, if that is lacking."""
        if not self.on_policy:
            return self
        batch = replace(self.batches[0], old_logp_BT=first.logp_BT)
        return Scored([batch, *self.batches[1:]], [first.entropy_BT, *self.entropies[1:]], on_policy=False)


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
    score: Score, params: Params, reference: Params | None, batches: Sequence[Batch], *, on_policy: bool = False
) -> Scored:
    """Fill in the old log-probs, the experts if `score` keeps them, and the reference's log-probs if there is one.

    With `on_policy` the first minibatch has no old log-probs and no experts.
    """
    filled = list(batches)
    entropies: list[Array | None] = [None] * len(filled)
    for index in range(int(on_policy), len(filled)):
        batch = filled[index]
        found = score(params, batch.tokens_BT, batch.segment_BT)
        filled[index] = replace(batch, old_logp_BT=found.logp_BT, expert_BLTA=found.expert_BLTA)
        entropies[index] = found.entropy_BT
    if reference is not None:
        filled = [
            replace(batch, ref_logp_BT=score(reference, batch.tokens_BT, batch.segment_BT).logp_BT) for batch in filled
        ]
    return Scored(filled, entropies, on_policy)


def set_advantages(batches: Sequence[Batch], advantage_B: np.ndarray, mesh: jax.sharding.Mesh) -> list[Batch]:
    """The minibatches with the advantages of their rows."""
    parts: list[Any] = np.split(advantage_B.astype(np.float32), len(batches))
    parts = multihost.to_devices(parts, named_sharding(mesh, "batch"))
    return [replace(batch, advantage_B=part) for batch, part in zip(batches, parts, strict=True)]
