"""The gated delta net as a layer's mixer: projections, convolution, rule, gated norm, and the projection back.

Whole rows (the learner's, and prompts) run in chunks, one new token of each slot in one step, and several new tokens of
a slot in chunks that continue its state (`model.kernels.gated_delta`).

Axes: as in `model.kernels.gated_delta`; X rows of a state, D model. All parameters but the norm's have the key heads as
an axis of their own, with the value heads of each beside it, so that sharding over it needs no communication before the
last projection.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.config import GatedDelta, ModelConfig
from gspax.model.kernels.gated_delta import (
    Projection,
    Tokens,
    decay_and_beta,
    gated_rms_norm,
    project,
    rule_after,
    rule_over_rows,
)
from gspax.model.kernels.weights import contract
from gspax.model.layers import LayerInputs, init_weight
from gspax.types import Array, PyTree

RATES = 0.01, 16.0  # of decay, at the start: uniform between these, as in transformers


class DeltaState(NamedTuple):
    """The state of a row, in place of keys and values: its size does not depend on the number of tokens.

    The axis of heads is the second one, as in a cache of keys and values.
    """

    memory_XKRHU: Array  # float32
    query_XKJH: Array  # the convolution's last inputs, in the compute dtype
    key_XKJH: Array
    value_XKJRU: Array


class GatedDeltaNet(nnx.Module):
    """The mixer of Qwen3-Next and Qwen3.5 (`Qwen3_5GatedDeltaNet` in transformers).

    Args:
      kind: the sizes of the mixer.
      config: the model's config.
    """

    def __init__(self, kind: GatedDelta, config: ModelConfig, *, rngs: nnx.Rngs):
        D, scale = config.hidden_size, config.initializer_range
        K, H, U, taps = kind.key_heads, kind.key_dim, kind.value_dim, kind.taps
        R = kind.value_heads // K
        self.query = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.key = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.value = init_weight(rngs, scale, embed=D, heads=K, group=R, head=U)
        self.gate = init_weight(rngs, scale, embed=D, heads=K, group=R, head=U)
        self.decay = init_weight(rngs, scale, embed=D, heads=K, group=R)
        self.beta = init_weight(rngs, scale, embed=D, heads=K, group=R)
        self.query_taps = init_weight(rngs, scale, heads=K, head=H, tap=taps)
        self.key_taps = init_weight(rngs, scale, heads=K, head=H, tap=taps)
        self.value_taps = init_weight(rngs, scale, heads=K, group=R, head=U, tap=taps)
        rates_KR = jax.random.uniform(rngs.params(), (K, R), minval=RATES[0], maxval=RATES[1])
        self.decay_rate = nnx.Param(jnp.log(rates_KR), axes=("heads", "rate"))
        self.decay_bias = nnx.Param(jnp.ones((K, R)), axes=("heads", "rate"))
        self.norm = nnx.Param(jnp.ones(U), axes=("norm",))
        self.out = init_weight(rngs, scale, heads=K, group=R, head=U, embed=D)
        self.eps = config.rms_norm_eps

    def __call__(self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        return shared.advance(partial(self.run, x_BTD, shared.mesh), cache)

    def run(
        self,
        x_BTD: Array,
        mesh: jax.sharding.Mesh,
        segment_BT: Array,
        state: DeltaState | None = None,
        *prefix_BT: Array,
    ) -> tuple[Array, DeltaState]:
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
        weights = (self.query, self.query_taps), (self.key, self.key_taps), (self.value, self.value_taps)
        projections = [Projection(weight.get_value(), taps[...]) for weight, taps in weights]
        convolved, last = project(x_BTD, projections, segment_BT, before, *prefix_BT)
        a_BTKR = contract("btd,dkr->btkr", x_BTD, self.decay.get_value())
        b_BTKR = contract("btd,dkr->btkr", x_BTD, self.beta.get_value())
        gates = decay_and_beta(a_BTKR, b_BTKR, self.decay_rate[...], self.decay_bias[...])
        query_BTKH, key_BTKH, value_BTKRU = convolved
        tokens = Tokens(query_BTKH, key_BTKH, value_BTKRU, *gates)
        if state is None:
            out_BTKRU, memory = rule_over_rows(mesh, tokens, segment_BT, *prefix_BT)
        else:
            out_BTKRU, memory = rule_after(state.memory_XKRHU, tokens, segment_BT)
        z_BTKRU = contract("btd,dkru->btkru", x_BTD, self.gate.get_value())
        y_BTKRU = gated_rms_norm(out_BTKRU, z_BTKRU, self.norm[...], self.eps)
        return contract("btkru,krud->btd", y_BTKRU, self.out.get_value()), DeltaState(memory, *last)
