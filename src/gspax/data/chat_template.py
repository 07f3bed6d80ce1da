"""Chat templates, analyzed by rendering them: where a turn ends, whether a prompt opens thinking, how tools, their
calls and replies look, and what a conversation keeps. No other module knows this.

A tokenizer's files do not say it: `eos_token` often is not the token that ends a turn. So a message is rendered with
a marker as its content, and the text that the template writes around the marker is read.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspax.config.protocols import Message, Tokenizer
from gspax.data import templates
from gspax.data.files import Json
from gspax.data.tokenizer import read_settings, special_tokens
from gspax.errors import UserError

OPEN, CLOSE = "<think>", "</think>"
THINKING = {  # what thinking begins and ends with, by what it begins with; all but the first only begin a message
    OPEN: CLOSE,
    "[THINK]": "[/THINK]",  # Magistral
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
    "<|channel|>commentary<|message|>": "<|end|>",  # its preamble of calls
}
CLOCK = "strftime_now"  # the function with which a template prints the time
_CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(["'])(.*?)\1\s*\)""")
_MARK = "qzmarkqz"  # a marker that no template contains and every template copies
_REPLY = "qzreply"  # begins the content of a marked reply
_CALLED = "called"  # follows a marker that is the argument of a call
_TAIL = 32  # the most tokens of the start of thinking and the white space after it
Value = int | float | bool | str  # of a template's variable
_WORD = re.compile(r"[^\W\d]\w*")
_GIVEN = {  # variables that have a value already, and what sets them
    **dict.fromkeys(("messages", "add_generation_prompt", "documents"), "the conversation"),
    **dict.fromkeys(("enable_thinking", "thinking"), "thinking"),
    **{"tools": "environment", CLOCK: "date"},
}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thinking, as transformers reads them


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A chat template with its special tokens and settings.

    Attributes:
      where: the folder, for error messages.
      texts: the templates by name, "default" if it is the only one.
      special: the special tokens that the template may refer to, such as `bos_token`.
      added: the texts of the tokenizer's added tokens.
      stops: the texts of the tokenizer's stop ids.
      thinking: the value of the template's `enable_thinking`.
      variables: other variables.
      tools: JSON schemas of a conversation's tools, on which the replies of some templates depend.
    """

    where: str
    texts: Mapping[str, str]
    special: Mapping[str, str]
    added: frozenset[str]
    stops: tuple[str, ...]
    thinking: bool = False
    variables: Mapping[str, Value] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] = ()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = (), *, prompt: bool = True
    ) -> str:
        """Render the chat as text, up to the start of the assistant's turn if `prompt`.

        The arguments of calls are passed as objects, because many templates write JSON into JSON otherwise, and as JSON
        to a template that rejects objects or writes them as Python does; no tools are None, then an empty list.
        UserError if the template rejects the messages, does not end, or needs too much memory.
        """
        name = "tool_use" if tools and "tool_use" in self.texts else "default"
        variables: dict[str, object] = {**self.special, **self.variables, "documents": None}
        variables |= {"add_generation_prompt": prompt, "enable_thinking": self.thinking}
        variables |= {"thinking": self.thinking}  # DeepSeek-V3.1's name for `enable_thinking`
        problem: templates.TemplateError | None = None
        for form in _forms([_as_transformers(message) for message in messages]):
            for given in [[dict(tool) for tool in tools]] if tools else (None, []):
                try:
                    text = templates.render(self.texts[name], variables | {"messages": form, "tools": given})
                    if not any(python in text for python in _objects(form)):
                        return text
                    break
                except templates.TemplateError as error:
                    problem = problem or error
                    if "NoneType" not in str(error):
                        break
        raise UserError(f"the chat template in {self.where} failed: {problem}") from problem

    @functools.cached_property
    def end(self) -> str | None:
        """Return the token after a chat's last message, if that is the assistant's; else after an earlier one.

        None if there is no added token: the template writes text alone.
        """
        after = self._after(prompt=False)
        return self._first_token(after) or self._first_token(self._after([{"role": "user", "content": "?"}]))

    @functools.cached_property
    def opening(self) -> str:
        """Return the beginning of thinking that a prompt already contains: `<think>` with white space, or nothing."""
        return opened_by(self.render([{"role": "user", "content": "?"}]))

    def reply(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the token that ends an assistant's turn before these messages, and the text up to the next turn.

        Before a `tool` message the turn contains calls. UserError if the template rejects the messages, ends the turn
        without a token, or does not write them.
        """
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._written:
            self._check_reply(roles)
            self._written.add(roles)
        return self._reply(messages)

    @functools.cached_property
    def _written(self) -> set[tuple[str, ...]]:
        """The sequences of roles that the template was seen to write in replies."""
        return set()

    def _reply(self, messages: Sequence[Message]) -> tuple[str, str]:
        answers = [message for message in messages if message["role"] == "tool"]
        calls = [
            {"id": _call_id(i), "type": "function", "function": {"name": one.get("name", "tool"), "arguments": {}}}
            for i, one in enumerate(answers)
        ]
        numbers, named = iter(range(len(answers))), list[Message]()
        for message in messages:
            more = {"tool_call_id": _call_id(next(numbers)), "name": "tool"} if message["role"] == "tool" else {}
            named.append({**more, **message})
        problem: UserError | None = None
        for asked in dict.fromkeys((len(calls), min(len(calls), 1), 0)):
            try:
                after = self._after(named, calls[:asked])
            except UserError as error:
                problem = problem or error
                continue
            called = after.startswith(_CALLED)
            if end := self._first_stop(after) if called else self._first_token(after):
                return end, after.partition(end)[2]
            if called:
                raise _no_stop(self, after)
            problem = problem or UserError(
                f"the chat template in {self.where}: wanted a token that ends the turn after the content of an "
                f"assistant's message, got {after[:40]!r}"
            )
        assert problem is not None
        raise problem

    def _check_reply(self, roles: tuple[str, ...]) -> None:
        marked = [{"role": role, "content": f"{_REPLY}{i}qz"} for i, role in enumerate(roles)]
        _, text = self._reply(marked)
        if lost := [message["role"] for message in marked if message["content"] not in text]:
            raise UserError(f"the chat template in {self.where} writes nothing of a message with the role {lost[0]!r}")

    def _after(
        self, messages: Sequence[Message] = (), calls: Sequence[Mapping[str, object]] = (), *, prompt: bool = True
    ) -> str:
        """Return the text after an assistant's message; it begins with `_CALLED` if the message ends with a call."""
        mark = _MARK
        while any(mark in str(value) for message in messages for value in message.values()):
            mark += "q"
        made = [_with_argument(call, lambda _: {"mark": mark + _CALLED}) for call in calls]
        said: Message = {"role": "assistant", "content": mark, **({"tool_calls": made} if made else {})}
        asked: Message = {"role": "user", "content": "?"}
        text = self.render([asked, said, *messages], self.tools, prompt=prompt)
        if made and not text.rpartition(mark)[2].startswith(_CALLED) and mark + _CALLED in text:
            # the template writes the content after the calls and their replies, as Gemma 4's
            text = self.render([asked, {**said, "content": ""}, *messages], self.tools, prompt=prompt)
        before, _, after = text.rpartition(mark)
        if not before:
            raise UserError(f"the chat template in {self.where} writes nothing of an assistant's message")
        return after

    def _first_token(self, text: str) -> str | None:
        """Return the added token that the text begins with after white space, or None."""
        text = text.lstrip()
        return max((token for token in self.added if token.strip() and text.startswith(token)), key=len, default=None)

    def _first_stop(self, text: str) -> str | None:
        """Return the first token that ends a turn in the text before a marked reply, or None."""
        ends, text = {*self.stops, *([self.end] if self.end else [])}, text.partition(_REPLY)[0]
        return min((end for end in ends if end in text), key=text.index, default=None)


def _no_stop(template: ChatTemplate, after: str) -> UserError:
    between = after.partition(_REPLY)[0]
    tokens = sorted((token for token in template.added if token.strip() and token in between), key=between.index)
    return UserError(
        f"the chat template in {template.where}: wanted a stop id between a call and its reply, got "
        f"{', '.join(map(repr, tokens)) or 'no token'}: add one to eos_token_id of its generation_config.json"
    )


def opened_by(text: str) -> str:
    """Return the start of thinking that a text ends with, with the white space after it; empty if there is none."""
    for opening in THINKING:
        _, mark, rest = text.rpartition(opening)
        if mark and not rest.strip():
            return mark + rest
    return ""


def thinking_marks(text: str) -> tuple[str, str]:
    """Return what thinking in a message begins and ends with: `<think>`, or what the message itself begins with."""
    begun = text.lstrip()
    return next(((opening, end) for opening, end in THINKING.items() if begun.startswith(opening)), (OPEN, CLOSE))


def opening_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the start of thinking that a prompt's tokens already contain: `<think>` with white space, or nothing.

    The text of a completion begins with it wherever a completion is decoded, so that rewards, votes, tools and samples
    need not know which templates open thinking, and thinking that is cut off is not taken for an answer.
    """
    tail = [int(i) for i in prompt[-_TAIL:]]
    stops = [place for place, i in enumerate(tail) if i in tokenizer.stop_ids]
    return opened_by(tokenizer.decode(tail[stops[-1] + 1 if stops else 0 :]))


def read_templates(folder: Path, where: str) -> dict[str, str]:
    """Read the chat templates of a folder by name. UserError if there is none."""
    file = folder / "chat_template.jinja"
    found: Json = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    found = found or read_settings(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        return {str(one.get("name")): str(one.get("template")) for one in found if isinstance(one, dict)}
    if not found and not file.is_file():
        raise UserError(
            f"wanted a chat template in {where!r} (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); there is none (hf_tokenizer reads the tokenizer of a base model)"
        )
    return {"default": str(found or "")}


def read_template(
    folder: Path,
    *,
    where: str,
    added: Mapping[str, int],
    stop_ids: Sequence[int],
    thinking: bool,
    date: str | None,
    variables: Mapping[str, Value],
) -> ChatTemplate:
    """Read the chat template of a folder, which then prints `date` as today's date."""
    texts = read_templates(folder, where)
    if "default" not in texts:
        raise UserError(f"the chat template in {where}: wanted one named 'default', got {', '.join(texts)}")
    if date is not None:
        texts = {name: _with_date(text, date) for name, text in texts.items()}
    stops = tuple(text for text, i in added.items() if i in stop_ids)
    return ChatTemplate(where, texts, special_tokens(folder), frozenset(added), stops, thinking, variables)


def prints_date(folder: Path, where: str) -> bool:
    """Return whether a template in the folder prints today's date."""
    return any(f"{CLOCK}(" in text for text in read_templates(folder, where).values())


def check_date(folder: Path, where: str, date: str | None) -> None:
    """Raise a UserError if a template prints today's date and `date` is None."""
    text = "".join(read_templates(folder, where).values())
    if f"{CLOCK}(" in _CLOCK_CALL.sub("", text):
        raise UserError(f"the chat template in {where}: wanted {CLOCK} with a format in quotes, got another call")
    if date is None and prints_date(folder, where):
        raise UserError(
            f"the chat template in {where} prints today's date ({CLOCK}), so that a run resumed on another day would "
            "have other prompts: wanted the day to print, as in hf_chat(..., date='2026-01-31'), got none"
        )


def check_settings(folder: Path, where: str, date: str | None, variables: Mapping[str, Value]) -> None:
    """Raise a UserError if a template lacks the date that it prints, or does not read one of the variables."""
    check_date(folder, where, date)
    words, special = {*_WORD.findall("".join(read_templates(folder, where).values()))}, special_tokens(folder)
    for name, value in variables.items():
        if setter := _GIVEN.get(name, "the tokenizer's configuration" if name in special else None):
            raise UserError(f"variables: wanted names other than {name!r}, which {setter} sets, got {value!r} for it")
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UserError(f"variables: wanted names that the chat template in {where} reads, got {name!r}{hint}")
        if not isinstance(value, int | float | str):
            raise UserError(f"variables: wanted a text, a number, True, or False for {name!r}, got {value!r}")


def _with_date(template: str, date: str) -> str:
    """Replace the calls for the current time by this date. Every call names its format."""
    day = datetime.date.fromisoformat(date)
    return _CLOCK_CALL.sub(lambda call: repr(day.strftime(call[2])), template)


def _as_transformers(message: Message) -> dict[str, object]:
    """Convert a message to what transformers gives a template: no None values, thinking under both of its names."""
    given: dict[str, object] = {name: value for name, value in message.items() if value is not None}
    if thought := next((given[name] for name in _REASONING if name in given), None):
        given = {"thinking": thought, **given, "reasoning_content": thought}
    return given


def _forms(messages: Sequence[Mapping[str, object]]) -> Iterator[list[dict[str, object]]]:
    """Yield the messages, with calls first with their arguments as objects, then as JSON."""
    if not any("tool_calls" in message for message in messages):
        yield [dict(message) for message in messages]
        return
    yield [_with_arguments(message, _to_object) for message in messages]
    yield [_with_arguments(message, _to_text) for message in messages]


def _objects(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arguments of calls that are objects, as Python writes them and JSON does not."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if arguments and isinstance(arguments, Mapping):
                yield str(arguments)


def _with_arguments(message: Mapping[str, object], change: Callable[[object], object]) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence):
        return dict(message)
    return {**message, "tool_calls": [_with_argument(call, change) for call in calls]}


def _with_argument(call: Mapping[str, Any], change: Callable[[object], object]) -> dict[str, object]:
    function = call.get("function", call)
    changed = {**function, "arguments": change(function["arguments"])} if "arguments" in function else function
    return {"type": "function", **call, "function": changed} if "function" in call else changed


def _to_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _to_object(arguments: object) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return arguments


def _call_id(number: int) -> str:
    """Return an id of nine characters, as Mistral's templates require."""
    return f"call{number:05}"


# Used by dry runs


def shows_tools(template: ChatTemplate, tools: Sequence[Mapping[str, object]]) -> bool:
    """Return whether a prompt with tools differs from one without."""
    chat: list[Message] = [{"role": "user", "content": "?"}]
    return template.render(chat, tools) != template.render(chat)


def write_call(
    template: ChatTemplate, name: str, arguments: Mapping[str, object], tools: Sequence[Mapping[str, object]]
) -> str:
    """Return an assistant's message with a call, as the template writes it after a prompt, with what ends it."""
    call = {"id": _call_id(0), "type": "function", "function": {"name": name, "arguments": arguments}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked: Message = {"role": "user", "content": _MARK}
    prompt = template.render([asked], tools).rpartition(_MARK)[2]
    written = template.render([asked, said], tools, prompt=False).rpartition(_MARK)[2]
    return _continued(prompt, written)


def lead_of(template: ChatTemplate, **thinking: str) -> str:
    """Return what the template writes between a prompt and the content of the assistant's message that follows it.

    `thinking` is of this message. Empty if the template writes the message as no continuation of the prompt.
    """
    asked: Message = {"role": "user", "content": "?"}
    said: Message = {"role": "assistant", "content": _MARK, **thinking}
    prompt = template.render([asked], template.tools)
    written = template.render([asked, said], template.tools, prompt=False)
    return written[len(prompt) :].partition(_MARK)[0] if written.startswith(prompt) and _MARK in written else ""


def plain_lead(template: ChatTemplate) -> str:
    """Return `lead_of` a message without thinking; empty if the template writes thinking that is empty."""
    lead = lead_of(template)
    return "" if any(mark in lead for mark in (*THINKING, CLOSE)) else lead


def compare_history(template: ChatTemplate, role: str) -> tuple[str, str]:
    """Return a three-turn conversation as gspax continues it and as the template renders it, from the first prompt on.

    `role` is the role of the messages between the turns; a turn before a tool's message is a call. The texts differ
    where a template renders earlier turns differently from how they were sampled, for example without their thinking,
    or a second round of calls differently from the first, as DeepSeek-V3's.
    """
    user: Message = {"role": "user", "content": "?"}
    reply: Message = {"role": role, "content": "reply", "name": _MARK, "tool_call_id": _call_id(0)}
    start, (end, rest) = template.render([user], template.tools), template.reply([reply])
    said: Message = {"role": "assistant", "content": "answer"}
    turn = f"{plain_lead(template)}answer"
    if template.thinking or template.opening:
        if "thought" in (lead := lead_of(template, reasoning_content="thought")):
            said, turn = {**said, "reasoning_content": "thought"}, f"{lead}answer"
        elif template.opening or _tags(template, role):  # another one knows no tags
            opening, close = _tags(template, role) or (OPEN, CLOSE)
            said = {**said, "content": f"{opening}\nthought\n{close}\n\nanswer"}
            turn = said["content"].removeprefix(template.opening)
    turns, again = [turn, turn], [user, said, reply]
    if role == "tool":
        call = {"id": _call_id(0), "type": "function", "function": {"name": _MARK, "arguments": {}}}
        calls: Message = {**said, "content": said["content"].removesuffix("answer"), "tool_calls": [call]}
        if template.thinking and not calls["content"]:  # some templates write the thinking of calls alone
            calls = {**calls, "reasoning_content": "thought"}
        written = _next_turn(template, [user], calls).partition(end)[0]
        if _MARK in written:
            said, again = calls, [user, calls, reply]
            turns = [written, _next_turn(template, again, calls).partition(end)[0]]
    kept = start + "".join(turn + end + rest for turn in turns)
    return kept, template.render([*again, said, reply], template.tools)


def _next_turn(template: ChatTemplate, history: Sequence[Message], said: Message) -> str:
    """Return what the template writes of an assistant's message after the prompt of the messages before it."""
    written = template.render([*history, said], template.tools, prompt=False)
    return _continued(template.render(history, template.tools), written)


def _tags(template: ChatTemplate, role: str) -> tuple[str, str] | None:
    """Return what thinking in the content of a message begins and ends with, as the template's text says, or None.

    `role` is that of the reply: only `<think>` is written in the content of a call.
    """
    text = "".join(template.texts.values())
    return next(
        (
            tags
            for tags in THINKING.items()
            if tags[1] in text and (tags[0] == OPEN or (role != "tool" and tags[0] in text))
        ),
        None,
    )


def _continued(prompt: str, written: str) -> str:
    """Return what a text has after the beginning that it shares with a prompt; no tag is divided."""
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, written, strict=False))))
    return written[whole_tag(written, shared) :]


def whole_tag(text: str, place: int) -> int:
    """Return the place where a tag begins that contains this place of a text, or the place itself."""
    start = text.rfind("<", 0, place)
    return place if start < 0 or ">" in text[start:place] else start
