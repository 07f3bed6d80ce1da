"""Argument checks of the losses, in Python at trace time: a compiled step cannot raise.

Every message names the argument, what was wanted and what it got: TypeError for a wrong type or dtype, ValueError
for a wrong shape or number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

Array = jax.Array

LOWEST_LOGP = -1e30  # a few of them still have a finite sum


def array(name: str, value: object, dtype: DTypeLike, axes: str, why: str = "") -> Array:
    """Return `value` as a jax array if it has this dtype and one dimension per letter of `axes`."""
    wanted = f"{name} must be {'an' if dtype == np.int32 else 'a'} {np.dtype(dtype).name} array [{', '.join(axes)}]"
    # The dtype is read before jax sees the array: jnp.asarray would silently make float32 of numpy's float64.
    if getattr(value, "dtype", dtype) != dtype:
        raise TypeError(f"{wanted}{why}; got {describe(value)}")
    return jnp.asarray(_with_axes(wanted, value, axes))


def finite_logp(name: str, value: object, why: str = "", *, axes: str = "BT") -> Array:
    """Return float32 log-probabilities with a finite number far below any other for -inf, because -inf - -inf is NaN.

    A token of probability 0 thus has a ratio that is clipped like any extreme one, and no gradient.
    """
    logp = array(name, value, jnp.float32, axes, why)
    return jnp.where(logp == -jnp.inf, LOWEST_LOGP, logp)


def numbers(name: str, value: object, what: str, kinds: Sequence[type], axes: str) -> Array | np.ndarray:
    """Return `value` if its dtype is of one of these kinds and it has one dimension per letter of `axes`.

    Args:
      what: the kinds in words.
    """
    wanted = f"{name} must be an array [{', '.join(axes)}] of {what}"
    if hasattr(value, "dtype") and not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise TypeError(f"{wanted}; got {describe(value)}")
    return _with_axes(wanted, value, axes)


def _with_axes(wanted: str, value: object, axes: str) -> Array | np.ndarray:
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        raise TypeError(f"{wanted}; got {describe(value)}")
    if len(value.shape) != len(axes):
        raise ValueError(f"{wanted}; got {describe(value)}")
    return cast(Array, value)


def describe(value: object) -> str:
    """Describe an array by its dtype and shape, anything else by its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def same_shape(name: str, value: Array | np.ndarray, like_name: str, shape: tuple[int, ...]) -> None:
    """Check that `value` has this shape, which is the shape of `like_name`; else ValueError."""
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, as {like_name} has; got {list(value.shape)}")


def policy_inputs(
    logp: ArrayLike,
    old_logp: ArrayLike,
    advantage: ArrayLike,
    mask: ArrayLike,
    *,
    advantage_axes: tuple[str, ...] = ("B",),
) -> tuple[Array, Array, Array, Array]:
    """Check the four arrays of a policy loss: float32 [B, T] twice, float32 advantage, bool mask [B, T]."""
    finer = " (the clip band is finer than bfloat16 and float16 can tell from 1)"
    logp_BT, old_logp_BT = finite_logp("logp", logp, finer), finite_logp("old_logp", old_logp, finer)
    same_shape("old_logp", old_logp_BT, "logp", logp_BT.shape)
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, "logp", logp_BT.shape)
    rank = len(getattr(advantage, "shape", ()))
    axes = next((a for a in advantage_axes if len(a) == rank), advantage_axes[0])
    advantage = array("advantage", advantage, jnp.float32, axes)
    same_shape("advantage", advantage, "logp" if rank == 2 else "logp in its rows", logp_BT.shape[:rank])
    return logp_BT, old_logp_BT, advantage, mask_BT


def two_policies(
    name: str, logp: ArrayLike, other_name: str, other: ArrayLike, mask: ArrayLike, segments: ArrayLike | None
) -> tuple[Array, Array, Array, Array | None]:
    """Check two float32 [B, T] log-probs of the same tokens, a bool mask [B, T], and None or int32 segments [B, T]."""
    logp_BT, other_BT = finite_logp(name, logp), finite_logp(other_name, other)
    same_shape(other_name, other_BT, name, logp_BT.shape)
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, name, logp_BT.shape)
    return logp_BT, other_BT, mask_BT, segment_ids(segments, logp_BT.shape, name)


def segment_ids(value: ArrayLike | None, shape: tuple[int, ...], like_name: str = "logp") -> Array | None:
    """Return `value` if it is None (a row is one sequence) or int32 [B, T] of this shape."""
    if value is None:
        return None
    segment_BT = array("segment_ids", value, jnp.int32, "BT")
    same_shape("segment_ids", segment_BT, like_name, shape)
    return segment_BT


def correction(value: ArrayLike | None, shape: tuple[int, ...], *, packed: bool) -> Array | None:
    """Return `value` if it is None (no correction) or float32 [B, T] like logp; [B] too if a row is one sequence."""
    if value is None:
        return None
    rank = 1 if len(getattr(value, "shape", ())) == 1 and not packed else 2
    factor = array("correction", value, jnp.float32, "BT"[:rank])
    same_shape("correction", factor, "logp" if rank == 2 else "logp in its rows", shape[:rank])
    return factor


def aggregate_inputs(
    value: ArrayLike, mask: ArrayLike, segments: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    """Check the arrays of an aggregation: float32 [B, T], bool [B, T], and None or int32 [B, T]."""
    value_BT = array("value", value, jnp.float32, "BT")
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, "value", value_BT.shape)
    return value_BT, mask_BT, segment_ids(segments, value_BT.shape, "value")


def clip_range(clip_low: float, clip_high: float) -> tuple[float, float]:
    """Check both widths: numbers ≥ 0, returned as Python floats (infinity: no clipping), or float32 scalar arrays.

    A range measured during a run is an array, so that a new one does not compile the step again. Its value cannot be
    checked here.
    """
    return _clip_width("clip_low", clip_low), _clip_width("clip_high", clip_high)


def known_clip_range(clip_low: float, clip_high: float) -> tuple[float, float]:
    """Return both widths as Python floats if they are numbers ≥ 0."""
    return clip_range(number("clip_low", clip_low), number("clip_high", clip_high))


def _clip_width(name: str, width: float) -> float:
    if isinstance(width, jax.Array) and width.shape == () and width.dtype == jnp.float32:
        return width
    if not number(name, width) >= 0:  # so that NaN is refused too
        raise ValueError(f"{name} must be at least 0, the distance of the bound from 1; got {width}")
    return float(width)


def dual_clip(value: float | None) -> float | None:
    """Return `value` as a Python float if it is a number above 1, or None."""
    if value is None:
        return None
    if not number("dual_clip", value) > 1:
        raise ValueError(f"dual_clip must be above 1, a bound of the ratio itself; got {value}")
    return float(value)


def at_least_0(name: str, value: float) -> float:
    """Return `value` as a Python float if it is a number ≥ 0; infinity is one."""
    if not number(name, value) >= 0:
        raise ValueError(f"{name} must be at least 0; got {value}")
    return float(value)


def finite_at_least_0(name: str, value: float) -> float:
    """Return `value` as a Python float if it is a finite number ≥ 0."""
    if not 0 <= number(name, value) < math.inf:
        raise ValueError(f"{name} must be finite and at least 0; got {value}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return `value` as a Python float if it is a finite number above 0."""
    if not (number(name, value) > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and above 0; got {value}")
    return float(value)


def count(name: str, value: int) -> int:
    """Return `value` if it is a Python int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a Python int; got {describe(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
    return value


def function(name: str, value: object, *, like: str = "losses.by_sequence") -> None:
    """Check that `value` can be called; else TypeError."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, as {like} is; got {type(value).__name__}")


def number(name: str, value: object) -> float:
    """Return `value` if it is a Python or numpy number, else TypeError: an array, traced or not, cannot be checked."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a Python number, known when the loss is traced; got {type(value).__name__}")
    return cast(float, value)
