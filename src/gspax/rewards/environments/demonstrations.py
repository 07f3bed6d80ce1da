"""A demonstration of several turns, as tokens: the environment answers the demonstrated messages."""

from __future__ import annotations

from collections.abc import Sequence

from gspax.config.protocols import ConversationTokenizer, Environment, Message, Problem, Step
from gspax.errors import UserError


def encode_demonstration(
    environment: Environment, tokenizer: ConversationTokenizer, problem: Problem, messages: Sequence[str]
) -> tuple[list[int], list[bool]]:
    """The tokens of a demonstrated conversation, and which of them are the policy's. It ends where one of both ends it.

    UserError if the environment's `step` gives no `Step`.
    """
    state, first = environment.reset(problem)
    tokens = encode_first(environment, tokenizer, first)
    own = [False] * len(tokens)
    for number, message in enumerate(messages, start=1):
        turn = [*tokenizer.encode_completion(message), tokenizer.turn_end]
        tokens, own = tokens + turn, own + [True] * len(turn)
        if number == len(messages):
            break
        step = environment.step(state, message)
        if not isinstance(step, Step):
            raise UserError(f"environment: wanted a Step for a demonstrated message, got {type(step).__name__}")
        if step.done:
            break
        reply = list(tokenizer.encode_reply(step.messages))
        tokens, own, state = tokens + reply, own + [False] * len(reply), step.state
    return tokens, own


def encode_first(environment: Environment, tokenizer: ConversationTokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation's first messages; `environment.schemas()`, if any, are the template's tools."""
    schemas = getattr(environment, "schemas", None)
    return list(tokenizer.encode_chat(messages, schemas() if schemas is not None else ()))
