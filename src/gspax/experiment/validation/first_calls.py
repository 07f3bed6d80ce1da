"""Checks that call the experiment's own code with the first problems. Each message is one sentence.

`first_problems` loads a problem of each split. `check_calls` calls the demonstration, the environment's `step`, and the
rewards, as a dry run and the start of a run do, and checks that what they need is on this machine. Rewards and
environments of gspax are not called: their types are known, and they may contact a server or run programs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from gspax.config import Evaluation, Experiment, Grading, Published, WarmStart
from gspax.config.functions import hints_of, is_gspax, keywords, named_parts, title_of, unwrap
from gspax.config.protocols import Advantage, ConversationTokenizer, DataSource, Environment, Problem, Reward
from gspax.data.chat import tools_of, with_tools
from gspax.data.problem import read_problem
from gspax.errors import UserError, describe_error, shorten
from gspax.experiment.validation.contracts import Context, takes_rewards
from gspax.experiment.validation.first_prompts import Texts, prompt_problems
from gspax.experiment.validation.probes import probe_advantage, probe_loss
from gspax.model.passes import Passes
from gspax.rewards.calls import Batched, Calls, Failure, find_missing, find_rewards, inner_function, members
from gspax.rewards.environments.agents import Agent
from gspax.rewards.guard import guard
from gspax.rewards.scores import Score, read_step, to_result

_Reward = tuple[str, Reward, Callable[[int], Problem]]  # key, reward, and a function that loads a problem for it

TRIED = 16  # problems tried in each split: the first usable one is enough

_ADVICE = (
    " (the hash of a prompt decides whether it is held out: if prompts are equal because the answer is hidden, begin "
    "them with a number that differs, such as 'Game 42.')"
)


def first_problems(data: DataSource, begin: Callable[[Problem], object], evaluation: Evaluation) -> Iterator[str]:
    """Yield a sentence for each split without a problem that loads and that the environment accepts. No tokenizing."""
    for split, load, count in (("training", data.train, TRIED), ("held-out", data.heldout, evaluation.problems)):
        tried = min(TRIED, count)
        try:
            _find_first(load, tried, begin)
        except UserError as error:
            advice = _ADVICE if "too few prompts" in str(error) else ""
            yield f"data: wanted {split} problems, got none of the first {tried} that can be used: {error}{advice}"


def begin_with(environment: Environment | None) -> Callable[[Problem], object]:
    """Return what begins a problem: the environment's reset, which returns its state, or nothing without one."""
    return _begin if environment is None else lambda problem: _check_reset(environment.reset(problem))


def _begin(problem: Problem) -> object:
    """Begin a problem without an environment, which takes nothing."""


def _find_first(
    load: Callable[[int], Problem], count: int, begin: Callable[[Problem], object] = _begin
) -> tuple[Problem, object]:
    """Find the first usable problem, and what `begin` returns for it. UserError with the first reason if none is."""
    reasons = []
    for index in range(count):
        try:
            problem = read_problem(load, index)
            return problem, begin(problem)
        except Exception as error:  # by a user's source or environment
            reasons.append(str(error) if isinstance(error, UserError) else describe_error(error))
    raise UserError(shorten(reasons[0]))


def _check_reset(opening: object) -> object:
    """Return the state from `reset`. UserError unless it returned a state and messages."""
    if not (isinstance(opening, tuple) and len(opening) == 2):
        raise UserError(f"environment: wanted (state, messages) from reset, got {type(opening).__name__}")
    messages = list(opening[1])
    chats = (isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    if not messages or not all(chats):
        raise UserError(f"environment: wanted messages with role and content from reset, got {str(messages)[:100]}")
    return opening[0]


class _Call(NamedTuple):
    """Calls of a user's function, one with each text."""

    key: str  # the field and the function, for a message
    function: Callable[..., object]
    subject: object  # a problem, or an environment's state
    problem: Problem
    texts: tuple[str, ...]
    read: Callable[[object], str | Failure]  # returns what is wrong with a return value; empty if nothing is
    advice: str = ""  # for a function with the signature of another library


# Exceptions that say more about a function than about its arguments. No text causes the first four.
_ALWAYS_BUGS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
_BUGS = (*_ALWAYS_BUGS, "AttributeError", "KeyError", "TypeError", "NotImplementedError", "SystemExit")
_RAISED = re.compile(r"(?:raised: )?(\w*)")  # the start of `describe_error`, also through `guard`


def check_calls(experiment: Experiment, warn: Callable[[str], None]) -> None:
    """Check that functions return what `gspax.config.protocols` says, and that what they need is available.

    A reward grades the problem's answer, another answer, and the empty text. A call that is late or raises need not
    break the contract: a server may be down, and the bare answer may not be a completion that the function understands.
    A function that raises `_BUGS` for every text is broken.

    Args:
      experiment: a valid experiment.
      warn: gets one sentence for each function that raises or is late.

    Raises:
      UserError: one sentence for each function that breaks its contract, or lacks what it needs.
    """
    environment, stage = experiment.environment, experiment.warm_start
    problem, state = _find_first(experiment.data.train, TRIED, begin_with(environment))
    tried = _texts(experiment.data.train, problem)
    calls = []
    if stage is not None:
        check = _check_message if environment is None else _check_messages
        calls.append(_demonstration_call(stage, problem, experiment.seed, check))
    if environment is not None and not is_gspax(type(environment)):
        key, step = f"environment: {title_of(environment.step)}", environment.step
        # that the tokenizer has templates of conversations is checked before
        chat = with_tools(cast(ConversationTokenizer, experiment.tokenizer), tools_of(environment))
        calls.append(_Call(key, step, state, problem, tried, partial(_check_step, tokenizer=chat)))
    penalized = any(any(term.reward_penalties()) for term in Passes(experiment).terms)
    check_count = partial(
        _check_count,
        advantage=experiment.advantage,
        shape=(experiment.sampling.prompts, experiment.sampling.group),
        adds=experiment.length_reward is not None or penalized,
        masked=experiment.filter_overlong or experiment.turns.credit == "turn",
    )
    sources = [experiment.data.train, *(task.data.heldout for task in experiment.evaluation.tasks)]
    rewards = [(*each, load) for each, load in zip(rewards_of(experiment), sources, strict=True)]
    calls += _reward_calls(rewards, check_count)
    problems = list(missing_needs(environment, [(key, reward) for key, reward, _ in rewards]))
    for call in calls:
        problems += _try(call, experiment.grading, warn)
    if is_gspax(experiment.reward) and hints_of(unwrap(experiment.reward)).get("return") in (float, Score):
        problems += [f"reward: {title_of(experiment.reward)}: {reason}" for reason in [check_count(1)] if reason]
    problems += _missing_answers(rewards)
    problems += [*probe_advantage(Context(experiment)), *probe_loss(Context(experiment), warn)]
    sampling, steps, size = experiment.sampling, experiment.schedule.steps, experiment.model.vocab_size
    texts = Texts(
        experiment.data, environment, experiment.tokenizer, size, sampling, steps, experiment.evaluation, stage
    )
    problems += prompt_problems(texts, warn)
    if problems:
        raise UserError("\n".join(problems))


def missing_needs(environment: Environment | None, rewards: Iterable[tuple[str, Reward]]) -> Iterator[str]:
    """Yield a sentence for each package, program, or setting that a reward or a tool needs and that is not there."""
    functions = [("environment", tool.run) for tool in getattr(environment, "tools", ())]
    functions += [("environment", environment)] if isinstance(environment, Agent) else []
    yield from (f"{key}: {reason}" for key, function in [*functions, *rewards] for reason in find_missing(function))


def rewards_of(experiment: Experiment | Published) -> list[tuple[str, Reward]]:
    """Return the experiment's reward, if there is one, and those of the tasks, each with its key."""
    tasks = named_parts(experiment.evaluation.tasks, "evaluation.tasks.")
    own = [("reward", experiment.reward)] if isinstance(experiment, Experiment) else []
    return [*own, *((f"{key}.reward", task.reward) for key, task in tasks.items())]


def _check_count(count: int, *, advantage: Advantage, shape: tuple[int, int], adds: bool, masked: bool) -> str:
    """Explain why the advantage does not take this number of rewards; empty if it does."""
    count += count > 1 and adds  # the run adds one to several
    fits = takes_rewards(advantage, (*shape, count) if count > 1 else shape, masked=masked)
    return "" if fits else f"wanted as many rewards as {title_of(advantage)} takes, got {count}"


def _try(call: _Call, grading: Grading, warn: Callable[[str], None]) -> Iterator[str]:
    """Make the calls; yield an error if the function breaks its contract or always raises, warn if it fails once."""
    failures = dict[str, str]()  # by text
    with Calls[str | Failure](call.function, grading, read=call.read, fail=Failure) as trial:
        batches: list[tuple[str, ...]] = [(text,) for text in call.texts]
        if isinstance(call.function, Batched) and len(call.texts) > 1:
            batches.insert(0, call.texts)  # the number of values must follow that of the completions
        for batch in batches:
            try:
                results = [future.result() for future in trial.submit([_copy(call.subject) for _ in batch], batch)]
            except UserError as error:
                yield f"{call.key}: {error}{_where(call, batch[0])}"
                return
            for text, result in zip(batch, results, strict=True):
                if reason := _broken(result):
                    yield f"{call.key}: {reason}{_where(call, text)}"
                    return
                if isinstance(result, Failure):
                    failures.setdefault(text, result.reason)
            if failures and not all(_is_bug(reason) for reason in failures.values()):
                break  # a server may be down: do not ask it again
    for text, reason in itertools.islice(failures.items(), 1):
        sentence = f"{call.key}: {reason}{_where(call, text)}"
        if len(failures) == len(call.texts) and all(map(_is_bug, failures.values())):
            yield f"{sentence}{call.advice}"
        else:
            warn(sentence)


def _copy(subject: object) -> object:
    """Copy a subject that a call may change, if it can be copied."""
    try:
        return copy.deepcopy(subject)
    except Exception:  # it contains something that cannot be copied
        return subject


def _broken(result: str | Failure) -> str:
    """Explain why a function breaks its contract, whatever its other calls return; empty if it may be valid."""
    if not isinstance(result, Failure):
        return result
    is_contract = result.reason.removeprefix("no number: ").startswith("wanted ")  # of a batch, or inside `guard`
    return result.reason if is_contract or _kind(result.reason) in _ALWAYS_BUGS else ""


def _is_bug(reason: str) -> bool:
    return _kind(reason) in _BUGS


def _kind(reason: str) -> str:
    """Return the name of the exception that a reason begins with, or another word."""
    return "".join(_RAISED.findall(reason)[:1])


def _where(call: _Call, text: str) -> str:
    return f" for the prompt {shorten(repr(call.problem.prompt))} and the completion {shorten(repr(text))}"


def _texts(load: Callable[[int], Problem], problem: Problem) -> tuple[str, ...]:
    """Return completions to try: the problem's answer, another problem's answer, and an empty text."""
    own, others = _answer(problem), []
    for index in range(TRIED):
        with contextlib.suppress(UserError):
            others.append(_answer(read_problem(load, index)))
    return tuple(dict.fromkeys([own, next((other for other in others if other != own), f"{own}?"), ""]))


def _answer(problem: Problem) -> str:
    return "" if problem.answer is None else str(problem.answer)


def _demonstration_call(
    stage: WarmStart, problem: Problem, seed: int, read: Callable[[object], str | Failure]
) -> _Call:
    demonstrate, rng = stage.demonstration, np.random.default_rng((seed, 0))
    key = f"warm_start.demonstration: {title_of(demonstrate)}"
    return _Call(key, lambda problem, _: demonstrate(problem, rng), problem, problem, (_answer(problem),), read)


_CALLED = "; a reward is called as reward(problem, completion), for one completion"


def _reward_calls(rewards: Sequence[_Reward], check_count: Callable[[int], str]) -> Iterator[_Call]:
    """Yield the calls of a user's rewards, alone and in compositions. Only a run's whole reward is counted."""
    for key, reward, load in rewards:
        own, whole = list(_own_rewards(reward)), reward
        while unwrap(whole) is guard and (inside := members(whole)):
            whole = inside[0]
        if not own:
            continue
        with contextlib.suppress(UserError):  # a task may have no such problem
            problem, _ = _find_first(load, TRIED)
            texts = _texts(load, problem)
            for inner, member in own:
                is_whole = key == "reward" and inner is whole
                read = partial(_check_reward, check_count=check_count if is_whole else None, names=[])
                title = f"{key}: {title_of(inner_function(inner))}"
                yield _Call(title, member, problem, problem, texts, read, _CALLED)


def _own_rewards(reward: Reward) -> Iterator[tuple[Reward, Reward]]:
    """Yield the user's rewards in a composition of gspax, and what to call: `guard` calls them in its worker."""
    if not is_gspax(inner_function(reward)):
        yield reward, reward
        return
    for member in members(reward):
        for inner, called in _own_rewards(member):
            settings = {**keywords(reward), "reward": called}
            yield inner, partial(guard, **settings) if unwrap(reward) is guard else called


def _missing_answers(rewards: Sequence[_Reward]) -> Iterator[str]:
    """Yield a sentence for each reward that compares answers if the first problem has none, or no valid one."""
    for key, reward, load in rewards:
        compares = any(getattr(inner_function(member), "compares_answers", False) for member in find_rewards(reward))
        with contextlib.suppress(UserError):  # a task may have no such problem
            if compares and not (problem := _find_first(load, TRIED)[0]).answer:
                where = f"{key}: {title_of(inner_function(reward))}"
                yield f"{where}: wanted problems with an answer, got none for {shorten(repr(problem.prompt))}"
                continue
        for check in (getattr(inner_function(member), "check_answer", None) for member in find_rewards(reward)):
            reasons = (
                f"problem {i}: {reason}" for i in range(TRIED) if check and (reason := _check_one(check, load, i))
            )
            yield from (f"{key}: the answer of {reason}" for reason in itertools.islice(reasons, 1))


def _check_one(check: Callable[[Problem], str | None], load: Callable[[int], Problem], index: int) -> str | None:
    with contextlib.suppress(UserError):  # a problem that cannot be used is skipped
        return check(read_problem(load, index))
    return None


def _check_message(shown: object) -> str:
    return "" if isinstance(shown, str) else f"wanted a text without an environment, got {shorten(repr(shown))}"


def _check_messages(shown: object) -> str:
    is_sequence = isinstance(shown, Sequence) and len(shown) and all(isinstance(message, str) for message in shown)
    return "" if is_sequence else f"wanted a text or a sequence of texts, got {shorten(repr(shown))}"


def _check_step(value: object, *, tokenizer: ConversationTokenizer) -> str:
    """Explain what is wrong with a step, or with its reply, which the policy reads."""
    step = read_step(value)
    if isinstance(step, Failure):
        return step.reason
    if step.done:
        return ""
    try:
        return "" if tokenizer.encode_reply(step.messages) else "reply: wanted a message, or done=True, got neither"
    except Exception as error:  # of what the environment has written
        return f"reply: {error if isinstance(error, UserError) else describe_error(error)}"


def _check_reward(
    value: object, *, check_count: Callable[[int], str] | None, names: list[tuple[str, ...]]
) -> str | Failure:
    """Explain what is wrong with a reward; `names` collects the names of the calls' rewards, which must be the same."""
    result = to_result(value)
    if not result.rewards:
        return result.error + (_CALLED if isinstance(value, list) else "")
    if result.error:
        return Failure(result.error)
    names.append(result.names)
    if check_count and result.names != names[0]:
        return f"wanted the same names of rewards for every completion, got {[*result.names]} after {[*names[0]]}"
    return "" if check_count is None else check_count(len(result.rewards))
