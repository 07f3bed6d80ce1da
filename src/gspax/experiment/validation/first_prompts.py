"""Checks that encode the first prompts and demonstrations, as a run does. Each message is one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gspax.config import Evaluation, Sampling, WarmStart
from gspax.config.functions import named_parts
from gspax.config.protocols import DataSource, Environment, Problem, Tokenizer
from gspax.data.chat import ChatTokenizer, tools_of
from gspax.data.chat_template import opening_of, plain_lead, thinking_marks
from gspax.data.problem import encode_prompt, read_problem
from gspax.data.tokenizer import check_ids
from gspax.errors import UserError, describe_error, shorten

ENCODED = 64  # problems of each split
STARTED = 8  # problems of each split with an environment, whose `reset` may take long


_Encode = Callable[[Problem], list[int]]


class Texts(NamedTuple):
    """The parts of an experiment that its texts and their tokens depend on."""

    data: DataSource
    environment: Environment | None
    tokenizer: Tokenizer
    vocab_size: int
    sampling: Sampling
    steps: int
    evaluation: Evaluation
    warm_start: WarmStart | None


class _Split(NamedTuple):
    """Texts that a run encodes."""

    key: str  # of a message
    encode: Callable[[int], int]  # counts the tokens of text number `index`; raises if it cannot be used
    tried: int  # the number of texts to encode
    limit: int  # tokens
    limit_key: str


def prompt_problems(texts: Texts, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield a sentence for each split whose first prompts all cannot be used; warn if some cannot.

    A prompt cannot be used if it is too long or cannot be encoded. Demonstrations are encoded too, and one prompt is
    decoded. A tokenizer that is located when it first encodes need not be on this machine: that is a warning.
    """
    try:
        texts.tokenizer.encode("")
    except UserError as problem:
        warn(f"tokenizer: {problem}; no prompt was encoded")
        return
    except Exception:  # a user's tokenizer may not encode an empty text
        pass
    for split in _splits(texts, _encoder(texts)):
        yield from _check(split, warn)
    _warn_of_thinking(texts, _encoder(texts), warn)
    _warn_of_lead(texts, warn)
    yield from _decoded(texts, _encoder(texts))


def _splits(texts: Texts, encode: _Encode) -> Iterator[_Split]:
    sampling, data, evaluation = texts.sampling, texts.data, texts.evaluation
    most, stage = (ENCODED if texts.environment is None else STARTED), texts.warm_start

    def of(load: Callable[[int], Problem]) -> Callable[[int], int]:
        return lambda index: len(encode(read_problem(load, index)))

    key, limit = "sampling.max_prompt_tokens", sampling.max_prompt_tokens
    problems = min(most, sampling.prompts * texts.steps)
    yield _Split("data: training prompts", of(data.train), problems, limit, key)
    yield _Split("data: held-out prompts", of(data.heldout), min(most, evaluation.problems), limit, key)
    for name, task in named_parts(evaluation.tasks, "evaluation.tasks.").items():
        own = task.max_prompt_tokens
        count = min(most, task.problems or getattr(task.data, "heldout_count", 1))
        own_key = f"{name}.max_prompt_tokens" if own else key
        yield _Split(f"{name}: prompts", of(task.data.heldout), count, own or limit, own_key)
    if stage is not None:
        key, limit = "sampling.max_prompt_tokens + max_tokens", limit + sampling.max_tokens
        count = min(most, stage.rows * stage.steps)
        yield _Split("warm_start: prompts with demonstrations", _demonstration(texts, encode), count, limit, key)


def _encoder(texts: Texts) -> _Encode:
    """Make a function that encodes a problem's prompt or first messages. UserError if there are no tokens."""
    environment, tokenizer = texts.environment, texts.tokenizer

    def encode(problem: Problem) -> list[int]:
        if environment is None:
            tokens = list(encode_prompt(tokenizer, problem))
        else:
            chat: Any = tokenizer  # has the methods of a `ConversationTokenizer`
            tokens = list(chat.encode_chat(list(environment.reset(problem)[1]), tools_of(environment)))
        check_ids(tokens, texts.vocab_size, problem.prompt)
        if not tokens:
            raise UserError(f"wanted at least one token, got none for the prompt {shorten(repr(problem.prompt))}")
        return tokens

    return encode


def _demonstration(texts: Texts, encode: _Encode) -> Callable[[int], int]:
    """Make a function that counts the tokens of a prompt and its demonstration, without an environment's replies."""
    stage = texts.warm_start
    assert stage is not None
    chat: Any = texts.tokenizer  # encodes completions, as `tokenizer_problems` has checked

    def count(index: int) -> int:
        problem = read_problem(texts.data.train, index)
        try:
            messages = _shown(stage, problem, index)
        except Exception:  # `check_calls` reports it
            return 0
        turns = [chat.encode_completion(message) for message in messages if isinstance(message, str)]
        for turn, message in zip(turns, messages, strict=False):
            check_ids(turn, texts.vocab_size, str(message))
        return len(encode(problem)) + sum(len(turn) + 1 for turn in turns)  # each with its stop token

    return count


def _shown(stage: WarmStart, problem: Problem, index: int) -> list[str]:
    """Return the messages of a demonstration."""
    shown = stage.demonstration(problem, np.random.default_rng((0, index)))
    return [shown] if isinstance(shown, str) else [*shown]


def _warn_of_thinking(texts: Texts, encode: _Encode, warn: Callable[[str], None]) -> None:
    """Warn about demonstrations that do not end the thinking that their prompts open: all of them would be thinking."""
    stage, open_ones, tried = texts.warm_start, list[str](), 0
    for index in range(min(STARTED, stage.rows * stage.steps) if stage is not None else 0):
        assert stage is not None
        with contextlib.suppress(Exception):  # told above, or by `check_calls`
            problem = read_problem(texts.data.train, index)
            if not (opened := opening_of(texts.tokenizer, encode(problem))):
                continue
            opening, end = thinking_marks(opened)
            messages, tried = _shown(stage, problem, index), tried + 1
            open_ones += [message for message in messages if end not in message][:1]
    if open_ones:
        warn(
            f"warm_start: {len(open_ones)} of {tried} demonstrations are thinking without an answer, because their "
            f"prompts end with {opening}: wanted a message such as 'thoughts\\n{end}\\n\\nanswer', "
            f"got {shorten(repr(open_ones[0]))}"
        )


def _warn_of_lead(texts: Texts, warn: Callable[[str], None]) -> None:
    """Warn about demonstrated answers without what the chat template writes between a prompt and an answer."""
    stage, tokenizer = texts.warm_start, texts.tokenizer
    if stage is None or not isinstance(tokenizer, ChatTokenizer):
        return
    with contextlib.suppress(Exception):  # told above, or by `check_calls`
        lead = plain_lead(tokenizer.template)
        answer = _shown(stage, read_problem(texts.data.train, 0), 0)[-1]
        if not (answer.startswith(lead) or (lead.strip() and lead.strip() in answer)):
            warn(
                f"warm_start: wanted demonstrations that begin with {lead!r}, as the chat template in {tokenizer.path} "
                f"begins an answer after a prompt, got {shorten(repr(answer))}"
            )


def _check(split: _Split, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield sentences if none of the first texts can be used; warn if some cannot."""
    reasons, long = [], []
    for index in range(split.tried):
        try:
            tokens = split.encode(index)
        except Exception as error:  # by a user's tokenizer, source or environment
            reasons.append(str(error) if isinstance(error, UserError) else describe_error(error))
        else:
            long += [tokens] if tokens > split.limit else []
    sentences = []
    if long:
        lengths = f"{min(long)} to {max(long)}" if min(long) < max(long) else str(max(long))
        limit = f"{split.limit_key}={split.limit}"
        sentences.append(f"{split.key}: {len(long)} of {split.tried} have more than {limit} tokens ({lengths})")
    if reasons:
        sentences.append(f"{split.key}: {len(reasons)} of {split.tried} cannot be encoded: {shorten(reasons[0])}")
    if len(long) + len(reasons) == split.tried:
        yield from sentences
    else:
        for sentence in sentences:
            warn(f"{sentence}; they are skipped")


def _decoded(texts: Texts, encode: _Encode) -> Iterator[str]:
    """Yield a sentence if the tokenizer does not decode to a text."""
    try:
        tokens = encode(read_problem(texts.data.train, 0))
    except Exception:  # told above
        return
    try:
        text = texts.tokenizer.decode(tokens)
    except Exception as error:
        yield f"tokenizer: decode raised {describe_error(error)} for {len(tokens)} ids of a prompt"
        return
    if not isinstance(text, str):
        yield f"tokenizer: wanted a text from decode, got {shorten(repr(text))}"
