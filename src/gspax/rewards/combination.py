"""Several named rewards with weights, as several numbers or as their sum; each is a metric `rewards/NAME`.

A failure of one of them (`calls.Failed`) is a failure of the whole, which keeps its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import Failed, Total

_EMPTY: Mapping[str, float] = {}


class Parts(dict[str, float]):
    """Rewards by name; `error` if one of them is `calls.Failed`."""

    def __init__(self, values: Mapping[str, float], error: str = ""):
        super().__init__(values)
        self.error = error


def combine(
    problem: Problem,
    completion: str,
    *,
    rewards: Mapping[str, Callable[[Problem, str], float]],
    weights: Mapping[str, float] = _EMPTY,
) -> Parts:
    """Each reward times its weight, in the order of `rewards`, for an advantage of several rewards (`advantages.gdpo`).

        reward=partial(combine, rewards={"answer": math.reward, "format": format.match_tags})
        advantage=partial(advantages.gdpo, weights=(1.0, 0.1))

    `gdpo` standardises each reward, so a positive weight given here changes the reported reward but not the advantage:
    the weights of the advantage are its own.

    Args:
      problem: for the rewards.
      completion: for the rewards.
      rewards: by name; each gives one number.
      weights: by the same names; 1 for those that are not in it.
    """
    if unknown := sorted(set(weights) - set(rewards)):
        raise UserError(f"weights: wanted names of rewards ({', '.join(rewards)}), got {', '.join(unknown)}")
    given = {name: _number(name, reward(problem, completion)) for name, reward in rewards.items()}
    errors = [f"{name}: {each.error}" for name, each in given.items() if isinstance(each, Failed)]
    return Parts({name: weights.get(name, 1.0) * float(each) for name, each in given.items()}, "; ".join(errors))


def weighted_sum(
    problem: Problem,
    completion: str,
    *,
    rewards: Mapping[str, Callable[[Problem, str], float]],
    weights: Mapping[str, float] = _EMPTY,
) -> Total:
    """The sum of `combine`, for an advantage of one reward."""
    parts = combine(problem, completion, rewards=rewards, weights=weights)
    return Total(parts, parts.error)


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise UserError(f"rewards: wanted one number from {name!r}, got {value!r}")
    return value
