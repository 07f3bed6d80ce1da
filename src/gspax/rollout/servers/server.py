"""Defines the interface of one server for `sampler.ServerSampler`, for any program it runs (`vllm`, `sglang`)."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from gspax.config import ModelConfig, Sampling, sparse_numbers
from gspax.errors import FailureError, UserError, shorten
from gspax.experiment.validation.servers import is_address
from gspax.http_client import SMALL, Client, RefusedError, UnreachableError
from gspax.rollout.servers.weights import Written
from gspax.sampler.stops import Matcher, always_stopping, find_stop

# numpy parses a header with `ast`, which in CPython 3.11 fails now and then while another thread does the same
ONE_HEADER = threading.Lock()
EXCLUDED = -9000.0  # a log-prob below it is of a token that a filter excludes; vLLM sends -9999 for -inf
ROUNDING = 1e-4  # of the sum of a set's probabilities
LARGEST_LOGP = 1e-3  # 0, and what rounding adds
T = TypeVar("T")


class WrongLogpError(RefusedError):
    """An answer has a log-prob that is null, not finite, or above 0."""


class CompletionRequest(NamedTuple):
    """A request to sample a completion, or to continue one."""

    tokens: Sequence[int]  # the prompt, and what follows it so far
    max_tokens: int  # new ones, at most
    seed: int  # 0 to 2^53 - 1
    sampling: Sampling
    greedy: bool
    stop_ids: tuple[int, ...]
    keep_experts: bool
    mask_size: int = 0  # K: the most tokens that are wanted of those that each token is chosen from; 0: none
    matcher: Matcher | None = None  # of stop strings, which the server does not know
    turn: Sequence[int] = ()  # the last ones of the tokens, of the turn that is continued

    def server_stops(self) -> list[int]:
        """Return the tokens at which the server stops: stop tokens, and tokens that hold a whole stop string."""
        return [*self.stop_ids, *(always_stopping(self.matcher) if self.matcher else ())]


class Answer(NamedTuple):
    """The new tokens of a completion."""

    tokens: list[int]
    logps: list[float]  # of the distribution that they were sampled from
    stopped: bool  # the last token is a stop token or completes a stop string; else there are `max_tokens`
    expert_TLA: np.ndarray | None  # of all tokens but the last, including those of the request
    # With `mask_size`, of each token: the ids that it was chosen from, over which its log-prob is, and whether there
    # were more than K
    kept: Sequence[list[int]] = ()
    cut: Sequence[bool] = ()


@dataclass(frozen=True)
class ServerState:
    """What a server reports about itself."""

    address: str
    version: int | None  # of the weights that it samples with; None before the first push and after a restart
    digest: str = ""  # of all checksums of these weights (`weights.Manifest`)
    limits: dict[str, int] = field(default_factory=dict)  # `max_tokens` of prompt and completion, `vocab_size`, …
    dtype: str = ""  # that it computes in
    instance: str = ""  # another one after each load: what has been answered before was not of these weights


class Server(Protocol):
    """One inference server. All methods raise `UnreachableError` or `RefusedError`, with its address."""

    @property
    def address(self) -> str:
        """The server's address, http://HOST:PORT."""

    def sample(self, ask: CompletionRequest) -> Answer:
        """Sample one completion."""

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Compute the log-probs of the tokens after the first, float32, at temperature 1."""

    def load(self, written: Written) -> None:
        """Load a version while nothing is sampled, and forget all cached keys and values."""

    def pause(self) -> None:
        """Hold all requests; their tokens stay."""

    def resume(self) -> None:
        """Continue the requests that `pause` held."""

    def state(self, timeout: float) -> ServerState:
        """Fetch the loaded version and the limits."""

    def close(self) -> None:
        """End all requests that other threads wait for."""


class Endpoint:
    """The base class of servers: an address to call, and the model that the server must have."""

    def __init__(self, address: str, model: ModelConfig, timeout: float) -> None:
        if not is_address(address):
            raise UserError(f"engine.addresses: wanted http://HOST:PORT, got {address[:200]!r}")
        self._client, self._model = Client(address, timeout), model

    @property
    def address(self) -> str:
        """The server's address, http://HOST:PORT."""
        return self._client.address

    def close(self) -> None:
        """End all requests."""
        self._client.close()


def require_fit(loaded: ServerState, model: ModelConfig, length: int, *, keep_experts: bool) -> None:
    """Raise FailureError unless a server has the run's model and room for its prompts and completions."""
    limits = loaded.limits
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if limits.get(name, value := getattr(model, name)) != value:
            raise FailureError(f"engine: {loaded.address}: wanted the run's model, {name} {value}, got {limits[name]}")
    if limits.get("max_tokens", length) < length:
        raise FailureError(
            f"engine: {loaded.address}: wanted a context of {length} tokens for the longest prompt and completion, got "
            f"{limits['max_tokens']}"
        )
    if loaded.dtype and loaded.dtype != model.dtype:
        raise FailureError(f"engine: {loaded.address}: wanted {model.dtype} (model.dtype), got {loaded.dtype}")
    if keep_experts and not limits.get("routed_experts", 1):
        raise FailureError(
            f'engine: {loaded.address}: wanted a server that returns experts, for routing_replay="sampler"'
        )


def longest_answer(model: ModelConfig, prompt: int, new: int, listed: int = 0) -> int:
    """Return a generous bound on the bytes of a valid answer: the entries of each token, and its experts.

    Args:
      prompt: its tokens.
      new: tokens that follow it, at most.
      listed: the most probable tokens that are listed of each new one.
    """
    experts = 6 * model.num_hidden_layers * model.num_experts_per_tok  # of a token: int32 numbers as base64
    return SMALL + (512 + experts) * (prompt + new) + 64 * listed * new


@contextlib.contextmanager
def reading(where: str, wanted: str) -> Iterator[None]:
    """Turn every exception of code that reads an answer into a RefusedError: an answer may hold anything."""
    try:
        yield
    except WrongLogpError as problem:
        raise WrongLogpError(f"{where}: {problem}") from None
    except (RefusedError, UnreachableError):
        raise
    except Exception as problem:
        reason = str(problem) if isinstance(problem, ValueError) else repr(problem)
        raise RefusedError(f"{where}: wanted {wanted}, got {shorten(reason)}") from None


def read_field(answer: object, name: str, kind: type[T]) -> T:
    """Return the value of an object's key. ValueError if it is missing or of another type (true is no integer)."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{value!r:.100} as {name}")
    return value


def read_ids(values: Sequence[object], vocab_size: int) -> list[int]:
    """Check token ids and return them. ValueError if one is no integer, or not in the vocabulary."""
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ValueError(f"{value!r:.100} as a token id, not an integer from 0 to {vocab_size - 1}")
    return list(values)  # type: ignore[arg-type]  # their types were compared


def read_logps(values: Sequence[object]) -> list[float]:
    """Check log-probs and return them. WrongLogpError if one is null, not finite, or above 0 by more than rounding."""
    for value in values:
        if type(value) not in (int, float) or not -1e30 < value <= LARGEST_LOGP:  # type: ignore[operator]
            got = f"{value!r:.100} as a log-prob, not a finite number of at most 0"
            raise WrongLogpError(f"wanted log-probs, got {got}")
    return [float(value) for value in values]  # type: ignore[arg-type]  # their types were compared


def has_stopped(reason: str, where: str) -> bool:
    """Return whether a completion ended with a stop token, not by its length. ValueError for any other reason.

    Raises:
      UnreachableError: the server has dropped the request, as it does when it ends.
    """
    if reason == "abort":
        raise UnreachableError(f"{where}: the request was aborted")
    if reason not in ("stop", "length"):
        raise ValueError(f"{reason!r:.100} as finish_reason")
    return reason == "stop"


def changed_prompt(sent: int, got: object, where: str) -> RefusedError:
    """Return the error for a server that read another prompt than the one it was sent, of `sent` tokens."""
    return RefusedError(
        f"{where}: wanted the prompt that was sent, {sent} tokens, got {got!r:.100}: it was truncated or "
        "tokenized again"
    )


def check_answer(ask: CompletionRequest, answer: Answer, where: str) -> Answer:
    """Check an answer against its request, and cut it after the first stop string. RefusedError if it does not fit."""
    count, stop = len(answer.tokens), bool(answer.tokens) and answer.tokens[-1] in ask.server_stops()
    if not 0 < count <= ask.max_tokens or len(answer.logps) != count:
        raise RefusedError(
            f"{where}: wanted 1 to {ask.max_tokens} tokens with a log-prob each, got {count} and {len(answer.logps)}"
        )
    if not (stop if answer.stopped else count == ask.max_tokens):
        raise RefusedError(
            f"{where}: wanted {ask.max_tokens} tokens or a stop token at the end, got {count} tokens: its context is "
            "shorter than prompt and completion, or it stops at other tokens"
        )
    if inner := set(answer.tokens[:-1]).intersection(ask.stop_ids):
        raise RefusedError(f"{where}: wanted no token after a stop token, got one after {min(inner)}")
    if ask.mask_size and not len(answer.kept) == len(answer.cut) == count:
        raise RefusedError(f"{where}: wanted the tokens that each of {count} was chosen from, got {len(answer.kept)}")
    if ask.keep_experts and (answer.expert_TLA is None or len(answer.expert_TLA) != len(ask.tokens) + count - 1):
        got = "none" if answer.expert_TLA is None else f"those of {len(answer.expert_TLA)}"
        raise RefusedError(f"{where}: wanted the experts of {len(ask.tokens) + count - 1} tokens, got {got}")
    return answer if ask.matcher is None else _cut_at_stop(ask, answer, ask.matcher)


def _cut_at_stop(ask: CompletionRequest, answer: Answer, matcher: Matcher) -> Answer:
    """Cut the answer after the token that completes a stop string. A token does not depend on those after it."""
    if not (count := find_stop(answer.tokens, matcher, ask.turn)):
        return answer
    expert_TLA = answer.expert_TLA
    return Answer(
        answer.tokens[:count],
        answer.logps[:count],
        True,
        None if expert_TLA is None else expert_TLA[: len(ask.tokens) + count - 1],
        answer.kept[:count],
        answer.cut[:count],
    )


def keep_set(logps: Mapping[int, float], token: int, size: int) -> tuple[list[int], float, bool]:
    """Return the set that a token was chosen from, its log-prob over it, and whether more than `size` tokens were left.

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
    """Pad the sampling sets of T tokens to ids [T, K] with the vocabulary's size."""
    kept_TK = np.full((len(kept), size), vocab_size, np.int32)
    for ids_K, ids in zip(kept_TK, kept, strict=True):
        ids_K[: len(ids)] = ids
    return kept_TK


def read_experts(text: object, count: int, model: ModelConfig, where: str) -> np.ndarray | None:
    """Decode the experts [count, L, A] of the model's sparse layers from base64 of an .npy file; None without experts.

    Nothing is allocated for what its header announces.
    """
    if text is None:
        return None
    with reading(where, "experts as base64 of an .npy file"):
        file = io.BytesIO(base64.b64decode(str(text), validate=True))
        with ONE_HEADER:
            if (version := np.lib.format.read_magic(file)) not in ((1, 0), (2, 0)):
                raise ValueError(f"one of version {version}")
            is_first = version == (1, 0)
            read_header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read_header(file)
        left = file.getbuffer()[file.tell() :]
        if dtype.kind not in "iu" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(left):
            raise ValueError(f"{len(left)} bytes of {dtype}, shape {shape!r:.100}")
        expert_TLA = np.frombuffer(left, dtype).reshape(shape, order="F" if is_fortran else "C")
    return select_layers(expert_TLA, count, model, where)


def select_layers(expert_TLA: np.ndarray, count: int, model: ModelConfig, where: str) -> np.ndarray:
    """Select the sparse layers from the experts of `count` tokens in all layers or in these. RefusedError if wrong."""
    sparse = list(sparse_numbers(model))
    if expert_TLA.ndim == 3 and expert_TLA.shape[1] == model.num_hidden_layers != len(sparse):
        expert_TLA = expert_TLA[:, sparse]
    low, high, shape = expert_TLA.min(initial=0), expert_TLA.max(initial=0), list(expert_TLA.shape)
    wanted = [count, len(sparse), model.num_experts_per_tok]
    if shape != wanted or low < 0 or high >= model.num_experts:
        raise RefusedError(
            f"{where}: wanted the experts of {count} tokens, {wanted} from 0 to {model.num_experts - 1}, got "
            f"{shape!s:.100} from {low} to {high}"
        )
    if (np.diff(np.sort(expert_TLA)) == 0).any():
        raise RefusedError(f"{where}: wanted {model.num_experts_per_tok} experts for a token, got one of them twice")
    return expert_TLA
