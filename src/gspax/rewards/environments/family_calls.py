"""Reads tool calls as the templates of several families write them; `tool_calls` has the parsers of Hermes and Qwen.

`PARSERS` are all of these parsers. The dry run names the first that reads what a model's template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gspax.rewards.environments.tool_calls import DECODER, SPACE, START, Call, Malformed, parse_hermes, read_call

_PYTHON = "<|python_tag|>"
_LISTS = re.compile(r"<tool_calls>|<\|tool_call\|>|<TOOLCALL>")
_BETWEEN = re.compile(r"[\s;]*")
_NAME = r"[\w.\-]{1,200}"
_MISTRAL = re.compile(rf"\[TOOL_CALLS\]\s*(?:({_NAME})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{{))?")
_BAR, _LOW = "[|｜]", "[_▁]"  # as DeepSeek's tokens have them, and in ASCII
_DEEPSEEK = re.compile(rf"<{_BAR}tool{_LOW}call{_LOW}begin{_BAR}>")
_DEEPSEEK_NAME = re.compile(
    rf"\s*(?:function<{_BAR}tool{_LOW}sep{_BAR}>)?\s*(?:functions\.)?({_NAME}?)(?::\d{{1,6}})?"
    rf"\s*(?:<{_BAR}tool{_LOW}(?:sep|call{_LOW}argument{_LOW}begin){_BAR}>\s*|```(?:json)?\s*)"
)
_DEEPSEEK_END = re.compile(rf"\s*(?:```\s*)?<{_BAR}tool{_LOW}call{_LOW}end{_BAR}>")
_GLM = re.compile(r"<tool_call>\s*")
_GLM_NAME = re.compile(rf"({_NAME})\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY, _GLM_VALUE_END, _GLM_END = (
    re.compile(r"\s*<arg_key>\s*([^<>]{1,200}?)\s*</arg_key>\s*<arg_value>"),
    re.compile(r"</arg_value>(?=\s{0,100}(?:<arg_key>|</tool_call>))"),
    re.compile(r"\s*</tool_call>"),
)
_INVOKE = re.compile(r"<invoke name=\"([^\"<>\n]{1,200})\">")
_INVOKE_KEY, _INVOKE_VALUE_END, _INVOKE_END = (
    re.compile(r"\s*<parameter name=\"([^\"<>\n]{1,200})\">"),
    re.compile(r"</parameter>(?=\s{0,100}(?:<parameter name=|</invoke>))"),
    re.compile(r"\s*</invoke>"),
)
_HARMONY = re.compile(rf"\bto=functions\.({_NAME})((?:(?!<\|message\|>).){{0,200}})<\|message\|>", re.DOTALL)
_GEMMA = re.compile(r"<\|tool_call>")
_GEMMA_NAME = re.compile(rf"\s*call:\s*({_NAME})\s*(?=\{{)")
_GEMMA_PART = re.compile(  # a text, one in JSON, a mark, another value or name; a text that does not end takes the rest
    r'<\|"\|>(.*?)(?:<\|"\|>|\Z)|("(?:[^"\\]|\\.)*(?:"|\\?\Z))|([{}\[\],:])|([^{}\[\],:<"]+|.)', re.DOTALL
)
_GEMMA_END = re.compile(r"\s*<tool_call\|>")
_BEGIN = re.compile(  # of the calls of any family, with the tag around them
    rf"<{_BAR}tool{_LOW}calls{_LOW}(?:section{_LOW})?begin{_BAR}>|<minimax:tool_call>"
    r"|(?:<\|start\|>assistant)?(?:<\|channel\|>\w+ ?)?\bto=functions\.|\[TOOL_CALLS\]|<\|python_tag\|>|"
    + "|".join(mark.pattern for mark in (START, _LISTS, _DEEPSEEK, _INVOKE, _GEMMA))
)
_LITERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")


def parse_llama(text: str) -> list[Call | Malformed]:
    """Parse a message that is a call in JSON, as in Llama 3.1, 3.2 and 3.3; `;` separates several.

    `<|python_tag|>` may precede them. JSON without a name and arguments is an answer. A message that begins otherwise
    is read by `parse_hermes`, which reads `<function=...>` of Llama 3.

    >>> parse_llama('{"name": "add", "parameters": {"a": 1}}')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    >>> parse_llama('{"sum": 3}')
    []
    """
    message = text.strip()
    marked, message = message.startswith(_PYTHON), message.removeprefix(_PYTHON).lstrip()
    if not message.startswith("{"):
        return parse_hermes(text)
    calls: list[Call | Malformed] = []
    position = 0
    while position < len(message):
        value, position = _read_json(message, position, "a call")
        if isinstance(value, Malformed):
            return [*calls, value] if calls or marked or '"name"' in message[:40] else []
        if not marked and not (isinstance(value, dict) and isinstance(value.get("name"), str) and len(value) > 1):
            return calls
        calls.append(read_call(value))
        position = _BETWEEN.match(message, position).end()  # type: ignore[union-attr]
    return calls


def parse_list(text: str) -> list[Call | Malformed]:
    """Parse a list of calls in JSON: after `<tool_calls>` as in Hunyuan, `<|tool_call|>` as in Granite 3, or alone.

    A message that is a list of anything else is an answer. Calls without the brackets may follow each other.

    >>> parse_list('<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    >>> parse_list("[1, 2]")
    []
    """
    message = text.strip()
    if message.startswith("["):
        values, _ = _read_json(message, 0, "a message")
        named = (
            isinstance(values, list) and values and all(isinstance(each, dict) and "name" in each for each in values)
        )
        return [read_call(each) for each in values] if named else []
    calls: list[Call | Malformed] = []
    position = 0
    while match := _LISTS.search(message, position):
        position = SPACE.match(message, match.end()).end()  # type: ignore[union-attr]
        count = len(calls)
        while len(calls) == count or message.startswith("{", position):
            value, position = _read_json(message, position, match[0])
            if isinstance(value, Malformed):
                calls.append(value)
                break
            calls += map(read_call, value if isinstance(value, list) and value else [value])
            position = SPACE.match(message, position).end()  # type: ignore[union-attr]
    return calls


def parse_mistral(text: str) -> list[Call | Malformed]:
    """Parse the calls after `[TOOL_CALLS]`: a list in JSON, or, from version 11 of the tokenizer, a name and arguments.

    >>> parse_mistral('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    >>> parse_mistral('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}')[1].arguments
    {'a': 2}
    """
    calls: list[Call | Malformed] = []
    position = 0
    while match := _MISTRAL.search(text, position):
        value, position = _read_json(text, match.end(), "[TOOL_CALLS]")
        if isinstance(value, Malformed):
            calls.append(value)
        elif match[1] is not None:
            calls.append(read_call({"name": match[1], "arguments": value}))
        else:
            calls += map(read_call, value if isinstance(value, list) and value else [value])
    return calls


def parse_glm(text: str) -> list[Call | Malformed]:
    """Parse `<tool_call>NAME`, `<arg_key>` and `<arg_value>`, as in GLM-4.5 and later; values may hold the tags.

    >>> parse_glm("<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>")
    [Call(name='add', arguments={'a': '1'}, as_texts=True)]
    """

    def read(match: re.Match[str]) -> tuple[Call | Malformed, int]:
        name = _GLM_NAME.match(text, match.end())
        if name is None:
            return Malformed("wanted the name of a tool and <arg_key> after <tool_call>, got neither"), match.end()
        return _read_values(text, name, _GLM_KEY, _GLM_VALUE_END, _GLM_END)

    return _read_calls(_GLM, text, read)


def parse_minimax(text: str) -> list[Call | Malformed]:
    """Parse `<invoke name="NAME">` with `<parameter name="ARGUMENT">`, as in MiniMax-M2; values may hold the tags.

    >>> parse_minimax('<invoke name="add"><parameter name="a">1</parameter></invoke>')
    [Call(name='add', arguments={'a': '1'}, as_texts=True)]
    """

    def read(match: re.Match[str]) -> tuple[Call | Malformed, int]:
        return _read_values(text, match, _INVOKE_KEY, _INVOKE_VALUE_END, _INVOKE_END)

    return _read_calls(_INVOKE, text, read)


def parse_deepseek(text: str) -> list[Call | Malformed]:
    """Parse the calls between the tokens of DeepSeek-V3, R1 and V3.1, and of Kimi-K2; strings may hold the tokens.

    >>> parse_deepseek('<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    """

    def read(match: re.Match[str]) -> tuple[Call | Malformed, int]:
        name = _DEEPSEEK_NAME.match(text, match.end())
        if name is None:
            wanted = f"wanted the name of a tool and its arguments after {match[0]}"
            return Malformed(f"{wanted}, got neither"), match.end()
        value, position = _read_json(text, name.end(), match[0])
        return _end_call(text, position, name[1], value, _DEEPSEEK_END, match[0].replace("begin", "end"))

    return _read_calls(_DEEPSEEK, text, read)


def parse_harmony(text: str) -> list[Call | Malformed]:
    """Parse the calls `to=functions.NAME` of gpt-oss, whose messages are JSON.

    >>> parse_harmony('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}')
    [Call(name='add', arguments={'a': 1}, as_texts=False)]
    """

    def read(match: re.Match[str]) -> tuple[Call | Malformed, int]:
        start = SPACE.match(text, match.end()).end()  # type: ignore[union-attr]
        value, position = _read_json(text, start, "<|message|>")
        return _as_call(match[1], value), position

    return _read_calls(_HARMONY, text, read)


def parse_gemma(text: str) -> list[Call | Malformed]:
    """Parse the calls `call:NAME{ARGUMENT:value}` of Gemma 4, whose texts are between `<|"|>`; they may hold the tags.

    >>> parse_gemma('<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>')
    [Call(name='add', arguments={'a': 1, 'b': 'two'}, as_texts=False)]
    """

    def read(match: re.Match[str]) -> tuple[Call | Malformed, int]:
        name = _GEMMA_NAME.match(text, match.end())
        if name is None:
            return Malformed("wanted call:NAME{...} after <|tool_call>, got no name or no {"), match.end()
        written, position = _as_json(text, name.end())
        value, _ = _read_json(written, 0, match[0])
        return _end_call(text, position, name[1], value, _GEMMA_END, "<tool_call|>")

    return _read_calls(_GEMMA, text, read)


def _as_json(text: str, start: int) -> tuple[str, int]:
    """Rewrite an object of a call of Gemma 4 as JSON, from its brace at `start`; return the position after it too."""
    parts, depth, position = list[str](), 0, start
    while match := _GEMMA_PART.match(text, position):
        position = match.end()
        quoted, string, mark, word = match.groups()
        if mark:
            parts.append(mark)
            depth += (mark in "{[") - (mark in "}]")
            if not depth:
                break
        elif quoted is not None or not (string or not word.strip() or _LITERAL.fullmatch(word.strip())):
            parts.append(json.dumps(word.strip() if quoted is None else quoted))
        else:
            parts.append(string or word)
    return "".join(parts), position


PARSERS = (
    *(parse_hermes, parse_llama, parse_mistral, parse_glm, parse_minimax, parse_deepseek, parse_harmony),
    *(parse_gemma, parse_list),
)


def before_calls(message: str) -> str:
    """Return what a message that has calls says before the first of them.

    >>> before_calls('Let me see. [TOOL_CALLS]add[ARGS]{"a": 1}')
    'Let me see.'
    >>> before_calls('{"name": "add", "parameters": {"a": 1}}')  # the message is a call
    ''
    """
    value, _ = _read_json(message, SPACE.match(message).end(), "")  # type: ignore[union-attr]
    first = value[0] if isinstance(value, list) and value else value
    return "" if isinstance(first, dict) else _BEGIN.split(message, maxsplit=1)[0].strip()


def _read_calls(
    begin: re.Pattern[str], text: str, read: Callable[[re.Match[str]], tuple[Call | Malformed, int]]
) -> list[Call | Malformed]:
    """Read the calls of a text; `read` is called with the beginning of each, and returns the position after it too."""
    calls, position = list[Call | Malformed](), 0
    while match := begin.search(text, position):
        call, position = read(match)
        calls.append(call)
    return calls


def _end_call(
    text: str, position: int, name: str, arguments: object, end: re.Pattern[str], wanted: str
) -> tuple[Call | Malformed, int]:
    """Make a call that must end at a position; return it and the position after its end."""
    call, found = _as_call(name, arguments), end.match(text, position)
    if found is None and not isinstance(arguments, Malformed):
        call = Malformed(f"wanted {wanted} after a call, got none")
    return call, found.end() if found else position


def _as_call(name: str, arguments: object) -> Call | Malformed:
    return arguments if isinstance(arguments, Malformed) else read_call({"name": name, "arguments": arguments})


def _read_values(
    text: str, name: re.Match[str], key: re.Pattern[str], value_end: re.Pattern[str], end: re.Pattern[str]
) -> tuple[Call | Malformed, int]:
    """Read the arguments in tags after a call's name; return the call and the position after it."""
    position, arguments = name.end(), dict[str, object]()
    while opened := key.match(text, position):
        closed = value_end.search(text, opened.end())
        if closed is None:
            return Malformed(f"wanted the end of the value of {opened[1][:80]}, got none"), len(text)
        arguments[opened[1]] = text[opened.end() : closed.start()].removeprefix("\n").removesuffix("\n")
        position = closed.end()
    if (closed := end.match(text, position)) is None:
        return Malformed(f"wanted another argument or the end of the call of {name[1][:80]}, got neither"), position
    return Call(name[1], arguments, as_texts=True), closed.end()


def _read_json(text: str, position: int, before: str) -> tuple[Any, int]:
    """Read a JSON value that follows `before`; return it and the position after it, or `Malformed` and this one."""
    try:
        return DECODER.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        return Malformed(f"wanted JSON after {before}, got invalid JSON: {str(error)[:80]}"), position
