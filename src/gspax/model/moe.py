"""The mixture-of-experts layer of Qwen3-MoE: route in float32, then each token through its own experts, dropless."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.config import ModelConfig
from gspax.kernels.expert_ffn import expert_ffn
from gspax.kernels.expert_parallel import can_exchange, expert_parallel, ring
from gspax.model.layers import weight
from gspax.sharding import mesh_axes, spec, token_spec
from gspax.types import Array


class Routing(NamedTuple):
    """What a router did; `[L, B, T, ...]` once the layers are stacked."""

    expert: Array  # int32 [B, T, A]  the chosen experts, best first; padding has the id `num_experts`
    logits: Array  # float32 [B, T, E]  the router's, before the softmax


class SparseMlp(nnx.Module):
    """Softmax over all experts, the best `num_experts_per_tok` of them, their gates renormalised if the config says.

    Padding is routed nowhere: its expert id is `num_experts`, which no expert has.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, E, F, scale = (
            config.hidden_size,
            config.num_experts,
            config.moe_intermediate_size,
            config.initializer_range,
        )
        self.router = weight(rngs, scale, embed=D, router=E)
        self.gate = weight(rngs, scale, expert=E, expert_embed=D, mlp=F)
        self.up = weight(rngs, scale, expert=E, expert_embed=D, mlp=F)
        self.down = weight(rngs, scale, expert=E, mlp=F, expert_embed=D)
        self.config = config

    def __call__(
        self, x_BTD: Array, valid_BT: Array, forced_BTA: Array | None, mesh: jax.sharding.Mesh | None
    ) -> tuple[Array, Routing]:
        """The layer's output and what its router did.

        `forced_BTA` replaces the choice (Routing Replay): the gates are then the live router's probabilities of
        those experts, in their given order.
        """
        gate_BTA, routing = self.route(x_BTD, valid_BT, forced_BTA)
        dtype = x_BTD.dtype
        weights = (self.gate.astype(dtype), self.up.astype(dtype), self.down.astype(dtype))
        return _run_experts(mesh, x_BTD, routing.expert, gate_BTA, *weights), routing

    def route(self, x_BTD: Array, valid_BT: Array, forced_BTA: Array | None) -> tuple[Array, Routing]:
        """Gates float32 `[B, T, A]` of the chosen experts, and the choice."""
        E, A = self.config.num_experts, self.config.num_experts_per_tok
        logits_BTE = jnp.einsum(
            "btd,de->bte", x_BTD.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        log_prob_BTE = jax.nn.log_softmax(logits_BTE, axis=-1)
        if forced_BTA is None:
            expert_BTA = jax.lax.top_k(jax.lax.stop_gradient(log_prob_BTE), A)[1].astype(jnp.int32)
        else:
            expert_BTA = jnp.minimum(forced_BTA, E - 1)  # replayed padding carries the id E
        chosen_BTA = jnp.take_along_axis(log_prob_BTE, expert_BTA, axis=-1)
        # p / Σ p as a softmax: replayed experts whose probabilities have all fallen to 0 still have gates
        gate_BTA = jax.nn.softmax(chosen_BTA, axis=-1) if self.config.norm_topk_prob else jnp.exp(chosen_BTA)
        return gate_BTA, Routing(jnp.where(valid_BT[..., None], expert_BTA, E), logits_BTE)


def _run_experts(mesh, x_BTD, expert_BTA, gate_BTA, *weights):
    """Each device's tokens visit their experts; the matrices of those that live on it are gathered for the layer."""
    if mesh is None or mesh.size == 1:
        return _by_row(expert_ffn, x_BTD, expert_BTA, gate_BTA, *weights)
    (experts,) = mesh_axes("expert")
    visit = expert_ffn
    if mesh.shape[experts] > 1:
        per_slice = mesh.size // mesh.shape["slice"]
        split = expert_parallel if can_exchange(mesh.devices.flat[0].device_kind, per_slice) else ring
        visit = partial(split, axis=experts)

    def on_device(x_BTD, expert_BTA, gate_BTA, gate_EDF, up_EDF, down_EFD):
        gather = partial(jax.lax.all_gather, axis_name=mesh_axes("expert_embed"), tiled=True)
        weights = gather(gate_EDF, axis=1), gather(up_EDF, axis=1), gather(down_EFD, axis=2)
        return jax.lax.psum(_by_row(visit, x_BTD, expert_BTA, gate_BTA, *weights), mesh_axes("mlp"))

    rows, into = token_spec(mesh, *x_BTD.shape[:2]), spec("expert", "expert_embed", "mlp")
    in_specs = (rows, rows, rows, into, into, spec("expert", "mlp", "expert_embed"))
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=rows)
    return mapped(x_BTD, expert_BTA, gate_BTA, *weights)


def _by_row(visit, x_BTD, expert_BTA, gate_BTA, *weights):
    flat = partial(jnp.reshape, shape=(-1, expert_BTA.shape[-1]))
    y_ND = visit(x_BTD.reshape(-1, x_BTD.shape[-1]), flat(expert_BTA), flat(gate_BTA), *weights)
    return y_ND.reshape(x_BTD.shape)
