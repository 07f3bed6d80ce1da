"""Prompts and parameters in, a `Rollout` out: one prefill per prompt, then one jitted decoding loop (`rollout.engine`).

The randomness of a token is a function of (key, sample id, position) alone, so a sample does not depend on its batch.
Log-probs are of the temperature-scaled distribution before any filter, in the sampler and in the learner; top-k, top-p
and min-p therefore bias the ratio.

Axes: P prompts, G samples per prompt, B = P·G rows, S prompt positions, C completion positions, T = S + C.
"""

from __future__ import annotations

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
) -> Rollout:
    """Sample `sampling.group` completions of each prompt; the rows of one prompt are adjacent.

    Args:
      params: a serving copy (`rollout.serving`).
      prompts: P token lists (`sampling.prompts` is not read). A process needs only those of its own rows
        (`multihost.local_rows`); the others may be None.
      prompt_ids: the P problems' indices; sample g of a prompt has the id `prompt_id * group + g`.
      key: equal (key, id) give equal samples.
      sampling: temperature 0 decodes greedily, with log-probs at temperature 1.
      stop_ids: a stop token ends its sample and belongs to it.
      ended: with `sampling.chunk`, gets the completions that have ended while others are drawn (`rollout.chunks`).

    Raises:
      UserError: an empty prompt, one longer than `sampling.max_prompt_tokens`, or P not a multiple of the devices.
    """
    inputs = place_prompts(prompts, prompt_ids, sampling=sampling, mesh=mesh)
    if ended is None or not sampling.chunk:
        return _generate(params, *inputs, key, config=config, sampling=sampling, stop_ids=stop_ids, mesh=mesh)
    settings = engine.Settings(config, sampling, stop_ids, mesh)
    rows = draw_in_chunks(params, *inputs, key, settings=settings, ended=ended)
    return _assemble(inputs[0], rows, mesh=mesh)


def place_prompts(
    prompts: Sequence[Sequence[int] | None],
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Any, Any, Any]:
    """Right-padded tokens int32 `[P, S]`, lengths int32 `[P]` and ids uint32 `[P]`, on the mesh."""
    limit = sampling.max_prompt_tokens
    longest = max(multihost.gather(multihost.all_or_raise(lambda: longest_prompt(prompts, prompt_ids, limit))))
    if mesh is not None and len(prompts) % batch_shards(mesh):
        raise UserError(f"sampling: wanted prompts in multiples of {batch_shards(mesh)} devices, got {len(prompts)}")
    inputs: Any = (*pad_prompts(prompts, limit, longest), np.asarray(prompt_ids, np.uint32))
    if mesh is not None:
        inputs = multihost.to_devices(inputs, named_sharding(mesh, "batch"))
    return inputs


def lengths_to_host(rollout: Rollout) -> Rollout:
    """The rollout with its lengths and `finished_B` on the host of every process."""
    small = {name: getattr(rollout, name) for name in ("prompt_length_B", "length_B", "finished_B")}
    return replace(rollout, **multihost.to_host(small))


def longest_prompt(prompts: Sequence[Sequence[int] | None], prompt_ids: Sequence[int], limit: int) -> int:
    """The length of the longest prompt that this process has. UserError for one that is empty or exceeds the limit."""
    longest = 0
    for index, prompt in zip(prompt_ids, prompts, strict=True):
        if prompt is not None and not 0 < len(prompt) <= limit:
            raise UserError(
                f"problem {index}: wanted a prompt of 1 to {limit} tokens (sampling.max_prompt_tokens, which a resumed "
                f"run may raise), got {len(prompt)}"
            )
        longest = max(longest, len(prompt or ()))
    return longest


def pad_prompts(prompts: Sequence[Sequence[int] | None], limit: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded int32 tokens `[P, S]` and lengths `[P]`; S is a bucket (16, 32, 64, … or the limit)."""
    size = SMALLEST_BUCKET
    while size < longest:
        size *= 2
    tokens_PS = np.zeros((len(prompts), min(size, limit)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_PS[row, : len(prompt or ())] = prompt or ()
    return tokens_PS, np.array([len(prompt or ()) for prompt in prompts], np.int32)


@partial(jax.jit, static_argnames=("config", "sampling", "stop_ids", "mesh"))
def _generate(params, tokens_PS, length_P, id_P, key, *, config, sampling, stop_ids, mesh) -> Rollout:
    settings = engine.Settings(config, sampling, stop_ids, mesh)
    state = engine.start(params, tokens_PS, length_P, id_P, key, settings)
    return assemble(tokens_PS, engine.advance(params, state, key, settings).rows, mesh)


@partial(jax.jit, static_argnames="mesh")
def _assemble(tokens_PS, rows, *, mesh) -> Rollout:
    return assemble(tokens_PS, rows, mesh)


def assemble(tokens_PS: Array, rows: engine.Rows, mesh: jax.sharding.Mesh | None) -> Rollout:
    """The rollout of samples that have ended: each completion directly after its prompt."""
    B, C = rows.tokens_BC.shape
    P, S = tokens_PS.shape
    index_BT = jnp.broadcast_to(jnp.arange(S + C)[None], (B, S + C))
    drawn_BT = index_BT - rows.prompt_length_B[:, None]
    mask_BT = (drawn_BT >= 0) & (drawn_BT < rows.length_B[:, None])
    take = partial(jnp.take_along_axis, indices=jnp.clip(drawn_BT, 0, C - 1), axis=1)
    prompt_BT = jnp.pad(jnp.repeat(tokens_PS, B // P, axis=0), ((0, 0), (0, C)))
    rollout = Rollout(
        tokens_BT=jnp.where(mask_BT, take(rows.tokens_BC), jnp.where(drawn_BT < 0, prompt_BT, 0)),
        mask_BT=mask_BT,
        logp_BT=jnp.where(mask_BT, take(rows.logp_BC), 0.0),
        prompt_length_B=rows.prompt_length_B,
        length_B=rows.length_B,
        finished_B=rows.finished_B,
    )
    return rollout if mesh is None else jax.lax.with_sharding_constraint(rollout, named_sharding(mesh, "batch"))
