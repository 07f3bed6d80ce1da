"""Checks that call an experiment's own code with the first problems. Each message is one sentence.

`first_problems` loads a problem of each split. `check_calls` calls the demonstration, the environment's `step`, and the
rewards once each, as a dry run and the start of a run do. Rewards and environments of gspax are not called: their types
are known, and they may contact a server or run programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from gspax.config import Evaluation, Experiment, WarmStart
from gspax.config.functions import hints_of, is_gspax, title_of, unwrap
from gspax.config.protocols import DataSource, Environment, Problem, Reward
from gspax.data.problem import read_problem
from gspax.errors import UserError, describe_error, shorten
from gspax.experiment.validation.contracts import takes_rewards
from gspax.rewards.calls import Calls, Failure, find_rewards, inner_function
from gspax.rewards.code import find_missing_sandbox
from gspax.rewards.scores import Score, read_step, to_result

_Reward = tuple[str, Reward, Callable[[int], Problem]]  # its key, and what loads a problem for it

TRIED = 16  # problems of each split: the first that can be used is enough

_ADVICE = (
    " (the hash of a prompt decides whether it is held out: if prompts are equal because the answer is hidden, begin "
    "them with a number that differs, such as 'Game 42.')"
)


def first_problems(data: DataSource, environment: Environment | None, evaluation: Evaluation) -> Iterator[str]:
    """One sentence for a split without a problem that loads and that the environment accepts. Nothing is tokenized."""
    for split, load, count in (("training", data.train, TRIED), ("held-out", data.heldout, evaluation.problems)):
        tried = min(TRIED, count)
        try:
            _find_first(load, environment, tried)
        except UserError as error:
            advice = _ADVICE if "too few prompts" in str(error) else ""
            yield f"data: wanted {split} problems, got none of the first {tried} that can be used: {error}{advice}"


def _find_first(load: Callable[[int], Problem], environment: Environment | None, count: int) -> tuple[Problem, object]:
    """The first problem that can be used, and the environment's state. UserError with the first reason if none can."""
    reasons = []
    for index in range(count):
        try:
            problem = read_problem(load, index)
            return problem, None if environment is None else _check_reset(environment.reset(problem))
        except Exception as error:  # by a user's source or environment
            reasons.append(str(error) if isinstance(error, UserError) else describe_error(error))
    raise UserError(shorten(reasons[0]))


def _check_reset(opening: object) -> object:
    """The state that `reset` gave. UserError unless it gave a state and messages."""
    if not (isinstance(opening, tuple) and len(opening) == 2):
        raise UserError(f"environment: wanted (state, messages) from reset, got {type(opening).__name__}")
    messages = list(opening[1])
    chats = (isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    if not messages or not all(chats):
        raise UserError(f"environment: wanted messages with role and content from reset, got {str(messages)[:100]}")
    return opening[0]


class _Call(NamedTuple):
    """A call of a user's function."""

    key: str  # the field and the function, for a message
    function: Callable[..., object]
    subject: object  # a problem, or an environment's state
    problem: Problem
    find_misfit: Callable[[object], str]  # what is wrong with a return value; empty if nothing is


def check_calls(experiment: Experiment, warn: Callable[[str], None]) -> None:
    """Check that functions return what `gspax.config.protocols` says, and that programs of the model can run.

    A reward judges the problem's answer. A call that raises or is late need not break the contract: a server may be
    down, and the answer alone may be no completion that the function understands.

    Args:
      experiment: a valid one.
      warn: gets one sentence for each call that raises or is late.

    Raises:
      UserError: one sentence for each function that breaks its contract.
    """
    environment, advantage, sampling = experiment.environment, experiment.advantage, experiment.sampling
    rewards: list[_Reward] = [("reward", experiment.reward, experiment.data.train)]
    for i, task in enumerate(experiment.evaluation.tasks):
        rewards.append((f"evaluation.tasks[{i}].reward", task.reward, task.data.heldout))

    def check_count(count: int) -> str:
        kl = experiment.reference and experiment.reference.reward
        count += count > 1 and (experiment.length_reward is not None or kl is not None)  # the run adds one to several
        shape = (sampling.prompts, sampling.group, *([count] if count > 1 else []))
        masked = experiment.filter_overlong or experiment.turns.credit == "turn"
        fits = takes_rewards(advantage, shape, masked=masked)
        return "" if fits else f"wanted as many rewards as {title_of(advantage)} takes, got {count}"

    problem, state = _find_first(experiment.data.train, environment, TRIED)
    problems, calls = [], []
    if experiment.warm_start is not None:
        check = _check_message if environment is None else _check_messages
        calls.append(_demonstration_call(experiment.warm_start, problem, experiment.seed, check))
    if environment is not None and not is_gspax(type(environment)):
        key = f"environment: {title_of(environment.step)}"
        calls.append(_Call(key, environment.step, state, problem, _check_step))
    calls += _reward_calls(rewards, check_count)
    for call in calls:
        text = "" if call.problem.answer is None else str(call.problem.answer)
        with Calls[str | Failure](call.function, experiment.grading, read=call.find_misfit, fail=Failure) as trial:
            result = trial.submit([call.subject], [text])[0].result()
        where = f" for the prompt {shorten(repr(call.problem.prompt))} and the answer {shorten(repr(text))}"
        if isinstance(result, Failure):
            warn(f"{call.key}: {result.reason}{where}")
        elif result:
            problems.append(f"{call.key}: {result}{where}")
    if is_gspax(experiment.reward) and hints_of(unwrap(experiment.reward)).get("return") in (float, Score):
        problems += [f"reward: {title_of(experiment.reward)}: {reason}" for reason in [check_count(1)] if reason]
    functions = [("environment", tool.run) for tool in getattr(environment, "tools", ())]
    functions += [(key, member) for key, reward, _ in rewards for member in find_rewards(reward)]
    problems += [f"{key}: {reason}" for key, function in functions if (reason := find_missing_sandbox(function))]
    problems += _missing_answers(rewards)
    if problems:
        raise UserError("\n".join(problems))


def _demonstration_call(stage: WarmStart, problem: Problem, seed: int, find_misfit: Callable[[object], str]) -> _Call:
    demonstrate, rng = stage.demonstration, np.random.default_rng((seed, 0))
    key = f"warm_start.demonstration: {title_of(demonstrate)}"
    return _Call(key, lambda problem, _: demonstrate(problem, rng), problem, problem, find_misfit)


def _reward_calls(rewards: Sequence[_Reward], check_count: Callable[[int], str]) -> Iterator[_Call]:
    """The calls of a user's own rewards, alone and in compositions. The rewards of a run are counted as a whole."""
    for key, reward, load in rewards:
        members = [member for member in find_rewards(reward) if not is_gspax(inner_function(member))]
        if not members:
            continue
        with contextlib.suppress(UserError):  # a task may have no such problem
            problem, _ = _find_first(load, None, TRIED)
            for member in members:
                is_whole = key == "reward" and member is reward
                check = partial(_check_reward, check_count=check_count if is_whole else None)
                yield _Call(f"{key}: {title_of(inner_function(member))}", member, problem, problem, check)


def _missing_answers(rewards: Sequence[_Reward]) -> Iterator[str]:
    """One sentence for each reward that compares answers, where the first problem has none."""
    for key, reward, load in rewards:
        compares = any(getattr(inner_function(member), "compares_answers", False) for member in find_rewards(reward))
        with contextlib.suppress(UserError):  # a task may have no such problem
            if compares and not (problem := _find_first(load, None, TRIED)[0]).answer:
                where = f"{key}: {title_of(inner_function(reward))}"
                yield f"{where}: wanted problems with an answer, got none for {shorten(repr(problem.prompt))}"


def _check_message(shown: object) -> str:
    return "" if isinstance(shown, str) else f"wanted a text without an environment, got {shorten(repr(shown))}"


def _check_messages(shown: object) -> str:
    is_sequence = isinstance(shown, Sequence) and len(shown) and all(isinstance(message, str) for message in shown)
    return "" if is_sequence else f"wanted a text or a sequence of texts, got {shorten(repr(shown))}"


def _check_step(value: object) -> str:
    step = read_step(value)
    return step.reason if isinstance(step, Failure) else ""


def _check_reward(value: object, *, check_count: Callable[[int], str] | None) -> str:
    result = to_result(value)
    if not result.rewards:
        return result.error
    return "" if check_count is None else check_count(len(result.rewards))
