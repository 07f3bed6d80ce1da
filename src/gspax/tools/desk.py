"""Answers the requests of `gspax serve`: those with the same settings are sampled side by side."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import jax
import numpy as np

from gspax.config import Sampling
from gspax.config.protocols import ConversationTokenizer
from gspax.data.chat_template import opening_of
from gspax.errors import brief
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rewards.environments.tool_calls import parse_hermes
from gspax.rollout.agents.history import encode_chat, encode_text, read_answer
from gspax.rollout.agents.openai import Answered, Asked, Refusal
from gspax.run import interrupt
from gspax.sampler.sampler import make_options, round_to_power, sample
from gspax.tools.policy import LoadedPolicy

TOGETHER = 0.02  # seconds in which requests that arrive are sampled together
SMALLEST = 16  # lengths are rounded up to 16, 32, 64, …, so that few programs are compiled


@dataclass(frozen=True)
class Order:
    """A request to sample."""

    asked: Asked
    tokens: list[int]  # of the prompt
    most: int  # tokens of the answer
    sampling: Sampling  # temperature, filters, and stops
    answer: Future[Answered]


@dataclass(frozen=True)
class Desk:
    """Takes requests, in any thread."""

    policy: LoadedPolicy
    orders: queue.SimpleQueue[Order]

    def ask(self, asked: Asked, *, again: bool = False) -> Future[Answered]:
        """Begin the answer to a request; a request that comes again is another one. Raises Refusal."""
        own, tokenizer = self.policy.sampling, self.policy.tokenizer
        given = {name: getattr(asked, name) for name in ("temperature", "top_p") if getattr(asked, name) is not None}
        sampling = replace(own, **given, stop=tuple(dict.fromkeys((*own.stop, *asked.stop))))
        try:
            tokens = self._encode(asked)
        except Refusal:
            raise
        except Exception as problem:  # of what a template or a tokenizer is not made for
            raise Refusal(f"messages: {brief(problem)}") from problem
        most = min(asked.most or own.max_tokens, own.max_tokens)
        if not 0 < len(tokens) <= own.max_prompt_tokens:
            message = f"wanted a prompt of 1 to {own.max_prompt_tokens} tokens (--context less --max-tokens), got "
            raise Refusal(f"{message}{len(tokens)}", code="context_length_exceeded", param="messages")
        if asked.stop and not hasattr(tokenizer, "token_bytes"):
            raise Refusal("stop: wanted none with this tokenizer, got a text", param="stop")
        order = Order(asked, tokens, most, sampling, Future())
        self.orders.put(order)
        return order.answer

    def _encode(self, asked: Asked) -> list[int]:
        tokenizer = cast(ConversationTokenizer, self.policy.tokenizer)  # or a part of it
        if asked.messages:
            if not hasattr(tokenizer, "encode_chat"):
                raise Refusal("messages: wanted /v1/completions, because the policy's tokenizer has no chat template")
            return encode_chat(tokenizer, asked)
        (prompt,) = asked.prompts
        if isinstance(prompt, str):
            return encode_text(tokenizer, prompt)
        if wrong := [token for token in prompt if not 0 <= token < self.policy.model.vocab_size]:
            raise Refusal(f"prompt: wanted ids below {self.policy.model.vocab_size}, got {wrong[0]}", param="prompt")
        return list(prompt)


def serve(desk: Desk, key: jax.Array, rows: int) -> None:
    """Answer requests until a signal ends it, at most `rows` at once, in the order of their arrival."""
    waiting, number = list[Order](), 0
    while True:
        interrupt.stop_point()
        with suppress(queue.Empty):
            waiting += [] if waiting else [desk.orders.get(timeout=interrupt.POLL)]
            while True:
                waiting.append(desk.orders.get(timeout=TOGETHER))
        alike = [order for order in waiting if order.sampling == waiting[0].sampling][:rows]
        if alike:
            waiting = [order for order in waiting if order not in alike]
            sample_orders(desk.policy, alike, key, number)
            number += len(alike)


def sample_orders(policy: LoadedPolicy, orders: Sequence[Order], key: jax.Array, first: int) -> None:
    """Sample orders with the same settings side by side; those that end early are answered at once.

    Lengths and the number of rows are rounded up, so that few programs are compiled. What was sampled beyond an order's
    limit is left out: a token does not depend on those after it.

    Args:
      first: the number of the first one, which its random numbers depend on.
    """
    try:
        count = max(round_to_power(len(orders), 1), batch_shards(policy.mesh))
        longest = min(policy.sampling.max_tokens, round_to_power(max(order.most for order in orders), SMALLEST))
        sampling = replace(orders[0].sampling, prompts=count, group=1, max_tokens=longest, chunk=32)
        options = make_options(policy.model, policy.tokenizer, sampling, policy.mesh)
        prompts = [order.tokens for order in orders] + [orders[0].tokens] * (count - len(orders))
        finish = partial(_finish, policy, options.stop_ids)

        def ended(rows: Mapping[int, np.ndarray]) -> None:
            for row, tokens in rows.items():
                if row < len(orders) and not orders[row].asked.logprobs:
                    finish(orders[row], tokens[: orders[row].most].tolist())

        ids = list(range(first, first + count))
        rollout = multihost.to_host(sample(policy.weights, prompts, ids, key, options, on_ended=ended))
        for row, order in enumerate(orders):
            start = rollout.prompt_length_B[row]
            kept = slice(start, start + min(rollout.length_B[row], order.most))
            finish(order, rollout.tokens_BT[row, kept].tolist(), rollout.logp_BT[row, kept].tolist())
    except Exception as problem:  # of this batch: the others go on
        refusal = problem if isinstance(problem, Refusal) else Refusal(brief(problem), status=500)
        for order in orders:
            with suppress(InvalidStateError):
                order.answer.set_exception(refusal)


def _finish(
    policy: LoadedPolicy, stop_ids: Sequence[int], order: Order, tokens: Sequence[int], logps: Sequence[float] = ()
) -> None:
    """Answer an order, unless that was done before."""
    if order.answer.done():
        return
    tokenizer, stops = policy.tokenizer, order.sampling.stop
    text = opening_of(tokenizer, order.tokens) * bool(order.asked.messages) + tokenizer.decode(tokens)
    answered = read_answer(order.asked, text, parse_hermes, stops, os.urandom(4).hex())
    if tokens[-1] not in stop_ids and not any(stop in text for stop in stops):
        answered = replace(answered, finish="length")
    pairs = tuple(zip(map(tokenizer.decode, [[token] for token in tokens]), logps, strict=True)) if logps else ()
    with suppress(InvalidStateError):  # the client has gone
        order.answer.set_result(replace(answered, read=len(order.tokens), written=len(tokens), logps=pairs))
