"""Prompts and parameters in, a `Rollout` out: one prefill per prompt, then one jitted decoding loop over all samples.

The randomness of a token is a function of (key, sample id, position) alone, so a sample does not depend on its batch.
Log-probs are of the temperature-scaled distribution before any filter, in the sampler and in the learner; top-k, top-p
and min-p therefore bias the ratio.

Axes: P prompts, G samples per prompt, B = P·G rows, S prompt positions, C completion positions, T = S + C, D model,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import ModelConfig, Sampling
from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.model import transformer
from gspax.model.attention import Cache
from gspax.model.low_rank import dense
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
) -> Rollout:
    """Sample `sampling.group` completions of each prompt; the rows of one prompt are adjacent.

    Args:
      prompts: P token lists (`sampling.prompts` is not read). A process needs only those of its own rows
        (`multihost.local_rows`); the others may be None.
      prompt_ids: the P problems' indices; sample g of a prompt has the id `prompt_id * group + g`.
      key: equal (key, id) give equal samples.
      sampling: temperature 0 decodes greedily, with log-probs at temperature 1.
      stop_ids: a stop token ends its sample and belongs to it.

    Raises:
      UserError: an empty prompt, one longer than `sampling.max_prompt_tokens`, or P not a multiple of the devices.
    """
    limit = sampling.max_prompt_tokens
    longest = max(multihost.gather(multihost.all_or_raise(lambda: longest_prompt(prompts, prompt_ids, limit))))
    if mesh is not None and len(prompts) % batch_shards(mesh):
        raise UserError(f"sampling: wanted prompts in multiples of {batch_shards(mesh)} devices, got {len(prompts)}")
    inputs: Any = (*pad_prompts(prompts, limit, longest), np.asarray(prompt_ids, np.uint32))
    if mesh is not None:
        inputs = multihost.to_devices(inputs, named_sharding(mesh, "batch"))
    return _generate(params, *inputs, key, config=config, sampling=sampling, stop_ids=stop_ids, mesh=mesh)


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


class _State(NamedTuple):
    """The decoding loop's state after `step` tokens per sample."""

    step: Array
    token_B: Array  # the last token
    live_B: Array  # has not stopped yet
    length_B: Array
    tokens_BC: Array
    logp_BC: Array
    cache: Cache


@partial(jax.jit, static_argnames=("config", "sampling", "stop_ids", "mesh"))
def _generate(params, tokens_PS, length_P, id_P, key, *, config, sampling, stop_ids, mesh) -> Rollout:
    P, G, C = tokens_PS.shape[0], sampling.group, sampling.max_tokens
    B = P * G
    params = dense(params)  # once, instead of in every layer of every step
    id_B = (id_P[:, None] * np.uint32(G) + jnp.arange(G, dtype=jnp.uint32)[None]).reshape(B)
    key_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, id_B)
    prompt_length_B = jnp.repeat(length_P, G)

    def draw(hidden_BD, state: _State) -> _State:
        """Draw token number `state.step` of every live sample."""
        logits_BV = transformer.logits(params, hidden_BD)
        with jax.named_scope("draw"):
            now_B = jax.vmap(jax.random.fold_in)(key_B, prompt_length_B + state.step)
            token_B, logp_B = draw_tokens(logits_BV, now_B, sampling)
        live_B = state.live_B
        stops_B = (token_B[:, None] == jnp.asarray(stop_ids, jnp.int32)[None]).any(axis=-1)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=state.step, axis=1)
        return _State(
            step=state.step + 1,
            token_B=token_B,
            live_B=live_B & ~stops_B,
            length_B=state.length_B + live_B,
            tokens_BC=write(state.tokens_BC, token_B),
            logp_BC=write(state.logp_BC, logp_B),
            cache=state.cache,
        )

    def advance(state: _State) -> _State:
        with jax.named_scope("decode"):
            hidden_BD, cache = transformer.decode(
                params,
                config,
                state.token_B,
                state.cache,
                step=state.step - 1,
                prompt_length_P=length_P,
                live_B=state.live_B,
                mesh=mesh,
            )
        return draw(hidden_BD, state._replace(cache=cache))

    with jax.named_scope("prefill"):
        last_PD, cache = transformer.prefill(params, config, tokens_PS, length_P, group=G, max_tokens=C, mesh=mesh)
    empty = _State(
        step=jnp.int32(0),
        token_B=jnp.zeros(B, jnp.int32),
        live_B=jnp.ones(B, bool),
        length_B=jnp.zeros(B, jnp.int32),
        tokens_BC=jnp.zeros((B, C), jnp.int32),
        logp_BC=jnp.zeros((B, C), jnp.float32),
        cache=cache,
    )
    first = draw(jnp.repeat(last_PD, G, axis=0), empty)
    last = jax.lax.while_loop(lambda state: (state.step < C) & state.live_B.any(), advance, first)
    rollout = _assemble(tokens_PS, prompt_length_B, last)
    return rollout if mesh is None else jax.lax.with_sharding_constraint(rollout, named_sharding(mesh, "batch"))


def _assemble(tokens_PS: Array, prompt_length_B: Array, last: _State) -> Rollout:
    """Put each completion directly after its prompt."""
    B, C = last.tokens_BC.shape
    P, S = tokens_PS.shape
    index_BT = jnp.broadcast_to(jnp.arange(S + C)[None], (B, S + C))
    drawn_BT = index_BT - prompt_length_B[:, None]
    mask_BT = (drawn_BT >= 0) & (drawn_BT < last.length_B[:, None])
    take = partial(jnp.take_along_axis, indices=jnp.clip(drawn_BT, 0, C - 1), axis=1)
    prompt_BT = jnp.pad(jnp.repeat(tokens_PS, B // P, axis=0), ((0, 0), (0, C)))
    return Rollout(
        tokens_BT=jnp.where(mask_BT, take(last.tokens_BC), jnp.where(drawn_BT < 0, prompt_BT, 0)),
        mask_BT=mask_BT,
        logp_BT=jnp.where(mask_BT, take(last.logp_BC), 0.0),
        prompt_length_B=prompt_length_B,
        length_B=last.length_B,
        finished_B=~last.live_B,
    )


def draw_tokens(logits_BV: Array, key_B: Array, sampling: Sampling) -> tuple[Array, Array]:
    """One token per row, int32, from the filtered distribution, and its unfiltered float32 log-prob."""
    scaled_BV = logits_BV / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        token_B = scaled_BV.argmax(axis=-1)
    else:
        noise_BV = jax.vmap(partial(jax.random.gumbel, shape=scaled_BV.shape[1:]))(key_B)
        token_B = (filter_logits(scaled_BV, sampling) + noise_BV).argmax(axis=-1)
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def filter_logits(logits_BV: Array, sampling: Sampling) -> Array:
    """The logits with -inf for the tokens that top-k, then top-p, then min-p exclude, each applied to what is left.

    Top-p (nucleus, arXiv 1904.09751) keeps the smallest set of the most probable tokens whose mass reaches p;
    min-p (arXiv 2407.01082) keeps tokens at least min_p times as probable as the best. Ties at the threshold are kept.
    """
    V = logits_BV.shape[-1]
    if 0 < sampling.top_k < V:
        edge_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1.0:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        prob_BV = jax.nn.softmax(sorted_BV, axis=-1)
        kept_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV < sampling.top_p  # probability mass before this token
        edge_B1 = jnp.where(kept_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    if sampling.min_p > 0.0:
        edge_B1 = logits_BV.max(axis=-1, keepdims=True) + np.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    return logits_BV
