"""A schema turns a row of a table into a problem. A row that does not fit is a ValueError that names the column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspax.config.protocols import Message, Problem
from gspax.errors import shorten

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Schema:
    r"""The meaning of a row's columns, and the text around a prompt.

    A column inside another is named with a dot: `reward_model.ground_truth`.

    Attributes:
      prompt: the column of the prompt: text, or a list of chat messages that ends with the user's.
      answer: the column of the answer, text or a number; None if problems have none.
      task: the name of the task, the same for every row.
      task_column: the column of the task's name, if rows differ in it.
      metadata: further columns to keep.
      template: the text of a prompt, with `{prompt}` where the column's text goes. Other braces are left alone, as in
        `"{prompt}\nPut the answer in \\boxed{}."`.
      system: the system message of every row.
      examples: pairs of a prompt and a reply, shown before every prompt as turns of the chat. `template` is applied to
        these prompts too.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    task: str = ""
    task_column: str | None = None
    metadata: tuple[str, ...] = ()
    template: str = "{prompt}"
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError(f"template: wanted a text with {{prompt}} in it, got {self.template!r}")
        if isinstance(self.metadata, str):
            raise ValueError(f"metadata: wanted a tuple of columns, got the text {self.metadata!r}")

    def read(self, row: object) -> tuple[Problem, str]:
        """Convert a row to a problem, and return with it the text whose hash decides its split.

        That text is the prompt without `template`, after the earlier messages of the user and the assistant.
        """
        if isinstance(row, Problem):
            return row, _key(row.context, _text("prompt", row.prompt))
        if not isinstance(row, Mapping):
            raise ValueError(f"wanted an object with columns, got {shorten(repr(row))}")
        context, prompt = _conversation(self.prompt, _column(row, self.prompt))
        task = self.task if self.task_column is None else _text(self.task_column, _column(row, self.task_column))
        answer = "" if self.answer is None else _answer(self.answer, _column(row, self.answer))
        return Problem(
            prompt=self._fill(prompt),
            answer=answer,
            context=(*self._opening(context), *context),
            task=task,
            metadata={name: _column(row, name) for name in self.metadata},
        ), _key(context, prompt)

    def _opening(self, context: Sequence[Message]) -> list[Message]:
        """Return the messages that every conversation starts with."""
        if context and (self.system is not None or self.examples):
            raise ValueError(
                f"{self.prompt}: wanted the user's message alone, since `system` or `examples` stand before it; "
                f"got {len(context)} messages before it"
            )
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for prompt, reply in self.examples:
            opening += [{"role": "user", "content": self._fill(prompt)}, {"role": "assistant", "content": reply}]
        return opening

    def _fill(self, prompt: str) -> str:
        return self.template.replace("{prompt}", prompt)


def _key(context: Sequence[Message], prompt: str) -> str:
    return "\n".join([*(message["content"] for message in context if message["role"] != "system"), prompt])


def _column(row: Mapping[str, object], name: str) -> object:
    """Return the value of a column as plain Python types."""
    value: object = row
    for part in name.split(".") if name not in row else [name]:
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"{name}: there is no such column; the row has {', '.join(map(str, row)) or 'none'}")
        value = value[part]
    try:
        return _plain(value)
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise ValueError(f"{name}: wanted a text in UTF-8, got the byte {byte:#x} at {problem.start}") from None


def _plain(value: object) -> object:
    """Convert arrays to lists and bytes to text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _text(name: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise ValueError(f"{name}: wanted a text that is not empty, got {shorten(repr(value))}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        raise ValueError(f"{name}: wanted valid Unicode, got {shorten(repr(value))}") from None
    return value


def _answer(name: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return _decimal(value) if isinstance(value, float) else str(value)
    return _text(name, value)


def _decimal(number: float) -> str:
    """Write a number. One of a column of float32 reads as 0.10000000149011612, and is written as 0.1."""
    with np.errstate(over="ignore"):
        short = np.float32(number)
    is_single = len(str(number).partition("e")[0].strip("-0.")) > 15 and float(short) == number
    return str(short if is_single else number)


def _conversation(name: str, value: object) -> tuple[list[Message], str]:
    """Split a text or a chat into the messages before the prompt and the prompt, a chat's last message."""
    if not isinstance(value, list):
        return [], _text(name, value)
    messages = [_message(f"{name}[{i}]", message, first=i == 0) for i, message in enumerate(value)]
    if not messages or messages[-1]["role"] != "user":
        got = f"one of {messages[-1]['role']!r}" if messages else "an empty list"
        raise ValueError(f"{name}: wanted messages that end with one of the user, got {got}")
    return messages[:-1], messages[-1]["content"]


def _message(name: str, value: object, *, first: bool) -> Message:
    given = value if isinstance(value, dict) else {}
    role, content = given.get("role"), given.get("content")
    roles = _ROLES if first else _ROLES[1:]
    if role not in roles or not isinstance(content, str):
        raise ValueError(
            f"{name}: wanted a role of {', '.join(roles)} and a content of text, got {shorten(repr(value))}"
        )
    if given.get("tool_calls"):
        raise ValueError(f"{name}: wanted a message without tool_calls, which a problem cannot have, got some")
    return {"role": role, "content": _text(name, content, may_be_empty=True)}
