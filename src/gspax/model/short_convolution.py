"""A gated short convolution as a layer's mixer: that of LFM2 between its layers of attention.

Each channel is a sum over a token's input and those of the few tokens before it, between two gates. A row keeps these
few inputs instead of keys and values.

Axes: as in `model.kernels.convolution`; C channels, X rows of a state, D model.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
from flax import nnx

from gspax.config import ModelConfig, ShortConvolution
from gspax.model.kernels.convolution import convolve
from gspax.model.kernels.weights import contract
from gspax.model.layers import LayerInputs, add_bias, init_bias, init_weight
from gspax.types import Array, PyTree


class ConvolutionState(NamedTuple):
    """The convolution's last inputs of a row, in the compute dtype; the axis of channels is the second one."""

    input_XCJ: Array


class ShortConvolutionNet(nnx.Module):
    """The mixer of LFM2 (`Lfm2ShortConv` in transformers).

    Args:
      kind: the sizes of the mixer.
      config: the model's config.
    """

    def __init__(self, kind: ShortConvolution, config: ModelConfig, *, rngs: nnx.Rngs):
        D, C, scale = config.hidden_size, kind.width, config.initializer_range
        self.input_gate = init_weight(rngs, scale, embed=D, heads=C)
        self.output_gate = init_weight(rngs, scale, embed=D, heads=C)
        self.input = init_weight(rngs, scale, embed=D, heads=C)
        self.input_taps = init_weight(rngs, scale, heads=C, tap=kind.taps)
        self.output = init_weight(rngs, scale, heads=C, embed=D)
        self.input_gate_bias = init_bias(kind.bias, heads=C)
        self.output_gate_bias = init_bias(kind.bias, heads=C)
        self.input_bias = init_bias(kind.bias, heads=C)
        self.convolution_bias = init_bias(kind.bias, heads=C)
        self.output_bias = init_bias(kind.bias, embed=D)

    def __call__(self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        return shared.advance(partial(self.run, x_BTD), cache)

    def run(
        self, x_BTD: Array, segment_BT: Array, state: ConvolutionState | None = None, *prefix_BT: Array
    ) -> tuple[Array, ConvolutionState]:
        """Compute the outputs, and the state after the last token of each row.

        Args:
          x_BTD: inputs.
          segment_BT: int32; segments do not see one another, 0 is padding, after a row's tokens.
          state: the state before the row, which its first segment continues; None: empty. A row without tokens has its
            state returned bit for bit.
          prefix_BT: as in `convolve`, or nothing; without a state.
        """
        projections = (
            (self.input_gate, self.input_gate_bias),
            (self.output_gate, self.output_gate_bias),
            (self.input, self.input_bias),
        )
        projected = (add_bias(contract("btd,dc->btc", x_BTD, w.get_value()), bias) for w, bias in projections)
        before_BTC, after_BTC, input_BTC = projected
        last_BJC = None if state is None else state.input_XCJ.swapaxes(1, 2)
        bias = 0.0 if self.convolution_bias is None else self.convolution_bias[None, None].astype(x_BTD.dtype)
        with jax.named_scope("short_convolution"):
            y_BTC, last_BJC = convolve(
                before_BTC * input_BTC, self.input_taps[...], segment_BT, last_BJC, *prefix_BT, bias=bias
            )
        gated_BTC = after_BTC * y_BTC.astype(x_BTD.dtype)
        out_BTD = add_bias(contract("btc,cd->btd", gated_BTC, self.output.get_value()), self.output_bias)
        return out_BTD, ConvolutionState(last_BJC.swapaxes(1, 2))
