"""One agent's conversation with the policy, in tokens: a request continues what was sampled before, token by token.

What the policy wrote is never tokenized again. A request must begin with the messages of the one before, and with the
policy's answer to it; only the messages after these are encoded, as an environment's replies are (`history`).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gspax.config import Sampling
from gspax.config.protocols import Problem
from gspax.data.chat_template import opening_of
from gspax.data.tokenizer import check_ids
from gspax.errors import brief, shorten
from gspax.rewards.environments.agents import Endpoint
from gspax.rollout.agents.history import Branch, History, after, read_answer, read_first, read_more
from gspax.rollout.agents.openai import Answered, Asked, Refusal

if TYPE_CHECKING:
    from gspax.rollout.agents.interaction import AgentInteraction


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy reads, after which it writes."""

    row: int  # of the rollout
    tokens: list[int]
    first: bool  # they begin the row
    most: int  # tokens that it may write
    logprobs: bool
    take: Callable[[Sequence[int], Sequence[float]], None]  # gets the tokens that it wrote, and their log-probs


class Limits(NamedTuple):
    """The limits of a conversation, and what ends a turn."""

    sampling: Sampling
    stop_ids: tuple[int, ...]
    vocab_size: int


@dataclass
class Conversation:
    """The conversation of one rollout. Requests arrive in any thread; the run's thread takes what was sampled."""

    row: int
    problem: Problem
    interaction: AgentInteraction
    limits: Limits
    put: Callable[[Turn], None]  # gives a turn to the run's thread
    address: str = ""  # of the endpoint
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the turns, from the end of the prompt
    texts: list[str] = field(default_factory=list)  # messages and replies
    written: str = ""  # the policy's last message
    error: str = ""  # why the rollout has failed
    cut: bool = False  # its last turn was cut by the limit of tokens
    limited: bool = False  # a request was refused for a limit of turns or tokens
    _started: bool = False
    _closed: bool = False
    _history: History = field(default_factory=History)
    _asked: Asked | None = None  # the last request
    _answer: Future[Answered] | None = None  # to it
    _prompt: int = 0  # tokens of the first request
    _end: int = 0  # of the tokens after these
    _opening: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> Endpoint:
        """Return where the program reaches the policy."""
        return Endpoint(f"{self.address}/v1", self.key)

    def begin(self) -> None:
        """Note that the program was started. RuntimeError if it was before."""
        if self._started:
            raise RuntimeError("another agent blocked the event loop, so that this one would have to begin again")
        self._started = True

    def close(self) -> None:
        """Refuse all further requests, and the one that waits."""
        with self._lock:
            self._closed = True
            answer = self._answer
        with contextlib.suppress(InvalidStateError):
            if answer is not None and not answer.done():
                answer.set_exception(_ended())

    def ask(self, asked: Asked, *, again: bool = False) -> Future[Answered]:
        """Begin the answer to a request.

        Args:
          again: the client sends a request once more, because it did not wait for the answer or lost it.

        Raises:
          Refusal: the request cannot be answered.
        """
        with self._lock:
            if self._closed:
                raise _ended()
            if again and self._answer is not None and asked == self._asked:
                return self._answer
            try:
                turn = self._read(asked)
            except Branch as problem:
                self.error = str(problem)
                raise
            self._asked, self._answer = asked, Future()
            answer = self._answer
        self.put(turn)
        return answer

    def _read(self, asked: Asked) -> Turn:
        """Read what a request adds to the conversation. Refusal if that is not possible."""
        if self.error:
            raise Refusal(self.error)
        if self._answer is not None and not self._answer.done():
            raise Branch("wanted one request at a time in a rollout, got another one before the answer to the last")
        if len(self.spans) >= (limit := self.interaction.turns.limit):
            self.limited = True
            raise Refusal(f"wanted at most {limit} requests in a rollout (turns.limit), got one more")
        check_sampling(asked, self.interaction.sampling)
        first, sampling, tokenizer = not self.spans, self.limits.sampling, self.interaction.tokenizer
        try:
            tokens, texts = read_first(tokenizer, asked) if first else read_more(tokenizer, self._history, asked)
            check_ids(tokens, self.limits.vocab_size, "a request")
        except Refusal:
            raise
        except Exception as problem:  # of what a template or a tokenizer is not made for
            raise Refusal(f"messages: {brief(problem)}", param="messages") from problem
        if not tokens:
            raise Refusal("prompt: wanted at least one token, got none", param="prompt")
        what, where, most = "in the first request", "sampling.max_prompt_tokens", sampling.max_prompt_tokens
        if not first:
            what, where, most = "after the first request", "sampling.max_tokens", sampling.max_tokens - 1
        if (count := self._end + len(tokens)) > most:
            self.limited = True
            message = f"wanted at most {most} tokens {what} ({where}), got {count}"
            raise Refusal(message, code="context_length_exceeded", param="messages")
        self.texts += texts
        self._opening = opening_of(tokenizer, tokens)
        self._prompt, self._end = (count, 0) if first else (self._prompt, count)
        room = sampling.max_tokens - self._end
        return Turn(self.row, tokens, first, min(asked.most or room, room), asked.logprobs, self._take)

    def _take(self, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Take what the policy wrote, and answer the request."""
        limits, tokenizer = self.limits, self.interaction.tokenizer
        with self._lock:
            asked, answer, start = self._asked, self._answer, self._end
            assert asked is not None and answer is not None
            self._end += len(tokens)
            self.spans.append((start, self._end))
            self.written = self._opening + tokenizer.decode(tokens)
            self.texts.append(self.written)
            stops, parse = limits.sampling.stop, self.interaction.agent.parse
            answered = read_answer(asked, self.written, parse, stops, f"{self.row}_{start}")
            answered = replace(answered, read=self._prompt + start, written=len(tokens))
            if tokens[-1] not in limits.stop_ids and not any(stop in self.written for stop in stops):
                answered = replace(answered, finish="length")
                self.cut = self._end >= limits.sampling.max_tokens
            if asked.logprobs:
                texts = [tokenizer.decode([token]) for token in tokens]
                answered = replace(answered, logps=tuple(zip(texts, map(float, logps), strict=True)))
            self._history = after(asked, answered, self.written, tokens[-1])
        with contextlib.suppress(InvalidStateError):  # the rollout has ended, or the client has gone
            answer.set_result(answered)


def check_sampling(asked: Asked, sampling: Sampling) -> None:
    """Refuse a request that asks for another distribution than the run's, which it is trained on."""
    for name in ("temperature", "top_p"):
        value, own = getattr(asked, name), getattr(sampling, name)
        if value is not None and value != own:
            raise Refusal(f"{name}: wanted {own:g} (sampling.{name}, the run's own) or none, got {value:g}", param=name)
    if others := [text for text in asked.stop if text not in sampling.stop]:
        own_stops = ", ".join(map(repr, sampling.stop)) or "there are none"
        message = f"stop: wanted texts of sampling.stop, the run's own ({own_stops}), got {shorten(repr(others[0]))}"
        raise Refusal(message, param="stop")


def _ended() -> Refusal:
    return Refusal("the rollout of this key has ended", status=401, code="invalid_api_key")
