"""A layer kind in one file: a sum of what came before a token, which halves with every token."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.config import CacheSize, Mixer
from gspax.config.ranges import Size
from gspax.model.kernels.weights import contract
from gspax.model.layers import init_weight


@dataclass(frozen=True, kw_only=True)
class Averages(Mixer):
    """The settings, what they cost, and where the module is."""

    module = f"{__name__}.AverageNet"
    name = "averages"  # as in "wanted 0 in a model with averages"
    heads: Size = 2
    width: Size = 4

    def parameters(self, D):
        return 2 * D * self.heads * self.width

    def flops(self, length):
        return 2 * self.heads * self.width

    def activations(self, tensor, context):
        return 2 * self.heads * self.width // tensor

    def cache(self, tensor):
        return CacheSize(state=self.heads * self.width // tensor)


class AverageNet(nnx.Module):
    """A projection, the sum of each head, and the projection back."""

    def __init__(self, kind, config, *, rngs):
        D, scale = config.hidden_size, config.initializer_range
        self.value = init_weight(rngs, scale, embed=D, heads=kind.heads, head=kind.width)
        self.out = init_weight(rngs, scale, heads=kind.heads, head=kind.width, embed=D)

    def __call__(self, x_BTD, shared, cache, layer):
        return shared.advance(partial(self.run, x_BTD), cache)

    def run(self, x_BTD, segment_BT, state_BKU):
        """The outputs, and the state after each row; its first segment continues the state before it, if any."""
        v_BTKU = contract("btd,dku->btku", x_BTD, self.value.get_value()).astype(jnp.float32)
        before_BT = jnp.concatenate([segment_BT[:, :1], segment_BT[:, :-1]], axis=1)
        first_BKU = jnp.zeros_like(v_BTKU[:, 0]) if state_BKU is None else state_BKU

        def step(sum_BKU, token):
            v_BKU, segment_B, before_B = token
            begins_B11, valid_B11 = (segment_B != before_B)[:, None, None], (segment_B > 0)[:, None, None]
            next_BKU = jnp.where(begins_B11, 0, sum_BKU) / 2 + v_BKU
            sum_BKU = jnp.where(valid_B11, next_BKU, sum_BKU)
            return sum_BKU, sum_BKU

        by_token = jax.tree.map(lambda x: x.swapaxes(0, 1), (v_BTKU, segment_BT, before_BT))
        last_BKU, sum_TBKU = jax.lax.scan(step, first_BKU, by_token)
        y_BTKU = sum_TBKU.swapaxes(0, 1).astype(x_BTD.dtype)
        return contract("btku,kud->btd", y_BTKU, self.out.get_value()), last_BKU
