"""One agent's conversation with the policy, in tokens: a request continues what was sampled before, token by token.

What the policy wrote is never tokenized again. A request that begins with the messages of an earlier one, and with the
policy's answer to it, continues its tokens; only the messages after these are encoded, as an environment's replies are
(`history`). A request that continues the last one goes on with its sequence. Any other begins a further sequence of the
rollout: a history that was compacted, one that goes on from an earlier answer, a sub-agent's.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gspax.config import Sampling
from gspax.config.protocols import ConversationTokenizer, Problem
from gspax.data.chat_template import opening_of
from gspax.data.tokenizer import check_ids
from gspax.errors import brief, shorten
from gspax.rewards.environments.agents import Endpoint
from gspax.rollout.agents.history import History, OtherHistoryError, after, read_answer, read_first, read_more
from gspax.rollout.agents.openai import Answered, Asked, Refusal
from gspax.rollout.agents.sequences import RowTokens

if TYPE_CHECKING:
    from gspax.rollout.agents.interaction import AgentInteraction


class Turn(NamedTuple):
    """Tokens that the policy reads, after which it writes."""

    row: int  # of the rollout
    tokens: list[int]
    first: bool  # they begin a sequence
    most: int  # tokens that it may write
    logprobs: bool  # of what it writes are wanted


class _Known(NamedTuple):
    """An answer of the policy, after which requests may go on."""

    history: History
    sequence: int
    end: int  # of the tokens of that sequence


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
    cut: bool = False  # its last turn was cut by the limit of tokens
    limited: bool = False  # a request was refused for a limit of turns or tokens
    _started: bool = False
    _closed: bool = False
    _known: list[_Known] = field(default_factory=list)  # its answers
    _asked: Asked | None = None  # the last request that was begun
    _answer: Future[Answered] | None = None  # to it
    _queue: deque[tuple[Asked, Future[Answered]]] = field(default_factory=deque)  # requests that wait for it
    _busy: bool = False  # a request is being answered
    _opening: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tokens = RowTokens(self.limits.sampling)

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
        """Refuse all further requests, and those that wait."""
        with self._lock:
            self._closed = True
            answers = [answer for _, answer in self._requests()]
            self._queue.clear()
        for answer in answers:
            with contextlib.suppress(InvalidStateError):
                if not answer.done():
                    answer.set_exception(_ended())

    def ask(self, asked: Asked, *, again: bool = False) -> Future[Answered]:
        """Begin the answer to a request, or let it wait for the one before.

        Args:
          again: the client sends a request once more, because it did not wait for the answer or lost it.

        Raises:
          Refusal: the request cannot be answered.
        """
        with self._lock:
            if self._closed:
                raise _ended()
            if again:
                for earlier, answer in self._requests():
                    if earlier == asked:
                        return answer
            answer = Future[Answered]()
            self._queue.append((asked, answer))
        self._go_on()
        if answer.done() and isinstance(problem := answer.exception(), Refusal):
            raise problem
        return answer

    def _requests(self) -> list[tuple[Asked, Future[Answered]]]:
        """List the last request that was begun, and those that wait."""
        begun = [] if self._asked is None or self._answer is None else [(self._asked, self._answer)]
        return [*begun, *self._queue]

    def _go_on(self) -> None:
        """Begin the next request that can be answered, unless one is being answered."""
        with self._lock:
            while self._queue and not self._busy:
                asked, answer = self._queue.popleft()
                try:
                    turn = self._read(asked)
                except Refusal as problem:
                    with contextlib.suppress(InvalidStateError):  # the client has gone
                        answer.set_exception(problem)
                    continue
                self._asked, self._answer, self._busy = asked, answer, True
                self.put(turn)

    def _read(self, asked: Asked) -> Turn:
        """Read what a request adds to the conversation. Refusal if that is not possible."""
        if len(self.spans) >= (limit := self.interaction.turns.limit):
            self.limited = True
            raise Refusal(f"wanted at most {limit} requests in a rollout (turns.limit), got one more")
        check_sampling(asked, self.interaction.sampling)
        tokenizer = self.interaction.tokenizer
        try:
            tokens, texts, known = find_continued(tokenizer, self._known, asked) or (
                *read_first(tokenizer, asked),
                None,
            )
            check_ids(tokens, self.limits.vocab_size, "a request")
        except Refusal:
            raise
        except Exception as problem:  # of what a template or a tokenizer is not made for
            raise Refusal(f"messages: {brief(problem)}", param="messages") from problem
        first = known is None or known is not self._known[-1]
        before = self._tokens.sequences[known.sequence][: known.end] if first and known is not None else []
        if not (new := before + tokens):
            raise Refusal("prompt: wanted at least one token, got none", param="prompt")
        if excess := self._tokens.find_excess(len(new), first=first):
            self.limited = True
            raise Refusal(excess, code="context_length_exceeded", param="messages")
        self._tokens.read(new, first=first)
        self.texts += texts
        self._opening = opening_of(tokenizer, new)
        room = self._tokens.room
        return Turn(self.row, new, first, min(asked.most or room, room), asked.logprobs)

    def take(self, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Take what the policy wrote, and answer the request."""
        limits, tokenizer = self.limits, self.interaction.tokenizer
        with self._lock:
            asked, answer, sequence = self._asked, self._answer, self._tokens.sequences[-1]
            assert asked is not None and answer is not None
            read, start = len(sequence), self._tokens.place
            sequence += tokens
            self.spans.append((start, start + len(tokens)))
            self.written = self._opening + tokenizer.decode(tokens)
            self.texts.append(self.written)
            stops, parse = limits.sampling.stop, self.interaction.agent.parse
            answered = read_answer(asked, self.written, parse, stops, f"{self.row}_{start}")
            answered = replace(answered, read=read, written=len(tokens))
            if tokens[-1] not in limits.stop_ids and not any(stop in self.written for stop in stops):
                answered = replace(answered, finish="length")
                self.cut = self._tokens.room <= 0
            if asked.logprobs:
                texts = [tokenizer.decode([token]) for token in tokens]
                answered = replace(answered, logps=tuple(zip(texts, map(float, logps), strict=True)))
            history = after(asked, answered, self.written, tokens[-1])
            self._known.append(_Known(history, len(self._tokens.sequences) - 1, len(sequence)))
            self._busy = False
        with contextlib.suppress(InvalidStateError):  # the rollout has ended, or the client has gone
            answer.set_result(answered)
        self._go_on()


def find_continued(
    tokenizer: ConversationTokenizer, known: Sequence[_Known], asked: Asked
) -> tuple[list[int], list[str], _Known] | None:
    """Find the longest conversation that a request continues, and what it adds to it; None if there is none."""
    for one in sorted(known, key=lambda one: one.history.size, reverse=True):
        with contextlib.suppress(OtherHistoryError):
            return *read_more(tokenizer, one.history, asked), one
    return None


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
