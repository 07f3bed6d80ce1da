"""The requests and answers of OpenAI's protocol, as JSON objects: `/v1/chat/completions` and `/v1/completions`.

What cannot be done as asked is a `Refusal`, whose body is the error that a client shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspax.config.protocols import Message
from gspax.errors import shorten
from gspax.types import JsonObject

_IGNORED = {  # fields that change nothing about what is sampled
    *("model", "messages", "prompt", "tools", "tool_choice", "stream", "stream_options", "stop", "max_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "logprobs", "top_logprobs", "seed", "user", "metadata"),
    *("store", "service_tier", "safety_identifier", "prompt_cache_key"),
}
_FIXED: dict[str, tuple[Any, ...]] = {  # fields that may have these values alone, besides null
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refusal(Exception):  # noqa: N818  (an answer)
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 503: "server_error"}.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for; None where it does not say."""

    messages: tuple[Message, ...] = ()  # of a chat
    prompts: tuple[str | tuple[int, ...], ...] = ()  # of completions: texts, or token ids
    tools: tuple[Mapping[str, Any], ...] = ()
    most: int | None = None  # tokens of the answer
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    counts: bool = False  # a stream ends with the counts of tokens


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The policy's answer to one prompt."""

    content: str
    thinking: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()  # as in a message's `tool_calls`
    finish: str = "stop"  # or "length", "tool_calls"
    read: int = 0  # tokens of the prompt
    written: int = 0  # tokens of the answer
    logps: Sequence[tuple[str, float]] = field(default=())  # with `Asked.logprobs`: the text and log-prob of each token


def read_chat(body: object, model: str) -> Asked:
    """Read the body of a request for a chat's next message. Raises Refusal."""
    body = _check(body, model)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list with at least one message", messages)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong("tools", "a list of functions", tools)
    if others := [tool for tool in tools if tool.get("type") != "function"]:
        raise _wrong("tools", "tools of the type function", others[0].get("type"))
    logprobs = body.get("logprobs") or False
    if not isinstance(logprobs, bool):
        raise _wrong("logprobs", "true or false", logprobs)
    read = tuple(_read_message(number, message) for number, message in enumerate(messages))
    return Asked(messages=read, tools=tuple(tools), logprobs=logprobs, **_common(body))


def read_completion(body: object, model: str) -> Asked:
    """Read the body of a request for completions of one or several prompts. Raises Refusal."""
    body = _check(body, model)
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _are_ids(p) for p in prompts):
        raise _wrong("prompt", "a text, a list of token ids, or a list of either", prompt)
    logprobs = body.get("logprobs")
    if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
        raise _wrong("logprobs", "0 or 1: only the log-probs of the chosen tokens are known", logprobs)
    read = tuple(each if isinstance(each, str) else tuple(each) for each in prompts)
    return Asked(prompts=read, logprobs=logprobs is not None, **_common(body))


def _check(body: object, model: str) -> JsonObject:
    """Return a request's object. Refusal if its model, or a field that changes the samples, is not the endpoint's."""
    if not isinstance(body, dict):
        raise _wrong("the body", "a JSON object", body)
    if (named := body.get("model", model)) != model:
        message = f"model: wanted {model!r}, the policy, got {shorten(repr(named))}"
        raise Refusal(message, status=404, param="model", code="model_not_found")
    for name, value in body.items():
        if name in _FIXED and value is not None and value not in _FIXED[name]:
            raise _wrong(name, f"{json.dumps(_FIXED[name][0])} or none", value)
        if name not in _IGNORED and name not in _FIXED and value is not None:
            raise Refusal(f"{shorten(name)}: wanted a field that gspax serves, got this one", param=shorten(name))
    return body


def _common(body: JsonObject) -> dict[str, Any]:
    """Read the fields of both kinds of requests."""
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise _wrong("stop", "a text or a list of texts", body["stop"])
    most = _number(body, "max_completion_tokens", 1, 2**31) or _number(body, "max_tokens", 1, 2**31)
    options = body.get("stream_options") or {}
    return {
        "most": None if most is None else int(most),
        "temperature": _number(body, "temperature", 0, 1000),
        "top_p": _number(body, "top_p", 0, 1),
        "stop": tuple(stop),
        "stream": body.get("stream") is True,
        "counts": isinstance(options, dict) and options.get("include_usage") is True,
    }


def _number(body: JsonObject, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    whole = name.startswith("max")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        raise _wrong(name, f"{'an integer' if whole else 'a number'} from {low} to {high}", value)
    return float(value)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _read_message(number: int, message: object) -> Message:
    """Read a message of a chat, with its text as one string."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        got = message.get("role") if isinstance(message, dict) else message
        raise _wrong(where, f"a message with one of the roles {', '.join(_ROLES)}", got)
    read: dict[str, Any] = {"role": _ROLES[message["role"]], "content": _read_content(where, message.get("content"))}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [_read_call(f"{where}.tool_calls", call) for call in _listed(where, calls)]
    if isinstance(thinking := message.get("reasoning_content"), str) and thinking:
        read["reasoning_content"] = thinking
    if read["role"] == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(name := message.get("name"), str):
        read["name"] = name
    return read


def _listed(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise _wrong(f"{where}.tool_calls", "a list", value)
    return value


def _read_call(where: str, call: object) -> Mapping[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, "calls with a function and its name", call)
    named = {"name": function["name"], "arguments": function.get("arguments", "{}")}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _read_content(where: str, content: object) -> str:
    """Return the text of a message, which may be in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            got = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"{where}.content", "text, which is all that the policy reads", got)
        texts.append(part["text"])
    return "".join(texts)


def _wrong(param: str, wanted: str, got: object) -> Refusal:
    return Refusal(f"{param}: wanted {wanted}, got {shorten(json.dumps(got, default=repr))}", param=param)


def chat_body(answered: Answered, head: JsonObject) -> JsonObject:
    """Return the body of a chat's next message; `head` has its id, time and model."""
    message: JsonObject = {"role": "assistant", "content": answered.content, "refusal": None}
    if answered.thinking:
        message["reasoning_content"] = answered.thinking
    if answered.calls:
        message |= {"tool_calls": list(answered.calls), "content": answered.content or None}
    choice = {"index": 0, "message": message, "finish_reason": answered.finish, "logprobs": _chat_logps(answered)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage([answered])}


def completion_body(answers: Sequence[Answered], head: JsonObject) -> JsonObject:
    """Return the body of completions, one for each prompt."""
    choices = [
        {
            "index": number,
            "text": answered.content,
            "finish_reason": answered.finish,
            "logprobs": _completion_logps(answered),
        }
        for number, answered in enumerate(answers)
    ]
    return {**head, "object": "text_completion", "choices": choices, "usage": _usage(answers)}


def chat_events(answered: Answered, head: JsonObject, *, counts: bool) -> Iterator[str]:
    """Yield the events of a stream: the whole message was sampled before the first one is sent."""
    head = {**head, "object": "chat.completion.chunk"}
    piece: JsonObject = {"role": "assistant", "content": answered.content}
    if answered.thinking:
        piece["reasoning_content"] = answered.thinking
    if answered.calls:
        piece["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answered.calls)]
    first = {"index": 0, "delta": piece, "finish_reason": None, "logprobs": _chat_logps(answered)}
    last = {"index": 0, "delta": {}, "finish_reason": answered.finish, "logprobs": None}
    yield from _events([{**head, "choices": [choice]} for choice in (first, last)], head, [answered], counts=counts)


def completion_events(answers: Sequence[Answered], head: JsonObject, *, counts: bool) -> Iterator[str]:
    """Yield the events of a stream of completions."""
    head = {**head, "object": "text_completion"}
    body = completion_body(answers, head)
    yield from _events([{**head, "choices": [choice]} for choice in body["choices"]], head, answers, counts=counts)


def _events(
    chunks: Sequence[JsonObject], head: JsonObject, answers: Sequence[Answered], *, counts: bool
) -> Iterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    if counts:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(answers)})}\n\n"
    yield "data: [DONE]\n\n"


def models_body(model: str) -> JsonObject:
    """Return the body of the list of models."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "gspax"}]}


def _usage(answers: Sequence[Answered]) -> JsonObject:
    read, written = sum(each.read for each in answers), sum(each.written for each in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _chat_logps(answered: Answered) -> JsonObject | None:
    if not answered.logps:
        return None
    content = [
        {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logp in answered.logps
    ]
    return {"content": content, "refusal": None}


def _completion_logps(answered: Answered) -> JsonObject | None:
    if not answered.logps:
        return None
    texts = [text for text, _ in answered.logps]
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [logp for _, logp in answered.logps],
        "text_offset": starts,
        "top_logprobs": None,
    }
