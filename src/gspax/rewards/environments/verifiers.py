"""Runs environments of `verifiers` (0.4) in gspax. `to_verifiers` is the other direction.

    theirs = {"taskset": {"id": "wordle"}}  # the settings of verifiers' `EnvConfig`
    data=gspax.data.sequence(problems(theirs)), environment=VerifiersEnvironment(theirs), reward=no_reward

In verifiers, `Env.run` decides what the policy reads and when. It runs in this process, with an agent that answers with
the policy's messages. A step plays the episode from its beginning and stops where the next message is needed. So a
state consists of the messages so far: a run can resume, and nothing is open while the policy generates. The price: a
conversation of k turns calls its tools about k / 2 times as often.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import verifiers.v1 as vf
from mcp import Client
from mcp.server.mcpserver import MCPServer
from verifiers.v1.dialects import parse_message
from verifiers.v1.graph import prepare_turn
from verifiers.v1.session import hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from gspax.config.protocols import Message, Problem, Step
from gspax.data.chat import split_thinking
from gspax.errors import UserError
from gspax.rewards.calls import concurrent
from gspax.rewards.environments.family_calls import before_calls
from gspax.rewards.environments.tool_calls import Call, Malformed, parse_hermes

T = TypeVar("T")
Parse = Callable[[str], list[Call | Malformed]]
Tools = dict[str, tuple[MCPServer, str, Any]]  # by the name in prompts: server, name on the server, `vf.Tool`


def problems(config: Mapping[str, Any], *, most: int = 100_000) -> list[Problem]:
    """Load the tasks of a taskset, at most `most`, as rows for `gspax.data.sequence`."""
    return [
        Problem(task.data.prompt_text or task.key, "", metadata={"task": task.data.model_dump(mode="json")})
        for task in VerifiersEnvironment(config)._env.taskset.take(most)
    ]


def no_reward(problem: Problem, completion: str) -> float:
    """Return 0: the environment's last step has the rewards of verifiers."""
    return 0.0


class Transcript(NamedTuple):
    """An episode up to the point where the policy generates its next message."""

    task: Mapping[str, Any]  # the task's data
    answers: tuple[str, ...] = ()  # the policy's messages
    read: tuple[Message, ...] = ()  # all messages so far


@dataclass(frozen=True)
class VerifiersEnvironment:
    """An environment of verifiers with one agent: one turn or several, with tools, and with the rewards of its tasks.

    It replaces the agent's harness, and calls the tools of toolsets in this process. Of the agent's settings, only
    `runtime` (by default a folder of this machine) and `max_turns` have an effect. The reward of the last step is the
    episode's; its rewards and metrics become metrics of the rollout. An episode that is replayed with the same answers
    must take the same course.

    Attributes:
      config: the settings of verifiers' `EnvConfig`; `taskset.id` names an installed module.
      parse: finds the tool calls in a message. A message without a valid call ends a turn.
    """

    config: Mapping[str, Any]
    parse: Parse = parse_hermes

    def schemas(self) -> list[dict[str, object]]:
        """Return the tools for a chat template."""
        shown = {"name", "description", "parameters"}
        tools = _wait(_open_tools(self._env.taskset, None)).values()
        return [{"type": "function", "function": tool.model_dump(include=shown)} for _, _, tool in tools]

    def reset(self, problem: Problem) -> tuple[Transcript, list[Message]]:
        """Return the messages before the policy's first one. ValueError if it has none."""
        step = _wait(self._play(Transcript(problem.metadata["task"])))
        if step.done:
            raise ValueError("the episode ended before the policy's first message")
        return step.state, list(step.messages)

    @concurrent(8)
    def step(self, state: Transcript, message: str) -> Step:
        """Return the reply before the policy's next message, or the end of the episode with its reward."""
        return _wait(self._play(state._replace(answers=(*state.answers, message))))

    @cached_property
    def _env(self) -> Any:
        return vf.load_environment(vf.resolve_env_config(dict(self.config)))

    async def _play(self, state: Transcript) -> Step:
        """Play the episode with these answers, up to where another answer is needed."""
        env, kind = self._env, self._env.taskset.task_type()
        task = kind(kind.data_type().model_validate(state.task), env.taskset.config.task)
        specs = {name: value for name, value in env.config if isinstance(value, vf.AgentConfig)}
        if len(specs) != 1:
            raise UserError(f"environment: wanted an environment of verifiers with one agent, got {', '.join(specs)}")
        agent = _Agent(next(iter(specs.values())), state.answers, self.parse, env.taskset)

        async def play() -> None:
            agents = vf.Agents(env.config, lambda name, spec: agent)
            try:
                await env.start()
                await env.setup(agents)
                await env.run(task, agents)
                await env.finalize(task, vf.Episode(task=agent.trace.task, traces=[agent.trace], ok=True))
            finally:
                await env.stop()

        playing = asyncio.create_task(play())
        await asyncio.wait({playing, agent.waits}, return_when=asyncio.FIRST_COMPLETED)
        if has_ended := playing.done():
            playing.result()
        playing.cancel()
        await asyncio.wait({playing})
        read = tuple(map(_to_chat, agent.messages))
        if read[: len(state.read)] != state.read:
            raise ValueError("the environment is not deterministic: with the same answers it behaved differently")
        if not has_ended:
            return Step(state._replace(read=read), read[len(state.read) + bool(state.answers) :])
        rewards = {name: reward.score for name, reward in agent.trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in agent.trace.metrics.items() if value is not None}
        return Step(done=True, reward=agent.trace.reward, metrics=rewards | metrics)


class _Agent(vf.Agent):
    """An agent with given answers and one interaction; its future `waits` completes when it needs another answer."""

    def __init__(self, spec: Any, answers: tuple[str, ...], parse: Parse, taskset: Any) -> None:
        local = {} if "runtime" in spec.model_fields_set else {"runtime": vf.SubprocessConfig()}
        super().__init__(spec.model_copy(update={"model": "policy", **local}))
        self._answers, self._parse, self._taskset = list(answers), parse, taskset
        self.waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.messages: list[Any] = []
        self.trace: Any = None

    async def run(self, task: Any, **unused: object) -> Any:
        async with self.interaction(task):
            await self.turn()
            self.trace.stop("agent_completed")
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **unused: object) -> AsyncIterator[_Agent]:
        if self.trace is not None:
            raise UserError("environment: wanted one conversation in an episode of verifiers, got a second one")
        self._stops = task.hooks("stop")
        takes_others = any(hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in self._stops)
        if takes_others or discover_decorated(task, "intercept"):
            raise UserError("environment: wanted a task of verifiers without hooks on requests and responses, got one")
        record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(task=record, agent=vf.AgentInfo(config=self.config), state=state_cls(type(task))())
        async with self.provision(task) as box:
            hooks = {"trace": self.trace, "runtime": box}
            await invoke(task.setup, hooks)
            self._tools = await _open_tools(self._taskset, task)
            yield self
            self.trace.stop("user_closed")
            await invoke(task.finalize, hooks)
            await task.score(self.trace, box)
        self.trace.is_completed = self.trace.ok = True

    async def turn(self, message: Any = None) -> Any:
        """Play the policy's messages and the results of its calls, up to a message without calls."""
        said, data = self.messages, self.trace.task.data
        if not said and data.system_prompt is not None:
            said.append(vf.SystemMessage(content=data.system_prompt))
        given = data.prompt if message is None else message
        given = [vf.UserMessage(content=given)] if isinstance(given, str) else given
        said += [parse_message(one) if isinstance(one, dict) else one for one in given]
        start = len(said)
        while not await self._is_over():
            if not self._answers:
                self.waits.set_result(None)
                await asyncio.Future()  # waits until the episode is canceled
            answer = self._read(self._answers.pop(0))
            turn = prepare_turn(self.trace, list(said), [tool for _, _, tool in self._tools.values()])
            why = "tool_calls" if answer.tool_calls else "stop"
            turn.commit(vf.Response(id="", created=0, model="policy", message=answer, finish_reason=why))
            said.append(answer)
            for call in answer.tool_calls or ():
                said.append(vf.ToolMessage(tool_call_id=call.id, name=call.name, content=await self._call(call)))
            if not answer.tool_calls:
                break
        return vf.Segment(messages=said[start:], terminated=len(said) == start)

    async def _is_over(self) -> bool:
        most = self.config.max_turns
        if most is not None and self.trace.num_turns >= most:
            self.trace.stop("max_turns")
        for stop in self._stops:
            ended = invoke(stop, {vf.Trace: self.trace})
            if await ended if asyncio.iscoroutine(ended) else ended:
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is not None

    def _read(self, text: str) -> Any:
        """Convert the policy's text to a message as servers return it: thinking, content, and calls separated."""
        thinking, content = split_thinking(text)
        calls = [call for call in self._parse(content) if isinstance(call, Call)]
        schemas = {name: tool.parameters.get("properties", {}) for name, (_, _, tool) in self._tools.items()}
        calls = [
            vf.ToolCall(id=f"call_{len(self.messages)}_{i}", name=call.name, arguments=json.dumps(arguments))
            for i, call in enumerate(calls)
            for arguments in [call.typed(schemas.get(call.name, {}))]
        ]
        content = before_calls(content) if calls else content
        return vf.AssistantMessage(content=content, reasoning_content=thinking or None, tool_calls=calls or None)

    async def _call(self, call: Any) -> str:
        if call.name not in self._tools:
            return f"error: wanted one of the tools {', '.join(self._tools)}, got {call.name[:80]!r}"
        server, name, _ = self._tools[call.name]
        async with Client(server) as client:
            result = await client.call_tool(name, json.loads(call.arguments))
        return "\n".join(block.text if block.type == "text" else str(block) for block in result.content)


async def _open_tools(taskset: Any, task: Any) -> Tools:
    """Open the tools of a taskset and of its tasks, set up for the task unless it is None."""
    tools: Tools = {}
    for toolset in (*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)):
        name = toolset.server_name
        if toolset.config.url or state_cls(type(toolset)) is not vf.State:
            raise UserError(f"environment: wanted toolsets of verifiers without url and State, got {name!r} with one")
        if task is not None:
            await toolset.setup()
            await toolset.setup_task(task.data)
        server = MCPServer(name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            shown = f"{name}_{tool.name}" if name else tool.name
            described = vf.Tool(name=shown, description=tool.description or "", parameters=tool.input_schema)
            tools[shown] = server, tool.name, described
    return tools


def _to_chat(message: Any) -> Message:
    """Convert a message for a chat template. UserError unless it is text."""
    if not isinstance(message.content or "", str):
        raise UserError("environment: wanted messages of text from verifiers, got parts")
    name = {"name": message.name} if getattr(message, "name", None) else {}
    return {"role": message.role, "content": message.content or "", **name}


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine's result, even in a thread with an event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
