"""Samples a rollout of agents: starts the programs, answers their requests, and grades what they return.

Each process runs the programs of its own rows, which ask at its own endpoint. What they ask for is then exchanged, so
that all processes sample the same turns together.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.errors import UserError
from gspax.parallel import multihost
from gspax.rewards.calls import Failure
from gspax.rewards.environments.agents import POLICY
from gspax.rewards.scores import Result, to_result
from gspax.rollout.agents.conversation import Conversation, Limits, Turn
from gspax.rollout.agents.door import Talks, open_door
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.agents.openai import Refusal
from gspax.rollout.agents.places import Places
from gspax.rollout.completion import GradedTurns
from gspax.rollout.contract import Request, RolloutSampler, Weights
from gspax.rollout.episodes import set_finished
from gspax.rollout.grading import Started, StartedReward
from gspax.run import interrupt
from gspax.run.interrupt import POLL
from gspax.types import Rollout

TOGETHER = 0.01  # seconds in which requests that arrive are sampled together, while nothing else is


class _Ended(NamedTuple):
    """A program that has returned, or failed."""

    row: int
    value: object


_Inbox = queue.SimpleQueue[Turn | _Ended]


def sample_agents(
    sampler: RolloutSampler, weights: Weights, request: Request, interaction: AgentInteraction
) -> Future[tuple[Rollout, Started]]:
    """Sample `sampling.group` rollouts of each problem, each by a program of its own. Collective.

    Takes the arguments of `RolloutSampler.sample`, with problems in place of prompts. The rows of the rollout are those
    of other samplers; a program that never asks has a row without sampled tokens. The result is there.
    """
    inbox: _Inbox = queue.SimpleQueue()
    talks = _converse(request, interaction, inbox)
    pools, place_of = _make_places(sampler, weights, request)
    started, ended, idle = Started(), set[int](), True
    try:
        with _open(talks, interaction, inbox):
            while len(ended) < len(place_of):
                interrupt.stop_point()
                for row, turn in _receive(talks, interaction, inbox, started, wait=idle):
                    which, place = place_of[row]
                    if turn is not None:
                        pools[which].ask(place, turn)
                    else:
                        pools[which].leave(place)
                        ended.add(row)
                advanced = [pool.advance() for pool in pools]
                idle = not any(moved for moved, _ in advanced)
                for written in (one for _, ended_turns in advanced for one in ended_turns):
                    if (talk := talks.get(written.turn.row)) is not None:
                        talk.take(written.tokens, written.logps)
    finally:
        for talk in talks.values():
            talk.close()
    rollouts = [pool.rollout() for pool in pools]
    sampled = Future[tuple[Rollout, Started]]()
    sampled.set_result((set_finished(_merge(rollouts, place_of), started), started))
    return sampled


def _converse(request: Request, interaction: AgentInteraction, inbox: _Inbox) -> dict[int, Conversation]:
    """Make a conversation for each row of this process; of processes that have the same row, the first. Collective."""
    options, sampling = request.options, request.options.sampling
    limits = Limits(sampling, options.stop_ids, options.model.vocab_size)
    owners = [set(places) for places in multihost.gather([*request.encoded])]
    own = owners[jax.process_index()].difference(*owners[: jax.process_index()])
    rows = [place * sampling.group + number for place in sorted(own) for number in range(sampling.group)]
    problems = {row: request.encoded[row // sampling.group].problem for row in rows}
    return {row: Conversation(row, problem, interaction, limits, inbox.put) for row, problem in problems.items()}


def _make_places(
    sampler: RolloutSampler, weights: Weights, request: Request
) -> tuple[list[Places], list[tuple[int, int]]]:
    """Make the places that sample all rows, and return the pool and place of each row.

    Rows that are decoded greedily have places of their own, because a sampler has one temperature.
    """
    options, sampling = request.options, request.options.sampling
    group, sampled = sampling.group, sampling.group - options.greedy
    pools, place_of = list[Places](), dict[int, tuple[int, int]]()
    for numbers, temperature in ((range(sampled), sampling.temperature), (range(sampled, group), 0.0)):
        rows = [row for row in range(len(request.prompt_ids) * group) if row % group in numbers]
        if rows:
            place_of |= {row: (len(pools), place) for place, row in enumerate(rows)}
            ids = [int(request.prompt_ids[row // group]) * sampled + row % group for row in rows]
            own = replace(options, sampling=replace(sampling, temperature=temperature))
            pools.append(Places(sampler, weights, request.key, own, ids))
    return pools, [place_of[row] for row in range(len(place_of))]


@contextlib.contextmanager
def _open(talks: Mapping[int, Conversation], interaction: AgentInteraction, inbox: _Inbox) -> Iterator[None]:
    """Open this process's endpoint and start its programs; what they return arrives in the inbox. Collective."""
    keys = {talk.key: talk for talk in talks.values()}

    def find(key: str) -> Talks:
        if key not in keys:
            raise Refusal("wanted the key of a rollout, got another one", status=401, code="invalid_api_key")
        return keys[key]

    def note(row: int, done: Future[object]) -> None:
        inbox.put(_Ended(row, done.exception() or done.result()))

    with contextlib.ExitStack() as stack:
        address = multihost.all_or_raise(lambda: stack.enter_context(open_door(find, POLICY)))
        for talk in talks.values():
            talk.address = address
        for row, future in zip(talks, interaction.steps.submit([*talks.values()], [""] * len(talks)), strict=True):
            future.add_done_callback(partial(note, row))
        yield


def _receive(
    talks: Mapping[int, Conversation], interaction: AgentInteraction, inbox: _Inbox, started: Started, *, wait: bool
) -> list[tuple[int, Turn | None]]:
    """Return what has arrived in all processes: a row with its turn, or with None if its program has ended. Collective.

    What has ended here is graded. If `wait`, wait for something, and for what arrives soon after it.
    """

    def receive() -> list[Turn | _Ended]:
        events = list[Turn | _Ended]()
        with contextlib.suppress(queue.Empty):
            events += [inbox.get(timeout=POLL if jax.process_count() == 1 else TOGETHER)] if wait else []
            while True:
                events.append(inbox.get(timeout=TOGETHER) if wait else inbox.get_nowait())
        for event in events:
            if isinstance(event, _Ended):
                talks[event.row].close()
                started[event.row] = _grade(interaction, talks[event.row], event.value)
        return events

    own = multihost.all_or_raise(receive)
    sent = [(event.row, tuple(event) if isinstance(event, Turn) else None) for event in own]
    received: list[tuple[int, Any]] = [event for part in multihost.gather(sent) for event in part]
    return [(row, Turn(*turn) if turn else None) for row, turn in received]


def _grade(interaction: AgentInteraction, talk: Conversation, value: object) -> StartedReward:
    """Start the reward of a rollout whose program has ended.

    If a request was refused for a limit of turns or tokens, an error of the program after that is no failure: then the
    reward grades the policy's last message, as in other truncated conversations.
    """
    if isinstance(value, UserError):
        raise value
    spans = tuple(talk.spans) or ((0, 0),)
    replies = spans[-1][0] - sum(end - start for start, end in spans[:-1])
    turns = GradedTurns(spans, (0.0,) * len(spans), {"reply_tokens": float(replies)})
    finished = not (talk.cut or talk.limited)
    failed = value.reason if isinstance(value, Failure) and not talk.limited else ""
    if error := failed or ("" if talk.spans else "the agent ended without an answer of the policy"):
        result = Result((), error)
    elif value is None or isinstance(value, str | Failure):
        answer = value if isinstance(value, str) else talk.written
        (reward,) = interaction.rewards.submit([talk.problem], [answer])
        return StartedReward("\n".join(talk.texts), reward, turns, finished)
    else:
        result = to_result(value)
    reward = Future[Result]()
    reward.set_result(result._replace(blamed="environment: the agent"))
    return StartedReward("\n".join(talk.texts), reward, turns, finished and not error)


def _merge(rollouts: Sequence[Rollout], place_of: Sequence[tuple[int, int]]) -> Rollout:
    """Merge the rollouts of several pools, in the order of their rows."""
    if len(rollouts) == 1:
        return rollouts[0]
    starts = np.cumsum([0, *(len(rollout.length_B) for rollout in rollouts)])
    order_B = np.array([starts[which] + place for which, place in place_of])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order_B], *rollouts)
