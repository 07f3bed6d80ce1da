"""Values per row first; reducing is a separate, named step.

A loss returns `Terms`: what every row adds to the numerator and to the denominator of

    loss = Σ value / Σ weight.

Both sums run over all rows of the batch, so the loss does not depend on how the rows were split into
microbatches: differentiate Σ value of each microbatch, add up the gradients, divide once by Σ weight.
`weight` depends on the mask alone (and on the segments of packed rows), so the denominator is known before the first
forward pass. The metrics are sums, extremes and quantiles over rows as well: concatenate the rows of all microbatches
and call `reduce` once.

A policy loss takes one of three functions as `aggregate`, from values per token to a value and a weight per row:

    by_sequence   1/N Σ_i 1/|y_i| Σ_t    every sequence weighs the same: a token of a long one weighs less
    by_token      1/Σ_i |y_i| Σ_i Σ_t    every token weighs the same: a long sequence weighs more
    by_constant   1/N Σ_i 1/L Σ_t        the same, but a token's weight does not depend on the other sequences' lengths

N is the number of sequences with a response token, |y_i| the number of response tokens of sequence i, L a constant.
Each gives the same number under any split into microbatches, packed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax.losses import checks, explicit, masked, sequences
from gspax.losses.formulas import formula
from gspax.losses.traits import at_level

Array = jax.Array
Aggregate = Callable[[Array, Array, Array | None], tuple[Array, Array]]
"""(value [B, T], mask [B, T], segment_ids [B, T] or None) -> (value [B], weight [B]), linear in the value."""


class Share(NamedTuple):
    """A metric that reduces to Σ part / Σ whole, 0 if there is nothing to count."""

    part: Array  # float32 [B]
    whole: Array  # float32 [B]


class Spread(NamedTuple):
    """A metric that reduces to its mean, min and max over the entries in `keep`, 0 if there is none."""

    value: Array  # float32 [B], or [B, S] with one entry per sequence of a row
    keep: Array  # bool, the same shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantile:
    """A metric that reduces to the smallest entry above which lies at most the share `above` of the weight.

    Weight up to `at_least` may lie above it even where it is a larger share; 0 if all of the weight may.
    """

    value: Array  # float32 [B], or [B, S] with one entry per sequence of a row
    weight: Array  # float32, the same shape, at least 0; 0 leaves the entry out
    above: float = field(metadata={"static": True})
    at_least: float = field(default=0.0, metadata={"static": True})


class Evenness(NamedTuple):
    """A metric of entries of at least 0 that reduces to their effective number, and to the largest one's share.

    `NAME_ess_min` is (Σ x)² / (n Σ x²) of the n entries in `keep`, 1 if all are equal; `NAME_share_max` is max x / Σ x.
    Of several updates, the least and the largest count. 1 and 0 if all entries are 0.
    """

    value: Array  # float32 [B], or [B, S] with one entry per sequence of a row
    keep: Array  # bool, the same shape


Metrics = dict[str, Share | Spread | Quantile | Evenness]


class Terms(NamedTuple):
    """The result of a loss. A pytree: it can be differentiated, scanned over, stacked and concatenated by rows."""

    value: Array  # float32 [B]  contribution to the numerator, to be minimized; 0 where the weight is 0
    weight: Array  # float32 [B]  contribution to the denominator; depends on the mask alone
    metrics: Metrics  # by name; no gradient flows through them


@formula("sum(x / length) / sequences")
@at_level("sequence")
def by_sequence(value: Array, mask: Array, segment_ids: Array | None = None) -> tuple[Array, Array]:
    """Weigh every non-empty sequence the same: (Σ of the means over its sequences, their number) for each row.

    GRPO (arXiv 2402.03300, eq. 3) and GSPO (arXiv 2507.18071, eq. 5).

    >>> value = jnp.array([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]])
    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> [x.tolist() for x in by_sequence(value, mask)]
    [[2.0, 5.0], [1.0, 1.0]]

    Args:
      value: float32 [B, T], a value per token.
      mask: bool [B, T], True on response tokens.
      segment_ids: int32 [B, T] for packed rows, 0 for padding; None if every row is one sequence.

    Returns:
      value and weight, float32 [B]; both 0 for a row without a response token.
    """
    value_BT, mask_BT, segment_BT = checks.aggregate_inputs(value, mask, segment_ids)
    mask_BT = sequences.response(mask_BT, segment_BT)
    return sequences.mean(value_BT, mask_BT, segment_BT).sum(-1), _sequence_count(mask_BT, segment_BT)


@formula("sum(x) / tokens")
@at_level("token")
def by_token(value: Array, mask: Array, segment_ids: Array | None = None) -> tuple[Array, Array]:
    """Weigh every response token the same: (Σ over the row's response tokens, their number).

    DAPO (arXiv 2503.14476, eq. 8 and 12). Arguments and results as of `by_sequence`.

    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> [x.tolist() for x in by_token(jnp.array([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]]), mask)]
    [[4.0, 5.0], [2.0, 1.0]]
    """
    value_BT, mask_BT, segment_BT = checks.aggregate_inputs(value, mask, segment_ids)
    mask_BT = sequences.response(mask_BT, segment_BT)
    return masked.sum(value_BT, mask_BT, axis=-1), sequences.count(mask_BT, segment_BT).sum(-1)


@formula(lambda keywords: f"sum({'x' if keywords['length'] == 1 else 'x / length'}) / sequences")
@at_level("sequence")
def by_constant(
    value: Array, mask: Array, segment_ids: Array | None = None, *, length: float = 1.0
) -> tuple[Array, Array]:
    """Sum over tokens, average over non-empty sequences: (Σ over the row's response tokens / length, its sequences).

    Dr. GRPO (arXiv 2503.20783, Section 3.2). Its equation has no divisor (`length` 1); its code divides by the number
    of tokens that a response may have, which only scales the loss: `functools.partial(by_constant, length=4096)`.
    Arguments and results as of `by_sequence`; `length` is a number above 0.

    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> [x.tolist() for x in by_constant(jnp.array([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]]), mask, length=2)]
    [[2.0, 2.5], [1.0, 1.0]]
    """
    value_BT, mask_BT, segment_BT = checks.aggregate_inputs(value, mask, segment_ids)
    length = checks.positive("length", length)
    mask_BT = sequences.response(mask_BT, segment_BT)
    return masked.sum(value_BT, mask_BT, axis=-1) / length, _sequence_count(mask_BT, segment_BT)


def reduce(terms: Terms) -> tuple[Array, dict[str, Array]]:
    """Reduce the terms of all rows to (loss, metrics): scalars, float32.

    The loss is Σ value / Σ weight, and 0 if no row weighs anything. A `Share` or a `Quantile` called x becomes `x`, a
    `Spread` becomes `x_mean`, `x_min` and `x_max`. The leaves may have any shape, [microbatches, rows] as well as [B].

    >>> accuracy = Share(jnp.array([1.0, 0.0]), jnp.array([1.0, 1.0]))
    >>> loss, metrics = reduce(Terms(jnp.array([6.0, 3.0]), jnp.array([2.0, 1.0]), {"accuracy": accuracy}))
    >>> float(loss), float(metrics["accuracy"])
    (3.0, 0.5)
    """
    metrics = {}
    for name, metric in terms.metrics.items():
        if isinstance(metric, Share):
            metrics[name] = _divide(jnp.sum(metric.part), jnp.sum(metric.whole))
        elif isinstance(metric, Quantile):
            metrics[name] = _quantile(metric)
        elif isinstance(metric, Evenness):
            metrics |= _evenness(name, metric)
        else:
            for reduction in (masked.mean, masked.min, masked.max):
                metrics[f"{name}_{reduction.__name__}"] = reduction(metric.value, metric.keep)
    return _divide(jnp.sum(terms.value), jnp.sum(terms.weight)), metrics


def mean_over(value: Array, mask: Array) -> Share:
    """Compute the mean over response tokens, [B, T], or over sequences, [B, S]."""
    return Share(masked.sum(value, mask, axis=-1), jnp.sum(mask, -1, dtype=jnp.float32))


def share_of_tokens(flag_BT: Array, mask_BT: Array) -> Share:
    """Compute the share of response tokens with the flag."""
    return mean_over(flag_BT.astype(jnp.float32), mask_BT)


def share_of_sequences(flag_BT: Array, mask_BT: Array, segment_BT: Array | None = None) -> Share:
    """Compute the share of non-empty sequences with the flag on at least one response token."""
    return Share(_sequence_count(flag_BT & mask_BT, segment_BT), _sequence_count(mask_BT, segment_BT))


def _sequence_count(mask_BT: Array, segment_BT: Array | None) -> Array:
    """Count the non-empty sequences in each row, float32 [B]."""
    return jnp.sum(sequences.count(mask_BT, segment_BT) > 0, axis=-1, dtype=jnp.float32)


def _quantile(metric: Quantile) -> Array:
    weight = explicit.whole(metric.weight).ravel()
    if not weight.size:  # a batch without rows
        return jnp.zeros((), jnp.float32)
    value = jnp.where(weight > 0, explicit.whole(metric.value).ravel(), -jnp.inf)
    descending = jnp.argsort(-value)
    within = jnp.cumsum(weight[descending]) > jnp.maximum(metric.above * weight.sum(), metric.at_least)
    return jnp.where(within.any(), value[descending[jnp.argmax(within)]], 0)


def _evenness(name: str, metric: Evenness) -> dict[str, Array]:
    largest = masked.max(metric.value, metric.keep)
    value = jnp.where(metric.keep, metric.value / jnp.where(largest > 0, largest, 1), 0)  # a square may not overflow
    total, squares, count = jnp.sum(value), jnp.sum(value**2), jnp.sum(metric.keep, dtype=jnp.float32)
    ess = jnp.where(squares > 0, total**2 / jnp.where(squares > 0, count * squares, 1), 1)
    return {f"{name}_ess_min": ess, f"{name}_share_max": _divide(masked.max(value, metric.keep), total)}


def _divide(total: Array, of: Array) -> Array:
    # Two selections: with one alone the gradient of the division by 0 would still be NaN.
    return jnp.where(of > 0, total / jnp.where(of > 0, of, 1), 0)
