"""Prefill that extends a cache: `extend` runs several new tokens of each slot after what the slot holds.

A conversation goes on after an environment's reply: its tokens are run in blocks, every weight is read once for each
block, and the slot then decodes as before. Within a block a token attends to its prompt, to the slot's cached
completion, and to the block up to itself; the three parts make one softmax. In a layer with a sliding window the
tokens of a block attend one after the other, as in decoding: each of them sees other positions.

Axes: W slots, M new tokens of each slot in a block, X new tokens in all, D model, N query heads, K key heads,
R = N/K, H head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, layer_windows
from gspax.kernels.decode_attention import merge
from gspax.kernels.online_softmax import MASKED
from gspax.model.attention import Attend
from gspax.model.decoding import (
    Cache,
    LayerCache,
    Slots,
    attend_local,
    attend_to_own_prompt,
    cache_access,
    on_tpu,
    run_layers,
)
from gspax.model.layers import rotary_angles
from gspax.model.transformer import LayerInputs
from gspax.sharding import sample_axis, spec
from gspax.types import Array, Params

BLOCK = 32  # tokens; the scores of a block of 32 query heads and 512 positions take 2 MiB of float32


class NewTokens(NamedTuple):
    """Where the slots' new tokens go."""

    prompt_length_W: Array  # int32
    prompt_W: Array | None  # as in `Slots`; None: slot w belongs to prompt w // (W // P)
    first_W: Array  # int32, the completion position of the first new token
    count_W: Array  # int32, the new tokens; 0: the slot is left as it is


def extend(
    params: Params,
    config: ModelConfig,
    tokens_WX: Array,
    cache: Cache,
    new: NewTokens,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Cache]:
    """Run and cache the slots' new tokens: the final hidden state of each slot's last one `[W, D]`, and the cache.

    Args:
      params: a serving copy.
      tokens_WX: int32; X is at most `BLOCK` or a multiple of it. Only the first `count_W` of a row are read.
      cache: with room for them.
      new: where they go. The hidden state of a slot without new tokens is undefined.
    """
    W, X = tokens_WX.shape
    M = min(X, BLOCK)

    def run(block: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        last_WD, cache = carry
        count_W = jnp.clip(new.count_W - block * M, 0, M)
        part = new._replace(first_W=new.first_W + block * M, count_W=count_W)
        tokens_WM = jax.lax.dynamic_slice_in_dim(tokens_WX, block * M, M, axis=1)
        hidden_WMD, cache = _run_block(params, config, tokens_WM, cache, part, mesh)
        at_W11 = jnp.maximum(count_W - 1, 0)[:, None, None]
        here_WD = jnp.take_along_axis(hidden_WMD, at_W11, axis=1)[:, 0]
        return jnp.where(count_W[:, None] > 0, here_WD, last_WD), cache

    begin = jnp.zeros((W, config.hidden_size), config.dtype), cache
    with jax.named_scope("extend"):
        return jax.lax.fori_loop(0, -(-new.count_W.max() // M), run, begin)


def _run_block(
    params: Params,
    config: ModelConfig,
    tokens_WM: Array,
    cache: Cache,
    new: NewTokens,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Array, Cache]:
    index_1M = jnp.arange(tokens_WM.shape[1])[None]
    position_WM = (new.prompt_length_W + new.first_W)[:, None] + index_1M
    attend = _attend_over_cache(new, layer_windows(config), mesh)
    shared = LayerInputs(rotary_angles(position_WM, config), index_1M < new.count_W[:, None], attend, mesh)
    hidden_WMD, cache, _ = run_layers(params, config, tokens_WM, shared, cache)
    return hidden_WMD, cache


def _attend_over_cache(new: NewTokens, windows: tuple[int, ...], mesh: jax.sharding.Mesh | None) -> Attend:
    def attend(q_WMNH, k_WMKH, v_WMKH, cache: LayerCache, layer: Any):
        window = windows[layer] if windows else 2**30
        local = partial(_attend_in_block, kernel=on_tpu(mesh))
        if window < 2**30:
            local = partial(_attend_one_by_one, window=window, kernel=on_tpu(mesh))
        arrays = *(x.swapaxes(1, 2) for x in (q_WMNH, k_WMKH, v_WMKH)), cache, new
        context_WNMH, cache = local(*arrays) if mesh is None or mesh.size == 1 else _on_mesh(local, mesh, arrays)
        return context_WNMH.swapaxes(1, 2).astype(q_WMNH.dtype), cache

    return attend


def _on_mesh(local: Callable[..., Any], mesh: jax.sharding.Mesh, arrays: tuple[Any, ...]) -> Any:
    """Each device has its own slots and heads."""
    (rows,), (prompts, heads) = spec(sample_axis(mesh, len(arrays[4].count_W))), spec("batch", "heads")
    by_row, by_head = PartitionSpec(rows), PartitionSpec(rows, heads)
    cached = LayerCache(PartitionSpec(prompts, heads), by_head)  # type: ignore[arg-type]
    placed = NewTokens(by_row, None if arrays[4].prompt_W is None else by_row, by_row, by_row)  # type: ignore[arg-type]
    specs = (by_head, by_head, by_head, cached, placed)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_head, cached), check_vma=False)
    return mapped(*arrays)


def _attend_in_block(
    q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, cache: LayerCache, new: NewTokens, *, kernel: bool
) -> tuple[Array, LayerCache]:
    """The context of each new token, and the cache with their keys and values."""
    (W, N, M, H), (read, write) = q_WNMH.shape, cache_access(kernel)
    prompt_length_W, prompt_W, first_W, count_W = new
    live_W, zeros_W = count_W > 0, jnp.zeros_like(count_W)
    # the tokens of a query head as so many heads, which see the same positions of prompt and cache
    q_WLH = q_WNMH.reshape(W, N * M, H)
    so_far = read(q_WLH, cache.completion, zeros_W, jnp.where(live_W, first_W, 0))
    prompt_end_W = jnp.where(live_W, prompt_length_W, 0)
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
    q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, cache: LayerCache, new: NewTokens, *, window: int, kernel: bool
) -> tuple[Array, LayerCache]:
    """The same in a layer with a window: each token as in a decoding pass of its own."""
    W, P = len(new.count_W), cache.prompt[0].v_XKSH.shape[0]
    prompt_W = jnp.arange(W) // (W // P) if new.prompt_W is None else new.prompt_W

    def step(m: Array, carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        context_WNMH, cache = carry
        slots = Slots(new.prompt_length_W, prompt_W, new.first_W + jnp.minimum(m, new.count_W), m < new.count_W)
        each = q_WNMH[:, :, m], k_WKMH[:, :, m], v_WKMH[:, :, m]
        context_WNH, cache = attend_local(*each, cache, slots, window=window, kernel=kernel)
        return context_WNMH.at[:, :, m].set(context_WNH), cache

    return jax.lax.fori_loop(0, new.count_W.max(), step, (jnp.zeros_like(q_WNMH), cache))
