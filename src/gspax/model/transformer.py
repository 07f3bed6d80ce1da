"""The model as pure functions of parameters: `init`, `apply`, `logits`. `model.decoding` has the sampler's.

Flax NNX modules inside; outside, parameters are a nested dict of arrays. Consecutive layers of one kind, or of a
pattern of kinds that repeats, are stacked and run by one `lax.scan` (`config.layer_groups`). A layer's weight may be a
`LowRank`; it is made dense where the layer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from gspax.config import (
    Experts,
    Layer,
    LayerGroup,
    ModelConfig,
    NoMixer,
    NoMlp,
    layer_groups,
    layer_windows,
)
from gspax.config.functions import import_class
from gspax.model.kernels.trees import make_tree, positions
from gspax.model.layers import (
    DenseMlp,
    LayerInputs,
    RMSNorm,
    advance_rows,
    attend_within_segments,
    expand_dims_like,
    init_weight,
    rotary_angles,
)
from gspax.model.low_rank import dense
from gspax.model.moe import NormedExperts, Routing, SparseMlp
from gspax.parallel.sharding import constrain, constrain_tokens
from gspax.types import Array, Params, PyTree

LayerOutput = tuple[Array, Routing | None]  # the residual stream, and a sparse layer's routing
FLOAT32 = "correction_bias", "decay_rate", "decay_bias"  # float32 parameters, whatever the dtype of the others
LAYER_INPUT = "layer_input"  # checkpoint name of the residual stream before a layer, for `remat="offload"`


class DecoderLayer(nnx.Module):
    """Mixer and feed-forward network, or one of them alone, each added to the residual stream.

    Their inputs, outputs, or both are normalized.
    """

    def __init__(self, kind: Layer, config: ModelConfig, *, rngs: nnx.Rngs):
        norm, around = partial(_norm, config), kind.norms == "around"
        mixes, transforms = not isinstance(kind.mixer, NoMixer), not isinstance(kind.mlp, NoMlp)
        self.attention_norm = norm() if mixes else None
        self.part = kind.mixer.part
        setattr(self, self.part, import_class(kind.mixer.module)(kind.mixer, config, rngs=rngs) if mixes else None)
        self.attention_out_norm = norm() if mixes and around else None
        normed = isinstance(kind.mlp, Experts) and kind.mlp.normed
        self.mlp_norm = norm() if transforms and not normed else None
        self.mlp: SparseMlp | DenseMlp | None  # assigned once: nnx keeps a first None apart from a module
        if isinstance(kind.mlp, Experts):
            self.mlp = (NormedExperts if kind.mlp.normed else SparseMlp)(kind.mlp, config, rngs=rngs)
        elif not isinstance(kind.mlp, NoMlp):
            self.mlp = DenseMlp(kind.mlp, config, rngs=rngs)
        else:
            self.mlp = None
        self.mlp_out_norm = norm() if transforms and around else None
        self.norm_after = kind.norms == "after"
        self.residual = config.multipliers.residual
        self.layer_scale = nnx.Param(jnp.ones(1), axes=("norm",)) if config.layer_scale else None

    def __call__(
        self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int, forced_BTA: Array | None
    ) -> tuple[Array, PyTree, Routing | None]:
        """Return the residual stream, the cache, and a sparse layer's `Routing` (else None)."""
        routing = None
        if (mixer := getattr(self, self.part)) is not None:
            with jax.named_scope(self.part):
                normed_BTD = self._normalize_input(x_BTD, "attention")
                mixed_BTD, cache = mixer(normed_BTD, shared, cache, layer)
                mixed_BTD = self._normalize_output(mixed_BTD, "attention")
            x_BTD += mixed_BTD
        if self.mlp is not None:
            normed_BTD = self._normalize_input(x_BTD, "mlp")
            if isinstance(self.mlp, SparseMlp):
                y_BTD, routing = self.mlp(normed_BTD, shared, forced_BTA)
            else:
                with jax.named_scope("mlp"):
                    y_BTD = self.mlp(normed_BTD, shared.mesh)
            x_BTD += self._normalize_output(y_BTD, "mlp")
        if self.layer_scale is not None:
            x_BTD *= expand_dims_like(jax.lax.stop_gradient(self.layer_scale[...]).astype(x_BTD.dtype), x_BTD)
        return x_BTD, cache, routing

    def _normalize_input(self, x_BTD: Array, part: Literal["attention", "mlp"]) -> Array:
        """Return what attention or MLP reads of the residual stream."""
        norm = getattr(self, f"{part}_norm")
        return x_BTD if self.norm_after or norm is None else norm(x_BTD)

    def _normalize_output(self, y_BTD: Array, part: Literal["attention", "mlp"]) -> Array:
        """Return the term that attention or MLP adds to the residual stream."""
        norm = getattr(self, f"{part}_norm" if self.norm_after else f"{part}_out_norm")
        y_BTD = y_BTD if norm is None else norm(y_BTD)
        return y_BTD if self.residual == 1 else y_BTD * self.residual


def _norm(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_plus_one)


class Transformer(nnx.Module):
    """Embedding, runs of stacked layers, final norm, head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        V, D, scale = config.vocab_size, config.hidden_size, config.initializer_range
        self.config = config
        self.embedding = init_weight(rngs, scale, vocab=V, embed=D)
        self.runs = nnx.List([_init_group(config, group, rngs) for group in layer_groups(config)])
        self.norm = _norm(config)
        self.head = None if config.tie_word_embeddings else init_weight(rngs, scale, embed=D, vocab=V)

    def __call__(
        self,
        tokens_BT: Array,
        segment_BT: Array,
        *,
        mesh: jax.sharding.Mesh,
        prefix_BT: Array | None,
        forced_LBTA: Array | None,
    ) -> tuple[Array, Routing]:
        """Return the hidden states after the final norm and the routing; see `apply`."""
        config, table_VD = self.config, _table(self.embedding.get_value(), mesh)
        shared = layer_inputs(config, segment_BT, mesh, prefix_BT)
        x_BTD = constrain_tokens(scale_embeddings(table_VD[tokens_BT].astype(config.dtype), config), mesh)
        routings, first, first_sparse = [], 0, 0
        for group, run in zip(layer_groups(config), self.runs, strict=True):
            sparse = sum(kind.sparse for kind in group.pattern) * group.repeats
            forced = forced_LBTA[first_sparse : first_sparse + sparse] if sparse and forced_LBTA is not None else None
            x_BTD, routing = _run_group(run, group, config, shared, x_BTD, first=first, forced_LBTA=forced)
            first, first_sparse = first + len(group.pattern) * group.repeats, first_sparse + sparse
            if routing is not None:
                routings.append(routing)
        hidden_BTD = scale_hidden(self.norm(x_BTD), config)
        return hidden_BTD, _concatenate_routings(routings, tokens_BT.shape, config)


def scale_embeddings(x_BTD: Array, config: ModelConfig) -> Array:
    """Scale the tokens' embeddings for the first layer, if the model does."""
    scale = config.multipliers.embedding * (config.hidden_size**0.5 if config.scale_embedding else 1)
    return x_BTD if scale == 1 else x_BTD * jnp.asarray(scale, x_BTD.dtype)


def scale_hidden(hidden_BTD: Array, config: ModelConfig) -> Array:
    """Scale the final hidden states instead of the logits, if the model scales these."""
    return hidden_BTD if config.multipliers.logits == 1 else hidden_BTD / config.multipliers.logits


def layer_inputs(
    config: ModelConfig, segment_BT: Array, mesh: jax.sharding.Mesh, prefix_BT: Array | None = None
) -> LayerInputs:
    """Return the layers' inputs for whole rows of segments."""
    tree = None if prefix_BT is None else make_tree(segment_BT, prefix_BT)
    attend = attend_within_segments(segment_BT, mesh, layer_windows(config), tree)
    angles = rotary_angles(positions(segment_BT, tree), config)
    advance = advance_rows(segment_BT) if prefix_BT is None else advance_rows(segment_BT, prefix_BT)
    return LayerInputs(angles, segment_BT > 0, attend, advance, mesh)


def _stacks(run: DecoderLayer | nnx.List[DecoderLayer]) -> list[DecoderLayer]:
    """Return the stacks of a group, one for each layer of its pattern."""
    return [run] if isinstance(run, DecoderLayer) else list(run)


def _run_group(
    run: DecoderLayer | nnx.List[DecoderLayer],
    group: LayerGroup,
    config: ModelConfig,
    shared: LayerInputs,
    x_BTD: Array,
    *,
    first: int,
    forced_LBTA: Array | None,
) -> LayerOutput:
    """Run a group, whose first layer is number `first`; return the residual stream and its sparse layers' routing.

    `forced_LBTA` has these sparse layers alone.
    """
    graphs, layers = zip(*map(nnx.split, _stacks(run)), strict=True)
    steps = [_rematerialize(_layer_step(graph, shared), config) for graph in graphs]
    if len(steps) == 1:
        inputs = layers[0], first + jnp.arange(group.repeats), forced_LBTA
        return cast(LayerOutput, jax.lax.scan(steps[0], x_BTD, inputs))
    number_R = first + len(steps) * jnp.arange(group.repeats)
    sparse = sum(kind.sparse for kind in group.pattern)
    forced = None if forced_LBTA is None else forced_LBTA.reshape(group.repeats, sparse, *forced_LBTA.shape[1:])

    def repeat(x_BTD: Array, inputs: PyTree) -> LayerOutput:
        """Run the layers of the pattern one after the other."""
        layers, number, forced_SBTA = inputs
        routings: list[Routing] = []
        for place, (step, layer) in enumerate(zip(steps, layers, strict=True)):
            forced_BTA = forced_SBTA[len(routings)] if forced_SBTA is not None and group.pattern[place].sparse else None
            x_BTD, routing = step(x_BTD, (layer, number + place, forced_BTA))
            routings += [routing] if routing is not None else []
        return x_BTD, jax.tree.map(lambda *each: jnp.stack(each), *routings) if routings else None

    x_BTD, routing = jax.lax.scan(repeat, x_BTD, (layers, number_R, forced))
    return x_BTD, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routing)


def _layer_step(graph: nnx.GraphDef[DecoderLayer], shared: LayerInputs) -> Callable[[Array, PyTree], LayerOutput]:
    """Return the body of a scan over the layers of one stack."""

    def step(x_BTD: Array, inputs: PyTree) -> LayerOutput:
        layer_params, layer, forced_BTA = inputs
        x_BTD = checkpoint_name(x_BTD, LAYER_INPUT)
        module = nnx.merge(graph, dense(layer_params))
        x_BTD, _, routing = module(x_BTD, shared, None, layer, forced_BTA)
        return constrain_tokens(x_BTD, shared.mesh), routing

    return step


def _table(table_VD: Array, mesh: jax.sharding.Mesh) -> Array:
    """Return the embeddings to look up tokens in.

    Within a `shard_map` over replicas XLA's partitioner aborts at a look-up in a table that is sharded over the
    vocabulary and over the model dimension (jaxlib 0.10.2), so the model dimension is gathered first.
    """
    if not mesh.manual_axes or mesh.shape["tensor"] == 1:
        return table_VD
    return constrain(table_VD, mesh, "vocab", "head")


def _rematerialize(body: Callable[..., LayerOutput], config: ModelConfig) -> Callable[..., LayerOutput]:
    """Wrap the body of the layer scan so that it saves for its backward pass what `config.remat` selects."""
    if config.remat == "none":
        return body
    saveable = jax.checkpoint_policies
    policies = {
        "products": saveable.dots_with_no_batch_dims_saveable,
        "full": saveable.nothing_saveable,
        "offload": saveable.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(body, prevent_cse=False, policy=policies[config.remat])


def _concatenate_routings(routings: list[Routing], shape: tuple[int, ...], config: ModelConfig) -> Routing:
    """Join the routing of all runs of sparse layers, in order; without any, return arrays of zero layers."""
    none = Routing(
        jnp.zeros((0, *shape, config.num_experts_per_tok), jnp.int32),
        jnp.zeros((0, *shape, config.num_experts)),
        jnp.zeros(0, jnp.int32),
    )
    return jax.tree.map(lambda *runs: jnp.concatenate(runs), none, *routings)


def _init_group(config: ModelConfig, group: LayerGroup, rngs: nnx.Rngs) -> DecoderLayer | nnx.List[DecoderLayer]:
    """Make the stacks of a group: one, or a list of them for a pattern of several layers."""
    stacks = [_init_stacked(config, kind, group.repeats, rngs) for kind in group.pattern]
    return stacks[0] if len(stacks) == 1 else nnx.List(stacks)


def _init_stacked(config: ModelConfig, kind: Layer, count: int, rngs: nnx.Rngs) -> DecoderLayer:
    """Make `count` layers whose parameters have a leading layer axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> DecoderLayer:
        return DecoderLayer(kind, config, rngs=rngs)

    return make(rngs)


@lru_cache
def layer_graph(config: ModelConfig, kind: Layer) -> nnx.GraphDef[DecoderLayer]:
    """Return the graph definition of one `DecoderLayer`, to merge with its parameters."""
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(kind, config, rngs=nnx.Rngs(0))))[0]


@lru_cache
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], PyTree]:
    """Return (graph definition, abstract parameters); nothing is computed."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def _module(params: Params, config: ModelConfig) -> Transformer:
    return nnx.merge(_abstract(config)[0], params)


def init(config: ModelConfig, key: Array) -> Params:
    """Make random parameters in `config.param_dtype`: normal with `initializer_range`, norms one, biases zero."""
    params = nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(key)), nnx.Param))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.astype(_dtype(path, config.param_dtype)), params)


def abstract_params(config: ModelConfig, dtype: str = "") -> Params:
    """Return the `ShapeDtypeStruct`s of the result of `init`, with `dtype` (default: `config.param_dtype`)."""
    params = nnx.to_pure_dict(_abstract(config)[1])
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, _dtype(path, dtype or config.param_dtype)), params
    )


def _dtype(path: tuple[jax.tree_util.DictKey, ...], dtype: str) -> str:
    """Return the dtype of a parameter: float32 for the names in `FLOAT32`, `dtype` for all others."""
    return "float32" if path[-1].key in FLOAT32 else dtype


def logical_axes(config: ModelConfig) -> Params:
    """Return the logical axes of each parameter (`gspax.parallel.sharding.RULES`)."""

    def axes(variable: nnx.Variable[Array]) -> tuple[str, ...]:
        names = variable.get_metadata()["axes"]
        return ("layer",) * (len(variable.get_value().shape) - len(names)) + names

    state = _abstract(config)[1]
    return nnx.to_pure_dict(jax.tree.map(axes, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def apply(
    params: Params,
    config: ModelConfig,
    tokens_BT: Array,
    segment_BT: Array,
    *,
    mesh: jax.sharding.Mesh,
    prefix_BT: Array | None = None,
    forced_LBTA: Array | None = None,
) -> tuple[Array, Routing]:
    """Compute the hidden states after the final norm, and the routing.

    Args:
      tokens_BT: int32.
      mesh: the device mesh that the arrays are sharded over.
      segment_BT: int32; tokens attend causally within equal numbers; 0 is padding, which is not routed.
      prefix_BT: int32, the segment of the row that the token's own continues: the token attends to all of it, and its
        position counts on from there; 0: none (`kernels.trees`). Not with sliding windows. That segment continues none
        itself unless all layers have `Mixer.deep_prefixes`.
      forced_LBTA: int32 expert ids that replace the router's choice in each sparse layer; the gates are recomputed
        from the current router over those ids.

    Returns:
      hidden_BTD in the compute dtype (for `logits`), and the `Routing` of the sparse layers: expert ids int32
      `[L, B, T, A]` (padding has the id `num_experts`) and router logits float32 `[L, B, T, E]`. Under `jit`, results
      that the caller does not use are not computed.
    """
    model = _module(params, config)
    return model(tokens_BT, segment_BT, mesh=mesh, prefix_BT=prefix_BT, forced_LBTA=forced_LBTA)


def apply_layer(
    params: Params,
    config: ModelConfig,
    stack: tuple[int, ...],
    index: Array,
    x_BTD: Array,
    segment_BT: Array,
    *,
    number: Array,
    mesh: jax.sharding.Mesh,
) -> Array:
    """Compute the residual stream after one layer from the one before: a step of `apply`, to compare single layers.

    The layer is number `number` of the model, from 0; its `config.LayerPlace` is (`stack`, `index`).
    """
    graph, layers = nnx.split(_stacks(_module(params, config).runs[stack[0]])[sum(stack[1:])])
    module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], layers))
    return module(x_BTD, layer_inputs(config, segment_BT, mesh), None, number, None)[0]


def logits(params: Params, hidden: Array, cap: float = 0.0) -> Array:
    """Compute the float32 logits `[..., V]` of hidden states `[..., D]`; `cap` is `ModelConfig.logit_cap`."""
    with jax.named_scope("head"):
        product = jnp.matmul(hidden, head(params).astype(hidden.dtype), preferred_element_type=jnp.float32)
        return cap_logits(product, cap)


def cap_logits(logits: Array, cap: float) -> Array:
    """Bound logits by cap · tanh(logits / cap); 0: leave them as they are."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def head(params: Params) -> Array:
    """Return head_DV, the output projection; with tied embeddings, the transposed embedding."""
    return params["head"] if "head" in params else params["embedding"].T


def head_params(params: Params) -> Params:
    """Return the parameters that `head` reads, in a tree of their own."""
    name = "head" if "head" in params else "embedding"
    return {name: params[name]}
