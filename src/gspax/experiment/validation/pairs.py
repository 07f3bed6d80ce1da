"""The rule for all pairs of settings: one does nothing without another, or cannot stand beside it.

Terms declare pairs of their own (`Term.pairs`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gspax.config import Experiment, filters_in_use
from gspax.config.functions import title_of
from gspax.config.term import Pair
from gspax.rewards.environments.agents import Agent

AGENT = "an Agent"  # as the environment
FILTER = "a filter (sampling.top_k, top_p, or min_p)"
BEGUN_AHEAD = "placement.staleness without placement.partial"
NAMES: Mapping[str, Callable[[Experiment], bool]] = {  # what is on by no single field
    AGENT: lambda e: isinstance(e.environment, Agent),
    FILTER: lambda e: bool(filters_in_use(e.sampling)),
    BEGUN_AHEAD: lambda e: bool(e.placement and e.placement.staleness and e.placement.partial is None),
}
PAIRS = (
    Pair("sampling.draft_cost", "sampling.drafts", needed=True),
    Pair("sampling.mask_replay", FILTER, ", whose tokens it replays", needed=True),
    Pair("turns.credit", "environment", ", whose turns it tells apart", needed=True),
    Pair("placement", "engine", ", which has its own devices"),
    Pair("sampler_mesh", "engine", ", which has its own devices"),
    Pair("sampler_mesh", "placement", ", whose placement.mesh is the sampler's"),
    Pair("schedule.microbatch_rows", "schedule.microbatch_tokens"),
    Pair("optimizer.bias_update_speed", "lora", ", which does not train the routers"),
    Pair("warm_start.optimizer.bias_update_speed", "lora", ", which does not train the routers"),
    Pair("sampling.max_refills", "placement.staleness", ", whose problems are fixed ahead"),
    Pair("sampling.max_refills", "engine.staleness", ", whose problems are fixed ahead"),
    Pair("sampling.chunk", BEGUN_AHEAD, ", whose sampler does not wait for the host"),
    Pair("environment", BEGUN_AHEAD, ", whose sampler does not wait for replies"),
    Pair("sampling.drafts", AGENT, ", whose rollouts of a problem need not begin alike"),
    Pair("sampling.noise", AGENT, ", whose rollouts of a problem need not begin alike"),
    Pair("placement.staleness", AGENT, ", whose requests the sampler waits for"),
    Pair("placement.partial", AGENT, ", whose requests the sampler waits for"),
    Pair("engine.staleness", AGENT, ", whose requests the sampler waits for"),
    Pair("engine.partial", AGENT, ", whose requests the sampler waits for"),
)


def pair_problems(experiment: Experiment, pair: Pair) -> Iterator[str]:
    """Yield a sentence if the setting of a pair is on, and the other one is not as it has to be."""
    value, default = _read(experiment, pair.key)
    is_on = NAMES[pair.other](experiment) if pair.other in NAMES else operator.ne(*_read(experiment, pair.other))
    if value != default and pair.needed != is_on:
        word = "without" if pair.needed else "beside"
        yield f"{pair.key}: wanted {describe(default)} {word} {pair.other}{pair.why}, got {describe(value)}"


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
    """Describe a value for a sentence: 0.001, False, "turn", null, a function's name, names, or a Placement."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case int() | float():
            return f"{value:g}"
        case str():
            return f'"{value}"'
        case Mapping():
            return ", ".join(value) or "none"
    if dataclasses.is_dataclass(value):
        return f"a {type(value).__name__}"
    return title_of(value) if callable(value) else repr(value)
