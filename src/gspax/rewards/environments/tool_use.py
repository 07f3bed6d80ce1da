"""An environment with tools: the policy calls tools until a message has no call, which is its answer.

    environment=ToolUse(tools=(calculator(),))

The experiment's reward grades the answer. A call that cannot be parsed, names no tool or has wrong arguments gets an
error message as its reply, and the conversation continues.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from gspax.config.protocols import Message, Problem, Step
from gspax.config.ranges import NOT_EMPTY, PositiveInt
from gspax.data.chat import split_thinking
from gspax.data.problem import chat_of
from gspax.errors import UserError
from gspax.rewards.calls import concurrent

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_WANTED = 'wanted {"name": ..., "arguments": {...}} as JSON'
_NAMES = ("name", "tool_name", "tool", "function", "action")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "action_input")
_IGNORED = ("id", "type", "index", "tool_call_id")  # keys with which other frameworks number calls
_DECODER = json.JSONDecoder(strict=False)  # strings may have line breaks
_SPACE = re.compile(r"\s*")
_OPENING, _CLOSING = re.compile(r"\s*(?:```(?:json)?\s*)?"), re.compile(r"(?:```\s*)?")  # Markdown inside a tag
START = re.compile(r"<tool_call>\s*<function=|<tool_call>|<function=")
_FUNCTION = re.compile(r"([^<>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s{0,100}(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_BRACKETS = re.compile(r"\[([^\[\]]*)(\]?)")
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
class Call:
    """A call of a tool by name.

    Attributes:
      name: the name of the tool.
      arguments: the arguments by name.
      as_texts: whether the arguments are texts, as in XML calls, to be converted by the tool's schema.
    """

    name: str
    arguments: Mapping[str, object]
    as_texts: bool = False

    def typed(self, properties: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
        """Convert the arguments to the types of these schemas; a text that cannot be converted stays a text."""
        if not self.as_texts:
            return self.arguments
        return {name: _read_text(str(text), properties.get(name, {})) for name, text in self.arguments.items()}


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be parsed."""

    reason: str  # a sentence for the policy


def parse_hermes(text: str) -> list[Call | Malformed]:
    """Parse the calls in `<tool_call>` tags: JSON as in Hermes and Qwen3, or XML as in Qwen3-Coder and Qwen3.5.

    In JSON the arguments may have the key that other frameworks use, and a tag may contain several calls, in a list or
    in sequence, and a code fence. In XML the outer tag may be missing, and a function's body may be JSON. Strings may
    contain the tags.

    >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    >>> parse_hermes("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>")
    [Call(name='add', arguments={'a': '1'}, as_texts=True)]
    """
    calls: list[Call | Malformed] = []
    position = 0
    while match := START.search(text, position):
        if match.group().endswith("="):
            call, position = _read_function(text, match.end())
            calls.append(call)
        else:
            found, position = _read_json(text, match.end())
            calls += found
    return calls


def _read_json(text: str, start: int) -> tuple[list[Call | Malformed], int]:
    """Read the calls in JSON from `start`, after a tag; return them and the position after their end."""
    stop = text.find(OPEN, start)
    stop = len(text) if stop < 0 else stop
    close = text.find(CLOSE, start, stop)
    begin = end = _OPENING.match(text, start).end()  # type: ignore[union-attr]
    values, problem = list[Any](), ""
    try:
        while not values or text.startswith("{", end):  # several calls may share a tag
            value, end = _DECODER.raw_decode(text, end)
            values += value if isinstance(value, list) and value else [value]
            end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        problem = str(error)[:80]
    after = _CLOSING.match(text, end).end()  # type: ignore[union-attr]
    if not problem and text.startswith(CLOSE, after):
        return [_read_call(each) for each in values], after + len(CLOSE)
    if not problem and text[after : after + 1] and not text.startswith(OPEN, after):
        problem = f"text after the call: {text[after : after + 20]!r}"
    if close < 0:
        return [Malformed(f"wanted {CLOSE} after a tool call, got none")], max(stop, begin)
    return [Malformed(f"{_WANTED}, got invalid JSON: {problem}")], close + len(CLOSE)


def _read_call(call: object) -> Call | Malformed:
    """Convert an object to a call. The keys of its name and arguments may be those of several frameworks."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # as in OpenAI's tool_calls
        call = {name: value for name, value in call.items() if name != "function"} | call["function"]
    if not isinstance(call, dict):
        return Malformed(f"{_WANTED}, got no name")
    names, given = [[key for key in keys if key in call] for keys in (_NAMES, _ARGUMENTS)]
    if len(names) != 1 or not isinstance(call[names[0]], str):
        return Malformed(f"{_WANTED}, got {'two names' if len(names) > 1 else 'no name'}")
    if unknown := call.keys() - {*names, *_ARGUMENTS, *_IGNORED}:
        return Malformed(f"{_WANTED}, got the unknown key {', '.join(sorted(map(repr, unknown)))[:80]}")
    if len(given) > 1:
        return Malformed(f"{_WANTED}, got {' and '.join(given)}")
    arguments = call[given[0]] if given else {}
    if isinstance(arguments, str):  # JSON in a text, as in OpenAI's tool_calls
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, strict=False)
    if not isinstance(arguments, dict):
        return Malformed(f"{_WANTED}, got arguments that are no object")
    return Call(call[names[0]], arguments)


def _read_function(text: str, start: int) -> tuple[Call | Malformed, int]:
    """Read the call `<function=name>...</function>` whose name begins at `start`; return the position after it too."""
    match = _FUNCTION.match(text, start)
    if match is None:
        return Malformed(f"wanted > after {FUNCTION}NAME, got none"), start
    name, position, arguments = match[1].strip(" \t\"'"), match.end(), dict[str, object]()
    if text.startswith("{", _SPACE.match(text, position).end()):  # type: ignore[union-attr]
        return _read_object(text, name, position)
    while parameter := _PARAMETER.match(text, position):
        end = _PARAMETER_END.search(text, parameter.end())
        if end is None:
            return Malformed(f"wanted </parameter> after the parameter {parameter[1][:80]}, got none"), len(text)
        value = text[parameter.end() : end.start()]
        arguments[parameter[1].strip(" \t\"'")] = value.removeprefix("\n").removesuffix("\n")
        position = end.end()
    close = _FUNCTION_END.match(text, position)
    if close is None:
        return Malformed("wanted <parameter=NAME> or </function> in a call, got neither"), position
    return Call(name, arguments, as_texts=True), close.end()


def _read_object(text: str, name: str, position: int) -> tuple[Call | Malformed, int]:
    """Read a function whose body is an object, as Llama 3 may write it; return the position after it too."""
    try:
        arguments, end = _DECODER.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        return Malformed(f"wanted an object after {FUNCTION}{name}>, got invalid JSON: {str(error)[:80]}"), position
    close = _FUNCTION_END.match(text, end)
    if close is None:
        return Malformed("wanted </function> after a call, got none"), end
    return Call(name, arguments), close.end()


def _read_text(text: str, schema: Mapping[str, object]) -> object:
    """Convert a text to the value that a schema calls for; return the text if that fails."""
    kinds = _kinds(schema)
    if "string" in kinds:
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _kinds(schema: Mapping[str, object]) -> list[object]:
    """Return the types that a schema permits; empty if it does not say."""
    kind = schema.get("type")
    return [*kind] if isinstance(kind, list | tuple) else [] if kind is None else [kind]


def parse_brackets(text: str, *, tool: str = "calculator", argument: str = "expression") -> list[Call | Malformed]:
    """Parse the calls `[...]` of one tool with one argument, for small tokenizers.

    >>> parse_brackets("[1+2]")
    [Call(name='calculator', arguments={'expression': '1+2'}, as_texts=False)]
    """
    return [
        Call(tool, {argument: body}) if close else Malformed("wanted ] after a call")
        for body, close in _BRACKETS.findall(text)
    ]


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
            if unknown := [kind for kind in _kinds(schema) if kind not in _TYPES]:
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
            kinds = _kinds(schema)
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
      parse: finds the calls in a message: `parse_hermes`, `parse_brackets` or your own.
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
