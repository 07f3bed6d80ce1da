"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal give way to fresh ones.

Such a group has no advantage and adds nothing to the gradient. `sampling.max_refills` bounds how often P fresh prompts
are drawn to replace them. Of the fresh groups those with a signal are taken, in their order, for the first groups
without one; the rest is dropped. What is decided here depends on rewards that every process has.

Axes: P prompts, G samples, B = P·G rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.parallel.sharding import named_sharding
from gspax.rollout.grading import Row
from gspax.types import Array, Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class GradedBatch:
    """A rollout batch with its rewards, ready to learn from."""

    policy: int  # rollout batches that the parameters it is drawn with had learnt from
    prompts: int  # taken from the data: more than P if groups were replaced or problems skipped
    rollout: Rollout  # on the learner's mesh
    rows: list[Row]
    skipped: int = 0  # of these problems
    metrics: dict[str, float] = field(default_factory=dict)  # of partial rollouts or dynamic sampling


def refill(
    batch: GradedBatch,
    draw: Callable[[int], GradedBatch],
    sampling: Sampling,
    mesh: jax.sharding.Mesh,
    *,
    without_overlong: bool = False,
    by_turn: bool = False,
) -> GradedBatch:
    """The batch with groups of fresh prompts in place of those without a signal. Collective.

    Args:
      draw: the batch of P prompts that starts so many prompts after the first of `batch`.
      sampling: its `group` and `max_refills`.
      mesh: the learner's.
      without_overlong, by_turn: as for `find_constant_groups`.
    """
    find = partial(find_constant_groups, group=sampling.group, without_overlong=without_overlong, by_turn=by_turn)
    rollout, rows, prompts, skipped = batch.rollout, batch.rows, batch.prompts, batch.skipped
    rewards, replaced = [row["reward"] for row in rows], 0
    for _ in range(sampling.max_refills):
        constant_P = find(rows)
        if not constant_P.any():
            break
        fresh = draw(prompts)
        source_P = plan_refill(constant_P, find(fresh.rows))
        rollout = replace_groups(rollout, fresh.rollout, source_P, mesh)
        rows = replace_rows(rows, fresh.rows, source_P)
        prompts, skipped = prompts + fresh.prompts, skipped + fresh.skipped
        rewards += [row["reward"] for row in fresh.rows]
        replaced += int((source_P >= 0).sum())
    metrics = {
        "sampling/prompts": float(prompts),
        "sampling/groups_replaced": float(replaced),
        "reward/mean_drawn": float(np.mean(rewards)),
    }
    return replace(batch, prompts=prompts, rollout=rollout, rows=rows, skipped=skipped, metrics=metrics)


def find_constant_groups(
    rows: Sequence[Row], *, group: int, without_overlong: bool = False, by_turn: bool = False
) -> np.ndarray:
    """bool [P]: all completions of the group have the same rewards, as float32.

    With `without_overlong` truncated completions do not count, because they have no advantage. With `by_turn` the
    rewards are those of the turns, each of which has an advantage (`credit.credit_turns`).
    """
    values = [row["turn_rewards"] if by_turn else row.get("rewards", [row["reward"]]) for row in rows]
    rewards = [tuple(map(np.float32, each)) for each in values]
    counted = [row["finished"] or not without_overlong for row in rows]
    groups = [range(first, first + group) for first in range(0, len(rows), group)]
    return np.array([len({rewards[row] for row in each if counted[row]}) <= 1 for each in groups])


def plan_refill(constant_P: np.ndarray, fresh_constant_P: np.ndarray) -> np.ndarray:
    """int32 [P]: for each group the fresh one that replaces it, or -1.

    >>> plan_refill(np.array([True, False, True, True]), np.array([True, False, True, False])).tolist()
    [1, -1, 3, -1]
    """
    source_P = np.full(len(constant_P), -1, np.int32)
    (slots,), (found,) = np.nonzero(constant_P), np.nonzero(~fresh_constant_P)
    count = min(len(slots), len(found))
    source_P[slots[:count]] = found[:count]
    return source_P


def replace_rows(rows: Sequence[T], fresh: Sequence[T], source_P: np.ndarray) -> list[T]:
    """The rows of a batch, in place of replaced groups those of the fresh ones."""
    return [rows[row] if source < 0 else fresh[source] for row, source in enumerate(_by_row(source_P, len(rows)))]


def replace_groups(rollout: Rollout, fresh: Rollout, source_P: np.ndarray, mesh: jax.sharding.Mesh) -> Rollout:
    """The same for rollouts on a mesh, padded to the longer one. Fields on the host stay there."""
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
