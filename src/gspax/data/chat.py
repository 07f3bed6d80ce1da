"""Chat models: prompts are rendered by the tokenizer's chat template, and completions may contain a thinking block.

With Qwen3 and `thinking=False` the prompt ends in an empty thinking block, so that the completion is just the answer.
With `thinking=True` the policy writes the block itself. `decode` keeps it, so that samples show the whole completion;
a reward removes it with `split_thinking`, or is wrapped: `partial(reward_answer, reward=...)`.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gspax.config.protocols import Message, Problem
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, hf_tokenizer, read_settings
from gspax.errors import UserError, brief
from gspax.storage.buckets import to_path

T = TypeVar("T")

OPEN, CLOSE = "<think>", "</think>"
_MARKUP = (OPEN, CLOSE, "<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>")
LONGEST = 30.0  # seconds for a template, which takes a millisecond unless its loops have no end
CLOCK = "strftime_now"  # the function with which a template prints the time
_CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(["'])(.*?)\1\s*\)""")
_MARK = "\ue000"  # for private use: in no template


@dataclass(frozen=True)
class ChatTokenizer(HFTokenizer):
    """A Hugging Face tokenizer that encodes a prompt as a user message, followed by the start of the assistant's turn.

    Completions are encoded and decoded without a template. Special tokens in a prompt are encoded as special tokens, as
    in transformers.
    """

    system: str | None = None
    thinking: bool = False
    date: str | None = None  # that the template prints as today's, as 2026-01-31

    def __post_init__(self) -> None:
        if self.date is not None:
            datetime.date.fromisoformat(self.date)

    added = ("date",)  # left out of a description at its default, so that older runs resume

    def encode(self, text: str, context: Sequence[Message] = ()) -> list[int]:
        """The ids of a chat that ends with this text as the user's message; `context` has the messages before it."""
        return self.encode_chat([*context, {"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """The ids of a chat of several turns, up to the start of the assistant's next turn.

        Args:
          messages: `system` comes before them, unless they begin with a system message of their own.
          tools: JSON schemas of the functions that the assistant may call, for the template's `tools`.
        """
        if self.system is not None and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.encode_completion(self.render(messages, tools))  # the template has the special tokens

    @property
    def turn_end(self) -> int:
        """The stop id that the template writes after an assistant's message: the end-of-sequence token."""
        return self.stop_ids[0]

    def encode_reply(self, messages: Sequence[Message]) -> list[int]:
        """The ids between the end of an assistant's turn, its stop token, and the start of the next one.

        They encode what the template writes after the content of an assistant's message and that token, so no earlier
        turn is rendered or tokenized again. In a message every added token of the tokenizer, and the marks of thinking
        and of tools, are split by a space, so that a tool's output can end neither a turn nor the reply. UserError if
        the template writes anything else after the content.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        safe = [{**message, "content": self._split_marks(str(message["content"]))} for message in messages]
        before, _, after = self.render([*chat, *safe]).rpartition(_MARK)
        end = str(self._tokenizer.convert_ids_to_tokens(self.turn_end))
        if not before or not after.startswith(end):
            raise UserError(
                f"the chat template in {self.path}: wanted {end!r} after the content of an assistant's message, "
                f"got {after[:40]!r}"
            )
        return self.encode_completion(after.removeprefix(end))

    @functools.cached_property
    def _marks(self) -> list[str]:
        """The texts that no reply may hold: added tokens other than white space, and the markup around replies."""
        tokenizer = self._tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        return sorted(token for token in {*added, *tokenizer.all_special_tokens, *_MARKUP} if token.strip())

    def _split_marks(self, text: str) -> str:
        for mark in self._marks:
            text = text.replace(mark, f"{mark[:1]} {mark[1:]}")
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The chat as text. UserError if the template is missing, rejects the messages or does not end."""
        import jinja2  # noqa: F401  (optional in transformers; imported here so that the error names it)

        result: Future[str] = Future()
        apply = self._tokenizer.apply_chat_template
        schemas = [dict(tool) for tool in tools] or None
        template = None
        if self.date is not None:
            template = _with_date(self._tokenizer.get_chat_template(tools=schemas), self.date)

        def write() -> None:
            try:
                text = apply(
                    [dict(message) for message in messages],
                    tools=schemas,
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=self.thinking,
                    chat_template=template,
                )
                result.set_result(str(text))
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=write, name="gspax-template", daemon=True).start()  # no thread can be ended
        try:
            return result.result(LONGEST)
        except TimeoutError:
            raise UserError(f"the chat template in {self.path} failed: no result after {LONGEST:g} s") from None
        except Exception as error:  # a template is a program and can fail in any way
            raise UserError(f"the chat template in {self.path} failed: {brief(error)}") from error


def _with_date(template: str, date: str) -> str:
    """The template with this date in place of the time. Every call of the clock names its format."""
    day = datetime.date.fromisoformat(date)
    return _CLOCK_CALL.sub(lambda call: repr(day.strftime(call[2])), template)


@dataclass(frozen=True)
class CharChat(CharTokenizer):
    """Conversations in characters: each message between characters of its role.

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
        """The ids of the first messages of a conversation; `tools` are not written."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                ids += [*self.encode_completion(message["content"]), self.turn_end]
            else:
                ids += self.encode_reply([message])
        return ids

    def encode_reply(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages after an assistant's turn."""
        forms = {"system": self.system, "user": self.user, "tool": self.tool}
        texts = [forms[message["role"]].replace("{}", message["content"]) for message in messages]
        return self.encode_completion("".join(texts))


def hf_chat(
    path: str | os.PathLike[str], *, system: str | None = None, thinking: bool = False, date: str | None = None
) -> ChatTokenizer:
    """The chat tokenizer in a folder, also of a bucket (gs://BUCKET/NAME).

    Args:
      path: a folder with `tokenizer.json` and a template, in `chat_template.jinja` or in `tokenizer_config.json`.
      system: text of a system message before every prompt.
      thinking: the template's `enable_thinking`; templates without that variable ignore it.
      date: the day that the template prints as today, such as "2026-01-31". Templates that print none, such as
        Qwen3's, ignore it; those of Llama 3 need it.

    Raises:
      UserError: the folder has no tokenizer or no chat template, or the template prints today's date and there is no
        `date`: a run that is resumed on another day would have other prompts.
    """
    folder = hf_tokenizer(path).path
    file = to_path(folder) / "chat_template.jinja"
    template: object = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    template = template or read_settings(folder, "tokenizer_config.json").get("chat_template")
    if not template and not file.is_file():
        raise UserError(
            f"wanted a chat template in {folder!r} (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "there is none (hf_tokenizer reads the tokenizer of a base model)"
        )
    texts = template if isinstance(template, list) else [{"template": template}]  # a list of named templates
    text = "".join(str(each.get("template")) for each in texts if isinstance(each, dict))
    if f"{CLOCK}(" in _CLOCK_CALL.sub("", text):
        raise UserError(f'the chat template in {folder}: wanted {CLOCK}("...") with its format, got another call of it')
    if date is None and f"{CLOCK}(" in text:
        raise UserError(
            f"the chat template in {folder} prints today's date ({CLOCK}), so that a run resumed on another day would "
            "have other prompts: wanted the day to print, as in hf_chat(..., date='2026-01-31'), got none"
        )
    try:
        return ChatTokenizer(folder, system, thinking, date)
    except ValueError:
        raise UserError(f"date: wanted a day such as 2026-01-31, got {date!r}") from None


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(thinking, answer) of a completion, without surrounding line breaks.

    The answer follows the last `</think>`. It is empty while a `<think>` is still open, as in a truncated completion.

    Args:
      text: a completion.
      opened: the prompt already contains `<think>`, as the templates of always-thinking models do; text without
        `</think>` then is thinking, otherwise an answer.
    """
    before, close, after = text.rpartition(CLOSE)
    if OPEN in after or (opened and not close):
        before, after = text, ""
    return before.strip("\n").removeprefix(OPEN).strip("\n"), after.strip("\n")


def reward_answer(problem: Problem, completion: str, *, reward: Callable[[Problem, str], T], opened: bool = False) -> T:
    """The `reward` of a completion's answer, or of the empty text if there is no answer."""
    return reward(problem, split_thinking(completion, opened=opened)[1])


reward_answer.concurrency = 0  # type: ignore[attr-defined]  # as its reward has, see `rewards.calls.concurrent`
