"""Agents: programs of somebody's own in place of an environment, which talk with the policy as with OpenAI's server.

    async def solve(problem, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...
        return answer

    environment=Agent(solve)

Each rollout starts the program with a key of its own (`rollout.agents` serves it). What the program returns is its
answer, a text, which the experiment's reward grades; or a number, which is the reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

from gspax.config.protocols import Message, Problem, Step
from gspax.config.ranges import NOT_EMPTY, Positive, PositiveInt
from gspax.data.problem import chat_of
from gspax.errors import how_to_install, shorten
from gspax.rewards.environments.tool_calls import Call, Malformed, parse_hermes

PACKAGES = ("starlette", "uvicorn")  # of the extra `agents`
POLICY = "policy"  # the only model that an endpoint has


class Endpoint(NamedTuple):
    """Where the policy of one rollout answers, for `OpenAI(base_url=..., api_key=...)`."""

    base_url: str  # http://127.0.0.1:PORT/v1
    api_key: str  # of this rollout alone
    model: str = POLICY


@dataclass(frozen=True)
class Agent:
    """A program that talks with the policy over HTTP, as with OpenAI's server.

    As an environment it is a chat of one turn about the problem: that is what a dry run measures and a warm start
    imitates, because both do not start the program.

    Attributes:
      run: a function or a coroutine of (problem, endpoint); `Command` is one of a program. It returns an answer, a
        text for the experiment's reward; or the reward, as a reward function may return it. After None the reward
        grades the policy's last message.
      parse: finds the tool calls in a message, as for `ToolUse`.
      timeout: seconds that a rollout may take, the policy's turns included; then it has failed.
      concurrency: programs that run at once; each needs a thread, unless it is a coroutine.
    """

    run: Callable[[Problem, Endpoint], object]
    parse: Callable[[str], list[Call | Malformed]] = parse_hermes
    timeout: Positive = 600.0
    concurrency: PositiveInt = 512

    def reset(self, problem: Problem) -> tuple[None, list[Message]]:
        """Return the problem as a chat, with no state."""
        return None, chat_of(problem)

    def step(self, state: None, message: str) -> Step:
        """End the chat."""
        return Step(state, done=True)

    def find_missing(self, settings: Mapping[str, Any]) -> str:
        """Say which packages are missing; empty if none are (`rewards.calls.needs`)."""
        return find_missing_packages()


def find_missing_packages() -> str:
    """Say which packages of the extra `agents` are missing; empty if none are."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    return f"wanted the packages {' and '.join(missing)}: {how_to_install('agents')}" if missing else ""


@dataclass(frozen=True)
class Command:
    """The `run` of a program: it reads the problem from its input, and its output is the answer.

    The problem is a line of JSON with its prompt and metadata. OPENAI_BASE_URL and OPENAI_API_KEY are set, as the
    client of `openai` reads them. An exit code other than 0 is a failure. When the rollout ends, the program and all
    that it has started are killed.

    Attributes:
      words: the program and its arguments.
      variables: further variables of its environment, besides those of the run.
    """

    words: Annotated[tuple[str, ...], NOT_EMPTY]
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    async def __call__(self, problem: Problem, endpoint: Endpoint) -> str:
        """Run the program."""
        own = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        process = await asyncio.create_subprocess_exec(
            *self.words,
            env={**os.environ, **self.variables, **own},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        given = {"prompt": problem.prompt, "metadata": dict(problem.metadata)}
        try:
            output, errors = await process.communicate(f"{json.dumps(given, default=str)}\n".encode())
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"{self.words[0]}: wanted the exit code 0, got {process.returncode}: {shorten(last)}")
        return output.decode(errors="replace").strip()


def typed_calls(calls: Sequence[Call | Malformed], tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call that could be read."""
    functions = [tool.get("function", {}) for tool in tools]
    properties = {
        function.get("name"): (function.get("parameters") or {}).get("properties", {}) for function in functions
    }
    return [
        (call.name, json.dumps(dict(call.typed(properties.get(call.name, {}))), ensure_ascii=False))
        for call in calls
        if isinstance(call, Call)
    ]
