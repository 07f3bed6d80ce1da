"""The mixture-of-experts layer, dropless: routed in float32, then each token through its own experts.

Some models add a shared expert, whose output may be scaled by a sigmoid of the token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gspax import config as kinds
from gspax.config import ModelConfig, Router
from gspax.model.kernels.expert_ffn import GELU_TANH, SQUARED_RELU, Experts, expert_ffn
from gspax.model.kernels.expert_parallel import (
    by_platform,
    expert_decoding,
    expert_parallel,
    has_ragged_all_to_all,
    ring,
)
from gspax.model.kernels.weights import array_axes, cast, contract, is_compound
from gspax.model.layers import DenseMlp, LayerInputs, RMSNorm, add_bias, expand_dims_like, init_bias, init_weight
from gspax.model.router_scores import log_scores
from gspax.parallel.sharding import mesh_axes, spec, token_spec
from gspax.types import Array

ACTIVATIONS = {"silu": None, "gelu_tanh": GELU_TANH, "relu2": SQUARED_RELU}
# (x [N, D], expert [N, A], gate [N, A], experts) -> y [N, D], and perhaps whether it fell back to the ring
Ffn = Callable[[Array, Array, Array, Experts], Array | tuple[Array, Array]]


class Routing(NamedTuple):
    """The routers' choices; `[L, B, T, ...]` once the layers are stacked."""

    expert: Array  # int32 [B, T, A]  the chosen experts, best first; padding has the id `num_experts`, which is none
    logits: Array  # float32 [B, T, E]  before the softmax or the sigmoid
    fell_back: Array | int = 0  # int32 []  whether the ring replaced the all-to-all of `model.kernels.expert_parallel`


def choose_experts(log_score: Array, bias_E: Array | None, router: Router, active: int) -> Array:
    """Choose the best experts of each token: ids, best first, int32 `[..., A]`; without a gradient.

    Args:
      log_score: float32 `[..., E]`, from `log_scores`.
      bias_E: the correction bias, float32, or None.
      router: the model's router.
      active: A, the number of experts to choose.
    """
    choice = jax.lax.stop_gradient(log_score)
    if bias_E is not None or router.groups > 1:
        choice = jnp.exp(choice)
    if bias_E is not None:
        choice += expand_dims_like(jax.lax.stop_gradient(bias_E), choice)
    if router.groups > 1:
        groups = choice.reshape(*choice.shape[:-1], router.groups, -1)
        worth = jax.lax.top_k(groups, router.group_best)[0].sum(axis=-1)
        best = jax.lax.top_k(worth, router.top_groups)[1]
        is_best = jax.nn.one_hot(best, router.groups).sum(axis=-2) > 0
        choice = jnp.where(is_best[..., None], groups, -jnp.inf).reshape(choice.shape)
    return jax.lax.top_k(choice, active)[1].astype(jnp.int32)


def scores_of(log_score: Array, expert: Array) -> Array:
    """Return the log-scores of these experts, float32 `[..., A]`; 0 for the id `num_experts`, which is no expert's."""
    return jnp.take_along_axis(log_score, expert.astype(jnp.int32), axis=-1, mode="fill", fill_value=0.0)


class SparseMlp(nnx.Module):
    """The best experts by the router's scores. Padding is not routed: it has the id E, which no expert has."""

    def __init__(self, kind: kinds.Experts, config: ModelConfig, *, rngs: nnx.Rngs):
        D, E, F = config.hidden_size, kind.count, kind.width
        scale = config.initializer_range
        self.router = init_weight(rngs, scale, embed=D, router=E)
        gated = "gate" in kinds.mlp_weights(kind.activation)
        self.gate = init_weight(rngs, scale, expert=E, expert_embed=D, mlp=F) if gated else None
        self.up = init_weight(rngs, scale, expert=E, expert_embed=D, mlp=F)
        self.down = init_weight(rngs, scale, expert=E, mlp=F, expert_embed=D)
        self.router_bias = init_bias(kind.bias, router=E)
        self.gate_bias = init_bias(kind.bias, expert=E, mlp=F)
        self.up_bias = init_bias(kind.bias, expert=E, mlp=F)
        self.down_bias = init_bias(kind.bias, expert=E, expert_embed=D)
        self.correction_bias = init_bias(kind.router.correction_bias, router=E)
        shared = kinds.DenseMlp(width=kind.shared, activation=kind.activation)
        self.shared = DenseMlp(shared, config, rngs=rngs) if kind.shared else None
        self.shared_gate = init_weight(rngs, scale, embed=D, router=1) if kind.shared_gate else None
        self.kind = kind

    def __call__(self, x_BTD: Array, inputs: LayerInputs, forced_BTA: Array | None) -> tuple[Array, Routing]:
        """Return the layer's output and its routing.

        `forced_BTA` replaces the choice (Routing Replay): the gates are then the router's current scores of those
        experts, in the same order. Where it names none, with the id `num_experts`, the router chooses itself: the
        sampler does not know the experts of a response's last token.
        """
        with jax.named_scope("router"):
            gate_BTA, routing = self.route(x_BTD, inputs.valid_BT, forced_BTA)
        y_BTD, routing = self.run(x_BTD, gate_BTA, routing, inputs)
        if self.shared is None:
            return y_BTD, routing
        with jax.named_scope("shared_expert"):
            if self.shared_gate is None:
                return y_BTD + self.shared(x_BTD, inputs.mesh), routing
            scale_BT1 = jax.nn.sigmoid(x_BTD @ self.shared_gate.astype(x_BTD.dtype))
            return y_BTD + scale_BT1 * self.shared(x_BTD, inputs.mesh), routing

    def route(self, x_BTD: Array, valid_BT: Array, forced_BTA: Array | None) -> tuple[Array, Routing]:
        """Return the gates of the chosen experts, float32 `[B, T, A]`, and the routing."""
        E, A, router = self.kind.count, self.kind.active, self.kind.router
        logits_BTE = jnp.einsum(
            "btd,de->bte", x_BTD.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        logits_BTE = add_bias(logits_BTE, self.router_bias)
        log_score_BTE = log_scores(logits_BTE, router)
        bias_E = None if self.correction_bias is None else self.correction_bias[...]
        expert_BTA = choose_experts(log_score_BTE, bias_E, router, A)
        if forced_BTA is not None:
            expert_BTA = jnp.where(forced_BTA < E, forced_BTA, expert_BTA)
        chosen_BTA = scores_of(log_score_BTE, expert_BTA)
        # p / Σ p as a softmax of log p: replayed experts whose scores underflow to 0 still have gates
        gate_BTA = jax.nn.softmax(chosen_BTA, axis=-1) if self.kind.normalize else jnp.exp(chosen_BTA)
        gate_BTA = gate_BTA if router.scale == 1 else gate_BTA * router.scale
        return gate_BTA, Routing(jnp.where(valid_BT[..., None], expert_BTA, E), logits_BTE)

    def run(self, x_BTD: Array, gate_BTA: Array, routing: Routing, inputs: LayerInputs) -> tuple[Array, Routing]:
        """Run the chosen experts; return the sum times their gates, and the routing with `fell_back`."""
        with jax.named_scope("experts"):
            weights = self.gate, self.up, self.down, self.gate_bias, self.up_bias
            arrays = (None if w is None else cast(w.get_value(), x_BTD.dtype) for w in weights)
            experts = Experts._make((*arrays, ACTIVATIONS[self.kind.activation]))
            y_BTD, fell_back = _run_experts(inputs.mesh, x_BTD, routing.expert, gate_BTA, experts, inputs.decoding)
            if self.down_bias is not None:
                y_BTD += _weigh_biases(routing.expert, gate_BTA, self.down_bias[...].astype(x_BTD.dtype))
            return y_BTD, routing._replace(fell_back=fell_back)


class NormedExperts(SparseMlp):
    """Router, experts, and shared expert with norms of their own, and a factor of each expert's gate (Gemma 4).

    The shared expert is what other families' dense layers have as their MLP.
    """

    def __init__(self, kind: kinds.Experts, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(kind, config, rngs=rngs)
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, config.norm_plus_one)
        self.router_norm, self.expert_norm, self.expert_out_norm = norm(), norm(), norm()
        self.shared_norm, self.shared_out_norm = norm(), norm()
        self.expert_scale = nnx.Param(jnp.ones(kind.count), axes=("router",))

    def __call__(self, x_BTD: Array, inputs: LayerInputs, forced_BTA: Array | None) -> tuple[Array, Routing]:
        """Return the layer's output and its routing, as `SparseMlp` does; the input is not normalized yet."""
        D = x_BTD.shape[-1]
        with jax.named_scope("router"):
            gate_BTA, routing = self.route(self.router_norm(x_BTD) * D**-0.5, inputs.valid_BT, forced_BTA)
            gate_BTA *= self.expert_scale[...].astype(jnp.float32).at[routing.expert].get(mode="fill", fill_value=0)
        y_BTD, routing = self.run(self.expert_norm(x_BTD), gate_BTA, routing, inputs)
        assert self.shared is not None
        with jax.named_scope("shared_expert"):
            dense_BTD = self.shared(self.shared_norm(x_BTD), inputs.mesh)
        return self.shared_out_norm(dense_BTD) + self.expert_out_norm(y_BTD), routing


def _weigh_biases(expert_BTA: Array, gate_BTA: Array, bias_ED: Array) -> Array:
    """Sum the chosen experts' biases, times their gates, `[B, T, D]`; zero for padding."""
    gate_BTE = (jax.nn.one_hot(expert_BTA, len(bias_ED)) * gate_BTA[..., None]).sum(axis=-2)
    return contract("bte,ed->btd", gate_BTE.astype(bias_ED.dtype), bias_ED)


def exchanges_rows(mesh: jax.sharding.Mesh) -> bool:
    """Return whether experts are sharded over devices, so that devices exchange rows."""
    return mesh.shape[mesh_axes("expert")[0]] > 1


def _run_experts(
    mesh: jax.sharding.Mesh,
    x_BTD: Array,
    expert_BTA: Array,
    gate_BTA: Array,
    experts: Experts,
    decoding: bool = False,
) -> tuple[Array, Array]:
    """Run each device's tokens through their experts, whose matrices are gathered over `fsdp` for this layer only.

    Return the result, and whether the exchange of rows fell back to the ring.
    """
    if mesh.size == 1:
        return _run_rows(expert_ffn, x_BTD, expert_BTA, gate_BTA, experts)
    (axis,) = mesh_axes("expert")
    ffn: Ffn = expert_ffn
    if exchanges_rows(mesh):
        slice_devices = mesh.size // mesh.shape["slice"]
        direct = has_ragged_all_to_all(mesh.devices.flat[0].device_kind, slice_devices)
        if decoding:
            ffn = partial(expert_decoding, axis=axis, ragged=direct)
        else:
            ffn = partial(expert_parallel, exchange=by_platform(axis) if direct else ring(axis))
    into, out = ("expert", "expert_embed", "mlp"), ("expert", "mlp", "expert_embed")
    biases = (None, None) if experts.gate_bias_EF is None else (("expert", "mlp"), ("expert", "mlp"))
    names = Experts._make((None if experts.gate_EDF is None else into, into, out, *biases, experts.activation))
    axes = jax.tree.map(partial(array_axes, summed=(1,)), experts, names, is_leaf=is_compound)

    def on_device(x_BTD: Array, expert_BTA: Array, gate_BTA: Array, experts: Experts) -> tuple[Array, Array]:
        whole = jax.tree.map(_gather_embed, experts, axes)
        y_BTD, fell_back = _run_rows(ffn, x_BTD, expert_BTA, gate_BTA, whole)
        return jax.lax.psum(y_BTD, mesh_axes("mlp")), fell_back

    rows = token_spec(mesh, *x_BTD.shape[:2])
    specs = jax.tree.map(lambda _, axes: spec(*axes), experts, axes)
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=(rows, spec()))
    return mapped(x_BTD, expert_BTA, gate_BTA, experts)


def _gather_embed(x: Array, axes: tuple[str, ...]) -> Array:
    """Gather the whole model dimension of an array with these logical axes, if it has one."""
    if "expert_embed" not in axes:
        return x
    return jax.lax.all_gather(x, mesh_axes("expert_embed"), axis=axes.index("expert_embed"), tiled=True)


def _run_rows(ffn: Ffn, x_BTD: Array, expert_BTA: Array, gate_BTA: Array, experts: Experts) -> tuple[Array, Array]:
    """Run `ffn` on the tokens as rows [N, ...], N = B·T; return the result, and whether it fell back to the ring."""
    x_ND, expert_NA, gate_NA = (x.reshape(-1, x.shape[-1]) for x in (x_BTD, expert_BTA, gate_BTA))
    result = ffn(x_ND, expert_NA, gate_NA, experts)
    y_ND, fell_back = result if isinstance(result, tuple) else (result, jnp.int32(0))
    return y_ND.reshape(x_BTD.shape), fell_back
