"""Holds the completions that servers sample as lists on the host, builds the next requests and the final rollout.

Axes: B rows, C positions after the prompt, T positions in all, L sparse layers, A active experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from gspax.config import ModelConfig, Sampling, expert_id_dtype, sparse_layers, token_id_dtype
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.contract import Request
from gspax.rollout.servers.server import Answer, CompletionRequest, pad_sets
from gspax.sampler.sampler import SMALLEST_WIDTH, Progress, check_length, round_to_power
from gspax.sampler.state import Replies, SampleOptions
from gspax.types import Rollout


@dataclass
class Row:
    """One completion. Lists count from the end of the prompt."""

    prompt: list[int]
    id: int  # of the sample, which its random numbers depend on
    group: int
    greedy: bool
    limit: int = 0  # the length at which the turn ends without a stop; 0: none
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # not a reply's
    versions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # the numbers of the servers that sampled, from 1
    kept: list[list[int]] = field(default_factory=list)  # with sampling masks, the set that each was chosen from
    cut: list[bool] = field(default_factory=list)
    expert_TLA: np.ndarray | None = None  # of prompt and tokens, but the last
    finished: bool = False  # ended with a stop token
    waiting: bool = False  # its turn has ended: it waits for a reply


def begin(request: Request) -> dict[int, Row]:
    """Begin the rows of all groups, by number, on all processes. Collective.

    Raises:
      UserError: a prompt is empty or too long.
    """
    options, group = request.options, request.options.sampling.group

    def read() -> dict[int, list[int]]:
        prompts = {place: encoded.prompt for place, encoded in request.encoded.items()}
        for place, prompt in prompts.items():
            check_length(prompt, options.sampling.max_prompt_tokens, f"problem {request.prompt_ids[place]}: ")
        return {place: [int(token) for token in prompt] for place, prompt in prompts.items()}

    limits = {place: encoded.turn_limit for place, encoded in request.encoded.items()}
    prompts, rows = dict[int, list[int]](), dict[int, Row]()
    for part in multihost.gather(multihost.all_or_raise(read)):
        prompts |= part
    for place, prompt in sorted(prompts.items()):
        first = int(request.prompt_ids[place]) * (group - options.greedy)
        for number in range(group):
            greedy = number >= group - options.greedy or options.sampling.temperature == 0
            id_ = (first + number) % 2**32
            rows[place * group + number] = Row(prompt, id_, place, greedy, limits.get(place, 0))
    return rows


def to_request(row: Row, key: bytes, options: SampleOptions) -> CompletionRequest:
    """Build the request for the next tokens of a row, at most a chunk of partial rollouts.

    Its seed is a function of (key, sample id, position) alone.
    """
    position, end = len(row.prompt) + len(row.tokens), options.sampling.max_tokens
    left = min(end, row.limit or end) - len(row.tokens)
    digest = hashlib.blake2b(key + row.id.to_bytes(4, "big") + position.to_bytes(4, "big"), digest_size=8).digest()
    return CompletionRequest(
        tokens=row.prompt + row.tokens,
        max_tokens=min(left, options.sampling.chunk) if options.admits else left,
        seed=int.from_bytes(digest, "big") >> 11,
        sampling=options.sampling,
        greedy=row.greedy,
        stop_ids=options.stop_ids,
        keep_experts=options.keep_experts,
        mask_size=options.mask_size,
        matcher=options.matcher,
        turn=row.tokens[len(row.tokens) - _turn_length(row) :],
    )


def _turn_length(row: Row) -> int:
    """Return the number of tokens of the turn so far."""
    return sum(1 for _ in takewhile(bool, reversed(row.sampled)))


def add(row: Row, answer: Answer, version: int, options: SampleOptions, source: int = 1) -> None:
    """Append the answer of a server, by its number, to its row."""
    count = len(answer.tokens)
    row.tokens += answer.tokens
    row.logps += answer.logps
    row.sampled += [True] * count
    row.versions += [version] * count
    row.sources += [source] * count
    row.kept += answer.kept
    row.cut += answer.cut
    if answer.expert_TLA is not None:  # experts of earlier tokens stay: the weights that sampled these chose them
        known = answer.expert_TLA[:0] if row.expert_TLA is None else row.expert_TLA
        row.expert_TLA = np.concatenate([known, answer.expert_TLA[len(known) :]])
    if options.turns:
        row.waiting = answer.stopped or 0 < row.limit <= len(row.tokens)
    else:
        row.finished = answer.stopped


def is_active(row: Row, sampling: Sampling) -> bool:
    """Return whether more tokens are to be sampled for a row."""
    return not row.finished and not row.waiting and len(row.tokens) < sampling.max_tokens


def describe_progress(rows: Mapping[int, Row], count: int, options: SampleOptions) -> Progress:
    """Build the argument of `episodes.answer`, with arrays sharded like the sampler's."""
    C = options.sampling.max_tokens
    tokens_BC, length_B = np.zeros((count, C), np.int32), np.zeros(count, np.int32)
    ended_B, waiting_B, logp_BC = np.zeros(count, bool), np.zeros(count, bool), np.zeros((count, C), np.float32)
    for number, row in rows.items():
        tokens_BC[number, : len(row.tokens)] = row.tokens
        logp_BC[number, : len(row.tokens)] = row.logps
        length_B[number], waiting_B[number] = len(row.tokens), row.waiting
        ended_B[number] = row.finished or (len(row.tokens) >= C and not row.waiting)
    by_row = named_sharding(options.mesh, "batch")
    arrays = tokens_BC, length_B, ended_B, waiting_B, logp_BC
    tokens, length, ended, waiting, logp = multihost.to_devices(arrays, by_row)
    return Progress(tokens, length, ended, waiting, left=(~ended).any(), logp_BC=logp)


def add_replies(rows: Mapping[int, Row], replies: Replies) -> None:
    """Append replies to the waiting rows; waiting rows without a reply are finished, or go on waiting (-1)."""
    tokens_BX, count_B, turn_limit_B = multihost.to_host(tuple(replies))
    for number, row in rows.items():
        if not row.waiting:
            continue
        if (count := int(count_B[number])) < 0:
            continue
        row.waiting, row.finished = False, count == 0
        row.limit = 0 if turn_limit_B is None else len(row.tokens) + count + int(turn_limit_B[number])
        row.tokens += tokens_BX[number, :count].tolist()
        row.logps += [0.0] * count
        row.sampled += [False] * count
        row.versions += [0] * count
        row.sources += [0] * count
        row.kept += [[]] * count
        row.cut += [False] * count


def assemble(rows: Mapping[int, Row], B: int, options: SampleOptions) -> Rollout:
    """Assemble the rollout of B rows, sharded over the mesh by row."""
    longest = max(len(row.prompt) for row in rows.values())
    T = min(options.sampling.max_prompt_tokens, round_to_power(longest, SMALLEST_WIDTH)) + options.sampling.max_tokens
    arrays = {
        "tokens_BT": np.zeros((B, T), np.int32),
        "mask_BT": np.zeros((B, T), bool),
        "logp_BT": np.zeros((B, T), np.float32),
        "source_BT": np.zeros((B, T), np.uint16),
        "prompt_length_B": np.zeros(B, np.int32),
        "length_B": np.zeros(B, np.int32),
        "finished_B": np.zeros(B, bool),
    }
    arrays |= {"reply_B": np.zeros(B, np.int32)} if options.turns else {}
    arrays |= {"version_BT": np.zeros((B, T), np.int32)} if options.keep_versions else {}
    if options.keep_experts:
        arrays["expert_BLTA"] = _no_experts(options.model, B, T)
    if options.mask_size:
        V = options.model.vocab_size
        arrays["kept_BTK"] = np.full((B, T, options.mask_size), V, token_id_dtype(options.model))
        arrays["cut_BT"] = np.zeros((B, T), bool)
    for number, row in rows.items():
        start, end = len(row.prompt), len(row.prompt) + len(row.tokens)
        of_row = {
            "tokens_BT": row.prompt + row.tokens,
            "mask_BT": [False] * start + row.sampled,
            "logp_BT": [0.0] * start + row.logps,
            "version_BT": [0] * start + row.versions,
            "source_BT": [0] * start + row.sources,
            "cut_BT": [False] * start + row.cut,
        }
        for name, values in of_row.items():
            if name in arrays:
                arrays[name][number, :end] = values
        arrays["prompt_length_B"][number], arrays["length_B"][number] = start, len(row.tokens)
        arrays["finished_B"][number] = row.finished
        if options.turns:
            arrays["reply_B"][number] = row.sampled.count(False)
        if options.mask_size:
            arrays["kept_BTK"][number, start:end] = pad_sets(row.kept, options.mask_size, V)
        if row.expert_TLA is not None:
            arrays["expert_BLTA"][number, :, : end - 1] = row.expert_TLA.swapaxes(0, 1)
    return Rollout(**multihost.to_devices(arrays, named_sharding(options.mesh, "batch")))


def _no_experts(model: ModelConfig, B: int, T: int) -> np.ndarray:
    shape = (B, sparse_layers(model), T, model.num_experts_per_tok)
    return np.full(shape, model.num_experts, np.dtype(expert_id_dtype(model)))
