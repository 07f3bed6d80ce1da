"""Reads the tool calls in a message: JSON or XML in `<tool_call>` tags, or brackets.

`family_calls` reads the formats of other families. Every parser is a function from a text to its calls, in order, with
a `Malformed` for a call that cannot be read, and takes time linear in the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_WANTED = 'wanted {"name": ..., "arguments": {...}} as JSON'
_NAMES = ("name", "tool_name", "tool", "function", "action")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "action_input")
_IGNORED = ("id", "type", "index", "tool_call_id")  # keys with which other frameworks number calls
DECODER = json.JSONDecoder(strict=False)  # strings may have line breaks
SPACE = re.compile(r"\s*")
_OPENING = re.compile(r"\s*(?:(?:```|~~~)\w*\s*)?")  # Markdown inside a tag
_CLOSING = re.compile(r"(?:(?:```|~~~)\s*)?")
START = re.compile(r"<tool_call>\s*<function=|<tool_call>|<function=")
_FUNCTION = re.compile(r"([^<>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s{0,100}(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_BRACKETS = re.compile(r"\[([^\[\]]*)(\]?)")


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
            value, end = DECODER.raw_decode(text, end)
            values += value if isinstance(value, list) and value else [value]
            end = SPACE.match(text, end).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        problem = str(error)[:80]
    after = _CLOSING.match(text, end).end()  # type: ignore[union-attr]
    if not problem and text.startswith(CLOSE, after):
        return [read_call(each) for each in values], after + len(CLOSE)
    if not problem and text[after : after + 1] and not text.startswith(OPEN, after):
        problem = f"text after the call: {text[after : after + 20]!r}"
    if close < 0:
        return [Malformed(f"wanted {CLOSE} after a tool call, got none")], max(stop, begin)
    return [Malformed(f"{_WANTED}, got invalid JSON: {problem}")], close + len(CLOSE)


def read_call(call: object) -> Call | Malformed:
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
    if arguments is None or arguments == "":  # of a tool without arguments
        arguments = {}
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
    if text.startswith("{", SPACE.match(text, position).end()):  # type: ignore[union-attr]
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
        arguments, end = DECODER.raw_decode(text, SPACE.match(text, position).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        return Malformed(f"wanted an object after {FUNCTION}{name}>, got invalid JSON: {str(error)[:80]}"), position
    close = _FUNCTION_END.match(text, end)
    if close is None:
        return Malformed("wanted </function> after a call, got none"), end
    return Call(name, arguments), close.end()


def _read_text(text: str, schema: Mapping[str, object]) -> object:
    """Convert a text to the value that a schema calls for; return the text if that fails."""
    kinds = types_of(schema)
    if "string" in kinds:
        return None if "null" in kinds and text.strip() in ("null", "None") else text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def types_of(schema: Mapping[str, object]) -> list[object]:
    """Return the types that a schema permits; empty if it does not say. A reference (`$ref`) does not.

    >>> types_of({"anyOf": [{"type": "string"}, {"type": "null"}]})  # as pydantic writes an optional text
    ['string', 'null']
    """
    if (kind := schema.get("type")) is not None:
        return [*kind] if isinstance(kind, list | tuple) else [kind]
    for either in ("anyOf", "oneOf"):
        if isinstance(schemas := schema.get(either), list | tuple):
            each = [types_of(one) if isinstance(one, Mapping) else [] for one in schemas]
            return [kind for kinds in each for kind in kinds] if all(each) else []
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    texts = isinstance(choices, list | tuple) and choices and all(isinstance(choice, str) for choice in choices)
    return ["string"] if texts else []


def parse_brackets(text: str, *, tool: str = "calculator", argument: str = "expression") -> list[Call | Malformed]:
    """Parse the calls `[...]` of one tool with one argument, for small tokenizers.

    >>> parse_brackets("[1+2]")
    [Call(name='calculator', arguments={'expression': '1+2'}, as_texts=False)]
    """
    return [
        Call(tool, {argument: body}) if close else Malformed("wanted ] after a call")
        for body, close in _BRACKETS.findall(text)
    ]
