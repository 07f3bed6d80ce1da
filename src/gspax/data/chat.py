"""Chat models: prompts are rendered by the tokenizer's chat template, and completions may contain a thinking block.

With Qwen3 and `thinking=False` the prompt ends in an empty thinking block, so that the completion is just the answer.
With `thinking=True` the policy writes the block itself. `decode` keeps it, so that samples show the whole completion;
a reward removes it with `split_thinking`, or is wrapped: `partial(reward_answer, reward=...)`.
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
    """A Hugging Face tokenizer that encodes a prompt as a user message, followed by the start of the assistant's turn.

    Completions are encoded and decoded without a template. Special tokens in a prompt are encoded as special tokens, as
    in transformers.
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
        """The ids of a chat of several turns, up to the start of the assistant's next turn."""
        return self.encode_completion(self.render(messages))  # the template has the special tokens

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text. UserError if the template is missing or rejects the messages."""
        import jinja2  # noqa: F401  (optional in transformers; imported here so that the error names it)

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
        except Exception as error:  # a template is a program and can fail in any way
            raise UserError(f"the chat template in {self.path} failed: {brief(error)}") from error


def hf_chat(path: str | os.PathLike[str], *, system: str | None = None, thinking: bool = False) -> ChatTokenizer:
    """The chat tokenizer in a local folder; UserError if the folder has no tokenizer or no chat template.

    Args:
      path: a folder with `tokenizer.json` and a template, in `chat_template.jinja` or in `tokenizer_config.json`.
      system: text of a system message before every prompt.
      thinking: the template's `enable_thinking`; templates without that variable ignore it.
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


def reward_answer(
    problem: Problem, completion: str, *, reward: Callable[[Problem, str], float], opened: bool = False
) -> float:
    """`reward` of the answer part of a completion; of the empty text if there is no answer."""
    return reward(problem, split_thinking(completion, opened=opened)[1])
