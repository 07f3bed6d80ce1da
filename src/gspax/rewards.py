"""From a rollout on the host to text and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspax.config import Experiment
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.types import Rollout


def completions(experiment: Experiment, problems: Sequence[Problem], rollout: Rollout) -> list[dict[str, Any]]:
    """Prompt, answer, completion, reward, length and finished of every row of a rollout on the host."""
    group = len(rollout.length_B) // len(problems)
    rows = []
    for index, tokens in enumerate(rollout.tokens_BT):
        problem = problems[index // group]
        start = rollout.prompt_length_B[index]
        text = experiment.tokenizer.decode(tokens[start : start + rollout.length_B[index]])
        rows.append(
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "completion": text,
                "reward": checked_reward(experiment, problem, text),
                "length": int(rollout.length_B[index]),
                "finished": bool(rollout.finished_B[index]),
            }
        )
    return rows


def checked_reward(experiment: Experiment, problem: Problem, text: str) -> float:
    """The experiment's reward as a finite float; UserError with the completion where it raises or is not one."""
    name = getattr(experiment.reward, "__qualname__", repr(experiment.reward))
    try:
        value = float(experiment.reward(problem, text))
    except Exception as error:
        raise UserError(
            f"reward: {name} raised {type(error).__name__}: {error} for the prompt {problem.prompt!r} "
            f"and the completion {text!r}"
        ) from error
    if not np.isfinite(value):
        raise UserError(f"reward: wanted a finite number from {name}, got {value} for the completion {text!r}")
    return value
