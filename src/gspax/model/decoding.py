"""The model as the sampler runs it: `prefill` of whole prompts, and `decode`, one token of every slot at a time.

Both take a serving copy of the parameters (`rollout.serving`), whose layers are not stacked: each layer's weights and
each layer's cache are arrays of their own, and the layers are unrolled, so that they are read in place. XLA:TPU turns
one layer of a stacked array into a copy before it reads it.

A prompt's keys and values exist once per prompt; a slot has those of its own completion.

Axes: P prompts, S prompt positions, W slots, C completion positions, D model, N query heads, K key/value heads, H head,
A active experts, L sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, is_sparse, layer_windows
from gspax.kernels import segments
from gspax.kernels.decode_attention import decode_attention, merge, write_positions
from gspax.kernels.segments import Segment
from gspax.model.attention import Attend, attend_within_segments
from gspax.model.layers import rms_norm, rotary_angles
from gspax.model.transformer import LayerInputs, layer_graph
from gspax.sharding import constrain, constrain_tokens, sample_axis, spec
from gspax.types import Array, Params


class LayerCache(NamedTuple):
    """One layer's keys and values in the compute dtype: the prompts', and those of the slots' completions."""

    prompt: tuple[Segment, ...]  # of one array each; X = P
    completion: tuple[Segment, ...]  # X = W


Cache = tuple[LayerCache, ...]  # by layer
PromptCache = tuple[tuple[Array, Array], ...]  # by layer, keys and values [P, K, S, H]


class Slots(NamedTuple):
    """What the slots of a decoding pass hold."""

    prompt_length_W: Array  # int32
    # int32, the prompt of each slot, counted on its own device; None: slot w belongs to prompt w // (W // P)
    prompt_W: Array | None
    step: Array  # int32, the completion position of the token; [] if that is one for all slots, else [W]
    live_W: Array  # bool; the other slots are treated as padding


def prefill(
    params: Params, config: ModelConfig, tokens_PS: Array, length_P: Array, *, mesh: jax.sharding.Mesh | None = None
) -> tuple[Array, PromptCache, Array]:
    """Run right-padded prompts once.

    Returns:
      The final hidden state of each prompt's last token `[P, D]`, the keys and values, and the chosen experts int32
      `[P, S, L, A]` (`num_experts` on padding).
    """
    P, S = tokens_PS.shape
    index_PS = jnp.broadcast_to(jnp.arange(S)[None], (P, S))
    segment_PS = (index_PS < length_P[:, None]).astype(jnp.int32)
    within = attend_within_segments(segment_PS, layer_windows(config), mesh)

    def attend(q, k_PSKH, v_PSKH, cache, layer):
        context, _ = within(q, k_PSKH, v_PSKH, None, layer)
        return context, tuple(constrain(x.swapaxes(1, 2), mesh, "batch", "heads") for x in (k_PSKH, v_PSKH))

    shared = LayerInputs(rotary_angles(index_PS, config), segment_PS > 0, attend, mesh)
    hidden_PSD, cache, expert_PSLA = run_layers(params, config, tokens_PS, shared, (None,) * config.num_hidden_layers)
    return jnp.take_along_axis(hidden_PSD, length_P[:, None, None] - 1, axis=1)[:, 0], cache, expert_PSLA


def new_cache(
    prompts: PromptCache, config: ModelConfig, slots: int, max_tokens: int, *, mesh: jax.sharding.Mesh | None = None
) -> Cache:
    """The cache of these prompts and of `max_tokens` positions for each of so many slots."""
    K, H, rows = config.num_key_value_heads, config.head_dim, sample_axis(mesh, slots)

    def empty(size: int) -> Segment:
        k_WKSH = v_WKSH = jnp.zeros((slots, K, size, H), config.dtype)
        k = k_WKSH if on_tpu(mesh) else k_WKSH.swapaxes(2, 3)
        return Segment(constrain(k, mesh, rows, "heads"), constrain(v_WKSH, mesh, rows, "heads"))

    sizes = [max_tokens] if on_tpu(mesh) else segments.segment_sizes(max_tokens)
    return tuple(
        LayerCache(
            prompt=(Segment(k_PKSH if on_tpu(mesh) else k_PKSH.swapaxes(2, 3), v_PKSH),),
            completion=tuple(map(empty, sizes)),
        )
        for k_PKSH, v_PKSH in prompts
    )


def on_tpu(mesh: jax.sharding.Mesh | None) -> bool:
    """Whether `decode_attention` reads blocks of one array per cache; elsewhere `segments` are read."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "tpu"


def decode(
    params: Params,
    config: ModelConfig,
    token_W: Array,
    cache: Cache,
    slots: Slots,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Cache, Array]:
    """Run one token of every slot: its final hidden state `[W, D]`, the updated cache, its experts int32 `[W, L, A]`.

    Slots that are not live are not routed, and their result is undefined. Without `slots.prompt_W` all slots must have
    one step.
    """
    position_W1 = (slots.prompt_length_W + slots.step)[:, None]
    attend = _attend_over_cache(slots, layer_windows(config), mesh)
    angles = jax.lax.optimization_barrier(rotary_angles(position_W1, config))  # once, not in every product's fusion
    shared = LayerInputs(angles, slots.live_W[:, None], attend, mesh)
    hidden_W1D, cache, expert_W1LA = run_layers(params, config, token_W[:, None], shared, cache)
    return hidden_W1D[:, 0], cache, expert_W1LA[:, 0]


def cache_access(kernel: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that read and write a cache: those of the TPU kernel's layout, or those of segments."""
    return (_read_blocks, _write_in_one) if kernel else (segments.attend, segments.write)


def run_layers(params: Params, config: ModelConfig, tokens_BT: Array, shared: LayerInputs, cache: tuple[Any, ...]):
    """Final hidden states `[B, T, D]`, the layers' new caches, and the experts `[B, T, L, A]`."""
    x_BTD = constrain_tokens(params["embedding"][tokens_BT].astype(config.dtype), shared.mesh)
    experts, updated = [jnp.zeros((*tokens_BT.shape, 0, config.num_experts_per_tok), jnp.int32)], []
    for number, (layer, before) in enumerate(zip(params["layers"], cache, strict=True)):
        module = nnx.merge(layer_graph(config, is_sparse(config, number)), layer)
        x_BTD, after, routing = module(x_BTD, shared, before, number, None)
        x_BTD = constrain_tokens(x_BTD, shared.mesh)
        updated.append(after)
        experts += [routing.expert[:, :, None]] if routing is not None else []
    hidden_BTD = rms_norm(x_BTD, params["norm"]["scale"], config.rms_norm_eps)
    return hidden_BTD, tuple(updated), jnp.concatenate(experts, axis=2)


def _attend_over_cache(slots: Slots, windows: tuple[int, ...], mesh: jax.sharding.Mesh | None) -> Attend:
    """Attention of one new token per slot to its prompt and its completion so far; each device has its own slots."""

    def attend(q_W1NH, k_W1KH, v_W1KH, cache: LayerCache, layer: Any):
        local = partial(attend_local, window=windows[layer] if windows else None, kernel=on_tpu(mesh))
        arrays = q_W1NH[:, 0], k_W1KH[:, 0], v_W1KH[:, 0], cache, slots
        if mesh is None or mesh.size == 1:
            context_WNH, cache = local(*arrays)
        else:
            context_WNH, cache = _on_mesh(local, mesh, arrays)
        return context_WNH[:, None], cache

    return attend


def _on_mesh(local: Callable[..., Any], mesh: jax.sharding.Mesh, arrays: tuple[Any, ...]) -> Any:
    cache, slots = arrays[3], arrays[4]
    (rows,) = spec(sample_axis(mesh, slots.live_W.shape[0]))
    (prompts, heads) = spec("batch", "heads")
    by_row, by_head, by_prompt = PartitionSpec(rows), PartitionSpec(rows, heads), PartitionSpec(prompts, heads)
    cached = LayerCache._make((by_prompt, by_head))
    by_slot = None if slots.prompt_W is None else by_row
    held = Slots._make((by_row, by_slot, by_row if slots.step.ndim else PartitionSpec(), by_row))
    specs = (by_head, by_head, by_head, cached, held)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_head, cached), check_vma=False)
    return mapped(*arrays[:3], cache, slots)


def attend_local(
    q_WNH: Array,
    k_WKH: Array,
    v_WKH: Array,
    cache: LayerCache,
    slots: Slots,
    *,
    window: int | None,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """The context of each slot's new token, and the cache with that token's key and value."""
    prompt_length_W, prompt_W, step, live_W = slots
    read, write = cache_access(kernel)
    completion = write(cache.completion, k_WKH, v_WKH, step)
    step_W = jnp.broadcast_to(step, live_W.shape)
    first_W = jnp.zeros_like(step_W) if window is None else jnp.maximum(step_W + 1 - window, 0)
    own = read(q_WNH, completion, first_W, jnp.where(live_W, step_W + 1, 0))
    oldest_W = jnp.zeros_like(step_W)
    if window is not None:
        oldest_W = jnp.clip(prompt_length_W + step_W + 1 - window, 0, prompt_length_W)
    end_W = jnp.where(live_W, prompt_length_W, 0)
    if prompt_W is None:
        of_prompt = attend_to_own_prompt(read, q_WNH, cache.prompt, oldest_W, end_W)
    else:
        of_prompt = read(q_WNH, cache.prompt, oldest_W, end_W, prompt_W)
    return merge(of_prompt, own)[0].astype(q_WNH.dtype), LayerCache(cache.prompt, completion)


def attend_to_own_prompt(
    read: Callable[..., Any], q_WNH: Array, prompt: tuple[Segment, ...], oldest_W: Array, end_W: Array
) -> tuple[Array, Array]:
    """`read` the prompts, each once for all its slots, which are adjacent and at one step."""
    (W, N, H), (P, K) = q_WNH.shape, prompt[0].v_XKSH.shape[:2]
    G, R = W // P, N // K
    q_PNH = q_WNH.reshape(P, G, K, R, H).swapaxes(1, 2).reshape(P, K * G * R, H)
    bounds = oldest_W.reshape(P, G).max(axis=1), end_W.reshape(P, G).max(axis=1)  # one for all that are live
    context_PNH, logsumexp_PN = read(q_PNH, prompt, *bounds)
    context_WNH = context_PNH.reshape(P, K, G, R, H).swapaxes(1, 2).reshape(W, N, H)
    return context_WNH, logsumexp_PN.reshape(P, K, G, R).swapaxes(1, 2).reshape(W, N)


def _read_blocks(q_WNH: Array, cache: tuple[Segment, ...], *bounds: Array) -> tuple[Array, Array]:
    """`decode_attention` to a cache of one array."""
    ((k_XKTH, v_XKTH),) = cache
    return decode_attention(q_WNH, k_XKTH, v_XKTH, *bounds)


def _write_in_one(cache: tuple[Segment, ...], k_WKH: Array, v_WKH: Array, step: Array) -> tuple[Segment, ...]:
    """The cache of one array with each slot's new key and value at its step."""

    def write(cache_WKTH: Array, new_WKH: Array) -> Array:
        if step.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(cache_WKTH, new_WKH[:, :, None], step, axis=2)
        return write_positions(cache_WKTH, new_WKH, step)

    ((k_WKTH, v_WKTH),) = cache
    return (Segment(write(k_WKTH, k_WKH), write(v_WKTH, v_WKH)),)
