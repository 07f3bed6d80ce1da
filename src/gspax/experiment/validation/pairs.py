"""Two rules for all pairs of settings: one that does nothing without another, and one that cannot stand beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from gspax.config import Experiment
from gspax.rewards.environments.agents import Agent


class Pair(NamedTuple):
    """A setting, another one, and why they belong together or exclude each other."""

    key: str
    other: str
    why: str = ""


AGENT = "an Agent"  # as the environment

NEEDS = (
    Pair("sampling.draft_cost", "sampling.drafts"),
    Pair("turns.credit", "environment", ", whose turns it tells apart"),
)
BESIDE = (
    Pair("placement", "engine", ", which has its own devices"),
    Pair("sampler_mesh", "engine", ", which has its own devices"),
    Pair("sampler_mesh", "placement", ", whose placement.mesh is the sampler's"),
    Pair("schedule.microbatch_rows", "schedule.microbatch_tokens"),
    Pair("optimizer.bias_update_speed", "lora", ", which does not train the routers"),
    Pair("warm_start.optimizer.bias_update_speed", "lora", ", which does not train the routers"),
    Pair("sampling.drafts", AGENT, ", whose rollouts of a problem need not begin alike"),
    Pair("sampling.noise", AGENT, ", whose rollouts of a problem need not begin alike"),
    Pair("placement.staleness", AGENT, ", whose requests the sampler waits for"),
    Pair("placement.partial", AGENT, ", whose requests the sampler waits for"),
    Pair("engine.staleness", AGENT, ", whose requests the sampler waits for"),
    Pair("engine.partial", AGENT, ", whose requests the sampler waits for"),
)


def pair_problems(experiment: Experiment, pair: Pair, *, needed: bool) -> Iterator[str]:
    """Yield a sentence if the setting of a pair is on, and the other one is not as it has to be.

    Args:
      needed: the other one has to be on, as for `NEEDS`; else off, as for `BESIDE`.
    """
    value, default = _read(experiment, pair.key)
    if value != default and needed != _is_on(experiment, pair.other):
        word = "without" if needed else "beside"
        yield f"{pair.key}: wanted {describe(default)} {word} {pair.other}{pair.why}, got {describe(value)}"


def _is_on(experiment: object, key: str) -> bool:
    if key == AGENT:
        return isinstance(getattr(experiment, "environment", None), Agent)
    value, default = _read(experiment, key)
    return bool(value != default)


def _read(experiment: object, key: str) -> tuple[Any, Any]:
    """Return a setting and its default; None twice if the part that has it is not there."""
    owner: Any = experiment
    *parts, name = key.split(".")
    for part in parts:
        if (owner := getattr(owner, part)) is None:
            return None, None
    field = next(each for each in dataclasses.fields(owner) if each.name == name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return getattr(owner, name), default


def describe(value: object) -> str:
    """Describe a value for a sentence: 0.001, False, "turn", null, or a Placement."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case int() | float():
            return f"{value:g}"
        case str():
            return f'"{value}"'
    return f"a {type(value).__name__}" if dataclasses.is_dataclass(value) else repr(value)
