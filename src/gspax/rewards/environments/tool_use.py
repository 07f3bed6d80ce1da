"""A problem and tools: the policy calls tools until a message has no call, which is its answer.

    environment=ToolUse(tools=(calculator(),))

The experiment's reward judges the answer. A call that cannot be read, names no tool or has wrong arguments is answered
by an error message, and the conversation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gspax.config.protocols import Message, Problem, Step
from gspax.config.ranges import NOT_EMPTY, PositiveInt
from gspax.data.chat import split_thinking
from gspax.rewards.calls import concurrent
from gspax.rewards.environments.tool_calls import Call, Malformed, parse_hermes

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


class ToolError(Exception):
    """A call that the policy got wrong; its message is the tool's reply."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: as the policy writes it.
      description: what the chat template shows.
      run: takes the arguments as keywords and returns a text. A `ToolError` is the policy's mistake; any other
        exception is a failure of the tool, which ends the conversation and is counted.
      parameters: JSON schemas of the arguments by name; all are required.
    """

    name: str
    description: str
    run: Callable[..., str]
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def schema(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's `tools`."""
        arguments = {"type": "object", "properties": dict(self.parameters), "required": [*self.parameters]}
        function = {"name": self.name, "description": self.description, "parameters": arguments}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """An environment of tools.

    Attributes:
      tools: what may be called.
      parse: the calls in a message: `tool_calls.parse_hermes`, `parse_brackets` or your own.
      call_reward: the reward of a turn for each of its calls that a tool has answered.
      failure_reward: for each of its calls that has failed.
      most_calls: of one message; further calls fail.
      longest_reply: characters of a tool's reply; the rest is cut.
      error: the reply to a call that has failed; `{}` is the reason.
    """

    tools: Annotated[tuple[Tool, ...], NOT_EMPTY]
    parse: Callable[[str], list[Call | Malformed]] = parse_hermes
    call_reward: float = 0.0
    failure_reward: float = 0.0
    most_calls: PositiveInt = 8
    longest_reply: PositiveInt = 4000
    error: Annotated[str, NOT_EMPTY] = "error: {}"

    def schemas(self) -> list[dict[str, Any]]:
        """The tools for a chat template."""
        return [tool.schema() for tool in self.tools]

    def reset(self, problem: Problem) -> tuple[None, list[Message]]:
        """The problem as a chat; there is no state."""
        return None, [*problem.context, {"role": "user", "content": problem.prompt}]

    @concurrent(8)
    def step(self, state: None, message: str) -> Step:
        """The tools' replies; done if the message has no call. Calls within thinking do not count."""
        calls = self.parse(split_thinking(message)[1])
        if not calls:
            return Step(state, done=True)
        answers = [
            self._call(call) if number < self.most_calls else self._fail(f"wanted at most {self.most_calls} calls")
            for number, call in enumerate(calls)
        ]
        failures = sum(not good for _, good in answers)
        reward = self.call_reward * (len(calls) - failures) + self.failure_reward * failures
        messages: list[Message] = [{"role": "tool", "content": self._cut(text)} for text, _ in answers]
        return Step(state, messages, reward, metrics={"tool_calls": len(calls), "tool_failures": failures})

    def _call(self, call: Call | Malformed) -> tuple[str, bool]:
        """The reply to a call, and whether a tool has answered it."""
        if isinstance(call, Malformed):
            return self._fail(call.reason)
        tool = next((each for each in self.tools if each.name == call.name), None)
        if tool is None:
            names = ", ".join(each.name for each in self.tools)
            return self._fail(f"wanted one of the tools {names}, got {call.name[:80]!r}")
        try:
            _check_arguments(tool, call.arguments)
            return str(tool.run(**call.arguments)), True
        except ToolError as problem:
            return self._fail(str(problem))

    def _fail(self, reason: str) -> tuple[str, bool]:
        return self.error.replace("{}", reason), False

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.longest_reply else f"{text[: self.longest_reply]}…"


def _check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """ToolError unless the arguments are those of the tool's schema."""
    if arguments.keys() != tool.parameters.keys():
        wanted = ", ".join(tool.parameters) or "no arguments"
        raise ToolError(f"{tool.name}: wanted {wanted}, got {', '.join(arguments)[:80] or 'no arguments'}")
    for name, schema in tool.parameters.items():
        kind, value = schema.get("type"), arguments[name]
        fits = kind not in _TYPES or isinstance(value, _TYPES[kind])
        if not fits or (isinstance(value, bool) and kind != "boolean"):
            raise ToolError(f"{tool.name}: wanted {name} of type {kind}, got {type(value).__name__}")
