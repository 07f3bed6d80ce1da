"""The facts about a policy loss that a trainer needs: a record attached to the function, so its name means nothing.

The record is found through `functools.partial` and `functools.wraps`. A loss without one is described by its
signature (`traits_of`); attach one with `@has_traits(Traits(...))` where that is not enough, as for a loss with the
ratio of a sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax

Level = Literal["token", "sequence"]
Function = TypeVar("Function", bound=Callable[..., object])
Reduction = Callable[..., tuple[jax.Array, jax.Array]]  # an `aggregate`


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a policy loss.

    `ratio` is the level of the ratio that the loss bounds, or weighs by; None if it has none. A clip range is in units
    of that ratio. `correction` is the level of the finest `correction` whose factor reaches the gradient of each token
    unchanged: "sequence" for a loss whose gradient has one weight per sequence, which replaces factors of single
    tokens by their mean over the sequence; None for a loss that takes no correction.

    `old_logp` is "sampler" for a loss whose ratio is to the policy that sampled the tokens, as if the experiment's
    `old_logp` were set so: no old log-probs are computed.
    """

    ratio: Level | None = None
    clip_range: bool = False  # takes `clip_low` and `clip_high`
    clip_low_limit: float = 1.0  # exclusive: a ratio is above 0, so a band reaching to 0 or below has no lower bound
    correction: Level | None = None
    token_advantage: bool = False  # takes advantages [B, T] for rows that are not packed
    old_logp: Literal["sampler"] | None = None  # None: as the experiment says
    updates: bool = False  # takes `updates`, int32: the number of updates before this one, skipped ones included
    aggregate: Reduction | None = None  # its default; None: it takes none


def has_traits(traits: Traits) -> Callable[[Function], Function]:
    """Attach the record to a loss; a decorator.

    >>> @has_traits(Traits(ratio="sequence", clip_range=True))
    ... def loss(logp, old_logp, advantage, mask, *, clip_low=3e-4, clip_high=4e-4): ...
    >>> traits_of(functools.partial(loss, clip_low=1e-3)).ratio
    'sequence'
    """

    def attach(function: Function) -> Function:
        setattr(function, "traits", traits)  # noqa: B010 (mypy: functions have no such attribute)
        return function

    return attach


def traits_of(loss: Callable[..., object]) -> Traits:
    """Return the record of a loss; for one without a record, the facts that its signature shows.

    A signature shows which keywords there are. A loss with a clip range is assumed to have a ratio per token,
    and a correction to reach each token.
    """
    for layer in layers(loss):
        if isinstance(traits := getattr(layer, "traits", None), Traits):
            return traits
    keywords = keywords_of(loss)
    clip_range = {"clip_low", "clip_high"} <= keywords.keys()
    return Traits(
        ratio="token" if clip_range else None,
        clip_range=clip_range,
        correction="token" if "correction" in keywords else None,
        aggregate=keywords.get("aggregate"),
    )


def weight_level(loss: Callable[..., object]) -> Level | None:
    """Return the level of the finest weight, a `correction`, that a loss applies as it is; None if it takes none."""
    return traits_of(loss).correction


def at_level(level: Level) -> Callable[[Function], Function]:
    """Mark an `aggregate` or a correction as giving each token or each sequence its own weight; a decorator."""

    def attach(function: Function) -> Function:
        setattr(function, "level", level)  # noqa: B010
        return function

    return attach


def level_of(function: Callable[..., object]) -> Level | None:
    """Return the level that `at_level` attached, or the finest of the bound `factors`; None for any other function."""
    for layer in layers(function):
        if hasattr(layer, "level"):
            return layer.level
        if isinstance(layer, functools.partial) and "factors" in layer.keywords:
            levels = [level_of(factor) for factor in layer.keywords["factors"]]
            return next((level for level in ("token", "sequence") if level in levels), None)
    return None


def aggregate_of(loss: Callable[..., object]) -> Reduction | None:
    """Return the `aggregate` that a loss uses: the one bound to it, else its default; None if it takes none."""
    for layer in layers(loss):
        if isinstance(layer, functools.partial) and "aggregate" in layer.keywords:
            return layer.keywords["aggregate"]
    return traits_of(loss).aggregate


def layers(function: object) -> Iterator[object]:
    """Yield a function and the functions that `functools.partial` and `functools.wraps` wrap in it, outermost first."""
    while function is not None:
        yield function
        inner = getattr(function, "__wrapped__", None)
        function = function.func if isinstance(function, functools.partial) else inner


def keywords_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the keyword parameters of a function that have a default, with the default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}
