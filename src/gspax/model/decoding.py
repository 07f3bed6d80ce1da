"""The model as the sampler runs it: `prefill` of whole prompts, `decode`, one token of every slot at a time,
`decode_block`, a token of every slot and drafts of the next ones, and `extend`, an environment's reply.

They take inference weights (`sampler.inference_weights`), whose layers are not stacked: each layer's weights and each
layer's cache are arrays of their own, and the layers are unrolled, so that they are read in place. XLA:TPU turns one
layer of a stacked array into a copy before it reads it.

The keys and values of a prompt exist once; a slot has the keys and values of its completion. A multi-turn rollout
continues after an environment's reply: the reply is run in blocks, every weight is read once for each block, and the
slot then decodes as before.

Axes: P prompts, S prompt positions, W slots, C completion positions, M new tokens of each slot in a block, X new tokens
in all, D model, N query heads, K key/value heads, R = N/K, H head, A active experts, L sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from gspax.config import NO_WINDOW, ModelConfig, SamplerDtype, layer_windows, layers_of, sparse_layers
from gspax.model import transformer
from gspax.model.kernels import segments
from gspax.model.kernels.decode_attention import merge
from gspax.model.kernels.online_softmax import MASKED
from gspax.model.kernels.segments import Segments
from gspax.model.kernels.weights import look_up, project
from gspax.model.layers import Advance, Attend, Heads, LayerInputs, attend_within_segments, rms_norm, rotary_angles
from gspax.model.transformer import layer_graph
from gspax.parallel import sharding
from gspax.parallel.sharding import batch_shards, constrain, constrain_tokens, sample_axis, spec
from gspax.types import Array, Params, PyTree

MOST_QUERIES = 2**18  # numbers in a row's queries: for 4096 heads of 128, the kernel has too little memory on chip
BLOCK = 32  # tokens of `extend`; the scores of a block of 32 query heads and 512 positions take 2 MiB of float32


class LayerCache(NamedTuple):
    """The cache of one layer: of the prompts, and of the slots' completions.

    Attention: keys and values in the compute dtype or in 8 bits. A recurrence: the states after the prompts, and after
    the slots' last tokens.
    """

    prompt: PyTree  # Segments, of which there is one, or a state; X = P
    completion: PyTree  # X = W


Cache = tuple[LayerCache, ...]  # by layer
PromptCache = tuple[PyTree, ...]  # by layer


class Slots(NamedTuple):
    """The places of the slots' new tokens: one for each slot in `decode`, several in `extend`."""

    prompt_length_W: Array  # int32
    # int32, the prompt of each slot, counted on its own device; None: slot w belongs to prompt w // (W // P)
    prompt_W: Array | None
    first: Array  # int32, the completion position of the first new token; [] if that is one for all slots, else [W]
    count_W: Array  # int32, the new tokens; slots without any are treated as padding


# --- prefill ---------------------------------------------------------------------------------------------------------


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
      config: the model's config.
      tokens_PS: int32.
      length_P: int32, tokens of each prompt.
      chunk: the number of prompts that each device runs at a time, to limit activations; 0: all.
      kv_cache_dtype: "auto", the compute dtype, or "int8" with a scale for each token and head. The prompts attend to
        keys and values that are not rounded.
      mesh: the device mesh.

    Returns:
      The final hidden state of each prompt's last token `[P, D]`, the keys and values, and the chosen experts int32
      `[P, S, L, A]` (`num_experts` on padding).
    """
    run = partial(_prefill_at_once, params, config, kv_cache_dtype=kv_cache_dtype, mesh=mesh)
    if 0 < chunk < tokens_PS.shape[0] // batch_shards(mesh):
        return _run_in_chunks(run, tokens_PS, length_P, chunk, mesh)
    return run(tokens_PS, length_P)


def _run_in_chunks(
    run: Callable[[Array, Array], PyTree], tokens_PS: Array, length_P: Array, chunk: int, mesh: jax.sharding.Mesh
) -> PyTree:
    """Run each device's prompts in equal chunks of at most `chunk`, and put the results together.

    Meanwhile the results are [Q, O, ...]: of the `own` prompts of each of Q devices.
    """
    Q = batch_shards(mesh)
    own = tokens_PS.shape[0] // Q
    count = -(-own // chunk)
    size = -(-own // count)

    def on_own_devices(results: PyTree) -> PyTree:
        hidden, cache, expert = results
        cache = jax.tree.map(lambda x: constrain(x, mesh, "batch", "layer", heads_axis(x.shape[2])), cache)
        return constrain(hidden, mesh, "batch"), cache, constrain(expert, mesh, "batch")

    def add(number: Array, results: PyTree) -> PyTree:
        first = jnp.minimum(number * size, own - size)  # the last chunk overlaps the one before

        def take(x_P: Array) -> Array:
            x_QO = constrain(x_P.reshape(Q, own, *x_P.shape[1:]), mesh, "batch")
            return jax.lax.dynamic_slice_in_dim(x_QO, first, size, axis=1).reshape(Q * size, *x_P.shape[1:])

        def put(all_QO: Array, x: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(all_QO, x.reshape(Q, size, *x.shape[1:]), first, axis=1)

        return on_own_devices(jax.tree.map(put, results, run(take(tokens_PS), take(length_P))))

    shapes = jax.eval_shape(run, tokens_PS[: Q * size], length_P[: Q * size])
    empty = jax.tree.map(lambda x: jnp.zeros((Q, own, *x.shape[1:]), x.dtype), shapes)
    results = jax.lax.fori_loop(0, count, add, on_own_devices(empty))
    return jax.tree.map(lambda x_QO: x_QO.reshape(Q * own, *x_QO.shape[2:]), results)


def _prefill_at_once(
    params: Params,
    config: ModelConfig,
    tokens_PS: Array,
    length_P: Array,
    *,
    kv_cache_dtype: SamplerDtype,
    mesh: jax.sharding.Mesh,
) -> tuple[Array, PromptCache, Array]:
    """Run `prefill` of all these prompts at once."""
    P, S = tokens_PS.shape
    index_PS = jnp.broadcast_to(jnp.arange(S)[None], (P, S))
    segment_PS = (index_PS < length_P[:, None]).astype(jnp.int32)
    within = attend_within_segments(segment_PS, mesh, layer_windows(config))

    def attend(heads: Heads, cache: None, layer: Array | int) -> tuple[Array, Segments]:
        context_PSNU, _ = within(heads, cache, layer)
        cached = (heads.k_BTKH, heads.v_BTKU) if heads.cached_BT1Z is None else (None, heads.cached_BT1Z)
        k_PKSH, v_PKSU = jax.tree.map(lambda x: place_cache(x.swapaxes(1, 2), mesh, "batch"), cached)
        segment = segments.make_segment(k_PKSH, v_PKSU, kv_cache_dtype, kernel=on_tpu(mesh))
        return context_PSNU, (segment,)

    def advance(run: Callable[..., tuple[Array, PyTree]], cache: None) -> tuple[Array, PyTree]:
        y_PSD, state = run(segment_PS, None)
        return y_PSD, jax.tree.map(lambda x: constrain(x, mesh, "batch", "heads"), state)

    shared = LayerInputs(rotary_angles(index_PS, config), segment_PS > 0, attend, advance, mesh)
    hidden_PSD, cache, expert_PSLA = _run_layers(params, config, tokens_PS, shared, (None,) * config.num_hidden_layers)
    return jnp.take_along_axis(hidden_PSD, length_P[:, None, None] - 1, axis=1)[:, 0], cache, expert_PSLA


def new_cache(
    prompts: PromptCache,
    config: ModelConfig,
    slots: int,
    max_tokens: int,
    *,
    kv_cache_dtype: SamplerDtype = "auto",
    mesh: jax.sharding.Mesh,
) -> Cache:
    """Make the cache of these prompts, with `max_tokens` empty positions, or an empty state, for each slot."""
    rows, kernel = sample_axis(mesh, slots), on_tpu(mesh)
    sizes = segments.segment_sizes(max_tokens, kernel=kernel)

    def empty_segments(width: int, prompt: Segments) -> Segments:
        (given,), made = prompt, []
        for size in sizes:
            values = jax.ShapeDtypeStruct((slots, given.v_XKSH.shape[1], size, width), config.dtype)
            keys = None if given.k_XKHS is None else values
            make = partial(segments.make_segment, dtype=kv_cache_dtype, kernel=kernel)
            # zeros, not rounded ones: XLA would compute their scales, one by one, when it compiles
            segment = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make, keys, values))
            made.append(jax.tree.map(lambda x: place_cache(x, mesh, rows), segment))
        return tuple(made)

    def empty_state(prompt: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), prompt)
        return jax.tree.map(lambda x: constrain(x, mesh, rows, "heads"), zeros)

    caches = []
    for layer, prompt in zip(layers_of(config), prompts, strict=True):
        width = layer.mixer.cache(1).width  # of values; 0: the layer has a state instead
        caches.append(LayerCache(prompt, empty_segments(width, prompt) if width else empty_state(prompt)))
    return tuple(caches)


def place_cache(x_XK: Array, mesh: jax.sharding.Mesh, rows: str) -> Array:
    """Put an array of a cache on its devices; a latent is on all devices that the heads are sharded over."""
    return constrain(x_XK, mesh, rows, heads_axis(x_XK.shape[1]))


def heads_axis(K: int) -> str:
    """Return the logical axis of a cache's K heads: a head that all query heads share is not sharded."""
    return "heads" if K > 1 else "layer"


def on_tpu(mesh: jax.sharding.Mesh) -> bool:
    """Return whether the cache is in the layout of the TPU kernel `decode_attention`."""
    return sharding.platform(mesh) == "tpu"


# --- decode and extend -----------------------------------------------------------------------------------------------


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
    attend = _attend_over_cache(_attend_to_token, slots, config, mesh)
    # Computed once, not in every product's fusion.
    angles = {rope: jax.lax.optimization_barrier(each) for rope, each in rotary_angles(position_W1, config).items()}
    live_W1 = slots.count_W[:, None] > 0
    shared = LayerInputs(angles, live_W1, attend, _advance_states(slots, 1, mesh), mesh, decoding=True)
    hidden_W1D, cache, expert_W1LA = _run_layers(params, config, token_W[:, None], shared, cache)
    return hidden_W1D[:, 0], cache, expert_W1LA[:, 0]


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
      slots: their places. The cache of a slot without new tokens does not change, and its hidden state is
        undefined; so are the experts of all positions that are not read.
    """
    W, X = tokens_WX.shape
    M, L = min(X, BLOCK), sparse_layers(config)

    def run(block: Array, carry: tuple[Array, Cache, Array]) -> tuple[Array, Cache, Array]:
        last_WD, cache, expert_WXLA = carry
        count_W = jnp.clip(slots.count_W - block * M, 0, M)
        part = slots._replace(first=slots.first + block * M, count_W=count_W)
        tokens_WM = jax.lax.dynamic_slice_in_dim(tokens_WX, block * M, M, axis=1)
        run_block = partial(_run_block, params, config, tokens_WM, cache, part, _advance_states, mesh=mesh)
        hidden_WMD, cache, expert_WMLA = run_block(decoding=False)
        at_W11 = jnp.maximum(count_W - 1, 0)[:, None, None]
        here_WD = jnp.take_along_axis(hidden_WMD, at_W11, axis=1)[:, 0]
        expert_WXLA = jax.lax.dynamic_update_slice_in_dim(expert_WXLA, expert_WMLA, block * M, axis=1)
        return jnp.where(count_W[:, None] > 0, here_WD, last_WD), cache, expert_WXLA

    expert_WXLA = jnp.zeros((W, X, L, config.num_experts_per_tok), jnp.int32)
    begin = jnp.zeros((W, config.hidden_size), config.dtype), cache, expert_WXLA
    with jax.named_scope("extend"):
        return jax.lax.fori_loop(0, -(-slots.count_W.max() // M), run, begin)


def decode_block(
    params: Params, config: ModelConfig, tokens_WM: Array, cache: Cache, slots: Slots, mesh: jax.sharding.Mesh
) -> tuple[Array, Callable[[Array], Cache], Array]:
    """Run at most `BLOCK` tokens of each slot, which keeps the first ones: how many is known after the run.

    Returns all final hidden states `[W, M, D]`, a function of the numbers of kept tokens, int32 [W], that returns the
    cache with them, and the experts `[W, M, L, A]`. Later keys and values are replaced before they are read. A
    recurrence's state cannot forget a token, so it is advanced again, from where the block began, over those that are
    kept: only one state of a slot is held at a time, and their projections are computed once.
    """
    hidden_WMD, parts, expert_WMLA = _run_block(
        params, config, tokens_WM, cache, slots, _advance_tentatively, mesh=mesh
    )

    def keep(count_W: Array) -> Cache:
        return tuple(part(count_W) if callable(part) else part for part in parts)

    return hidden_WMD, keep, expert_WMLA


def _run_block(
    params: Params,
    config: ModelConfig,
    tokens_WM: Array,
    cache: Cache,
    slots: Slots,
    advance: Callable[[Slots, int, jax.sharding.Mesh], Advance],
    *,
    mesh: jax.sharding.Mesh,
    decoding: bool = True,
) -> tuple[Array, tuple[PyTree, ...], Array]:
    """Run a block of tokens with these recurrences."""
    M = tokens_WM.shape[1]
    position_WM = (slots.prompt_length_W + slots.first)[:, None] + jnp.arange(M)[None]
    attend = _attend_over_cache(_attend_to_block, slots, config, mesh)
    angles, live_WM = rotary_angles(position_WM, config), _new_tokens(slots.count_W, M)
    shared = LayerInputs(angles, live_WM, attend, advance(slots, M, mesh), mesh, decoding)
    return _run_layers(params, config, tokens_WM, shared, cache)


def logits(params: Params, hidden_BD: Array, cap: float = 0.0) -> Array:
    """Compute the float32 logits `[B, V]` of final hidden states; `cap` is `ModelConfig.logit_cap`."""
    tied = "head" not in params
    with jax.named_scope("head"):
        product = project(hidden_BD, params["embedding" if tied else "head"], transposed=tied)
        return transformer.cap_logits(product, cap)


def _run_layers(
    params: Params, config: ModelConfig, tokens_BT: Array, shared: LayerInputs, cache: tuple[PyTree, ...]
) -> tuple[Array, tuple[PyTree, ...], Array]:
    """Return final hidden states `[B, T, D]`, the layers' new caches, and the experts `[B, T, L, A]`."""
    x_BTD = transformer.scale_embeddings(look_up(params["embedding"], tokens_BT, config.dtype), config)
    x_BTD = constrain_tokens(x_BTD, shared.mesh)
    experts, updated = [jnp.zeros((*tokens_BT.shape, 0, config.num_experts_per_tok), jnp.int32)], []
    for number, (kind, layer, before) in enumerate(zip(layers_of(config), params["layers"], cache, strict=True)):
        module = nnx.merge(layer_graph(config, kind), layer)
        x_BTD, after, routing = module(x_BTD, shared, before, number, None)
        x_BTD = constrain_tokens(x_BTD, shared.mesh)
        updated.append(after)
        experts += [routing.expert[:, :, None]] if routing is not None else []
    hidden_BTD = rms_norm(x_BTD, params["norm"]["scale"], config.rms_norm_eps, config.norm_plus_one)
    return transformer.scale_hidden(hidden_BTD, config), tuple(updated), jnp.concatenate(experts, axis=2)


# --- attention to a cache --------------------------------------------------------------------------------------------


def _attend_over_cache(
    local: Callable[..., tuple[Array, LayerCache]], slots: Slots, config: ModelConfig, mesh: jax.sharding.Mesh
) -> Attend:
    """Make the attention of the slots' M new tokens to their prompts, completions so far, and one another.

    `local` is `_attend_to_token` or `_attend_to_block`, for the slots and heads of one device.
    """
    windows = layer_windows(config)
    (rows,), (prompts, by_heads) = spec(sample_axis(mesh, len(slots.count_W))), spec("batch", "heads")
    by_row, by_head = PartitionSpec(rows), PartitionSpec(rows, by_heads)
    placed = jax.tree.map(lambda x: by_row if x.ndim else PartitionSpec(), slots)

    def attend(heads: Heads, cache: LayerCache, layer: Array | int) -> tuple[Array, LayerCache]:
        q_WMNH, k_WMKH, v_WMKU, sinks_N, _ = heads
        of_layer = partial(local, window=windows[int(layer)] if windows else NO_WINDOW, kernel=on_tpu(mesh))
        if mesh.size > 1:
            new = by_row if k_WMKH is None else by_head
            cached: PyTree = LayerCache._make((PartitionSpec(prompts, *new[1:]), new))
            in_specs = by_head, None if k_WMKH is None else new, new, cached, placed, PartitionSpec(by_heads)
            of_layer = jax.shard_map(
                of_layer, mesh=mesh, in_specs=in_specs, out_specs=(by_head, cached), check_vma=False
            )
        by_slot_and_head = jax.tree.map(lambda x: x.swapaxes(1, 2), (q_WMNH, k_WMKH, v_WMKU))
        context_WNMH, cache = of_layer(*by_slot_and_head, cache, slots, sinks_N)
        return context_WNMH.swapaxes(1, 2).astype(q_WMNH.dtype), cache

    return attend


def _new_tokens(count_W: Array, M: int) -> Array:
    """Mark the first tokens of each slot's block, bool [W, M]."""
    return jnp.arange(M)[None] < count_W[:, None]


def _advance_states(slots: Slots, M: int, mesh: jax.sharding.Mesh) -> Advance:
    """Make the recurrences over the slots' M new tokens, from the slots' states; at position 0 from the prompts'.

    The state of a slot without a new token is unchanged bit for bit: unlike a key, a wrong state is never replaced.
    """

    def advance(run: Callable[..., tuple[Array, PyTree]], cache: LayerCache) -> tuple[Array, LayerCache]:
        y_WMD, state = run(_new_tokens(slots.count_W, M).astype(jnp.int32), _states_before(cache, slots, mesh))
        return y_WMD, _place_state(cache, state, mesh)

    return advance


def _advance_tentatively(slots: Slots, M: int, mesh: jax.sharding.Mesh) -> Advance:
    """Make recurrences as `_advance_states`, over tokens of which each slot keeps the first ones.

    The cache that they return is a function of how many tokens each slot keeps, int32 [W].
    """

    def advance(
        run: Callable[..., tuple[Array, PyTree]], cache: LayerCache
    ) -> tuple[Array, Callable[[Array], LayerCache]]:
        before = _states_before(cache, slots, mesh)

        def keep(count_W: Array) -> LayerCache:
            return _place_state(cache, run(_new_tokens(count_W, M).astype(jnp.int32), before)[1], mesh)

        return run(_new_tokens(slots.count_W, M).astype(jnp.int32), before)[0], keep

    return advance


def _place_state(cache: LayerCache, state: PyTree, mesh: jax.sharding.Mesh) -> LayerCache:
    """Put new states of the slots on their devices, and into the cache."""
    rows = sample_axis(mesh, len(jax.tree.leaves(state)[0]))
    return LayerCache(cache.prompt, jax.tree.map(lambda x: constrain(x, mesh, rows, "heads"), state))


def _states_before(cache: LayerCache, slots: Slots, mesh: jax.sharding.Mesh) -> PyTree:
    """Return the states that the slots' new tokens continue; a slot that begins gets its prompt's, in place."""
    if mesh.size == 1:
        return _begin_states(cache, slots)
    rows = sample_axis(mesh, len(slots.count_W))
    (by_row,), by_prompt, by_head = spec(rows), spec("batch", "heads"), spec(rows, "heads")
    cached: PyTree = LayerCache._make((by_prompt, by_head))
    placed = jax.tree.map(lambda x: PartitionSpec(by_row) if x.ndim else PartitionSpec(), slots)
    begin = jax.shard_map(_begin_states, mesh=mesh, in_specs=(cached, placed), out_specs=by_head, check_vma=False)
    return begin(cache, slots)


def _begin_states(cache: LayerCache, slots: Slots) -> PyTree:
    """Return one device's states of its slots, with those of prompts in the slots that begin."""
    prompts = len(jax.tree.leaves(cache.prompt)[0])
    prompt_W, begins_W = _prompt_numbers(slots, prompts), (slots.first == 0) & (slots.count_W > 0)
    order_W = jnp.argsort(~begins_W)

    def begin(number: Array, own: PyTree) -> PyTree:
        slot = order_W[number]
        return jax.tree.map(lambda x_W, x_P: x_W.at[slot].set(x_P[prompt_W[slot]]), own, cache.prompt)

    return jax.lax.fori_loop(0, begins_W.sum(), begin, cache.completion)


def _attend_to_token(
    q_WN1H: Array,
    k_WK1H: Array | None,
    v_WK1H: Array,
    cache: LayerCache,
    slots: Slots,
    sinks_N: Array | None,
    *,
    window: int,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """Return the context of each slot's new token, and the cache with that token's key and value."""
    q_WNH, k_WKH, v_WKH = jax.tree.map(lambda x: x[:, :, 0], (q_WN1H, k_WK1H, v_WK1H))
    q_WNH, k_WKH = jax.lax.optimization_barrier((q_WNH, k_WKH))  # rotated once, not by every reader's fusion
    completion = segments.write(cache.completion, k_WKH, v_WKH, slots.first, kernel=kernel)
    active_W, first_W = slots.count_W > 0, jnp.broadcast_to(slots.first, slots.count_W.shape)
    oldest_W = oldest_in_prompt_W = jnp.zeros_like(first_W)
    if window < NO_WINDOW:
        oldest_W = jnp.maximum(first_W + 1 - window, 0)
        oldest_in_prompt_W = jnp.clip(slots.prompt_length_W + first_W + 1 - window, 0, slots.prompt_length_W)
    of_completion = segments.attend(q_WNH, completion, oldest_W, jnp.where(active_W, first_W + 1, 0), kernel=kernel)
    prompt_W = slots.prompt_W
    if kernel and k_WKH is None:  # the heads of all of a prompt's slots do not fit on chip
        prompt_W = _prompt_numbers(slots, cache.prompt[0].v_XKSH.shape[0])
    of_prompt = _attend_to_prompts(q_WNH, cache.prompt, oldest_in_prompt_W, slots, prompt_W, kernel=kernel)
    context_WNH = _with_sinks(merge(of_prompt, of_completion), sinks_N)
    return context_WNH.astype(q_WN1H.dtype)[:, :, None], LayerCache(cache.prompt, completion)


def _with_sinks(attended: tuple[Array, Array], sinks_N: Array | None) -> Array:
    """Return the context of a `decode_attention` result, with the heads' sinks, if any, in its softmax."""
    context_WNH, logsumexp_WN = attended
    if sinks_N is None:
        return context_WNH
    return context_WNH * jax.nn.sigmoid(logsumexp_WN - sinks_N[None].astype(jnp.float32))[..., None]


def _prompt_numbers(slots: Slots, prompts: int) -> Array:
    """Return the prompt of each slot; without `slots.prompt_W` a prompt's slots are adjacent."""
    W = len(slots.count_W)
    return jnp.arange(W) // (W // prompts) if slots.prompt_W is None else slots.prompt_W


def _attend_to_prompts(
    q_WNH: Array, prompt: Segments, oldest_W: Array, slots: Slots, prompt_W: Array | None, *, kernel: bool
) -> tuple[Array, Array]:
    """Attend from the active slots to their prompts; return the result of `decode_attention`.

    Without `prompt_W` a prompt's slots are adjacent and see the same positions of it. Their queries become the heads of
    one row, so that the prompt is read once for all of them, or once for as many as the kernel can hold: of X rows.
    """
    end_W = jnp.where(slots.count_W > 0, slots.prompt_length_W, 0)
    if prompt_W is not None:
        return segments.attend(q_WNH, prompt, oldest_W, end_W, prompt_W, kernel=kernel)
    (W, N, H), (P, K) = q_WNH.shape, prompt[0].v_XKSH.shape[:2]
    X = P * (_count_parts(W // P, N * H) if kernel else 1)
    G, R = W // X, N // K
    q_XNH = q_WNH.reshape(X, G, K, R, H).swapaxes(1, 2).reshape(X, K * G * R, H)
    bounds = oldest_W.reshape(X, G).max(axis=1), end_W.reshape(X, G).max(axis=1)  # one for all that are active
    prompt_X = None if X == P else jnp.arange(X) // (X // P)
    context_XNH, logsumexp_XN = segments.attend(q_XNH, prompt, *bounds, prompt_X, kernel=kernel)
    context_WNH = context_XNH.reshape(X, K, G, R, H).swapaxes(1, 2).reshape(W, N, H)
    return context_WNH, logsumexp_XN.reshape(X, K, G, R).swapaxes(1, 2).reshape(W, N)


def _count_parts(slots: int, queries: int) -> int:
    """Count the fewest equal parts of a prompt's slots such that the kernel can hold a part's queries, else the slots.

    `queries` counts the numbers in one slot's queries.
    """
    divisors = [parts for parts in range(1, slots + 1) if slots % parts == 0]
    return next((parts for parts in divisors if slots // parts * queries <= MOST_QUERIES), slots)


def _attend_to_block(
    q_WNMH: Array,
    k_WKMH: Array | None,
    v_WKMH: Array,
    cache: LayerCache,
    slots: Slots,
    sinks_N: Array | None,
    *,
    window: int,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """Return the context of each slot's new tokens, and the cache with their keys and values.

    A token attends to its prompt, to the slot's cached completion, and to the block up to itself; the three parts make
    one softmax. With a window the tokens attend one after the other: each of them sees other positions. They also do to
    latents in the kernel, which would not hold all their heads at once.
    """
    W, N, M, H = q_WNMH.shape
    if window < NO_WINDOW or (kernel and k_WKMH is None):
        slots = slots._replace(prompt_W=_prompt_numbers(slots, cache.prompt[0].v_XKSH.shape[0]))
        return _attend_one_by_one(q_WNMH, k_WKMH, v_WKMH, cache, slots, sinks_N, window=window, kernel=kernel)
    first_W, count_W = slots.first, slots.count_W
    completion = segments.write_block(cache.completion, k_WKMH, v_WKMH, first_W, count_W, kernel=kernel)
    zeros_W = jnp.zeros_like(count_W)
    # The tokens of a query head become heads of their own: they see the same positions of prompt and cache.
    q_WLH = q_WNMH.reshape(W, N * M, H)
    before_W = jnp.where(count_W > 0, first_W, 0)  # the tokens of the completion before the block
    of_completion = segments.attend(q_WLH, completion, zeros_W, before_W, kernel=kernel)
    of_prompt = _attend_to_prompts(q_WLH, cache.prompt, zeros_W, slots, slots.prompt_W, kernel=kernel)
    keys_WKMH = v_WKMH if k_WKMH is None else k_WKMH
    merged = merge(merge(of_prompt, of_completion), _attend_within_block(q_WNMH, keys_WKMH, v_WKMH, count_W))
    context_WLH = _with_sinks(merged, None if sinks_N is None else jnp.repeat(sinks_N, M))
    return context_WLH.reshape(W, N, M, H), LayerCache(cache.prompt, completion)


def _attend_within_block(q_WNMH: Array, k_WKMH: Array, v_WKMH: Array, count_W: Array) -> tuple[Array, Array]:
    """Attend causally within the block (S = M keys); return the result of `decode_attention` for N·M query heads."""
    (W, N, M, H), K = q_WNMH.shape, k_WKMH.shape[1]
    q_WKRMH = q_WNMH.reshape(W, K, N // K, M, H)
    score_WKRMS = jnp.einsum("wkrmh,wksh->wkrms", q_WKRMH, k_WKMH, preferred_element_type=jnp.float32) * H**-0.5
    order_M = jnp.arange(M)
    seen_WMS = (order_M[None, None] <= order_M[None, :, None]) & (order_M[None, None] < count_W[:, None, None])
    score_WKRMS = jnp.where(seen_WMS[:, None, None], score_WKRMS, MASKED)
    logsumexp_WKRM = jax.nn.logsumexp(score_WKRMS, axis=-1)
    weight_WKRMS = jnp.exp(score_WKRMS - logsumexp_WKRM[..., None]).astype(v_WKMH.dtype)
    context_WKRMH = jnp.einsum("wkrms,wksh->wkrmh", weight_WKRMS, v_WKMH, preferred_element_type=jnp.float32)
    return context_WKRMH.reshape(W, N * M, H), logsumexp_WKRM.reshape(W, N * M)


def _attend_one_by_one(
    q_WNMH: Array,
    k_WKMH: Array | None,
    v_WKMH: Array,
    cache: LayerCache,
    slots: Slots,
    sinks_N: Array | None,
    *,
    window: int,
    kernel: bool,
) -> tuple[Array, LayerCache]:
    """Run `_attend_to_block` in a layer with a window: each token as in a decoding pass of its own."""

    def step(m: Array, carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
        context_WNMH, cache = carry
        now = slots._replace(
            first=slots.first + jnp.minimum(m, slots.count_W), count_W=jnp.clip(slots.count_W - m, 0, 1)
        )
        q, k, v = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, m, 1, axis=2), (q_WNMH, k_WKMH, v_WKMH))
        context_WN1H, cache = _attend_to_token(q, k, v, cache, now, sinks_N, window=window, kernel=kernel)
        return jax.lax.dynamic_update_slice_in_dim(context_WNMH, context_WN1H, m, axis=2), cache

    return jax.lax.fori_loop(0, slots.count_W.max(), step, (jnp.zeros_like(q_WNMH), cache))
