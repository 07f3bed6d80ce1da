"""Conversations of the policy with an environment: turns are sampled on the devices, replies come from the host.

Slots are advanced until none is active (or for `sampling.chunk` tokens), the environment answers the turns that have
ended, each in the process that has its row, and the replies are run together. So what is computed does not depend on
how long a reply takes. The experiment's reward judges the last message of each conversation.

Axes: B conversations, as in `engine`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np

from gspax.config import Grading, Turns
from gspax.config.protocols import ConversationTokenizer, Environment, Step, Tokenizer
from gspax.data.problem import Problem, encode_prompt
from gspax.data.tokenizer import check_ids
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rewards.calls import Calls, Failure
from gspax.rewards.environments.demonstrations import encode_first
from gspax.rewards.environments.steps import reset, step_calls
from gspax.rewards.scores import Result
from gspax.rollout.completion import GradedTurns
from gspax.rollout.grading import Started, StartedReward
from gspax.run import interrupt
from gspax.sampler import chunks
from gspax.sampler.conversations import Replies, pad_replies
from gspax.sampler.engine import SampleOptions
from gspax.sampler.sampler import assemble, place_prompts, split_rows
from gspax.types import Array, Params, Rollout

VERSION = np.int32(0)  # of the parameters, which stay the same
ON_HOST = ("prompt_length_B", "length_B", "reply_B")  # fields of a rollout


class Ready(NamedTuple):
    """A problem whose completions can be sampled."""

    problem: Problem
    prompt: Sequence[int]  # tokens; with an environment those of its first messages
    state: Any = None  # of the environment


@dataclass
class Episode:
    """An unfinished conversation in the process that has its row. Positions count from the end of the prompt."""

    problem: Problem
    state: Any  # of the environment
    start: int = 0  # of the turn
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the turns that have ended; the ends are exclusive
    rewards: list[float] = field(default_factory=list)  # of these turns
    message: str = ""  # the last one of the policy
    texts: list[str] = field(default_factory=list)  # messages and replies
    metrics: dict[str, float] = field(default_factory=dict)  # sums of `Step.metrics`
    finished: bool = False  # neither its tokens nor its turns ran out


@dataclass(frozen=True)
class Conversations:
    """The conversations of this process's rows."""

    ready: list[Ready | None]  # problems, each with as many rows as the others
    open: dict[int, Episode] = field(default_factory=dict)  # by row; those of which a turn has ended
    started: Started = field(default_factory=dict)  # rewards of those that have ended, by row
    finished: dict[int, bool] = field(default_factory=dict)  # of these: neither tokens nor turns ran out

    def find(self, row: int, rows: int) -> Episode:
        """The open conversation of one of all rows."""
        if row not in self.open:
            each = self.ready[row * len(self.ready) // rows]
            assert each is not None
            self.open[row] = Episode(each.problem, copy.deepcopy(each.state))
        return self.open[row]


@dataclass(frozen=True)
class Interaction:
    """What conversations are held with."""

    environment: Environment
    steps: Calls[Step | Failure]  # of the environment
    rewards: Calls[Result]  # of the last message
    tokenizer: ConversationTokenizer
    turns: Turns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.steps.close()


def interact(
    environment: Environment | None, turns: Turns, *, rewards: Calls[Result], tokenizer: Tokenizer, grading: Grading
) -> Interaction | None:
    """The interaction of an experiment with these fields; None without an environment."""
    if environment is None:
        return None
    spoken = cast(ConversationTokenizer, tokenizer)  # checked by `experiment.validation`
    return Interaction(environment, step_calls(environment, grading), rewards, spoken, turns)


def begin(problem: Problem, tokenizer: Tokenizer, interaction: Interaction | None) -> tuple[Any, Sequence[int]]:
    """The environment's state, None without one, and the tokens of the prompt. UserError if its `reset` fails."""
    if interaction is None:
        return None, encode_prompt(tokenizer, problem)
    state, messages = reset(interaction.environment, problem)
    return state, encode_first(interaction.environment, interaction.tokenizer, messages)


def sample_conversations(
    interaction: Interaction,
    params: Params,
    ready: Sequence[Ready | None],
    prompt_ids: Sequence[int],
    key: Array,
    options: SampleOptions,
) -> tuple[Rollout, Started]:
    """The rollout of `sampling.group` conversations about each problem, and this process's rows of them. Collective.

    The arguments are those of `sampler.sample`, with problems in place of prompts (`ready`): a process needs those of
    its own rows. `sampling.max_tokens` limits all that follows the prompt, replies included. The rollout's lengths and
    `finished_B` are on the host.

    Raises:
      UserError: a prompt does not fit.
    """
    options = replace(split_rows(options, len(ready)), turns=True)
    prompts = place_prompts([each and each.prompt for each in ready], prompt_ids, options)
    conversations = Conversations(list(ready))
    state, progress = chunks.start(params, prompts, key, options=options)
    while True:
        interrupt.stop_point()
        state, progress = chunks.advance_chunk(params, state, key, VERSION, options=options)
        if (replies := answer(interaction, conversations, progress, options)) is not None:
            state, progress = chunks.resume(params, state, replies, key, VERSION, options=options)
        if not multihost.to_host(progress.left):
            break
    rollout = assemble(prompts.tokens_PS, state, options=options)
    rollout = replace(rollout, **multihost.to_host({name: getattr(rollout, name) for name in ON_HOST}))
    finished = [conversations.finished.get(row) for row in range(len(rollout.length_B))]
    return replace(rollout, finished_B=np.array(multihost.gather_rows(finished))), conversations.started


def answer(
    interaction: Interaction, conversations: Conversations, progress: chunks.Progress, options: SampleOptions
) -> Replies | None:
    """The environment's replies to the turns that have ended, on the devices; None if no conversation waits.

    Conversations that end get no reply; they move from `open` to `started`. Collective.
    """
    length_B, ended_B, waiting_B = multihost.to_host((progress.length_B, progress.ended_B, progress.waiting_B))
    tokens_BC = multihost.owned_rows(progress.tokens_BC)
    turns = {
        row: conversations.find(row, len(length_B))
        for row in tokens_BC
        if (ended_B[row] or waiting_B[row]) and row not in conversations.started
    }

    def submit() -> dict[int, Future[Step | Failure]]:
        for row, each in turns.items():
            each.spans.append((each.start, int(length_B[row])))
            each.message = interaction.tokenizer.decode(tokens_BC[row][slice(*each.spans[-1])])
            each.texts.append(each.message)
        whole = {row: each for row, each in turns.items() if waiting_B[row]}
        states, messages = [each.state for each in whole.values()], [each.message for each in whole.values()]
        return dict(zip(whole, interaction.steps.submit(states, messages), strict=True))

    def take(steps: dict[int, Future[Step | Failure]]) -> dict[int, list[int]]:
        replies: dict[int, list[int]] = {}
        for row, each in turns.items():
            step = steps[row].result() if row in steps else None
            stop, room = int(tokens_BC[row][length_B[row] - 1]), options.sampling.max_tokens - int(length_B[row])
            reply, error = _take_step(interaction, each, step, stop, options.model.vocab_size)
            if not error and 0 < len(reply) < room:  # room for a token of the next turn too
                replies[row], each.start = reply, int(length_B[row]) + len(reply)
            else:
                reward = _failed(error) if error else interaction.rewards.submit([each.problem], [each.message])[0]
                del conversations.open[row]
                conversations.started[row] = StartedReward("\n".join(each.texts), reward, _grade(each))
                conversations.finished[row] = each.finished
        return replies

    steps = multihost.all_or_raise(submit)
    interrupt.wait(steps.values())
    own = multihost.all_or_raise(lambda: take(steps))
    if not waiting_B.any():
        return None
    replies = multihost.gather_rows([own.get(row, []) if row in tokens_BC else None for row in range(len(length_B))])
    return multihost.to_devices(pad_replies(replies), named_sharding(options.mesh, "batch"))


def _take_step(
    interaction: Interaction, each: Episode, step: Step | Failure | None, stop: int, vocab_size: int
) -> tuple[list[int], str]:
    """Note a step in its episode. The tokens of the reply, none if there is no further turn; or what has failed.

    `step` is None for a turn that reached the length limit, for which the environment is not called.
    """
    each.rewards.append(step.reward if isinstance(step, Step) else 0.0)
    if not isinstance(step, Step):
        return [], step.reason if step else ""
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


def _grade(each: Episode) -> GradedTurns:
    replies = each.start - sum(end - start for start, end in each.spans[:-1])
    metrics = {"reply_tokens": float(replies)} | each.metrics
    return GradedTurns(tuple(each.spans), tuple(each.rewards), metrics)
