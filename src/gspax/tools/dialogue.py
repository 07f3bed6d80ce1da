"""Holds a conversation with a person: one sample, with a cache that persists between messages.

A message continues the sample as an environment's reply does (`continuous_batching.resume`), so no earlier turn is
prefilled or tokenized again. On several devices that have rows of their own, the other rows sample the same prompt
unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.config.protocols import ConversationTokenizer, Tokenizer
from gspax.data.chat import end_before, with_tools
from gspax.data.chat_template import opening_of
from gspax.data.tokenizer import check_ids
from gspax.errors import UserError
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.sampler import sampler
from gspax.sampler.state import SampleOptions, State
from gspax.types import Array, Params

VERSION = np.int32(0)  # of the parameters, which stay the same


class Dialogue:
    """A conversation, or independent prompts with a tokenizer without conversations (`ConversationTokenizer`).

    Conversation n has sample id n, so it does not depend on the conversations before it.

    Attributes:
      encode: gives the tokens of a first message; the tokenizer's at first.
      tools: JSON schemas of the tools that it shows, for later messages.
      opened: whether the text before the last answer ends with `<think>`, as some templates write it.
    """

    def __init__(self, params: Params, tokenizer: Tokenizer, options: SampleOptions, key: Array) -> None:
        """Start without a message.

        Args:
          params: inference weights.
          tokenizer: of the policy.
          options: `sampling.max_prompt_tokens` limits the first message, `max_tokens` all that follows it.
          key: equal (key, messages) give equal answers.
        """
        plain = options.sampling.for_new_prompts()
        sampling = replace(plain, group=batch_shards(options.mesh), chunk=1, slots=0)
        self._options = sampler.split_rows(replace(options, sampling=sampling, turns=True), 1)
        self._params, self._tokenizer, self._key = params, tokenizer, key
        self._state: State | None = None
        self._next, self._begin, self._length, self._closed = 0, 0, 0, False
        self.encode: Callable[[str], Sequence[int]] = tokenizer.encode
        self.tools: Sequence[Mapping[str, object]] = ()
        self.opened = False

    def reset(self) -> None:
        """Forget the conversation."""
        self._state = None

    def ask(self, message: str, *, sampling: Sampling, limit: int) -> Iterator[list[int]]:
        """Answer a message; yield the ids of the answer so far after each token, the stop token included.

        If the answer is cut, by `limit` or because the caller stops iterating, the next message ends its turn. A turn
        that ended with another stop id than a template writes before a message continues with the template's.

        Args:
          message: the user's.
          sampling: temperature and filters of this answer; only these are read.
          limit: the most tokens of the answer.

        Raises:
          UserError: the message cannot be encoded, or does not fit what is left of the conversation.
        """
        filters = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        options = replace(self._options, sampling=replace(self._options.sampling, **filters))
        continues = self._state is not None and hasattr(self._tokenizer, "encode_reply")
        ids = self._encode(message, continues)
        state, progress = self._resume(ids, options) if continues else self._start(ids, options)
        while True:
            self._state = state
            fetched = progress.tokens_BC, progress.length_B, progress.waiting_B, progress.ended_B
            tokens_C, length, waits, ended = (array[0] for array in multihost.to_host(fetched))
            self._length = int(length)
            self._closed = bool(waits) and self._closes(int(tokens_C[length - 1]))
            yield tokens_C[self._begin : self._length].tolist()
            if ended or waits or self._length - self._begin >= limit:
                return
            state, progress = sampler.advance_chunk(self._params, state, self._key, VERSION, options=options)

    def _closes(self, token: int) -> bool:
        """Return whether this token ends a turn by itself, unlike a stop string."""
        own = {*self._options.sampling.stop_token_ids}.difference(self._tokenizer.stop_ids)
        return token in self._options.stop_ids and token not in own

    def _end_turn_with(self, token: int) -> None:
        """Put this token in the place of the last one, which is not in the cache yet."""
        state = cast(State, self._state)
        token_W = jnp.full_like(state.rows.token_W, token)
        self._state = replace(state, rows=replace(state.rows, token_W=token_W))

    def logp(self) -> list[float]:
        """Return the log-probs of the tokens of the last answer, at its temperature and before filters."""
        assert self._state is not None
        logp_BC = multihost.to_host(self._state.rows.logp_BC)
        return logp_BC[0, self._begin : self._length].tolist()

    def _encode(self, message: str, continues: bool) -> Sequence[int]:
        try:
            if continues:
                chat = with_tools(cast(ConversationTokenizer, self._tokenizer), self.tools)
                reply = [{"role": "user", "content": message}]
                end, ids = end_before(chat, reply), chat.encode_reply(reply)
                if self._closed:  # by any stop id: the last token of a chat may differ from that of an earlier turn
                    self._end_turn_with(end)
                else:
                    ids = [end, *ids]
            else:
                ids = self.encode(message)
        except ValueError as problem:
            raise UserError(str(problem)) from problem
        check_ids(ids, self._options.model.vocab_size, message)
        self.opened = bool(opening_of(self._tokenizer, ids))
        return ids

    def _start(self, ids: Sequence[int], options: SampleOptions) -> tuple[State, sampler.Progress]:
        prompts = sampler.place_prompts([ids], [self._next], options)
        self._next, self._begin = self._next + 1, 0
        return sampler.start(self._params, prompts, self._key, options=options)

    def _resume(self, ids: Sequence[int], options: SampleOptions) -> tuple[State, sampler.Progress]:
        state, limit = cast(State, self._state), options.sampling.max_tokens
        begin = self._length + len(ids)
        if begin >= limit:
            raise UserError(
                f"the conversation is full: wanted at most {limit} tokens after its first message, got {begin}; "
                "/reset begins a new one, --context allows longer ones"
            )
        rows = state.rows  # of a turn that was cut no further token is sampled
        ended = replace(rows, waiting_W=rows.waiting_W | rows.active_W, active_W=jnp.zeros_like(rows.active_W))
        replies = sampler.pad_replies([ids] * len(rows.length_B))
        placed = multihost.to_devices(replies, named_sharding(options.mesh, "batch"))
        self._state, self._begin = None, begin
        return sampler.resume(self._params, replace(state, rows=ended), placed, self._key, VERSION, options=options)
