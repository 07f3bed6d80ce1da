"""An environment with tools: the policy calls tools until a message has no call, which is its answer.

    environment=ToolUse(tools=(calculator(),))

The experiment's reward grades the answer. A call that cannot be parsed, names no tool or has wrong arguments gets an
error message as its reply, and the conversation continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from gspax.config.protocols import Message, Problem, Step
from gspax.config.ranges import NOT_EMPTY, PositiveInt
from gspax.data.chat import split_thinking
from gspax.data.problem import chat_of
from gspax.errors import UserError
from gspax.rewards.calls import concurrent
from gspax.rewards.environments.tool_calls import Call, Malformed, parse_hermes, types_of

_TYPES: dict[object, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """Raised for a wrong call by the policy; its message is the tool's reply."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: the name that the policy writes.
      description: shown by the chat template.
      run: takes the arguments as keywords and returns a text. A `ToolError` is the policy's mistake; any other
        exception is a failure of the tool, which ends the conversation and is counted.
      parameters: a JSON schema of the arguments, `{"type": "object", "properties": {...}, "required": [...]}`, in which
        arguments that are not required are optional; or the schemas of the arguments by name, all of them required.
    """

    name: str
    description: str
    run: Callable[..., str]
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where, full = f"tool {self.name}: parameters", self.parameters.get("type") == "object"
        properties = self.parameters.get("properties", {}) if full else self.parameters
        for name, schema in properties.items() if isinstance(properties, Mapping) else [("properties", properties)]:
            if not isinstance(schema, Mapping):
                raise UserError(f"{where}: wanted a JSON schema for each argument, got {schema!r:.80} for {name!r}")
            if unknown := [kind for kind in types_of(schema) if kind not in _TYPES]:
                wanted = ", ".join(map(str, _TYPES))
                raise UserError(f"{where}: wanted one of the types {wanted} for {name!r}, got {unknown[0]!r:.80}")
        required = self.required
        if isinstance(required, str) or not {*required} <= properties.keys():
            raise UserError(f"{where}: wanted `required` to list arguments, got {required!r:.80}")

    @property
    def properties(self) -> Mapping[str, Mapping[str, object]]:
        """The schemas of the arguments by name."""
        full = self.parameters.get("type") == "object"
        return self.parameters.get("properties", {}) if full else self.parameters

    @property
    def required(self) -> Sequence[str]:
        """The names of the arguments that every call must have."""
        full = self.parameters.get("type") == "object"
        return self.parameters.get("required", ()) if full else [*self.parameters]

    def schema(self) -> dict[str, object]:
        """Return the tool in the form of OpenAI's `tools`."""
        arguments = {"type": "object", "properties": dict(self.properties), "required": [*self.required]}
        if self.parameters.get("type") == "object":
            arguments = {**arguments, **self.parameters}
        function = {"name": self.name, "description": self.description, "parameters": arguments}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise a ToolError unless the arguments fit the schema. Elements of lists and objects are not checked."""
        if not {*self.required} <= arguments.keys() <= self.properties.keys():
            optional = [f"{name} (optional)" for name in self.properties if name not in self.required]
            wanted = ", ".join([*self.required, *optional]) or "no arguments"
            raise ToolError(f"{self.name}: wanted {wanted}, got {', '.join(arguments)[:80] or 'no arguments'}")
        for name, value in arguments.items():
            schema = self.properties[name]
            kinds = types_of(schema)
            fits = any(
                isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind != "boolean")
                for kind in kinds
            )
            if kinds and not fits:
                kind = " or ".join(map(str, kinds))
                raise ToolError(f"{self.name}: wanted {name} of type {kind}, got {type(value).__name__}")
            choices = schema.get("enum")
            if isinstance(choices, Sequence) and value not in choices:
                raise ToolError(f"{self.name}: wanted {name} to be one of {str([*choices])[:200]}, got {value!r:.80}")


@dataclass(frozen=True)
class ToolUse:
    """An environment in which the policy calls tools.

    Attributes:
      tools: the tools that may be called.
      parse: finds the calls in a message: one of `gspax.rewards.environments` that reads what the model's template
        writes (`parse_hermes`, `parse_llama`, `parse_mistral` ...), or your own.
      call_reward: the reward of a turn for each call that a tool answered.
      failure_reward: the reward of a turn for each call that failed.
      most_calls: the maximum number of calls in one message; further calls fail.
      longest_reply: characters of a tool's reply; the rest is cut off.
      error: the reply to a failed call; `{}` is the reason.
    """

    tools: Annotated[tuple[Tool, ...], NOT_EMPTY]
    parse: Callable[[str], list[Call | Malformed]] = parse_hermes
    call_reward: float = 0.0
    failure_reward: float = 0.0
    most_calls: PositiveInt = 8
    longest_reply: PositiveInt = 4000
    error: Annotated[str, NOT_EMPTY] = "error: {}"

    def schemas(self) -> list[dict[str, object]]:
        """Return the tools for a chat template."""
        return [tool.schema() for tool in self.tools]

    def reset(self, problem: Problem) -> tuple[None, list[Message]]:
        """Return the problem as a chat, with no state."""
        return None, chat_of(problem)

    @concurrent(8)
    def step(self, state: None, message: str) -> Step:
        """Run the calls of a message and return the replies; done if there are none. Calls in thinking do not count."""
        calls = self.parse(split_thinking(message)[1])
        if not calls:
            return Step(state, done=True)
        replies: list[Message] = []
        names, failures = {tool.name for tool in self.tools}, 0
        for number, call in enumerate(calls):
            try:
                if number >= self.most_calls:
                    raise ToolError(f"wanted at most {self.most_calls} calls")
                text = self._call(call)
            except ToolError as error:
                text, failures = self.error.replace("{}", str(error)), failures + 1
            end = "…" if len(text) > self.longest_reply else ""
            named = {"name": call.name} if isinstance(call, Call) and call.name in names else {}
            replies.append({"role": "tool", "content": text[: self.longest_reply] + end, **named})
        reward = self.call_reward * (len(calls) - failures) + self.failure_reward * failures
        return Step(state, replies, reward, metrics={"tool_calls": len(calls), "tool_failures": failures})

    def _call(self, call: Call | Malformed) -> str:
        """Run a call and return the tool's reply. ToolError if the policy got the call wrong."""
        if isinstance(call, Malformed):
            raise ToolError(call.reason)
        for tool in self.tools:
            if tool.name == call.name:
                arguments = call.typed(tool.properties)
                tool.check(arguments)
                return str(tool.run(**arguments))
        names = ", ".join(tool.name for tool in self.tools)
        raise ToolError(f"wanted one of the tools {names}, got {call.name[:80]!r}")
