"""Calls of an environment's `step` for many rollouts, each with a deadline, and of its `reset`."""

from __future__ import annotations

from typing import Any

from gspax.config import Grading
from gspax.config.protocols import Environment, Message, Step
from gspax.data.problem import Problem
from gspax.errors import UserError, place_of
from gspax.rewards.calls import Calls, Failure
from gspax.rewards.scores import to_result


def step_calls(environment: Environment, grading: Grading) -> Calls[Step | Failure]:
    """Calls of an environment's `step` with states and messages."""
    return Calls(environment.step, grading, read=read_step, fail=Failure)


def read_step(value: Any) -> Step | Failure:
    """The return value of `step`, with its reward as a float, or what is wrong with it."""
    if not isinstance(value, Step):
        return Failure(f"wanted a gspax.rewards.environments.Step, got {type(value).__name__}")
    number = to_result(value.reward)
    if number.error or len(number.rewards) != 1:
        return Failure(f"reward: {number.error or 'wanted one number, got several'}")
    return value._replace(reward=number.rewards[0])


def reset(environment: Environment, problem: Problem) -> tuple[Any, list[Message]]:
    """The state and the messages at the start of a rollout. UserError if the environment fails."""
    try:
        state, messages = environment.reset(problem)
        return state, list(messages)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"environment: reset raised {type(error).__name__}: {error}{place_of(error)} for the prompt "
            f"{problem.prompt[:200]!r}"
        ) from error
