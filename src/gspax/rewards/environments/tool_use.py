"""A problem and tools: the policy calls tools until a message has no call, which is its answer.

    environment=ToolUse(tools=(calculator(),))

The experiment's reward grades the answer. A call that cannot be parsed, names no tool or has wrong arguments is
answered by an error message, and the conversation goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gspax.config.protocols import Message, Problem, Step
from gspax.config.ranges import NOT_EMPTY, PositiveInt
from gspax.data.chat import split_thinking
from gspax.rewards.calls import concurrent

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BRACKETS = re.compile(r"\[([^\[\]]*)(\]?)")
_TYPES: dict[object, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class ToolError(Exception):
    """A call that the policy got wrong; its message is the tool's reply."""


@dataclass(frozen=True)
class Call:
    """A call of a tool by its name."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be parsed."""

    reason: str  # a sentence for the policy


def parse_hermes(text: str) -> list[Call | Malformed]:
    """The calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen3 write them.

    >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1})]
    """
    return [_parse_call(*part.partition(CLOSE)[:2]) for part in text.split(OPEN)[1:]]


def _parse_call(body: str, close: str) -> Call | Malformed:
    wanted = 'wanted {"name": ..., "arguments": {...}} as JSON'
    if not close:
        return Malformed(f"wanted {CLOSE} after a tool call, got none")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Malformed(f"{wanted}, got invalid JSON: {str(error)[:80]}")
    match call:
        case {"name": str() as name, "arguments": dict() as arguments}:
            return Call(name, arguments)
        case {"name": str(), "arguments": _}:
            return Malformed(f"{wanted}, got arguments that are no object")
        case {"name": str() as name}:
            return Call(name, {})
    return Malformed(f"{wanted}, got no name")


def parse_brackets(text: str, *, tool: str = "calculator", argument: str = "expression") -> list[Call | Malformed]:
    """The calls `[...]` of one tool with one argument, for small tokenizers.

    >>> parse_brackets("[1+2]")
    [Call(name='calculator', arguments={'expression': '1+2'})]
    """
    return [
        Call(tool, {argument: body}) if close else Malformed("wanted ] after a call")
        for body, close in _BRACKETS.findall(text)
    ]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: as the policy writes it.
      description: shown by the chat template.
      run: takes the arguments as keywords and returns a text. A `ToolError` is the policy's mistake; any other
        exception is a failure of the tool, which ends the conversation and is counted.
      parameters: JSON schemas of the arguments by name; all are required.
    """

    name: str
    description: str
    run: Callable[..., str]
    parameters: Mapping[str, Mapping[str, object]] = field(default_factory=dict, hash=False)

    def schema(self) -> dict[str, object]:
        """The tool in the form of OpenAI's `tools`."""
        arguments = {"type": "object", "properties": dict(self.parameters), "required": [*self.parameters]}
        function = {"name": self.name, "description": self.description, "parameters": arguments}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, object]) -> None:
        """ToolError unless the arguments are those of the schema."""
        if arguments.keys() != self.parameters.keys():
            wanted = ", ".join(self.parameters) or "no arguments"
            raise ToolError(f"{self.name}: wanted {wanted}, got {', '.join(arguments)[:80] or 'no arguments'}")
        for name, schema in self.parameters.items():
            kind, value = schema.get("type"), arguments[name]
            fits = isinstance(value, _TYPES.get(kind, object))
            if not fits or (isinstance(value, bool) and kind != "boolean"):
                raise ToolError(f"{self.name}: wanted {name} of type {kind}, got {type(value).__name__}")


@dataclass(frozen=True)
class ToolUse:
    """An environment of tools.

    Attributes:
      tools: the tools that may be called.
      parse: finds the calls in a message: `parse_hermes`, `parse_brackets` or your own.
      call_reward: the reward of a turn for each of its calls that a tool has answered.
      failure_reward: for each of its calls that has failed.
      most_calls: of one message; further calls fail.
      longest_reply: characters of a tool's reply; the rest is cut off.
      error: the reply to a call that has failed; `{}` is the reason.
    """

    tools: Annotated[tuple[Tool, ...], NOT_EMPTY]
    parse: Callable[[str], list[Call | Malformed]] = parse_hermes
    call_reward: float = 0.0
    failure_reward: float = 0.0
    most_calls: PositiveInt = 8
    longest_reply: PositiveInt = 4000
    error: Annotated[str, NOT_EMPTY] = "error: {}"

    def schemas(self) -> list[dict[str, object]]:
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
        replies: list[Message] = []
        failures = 0
        for number, call in enumerate(calls):
            try:
                if number >= self.most_calls:
                    raise ToolError(f"wanted at most {self.most_calls} calls")
                text = self._call(call)
            except ToolError as error:
                text, failures = self.error.replace("{}", str(error)), failures + 1
            end = "…" if len(text) > self.longest_reply else ""
            replies.append({"role": "tool", "content": text[: self.longest_reply] + end})
        reward = self.call_reward * (len(calls) - failures) + self.failure_reward * failures
        return Step(state, replies, reward, metrics={"tool_calls": len(calls), "tool_failures": failures})

    def _call(self, call: Call | Malformed) -> str:
        """A tool's reply. ToolError if the policy got the call wrong."""
        if isinstance(call, Malformed):
            raise ToolError(call.reason)
        for tool in self.tools:
            if tool.name == call.name:
                tool.check(call.arguments)
                return str(tool.run(**call.arguments))
        names = ", ".join(tool.name for tool in self.tools)
        raise ToolError(f"wanted one of the tools {names}, got {call.name[:80]!r}")
