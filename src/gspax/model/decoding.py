"""The model as the sampler runs it: `prefill` of whole prompts, and `decode`, one token of every slot at a time.

Both take the inference weights (`sampler.inference_weights`), whose layers are not stacked: each layer's weights and
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

from gspax.config import ModelConfig, SamplerDtype, is_sparse, layer_windows
from gspax.model import transformer
from gspax.model.attention import Attend, attend_within_segments
from gspax.model.kernels import segments
from gspax.model.kernels.decode_attention import decode_attention, merge, write_positions
from gspax.model.kernels.quantization import Weight, contract, is_quantized, look_up, quantize
from gspax.model.kernels.segments import Segment
from gspax.model.layers import rms_norm, rotary_angles
from gspax.model.transformer import LayerInputs, layer_graph
from gspax.parallel.sharding import batch_shards, constrain, constrain_tokens, sample_axis, spec
from gspax.types import Array, Params


class LayerCache(NamedTuple):
    """One layer's keys and values, in the compute dtype or in 8 bits: the prompts', and the slots' completions'."""

    prompt: tuple[Segment, ...]  # of one array each; X = P
    completion: tuple[Segment, ...]  # X = W


Cache = tuple[LayerCache, ...]  # by layer
PromptCache = tuple[Segment, ...]  # by layer; X = P


class Slots(NamedTuple):
    """Where the new tokens of the slots go: one for each in `decode`, several in `extension.extend`."""

    prompt_length_W: Array  # int32
    # int32, the prompt of each slot, counted on its own device; None: slot w belongs to prompt w // (W // P)
    prompt_W: Array | None
    first: Array  # int32, the completion position of the first new token; [] if that is one for all slots, else [W]
    count_W: Array  # int32, the new tokens; slots without any are treated as padding


def prefill(
    params: Params,
    config: ModelConfig,
    tokens_PS: Array,
    length_P: Array,
    *,
    chunk: int = 0,
    kv_cache_dtype: SamplerDtype = "auto",
    mesh: jax.sharding.Mesh,
) -> tuple[Array, PromptCache, Array]:
    """Run right-padded prompts once.

    Args:
      params: inference weights.
      config: of the model.
      tokens_PS: int32.
      length_P: int32, tokens of each prompt.
      chunk: so many prompts of each device are run at a time, so that activations are those of a chunk; 0: all.
      kv_cache_dtype: "auto", the compute dtype, or "int8" with a scale for each token and head. The prompts attend to
        keys and values that are not rounded.
      mesh: the device mesh.

    Returns:
      The final hidden state of each prompt's last token `[P, D]`, the keys and values, and the chosen experts int32
      `[P, S, L, A]` (`num_experts` on padding).
    """
    run = partial(_prefill, params, config, kv_cache_dtype=kv_cache_dtype, mesh=mesh)
    Q = batch_shards(mesh)
    own = tokens_PS.shape[0] // Q
    if not 0 < chunk < own:
        return run(tokens_PS, length_P)
    count = -(-own // chunk)
    size = -(-own // count)

    def hold(results: Any) -> Any:
        """Rows by device, each device with its own."""
        hidden, cache, expert = results
        cache = jax.tree.map(lambda x: constrain(x, mesh, "batch", "layer", "heads"), cache)
        return constrain(hidden, mesh, "batch"), cache, constrain(expert, mesh, "batch")

    def add(number: Array, results: Any) -> Any:
        first = jnp.minimum(number * size, own - size)  # the last chunk overlaps the one before

        def take(x_P: Array) -> Array:
            x_QO = constrain(x_P.reshape(Q, own, *x_P.shape[1:]), mesh, "batch")
            return jax.lax.dynamic_slice_in_dim(x_QO, first, size, axis=1).reshape(Q * size, *x_P.shape[1:])

        def put(all_QO: Array, x: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(all_QO, x.reshape(Q, size, *x.shape[1:]), first, axis=1)

        return hold(jax.tree.map(put, results, run(take(tokens_PS), take(length_P))))

    shapes = jax.eval_shape(run, tokens_PS[: Q * size], length_P[: Q * size])
    empty = jax.tree.map(lambda x: jnp.zeros((Q, own, *x.shape[1:]), x.dtype), shapes)
    results = jax.lax.fori_loop(0, count, add, hold(empty))
    return jax.tree.map(lambda x_QO: x_QO.reshape(Q * own, *x_QO.shape[2:]), results)


def _prefill(
    params: Params,
    config: ModelConfig,
    tokens_PS: Array,
    length_P: Array,
    *,
    kv_cache_dtype: SamplerDtype,
    mesh: jax.sharding.Mesh,
) -> tuple[Array, PromptCache, Array]:
    """`prefill` of all these prompts at once."""
    P, S = tokens_PS.shape
    index_PS = jnp.broadcast_to(jnp.arange(S)[None], (P, S))
    segment_PS = (index_PS < length_P[:, None]).astype(jnp.int32)
    within = attend_within_segments(segment_PS, mesh, layer_windows(config))

    def attend(q, k_PSKH, v_PSKH, cache, layer):
        context, _ = within(q, k_PSKH, v_PSKH, None, layer)
        k_PKSH, v_PKSH = (constrain(x.swapaxes(1, 2), mesh, "batch", "heads") for x in (k_PSKH, v_PSKH))
        return context, _to_segment(k_PKSH, v_PKSH, kv_cache_dtype, mesh)

    shared = LayerInputs(rotary_angles(index_PS, config), segment_PS > 0, attend, mesh)
    hidden_PSD, cache, expert_PSLA = run_layers(params, config, tokens_PS, shared, (None,) * config.num_hidden_layers)
    return jnp.take_along_axis(hidden_PSD, length_P[:, None, None] - 1, axis=1)[:, 0], cache, expert_PSLA


def _to_segment(k_XKSH: Array, v_XKSH: Array, kv_cache_dtype: SamplerDtype, mesh: jax.sharding.Mesh) -> Segment:
    """Keys and values as they are cached: in this dtype, and keys transposed except on TPU."""
    segment = Segment(k_XKSH, v_XKSH)
    if kv_cache_dtype == "int8":
        segment = _quantize(segment)
    if on_tpu(mesh):
        return segment
    return segment._replace(k_XKHS=jax.tree.map(lambda x: x.swapaxes(2, 3) if x.ndim == 4 else x, segment.k_XKHS))


def _quantize(new: Segment) -> Segment:
    """New keys and values with one scale for each token and head."""
    return Segment(*(quantize(x, axes=(-1,)) for x in new))


def new_cache(
    prompts: PromptCache,
    config: ModelConfig,
    slots: int,
    max_tokens: int,
    *,
    kv_cache_dtype: SamplerDtype = "auto",
    mesh: jax.sharding.Mesh,
) -> Cache:
    """The cache of these prompts, and of `max_tokens` positions for each of so many slots."""
    K, H, rows = config.num_key_value_heads, config.head_dim, sample_axis(mesh, slots)

    def empty(size: int) -> Segment:
        zeros_WKSH = jnp.zeros((slots, K, size, H), config.dtype)
        segment = _to_segment(zeros_WKSH, zeros_WKSH, kv_cache_dtype, mesh)
        return jax.tree.map(lambda x: constrain(x, mesh, rows, "heads"), segment)

    sizes = [max_tokens] if on_tpu(mesh) else segments.segment_sizes(max_tokens)
    return tuple(LayerCache(prompt=(prompt,), completion=tuple(map(empty, sizes))) for prompt in prompts)


def on_tpu(mesh: jax.sharding.Mesh) -> bool:
    """Whether `decode_attention` reads blocks of one array per cache; elsewhere `segments` are read."""
    return bool(mesh.devices.flat[0].platform == "tpu")


def decode(
    params: Params,
    config: ModelConfig,
    token_W: Array,
    cache: Cache,
    slots: Slots,
    *,
    mesh: jax.sharding.Mesh,
) -> tuple[Array, Cache, Array]:
    """Run one token of every slot: its final hidden state `[W, D]`, the updated cache, its experts int32 `[W, L, A]`.

    Slots without a new token are not routed, and their result is undefined. Without `slots.prompt_W` all slots must be
    at one position, or no layer have a window.
    """
    position_W1 = (slots.prompt_length_W + slots.first)[:, None]
    attend = attend_over_cache(attend_local, slots, config, mesh)
    angles = jax.lax.optimization_barrier(rotary_angles(position_W1, config))  # once, not in every product's fusion
    shared = LayerInputs(angles, slots.count_W[:, None] > 0, attend, mesh)
    hidden_W1D, cache, expert_W1LA = run_layers(params, config, token_W[:, None], shared, cache)
    return hidden_W1D[:, 0], cache, expert_W1LA[:, 0]


def cache_access(kernel: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that read and write a cache: those of the TPU kernel's layout, or those of segments."""
    read, write = (_read_blocks, _write_in_one) if kernel else (segments.attend, segments.write)

    def write_rounded(cache: tuple[Segment, ...], k_WKH: Array, v_WKH: Array, step: Array) -> tuple[Segment, ...]:
        new = Segment(k_WKH, v_WKH)
        return write(cache, *(_quantize(new) if is_quantized(cache[0].v_XKSH) else new), step)

    return read, write_rounded


def logits(params: Params, hidden_BD: Array) -> Array:
    """Float32 logits `[B, V]` of final hidden states."""
    weight = params.get("head", params["embedding"])
    if not is_quantized(weight):
        return transformer.logits(params, hidden_BD)
    with jax.named_scope("head"):
        return contract("bd,dv->bv" if "head" in params else "bd,vd->bv", hidden_BD, weight, jnp.float32)


def run_layers(params: Params, config: ModelConfig, tokens_BT: Array, shared: LayerInputs, cache: tuple[Any, ...]):
    """Final hidden states `[B, T, D]`, the layers' new caches, and the experts `[B, T, L, A]`."""
    x_BTD = constrain_tokens(look_up(params["embedding"], tokens_BT, config.dtype), shared.mesh)
    experts, updated = [jnp.zeros((*tokens_BT.shape, 0, config.num_experts_per_tok), jnp.int32)], []
    for number, (layer, before) in enumerate(zip(params["layers"], cache, strict=True)):
        module = nnx.merge(layer_graph(config, is_sparse(config, number)), layer)
        x_BTD, after, routing = module(x_BTD, shared, before, number, None)
        x_BTD = constrain_tokens(x_BTD, shared.mesh)
        updated.append(after)
        experts += [routing.expert[:, :, None]] if routing is not None else []
    hidden_BTD = rms_norm(x_BTD, params["norm"]["scale"], config.rms_norm_eps)
    return hidden_BTD, tuple(updated), jnp.concatenate(experts, axis=2)


def attend_over_cache(
    local: Callable[..., tuple[Array, LayerCache]], slots: Slots, config: ModelConfig, mesh: jax.sharding.Mesh
) -> Attend:
    """Attention of the slots' M new tokens to their prompts, their completions so far, and one another.

    Args:
      local: as `attend_local`, for the slots and heads of one device.
    """
    windows = layer_windows(config)
    (rows,), (prompts, heads) = spec(sample_axis(mesh, len(slots.count_W))), spec("batch", "heads")
    by_row, by_head = PartitionSpec(rows), PartitionSpec(rows, heads)
    cached: Any = LayerCache._make((PartitionSpec(prompts, heads), by_head))
    placed = jax.tree.map(lambda x: by_row if x.ndim else PartitionSpec(), slots)

    def attend(q_WMNH, k_WMKH, v_WMKH, cache: LayerCache, layer: Any):
        of_layer = partial(local, window=windows[layer] if windows else None, kernel=on_tpu(mesh))
        if mesh.size > 1:
            in_specs = by_head, by_head, by_head, cached, placed
            of_layer = jax.shard_map(
                of_layer, mesh=mesh, in_specs=in_specs, out_specs=(by_head, cached), check_vma=False
            )
        by_slot_and_head = (x.swapaxes(1, 2) for x in (q_WMNH, k_WMKH, v_WMKH))
        context_WNMH, cache = of_layer(*by_slot_and_head, cache, slots)
        return context_WNMH.swapaxes(1, 2).astype(q_WMNH.dtype), cache

    return attend


def attend_local(
    q_WNMH: Array,
    k_WKMH: Array,
    v_WKMH: Array,
    cache: LayerCache,
    slots: Slots,
    *,
    window: int | None,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """The context of each slot's new token (M = 1), and the cache with that token's key and value."""
    q_WNH, k_WKH, v_WKH = (x[:, :, 0] for x in (q_WNMH, k_WKMH, v_WKMH))
    q_WNH, k_WKH = jax.lax.optimization_barrier((q_WNH, k_WKH))  # rotated once, not by every reader's fusion
    read, write = cache_access(kernel)
    completion = write(cache.completion, k_WKH, v_WKH, slots.first)
    active_W, first_W = slots.count_W > 0, jnp.broadcast_to(slots.first, slots.count_W.shape)
    oldest_W = jnp.zeros_like(first_W) if window is None else jnp.maximum(first_W + 1 - window, 0)
    own = read(q_WNH, completion, oldest_W, jnp.where(active_W, first_W + 1, 0))
    oldest_W = jnp.zeros_like(first_W)
    if window is not None:
        oldest_W = jnp.clip(slots.prompt_length_W + first_W + 1 - window, 0, slots.prompt_length_W)
    end_W = jnp.where(active_W, slots.prompt_length_W, 0)
    if slots.prompt_W is None:
        of_prompt = attend_to_own_prompt(read, q_WNH, cache.prompt, oldest_W, end_W)
    else:
        of_prompt = read(q_WNH, cache.prompt, oldest_W, end_W, slots.prompt_W)
    context_WNH, _ = merge(of_prompt, own)
    return context_WNH.astype(q_WNMH.dtype)[:, :, None], LayerCache(cache.prompt, completion)


def attend_to_own_prompt(
    read: Callable[..., Any], q_WNH: Array, prompt: tuple[Segment, ...], oldest_W: Array, end_W: Array
) -> tuple[Array, Array]:
    """`read` the prompts, each once for all its slots, which are adjacent and see the same positions of it."""
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


def _write_in_one(cache: tuple[Segment, ...], k_WKH: Weight, v_WKH: Weight, step: Array) -> tuple[Segment, ...]:
    """The cache of one array with each slot's new key and value at its step."""

    def write(cache_WKTH: Array, new_WKH: Array) -> Array:  # or of scales, without the axis H
        if step.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(cache_WKTH, new_WKH[:, :, None], step, axis=2)
        return write_positions(cache_WKTH, new_WKH, step)

    return (jax.tree.map(write, cache[0], Segment(k_WKH, v_WKH)),)
