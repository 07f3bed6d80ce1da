"""What a run does about numbers that are not finite: skipped updates are counted, such parameters are not saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

from gspax.errors import DivergedError
from gspax.parallel import multihost
from gspax.types import Params, TrainState


def count_skipped(before: int, skipped: Sequence[bool]) -> list[int]:
    """How many updates were skipped in a row, after each update of a step; `before` is the number before the step.

    Warns if any was skipped.
    """
    if any(skipped):
        why = "the loss or gradient is not finite, or beyond the guard's limits"
        multihost.warn_from_primary(f"{sum(skipped)} updates skipped: {why}")
    in_a_row = accumulate(skipped, lambda count, each: count + 1 if each else 0, initial=before)
    return [*in_a_row][1:]


def is_sound(updates: Sequence[Mapping[str, float]]) -> bool:
    """Whether a step leaves a state to go back to: one of its updates was applied, and the last one was finite.

    An update that is finite may break the parameters; then those after it are not.

    Args:
      updates: the metrics of the step's updates.
    """
    if not updates:
        return True
    last = updates[-1]["loss"] + updates[-1]["grad_norm"]
    return not all(each["skipped"] for each in updates) and math.isfinite(last)


def check_skipped(skipped: int, limit: int, step: int, state: TrainState, dumped: str = "") -> None:
    """DivergedError if `limit` updates in a row were skipped; `dumped` says where their minibatch is."""
    if skipped >= limit:
        raise DivergedError(
            f"schedule.max_skipped: wanted fewer than {limit} skipped updates in a row, got {skipped} by step {step}: "
            f"their loss or gradient is not finite, or beyond the guard's limits.{dumped}",
            step=step,
            position=int(multihost.to_host(state.position)),
        )


def check_finite(state: TrainState, step: int) -> None:
    """DivergedError if a parameter is not finite, so that no checkpoint replaces a good one by such parameters."""
    finite = multihost.to_host(_are_finite(state.params))
    bad = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, each in jax.tree_util.tree_leaves_with_path(finite)
        if not each
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(
            f"checkpoint {step}: wanted finite parameters, got some that are not in {', '.join(bad[:3])}{more}; it is "
            "not saved.",
            step=step,
            position=int(multihost.to_host(state.position)),
        )


@jax.jit
def _are_finite(params: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)
