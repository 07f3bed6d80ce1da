"""A state space layer, Mamba-2 (arXiv 2405.21060), as a layer's mixer: the mixer of Granite 4 and Nemotron-H.

A head holds a state S [H, U] instead of keys and values. Each token lets it decay by exp(-dt exp(rate)), writes its
input x into it, dt k x^T, and reads it, S^T q. That is the rule of gated delta nets without its correction, and
`model.kernels.gated_delta` runs both: whole rows in chunks, one new token of each slot in one step.

Axes: as in `model.kernels.gated_delta`; K groups of R heads, H numbers that a group reads and writes a state with (the
paper's C and B), U of a head's input. X rows of a state, D model.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.config import ModelConfig, StateSpace
from gspax.model.kernels.gated_delta import Projection, Tokens, project, rule_after, rule_over_rows
from gspax.model.kernels.weights import contract
from gspax.model.layers import LayerInputs, init_bias, init_weight
from gspax.types import Array, PyTree

RATES = 1.0, 16.0  # of decay, at the start: uniform between these
STEPS = 1e-3, 1e-1  # dt at the start, for an input of zero: its logarithm is uniform between these


class SpaceState(NamedTuple):
    """The state of a row, in place of keys and values: its size does not depend on the number of tokens.

    The axis of groups is the second one, as that of heads in a cache of keys and values.
    """

    memory_XKRHU: Array  # float32
    read_XKJH: Array  # the convolution's last inputs, in the compute dtype
    write_XKJH: Array
    input_XKJRU: Array


class StateSpaceNet(nnx.Module):
    """The mixer of Granite 4 and Nemotron-H (`GraniteMoeHybridMambaLayer` in transformers).

    Args:
      kind: the sizes of the mixer.
      config: the model's config.
    """

    def __init__(self, kind: StateSpace, config: ModelConfig, *, rngs: nnx.Rngs):
        D, scale = config.hidden_size, config.initializer_range
        K, H, U, taps = kind.groups, kind.state_dim, kind.head_dim, kind.taps
        R = kind.heads // K
        self.read = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.write = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.input = init_weight(rngs, scale, embed=D, heads=K, group=R, head=U)
        self.gate = init_weight(rngs, scale, embed=D, heads=K, group=R, head=U)
        self.step = init_weight(rngs, scale, embed=D, heads=K, group=R)
        self.read_taps = init_weight(rngs, scale, heads=K, head=H, tap=taps)
        self.write_taps = init_weight(rngs, scale, heads=K, head=H, tap=taps)
        self.input_taps = init_weight(rngs, scale, heads=K, group=R, head=U, tap=taps)
        self.read_bias = init_bias(kind.conv_bias, heads=K, head=H)
        self.write_bias = init_bias(kind.conv_bias, heads=K, head=H)
        self.input_bias = init_bias(kind.conv_bias, heads=K, group=R, head=U)
        rates_KR = jax.random.uniform(rngs.params(), (K, R), minval=RATES[0], maxval=RATES[1])
        self.decay_rate = nnx.Param(jnp.log(rates_KR), axes=("heads", "rate"))
        low, high = map(math.log, STEPS)
        steps_KR = jnp.exp(jax.random.uniform(rngs.params(), (K, R), minval=low, maxval=high))
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(steps_KR)), axes=("heads", "rate"))
        self.skip_scale = nnx.Param(jnp.ones((K, R)), axes=("heads", "rate"))
        self.norm = nnx.Param(jnp.ones((K, R, U)), axes=("heads", "group", "norm"))
        self.out = init_weight(rngs, scale, heads=K, group=R, head=U, embed=D)
        self.eps = config.rms_norm_eps

    def __call__(self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        return shared.advance(partial(self.run, x_BTD, shared.mesh), cache)

    def run(
        self,
        x_BTD: Array,
        mesh: jax.sharding.Mesh,
        segment_BT: Array,
        state: SpaceState | None = None,
        *prefix_BT: Array,
    ) -> tuple[Array, SpaceState]:
        """Compute the outputs, and the state after the last token of each row.

        Args:
          x_BTD: inputs.
          mesh: the device mesh.
          segment_BT: int32; segments do not see one another, 0 is padding, after a row's tokens.
          state: the state before the row, which its first segment continues; None: empty. A row without tokens has its
            state returned bit for bit.
          prefix_BT: as in `chunked_rule`, or nothing; without a state.
        """
        before = (None,) * 3 if state is None else state[1:]
        convolutions = (
            (self.read, self.read_taps, self.read_bias),
            (self.write, self.write_taps, self.write_bias),
            (self.input, self.input_taps, self.input_bias),
        )
        projections = [
            Projection(weight.get_value(), taps[...], 0.0 if bias is None else bias[None, None].astype(x_BTD.dtype))
            for weight, taps, bias in convolutions
        ]
        convolved, last = project(x_BTD, projections, segment_BT, before, *prefix_BT)
        q_BTKH, k_BTKH, x_BTKRU = convolved
        dt_BTKR = contract("btd,dkr->btkr", x_BTD, self.step.get_value()).astype(jnp.float32)
        dt_BTKR = jax.nn.softplus(dt_BTKR + self.decay_bias[None, None].astype(jnp.float32))
        decay_BTKR = -dt_BTKR * jnp.exp(self.decay_rate[None, None].astype(jnp.float32))
        x32_BTKRU = x_BTKRU.astype(jnp.float32)
        tokens = Tokens(q_BTKH, k_BTKH, dt_BTKR[..., None] * x32_BTKRU, decay_BTKR, None)
        if state is None:
            out_BTKRU, memory = rule_over_rows(mesh, tokens, segment_BT, *prefix_BT)
        else:
            out_BTKRU, memory = rule_after(state.memory_XKRHU, tokens, segment_BT)
        out_BTKRU += self.skip_scale[None, None, ..., None].astype(jnp.float32) * x32_BTKRU
        z_BTKRU = contract("btd,dkru->btkru", x_BTD, self.gate.get_value())
        y_BTKRU = norm_gated(out_BTKRU, z_BTKRU, self.norm[...], self.eps)
        return contract("btkru,krud->btd", y_BTKRU, self.out.get_value()), SpaceState(memory, *last)


def norm_gated(x_BTKRU: Array, z_BTKRU: Array, scale_KRU: Array, eps: float) -> Array:
    """Compute y / rms(y) * scale with y = x silu(z), the mean over a group, in float32; return it in z's dtype."""
    y_BTKRU = x_BTKRU * jax.nn.silu(z_BTKRU.astype(jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(y_BTKRU * y_BTKRU, axis=(-2, -1), keepdims=True) + eps)
    return (y_BTKRU * inverse * scale_KRU[None, None].astype(jnp.float32)).astype(z_BTKRU.dtype)
