"""Prompts and parameters in, a `Rollout` out: one prefill per prompt, then one jitted decoding loop (`sampler.engine`).

The randomness of a token is a function of (key, sample id, position) alone, so a sample does not depend on its batch.
Log-probs are of the temperature-scaled distribution before any filter, in the sampler and in the learner; top-k, top-p
and min-p therefore bias the ratio.

Axes: P prompts, G samples per prompt, B = P·G rows, S prompt positions, C completion positions, T = S + C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from gspax.config import Sampling
from gspax.errors import UserError
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.sampler import engine
from gspax.sampler.chunks import Ended, sample_in_chunks
from gspax.sampler.engine import Prompts, SampleOptions
from gspax.types import Array, Params, Rollout

SMALLEST_BUCKET = 16


def sample(
    params: Params,
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    key: Array,
    options: SampleOptions,
    *,
    ended: Ended | None = None,
    renew: Callable[[], tuple[Params, int]] | None = None,
) -> Rollout:
    """Sample `sampling.group` completions of each prompt; the rows of one prompt are adjacent.

    Args:
      params: inference weights (`sampler.inference_weights`).
      prompts: P token lists. A process needs only those of its own rows (`multihost.local_rows`); the others may be
        None.
      prompt_ids: the P problems' indices; sample g of a prompt has the id `prompt_id * (group - greedy) + g`.
      key: equal (key, id) give equal samples.
      options: of which `sampling.prompts` is not read. Temperature 0 decodes greedily, with log-probs at temperature 1.
      ended: with `sampling.chunk`, gets the completions that have ended while others go on (`sampler.chunks`).
      renew: with `sampling.chunk`, called before every chunk but the first: inference weights and their version, which
        `Rollout.version_BT` records. Newer weights continue the unfinished samples, whose cache is kept.

    Raises:
      UserError: an empty prompt, one longer than `sampling.max_prompt_tokens`, or B not a multiple of the devices.
    """
    options = split_rows(options, len(prompts))
    placed = place_prompts(prompts, prompt_ids, options)
    if not options.sampling.chunk:
        return _generate(params, placed, key, options=options)
    options = replace(options, keep_versions=renew is not None)
    state = sample_in_chunks(params, placed, key, options, ended=ended, renew=renew)
    return assemble(placed.tokens_PS, state, options=options)


def split_rows(options: SampleOptions, prompts: int) -> SampleOptions:
    """The options for so many prompts, with the groups divided as the devices need it (`split_groups`)."""
    sampling = split_groups(replace(options.sampling, prompts=prompts), options.mesh)
    if options.greedy and sampling.prompts > prompts:
        raise ValueError(f"greedy: wanted prompts in multiples of the devices, got {prompts}")
    return replace(options, sampling=sampling)


def place_prompts(
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    options: SampleOptions,
    *,
    widest: bool = False,
) -> Prompts:
    """The prompts on the mesh.

    Args:
      prompts: fewer than P if groups are split: each is repeated.
      options: from `split_rows`.
      widest: S is `sampling.max_prompt_tokens`, not a bucket.
    """
    sampling, limit = options.sampling, options.sampling.max_prompt_tokens
    parts = sampling.prompts // len(prompts)
    longest = max(multihost.gather(multihost.all_or_raise(lambda: longest_prompt(prompts, prompt_ids, limit))))
    tokens_PS, length_P = pad_prompts(prompts, limit, limit if widest else longest)
    part_P = np.tile(np.arange(parts, dtype=np.uint32), len(prompts))
    first_P = np.asarray(prompt_ids, np.uint32) * np.uint32(parts * sampling.group - options.greedy)
    id_P = np.repeat(first_P, parts) + part_P * np.uint32(sampling.group)
    placed: Any = Prompts(np.repeat(tokens_PS, parts, axis=0), np.repeat(length_P, parts), id_P)  # type: ignore[arg-type]
    return multihost.to_devices(placed, named_sharding(options.mesh, "batch"))


def split_groups(sampling: Sampling, mesh: jax.sharding.Mesh | dict[str, int]) -> Sampling:
    """The settings of the same rows with `prompts` a multiple of the devices that have rows of their own.

    Where the prompts are none, each is repeated, and so are its cache and its prefill; its samples are divided.
    UserError if the rows do not divide either.
    """
    shards = batch_shards(mesh)
    parts = shards // math.gcd(sampling.prompts, shards)
    if sampling.group % parts:
        rows = f"{sampling.prompts} prompts x {sampling.group} samples = {sampling.prompts * sampling.group}"
        raise UserError(f"sampling.prompts: wanted rows in multiples of {shards} devices, got {rows}")
    return replace(sampling, prompts=sampling.prompts * parts, group=sampling.group // parts)


def lengths_to_host(rollout: Rollout) -> Rollout:
    """The rollout with its lengths and `finished_B` on the host of every process."""
    small = {name: getattr(rollout, name) for name in ("prompt_length_B", "length_B", "finished_B", "reply_B")}
    return replace(rollout, **multihost.to_host(small))


def longest_prompt(prompts: Sequence[Sequence[int] | None], prompt_ids: Sequence[int], limit: int) -> int:
    """The length of the longest prompt that this process has. UserError for one that is empty or exceeds the limit."""
    for index, prompt in zip(prompt_ids, prompts, strict=True):
        if prompt is not None:
            check_length(prompt, limit, f"problem {index}: ")
    return max((len(prompt or ()) for prompt in prompts), default=0)


def check_length(prompt: Sequence[int], limit: int, where: str = "") -> None:
    """UserError for a prompt that is empty or exceeds the limit."""
    if not 0 < len(prompt) <= limit:
        raise UserError(
            f"{where}wanted a prompt of 1 to {limit} tokens (sampling.max_prompt_tokens, which a resumed run may "
            f"raise), got {len(prompt)}"
        )


def pad_prompts(prompts: Sequence[Sequence[int] | None], limit: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded int32 tokens `[P, S]` and lengths `[P]`; S is a bucket (16, 32, 64, … or the limit)."""
    size = SMALLEST_BUCKET
    while size < longest:
        size *= 2
    tokens_PS = np.zeros((len(prompts), min(size, limit)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_PS[row, : len(prompt or ())] = prompt or ()
    return tokens_PS, np.array([len(prompt or ()) for prompt in prompts], np.int32)


@partial(jax.jit, static_argnames="options")
def _generate(params: Params, prompts: Prompts, key: Array, *, options: SampleOptions) -> Rollout:
    state = engine.start(params, prompts, key, options)
    return engine.assemble(prompts.tokens_PS, engine.advance(params, state, key, options), options)


assemble = jax.jit(engine.assemble, static_argnames="options")
