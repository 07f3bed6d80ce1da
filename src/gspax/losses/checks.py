"""Argument checks of the losses, in Python at trace time: a compiled step cannot raise.

Every message names the argument, what was wanted and what came: TypeError for a wrong type or dtype, ValueError
for a wrong shape or number.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def array(name: str, value: Any, dtype: Any, axes: str, why: str = "") -> Array:
    """`value` as a jax array if it has that dtype and one dimension per letter of `axes`."""
    wanted = f"{name} must be a {np.dtype(dtype).name} array [{', '.join(axes)}]"
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        raise TypeError(f"{wanted}; got {type(value).__name__}")
    got = f"{value.dtype} {list(value.shape)}"
    # The dtype is read before jax sees the array: jnp.asarray would silently make float32 of numpy's float64.
    if value.dtype != dtype:
        raise TypeError(f"{wanted}{why}; got {got}")
    if len(value.shape) != len(axes):
        raise ValueError(f"{wanted}; got {got}")
    return jnp.asarray(value)


def same_shape(name: str, value: Array, like_name: str, shape: tuple[int, ...]) -> None:
    """ValueError unless `value` has the given shape, which is that of `like_name`."""
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, as {like_name} has; got {list(value.shape)}")


def policy_inputs(
    logp: Any, old_logp: Any, advantage: Any, mask: Any, *, advantage_axes: tuple[str, ...] = ("B",)
) -> tuple[Array, Array, Array, Array]:
    """The four arrays of a policy loss: float32 [B, T] twice, float32 advantage, bool mask [B, T]."""
    finer = " (the clip band is finer than bfloat16 and float16 can tell from 1)"
    logp_BT = array("logp", logp, jnp.float32, "BT", finer)
    old_logp_BT = array("old_logp", old_logp, jnp.float32, "BT", finer)
    same_shape("old_logp", old_logp_BT, "logp", logp_BT.shape)
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, "logp", logp_BT.shape)
    rank = len(getattr(advantage, "shape", ()))
    axes = next((a for a in advantage_axes if len(a) == rank), advantage_axes[0])
    advantage = array("advantage", advantage, jnp.float32, axes)
    same_shape("advantage", advantage, "logp" if rank == 2 else "logp in its rows", logp_BT.shape[:rank])
    return logp_BT, old_logp_BT, advantage, mask_BT


def two_policies(name: str, logp: Any, other_name: str, other: Any, mask: Any, segments: Any) -> tuple[Any, ...]:
    """Two log-probabilities float32 [B, T] of the same tokens, bool mask [B, T], and None or int32 segments [B, T]."""
    logp_BT = array(name, logp, jnp.float32, "BT")
    other_BT = array(other_name, other, jnp.float32, "BT")
    same_shape(other_name, other_BT, name, logp_BT.shape)
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, name, logp_BT.shape)
    return logp_BT, other_BT, mask_BT, segment_ids(segments, logp_BT.shape, name)


def segment_ids(value: Any, shape: tuple[int, ...], like_name: str = "logp") -> Array | None:
    """`value` if it is None (a row is one sequence) or int32 [B, T] of that shape."""
    if value is None:
        return None
    segment_BT = array("segment_ids", value, jnp.int32, "BT")
    same_shape("segment_ids", segment_BT, like_name, shape)
    return segment_BT


def correction(value: Any, shape: tuple[int, ...], *, packed: bool) -> Array | None:
    """`value` if it is None (no correction) or float32 [B, T] like logp; [B] too if a row is one sequence."""
    if value is None:
        return None
    rank = 1 if len(getattr(value, "shape", ())) == 1 and not packed else 2
    value = array("correction", value, jnp.float32, "BT"[:rank])
    same_shape("correction", value, "logp" if rank == 2 else "logp in its rows", shape[:rank])
    return value


def aggregate_inputs(value: Any, mask: Any, segments: Any) -> tuple[Array, Array, Array | None]:
    """The arrays of an aggregation: float32 [B, T], bool [B, T], and None or int32 [B, T]."""
    value_BT = array("value", value, jnp.float32, "BT")
    mask_BT = array("mask", mask, jnp.bool_, "BT")
    same_shape("mask", mask_BT, "value", value_BT.shape)
    return value_BT, mask_BT, segment_ids(segments, value_BT.shape, "value")


def clip_range(clip_low: Any, clip_high: Any) -> tuple[Any, Any]:
    """Both widths: numbers ≥ 0 as Python floats (infinity: no clipping on that side), or float32 scalar arrays.

    A range measured during a run is an array, so that a new one does not compile the step again. Its value cannot be
    checked here.
    """
    return _clip_width("clip_low", clip_low), _clip_width("clip_high", clip_high)


def known_clip_range(clip_low: Any, clip_high: Any) -> tuple[float, float]:
    """Both widths as Python floats if they are numbers ≥ 0."""
    number("clip_low", clip_low)
    number("clip_high", clip_high)
    return clip_range(clip_low, clip_high)


def _clip_width(name: str, width: Any) -> Any:
    if isinstance(width, jax.Array) and width.shape == () and width.dtype == jnp.float32:
        return width
    number(name, width)
    if not width >= 0:  # so that NaN is refused too
        raise ValueError(f"{name} must be at least 0, the distance of the bound from 1; got {width}")
    return float(width)


def dual_clip(value: Any) -> float | None:
    """`value` as a Python float if it is a number above 1, or None."""
    if value is None:
        return None
    number("dual_clip", value)
    if not value > 1:
        raise ValueError(f"dual_clip must be above 1, a bound of the ratio itself; got {value}")
    return float(value)


def at_least_0(name: str, value: Any) -> float:
    """`value` as a Python float if it is a number ≥ 0; infinity is one."""
    number(name, value)
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0; got {value}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """`value` as a Python float if it is a finite number above 0."""
    number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and above 0; got {value}")
    return float(value)


def function(name: str, value: Any) -> None:
    """TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, as losses.by_sequence is; got {type(value).__name__}")


def number(name: str, value: Any) -> None:
    """TypeError unless `value` is a Python or numpy number: an array, traced or not, could not be checked."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a Python number, known when the loss is traced; got {type(value).__name__}")
