"""Prefill that extends a cache: `extend` runs several new tokens of each slot after what the slot holds.

A multi-turn rollout goes on after an environment's reply: its tokens are run in blocks, every weight is read once for
each block, and the slot then decodes as before. Within a block a token attends to its prompt, to the slot's cached
completion, and to the block up to itself; the three parts make one softmax. In a layer with a sliding window the
tokens of a block attend one after the other, as in decoding: each of them sees other positions.

Axes: W slots, M new tokens of each slot in a block, X new tokens in all, D model, N query heads, K key heads,
R = N/K, H head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gspax.config import ModelConfig, is_sparse
from gspax.model.decoding import (
    Cache,
    LayerCache,
    Slots,
    attend_local,
    attend_over_cache,
    attend_to_own_prompt,
    cache_access,
    run_layers,
)
from gspax.model.kernels.decode_attention import merge
from gspax.model.kernels.online_softmax import MASKED
from gspax.model.layers import rotary_angles
from gspax.model.transformer import LayerInputs
from gspax.types import Array, Params

BLOCK = 32  # tokens; the scores of a block of 32 query heads and 512 positions take 2 MiB of float32


def extend(
    params: Params,
    config: ModelConfig,
    tokens_WX: Array,
    cache: Cache,
    slots: Slots,
    *,
    mesh: jax.sharding.Mesh,
) -> tuple[Array, Cache, Array]:
    """Run and cache the slots' new tokens: the final hidden state of each slot's last one `[W, D]`, the cache, and the
    experts int32 `[W, X, L, A]`.

    Args:
      params: inference weights.
      tokens_WX: int32; X is at most `BLOCK` or a multiple of it. Only the first `count_W` of a row are read.
      cache: with room for them.
      slots: where they go. The cache of a slot without new tokens keeps what it holds, and its hidden state is
        undefined; so are the experts of all positions that are not read.
    """
    W, X = tokens_WX.shape
    M, L = min(X, BLOCK), sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))

    def run(block: Array, carry: tuple[Array, Cache, Array]) -> tuple[Array, Cache, Array]:
        last_WD, cache, expert_WXLA = carry
        count_W = jnp.clip(slots.count_W - block * M, 0, M)
        part = slots._replace(first=slots.first + block * M, count_W=count_W)
        tokens_WM = jax.lax.dynamic_slice_in_dim(tokens_WX, block * M, M, axis=1)
        hidden_WMD, cache, expert_WMLA = _run_block(params, config, tokens_WM, cache, part, mesh)
        at_W11 = jnp.maximum(count_W - 1, 0)[:, None, None]
        here_WD = jnp.take_along_axis(hidden_WMD, at_W11, axis=1)[:, 0]
        expert_WXLA = jax.lax.dynamic_update_slice_in_dim(expert_WXLA, expert_WMLA, block * M, axis=1)
        return jnp.where(count_W[:, None] > 0, here_WD, last_WD), cache, expert_WXLA

    expert_WXLA = jnp.zeros((W, X, L, config.num_experts_per_tok), jnp.int32)
    begin = jnp.zeros((W, config.hidden_size), config.dtype), cache, expert_WXLA
    with jax.named_scope("extend"):
        return jax.lax.fori_loop(0, -(-slots.count_W.max() // M), run, begin)


def _run_block(
    params: Params, config: ModelConfig, tokens_WM: Array, cache: Cache, slots: Slots, mesh: jax.sharding.Mesh
) -> tuple[Array, Cache, Array]:
    index_1M = jnp.arange(tokens_WM.shape[1])[None]
    position_WM = (slots.prompt_length_W + slots.first)[:, None] + index_1M
    attend = attend_over_cache(_attend_local, slots, config, mesh)
    shared = LayerInputs(rotary_angles(position_WM, config), index_1M < slots.count_W[:, None], attend, mesh)
    return run_layers(params, config, tokens_WM, shared, cache)


def _attend_local(
    q_WNMH: Array,
    k_WKMH: Array,
    v_WKMH: Array,
    cache: LayerCache,
    slots: Slots,
    *,
    window: int | None,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """The context of each slot's new tokens, and the cache with their keys and values."""
    in_window = window is not None and window < 2**30  # that of a layer without one
    attend = partial(_attend_one_by_one, window=window) if in_window else _attend_in_block
    return attend(q_WNMH, k_WKMH, v_WKMH, cache, slots, kernel=kernel)


def _attend_in_block(
    q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, cache: LayerCache, slots: Slots, *, kernel: bool
) -> tuple[Array, LayerCache]:
    """`_attend_local` in a layer without a window."""
    (W, N, M, H), (read, write) = q_WNMH.shape, cache_access(kernel)
    prompt_W, first_W, count_W = slots.prompt_W, slots.first, slots.count_W
    active_W, zeros_W = count_W > 0, jnp.zeros_like(count_W)
    # the tokens of a query head as so many heads, which see the same positions of prompt and cache
    q_WLH = q_WNMH.reshape(W, N * M, H)
    so_far = read(q_WLH, cache.completion, zeros_W, jnp.where(active_W, first_W, 0))
    prompt_end_W = jnp.where(active_W, slots.prompt_length_W, 0)
    if prompt_W is None and kernel:  # which reads rows by number, and holds the queries of few rows at a time
        prompt_W = jnp.arange(W) // (W // cache.prompt[0].v_XKSH.shape[0])
    if prompt_W is None:
        of_prompt = attend_to_own_prompt(read, q_WLH, cache.prompt, zeros_W, prompt_end_W)
    else:
        of_prompt = read(q_WLH, cache.prompt, zeros_W, prompt_end_W, prompt_W)
    context_WLH, _ = merge(merge(of_prompt, so_far), _attend_to_block(q_WNMH, k_WKMH, v_WKMH, count_W))

    def write_one(m: Array, completion: Any) -> Any:
        """The positions beyond the new tokens get the last of them again, where it belongs."""
        m_W = jnp.clip(m, 0, jnp.maximum(count_W - 1, 0))
        k_WKH, v_WKH = (jnp.take_along_axis(x, m_W[:, None, None, None], axis=2)[:, :, 0] for x in (k_WKMH, v_WKMH))
        return write(completion, k_WKH, v_WKH, first_W + m_W)

    # A slot without new tokens gets a key at its next position, which decoding replaces before it is read.
    completion = jax.lax.fori_loop(0, jnp.maximum(count_W.max(), 1), write_one, cache.completion)
    return context_WLH.reshape(W, N, M, H), LayerCache(cache.prompt, completion)


def _attend_to_block(q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, count_W: Array) -> tuple[Array, Array]:
    """Causal attention within the block, as the result of `decode_attention` for N·M query heads."""
    (W, N, M, H), K = q_WNMH.shape, k_WKMH.shape[1]
    q_WKRMH = q_WNMH.reshape(W, K, N // K, M, H)
    score = jnp.einsum("wkrmh,wksh->wkrms", q_WKRMH, k_WKMH, preferred_element_type=jnp.float32) * H**-0.5
    order_M = jnp.arange(M)
    seen_WMM = (order_M[None, None] <= order_M[None, :, None]) & (order_M[None, None] < count_W[:, None, None])
    score = jnp.where(seen_WMM[:, None, None], score, MASKED)
    logsumexp = jax.nn.logsumexp(score, axis=-1)
    weight = jnp.exp(score - logsumexp[..., None])
    context = jnp.einsum("wkrms,wksh->wkrmh", weight.astype(v_WKMH.dtype), v_WKMH, preferred_element_type=jnp.float32)
    return context.reshape(W, N * M, H), logsumexp.reshape(W, N * M)


def _attend_one_by_one(
    q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, cache: LayerCache, slots: Slots, *, window: int | None, kernel: bool
) -> tuple[Array, LayerCache]:
    """`_attend_local` in a layer with a window: each token as in a decoding pass of its own."""
    W, P = len(slots.count_W), cache.prompt[0].v_XKSH.shape[0]
    prompt_W = jnp.arange(W) // (W // P) if slots.prompt_W is None else slots.prompt_W

    def step(m: Array, carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        context_WNMH, cache = carry
        left_W = slots.count_W - m
        now = Slots(
            slots.prompt_length_W, prompt_W, slots.first + jnp.minimum(m, slots.count_W), jnp.clip(left_W, 0, 1)
        )
        q_WN1H, k_WK1H, v_WK1H = (jax.lax.dynamic_slice_in_dim(x, m, 1, axis=2) for x in (q_WNMH, k_WKMH, v_WKMH))
        context_WN1H, cache = attend_local(q_WN1H, k_WK1H, v_WK1H, cache, now, window=window, kernel=kernel)
        return jax.lax.dynamic_update_slice_in_dim(context_WNMH, context_WN1H, m, axis=2), cache

    return jax.lax.fori_loop(0, slots.count_W.max(), step, (jnp.zeros_like(q_WNMH), cache))
