"""Ends samples at a stop token, or at the token that completes a stop string.

A string may begin in one token and end in another. `Matcher` is an automaton over tokens: its state is the longest
prefix of a stop string that the text so far ends with (Aho and Corasick, 1975, over the bytes of each token), so
that decoding needs one integer for each sample, and no text. The token that completes a string belongs to the sample
with all its text, like a stop token.

Axes: B samples, M tokens of a block, V vocabulary, S states, C classes of tokens with the same transitions.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.config.protocols import Tokenizer
from gspax.errors import UserError
from gspax.sampler.token_sampling import is_stop
from gspax.types import Array

_TRIED = 64  # tokens of each random text that is compared with the tokenizer's decoding


@dataclass(frozen=True)
class Matcher:
    """An automaton that finds stop strings. Its last state is that of a completed string; equal digests, equal tables.

    The tables are constants of the compiled programs. A table [S, V] would be large; most tokens are in few classes.
    """

    digest: str
    class_V: np.ndarray = field(compare=False, repr=False)  # int32
    next_SC: np.ndarray = field(compare=False, repr=False)  # int32, the state after a token
    start: int = 0  # the state before the first token of a turn

    @property
    def done(self) -> int:
        """The state after a token that completed a stop string."""
        return len(self.next_SC) - 1


def stop_ids(tokenizer: Tokenizer, sampling: Sampling) -> tuple[int, ...]:
    """Return the stop tokens: the tokenizer's, then the experiment's."""
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *sampling.stop_token_ids)))


def make_matcher(tokenizer: Tokenizer, sampling: Sampling, vocab_size: int) -> Matcher | None:
    """Make the automaton for `sampling.stop`; None without stop strings.

    UserError if the tokenizer does not say which bytes its tokens stand for, or decodes to other ones.
    """
    if not sampling.stop:
        return None
    if not isinstance(tokenizer, Hashable):
        raise UserError(f"sampling.stop: wanted a tokenizer that can be hashed, got {type(tokenizer).__name__}")
    return _make_matcher(tokenizer, tuple(sampling.stop), vocab_size)


@functools.lru_cache(maxsize=4)
def _make_matcher(tokenizer: Tokenizer, strings: tuple[str, ...], vocab_size: int) -> Matcher:
    token_bytes: Callable[..., Sequence[bytes]] = tokenizer.token_bytes  # type: ignore[attr-defined]
    within, first = token_bytes(vocab_size), token_bytes(vocab_size, first=True)
    _check_bytes(tokenizer, within, first)
    next_SX = _byte_table(strings)
    next_SV = _follow_all(next_SX, within)
    start = 0
    if first != within:  # the state before a turn is a separate one
        first_1V = _follow_all(next_SX, first)[:1]
        next_SV = np.concatenate([next_SV[:-1], first_1V, next_SV[-1:]])
        start = len(next_SV) - 2
        next_SV[next_SV == start] += 1  # the completed state has moved
    column_V = np.ascontiguousarray(next_SV.T).view(np.dtype((np.void, next_SV.shape[0] * next_SV.itemsize)))
    _, place_C, class_V = np.unique(column_V.reshape(-1), return_index=True, return_inverse=True)
    next_SC, class_V = next_SV[:, place_C].astype(np.int32), class_V.reshape(-1).astype(np.int32)
    digest = hashlib.blake2b(next_SC.tobytes() + class_V.tobytes(), digest_size=16).hexdigest()
    return Matcher(digest, class_V, next_SC, start)


def _check_bytes(tokenizer: Tokenizer, within: Sequence[bytes], first: Sequence[bytes]) -> None:
    """Raise a UserError if the tokenizer decodes random tokens to other bytes than `token_bytes` says."""
    known = np.arange(min(tokenizer.vocab_size, len(within)))
    rng, usable = np.random.default_rng(0), np.setdiff1d(known, tokenizer.stop_ids)
    for _ in range(8):
        ids = rng.choice(usable, _TRIED).tolist()
        text = b"".join([first[ids[0]], *(within[i] for i in ids[1:])]).decode(errors="replace")
        decoded = tokenizer.decode(ids)
        if text != decoded and "\N{REPLACEMENT CHARACTER}" not in text + decoded:
            raise UserError(
                "sampling.stop: wanted a tokenizer that decodes to the texts of its tokens (token_bytes), got "
                f"{decoded[:40]!r} for {text[:40]!r}"
            )


def _byte_table(strings: Iterable[str]) -> np.ndarray:
    """Tabulate the state after each byte, int16 [S, 256]; the last state, a completed string, is absorbing."""
    children: list[dict[int, int]] = [{}]
    ends = set[int]()
    for string in strings:
        node = 0
        for byte in string.encode():
            node = children[node].setdefault(byte, len(children))
            children += [{}] * (node == len(children))
        ends.add(node)
    table, behind = np.zeros((len(children), 256), np.int16), [0] * len(children)
    waiting = deque([0])
    while waiting:  # breadth first: the failure state of a node is complete before the node is processed
        node = waiting.popleft()
        if node:
            table[node] = table[behind[node]]
        for byte, child in children[node].items():
            behind[child] = int(table[node, byte]) if node else 0
            table[node, byte] = child
            waiting.append(child)
            if behind[child] in ends:
                ends.add(child)
    number = np.zeros(len(children), np.int16)
    kept = [node for node in range(len(children)) if node not in ends]
    number[kept] = np.arange(len(kept))
    number[list(ends)] = len(kept)
    return np.concatenate([number[table[kept]], np.full((1, 256), len(kept), np.int16)])


def _follow_all(next_SX: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Compute the state after each text from each state, int16 [S, V]."""
    length_V = np.array([*map(len, texts)])
    order_V = np.argsort(-length_V, kind="stable")  # the longest first
    state_SV = np.repeat(np.arange(len(next_SX), dtype=np.int16)[:, None], len(texts), axis=1)
    for place in range(length_V.max(initial=0)):
        longer = order_V[: int((length_V > place).sum())]
        byte = np.array([texts[i][place] for i in longer.tolist()])
        state_SV[:, longer] = next_SX[state_SV[:, longer], byte[None]]
    return state_SV


def reset(state_B: Array | None, begins_B: Array, matcher: Matcher | None) -> Array | None:
    """Reset the states of the samples that begin a turn; None without a matcher."""
    return None if matcher is None or state_B is None else jnp.where(begins_B, matcher.start, state_B)


def has_ended(state_B: Array | None, token_B: Array, stop_ids: tuple[int, ...], matcher: Matcher | None) -> Array:
    """Return whether each sample ended with its last token, given the state after that token, bool [B]."""
    stops_B = is_stop(token_B, stop_ids)
    return stops_B if matcher is None or state_B is None else stops_B | (state_B == matcher.done)


def follow(
    state_B: Array | None, token_BM: Array, stop_ids: tuple[int, ...], matcher: Matcher | None
) -> tuple[Array | None, Array]:
    """Compute the states after each token of a block (int32 [B, M]; None without a matcher), and which tokens end it.

    Args:
      state_B: int32, the states before the block.
      token_BM: int32.
      stop_ids: the stop tokens.
      matcher: the automaton of the stop strings.
    """
    followed_BM = None
    if matcher is not None and state_B is not None:
        class_BM, next_SC, states = jnp.asarray(matcher.class_V)[token_BM], jnp.asarray(matcher.next_SC), [state_B]
        for place in range(token_BM.shape[1]):
            states.append(next_SC[states[-1], class_BM[:, place]])
        followed_BM = jnp.stack(states[1:], axis=1)
    state_X = None if followed_BM is None else followed_BM.reshape(-1)
    return followed_BM, has_ended(state_X, token_BM.reshape(-1), stop_ids, matcher).reshape(token_BM.shape)


def follow_first(token_B: Array, stop_ids: tuple[int, ...], matcher: Matcher | None) -> tuple[Array | None, Array]:
    """Apply `follow` to the first token of each sample."""
    state_B = reset(jnp.zeros_like(token_B), jnp.ones(token_B.shape, bool), matcher)
    state_B1, stops_B1 = follow(state_B, token_B[:, None], stop_ids, matcher)
    return None if state_B1 is None else state_B1[:, 0], stops_B1[:, 0]


def find_stop(tokens: Iterable[int], matcher: Matcher, turn: Sequence[int] = ()) -> int:
    """Count the tokens up to the one that completes a stop string; 0 if none does.

    Args:
      tokens: the new tokens.
      matcher: the automaton of the stop strings.
      turn: the tokens before them in the same turn.
    """
    state = matcher.start
    for i in turn:
        state = int(matcher.next_SC[state, matcher.class_V[i]])
    for count, i in enumerate(tokens, start=1):
        state = int(matcher.next_SC[state, matcher.class_V[i]])
        if state == matcher.done:
            return count
    return 0


@functools.lru_cache(maxsize=4)
def always_stopping(matcher: Matcher) -> tuple[int, ...]:
    """Return the tokens that contain a whole stop string, so that they end any sample."""
    return tuple(np.flatnonzero((matcher.next_SC == matcher.done).all(axis=0)[matcher.class_V]).tolist())
