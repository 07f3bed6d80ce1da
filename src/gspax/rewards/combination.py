"""Combines several named rewards with weights, as several numbers or as their sum; each is a metric `rewards/NAME`.

If one of them fails (`Score.error`), the combination fails too, but has its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from gspax.config.hints import fits
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import concurrent, needs
from gspax.rewards.scores import Score, add_up, to_score

_EMPTY: Mapping[str, float] = {}


def find_mistake(settings: Mapping[str, Any]) -> str:
    """Explain what prevents combining rewards with these keywords; empty if nothing."""
    rewards, weights = settings["rewards"], settings["weights"]
    if not isinstance(rewards, Mapping) or not rewards:
        return f"rewards: wanted functions by name, got {rewards!r:.200}"
    if unknown := sorted(map(str, set(weights) - set(rewards))):
        return f"weights: wanted names of rewards ({', '.join(rewards)}), got {', '.join(unknown)}"
    wrong = [weight for weight in weights.values() if not fits(weight, float) or not isfinite(weight)]
    return f"weights: wanted finite numbers, got {wrong[0]!r:.200}" if wrong else ""


@needs(find_mistake)
@concurrent(0)
def combine(
    problem: Problem,
    completion: str,
    *,
    rewards: Mapping[str, Callable[[Problem, str], float | Score]],
    weights: Mapping[str, float] = _EMPTY,
) -> dict[str, Score]:
    """Multiply each reward by its weight, for an advantage of several rewards (`advantages.gdpo`).

        reward=partial(combine, rewards={"answer": math.reward, "format": format.match_tags})
        advantage=partial(advantages.gdpo, weights=(1.0, 0.1))

    The advantage gets the rewards in the alphabetical order of their names, and `gdpo`'s weights follow that order.
    `gdpo` standardizes each reward, so a positive weight given here changes the reported reward but not the advantage;
    the advantage has separate weights.

    Args:
      problem: passed to the rewards.
      completion: passed to the rewards.
      rewards: functions by name, each of which returns one number.
      weights: weights by the same names; 1 for missing names.
    """
    if mistake := find_mistake({"rewards": rewards, "weights": weights}):
        raise UserError(mistake)
    return {name: _weigh(name, reward(problem, completion), weights.get(name, 1.0)) for name, reward in rewards.items()}


@needs(find_mistake)
@concurrent(0)
def weighted_sum(
    problem: Problem,
    completion: str,
    *,
    rewards: Mapping[str, Callable[[Problem, str], float | Score]],
    weights: Mapping[str, float] = _EMPTY,
) -> Score:
    """Add up the rewards of `combine`, for an advantage of one reward."""
    return add_up(combine(problem, completion, rewards=rewards, weights=weights))


def _weigh(name: str, value: object, weight: float) -> Score:
    """Multiply a reward by its weight, and keep its error and its reason."""
    try:
        score = to_score(value)
    except (TypeError, ValueError):
        raise UserError(f"rewards: wanted one number from {name!r}, got {value!r}") from None
    return replace(score, value=weight * score.value)
