"""Chat models: prompts are rendered by the tokenizer's chat template, and completions may contain a thinking block.

With Qwen3 and `thinking=False` the prompt ends in an empty thinking block, so that the completion is just the answer.
With `thinking=True` the policy writes the block itself. `decode` keeps it, so that samples show the whole completion;
a reward removes it with `split_thinking`, or is wrapped: `partial(reward_answer, reward=...)`.
"""

from __future__ import annotations

import copy
import datetime
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gspax.config.protocols import ConversationTokenizer, Environment, Message, Problem
from gspax.data.chat_template import (
    CLOSE,
    OPEN,
    ChatTemplate,
    Value,
    check_settings,
    read_template,
    thinking_marks,
)
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, hf_tokenizer
from gspax.errors import UserError

T = TypeVar("T")

# the beginnings of gpt-oss's messages: an answer's, and of one that has neither an answer nor a call
_FINAL = re.compile(r"\A(?:<\|start\|>assistant)?<\|channel\|>final(?: ?<\|constrain\|>\w+)?<\|message\|>")
_UNFINISHED = re.compile(r"\A(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)<\|message\|>")
_MARKUP = (OPEN, CLOSE, "<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class ChatTokenizer(HFTokenizer):
    """A Hugging Face tokenizer that encodes a prompt as a user message, followed by the start of the assistant's turn.

    Completions are encoded and decoded without a template. Special tokens in a prompt are encoded as special tokens, as
    in transformers.
    """

    system: str | None = None
    thinking: bool = False
    date: str | None = None  # the date that the template prints as today's, such as 2026-01-31
    variables: Mapping[str, Value] = field(default_factory=dict, hash=False)  # others that the template reads

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat("2026-01-31" if self.date is None else self.date)
        except ValueError:
            raise ValueError(f"wanted a day such as 2026-01-31, got {self.date!r}") from None

    def encode(self, text: str, context: Sequence[Message] = ()) -> list[int]:
        """Encode a chat that ends with `text` as the user's message; `context` holds the messages before it."""
        return self.encode_chat([*context, {"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """Encode a chat of several turns, up to the start of the assistant's next turn.

        Args:
          messages: the chat; `system` is put before it, unless it begins with a system message.
          tools: JSON schemas of the functions that the assistant may call, for the template's `tools`.
        """
        if self.system is not None and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.encode_completion(self.render(messages, tools))  # the template has the special tokens

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """Read the tokenizer's chat template."""
        return read_template(
            self.folder,
            where=self.path,
            added=self.added_tokens,
            stop_ids=self.stop_ids,
            thinking=self.thinking,
            date=self.date,
            variables=self.variables,
        )

    @property
    def turn_end(self) -> int:
        """The stop id that the template writes after an assistant's last message, else the first stop id."""
        end = self.template.end
        return (
            self.added_tokens[end] if end is not None and self.added_tokens[end] in self.stop_ids else self.stop_ids[0]
        )

    def end_before(self, messages: Sequence[Message]) -> int:
        """Return the id that ends a turn before these messages; some templates use the next role's token."""
        return self.added_tokens[self.template.reply(self._without_marks(messages))[0]]

    def encode_reply(self, messages: Sequence[Message]) -> list[int]:
        """Encode the messages between the assistant's stop token and the start of its next turn.

        The text is what the template writes after the content of an assistant's message, which has calls before `tool`
        messages. No earlier turn is rendered or tokenized again. In the messages, every added token of the tokenizer
        and every thinking or tool tag is split by a space, so tool output can end neither a turn nor the reply.
        UserError if the template rejects the messages, or does not write them.
        """
        end, text = self.template.reply(self._without_marks(messages))
        first, *ids = self.encode_completion(end + text)  # white space after a token may belong to it
        return ids if first == self.added_tokens[end] else self.encode_completion(text)

    @functools.cached_property
    def _marks(self) -> list[str]:
        """The texts that a reply must not contain: added tokens other than white space, and thinking and tool tags."""
        return sorted(
            token for token in {*self.added_tokens, *self.template.special.values(), *_MARKUP} if token.strip()
        )

    def _without_marks(self, messages: Sequence[Message]) -> list[Message]:
        return [{**message, "content": self._split_marks(str(message["content"]))} for message in messages]

    def _split_marks(self, text: str) -> str:
        for mark in self._marks:
            text = text.replace(mark, f"{mark[:1]} {mark[1:]}")
        return text

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> ChatTokenizer:
        """Return this tokenizer for replies in a conversation with these tools, by which some templates write them."""
        other = copy.copy(self)
        other.__dict__["template"] = replace(self.template, tools=tuple(tools))  # in the place of the cached property
        return other

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """Render the chat as text. UserError if the template is missing, rejects the messages or does not end."""
        return self.template.render(messages, tools)


@dataclass(frozen=True)
class CharChat(CharTokenizer):
    """A character-level chat tokenizer: each message is written between characters of its role.

        CharChat("0123456789+=[]", user="{}", tool="={}")

    An assistant's message is its text and the stop id. There is no text for tools: the policy learns them.

    Attributes:
      alphabet: all characters of the messages and of the forms.
      system, user, tool: how messages of these roles are written; `{}` is the content.
    """

    system: str = "{}"
    user: str = "{}"
    tool: str = "{}"

    @property
    def turn_end(self) -> int:
        return self.stop_ids[0]

    def encode(self, text: str) -> list[int]:
        return self.encode_reply([{"role": "user", "content": text}])

    def encode_completion(self, text: str) -> list[int]:
        return super().encode(text)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """Encode the first messages of a conversation; `tools` are not written."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                ids += [*self.encode_completion(message["content"]), self.turn_end]
            else:
                ids += self.encode_reply([message])
        return ids

    def encode_reply(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages that follow an assistant's turn."""
        forms = {"system": self.system, "user": self.user, "tool": self.tool}
        texts = [forms[message["role"]].replace("{}", message["content"]) for message in messages]
        return self.encode_completion("".join(texts))


def hf_chat(
    path: str | os.PathLike[str],
    *,
    system: str | None = None,
    thinking: bool = False,
    date: str | None = None,
    variables: Mapping[str, Value] | None = None,
) -> ChatTokenizer:
    """Load the chat tokenizer in a folder, also of a bucket (gs://BUCKET/NAME), or of a name on the Hub.

    Args:
      path: a folder with `tokenizer.json` and a template, in `chat_template.jinja` or in `tokenizer_config.json`; or a
        name on the Hub, such as "Qwen/Qwen3-0.6B", of which only the tokenizer's files are downloaded.
      system: text of a system message before every prompt.
      thinking: the template's `enable_thinking`; templates without that variable ignore it.
      date: the day that the template prints as today, such as "2026-01-31". Templates that print none, such as
        Qwen3's, ignore it; those of Llama 3 need it.
      variables: other variables that the template reads, such as {"reasoning_effort": "high"} of gpt-oss.

    Raises:
      UserError: the folder has no tokenizer or no chat template, the template does not read a variable, or it prints
        today's date and there is no `date`: a run that is resumed on another day would have other prompts.
    """
    found, variables = hf_tokenizer(path), dict(variables or {})
    check_settings(found.folder, found.path, date, variables)
    try:
        return ChatTokenizer(found.path, system, thinking, date, variables)
    except ValueError as problem:
        raise UserError(f"date: {problem}") from None


def tools_of(environment: Environment) -> Sequence[Mapping[str, object]]:
    """Return the JSON schemas of an environment's tools; empty if it has none."""
    schemas = getattr(environment, "schemas", None)
    return schemas() if schemas is not None else ()


def with_tools(tokenizer: ConversationTokenizer, tools: Sequence[Mapping[str, object]]) -> ConversationTokenizer:
    """Return the tokenizer of a conversation with these tools: from `with_tools` if defined, else the same."""
    bind: Callable[[Sequence[Mapping[str, object]]], ConversationTokenizer] | None
    bind = getattr(tokenizer, "with_tools", None)
    return bind(tools) if bind is not None and tools else tokenizer


def end_before(tokenizer: ConversationTokenizer, messages: Sequence[Message]) -> int:
    """Return the stop id that ends a turn before these messages: from `end_before` if defined, else `turn_end`."""
    named: Callable[[Sequence[Message]], int] | None = getattr(tokenizer, "end_before", None)
    return named(messages) if named is not None and messages else tokenizer.turn_end


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Split a completion into (thinking, answer), without surrounding line breaks.

    The answer follows the last `</think>`. It is empty while a `<think>` is still open, as in a truncated completion.
    The same holds for a completion that begins with the thinking of Gemma 4, gpt-oss or Magistral; of gpt-oss the
    answer is the text of the `final` channel, or the message with a call, and no preamble of `commentary`.

    Args:
      text: a completion.
      opened: the text before the completion already contains `<think>`; text without `</think>` then is thinking,
        otherwise an answer. In a run it is not needed: there the text of a completion begins with a `<think>` that its
        prompt ends with.
    """
    opening, end = thinking_marks(text)
    before, close, after = text.rpartition(end)
    if opening in after or (opened and not close) or _UNFINISHED.match(after):
        before, after = text, ""
    return before.strip("\n").removeprefix(opening).strip("\n"), _FINAL.sub("", after).strip("\n")


def reward_answer(problem: Problem, completion: str, *, reward: Callable[[Problem, str], T], opened: bool = False) -> T:
    """Compute the `reward` of a completion's answer, or of the empty text if there is no answer."""
    return reward(problem, split_thinking(completion, opened=opened)[1])


reward_answer.concurrency = 0  # type: ignore[attr-defined]  # as its reward has, see `rewards.calls.concurrent`
