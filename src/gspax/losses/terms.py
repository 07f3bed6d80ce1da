"""Values per row first; reducing is a separate, named act.

A loss returns `Terms`: for every row (sequence) what it adds to the numerator and to the denominator of

    loss = Σ value / Σ weight.

Both sums run over all rows of the batch, so the loss does not depend on how the rows were split into
micro-batches: differentiate Σ value of each micro-batch, add the gradients up, divide once by Σ weight.
`weight` depends on the mask alone, so that denominator is known before the first forward pass. The metrics are
sums and extremes over rows as well: put the rows of all micro-batches back together and call `reduce` once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax import masked

Array = jax.Array


class Share(NamedTuple):
    """A metric that reduces to Σ part / Σ whole, 0 if there is nothing to count."""

    part: Array  # float32 [B]
    whole: Array  # float32 [B]


class Spread(NamedTuple):
    """A metric that reduces to its mean, min and max over the kept rows, 0 if none is kept."""

    value: Array  # float32 [B]
    keep: Array  # bool [B]


class Terms(NamedTuple):
    """What a loss returns. A pytree: it can be differentiated, scanned over, stacked and concatenated by rows."""

    value: Array  # float32 [B]  contribution to the numerator, to be minimised; 0 where the weight is 0
    weight: Array  # float32 [B]  contribution to the denominator; depends on the mask alone
    metrics: dict[str, Share | Spread]  # by name; no gradient flows through them


def by_sequence(value_BT: Array, mask_BT: Array) -> tuple[Array, Array]:
    """Every non-empty sequence weighs the same: (mean over its tokens, 1), and (0, 0) for an empty row."""
    return masked.mean(value_BT, mask_BT, axis=-1), mask_BT.any(-1).astype(value_BT.dtype)


def reduce(terms: Terms) -> tuple[Array, dict[str, Array]]:
    """Terms of all rows -> (loss, metrics): scalars, float32.

    The loss is Σ value / Σ weight, and 0 if no row weighs anything. A `Share` called x becomes `x`, a `Spread`
    becomes `x_mean`, `x_min` and `x_max`. The leaves may have any shape, [micro-batches, rows] as well as [B].
    """
    metrics = {}
    for name, metric in terms.metrics.items():
        if isinstance(metric, Share):
            metrics[name] = _divide(jnp.sum(metric.part), jnp.sum(metric.whole))
        else:
            for reduction in (masked.mean, masked.min, masked.max):
                metrics[f"{name}_{reduction.__name__}"] = reduction(metric.value, metric.keep)
    return _divide(jnp.sum(terms.value), jnp.sum(terms.weight)), metrics


def share_of_tokens(flag_BT: Array, mask_BT: Array) -> Share:
    """The share of response tokens with the flag."""
    return Share(jnp.sum(flag_BT & mask_BT, -1, dtype=jnp.float32), jnp.sum(mask_BT, -1, dtype=jnp.float32))


def share_of_sequences(flag_BT: Array, mask_BT: Array) -> Share:
    """The share of non-empty sequences with the flag on at least one response token."""
    return Share((flag_BT & mask_BT).any(-1).astype(jnp.float32), mask_BT.any(-1).astype(jnp.float32))


def _divide(total: Array, of: Array) -> Array:
    # Two selections: with one alone the gradient of the division by 0 would still be NaN.
    return jnp.where(of > 0, total / jnp.where(of > 0, of, 1), 0)
