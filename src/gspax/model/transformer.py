"""Qwen3 / Qwen3-MoE as pure functions of parameters: `init`, `apply`, `logits`, `prefill`, `decode`.

A weight of a layer may be a `LowRank` instead of an array; it becomes one where the layer is run.

Inside are Flax NNX modules; outside, parameters are a nested dict of arrays. Layers of one kind that follow
each other are stacked and run by `lax.scan` (`config.layer_runs`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from gspax.config import ModelConfig, Remat, layer_runs, layer_windows
from gspax.model.attention import Attend, Attention, Cache, keeping_prompt, over_cache, within_segments
from gspax.model.layers import DenseMlp, RMSNorm, rotary_angles, weight
from gspax.model.low_rank import dense
from gspax.model.moe import Routing, SparseMlp
from gspax.sharding import constrain, constrain_tokens, sample_axis
from gspax.types import Array, Params

LAYER_INPUT = "layer_input"  # the residual stream before a layer, as `remat="offload"` knows it


class Shared(NamedTuple):
    """What all layers of one call are given."""

    angles: tuple[Array, Array]
    valid_BT: Array  # not padding
    attend: Attend
    mesh: jax.sharding.Mesh | None


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, sparse: bool, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMlp(config, rngs=rngs) if sparse else DenseMlp(config, rngs=rngs)

    def __call__(self, x_BTD: Array, shared: Shared, cache: Any, layer: Array, forced_BTA: Array | None):
        """Residual stream, cache and, of a sparse layer, its `Routing` (else None)."""
        attended, cache = self.attention(self.attention_norm(x_BTD), shared.angles, shared.attend, cache, layer)
        x_BTD += attended
        normed_BTD = self.mlp_norm(x_BTD)
        if isinstance(self.mlp, SparseMlp):
            y_BTD, routing = self.mlp(normed_BTD, shared.valid_BT, forced_BTA, shared.mesh)
            return x_BTD + y_BTD, cache, routing
        return x_BTD + self.mlp(normed_BTD), cache, None


class Transformer(nnx.Module):
    """Embedding, runs of stacked layers, final norm, head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        V, D, scale = config.vocab_size, config.hidden_size, config.initializer_range
        self.config = config
        self.embedding = weight(rngs, scale, vocab=V, embed=D)
        self.runs = nnx.List([_stack(config, sparse, count, rngs) for sparse, count in layer_runs(config)])
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else weight(rngs, scale, embed=D, vocab=V)

    def __call__(
        self,
        tokens_BT: Array,
        position_BT: Array,
        valid_BT: Array,
        attend: Attend,
        *,
        cache: Any = None,
        forced_LBTA: Array | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> tuple[Array, Any, Routing]:
        """Final hidden states `[B, T, D]`, the cache, and the routing of the sparse layers, stacked."""
        config = self.config
        angles = rotary_angles(position_BT, config)
        shared = Shared(angles, valid_BT, attend, mesh)
        x_BTD = constrain_tokens(self.embedding[tokens_BT].astype(config.dtype), mesh)
        routings, first, first_sparse = [], 0, 0
        for (sparse, count), run in zip(layer_runs(config), self.runs, strict=True):
            graph, layers = nnx.split(run)

            def body(carry, inputs, graph=graph):
                layer_params, layer, forced_BTA = inputs
                x_BTD, cache = carry
                x_BTD = checkpoint_name(x_BTD, LAYER_INPUT)
                module = nnx.merge(graph, dense(layer_params))
                x_BTD, cache, routing = module(x_BTD, shared, cache, layer, forced_BTA)
                return (constrain_tokens(x_BTD, mesh), cache), routing

            body = _rematerialised(body, config)
            forced = None
            if sparse and forced_LBTA is not None:
                forced = forced_LBTA[first_sparse : first_sparse + count]
            (x_BTD, cache), routing = jax.lax.scan(body, (x_BTD, cache), (layers, first + jnp.arange(count), forced))
            first, first_sparse = first + count, first_sparse + count * sparse
            routings += [routing] if sparse else []
        return self.norm(x_BTD), cache, _all_layers(routings, tokens_BT.shape, config)


def _rematerialised(body: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    """The body of the layer scan, keeping for its backward pass what `config.remat` says."""
    if config.remat == "none":
        return body
    known = jax.checkpoint_policies
    policies = {
        "products": known.dots_with_no_batch_dims_saveable,
        "full": known.nothing_saveable,
        "offload": known.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    if config.remat not in policies:
        raise ValueError(f"remat: wanted one of {', '.join(get_args(Remat))}, got {config.remat!r}")
    return jax.checkpoint(body, prevent_cse=False, policy=policies[config.remat])


def _all_layers(routings: list[Routing], shape: tuple[int, ...], config: ModelConfig) -> Routing:
    """The routing of all runs of sparse layers, one after another; without any, arrays of no layers."""
    none = Routing(
        jnp.zeros((0, *shape, config.num_experts_per_tok), jnp.int32), jnp.zeros((0, *shape, config.num_experts))
    )
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), none, *routings)


def _stack(config: ModelConfig, sparse: bool, count: int, rngs: nnx.Rngs) -> DecoderLayer:
    """`count` layers whose parameters have a leading layer axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def make(rngs):
        return DecoderLayer(config, sparse, rngs=rngs)

    return make(rngs)


@lru_cache
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    """(graph definition, abstract parameters); shapes only, nothing is computed."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def _module(params: Params, config: ModelConfig) -> Transformer:
    return nnx.merge(_abstract(config)[0], params)


def init(config: ModelConfig, key: Array) -> Params:
    """Random parameters in `config.param_dtype`: normal with `initializer_range`, norms one."""
    params = nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(key)), nnx.Param))
    return jax.tree.map(lambda leaf: leaf.astype(config.param_dtype), params)


def abstract_params(config: ModelConfig) -> Params:
    """`ShapeDtypeStruct`s of `init`'s answer."""
    params = nnx.to_pure_dict(_abstract(config)[1])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.param_dtype), params)


def logical_axes(config: ModelConfig) -> Params:
    """For each parameter the names of its axes, as `gspax.sharding.RULES` knows them."""

    def axes(variable):
        names = variable.get_metadata()["axes"]
        return ("layer",) * (len(variable.get_value().shape) - len(names)) + names

    state = _abstract(config)[1]
    return nnx.to_pure_dict(jax.tree.map(axes, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def positions(segment_BT: Array) -> Array:
    """Position of each token within its segment, from 0, int32."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    before_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BT = jnp.where(segment_BT != before_BT, index_T[None], 0)
    return index_T[None] - jax.lax.cummax(start_BT, axis=1)


def apply(
    params: Params,
    config: ModelConfig,
    tokens_BT: Array,
    segment_BT: Array,
    *,
    forced_LBTA: Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Routing]:
    """Hidden states after the final norm, and what the routers did.

    Args:
      tokens_BT: int32.
      segment_BT: int32; tokens attend causally within equal numbers; 0 is padding, which is routed nowhere.
      forced_LBTA: int32 expert ids to use instead of the router's choice, for each sparse layer; the gates are
        recomputed from the live router over those ids.
      mesh: the device mesh that the arrays are sharded over, if any.

    Returns:
      hidden_BTD in the compute dtype (for `logits`), and the `Routing` of the sparse layers: expert ids int32
      `[L, B, T, A]` (padding has the id `num_experts`) and router logits float32 `[L, B, T, E]`. What of it the caller
      does not use is not computed when compiled.
    """
    model = _module(params, config)
    hidden_BTD, _, routing = model(
        tokens_BT,
        positions(segment_BT),
        segment_BT > 0,
        within_segments(segment_BT, layer_windows(config), mesh),
        forced_LBTA=forced_LBTA,
        mesh=mesh,
    )
    return hidden_BTD, routing


def apply_layer(params: Params, config: ModelConfig, run: int, layer: Array, x_BTD: Array, segment_BT: Array) -> Array:
    """One step of `apply`, for looking at layers one by one: the residual stream behind a layer, given that before it.

    The layer is number `layer` of the run number `run` of `config.layer_runs`, both from 0.
    """
    graph, layers = nnx.split(_module(params, config).runs[run])
    module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[layer], layers))
    number = sum(count for _, count in layer_runs(config)[:run]) + layer
    attend = within_segments(segment_BT, layer_windows(config))
    shared = Shared(rotary_angles(positions(segment_BT), config), segment_BT > 0, attend, None)
    return module(x_BTD, shared, None, number, None)[0]


def logits(params: Params, hidden: Array) -> Array:
    """Float32 logits `[..., V]` of hidden states `[..., D]`."""
    return jnp.matmul(hidden, head(params).astype(hidden.dtype), preferred_element_type=jnp.float32)


def head(params: Params) -> Array:
    """head_DV, what hidden states are multiplied with: with tied embeddings the embedding."""
    return params["head"] if "head" in params else params["embedding"].T


def prefill(
    params: Params,
    config: ModelConfig,
    tokens_PS: Array,
    length_P: Array,
    *,
    group: int,
    max_tokens: int,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Cache]:
    """Run right-padded prompts once; the hidden state of each last token `[P, D]`, and a cache for `group` samples.

    The cache has room for `max_tokens` positions of each of the P·group completions.
    """
    L, K, H = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    P, S = tokens_PS.shape
    index_PS = jnp.broadcast_to(jnp.arange(S)[None], (P, S))
    segment_PS = (index_PS < length_P[:, None]).astype(jnp.int32)
    empty = constrain(jnp.zeros((L, P, K, S, H), config.dtype), mesh, "layer", "batch", "heads")
    hidden_PSD, (k, v), _ = _module(params, config)(
        tokens_PS,
        index_PS,
        segment_PS > 0,
        keeping_prompt(within_segments(segment_PS, layer_windows(config), mesh)),
        cache=(empty, empty),
        mesh=mesh,
    )
    k, v = (constrain(x, mesh, "layer", "batch", "heads") for x in (k, v))  # once, and not in every decoding step
    rows = sample_axis(mesh, P * group)
    room = constrain(jnp.zeros((L, P * group, K, max_tokens, H), config.dtype), mesh, "layer", rows, "heads")
    last_PD = jnp.take_along_axis(hidden_PSD, length_P[:, None, None] - 1, axis=1)[:, 0]
    return last_PD, Cache(prompt_k_LPKSH=k, prompt_v_LPKSH=v, k_LBKCH=room, v_LBKCH=room)


def decode(
    params: Params,
    config: ModelConfig,
    token_B: Array,
    cache: Cache,
    *,
    step: Array,
    prompt_length_P: Array,
    live_B: Array,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Cache]:
    """Feed completion token number `step` of every sample; its hidden state `[B, D]` and the cache with it added.

    Rows where `live_B` is False are computed like padding: they are routed to no expert and their answer is garbage.
    """
    group = token_B.shape[0] // prompt_length_P.shape[0]
    position_B1 = (jnp.repeat(prompt_length_P, group) + step)[:, None]
    hidden_B1D, cache, _ = _module(params, config)(
        token_B[:, None],
        position_B1,
        live_B[:, None],
        over_cache(prompt_length_P, step, layer_windows(config)),
        cache=cache,
        mesh=mesh,
    )
    return hidden_B1D[:, 0], cache
