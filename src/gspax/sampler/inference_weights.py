"""Inference weights: the parameters in the form that the sampler reads, made once per rollout.

Adapters are merged into their weights; arrays are in the compute dtype, except for those that the model reads in
float32; and every layer has separate arrays (`model.decoding` says why). With `weights_dtype` "int8" matrices are
quantized (`model.kernels.quantization`), the embedding only if it is also the head: a token reads one row of it.
"""

from __future__ import annotations

from functools import lru_cache, partial, reduce
from operator import getitem, itemgetter

import jax

from gspax.config import ModelConfig, SamplerDtype, layer_places
from gspax.model import transformer
from gspax.model.kernels.quantization import quantize
from gspax.model.kernels.weights import Weight, array_axes, is_compound
from gspax.model.low_rank import dense
from gspax.parallel.sharding import INFERENCE_RULES, Rules, named_sharding
from gspax.types import Array, Params, PyTree

# Layout of experts on their way from the learner's mesh to one where `tensor` splits them: it splits the model
# dimension, and then their width instead. In one step the compiler would gather all experts on every device.
HALFWAY_RULES = INFERENCE_RULES | {"expert_embed": "tensor", "mlp": None}

FULL = {"norm", "router", "rate", "tap"}  # axes of parameters that are read in float32 for every compute dtype


def make_inference_weights(
    params: Params, config: ModelConfig, mesh: jax.sharding.Mesh, weights_dtype: SamplerDtype = "auto"
) -> Params:
    """Make the inference weights: `embedding`, `layers` (a tuple), `norm`, and `head` unless embeddings are tied.

    They are sharded by `inference_shardings`.
    """
    return copier(config, mesh, weights_dtype)(params)


@lru_cache
def copier(config: ModelConfig, mesh: jax.sharding.Mesh, weights_dtype: SamplerDtype = "auto") -> jax.stages.Wrapped:
    """Return the jitted `make_inference_weights` of a model and a mesh."""
    sizes = mesh.shape
    has_halfway = sizes["data"] == sizes["fsdp"] == 1 < sizes["tensor"] and config.hidden_size % sizes["tensor"] == 0
    halfway = inference_shardings(config, mesh, weights_dtype, HALFWAY_RULES if has_halfway else INFERENCE_RULES)

    def copy(params: Params) -> Params:
        return jax.lax.with_sharding_constraint(convert(params, config, weights_dtype), halfway)

    return jax.jit(copy, out_shardings=inference_shardings(config, mesh, weights_dtype))


def convert(params: Params, config: ModelConfig, weights_dtype: SamplerDtype = "auto") -> Params:
    """Convert parameters to inference weights inside a jitted function, without a layout."""

    def cast(leaf: Array, axes: tuple[str, ...]) -> Weight:
        if weights_dtype == "int8" and (summed := _summed_axes(axes, config)):
            return quantize(leaf, summed)
        return leaf.astype(leaf.dtype if FULL & set(axes) else config.dtype)

    return _unstack(jax.tree.map(cast, dense(params), transformer.logical_axes(config)), config)


def inference_shardings(
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    weights_dtype: SamplerDtype = "auto",
    expert_rules: Rules = INFERENCE_RULES,
) -> Params:
    """Return the layout of the inference weights on a mesh: a `NamedSharding` for each array.

    `expert_rules` are the rules for the matrices of experts.
    """

    def shardings(leaf: Weight, axes: tuple[str, ...]) -> PyTree:
        axes = axes[len(axes) - len(leaf.shape) :]
        rules = expert_rules if "expert_embed" in axes else INFERENCE_RULES
        of_arrays = array_axes(leaf, axes, _summed_axes(axes, config))
        return jax.tree.map(lambda own: named_sharding(mesh, *own, rules=rules), of_arrays, is_leaf=_is_axes)

    axes = _unstack(transformer.logical_axes(config), config, axes=True)
    return jax.tree.map(shardings, _abstract(config, weights_dtype), axes, is_leaf=is_compound)


def _is_axes(node: object) -> bool:
    return type(node) is tuple


def abstract_inference_weights(
    config: ModelConfig, mesh: jax.sharding.Mesh, weights_dtype: SamplerDtype = "auto"
) -> Params:
    """Return `ShapeDtypeStruct`s, with shardings, of the result of `make_inference_weights`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        _abstract(config, weights_dtype),
        inference_shardings(config, mesh, weights_dtype),
    )


def _summed_axes(axes: tuple[str, ...], config: ModelConfig) -> tuple[int, ...]:
    """Return the axes that a product with a matrix sums over; none for norms, biases, routers, and lookup tables.

    `axes` are the matrix's logical axes. A matrix has the model dimension as input, or as output on its last axis.
    """
    own = [axis for axis in axes if axis not in ("layer", "expert")]
    model = {"embed", "expert_embed"} & set(own)
    if len(own) < 2 or not model or FULL & set(own):
        return ()
    if own[0] == "vocab" and not config.tie_word_embeddings:
        return ()
    leads_to = own[-1] in model and own[0] != "vocab"
    summed = set(own[:-1]) if leads_to else model
    return tuple(number for number, axis in enumerate(axes) if axis in summed)


def _abstract(config: ModelConfig, weights_dtype: SamplerDtype) -> Params:
    make = partial(convert, config=config, weights_dtype=weights_dtype)
    return jax.eval_shape(make, transformer.abstract_params(config))


def _unstack(params: Params, config: ModelConfig, *, axes: bool = False) -> Params:
    """Split the stacks of a tree into layers; with `axes`, the leaves are tuples of names instead of arrays."""
    layers = []
    for stack, index in layer_places(config):
        layer = reduce(getitem, stack, params["runs"])
        layers.append(layer if axes else jax.tree.map(itemgetter(index), layer))
    return {**{name: leaf for name, leaf in params.items() if name != "runs"}, "layers": tuple(layers)}
