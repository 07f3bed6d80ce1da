"""Combines several named rewards with weights, as several numbers or as their sum; each is a metric `rewards/NAME`.

If one of them fails (`Score.error`), the combination fails too, but has its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import concurrent
from gspax.rewards.scores import Score, add_up, to_score

_EMPTY: Mapping[str, float] = {}


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
    if unknown := sorted(set(weights) - set(rewards)):
        raise UserError(f"weights: wanted names of rewards ({', '.join(rewards)}), got {', '.join(unknown)}")
    return {name: _weigh(name, reward(problem, completion), weights.get(name, 1.0)) for name, reward in rewards.items()}


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
