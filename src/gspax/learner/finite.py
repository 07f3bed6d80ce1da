"""What a run does about numbers that are not finite: skipped updates are counted, such parameters are not saved."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.types import Params


def count_skipped(before: int, skipped: int, limit: int) -> int:
    """The updates skipped in a row: `before` and those of this step, or 0 if this step skipped none. Warns of them.

    Raises:
      UserError: there are `limit` of them.
    """
    if not skipped:
        return 0
    total = before + skipped
    if total >= limit:
        raise UserError(
            f"schedule.max_skipped: wanted fewer than {limit} updates in a row with a loss or gradient that is not "
            f"finite, got {total}; the newest checkpoint is from before them"
        )
    if jax.process_index() == 0:
        print(f"gspax: warning: {skipped} updates skipped: the loss or gradient is not finite", file=sys.stderr)
    return total


def check_finite(params: Params, step: int) -> None:
    """UserError if a parameter is not finite, so that no checkpoint replaces a good one by such parameters."""
    if not multihost.to_host(_all_finite(params)):
        raise UserError(f"checkpoint {step}: wanted finite parameters, got some that are not; it is not saved")


@jax.jit
def _all_finite(params: Params) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))
