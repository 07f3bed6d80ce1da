"""Handling of overlong responses: a reward for length, or leaving them out. Lengths are in tokens.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gspax.losses import checks
from gspax.losses.formulas import formula

Array = jax.Array


def response_length(mask_BT: Array) -> Array:
    """Count the response tokens of each row, int32 [B], the stop token included: tokens of the mask, not characters.

    >>> response_length(jnp.array([[False, True, True], [False, True, False]])).tolist()
    [2, 1]
    """
    return jnp.sum(checks.array("mask_BT", mask_BT, jnp.bool_, "BT"), axis=-1, dtype=jnp.int32)


@formula("(clip(max_length - length, 0, buffer) - buffer) / buffer")
def soft_overlong_punishment(length_B: Array, *, max_length: int, buffer: int) -> Array:
    """Compute a reward from 0 to -1, float32 [B], to be added to the task's (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer, then falling linearly to -1 at max_length, and -1 beyond. The paper uses max_length
    20480 and buffer 4096. Add it before the advantages are computed, and not with `advantages.maxrl`.

    >>> soft_overlong_punishment(jnp.array([10, 14, 16]), max_length=16, buffer=4).tolist()
    [0.0, -0.5, -1.0]

    Args:
      length_B: integer [B], tokens of each response.
      max_length: L_max of the paper, where a response is cut off.
      buffer: L_cache of the paper, from 1 to max_length.

    Raises:
      TypeError: length_B does not hold integers; a number is not a Python int.
      ValueError: length_B has another rank; buffer or max_length is out of range.
    """
    length_B = jnp.asarray(checks.numbers("length_B", length_B, "integers", [jnp.integer], "B"), jnp.int32)
    for name, number in (("max_length", max_length), ("buffer", buffer)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be a Python int, a number of tokens; got {type(number).__name__}")
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to max_length {max_length}; got {buffer}")
    left_B = jnp.clip(max_length - length_B, 0, buffer)  # unused tokens of the buffer
    return (left_B - buffer).astype(jnp.float32) / buffer


def filter_overlong(mask_BT: Array, truncated_B: Array) -> Array:
    """Remove the truncated rows from the mask: overlong filtering (DAPO, arXiv 2503.14476, section 3.4).

    Such a row has no response tokens left and weighs nothing, in the loss's denominator either. Pass `~truncated` as
    the mask of the advantages too, or the truncated samples' rewards stay in the means of their groups.

    >>> filter_overlong(jnp.ones((2, 2), bool), jnp.array([False, True])).tolist()
    [[True, True], [False, False]]

    Args:
      mask_BT: bool [B, T], True on response tokens.
      truncated_B: bool [B], True where the response hit the length limit: `~rollout.finished_B`.

    Raises:
      TypeError, ValueError: an argument is no bool array, or of another shape.
    """
    mask_BT = checks.array("mask_BT", mask_BT, jnp.bool_, "BT")
    truncated_B = checks.array("truncated_B", truncated_B, jnp.bool_, "B")
    checks.same_shape("truncated_B", truncated_B, "mask_BT in its rows", mask_BT.shape[:1])
    return mask_BT & ~truncated_B[:, None]
