"""Conversations of the policy with an environment: turns are drawn on the devices, replies come from the host.

All turns are drawn until they end (or for `sampling.chunk` tokens), the environment answers those that have ended, each
in the process that has its row, and the replies are run together. So what is computed does not depend on how long a
reply takes. The experiment's reward judges the last message of each conversation.

Axes: B conversations, as in `conversations`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np

from gspax.config import Grading, ModelConfig, Sampling, Turns
from gspax.data.problem import Problem, encode_prompt
from gspax.data.tokenizer import check_ids
from gspax.distributed import multihost
from gspax.environments.calls import EnvironmentCalls
from gspax.environments.demonstrations import encode_first
from gspax.environments.step import Step
from gspax.protocols import ConversationTokenizer, Environment, Tokenizer
from gspax.rewards.calls import Result, RewardCalls
from gspax.rollout import conversations
from gspax.rollout.engine import Settings
from gspax.rollout.rewards import Started, StartedReward
from gspax.rollout.sampler import place_prompts, split_groups
from gspax.run import interrupt
from gspax.sharding import named_sharding
from gspax.types import Array, Params, Rollout

CUT = Result((0.0,))  # of a turn that reached the length limit: the environment is not called
ON_HOST = ("prompt_length_B", "length_B", "reply_B")  # fields of a rollout


class Ready(NamedTuple):
    """A problem whose completions can be drawn."""

    problem: Problem
    prompt: Sequence[int]  # tokens; with an environment those of its first messages
    state: Any = None  # of the environment


@dataclass
class Episode:
    """A conversation in the process that has its row. Positions count from the end of the prompt."""

    problem: Problem
    state: Any  # of the environment
    start: int = 0  # of the turn
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the turns that have ended; the ends are exclusive
    rewards: list[float] = field(default_factory=list)  # of these turns
    message: str = ""  # the last one of the policy
    texts: list[str] = field(default_factory=list)  # messages and replies
    metrics: dict[str, float] = field(default_factory=dict)  # sums of `Step.metrics`
    finished: bool = False  # neither its tokens nor its turns ran out
    judged: Future[Result] | None = None  # the reward of the last message; None while the conversation goes on


@dataclass(frozen=True)
class Interaction:
    """What conversations are held with."""

    environment: EnvironmentCalls
    rewards: RewardCalls  # of the last message
    tokenizer: ConversationTokenizer
    turns: Turns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.environment.close()


def interact(
    environment: Environment | None, turns: Turns, *, rewards: RewardCalls, tokenizer: Tokenizer, grading: Grading
) -> Interaction | None:
    """The interaction of an experiment with these fields; None without an environment."""
    if environment is None:
        return None
    spoken = cast(ConversationTokenizer, tokenizer)  # checked by `experiment.validation`
    return Interaction(EnvironmentCalls(environment, grading), rewards, spoken, turns)


def begin(problem: Problem, tokenizer: Tokenizer, interaction: Interaction | None) -> tuple[Any, Sequence[int]]:
    """The environment's state, None without one, and the tokens of the prompt. UserError if its `reset` fails."""
    if interaction is None:
        return None, encode_prompt(tokenizer, problem)
    state, messages = interaction.environment.reset(problem)
    return state, encode_first(interaction.environment.environment, interaction.tokenizer, messages)


def hold_conversations(
    interaction: Interaction,
    params: Params,
    config: ModelConfig,
    ready: Sequence[Ready | None],
    prompt_ids: Sequence[int],
    key: Array,
    *,
    sampling: Sampling,
    mesh: jax.sharding.Mesh | None = None,
    greedy: int = 0,
) -> tuple[Rollout, Started]:
    """The rollout of `sampling.group` conversations about each problem, and this process's rows of them. Collective.

    The arguments are those of `sampler.sample`, with problems in place of prompts (`ready`): a process needs those of
    its own rows. `sampling.max_tokens` limits all that follows the prompt, replies included. The rollout's lengths and
    `finished_B` are on the host.

    UserError if a prompt does not fit.
    """
    parted = split_groups(replace(sampling, prompts=len(ready)), mesh)
    prompts = [None if each is None else each.prompt for each in ready]
    tokens_PS, length_P, id_P = place_prompts(prompts, prompt_ids, sampling=parted, mesh=mesh, greedy=greedy)
    episodes: dict[int, Episode] = {}
    rollouts, size = [], parted.group // count_waves(parted)
    for first in range(0, parted.group, size):  # some conversations of every prompt, then the next ones

        def episode(row: int, first: int = first) -> Episode:
            """Of a row of this wave; the process has the problems of its rows."""
            row = row // size * parted.group + first + row % size
            if row not in episodes:
                each = ready[row // sampling.group]
                assert each is not None
                episodes[row] = Episode(each.problem, copy.deepcopy(each.state))
            return episodes[row]

        last = first + size == parted.group
        settings = Settings(
            config, replace(parted, group=size), interaction.tokenizer.stop_ids, mesh, greedy=greedy if last else 0
        )
        inputs = tokens_PS, length_P, id_P + np.uint32(first)
        rollouts.append(_hold(interaction, params, inputs, key, settings, episode))
    rollout = conversations.join(rollouts, group=size, mesh=mesh)
    rollout = replace(rollout, **multihost.to_host({name: getattr(rollout, name) for name in ON_HOST}))
    finished = [episodes[row].finished if row in episodes else None for row in range(len(rollout.length_B))]
    rollout = replace(rollout, finished_B=np.array(multihost.gather_rows(finished)))
    return rollout, {row: _describe(each) for row, each in episodes.items()}


def count_waves(sampling: Sampling) -> int:
    """How often `sampling.slots` must be filled for the conversations of a prompt; 1 without a limit.

    >>> count_waves(Sampling(prompts=4, group=8, slots=12))  # 2 of each prompt at a time
    4
    """
    at_once = max(1, (sampling.slots or sampling.prompts * sampling.group) // sampling.prompts)
    return next(n for n in range(1, sampling.group + 1) if sampling.group % n == 0 and sampling.group // n <= at_once)


def _hold(
    interaction: Interaction,
    params: Params,
    inputs: tuple[Any, Any, Any],
    key: Array,
    settings: Settings,
    episode: Callable[[int], Episode],
) -> Rollout:
    """Conversations that have a slot each, from their prompts to their ends."""
    mesh, sampling = settings.mesh, settings.sampling
    state = conversations.start(params, *inputs, key, settings=settings)
    while True:
        state = conversations.advance(params, state, key, settings=settings)
        progress = conversations.describe(state.rows, mesh=mesh)
        own = {row: episode(row) for row in multihost.owned_rows(progress.tokens_BC)}
        replies = _answer(interaction, own, progress, sampling.max_tokens, settings.config.vocab_size)
        if any(replies):
            placed: Any = conversations.pad_replies(replies)
            if mesh is not None:
                placed = multihost.to_devices(placed, named_sharding(mesh, "batch"))
            state = conversations.resume(params, state, *placed, key, settings=settings)
        elif not multihost.to_host(progress.drawing_B).any():
            return conversations.assemble(inputs[0], state.rows, settings=settings)


def _answer(
    interaction: Interaction,
    episodes: dict[int, Episode],
    progress: conversations.Progress,
    longest: int,
    vocab_size: int,
) -> list[list[int]]:
    """The tokens of the reply to each conversation whose turn has ended; none to the others, and to those that end."""
    length_B, stopped_B, drawing_B = multihost.to_host((progress.length_B, progress.stopped_B, progress.drawing_B))
    tokens_BC = multihost.owned_rows(progress.tokens_BC)
    ended = {row: each for row, each in episodes.items() if each.judged is None and not drawing_B[row]}

    def submit() -> dict[int, Future[Result]]:
        for row, each in ended.items():
            each.spans.append((each.start, int(length_B[row])))
            each.message = interaction.tokenizer.decode(tokens_BC[row][slice(*each.spans[-1])])
            each.texts.append(each.message)
        whole = {row: each for row, each in ended.items() if stopped_B[row]}
        states, messages = [each.state for each in whole.values()], [each.message for each in whole.values()]
        return dict(zip(whole, interaction.environment.submit(states, messages), strict=True))

    def take(steps: dict[int, Future[Result]]) -> dict[int, list[int]]:
        replies: dict[int, list[int]] = {}
        for row, each in ended.items():
            result = steps[row].result() if row in steps else CUT
            stop, room = int(tokens_BC[row][length_B[row] - 1]), longest - int(length_B[row])
            reply, error = _take_step(interaction, each, result, stop, vocab_size)
            if not error and 0 < len(reply) < room:  # room for a token of the next turn too
                replies[row], each.start = reply, int(length_B[row]) + len(reply)
            elif error:
                each.judged = _failed(error)
            else:
                (each.judged,) = interaction.rewards.submit([each.problem], [each.message])
        return replies

    steps = multihost.all_or_raise(submit)
    interrupt.wait(steps.values())
    own = multihost.all_or_raise(lambda: take(steps))
    return multihost.gather_rows([own.get(row, []) if row in episodes else None for row in range(len(length_B))])


def _take_step(
    interaction: Interaction, each: Episode, result: Result, stop: int, vocab_size: int
) -> tuple[list[int], str]:
    """Note a step in its episode. The tokens of the reply, none if there is no further turn; or what has failed."""
    each.rewards.append(sum(result.rewards))
    if result.error or result is CUT:
        return [], result.error
    step: Step = result.value
    each.state = step.state
    for name, value in step.metrics.items():
        each.metrics[name] = each.metrics.get(name, 0.0) + float(value)
    each.finished = bool(step.done) or stop != interaction.tokenizer.turn_end
    if each.finished or len(each.spans) >= interaction.turns.limit:
        return [], ""
    try:
        reply = list(interaction.tokenizer.encode_reply(step.messages))
        check_ids(reply, vocab_size, "a reply")
        each.texts += [str(message["content"]) for message in step.messages]
    except Exception as problem:  # of what the environment has written
        return [], f"reply: {type(problem).__name__}: {problem}"
    return reply, "" if reply else "reply: wanted a message, or done=True, got neither"


def _failed(error: str) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(Result((), error))
    return future


def _describe(each: Episode) -> StartedReward:
    assert each.judged is not None
    row = {
        "length": sum(end - start for start, end in each.spans),
        "turn_spans": [list(span) for span in each.spans],
        "turn_rewards": each.rewards,
        "environment": {"reply_tokens": float(each.start - sum(end - start for start, end in each.spans[:-1]))}
        | each.metrics,
    }
    return StartedReward("\n".join(each.texts), each.judged, row)
