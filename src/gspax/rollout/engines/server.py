"""The interface of one server for `remote.Remote`, whichever program it runs (`vllm`, `sglang`)."""

from __future__ import annotations

import base64
import binascii
import io
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from gspax.config import ModelConfig, Sampling, sparse_numbers
from gspax.rollout.engines.client import Client, RefusedError
from gspax.rollout.engines.contract import Served
from gspax.rollout.engines.weights import Written

# numpy parses a header with `ast`, which in CPython 3.11 fails now and then while another thread does the same
ONE_HEADER = threading.Lock()
EXCLUDED = -9000.0  # a log-prob below it is of a token that a filter excludes; vLLM sends -9999 for -inf
ROUNDING = 1e-4  # of the sum of a set's probabilities


class Ask(NamedTuple):
    """A completion to sample, or to continue."""

    tokens: Sequence[int]  # the prompt, and what follows it so far
    most: int  # new tokens
    seed: int  # 0 to 2^53 - 1
    sampling: Sampling
    greedy: bool
    stop_ids: tuple[int, ...]
    keep_experts: bool
    mask_size: int = 0  # K: the most tokens that are wanted of those that each token is chosen from; 0: none


class Answer(NamedTuple):
    """The new tokens of a completion."""

    tokens: list[int]
    logps: list[float]  # of the distribution that they were sampled from
    stopped: bool  # the last one is a stop token; else there are as many as were asked for
    expert_TLA: np.ndarray | None  # of all tokens but the last, those of the `Ask` included
    # With `mask_size`, of each token: the ids that it was chosen from, over which its log-prob is, and whether there
    # were more than K
    kept: Sequence[list[int]] = ()
    cut: Sequence[bool] = ()


class Server(Protocol):
    """One server. All methods raise `UnreachableError` or `RefusedError`, with its address."""

    reads_changes: bool  # whether `load` reads a version that holds the changes of another one

    @property
    def address(self) -> str:
        """http://HOST:PORT."""

    def sample(self, ask: Ask) -> Answer:
        """Sample one completion."""

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """The log-probs of the tokens after the first, float32, at temperature 1."""

    def load(self, written: Written) -> None:
        """Load a version while nothing is sampled, and forget all cached keys and values."""

    def pause(self) -> None:
        """Hold all requests; their tokens stay."""

    def resume(self) -> None:
        """Go on with them."""

    def state(self, timeout: float) -> Served:
        """The version that is loaded, and the limits."""

    def close(self) -> None:
        """End all requests that other threads wait for."""


class Endpoint:
    """The common part of all servers: an address that is called, and the model that the server must have."""

    reads_changes = False

    def __init__(self, address: str, model: ModelConfig, timeout: float) -> None:
        self._client, self._model = Client(address, timeout), model

    @property
    def address(self) -> str:
        """http://HOST:PORT."""
        return self._client.address

    def close(self) -> None:
        """End all requests."""
        self._client.close()


def truncated(sent: int, got: int, where: str) -> RefusedError:
    """The error of a server that has read another prompt than it was sent."""
    return RefusedError(
        f"{where}: wanted the prompt that was sent, {sent} tokens, got {got}: it was truncated or tokenized again"
    )


def check_answer(ask: Ask, answer: Answer, where: str) -> Answer:
    """The answer. RefusedError unless it is what was asked for."""
    count, stop = len(answer.tokens), bool(answer.tokens) and answer.tokens[-1] in ask.stop_ids
    if not 0 < count <= ask.most or len(answer.logps) != count:
        raise RefusedError(
            f"{where}: wanted 1 to {ask.most} tokens with a log-prob each, got {count} and {len(answer.logps)}"
        )
    if not (stop if answer.stopped else count == ask.most):
        raise RefusedError(
            f"{where}: wanted {ask.most} tokens or a stop token at the end, got {count} tokens: its context is shorter "
            "than prompt and completion, or it stops at other tokens"
        )
    if not np.isfinite(answer.logps).all() or max(answer.logps) > 1e-3:
        raise RefusedError(f"{where}: wanted log-probs of at most 0, got {min(answer.logps)} to {max(answer.logps)}")
    if ask.mask_size and not len(answer.kept) == len(answer.cut) == count:
        raise RefusedError(f"{where}: wanted the tokens that each of {count} was chosen from, got {len(answer.kept)}")
    if ask.keep_experts and (answer.expert_TLA is None or len(answer.expert_TLA) != len(ask.tokens) + count - 1):
        got = "none" if answer.expert_TLA is None else f"those of {len(answer.expert_TLA)}"
        raise RefusedError(f"{where}: wanted the experts of {len(ask.tokens) + count - 1} tokens, got {got}")
    return answer


def keep_set(logps: Mapping[int, float], token: int, size: int) -> tuple[list[int], float, bool]:
    """The set that a token was chosen from, its log-prob over it, and whether more than `size` tokens were left.

    Filters keep tokens that tie with the last one, so that they may leave more than `top_k`.

    Args:
      logps: of the `size` most probable tokens and of `token`; below `EXCLUDED` where a filter excludes one.

    Raises:
      ValueError: a filter excludes the token.
    """
    left = {other: logp for other, logp in logps.items() if logp > EXCLUDED}
    ordered = sorted(left, key=lambda other: (-left[other], other))
    if token not in left or left[token] < left[ordered[:size][-1]] - ROUNDING:
        raise ValueError(f"token {token}, which the filters exclude")
    ids = ordered[:size] if token in ordered[:size] else [*ordered[: size - 1], token]
    mass = math.fsum(math.exp(left[other]) for other in ids)
    return ids, min(0.0, left[token] - math.log(mass)), mass < 1 - ROUNDING


def pad_sets(kept: Sequence[Sequence[int]], size: int, vocab_size: int) -> np.ndarray:
    """The sets of T tokens as ids [T, K], then the vocabulary's size."""
    kept_TK = np.full((len(kept), size), vocab_size, np.int32)
    for ids_K, ids in zip(kept_TK, kept, strict=True):
        ids_K[: len(ids)] = ids
    return kept_TK


def read_experts(text: object, model: ModelConfig, where: str) -> np.ndarray | None:
    """The experts [T, L, A] of the model's sparse layers, from base64 of an .npy file; None if there are none."""
    if text is None:
        return None
    try:
        file = io.BytesIO(base64.b64decode(str(text), validate=True))
        with ONE_HEADER:
            array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error):
        raise RefusedError(f"{where}: wanted experts as base64 of an .npy file, got something else") from None
    return select_layers(array, model, where)


def select_layers(expert_TLA: np.ndarray, model: ModelConfig, where: str) -> np.ndarray:
    """The sparse layers of an array of experts, which may have the others too."""
    sparse = list(sparse_numbers(model))
    if expert_TLA.ndim == 3 and expert_TLA.shape[1] == model.num_hidden_layers != len(sparse):
        expert_TLA = expert_TLA[:, sparse]
    if expert_TLA.shape[1:] != (len(sparse), model.num_experts_per_tok) or expert_TLA.max(initial=0) >= (
        model.num_experts
    ):
        raise RefusedError(
            f"{where}: wanted experts [tokens, {len(sparse)}, {model.num_experts_per_tok}] below {model.num_experts}, "
            f"got {list(expert_TLA.shape)} up to {expert_TLA.max(initial=0)}"
        )
    return expert_TLA
