"""Conversations of the policy with an environment: turns are sampled on the devices, replies come from the host.

Slots are advanced until none is active (or for `sampling.chunk` tokens), the environment answers the turns that have
ended, each in the process that has its row, and the replies are run together. Nothing that is computed depends on how
long a reply takes. The experiment's reward grades the last message of each conversation.

Axes: B conversations, as in `continuous_batching`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np

from gspax.config import Grading, Turns
from gspax.config.protocols import ConversationTokenizer, Environment, Message, Problem, Step, Tokenizer
from gspax.data.chat import end_before, tools_of, with_tools
from gspax.data.chat_template import opening_of
from gspax.data.problem import encode_prompt
from gspax.data.tokenizer import check_ids
from gspax.errors import UserError, describe_error
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rewards.calls import Calls, Failure
from gspax.rewards.scores import Result, read_step
from gspax.rollout.completion import GradedTurns
from gspax.rollout.grading import Started, StartedReward
from gspax.run import interrupt
from gspax.sampler import sampler
from gspax.sampler.state import Replies, SampleOptions
from gspax.types import Array, Params, Rollout

VERSION = np.int32(0)  # of the parameters, which stay the same


class EncodedProblem(NamedTuple):
    """A problem whose prompt is encoded, so that its completions can be sampled."""

    problem: Problem
    prompt: Sequence[int]  # tokens; with an environment those of its first messages
    state: object = None  # of the environment
    earlier: Sequence[np.ndarray] = ()  # with drafts, what followed the prompt in an earlier epoch, for each sample
    opening: str = ""  # what the prompt has of the completion's thinking already: `<think>`, or nothing
    turn_limit: int = 0  # the most tokens of the first turn; 0: turns have no limits of their own


@dataclass
class Episode:
    """An unfinished conversation in the process that has its row. Positions count from the end of the prompt."""

    problem: Problem
    state: object  # of the environment
    start: int = 0  # of the turn
    opening: str = ""  # what the tokens before the turn have of its thinking already
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the turns that have ended; the ends are exclusive
    rewards: list[float] = field(default_factory=list)  # of these turns
    message: str = ""  # the last one of the policy
    texts: list[str] = field(default_factory=list)  # messages and replies
    metrics: dict[str, float] = field(default_factory=dict)  # sums of `Step.metrics`
    finished: bool = False  # neither its tokens nor its turns ran out


@dataclass(frozen=True)
class RowsOnHost:
    """The host's side of the rows that are being sampled: of its own rows each process has problems and rewards."""

    encoded: Mapping[int, EncodedProblem]  # problems by place
    group: int  # rows of each
    ended_B: np.ndarray  # bool, in every process: the sample has ended, and its reward was started
    started: Started = field(default_factory=Started)  # these rewards, by row
    open: dict[int, Episode] = field(default_factory=dict)  # conversations of which a turn has ended, by row

    def find(self, row: int) -> Episode:
        """Find the unfinished conversation of a row."""
        if row not in self.open:
            encoded = self.encoded[row // self.group]
            self.open[row] = Episode(encoded.problem, copy.deepcopy(encoded.state), opening=encoded.opening)
        return self.open[row]


@dataclass(frozen=True)
class Interaction:
    """The environment, and what else a conversation needs."""

    environment: Environment
    steps: Calls[Step | Failure]  # of the environment
    rewards: Calls[Result]  # of the last message
    tokenizer: ConversationTokenizer
    turns: Turns


def interact(
    environment: Environment, tokenizer: Tokenizer, rewards: Calls[Result], turns: Turns, grading: Grading
) -> Interaction:
    """Make the interaction with an environment, whose steps are called as `grading` says."""
    steps = Calls(environment.step, grading, read=read_step, fail=Failure)
    # that the tokenizer has templates of conversations is checked by `experiment.validation`
    chat = with_tools(cast(ConversationTokenizer, tokenizer), tools_of(environment))
    return Interaction(environment, steps, rewards, chat, turns)


def list_prompts(
    encoded: Mapping[int, EncodedProblem], places: int
) -> tuple[list[Sequence[int] | None], list[Sequence[np.ndarray]]]:
    """List the prompts and the earlier completions of all places; None and () where another process has the problem."""
    prompts = [encoded[place].prompt if place in encoded else None for place in range(places)]
    return prompts, [encoded[place].earlier if place in encoded else () for place in range(places)]


def encode_problem(problem: Problem, tokenizer: Tokenizer) -> EncodedProblem:
    """Encode the prompt of a problem."""
    prompt = encode_prompt(tokenizer, problem)
    return EncodedProblem(problem, prompt, opening=opening_of(tokenizer, prompt))


def begin_conversation(problem: Problem, interaction: Interaction) -> EncodedProblem:
    """Begin a conversation about a problem: encode its first messages. UserError if the environment's `reset` fails."""
    try:
        state, messages = interaction.environment.reset(problem)
        messages = list(messages)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"environment: reset raised {describe_error(error)} for the prompt {problem.prompt[:200]!r}"
        ) from error
    prompt = encode_first(interaction.environment, interaction.tokenizer, messages)
    return EncodedProblem(problem, prompt, state, opening=opening_of(interaction.tokenizer, prompt))


def encode_first(environment: Environment, tokenizer: ConversationTokenizer, messages: Sequence[Message]) -> list[int]:
    """Encode a conversation's first messages; `environment.schemas()`, if any, are the template's tools."""
    return list(tokenizer.encode_chat(messages, tools_of(environment)))


def encode_demonstration(
    environment: Environment, tokenizer: ConversationTokenizer, problem: Problem, messages: Sequence[str]
) -> tuple[list[int], list[bool]]:
    """Encode demonstrated messages, which the environment answers; also return which tokens are the policy's.

    The conversation ends after the last message, or where the environment ends it. UserError if the environment's
    `step` gives no `Step`.
    """
    tokenizer = with_tools(tokenizer, tools_of(environment))
    state, first = environment.reset(problem)
    tokens = encode_first(environment, tokenizer, first)
    sampled = [False] * len(tokens)
    for number, message in enumerate(messages, start=1):
        step = environment.step(state, message) if number < len(messages) else Step(done=True)
        if not isinstance(step, Step):
            raise UserError(f"environment: wanted a Step for a demonstrated message, got {type(step).__name__}")
        end = tokenizer.turn_end if step.done else end_before(tokenizer, step.messages)
        turn = [*tokenizer.encode_completion(message.removeprefix(opening_of(tokenizer, tokens))), end]
        tokens, sampled = tokens + turn, sampled + [True] * len(turn)
        if step.done:
            break
        reply = list(tokenizer.encode_reply(step.messages))
        tokens, sampled, state = tokens + reply, sampled + [False] * len(reply), step.state
    return tokens, sampled


def sample_conversations(
    interaction: Interaction,
    params: Params,
    encoded: Mapping[int, EncodedProblem],
    prompt_ids: Sequence[int],
    key: Array,
    options: SampleOptions,
) -> tuple[Rollout, Started]:
    """Sample `sampling.group` conversations about each problem; also return this process's rows of them. Collective.

    The arguments are those of `sampler.sample`, with problems by place instead of prompts (`encoded`): a process needs
    those of its own rows. `sampling.max_tokens` limits all that follows the prompt, replies included. The rollout's
    lengths and `finished_B` are on the host.

    Raises:
      UserError: a prompt does not fit.
    """
    group = options.sampling.group
    options = replace(sampler.split_rows(options, len(prompt_ids)), turns=True)
    own, earlier = list_prompts(encoded, len(prompt_ids))
    prompts = sampler.place_prompts(own, prompt_ids, options, earlier)
    state, progress = sampler.start(params, prompts, key, options=options)
    rows = RowsOnHost(encoded, group, np.zeros(progress.length_B.shape, bool))
    while not rows.ended_B.all():
        interrupt.stop_point()
        state, progress = sampler.advance_chunk(params, state, key, VERSION, options=options)
        if (replies := answer(interaction, rows, progress, options)) is not None:
            state, progress = sampler.resume(params, state, replies, key, VERSION, options=options)
    rollout = sampler.assemble(prompts.tokens_PS, state, options=options)
    return set_finished(rollout, rows.started), rows.started


def set_finished(rollout: Rollout, started: Started) -> Rollout:
    """Set the lengths of a rollout of conversations, and `finished_B` as they have ended, on the host. Collective."""
    finished = {row: reward.finished for row, reward in started.items()}
    finished_B = np.array(multihost.gather_rows(finished, len(rollout.length_B)))
    return replace(sampler.lengths_to_host(rollout), finished_B=finished_B)  # type: ignore[arg-type]  # on the host


def answer(
    interaction: Interaction, rows: RowsOnHost, progress: sampler.Progress, options: SampleOptions
) -> Replies | None:
    """Answer the turns that have ended by the environment's replies, on the devices; None if no conversation waits.

    Conversations that end get no reply; they move from `open` to `started`. Collective.
    """
    length_B, ended_B, waiting_B = multihost.to_host((progress.length_B, progress.ended_B, progress.waiting_B))
    turn_B = (ended_B | waiting_B) & ~rows.ended_B
    if not turn_B.any():
        return None
    tokens_BC = multihost.owned_rows(progress.tokens_BC)
    turns: dict[int, Episode] = {}

    def submit() -> dict[int, Future[Step | Failure]]:
        turns.update((row, rows.find(row)) for row in tokens_BC if turn_B[row])
        for row, episode in turns.items():
            episode.spans.append((episode.start, int(length_B[row])))
            tokens = tokens_BC[row][slice(*episode.spans[-1])]
            episode.message = episode.opening + interaction.tokenizer.decode(tokens)
            episode.texts.append(episode.message)
        whole = {row: episode for row, episode in turns.items() if waiting_B[row]}
        states = [episode.state for episode in whole.values()]
        messages = [episode.message for episode in whole.values()]
        return dict(zip(whole, interaction.steps.submit(states, messages), strict=True))

    def take(steps: dict[int, Future[Step | Failure]]) -> dict[int, list[int]]:
        replies: dict[int, list[int]] = {}
        for row, episode in turns.items():
            step = steps[row].result() if row in steps else None
            stop, room = int(tokens_BC[row][length_B[row] - 1]), options.sampling.max_tokens - int(length_B[row])
            reply, error = _take_step(interaction, episode, step, stop, options.model.vocab_size)
            if not error and 0 < len(reply) < room:  # room for a token of the next turn too
                replies[row], episode.start = reply, int(length_B[row]) + len(reply)
            else:
                rows.started[row] = _start_reward(interaction, rows.open.pop(row), error)
        return replies

    steps = multihost.all_or_raise(submit)
    interrupt.wait(steps.values())
    own = multihost.all_or_raise(lambda: take(steps))
    replies = multihost.gather_rows({row: own.get(row, []) for row in tokens_BC}, len(length_B))
    np.logical_or(rows.ended_B, turn_B & [not reply for reply in replies], out=rows.ended_B)
    if not waiting_B.any():
        return None
    return multihost.to_devices(sampler.pad_replies(replies), named_sharding(options.mesh, "batch"))


def _take_step(
    interaction: Interaction, episode: Episode, step: Step | Failure | None, stop: int, vocab_size: int
) -> tuple[list[int], str]:
    """Note a step in its episode; return the tokens of the reply, none if there is no further turn, or what has failed.

    `step` is None for a turn that reached the length limit, for which the environment is not called.
    """
    episode.rewards.append(step.reward if isinstance(step, Step) else 0.0)
    if not isinstance(step, Step):
        return [], step.reason if step else ""
    episode.state = step.state
    for name, value in step.metrics.items():
        episode.metrics[name] = episode.metrics.get(name, 0.0) + value
    tokenizer, messages = interaction.tokenizer, step.messages
    try:
        end = end_before(tokenizer, messages)
        episode.finished = bool(step.done) or (stop in tokenizer.stop_ids and stop != end)
        if episode.finished or len(episode.spans) >= interaction.turns.limit:
            return [], ""
        reply = list(tokenizer.encode_reply(messages)) if messages else []
        if reply and stop != end:  # after a stop string, or a stop token of the experiment's own
            reply = [end, *reply]
        check_ids(reply, vocab_size, "a reply")
        episode.opening = opening_of(tokenizer, reply)
        episode.texts += [str(message["content"]) for message in step.messages]
    except Exception as problem:  # of what the environment has written
        return [], f"reply: {type(problem).__name__}: {problem}"
    return reply, "" if reply else "reply: wanted a message, or done=True, got neither"


def _start_reward(interaction: Interaction, episode: Episode, error: str) -> StartedReward:
    """Start the reward of the last message of a conversation that has ended; also return its turns."""
    if error:
        reward: Future[Result] = Future()
        reward.set_result(Result((), error, blamed="environment: its step"))
    else:
        (reward,) = interaction.rewards.submit([episode.problem], [episode.message])
    replies = episode.start - sum(end - start for start, end in episode.spans[:-1])
    metrics = {"reply_tokens": float(replies)} | episode.metrics
    turns = GradedTurns(tuple(episode.spans), tuple(episode.rewards), metrics)
    return StartedReward("\n".join(episode.texts), reward, turns, episode.finished)
