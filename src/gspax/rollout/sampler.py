"""Prompts and parameters in, a `Rollout` out: one prefill per prompt, then one jitted decoding loop (`rollout.engine`).

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
import jax.numpy as jnp
import numpy as np

from gspax.config import ModelConfig, Sampling
from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.rollout import engine
from gspax.rollout.chunks import draw_in_chunks
from gspax.sharding import batch_shards, named_sharding
from gspax.types import Array, Params, Rollout

SMALLEST_BUCKET = 16


def sample(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    key: Array,
    *,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    mesh: jax.sharding.Mesh | None = None,
    ended: Callable[[dict[int, np.ndarray]], None] | None = None,
    renew: Callable[[], tuple[Params, int]] | None = None,
    keep_experts: bool = False,
    greedy: int = 0,
) -> Rollout:
    """Sample `sampling.group` completions of each prompt; the rows of one prompt are adjacent.

    Args:
      params: a serving copy (`rollout.serving`).
      prompts: P token lists (`sampling.prompts` is not read). A process needs only those of its own rows
        (`multihost.local_rows`); the others may be None.
      prompt_ids: the P problems' indices; sample g of a prompt has the id `prompt_id * (group - greedy) + g`.
      key: equal (key, id) give equal samples.
      sampling: temperature 0 decodes greedily, with log-probs at temperature 1.
      stop_ids: a stop token ends its sample and belongs to it.
      ended: with `sampling.chunk`, gets the completions that have ended while others are drawn (`rollout.chunks`).
      renew: with `sampling.chunk`, called before every chunk but the first: a serving copy and its version, which
        `Rollout.version_BT` records. Newer weights continue the samples that are being drawn, whose cache is kept.
      keep_experts: return `Rollout.expert_BLTA`.
      greedy: so many of each prompt's samples, the last ones, are decoded greedily, with log-probs at temperature 1.

    Raises:
      UserError: an empty prompt, one longer than `sampling.max_prompt_tokens`, or B not a multiple of the devices.
    """
    sampling = split_groups(replace(sampling, prompts=len(prompts)), mesh)
    if greedy and sampling.prompts > len(prompts):
        raise ValueError(f"greedy: wanted prompts in multiples of the devices, got {len(prompts)}")
    inputs = place_prompts(prompts, prompt_ids, sampling=sampling, mesh=mesh, greedy=greedy)
    keep_versions = renew is not None
    settings = engine.Settings(config, sampling, stop_ids, mesh, keep_experts, keep_versions, greedy)
    if not sampling.chunk:
        return _generate(params, *inputs, key, settings=settings)
    state = draw_in_chunks(params, *inputs, key, settings=settings, ended=ended, renew=renew)
    return _assemble(inputs[0], state, settings=settings)


def place_prompts(
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    mesh: jax.sharding.Mesh | None,
    greedy: int = 0,
    widest: bool = False,
) -> tuple[Any, Any, Any]:
    """Right-padded tokens int32 `[P, S]`, lengths int32 `[P]` and first sample ids uint32 `[P]`, on the mesh.

    Args:
      prompts: fewer than P if groups are split: each is repeated.
      sampling: from `split_groups`.
      widest: S is `sampling.max_prompt_tokens`, not a bucket.
    """
    limit, parts = sampling.max_prompt_tokens, sampling.prompts // len(prompts)
    longest = max(multihost.gather(multihost.all_or_raise(lambda: longest_prompt(prompts, prompt_ids, limit))))
    tokens_PS, length_P = pad_prompts(prompts, limit, limit if widest else longest)
    part_P = np.tile(np.arange(parts, dtype=np.uint32), len(prompts))
    first_P = np.asarray(prompt_ids, np.uint32) * np.uint32(parts * sampling.group - greedy)
    id_P = np.repeat(first_P, parts) + part_P * np.uint32(sampling.group)
    inputs: Any = np.repeat(tokens_PS, parts, axis=0), np.repeat(length_P, parts), id_P
    if mesh is not None:
        inputs = multihost.to_devices(inputs, named_sharding(mesh, "batch"))
    return inputs


def split_groups(sampling: Sampling, mesh: jax.sharding.Mesh | dict[str, int] | None) -> Sampling:
    """The settings of the same rows with `prompts` a multiple of the devices that have rows of their own.

    Where the prompts are none, each is repeated, and so are its cache and its prefill; its samples are divided.
    UserError if the rows do not divide either.
    """
    shards = 1 if mesh is None else batch_shards(mesh)
    parts = shards // math.gcd(sampling.prompts, shards)
    if sampling.group % parts:
        rows = f"{sampling.prompts} prompts x {sampling.group} samples = {sampling.prompts * sampling.group}"
        raise UserError(f"sampling.prompts: wanted rows in multiples of {shards} devices, got {rows}")
    return replace(sampling, prompts=sampling.prompts * parts, group=sampling.group // parts)


def lengths_to_host(rollout: Rollout) -> Rollout:
    """The rollout with its lengths and `finished_B` on the host of every process."""
    small = {name: getattr(rollout, name) for name in ("prompt_length_B", "length_B", "finished_B")}
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


@partial(jax.jit, static_argnames="settings")
def _generate(params, tokens_PS, length_P, id_P, key, *, settings: engine.Settings) -> Rollout:
    state = engine.start(params, tokens_PS, length_P, id_P, key, settings)
    return assemble(tokens_PS, engine.finish(params, state, key, settings), settings)


@partial(jax.jit, static_argnames="settings")
def _assemble(tokens_PS, state, *, settings: engine.Settings) -> Rollout:
    return assemble(tokens_PS, state, settings)


def assemble(tokens_PS: Array, state: engine.State, settings: engine.Settings) -> Rollout:
    """The rollout of the tokens drawn so far: each completion directly after its prompt."""
    rows, mesh = state.rows, settings.mesh
    B, C = rows.tokens_BC.shape
    P, S = tokens_PS.shape
    index_BT = jnp.broadcast_to(jnp.arange(S + C)[None], (B, S + C))
    drawn_BT = index_BT - rows.prompt_length_B[:, None]
    mask_BT = (drawn_BT >= 0) & (drawn_BT < rows.length_B[:, None])

    def of_completion(x_BC: Array) -> Array:
        place_BT = jnp.clip(drawn_BT, 0, C - 1)
        return jnp.take_along_axis(x_BC, place_BT.reshape(B, S + C, *[1] * (x_BC.ndim - 2)), axis=1)

    def of_prompt(x_PS: Array) -> Array:
        return jnp.pad(jnp.repeat(x_PS, B // P, axis=0), ((0, 0), (0, C), *[(0, 0)] * (x_PS.ndim - 2)))

    expert_BLTA = None
    if rows.expert_BCLA is not None and state.prompt_expert_PSLA is not None:
        is_prompt_BT11, mask_BT11 = (drawn_BT < 0)[..., None, None], mask_BT[..., None, None]
        expert_BTLA = jnp.where(mask_BT11, of_completion(rows.expert_BCLA), settings.config.num_experts)
        expert_BTLA = jnp.where(is_prompt_BT11, of_prompt(state.prompt_expert_PSLA), expert_BTLA)
        expert_BLTA = expert_BTLA.swapaxes(1, 2).astype(rows.expert_BCLA.dtype)
    rollout = Rollout(
        tokens_BT=jnp.where(mask_BT, of_completion(rows.tokens_BC), jnp.where(drawn_BT < 0, of_prompt(tokens_PS), 0)),
        mask_BT=mask_BT,
        logp_BT=jnp.where(mask_BT, of_completion(rows.logp_BC), 0.0),
        prompt_length_B=rows.prompt_length_B,
        length_B=rows.length_B,
        finished_B=rows.finished_B,
        expert_BLTA=expert_BLTA,
        version_BT=None if rows.version_BC is None else jnp.where(mask_BT, of_completion(rows.version_BC), 0),
    )
    return rollout if mesh is None else jax.lax.with_sharding_constraint(rollout, named_sharding(mesh, "batch"))
