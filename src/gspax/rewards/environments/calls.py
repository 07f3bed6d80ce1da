"""Calling an environment for many conversations: in the trainer's threads, each step with a time limit.

As for rewards (`rewards.calls`), a step that raises or is late costs its own conversation.
"""

from __future__ import annotations

from typing import Any

from gspax.config import Grading
from gspax.config.protocols import Environment, Step
from gspax.data.problem import Problem
from gspax.errors import UserError, place_of
from gspax.rewards.calls import Result, RewardCalls


class EnvironmentCalls(RewardCalls):
    """Calls of one environment's `step`. `submit(states, messages)` starts them; a result's `value` is the `Step`."""

    what = "step"

    def __init__(self, environment: Environment, grading: Grading):
        super().__init__(environment.step, grading)
        self.environment = environment

    def reset(self, problem: Problem) -> tuple[Any, list[Any]]:
        """The state and the messages that a conversation begins with. UserError if the environment fails."""
        try:
            state, messages = self.environment.reset(problem)
            return state, list(messages)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"environment: reset raised {type(error).__name__}: {error}{place_of(error)} for the prompt "
                f"{problem.prompt[:200]!r}"
            ) from error

    def read(self, value: Any) -> Result:
        if not isinstance(value, Step):
            return Result((), f"wanted a gspax.rewards.environments.Step, got {type(value).__name__}")
        number = super().read(value.reward)
        if number.error or len(number.rewards) != 1:
            return Result((), f"reward: {number.error or 'wanted one number, got several'}")
        return Result(number.rewards, value=value)
