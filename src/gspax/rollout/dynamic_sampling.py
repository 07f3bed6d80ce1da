"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): fresh groups replace those whose rewards are all equal.

A group with equal rewards has no advantage and adds nothing to the gradient. Up to `sampling.max_refills` times P fresh
prompts are sampled: fresh groups with a signal replace the first groups without one, in order, and the others are
dropped. The choice depends on rewards, which every process has.

Axes: P prompts, G samples, B = P·G completions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.parallel.sharding import named_sharding
from gspax.rollout.completion import Completion
from gspax.types import Array, Rollout


@dataclass(frozen=True)
class GradedBatch:
    """A rollout with its rewards, ready to train on."""

    policy: int  # number of rollouts that the sampling policy was trained on
    prompts: int  # taken from the data: more than P if groups were replaced or problems skipped
    rollout: Rollout  # on the learner's mesh
    completions: Sequence[Completion]
    skipped: int = 0  # of these problems
    metrics: dict[str, float] = field(default_factory=dict)  # of partial rollouts or dynamic sampling


def refill(
    batch: GradedBatch,
    sample: Callable[[int], GradedBatch],
    sampling: Sampling,
    mesh: jax.sharding.Mesh,
    *,
    without_overlong: bool = False,
    by_turn: bool = False,
) -> GradedBatch:
    """The batch with groups of fresh prompts in place of those without a signal. Collective.

    Args:
      sample: a function of n that samples the P prompts from the n-th after the first of `batch` on.
      sampling: its `group` and `max_refills`.
      mesh: the learner's.
      without_overlong, by_turn: as for `find_constant_groups`.
    """
    find = partial(find_constant_groups, group=sampling.group, without_overlong=without_overlong, by_turn=by_turn)
    completions, rewards, replaced = batch.completions, [each.reward for each in batch.completions], 0
    for _ in range(sampling.max_refills):
        constant_P = find(completions)
        if not constant_P.any():
            break
        fresh = sample(batch.prompts)
        source_P = plan_refill(constant_P, find(fresh.completions))
        source_B = _by_row(source_P, len(completions))
        completions = [
            old if source < 0 else fresh.completions[source] for old, source in zip(completions, source_B, strict=True)
        ]
        batch = replace(
            batch,
            prompts=batch.prompts + fresh.prompts,
            skipped=batch.skipped + fresh.skipped,
            rollout=replace_groups(batch.rollout, fresh.rollout, source_P, mesh),
            completions=completions,
        )
        rewards += [each.reward for each in fresh.completions]
        replaced += int((source_P >= 0).sum())
    metrics = {
        "sampling/prompts": float(batch.prompts),
        "sampling/groups_replaced": float(replaced),
        "reward/mean_drawn": float(np.mean(rewards)),
    }
    return replace(batch, metrics=metrics)


def find_constant_groups(
    completions: Sequence[Completion], *, group: int, without_overlong: bool = False, by_turn: bool = False
) -> np.ndarray:
    """bool [P]: all completions of the group have the same rewards, as float32.

    With `without_overlong` truncated completions do not count, because they have no advantage. With `by_turn` the
    rewards of turns are compared, because each turn has an advantage (`credit.credit_turns`).
    """

    def rewards(completion: Completion) -> tuple[np.float32, ...]:
        values = completion.turns.rewards if by_turn and completion.turns is not None else completion.rewards
        return tuple(map(np.float32, values))

    groups = [completions[first : first + group] for first in range(0, len(completions), group)]
    return np.array(
        [len({rewards(each) for each in group if each.finished or not without_overlong}) <= 1 for group in groups]
    )


def plan_refill(constant_P: np.ndarray, fresh_constant_P: np.ndarray) -> np.ndarray:
    """int32 [P]: for each group the fresh one that replaces it, or -1.

    >>> plan_refill(np.array([True, False, True, True]), np.array([True, False, True, False])).tolist()
    [1, -1, 3, -1]
    """
    source_P = np.full(len(constant_P), -1, np.int32)
    (replaced,), (fresh,) = np.nonzero(constant_P), np.nonzero(~fresh_constant_P)
    count = min(len(replaced), len(fresh))
    source_P[replaced[:count]] = fresh[:count]
    return source_P


def replace_groups(rollout: Rollout, fresh: Rollout, source_P: np.ndarray, mesh: jax.sharding.Mesh) -> Rollout:
    """The rollout with the fresh groups of `plan_refill`, padded to the longer one. Fields on the host stay there."""
    source_B = _by_row(source_P, len(rollout.length_B))
    names = [each.name for each in fields(Rollout) if getattr(rollout, each.name) is not None]
    on_devices = [name for name in names if isinstance(getattr(rollout, name), jax.Array)]
    pick = jax.jit(_pick, out_shardings=named_sharding(mesh, "batch"))
    old, new = ({name: getattr(each, name) for name in on_devices} for each in (rollout, fresh))
    chosen: dict[str, Any] = pick(old, new, source_B)
    for name in set(names) - set(on_devices):
        old_B, new_B = np.asarray(getattr(rollout, name)), np.asarray(getattr(fresh, name))
        chosen[name] = np.where(source_B < 0, old_B, new_B[source_B])
    return replace(rollout, **chosen)


def _by_row(source_P: np.ndarray, rows: int) -> np.ndarray:
    """int32 [B]: for each row the fresh one that replaces it, or -1."""
    group = rows // len(source_P)
    source_B = np.repeat(source_P * group, group) + np.tile(np.arange(group), len(source_P))
    return np.where(np.repeat(source_P, group) < 0, -1, source_B).astype(np.int32)


def _pick(old: dict[str, Array], new: dict[str, Array], source_B: Array) -> dict[str, Array]:
    return {name: _pick_rows(source_B, old[name], new[name], 2 if name.endswith("_BLTA") else 1) for name in old}


def _pick_rows(source_B: Array, old: Array, new: Array, axis: int) -> Array:
    """Rows of either array, padded along the axis T: with 0, or with the experts of the last token, which has none."""
    width = max(old.shape[axis], new.shape[axis])

    def widen(array: Array) -> Array:
        before = [(0, width - array.shape[axis]) if each == axis else (0, 0) for each in range(array.ndim)]
        return jnp.pad(array, before, mode="edge" if array.ndim > 2 else "constant")

    kept = source_B.reshape(-1, *[1] * (old.ndim - 1)) < 0
    return jnp.where(kept, widen(old), jnp.take(widen(new), jnp.maximum(source_B, 0), axis=0))
