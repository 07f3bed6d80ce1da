"""What a run's agents share: the program, its calls, the reward of its answers, and how a chat becomes tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from gspax.config import Grading, Sampling, Turns
from gspax.config.functions import unwrap
from gspax.config.protocols import ConversationTokenizer, Tokenizer
from gspax.errors import UserError
from gspax.rewards.calls import Calls, Failure
from gspax.rewards.environments.agents import Agent
from gspax.rewards.scores import Result

if TYPE_CHECKING:
    from gspax.rollout.agents.conversation import Conversation


@dataclass(frozen=True)
class AgentInteraction:
    """Agents in place of an environment (`episodes.Interaction`)."""

    agent: Agent
    steps: Calls[object]  # runs of the program, with its conversation
    rewards: Calls[Result]  # of its answer
    tokenizer: ConversationTokenizer
    turns: Turns
    sampling: Sampling  # of the run


def employ(
    agent: Agent, tokenizer: Tokenizer, rewards: Calls[Result], turns: Turns, grading: Grading, sampling: Sampling
) -> AgentInteraction:
    """Make the interaction with an agent. UserError without the extra `agents`."""
    if missing := agent.find_missing({}):
        raise UserError(f"environment: {missing}")
    limits = replace(grading, timeout=agent.timeout, concurrency=agent.concurrency)
    steps = Calls(_caller(agent.run), limits, read=_keep, fail=Failure, deadline="environment.timeout")
    chat = cast(ConversationTokenizer, tokenizer)  # as validation has checked
    return AgentInteraction(agent, steps, rewards, chat, turns, sampling)


def _keep(value: object) -> object:
    return value


def _caller(run: Callable[..., Any]) -> Callable[[Conversation, str], Any]:
    """Make a function of a conversation that runs a program, async if the program is."""
    inner = unwrap(run)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):

        async def call_async(conversation: Conversation, _: str) -> object:
            conversation.begin()
            return await run(conversation.problem, conversation.endpoint)

        return call_async

    def call(conversation: Conversation, _: str) -> object:
        conversation.begin()
        return run(conversation.problem, conversation.endpoint)

    return call
