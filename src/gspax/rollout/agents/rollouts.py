"""Samples a rollout of agents: starts the programs, answers their requests, and grades what they return."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.errors import UserError
from gspax.rewards.calls import Failure
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
    """Sample `sampling.group` rollouts of each problem, each by a program of its own.

    Takes the arguments of `RolloutSampler.sample`, with problems in place of prompts. The rows of the rollout are those
    of other samplers; a program that never asks has a row without sampled tokens. The result is there.
    """
    inbox: _Inbox = queue.SimpleQueue()
    talks, pools, place_of = _prepare(sampler, weights, request, interaction, inbox)
    keys, started, idle = {talk.key: talk for talk in talks}, Started(), True

    def find(key: str) -> Talks:
        if key not in keys:
            raise Refusal("wanted the key of a rollout, got another one", status=401, code="invalid_api_key")
        return keys[key]

    with open_door(find, talks[0].endpoint.model) as address:
        try:
            _start(interaction, talks, address, inbox)
            while len(started) < len(talks):
                interrupt.stop_point()
                for event in _receive(inbox, wait=idle):
                    talk, (which, place) = talks[event.row], place_of[event.row]
                    if isinstance(event, Turn):
                        pools[which].ask(place, event)
                        continue
                    talk.close()
                    pools[which].leave(place)
                    started[event.row] = _grade(interaction, talk, event.value)
                idle = not any([pool.advance() for pool in pools])
        finally:
            for talk in talks:
                talk.close()
    rollouts = [pool.rollout() for pool in pools]
    sampled = Future[tuple[Rollout, Started]]()
    sampled.set_result((set_finished(_merge(rollouts, place_of), started), started))
    return sampled


def _prepare(
    sampler: RolloutSampler, weights: Weights, request: Request, interaction: AgentInteraction, inbox: _Inbox
) -> tuple[list[Conversation], list[Places], list[tuple[int, int]]]:
    """Make a conversation for each row, the places that sample them, and the pool and place of each row.

    Rows that are decoded greedily have places of their own, because a sampler has one temperature.
    """
    options, sampling = request.options, request.options.sampling
    group, sampled = sampling.group, sampling.group - options.greedy
    limits = Limits(sampling, options.stop_ids, options.model.vocab_size)
    talks = []
    for row in range(len(request.prompt_ids) * group):  # one process has all rows
        problem = request.ready[row // group].problem
        talks.append(Conversation(row, problem, interaction, limits, inbox.put))
    pools, place_of = list[Places](), dict[int, tuple[int, int]]()
    for numbers, temperature in ((range(sampled), sampling.temperature), (range(sampled, group), 0.0)):
        rows = [row for row in range(len(talks)) if row % group in numbers]
        if rows:
            place_of |= {row: (len(pools), place) for place, row in enumerate(rows)}
            ids = [int(request.prompt_ids[row // group]) * sampled + row % group for row in rows]
            own = replace(options, sampling=replace(sampling, temperature=temperature))
            pools.append(Places(sampler, weights, request.key, own, ids))
    return talks, pools, [place_of[row] for row in range(len(talks))]


def _start(interaction: AgentInteraction, talks: Sequence[Conversation], address: str, inbox: _Inbox) -> None:
    """Start the programs; what they return arrives in the inbox."""

    def note(row: int, done: Future[object]) -> None:
        inbox.put(_Ended(row, done.exception() or done.result()))

    for talk in talks:
        talk.address = address
    for row, future in enumerate(interaction.steps.submit(talks, [""] * len(talks))):
        future.add_done_callback(partial(note, row))


def _receive(inbox: _Inbox, *, wait: bool) -> list[Turn | _Ended]:
    """Return what has arrived; if `wait`, wait for something, and for what arrives soon after it."""
    events = list[Turn | _Ended]()
    with contextlib.suppress(queue.Empty):
        events += [inbox.get(timeout=interrupt.POLL)] if wait else []
        while True:
            events.append(inbox.get(timeout=TOGETHER) if wait else inbox.get_nowait())
    return events


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
