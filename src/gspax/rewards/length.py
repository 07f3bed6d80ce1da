"""Rewards the length of a text. For lengths in tokens (`Experiment.length_reward`) see `losses.shaping`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import PURE, concurrent, needs


def find_mistake(settings: Mapping[str, Any]) -> str:
    """Explain which of these keywords make no range of lengths; empty if they do."""
    unit, slack, at_least, at_most = (settings[name] for name in ("unit", "slack", "at_least", "at_most"))
    if unit not in _UNITS:
        return f"unit: wanted one of {', '.join(_UNITS)}, got {unit!r}"
    if slack < 0 or at_least < 0 or (at_most is not None and at_most < at_least):
        wanted = "wanted 0 <= at_least <= at_most and slack >= 0"
        return f"at_most: {wanted}, got at_least={at_least}, at_most={at_most}, slack={slack}"
    return ""


@needs(find_mistake)
@concurrent(PURE)
def within(
    problem: Problem,
    completion: str,
    *,
    at_least: int = 0,
    at_most: int | None = None,
    slack: int = 0,
    unit: str = "words",
) -> float:
    """Compute 1.0 for a length from `at_least` to `at_most`, falling linearly to 0.0 at `slack` + 1 outside of them.

    Args:
      problem: not read.
      completion: any text.
      at_least: the smallest length that gets 1.0.
      at_most: the largest length that gets 1.0; None for no limit.
      slack: the distance to that range up to which a length still gets more than 0.0.
      unit: "words" (separated by white space), "characters" or "lines" (those with text).
    """
    if mistake := find_mistake({"unit": unit, "slack": slack, "at_least": at_least, "at_most": at_most}):
        raise UserError(mistake)
    length = _UNITS[unit](completion)
    outside = max(at_least - length, 0 if at_most is None else length - at_most, 0)
    return max(0.0, 1.0 - outside / (slack + 1))


_UNITS = {
    "words": lambda text: len(text.split()),
    "characters": len,
    "lines": lambda text: sum(bool(line.strip()) for line in text.splitlines()),
}
