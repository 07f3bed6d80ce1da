"""Samples a `Rollout` for prompts: one prefill per prompt, then a jitted loop (`continuous_batching`).

The randomness of a token is a function of (key, sample id, position) only, so a sample does not depend on its batch.
Log-probs are of the temperature-scaled distribution before any filter, in the sampler and in the learner. Tokens that
pass top-k, top-p, or min-p have another distribution; with `Sampling.mask_replay` log-probs are of that one.

With `sampling.chunk` the loop runs in chunks, and the host gets the finished samples while others continue. Tokens and
log-probs equal those of one whole loop, unless newer weights decode the next chunk (`rollout.group_pool`).

Axes: P prompts, G samples per prompt, B = P·G rows, S prompt positions, C completion positions, T = S + C.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import ModelConfig, Sampling
from gspax.config.protocols import Tokenizer
from gspax.errors import UserError
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.run import interrupt
from gspax.sampler import continuous_batching, drafts, stops
from gspax.sampler.state import Prompts, Replies, SampleOptions, State, of_samples, on_devices
from gspax.types import Array, Params, Rollout

SMALLEST_REPLY = 8
SMALLEST_WIDTH = 16  # S is 16, 32, 64, … or the limit, so that few programs are compiled
OnEnded = Callable[[dict[int, np.ndarray]], None]  # gets this process's completions, stop token included, by row


class Progress(NamedTuple):
    """The arrays that the host fetches after a chunk; the rows are sharded as in a rollout."""

    tokens_BC: Array
    length_B: Array
    ended_B: Array  # bool: no more tokens follow
    waiting_B: Array  # bool: the sample's turn has ended, and it waits for a reply
    left: Array  # bool: some sample has not ended
    logp_BC: Array


def make_options(
    model: ModelConfig, tokenizer: Tokenizer, sampling: Sampling, mesh: jax.sharding.Mesh
) -> SampleOptions:
    """Make sampling options that end samples where the tokenizer and `sampling` say."""
    return SampleOptions(
        model=model,
        sampling=sampling,
        stop_ids=stops.stop_ids(tokenizer, sampling),
        mesh=mesh,
        matcher=stops.make_matcher(tokenizer, sampling, model.vocab_size),
    )


def sample(
    params: Params,
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    key: Array,
    options: SampleOptions,
    *,
    earlier: Sequence[Sequence[np.ndarray]] = (),
    on_ended: OnEnded | None = None,
) -> Rollout:
    """Sample `sampling.group` completions of each prompt; the rows of one prompt are adjacent.

    Args:
      params: inference weights (`sampler.inference_weights`).
      prompts: P token lists. A process needs only those of its own rows (`multihost.local_rows`); the others may be
        None.
      prompt_ids: the P problems' indices; sample g of a prompt has the id `prompt_id * (group - greedy) + g`. With
        `sampling.noise="problem"` a checksum of the prompt is used instead.
      key: equal (key, id) give equal samples.
      options: `sampling.prompts` is ignored. Temperature 0 decodes greedily, with log-probs at temperature 1.
      earlier: as for `place_prompts`.
      on_ended: with `sampling.chunk`, called after each chunk in which samples have ended; it gets each row once. Its
        exceptions are raised on every process.

    Raises:
      UserError: an empty prompt, one longer than `sampling.max_prompt_tokens`, or B not a multiple of the devices.
    """
    options = split_rows(options, len(prompts))
    placed = place_prompts(prompts, prompt_ids, options, earlier)
    if not options.sampling.chunk:
        return _generate(params, placed, key, options=options)
    state, progress = start(params, placed, key, options=options)
    handed_over_B = np.zeros(progress.length_B.shape, bool)
    while True:
        interrupt.stop_point()
        before, left = progress, bool(multihost.to_host(progress.left))
        if left:  # start the next chunk before ended samples are fetched, so that the devices do not wait for the host
            state, progress = advance_chunk(params, state, key, np.int32(0), options=options)
        if on_ended is not None:
            hand_over(before, handed_over_B, on_ended)
        if not left:
            return assemble(placed.tokens_PS, state, options=options)


def hand_over(progress: Progress, handed_over_B: np.ndarray, on_ended: OnEnded) -> None:
    """Call `on_ended` with the rows that have ended since the last call."""
    length_B, ended_B = multihost.to_host((progress.length_B, progress.ended_B))
    new_B = ended_B & ~handed_over_B
    handed_over_B |= new_B
    if new_B.any():

        def work() -> None:
            rows = multihost.owned_rows(progress.tokens_BC)
            if new := {row: tokens[: length_B[row]] for row, tokens in rows.items() if new_B[row]}:
                on_ended(new)

        multihost.all_or_raise(work)


@partial(jax.jit, static_argnames="options")
def _generate(params: Params, prompts: Prompts, key: Array, *, options: SampleOptions) -> Rollout:
    state = continuous_batching.start(params, prompts, key, options)
    return assemble(prompts.tokens_PS, continuous_batching.advance(params, state, key, options), options=options)


@partial(jax.jit, static_argnames="options")
def start(params: Params, prompts: Prompts, key: Array, *, options: SampleOptions) -> tuple[State, Progress]:
    """Start a rollout (`continuous_batching.start`), jitted."""
    state = continuous_batching.start(params, prompts, key, options)
    return state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options", donate_argnames="state")
def advance_chunk(
    params: Params, state: State, key: Array, version: Array | int, *, options: SampleOptions
) -> tuple[State, Progress]:
    """Decode `sampling.chunk` tokens in each slot; without a chunk, until no slot is active.

    The weights may be newer than in earlier chunks: they continue the unfinished samples with the existing cache.
    """
    state = continuous_batching.advance(params, state, key, options, options.sampling.chunk, version)
    return state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options", donate_argnames="state")
def resume(
    params: Params,
    state: State,
    replies: Replies,
    key: Array,
    version: Array | int,
    *,
    options: SampleOptions,
) -> tuple[State, Progress]:
    """Continue conversations after replies (`continuous_batching.resume`), jitted."""
    state = continuous_batching.resume(params, state, replies, key, options, version)
    return state, describe_progress(state, options)


def describe_progress(state: State, options: SampleOptions) -> Progress:
    """Extract the progress of a state."""
    rows = state.rows
    waiting_B = on_devices(of_samples, options, rows, rows.waiting_W)
    ended_B = rows.finished_B | ((rows.length_B >= rows.tokens_BC.shape[1]) & ~waiting_B)
    tokens_BC, length_B, ended_B, waiting_B = jax.lax.with_sharding_constraint(
        (rows.tokens_BC, rows.length_B, ended_B, waiting_B), named_sharding(options.mesh, "batch")
    )
    logp_BC = jax.lax.with_sharding_constraint(rows.logp_BC, named_sharding(options.mesh, "batch"))
    return Progress(tokens_BC, length_B, ended_B, waiting_B, left=(~ended_B).any(), logp_BC=logp_BC)


@partial(jax.jit, static_argnames="options")
def assemble(tokens_PS: Array, state: State, *, options: SampleOptions) -> Rollout:
    """Assemble the rollout of the tokens so far: each completion directly follows its prompt."""
    rows, (P, S) = state.rows, tokens_PS.shape
    B, C = rows.tokens_BC.shape
    index_BT = jnp.broadcast_to(jnp.arange(S + C)[None], (B, S + C))
    after_BT = index_BT - rows.prompt_length_B[:, None]
    prompt_BT, within_BT = after_BT < 0, (after_BT >= 0) & (after_BT < rows.length_B[:, None])

    def place(x_BC: Array, x_PS: Array | None = None, padding: int = 0) -> Array:
        """Scatter completion values to their positions in the row, with values for the prompt if given."""
        more = [1] * (x_BC.ndim - 2)
        x_BT = jnp.take_along_axis(x_BC, jnp.clip(after_BT, 0, C - 1).reshape(B, S + C, *more), axis=1)
        x_BT = jnp.where(within_BT.reshape(B, S + C, *more), x_BT, jnp.asarray(padding, x_BC.dtype))
        if x_PS is None:
            return x_BT
        of_prompt = jnp.pad(jnp.repeat(x_PS, B // P, axis=0), ((0, 0), (0, C), *[(0, 0) for _ in more]))
        return jnp.where(prompt_BT.reshape(B, S + C, *more), of_prompt, x_BT)

    mask_BT, reply_B, expert_BLTA = within_BT, None, None
    if rows.sampled_BC is not None:
        mask_BT = place(rows.sampled_BC)
        reply_B = rows.length_B - mask_BT.sum(axis=1, dtype=jnp.int32)
    if rows.expert_BCLA is not None and state.prompt_expert_PSLA is not None:
        expert_BLTA = place(rows.expert_BCLA, state.prompt_expert_PSLA, options.model.num_experts).swapaxes(1, 2)
    rollout = Rollout(
        tokens_BT=place(rows.tokens_BC, tokens_PS),
        mask_BT=mask_BT,
        logp_BT=place(rows.logp_BC),
        prompt_length_B=rows.prompt_length_B,
        length_B=rows.length_B,
        finished_B=rows.finished_B,
        reply_B=reply_B,
        expert_BLTA=expert_BLTA,
        version_BT=None if rows.version_BC is None else place(rows.version_BC),
        kept_BTK=None if rows.kept_BCK is None else place(rows.kept_BCK),
        cut_BT=None if rows.cut_BC is None else place(rows.cut_BC),
        passes_B=rows.passes_B,
    )
    return jax.lax.with_sharding_constraint(rollout, named_sharding(options.mesh, "batch"))


def split_rows(options: SampleOptions, prompts: int) -> SampleOptions:
    """Return the options for this number of prompts, with groups split if the devices require it (`split_groups`)."""
    sampling = split_groups(replace(options.sampling, prompts=prompts), options.mesh)
    if options.greedy and sampling.prompts > prompts:
        raise ValueError(f"greedy: wanted prompts in multiples of the devices, got {prompts}")
    return replace(options, sampling=sampling)


def place_prompts(
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    options: SampleOptions,
    earlier: Sequence[Sequence[np.ndarray]] = (),
    *,
    widest: bool = False,
    turn_limits: Sequence[int] = (),
) -> Prompts:
    """Pad the prompts and place them on the mesh.

    Args:
      prompts: fewer than P if groups are split: each is repeated.
      options: from `split_rows`.
      earlier: with drafts, for each prompt the completions of its samples in an earlier epoch; empty without drafts or
        for a new prompt.
      widest: S is `sampling.max_prompt_tokens`, not a power of two.
      turn_limits: the most tokens of each conversation's first turn; empty: turns have no limits of their own.
    """
    sampling, limit = options.sampling, options.sampling.max_prompt_tokens
    parts = sampling.prompts // len(prompts)
    longest = max(multihost.gather(multihost.all_or_raise(lambda: longest_prompt(prompts, prompt_ids, limit))))
    size = limit if widest else min(limit, round_to_power(longest, SMALLEST_WIDTH))
    tokens_PS, length_P = pad_rows([prompt or () for prompt in prompts], size)
    earlier_PGC = None
    if sampling.drafts:
        G, C = sampling.group, sampling.max_tokens
        earlier_PGC = _pad_earlier(earlier, (len(prompts), parts * G, C)).reshape(-1, G, C)
    arrays = (
        np.repeat(tokens_PS, parts, axis=0),
        np.repeat(length_P, parts),
        _first_ids(prompts, prompt_ids, options, parts),
        earlier_PGC,
        np.repeat(np.asarray(turn_limits, np.int32), parts) if turn_limits else None,
    )
    return Prompts(*multihost.to_devices(arrays, named_sharding(options.mesh, "batch")))


def _first_ids(
    prompts: Sequence[Sequence[int] | None], prompt_ids: Sequence[int], options: SampleOptions, parts: int
) -> np.ndarray:
    """Return the id of the first sample of each of P prompts, uint32; each prompt is repeated for `parts` of its group.

    The ids of a problem's samples depend neither on the parts nor on the prompts beside it.
    """
    sampling = options.sampling
    if sampling.noise == "problem":
        prompt_ids = [zlib.crc32(np.asarray(prompt or (), np.int32).tobytes()) for prompt in prompts]
    first = np.asarray(prompt_ids, np.uint32) * np.uint32(parts * sampling.group - options.greedy)
    part_P = np.tile(np.arange(parts, dtype=np.uint32), len(prompts))
    return np.repeat(first, parts) + part_P * np.uint32(sampling.group)


def _pad_earlier(earlier: Sequence[Sequence[np.ndarray]], shape: tuple[int, int, int]) -> np.ndarray:
    """Pad the earlier completions of each problem's samples with `drafts.NONE` to this shape, int32."""
    padded = np.full(shape, drafts.NONE, np.int32)
    for number, texts in enumerate(earlier):
        for sample_C, text in zip(padded[number], texts, strict=False):
            sample_C[: len(text)] = text[: len(sample_C)]
    return padded


def split_groups(sampling: Sampling, mesh: jax.sharding.Mesh | dict[str, int]) -> Sampling:
    """Return settings for the same rows with `prompts` a multiple of the devices that rows are sharded over.

    If the prompts are no such multiple, each is repeated, with its cache and its prefill, and its samples are divided.
    UserError if the rows cannot be divided either.
    """
    shards = batch_shards(mesh)
    parts = shards // math.gcd(sampling.prompts, shards)
    if sampling.group % parts:
        rows = f"{sampling.prompts} prompts x {sampling.group} samples = {sampling.prompts * sampling.group}"
        raise UserError(f"sampling.prompts: wanted rows in multiples of {shards} devices, got {rows}")
    return replace(sampling, prompts=sampling.prompts * parts, group=sampling.group // parts)


def lengths_to_host(rollout: Rollout) -> Rollout:
    """Fetch the lengths and `finished_B` of a rollout to the host of every process."""
    small = {
        name: getattr(rollout, name) for name in ("prompt_length_B", "length_B", "finished_B", "reply_B", "passes_B")
    }
    return replace(rollout, **multihost.to_host(small))


def pad_replies(replies: Sequence[Sequence[int]]) -> Replies:
    """Right-pad replies. With the stop token before it, a row of X + 1 tokens is 8, 16, 32, 64, … long, so that few
    programs are compiled; `extend` runs no more blocks than the tokens need."""
    return Replies(*pad_rows(replies, round_to_power(max(map(len, replies)) + 1, SMALLEST_REPLY) - 1))


def pad_rows(rows: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad rows of int32 to this size, and return them with their lengths."""
    padded = np.zeros((len(rows), size), np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded, np.array([*map(len, rows)], np.int32)


def round_to_power(longest: int, smallest: int) -> int:
    """Return the smallest power of two that is at least `longest` and `smallest`, which must be a power of two."""
    return max(smallest, 1 << (longest - 1).bit_length())


def longest_prompt(prompts: Sequence[Sequence[int] | None], prompt_ids: Sequence[int], limit: int) -> int:
    """Return the length of this process's longest prompt. UserError if a prompt is empty or exceeds the limit."""
    for index, prompt in zip(prompt_ids, prompts, strict=True):
        if prompt is not None:
            check_length(prompt, limit, f"problem {index}: ")
    return max((len(prompt or ()) for prompt in prompts), default=0)


def check_length(prompt: Sequence[int], limit: int, where: str = "") -> None:
    """Raise a UserError if a prompt is empty or exceeds the limit."""
    if not 0 < len(prompt) <= limit:
        raise UserError(
            f"{where}wanted a prompt of 1 to {limit} tokens (sampling.max_prompt_tokens, which a resumed run may "
            f"raise), got {len(prompt)}"
        )
