"""Rewards [P, G] -> advantages [P, G]: P prompts, G samples of each, a prompt's samples in one row.

A group whose rewards are all equal has nothing to learn from and gets exact zeros. It is recognised by comparing the
rewards, not by its standard deviation: the mean of equal numbers is rounded, so that can come out above 0. A group of
one is such a group.

Rewards are float32, or any other real dtype (bool, integers, other floats), which is converted to float32 first: a
reward is often a right or a wrong, or a count, and numpy makes float64 of Python's numbers. Advantages are float32.
All functions are pure and can be compiled. They raise TypeError for what is no array of real numbers, and ValueError
for a rank other than 2 or an empty group.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def standardize(reward_PG: Array, *, ddof: int = 1, eps: float = 1e-6) -> Array:
    """A = (R - mean) / (std + eps) in each group, as in GRPO (arXiv 2402.03300) and GSPO (arXiv 2507.18071, eq. 6).

    Rewards 0.8, 0.4, 0.6 give +1, -1, 0: exactly so with eps 0, and 0.999995 for 1 with the default.

    Args:
      reward_PG: [P, G].
      ddof: what the sum of squares is divided by is G - ddof; 1 for the sample's standard deviation.
      eps: added to the standard deviation. It bounds the advantages of a group whose rewards hardly differ.

    Raises:
      TypeError, ValueError: see the module; also a ddof outside [0, G), unless G is 1, and a negative eps.
    """
    reward_PG = _rewards(reward_PG)
    G = reward_PG.shape[1]
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if ddof < 0 or (ddof >= G and G > 1):
        raise ValueError(f"ddof must be at least 0 and below the group size {G}; got {ddof}")
    centered_PG = center(reward_PG)
    # Two passes: E[R²] - E[R]² would cancel, and can come out negative.
    variance_P1 = jnp.sum(centered_PG**2, axis=-1, keepdims=True) / max(G - ddof, 1)
    scale_P1 = jnp.sqrt(variance_P1) + eps
    return centered_PG / jnp.where(scale_P1 > 0, scale_P1, 1)


def center(reward_PG: Array) -> Array:
    """A = R - mean in each group (Dr. GRPO, arXiv 2503.20783)."""
    reward_PG = _rewards(reward_PG)
    centered_PG = reward_PG - reward_PG.mean(-1, keepdims=True)
    return jnp.where(constant_groups(reward_PG)[:, None], 0, centered_PG)


def leave_one_out(reward_PG: Array) -> Array:
    """A_i = R_i - mean of the group's other rewards (RLOO, arXiv 2402.14740), which is (R_i - mean)·G/(G - 1)."""
    reward_PG = _rewards(reward_PG)
    G = reward_PG.shape[1]
    return center(reward_PG) * (G / max(G - 1, 1))


def constant_groups(reward_PG: Array) -> Array:
    """bool [P]: all rewards of the group are equal. Its mean is the share of groups that teach nothing."""
    reward_PG = _rewards(reward_PG)
    return jnp.all(reward_PG == reward_PG[:, :1], axis=-1)


def _rewards(reward_PG: Any) -> Array:
    """The rewards as float32 [P, G]."""
    if not (hasattr(reward_PG, "dtype") and hasattr(reward_PG, "shape")):
        raise TypeError(f"reward_PG must be an array [P, G] of real numbers; got {type(reward_PG).__name__}")
    got = f"{reward_PG.dtype} {list(reward_PG.shape)}"
    real = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(reward_PG.dtype, kind) for kind in real):
        raise TypeError(f"reward_PG must hold real numbers; got {got}")
    if len(reward_PG.shape) != 2 or reward_PG.shape[1] == 0:
        raise ValueError(f"reward_PG must be [P, G] with at least one sample of each prompt; got {got}")
    return jnp.asarray(reward_PG, jnp.float32)
