"""Offers a task of gspax as a taskset and an environment of `verifiers` (0.4), without jax.

    # higher_lower_vf.py, an installed module: `eval higher_lower_vf` of verifiers finds the two classes
    Tasks, Conversation = offer(Games(), reward=reward, environment=HigherOrLower())
    __all__ = ["Tasks", "Conversation"]

Tools stay text: the model reads their schemas in the system message, writes calls as `<tool_call>`, and gets the
replies as user messages. The server that samples must therefore not parse calls itself.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf

from gspax.config.protocols import DataSource, Environment, Message, Problem, Reward
from gspax.data.chat_template import OPEN
from gspax.data.problem import chat_of
from gspax.rewards.calls import Batched, Failure
from gspax.rewards.scores import Result, read_step, to_result

_TOOLS = """You may call functions. Their signatures are
<tools>
{}
</tools>
For each call write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>."""


def offer(
    data: DataSource,
    reward: Reward,
    environment: Environment | None = None,
    *,
    turns: int = 8,
    tasks: int = 1000,
    opened: bool = False,
) -> tuple[type[Any], type[Any]]:
    """Make the classes for a module's `__all__`: a `vf.Taskset` and a `vf.Env`.

    Args:
      data: the source whose first training problems are the tasks.
      reward: grades the last message; the rewards of an environment's steps are added as `environment`.
      environment: answers the model; None for tasks of one turn.
      turns: the maximum number of the model's messages in a conversation.
      tasks: the number of tasks.
      opened: whether the template of the model's server ends prompts with `<think>`. A message without it then gets it,
        as in a run, so that truncated thinking is not taken for an answer; messages from which the server has removed
        the thinking stay unchanged.
    """
    schemas = environment.schemas() if environment is not None and hasattr(environment, "schemas") else []

    def reset(index: int) -> tuple[Any, Sequence[Message]]:
        problem = data.train(index)
        if environment is None:
            return None, chat_of(problem)
        return environment.reset(problem)

    class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
        @vf.reward
        async def reward(self, task: Any, trace: Any) -> Any:
            reply = _read(trace.last_reply, trace.assistant_messages, opened)
            return _record(to_result(await _grade(reward, data.train(task.idx), reply)), trace)

    class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
        def load(self) -> Iterator[Task]:
            for index in range(tasks):
                messages = _with_tools(reset(index)[1], schemas)
                yield Task(vf.TaskData(idx=index, prompt=messages), self.config.task)

    class Conversation(vf.Env[vf.SingleAgentEnvConfig]):
        async def run(self, task: Any, agents: Any) -> None:
            if environment is None:
                await agents.agent.run(task)
                return
            state = reset(task.data.idx)[0]
            async with agents.agent.interaction(task) as talk:
                total, metrics = await _converse(environment, talk, state, turns, opened)
            talk.trace.record_reward("environment", total)
            talk.trace.record_metrics(metrics)

    return Tasks, Conversation


async def _converse(
    environment: Environment, talk: Any, state: object, turns: int, opened: bool
) -> tuple[float, dict[str, float]]:
    """Play a conversation; return the sum of its steps' rewards, and the sums of their metrics."""
    segment, total, metrics = await talk.turn(), 0.0, dict[str, float]()
    for turn in range(turns):
        if segment.terminated:
            break
        reply = _read(segment.last_reply, segment.messages, opened)
        step = read_step(await _call(environment.step, copy.deepcopy(state), reply))
        if isinstance(step, Failure):
            raise ValueError(f"environment: {step.reason}")
        state, total = step.state, total + step.reward
        for name, value in step.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
        if step.done or turn == turns - 1:
            break
        segment = await talk.turn([_as_user(message) for message in step.messages])
    return total, metrics


def _with_tools(messages: Sequence[Message], schemas: Sequence[object]) -> list[dict[str, Any]]:
    """Add the tools to the system message of the first messages."""
    given: list[dict[str, Any]] = [dict(message) for message in messages]
    if not schemas:
        return given
    first = given.pop(0)["content"] + "\n\n" if given[0]["role"] == "system" else ""
    return [{"role": "system", "content": first + _TOOLS.format("\n".join(map(json.dumps, schemas)))}, *given]


def _read(reply: str, messages: Sequence[Any], opened: bool) -> str:
    """Return the last reply; after `<think>` if the prompt opened thinking that the server did not separate."""
    if not opened or reply.startswith(OPEN):
        return reply
    last = next(message for message in reversed(messages) if message.role == "assistant")
    return reply if getattr(last, "reasoning_content", None) else f"{OPEN}\n{reply}"


def _record(result: Result, trace: Any) -> float | dict[str, float]:
    """Convert rewards for verifiers; the parts of a single one become metrics. ValueError if there are none."""
    if not result.rewards:
        raise ValueError(f"reward: {result.error}")
    if result.names or len(result.rewards) > 1:
        names = result.names or [f"reward_{number}" for number in range(len(result.rewards))]
        return dict(zip(names, result.rewards, strict=True))
    trace.record_metrics(dict(result.parts))
    return result.rewards[0]


async def _grade(reward: Reward, problem: Problem, completion: str) -> object:
    """Call a reward of any kind for one completion, and return its value."""
    if isinstance(reward, Batched):
        return (await _call(reward.function, [problem], [completion]))[0]
    return await _call(reward, problem, completion)


async def _call(function: Any, *arguments: object) -> Any:
    """Call a function that may be async, and return its result; other functions run in a thread."""
    result = await asyncio.to_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


def _as_user(message: Message) -> dict[str, Any]:
    if message["role"] != "tool":
        return dict(message)
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
