"""From a rollout to the minibatches of its optimiser updates: split, score, set advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Reference, RowShape
from gspax.learner.packing import pack, separate, share_prompts
from gspax.learner.train_step import Score, Scores
from gspax.losses.shaping import filter_overlong
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.run import interrupt
from gspax.types import Array, Batch, Params, Rollout


@dataclass(frozen=True)
class Scored:
    """Minibatches with old log-probs; the first may lack them, and its update then computes them."""

    batches: list[Batch]
    entropies: list[Array | None]  # float32 [B, T] of each minibatch; None if it was not scored
    on_policy: bool  # the first minibatch has no old log-probs yet

    def complete(self, first: Scores) -> Scored:
        """With what the first minibatch's update computed, if that is lacking."""
        if not self.on_policy:
            return self
        batch = replace(self.batches[0], old_logp_BT=first.logp_BT)
        return Scored([batch, *self.batches[1:]], [first.entropy_BT, *self.entropies[1:]], on_policy=False)

    def measured(self, first: Scores) -> Scored:
        """The minibatches that the old policy is known on, with its own log-probs and entropies.

        If the sampler's log-probs are the old ones, that is the first minibatch, from its update.
        """
        known = self.complete(first)
        if known.entropies[0] is not None:
            return known
        return Scored([replace(self.batches[0], old_logp_BT=first.logp_BT)], [first.entropy_BT], on_policy=False)


@dataclass(frozen=True)
class Layout:
    """Which response of a rollout batch is where in a minibatch, and how much of the minibatch is padding."""

    response: np.ndarray  # int32 [B, T], or [B, 1] for one response in each row; -1: padding
    column: np.ndarray  # int32 [B, T], or [1, T] likewise: the position within the response's own row
    tokens: int  # that it holds: completions, and prompts as often as they are there
    positions: int  # that a pass computes


def split_minibatches(
    rollout: Rollout,
    count: int,
    shape: RowShape,
    mesh: jax.sharding.Mesh,
    *,
    without_overlong: bool = False,
    sharing: int = 0,
) -> tuple[list[Batch], list[Layout]]:
    """`count` minibatches of adjacent responses, sharded over the mesh. Old log-probs and advantages are zeros.

    Args:
      rollout: its lengths are on the host.
      shape: `config.row_shape`. Rows that are not packed keep the rollout's length.
      without_overlong: the loss leaves out completions that were truncated at the maximum length.
      sharing: so many adjacent responses have one prompt, which packed rows hold once for several of them; 0: each
        response has its own.
    """
    # rows that one device drew are redistributed over all of them without passing through the host
    jit: Any = partial(jax.jit, out_shardings=named_sharding(mesh, "batch"))
    total_N = np.asarray(rollout.prompt_length_B) + np.asarray(rollout.length_B)
    size, T = len(total_N) // count, rollout.tokens_BT.shape[1]
    parts = [range(i * size, (i + 1) * size) for i in range(count)]
    if not shape.packed:
        batches = jit(_split, static_argnums=(1, 2, 3))(rollout, count, shape.rows, without_overlong)
        padding = np.full(shape.rows - size, -1, np.int32)
        column_1T = np.arange(T, dtype=np.int32)[None]
        layouts = [
            Layout(np.concatenate([part, padding])[:, None], column_1T, int(total_N[part].sum()), shape.rows * T)
            for part in parts
        ]
        return batches, layouts
    gather, batches, layouts = jit(_gather, static_argnums=4), [], []
    for part in parts:
        units = separate(total_N[part])
        if sharing:
            prompt_N, group_N = np.asarray(rollout.prompt_length_B)[part], np.array(part) // sharing
            units = share_prompts(total_N[part], prompt_N, group_N, shape.length)
        sequence_BT, column_BT, segment_BT, prefix_BT, used = pack(units, shape)
        response_BT = np.where(segment_BT > 0, sequence_BT + part.start, -1).astype(np.int32)
        source_BT = np.where(segment_BT > 0, response_BT * T + column_BT, 0).astype(np.int32)
        arrays = source_BT, segment_BT, prefix_BT if sharing else None
        placed = multihost.to_devices(arrays, named_sharding(mesh, "batch"))
        batches.append(gather(rollout, *placed, without_overlong))
        positions = used * shape.microbatch * shape.length
        layouts.append(Layout(response_BT, column_BT, int((segment_BT > 0).sum()), positions))
    return batches, layouts


def _split(rollout: Rollout, count: int, rows: int, without_overlong: bool) -> list[Batch]:
    """A row for each response, and empty rows at the end of each minibatch."""
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    responses, columns = rollout.tokens_BT.shape
    batch = Batch(
        tokens_BT=rollout.tokens_BT,
        segment_BT=(jnp.arange(columns)[None] < total_B1).astype(jnp.int32),
        mask_BT=_loss_mask(rollout, without_overlong),
        old_logp_BT=jnp.zeros_like(rollout.logp_BT),
        advantage=jnp.zeros(responses),
        sampler_logp_BT=rollout.logp_BT,
        expert_BLTA=rollout.expert_BLTA,
    )
    size = responses // count

    def part(x: Array, first: int) -> Array:
        return jnp.pad(x[first : first + size], ((0, rows - size), *[(0, 0)] * (x.ndim - 1)))

    return [jax.tree.map(partial(part, first=i * size), batch) for i in range(count)]


def _gather(
    rollout: Rollout, source_BT: Array, segment_BT: Array, prefix_BT: Array | None, without_overlong: bool
) -> Batch:
    """Packed rows; `source_BT` is where a position comes from in the rollout's rows, one after the other."""

    def take(x_BT: Array) -> Array:
        return jnp.where(segment_BT > 0, x_BT.reshape(-1)[source_BT], jnp.zeros((), x_BT.dtype))

    def take_experts(expert_BLTA: Array) -> Array:  # on padding any: nothing is routed there
        expert_BTLA = expert_BLTA.swapaxes(1, 2)
        return expert_BTLA.reshape(-1, *expert_BTLA.shape[2:])[source_BT].swapaxes(1, 2)

    logp_BT = take(rollout.logp_BT)
    return Batch(
        tokens_BT=take(rollout.tokens_BT),
        segment_BT=segment_BT,
        prefix_BT=prefix_BT,
        mask_BT=take(_loss_mask(rollout, without_overlong)),
        old_logp_BT=jnp.zeros_like(logp_BT),
        advantage=jnp.zeros_like(logp_BT),
        sampler_logp_BT=logp_BT,
        expert_BLTA=None if rollout.expert_BLTA is None else take_experts(rollout.expert_BLTA),
    )


def _loss_mask(rollout: Rollout, without_overlong: bool) -> Array:
    return filter_overlong(rollout.mask_BT, ~rollout.finished_B) if without_overlong else rollout.mask_BT


def reference_kl(reference: Reference | None, batches: Sequence[Batch], layouts: Sequence[Layout]) -> np.ndarray | None:
    """The sum of `reference.reward` over the tokens of each response, float32 [N]; None without one."""
    if reference is None or reference.reward is None:
        return None
    estimate: Callable[..., Array] = reference.reward
    values = [estimate(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT) for batch in batches]
    return np.concatenate(
        [_sum_by_response(*each) for each in zip(multihost.to_host(values), layouts, strict=True)]
    ).astype(np.float32)


def _sum_by_response(value_BT: np.ndarray, layout: Layout) -> np.ndarray:
    number_BT = np.broadcast_to(layout.response, value_BT.shape)
    there_BT = number_BT >= 0
    number = number_BT[there_BT]
    return np.bincount(number - number.min(), value_BT[there_BT])


def packing_efficiency(layouts: Sequence[Layout]) -> float:
    """The share of the positions that a pass computes that hold a token; the rest is padding."""
    return sum(layout.tokens for layout in layouts) / sum(layout.positions for layout in layouts)


def score_minibatches(
    score: Score, params: Params, reference: Params | None, batches: Sequence[Batch], which: range
) -> Scored:
    """Fill in the old log-probs, the routing if `score` keeps it, and the reference's log-probs if there is one.

    Collective, with a stop point after each minibatch (`run.interrupt`).

    Args:
      which: those to score (`old_policy.find_scored`). If it starts at 1, the first one is left to its update.
    """
    filled = list(batches)
    entropies: list[Array | None] = [None] * len(filled)
    for index in which:
        batch = filled[index]
        found = _score(score, params, batch, batch.expert_BLTA)
        expert_BLTA = batch.expert_BLTA if found.expert_BLTA is None else found.expert_BLTA
        entropies[index] = found.entropy_BT
        filled[index] = replace(
            batch, old_logp_BT=found.logp_BT, expert_BLTA=expert_BLTA, router_logp_BLTA=found.router_logp_BLTA
        )
    if reference is not None:  # it routes by itself
        for index, batch in enumerate(filled):
            filled[index] = replace(batch, ref_logp_BT=_score(score, reference, batch, None).logp_BT)
    return Scored(filled, entropies, on_policy=which.start == 1)


def _score(score: Score, params: Params, batch: Batch, expert_BLTA: Array | None) -> Scores:
    """The scores once they are complete: dispatched ahead, they would leave no moment to stop between minibatches."""
    found = score(params, batch.tokens_BT, batch.segment_BT, batch.mask_BT, expert_BLTA, batch.prefix_BT)
    jax.block_until_ready(found)
    interrupt.stop_point()
    return found


def take_sampler_logp(batches: Sequence[Batch]) -> list[Batch]:
    """The minibatches with the sampler's log-probs as the old ones."""

    def take(batch: Batch) -> Batch:
        assert batch.sampler_logp_BT is not None
        return replace(batch, old_logp_BT=batch.sampler_logp_BT)

    return [take(batch) for batch in batches]


def set_advantages(
    batches: Sequence[Batch], layouts: Sequence[Layout], advantage: np.ndarray, mesh: jax.sharding.Mesh
) -> list[Batch]:
    """The minibatches with the advantages of the responses, [N], or of their tokens, [N, T].

    Those of responses are set by row, in packed rows by token.
    """

    def place(layout: Layout) -> np.ndarray:
        there, column_BT = layout.response >= 0, np.maximum(layout.column, 0)
        placed = advantage[layout.response] if advantage.ndim == 1 else advantage[layout.response, column_BT]
        placed = np.where(there, placed, 0).astype(np.float32)
        return placed[:, 0] if placed.shape[1] == 1 else placed

    parts: list[Any] = multihost.to_devices([place(each) for each in layouts], named_sharding(mesh, "batch"))
    return [replace(batch, advantage=part) for batch, part in zip(batches, parts, strict=True)]
