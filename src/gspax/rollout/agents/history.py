"""What a request adds to a conversation, in tokens: all of the first one, and of a later one only its new messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gspax.config.protocols import CompletionTokenizer, ConversationTokenizer, Message
from gspax.data.chat import ChatTokenizer, end_before, split_thinking, with_tools
from gspax.rewards.environments.agents import typed_calls
from gspax.rewards.environments.family_calls import before_calls
from gspax.rewards.environments.tool_calls import Call, Malformed
from gspax.rollout.agents.openai import Answered, Asked, Refusal

Parse = Callable[[str], list[Call | Malformed]]


class OtherHistoryError(Exception):
    """A request that does not continue a conversation."""


class History(NamedTuple):
    """A request and the answer to it."""

    messages: tuple[Message, ...] = ()  # of a chat, the answer included
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""  # of a completion: the prompt with the answer
    rest: str = ""  # what the policy wrote after that text: a stop string
    last: int = -1  # the policy's last token

    @property
    def size(self) -> int:
        """Return a number that grows as the conversation goes on."""
        return len(self.messages) or len(self.text)


def read_first(tokenizer: ConversationTokenizer, asked: Asked) -> tuple[list[int], list[str]]:
    """Return the tokens of a first request, and its last text. Refusal if it cannot be encoded."""
    if asked.messages:
        return encode_chat(tokenizer, asked), [str(asked.messages[-1]["content"])]
    prompt = _one_prompt(asked)
    return encode_text(tokenizer, prompt), [prompt]


def read_more(tokenizer: ConversationTokenizer, history: History, asked: Asked) -> tuple[list[int], list[str]]:
    """Return the tokens and the texts that a later request adds.

    Raises:
      OtherHistoryError: it does not begin with the messages of the earlier one and the answer, or has other tools.
      Refusal: it adds nothing, or what it adds cannot be encoded.
    """
    if not asked.messages:
        prompt = _one_prompt(asked)
        if not history.text or not prompt.startswith(history.text):
            raise OtherHistoryError
        more = prompt[len(history.text) :].removeprefix(history.rest)  # clients add the stop string that was sampled
        return list(tokenizer.encode_completion(more)), [more]
    begin = asked.messages[: len(history.messages)]
    if not history.messages or asked.tools != history.tools or len(begin) < len(history.messages):
        raise OtherHistoryError
    if any(_essence(ours) != _essence(theirs) for ours, theirs in zip(history.messages, begin, strict=True)):
        raise OtherHistoryError
    new = _named(asked.messages, len(history.messages))
    if not new:
        raise Refusal("messages: wanted one after the policy's last message, got none", param="messages")
    tokenizer = with_tools(tokenizer, asked.tools)
    reply, end = list(tokenizer.encode_reply(new)), end_before(tokenizer, new)
    return (reply if history.last == end else [end, *reply]), [str(message["content"]) for message in new]


def after(asked: Asked, answered: Answered, written: str, last: int) -> History:
    """Return the history after the answer to a request.

    Args:
      written: what the policy wrote, of which the answer may leave a stop string out.
      last: its last token.
    """
    if not asked.messages:
        text = _one_prompt(asked) + answered.content
        return History(text=text, rest=written.removeprefix(answered.content), last=last)
    said: dict[str, Any] = {"role": "assistant", "content": answered.content}
    if answered.calls:
        said["tool_calls"] = answered.calls
    return History((*asked.messages, said), asked.tools, last=last)


def encode_chat(tokenizer: ConversationTokenizer, asked: Asked) -> list[int]:
    """Encode the messages of a first request. Refusal if the template does not write its tools."""
    messages = _named(asked.messages, 0)
    tokens = list(tokenizer.encode_chat(messages, asked.tools))
    if asked.tools and tokens == list(tokenizer.encode_chat(messages, ())):
        raise Refusal("tools: wanted none, because the policy's chat template writes no tools", param="tools")
    return tokens


def encode_text(tokenizer: CompletionTokenizer, text: str) -> list[int]:
    """Encode the prompt of a completion, without a chat template."""
    encode = super(ChatTokenizer, tokenizer).encode if isinstance(tokenizer, ChatTokenizer) else None
    return list((encode or tokenizer.encode_completion)(text))


def read_answer(asked: Asked, text: str, parse: Parse, stops: Sequence[str], name: str) -> Answered:
    """Read what the policy wrote, up to a stop string: the thinking, the content, and the calls.

    Args:
      name: begins the ids of calls.
    """
    text = text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
    if not asked.messages:
        return Answered(content=text)
    thinking, content = split_thinking(text)
    calls = typed_calls(parse(content), asked.tools) if asked.tools else []
    if not calls:
        return Answered(content=content, thinking=thinking)
    made = tuple(
        {"id": f"call_{name}_{number}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for number, (called, arguments) in enumerate(calls)
    )
    return Answered(content=before_calls(content), thinking=thinking, calls=made, finish="tool_calls")


def _one_prompt(asked: Asked) -> str:
    if len(asked.prompts) != 1 or not isinstance(asked.prompts[0], str):
        raise Refusal("prompt: wanted one text in a rollout, got several or token ids", param="prompt")
    return asked.prompts[0]


def _essence(message: Message) -> tuple[object, ...]:
    """Return what makes a message the same: clients strip what the policy wrote, and add fields without a value."""
    content = str(message["content"])
    calls = tuple(
        (call["id"], call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    given = content.strip() if message["role"] == "assistant" else content
    return message["role"], given, calls, message.get("tool_call_id"), message.get("name")


def _canonical(arguments: object) -> object:
    """Return JSON with sorted keys and the usual spaces: many clients parse the arguments of a call and write them."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(read, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _named(messages: Sequence[Message], first: int) -> list[Message]:
    """Return the messages from a number on, with the name of the function that a tool's message is the result of."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    read = list[Message]()
    for message in messages[first:]:
        more = {"name": names[message["tool_call_id"]]} if message.get("tool_call_id") in names else {}
        read.append({name: value for name, value in message.items() if name != "tool_call_id" or first == 0} | more)
    return read
