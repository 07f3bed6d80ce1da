"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): fresh groups replace groups with equal rewards.

A group with equal rewards has no advantage and adds nothing to the gradient. Up to `sampling.max_refills` times P fresh
prompts are sampled: fresh groups with a signal replace the first groups without one, in order, and the others are
dropped. The choice depends on rewards, which every process has.

Axes: P prompts, G samples, B = P·G completions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.parallel.sharding import named_sharding
from gspax.rollout.completion import Completion, GradedBatch
from gspax.types import Array, Rollout


def refill(
    batch: GradedBatch,
    sample: Callable[[int], GradedBatch],
    sampling: Sampling,
    mesh: jax.sharding.Mesh,
    *,
    without_overlong: bool = False,
    by_turn: bool = False,
) -> GradedBatch:
    """Replace groups without a signal by groups of fresh prompts. Collective.

    Args:
      sample: a function of n that samples the P prompts from the n-th after the first of `batch` on.
      sampling: its `group` and `max_refills`.
      mesh: the learner's mesh.
      without_overlong, by_turn: as for `find_constant_groups`.
    """
    find = partial(find_constant_groups, group=sampling.group, without_overlong=without_overlong, by_turn=by_turn)
    rewards, replaced = [completion.reward for completion in batch.completions], 0
    for _ in range(sampling.max_refills):
        constant_P = find(batch.completions)
        if not constant_P.any():
            break
        fresh = sample(batch.taken)
        source_P = plan_refill(constant_P, find(fresh.completions))
        sources = zip(batch.completions, _by_row(source_P, len(batch.completions)), strict=True)
        batch = replace(
            batch,
            taken=batch.taken + fresh.taken,
            skipped=batch.skipped + fresh.skipped,
            rollout=replace_groups(batch.rollout, fresh.rollout, source_P, mesh),
            problems=[old if s < 0 else fresh.problems[s] for old, s in zip(batch.problems, source_P, strict=True)],
            completions=[old if source < 0 else fresh.completions[source] for old, source in sources],
            replaced=[*batch.replaced, *_left_out(batch.completions, fresh.completions, source_P)],
        )
        rewards += [completion.reward for completion in fresh.completions]
        replaced += int((source_P >= 0).sum())
    metrics = {
        "sampling/prompts": float(batch.taken),
        "sampling/groups_replaced": float(replaced),
        "reward/mean_sampled": float(np.mean(rewards)),
    }
    return replace(batch, metrics=batch.metrics | metrics)


def find_constant_groups(
    completions: Sequence[Completion], *, group: int, without_overlong: bool = False, by_turn: bool = False
) -> np.ndarray:
    """Return bool [P]: all completions of the group have the same rewards, as float32.

    With `without_overlong` truncated completions do not count, because they have no advantage. With `by_turn` the
    rewards of turns are compared, because each turn has an advantage (`grading.credit_turns`).
    """

    def is_constant(samples: Sequence[Completion]) -> bool:
        counted = [sample for sample in samples if sample.finished or not without_overlong]
        rewards = [sample.turns.rewards if by_turn and sample.turns else sample.rewards for sample in counted]
        return len({tuple(map(np.float32, values)) for values in rewards}) <= 1

    return np.array([is_constant(completions[first : first + group]) for first in range(0, len(completions), group)])


def plan_refill(constant_P: np.ndarray, fresh_constant_P: np.ndarray) -> np.ndarray:
    """Return int32 [P]: for each group the fresh group that replaces it, or -1.

    >>> plan_refill(np.array([True, False, True, True]), np.array([True, False, True, False])).tolist()
    [1, -1, 3, -1]
    """
    source_P = np.full(len(constant_P), -1, np.int32)
    (replaced,), (fresh,) = np.nonzero(constant_P), np.nonzero(~fresh_constant_P)
    source_P[replaced[: len(fresh)]] = fresh[: len(replaced)]
    return source_P


def replace_groups(rollout: Rollout, fresh: Rollout, source_P: np.ndarray, mesh: jax.sharding.Mesh) -> Rollout:
    """Replace groups as planned by `plan_refill`, padded to the longer rollout. Fields on the host stay there."""
    source_B = _by_row(source_P, len(rollout.length_B))
    pick_on_devices = jax.jit(_pick_rows, out_shardings=named_sharding(mesh, "batch"))

    def pick(old: Array | np.ndarray, new: Array | np.ndarray) -> Array | np.ndarray:
        if isinstance(old, jax.Array):
            return pick_on_devices(source_B, old, new)
        return np.where(source_B < 0, old, np.asarray(new)[source_B])

    return jax.tree.map(pick, rollout, fresh)


def _left_out(old: Sequence[Completion], fresh: Sequence[Completion], source_P: np.ndarray) -> Iterator[Completion]:
    """Yield the completions that gave way, and the fresh ones that took no place."""
    source_B = _by_row(source_P, len(old))
    yield from (each for each, source in zip(old, source_B, strict=True) if source >= 0)
    taken = set(source_B.tolist())
    yield from (each for row, each in enumerate(fresh) if row not in taken)


def _by_row(source_P: np.ndarray, rows: int) -> np.ndarray:
    """Return int32 [B]: for each row the fresh row that replaces it, or -1."""
    group = rows // len(source_P)
    source_PG = np.where(source_P[:, None] < 0, -1, source_P[:, None] * group + np.arange(group))
    return source_PG.reshape(-1).astype(np.int32)


def _pick_rows(source_B: Array, old: Array, new: Array) -> Array:
    """Select rows of either array, padded along T: with 0, or with the experts of the last token, which has none."""
    shape = (0, *np.maximum(old.shape, new.shape)[1:])  # rows are not padded
    mode = "edge" if old.ndim > 2 else "constant"
    old, new = (jnp.pad(x, [(0, max(0, w - n)) for w, n in zip(shape, x.shape, strict=True)], mode) for x in (old, new))
    kept = source_B.reshape(-1, *[1] * (old.ndim - 1)) < 0
    return jnp.where(kept, old, jnp.take(new, jnp.maximum(source_B, 0), axis=0))
