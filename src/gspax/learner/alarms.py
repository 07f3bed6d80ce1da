"""Alarms: warnings of a policy that collapses or rambles, from the metrics of a step. Nothing is stopped by them."""

from __future__ import annotations

from collections.abc import Mapping

from gspax.config import Guard
from gspax.distributed import multihost

NAMES = ("entropy", "length")


def find_alarms(guard: Guard, metrics: Mapping[str, float]) -> dict[str, str]:
    """A sentence for each alarm that the metrics of a step give."""
    found = {}
    entropy, truncated = metrics.get("policy/entropy"), metrics.get("response/truncated")
    if entropy is not None and entropy < guard.min_entropy:
        found["entropy"] = (
            f"policy/entropy is {entropy:.2g}, below guard.min_entropy ({guard.min_entropy:g}): the samples of a group "
            "hardly differ, so little is left to learn from"
        )
    if truncated is not None and truncated > guard.max_truncated:
        found["length"] = (
            f"response/truncated is {truncated:.2g}, above guard.max_truncated ({guard.max_truncated:g}): most "
            "responses reach sampling.max_tokens without a stop token"
        )
    return found


def warn_of_alarms(guard: Guard, metrics: Mapping[str, float], before: frozenset[str]) -> frozenset[str]:
    """The alarms of this step; warns of those that the step before did not have."""
    found = find_alarms(guard, metrics)
    for name in found:
        if name not in before:
            multihost.warn_from_primary(found[name])
    return frozenset(found)


def alarm_metrics(alarms: frozenset[str]) -> dict[str, float]:
    """`alarm/entropy` and `alarm/length`: 1 while there is that alarm, else 0."""
    return {f"alarm/{name}": float(name in alarms) for name in NAMES}
