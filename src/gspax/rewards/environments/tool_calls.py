"""Tool calls in a message: how a model writes them, and what is wrong with one that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BRACKETS = re.compile(r"\[([^\[\]]*)(\]?)")


@dataclass(frozen=True)
class Call:
    """A call of a tool by its name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read."""

    reason: str  # a sentence for the policy


def parse_hermes(text: str) -> list[Call | Malformed]:
    """The calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen3 write them.

    >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1})]
    """
    calls: list[Call | Malformed] = []
    for part in text.split(OPEN)[1:]:
        body, close, _ = part.partition(CLOSE)
        calls.append(_read(body) if close else Malformed(f"wanted {CLOSE} after a tool call, got none"))
    return calls


def parse_brackets(text: str, *, tool: str = "calculator", argument: str = "expression") -> list[Call | Malformed]:
    """The calls `[...]` of one tool with one argument, for small tokenizers.

    >>> parse_brackets("[1+2]")
    [Call(name='calculator', arguments={'expression': '1+2'})]
    """
    found = _BRACKETS.findall(text)
    return [Call(tool, {argument: body}) if close else Malformed("wanted ] after a call") for body, close in found]


def _read(body: str) -> Call | Malformed:
    wanted = 'wanted {"name": ..., "arguments": {...}} as JSON'
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Malformed(f"{wanted}, got invalid JSON: {str(error)[:80]}")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return Malformed(f"{wanted}, got no name")
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        return Malformed(f"{wanted}, got arguments that are no object")
    return Call(given["name"], arguments)
