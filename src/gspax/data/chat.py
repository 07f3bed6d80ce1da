"""Chat models: a question becomes a prompt through the tokenizer's own template; a completion has a thinking part.

With Qwen3 and `thinking=False` the prompt ends in an empty thinking part, so that the completion is the answer alone.
With `thinking=True` the policy writes the thinking itself. `decode` keeps it, so that records show all that was
written; a reward leaves it out with `split_thinking`, or is wrapped: `partial(reward_answer, reward=...)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspax.data.problem import Message, Problem
from gspax.data.tokenizer import HFTokenizer, brief, hf_tokenizer, settings
from gspax.errors import UserError

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ChatTokenizer(HFTokenizer):
    """A Hugging Face tokenizer that encodes a prompt as the user's turn of a chat, up to where the assistant answers.

    A completion is encoded and decoded as it is. Special tokens in a prompt are encoded as such, as transformers does.
    """

    system: str | None = None
    thinking: bool = False

    def encode(self, text: str, context: Sequence[Message] = ()) -> list[int]:
        """The ids of a chat that ends with this text as the user's message.

        Args:
          text: the user's message.
          context: the messages before it. `system` comes first, unless they begin with a system message of their own.
        """
        own = context and context[0]["role"] == "system"
        first = [] if self.system is None or own else [{"role": "system", "content": self.system}]
        return self.encode_chat([*first, *context, {"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat of several turns, which ends where the assistant's next turn begins."""
        return self.encode_completion(self.render(messages))  # the template wrote the special tokens; none is added

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text. UserError where the template is missing or refuses the messages."""
        import jinja2  # noqa: F401  (transformers can do without it; missing here, it is named in the message)

        tokenizer = self._tokenizer
        try:
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=self.thinking,
                )
            )
        except Exception as error:  # a template is a program, which can fail in any way
            raise UserError(f"the chat template in {self.path} failed: {brief(error)}") from error


def hf_chat(path: str | os.PathLike[str], *, system: str | None = None, thinking: bool = False) -> ChatTokenizer:
    """The chat tokenizer of a local folder; UserError if that holds no tokenizer or no chat template.

    Args:
      path: a folder with `tokenizer.json` and a template, in `chat_template.jinja` or in `tokenizer_config.json`.
      system: the system's text, before every prompt.
      thinking: the template's `enable_thinking`; a template that does not ask for it is not changed by it.
    """
    folder = hf_tokenizer(path).path
    in_file = Path(folder, "chat_template.jinja").is_file()
    if not in_file and not settings(folder, "tokenizer_config.json").get("chat_template"):
        raise UserError(
            f"wanted a chat template in {folder!r} (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "there is none (hf_tokenizer reads the tokenizer of a base model)"
        )
    return ChatTokenizer(folder, system, thinking)


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(thinking, answer) of a completion, each without line breaks around it.

    The answer follows the last `</think>`; while a `<think>` is still open there is none, as in a completion that was
    cut off. Text without either mark is an answer, or thinking if the prompt has `opened` it already, as the templates
    of models do that always think.
    """
    before, mark, after = text.rpartition(CLOSE)
    if OPEN in after or (opened and not mark):
        before, after = text, ""
    return before.strip("\n").removeprefix(OPEN).strip("\n"), after.strip("\n")


def reward_answer(
    problem: Problem, completion: str, *, reward: Callable[[Problem, str], float], opened: bool = False
) -> float:
    """What `reward` gives for the answer in a completion; for no answer, what it gives for the empty text."""
    return reward(problem, split_thinking(completion, opened=opened)[1])
