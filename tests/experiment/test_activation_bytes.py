"""The estimate of what layers store for the backward pass, beside what jax stores."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import tiny

from gspax.model import transformer
from gspax.model.sizes.memory import activation_bytes
from gspax.parallel.sharding import AXES

L, B, T = 3, 4, 96
WIDE = replace(tiny.MOE, hidden_size=128, head_dim=32, num_hidden_layers=L)
DENSE = replace(WIDE, num_experts=0, intermediate_size=320)
MOE = replace(WIDE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)


def stored_bytes(model):
    """Bytes of all layers' residuals, without weights: they have an axis of layers that no parameter has."""
    params = transformer.abstract_params(model)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def residuals(params, tokens):
        def total(params):
            return transformer.apply(params, model, tokens, jnp.ones_like(tokens))[0].astype(jnp.float32).sum()

        return jax.vjp(total, params)[1]

    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    kept = [leaf for leaf in jax.tree.leaves(jax.eval_shape(residuals, params, tokens)) if leaf.ndim > 1]
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept if leaf.shape[0] == L and leaf.shape not in weights
    )


@pytest.mark.parametrize(
    ("model", "remat"),
    [(DENSE, "none"), (DENSE, "products"), (MOE, "none"), (replace(MOE, dtype="bfloat16"), "none"), (MOE, "products")],
)
def test_the_estimate_is_what_jax_stores(model, remat):
    model = replace(model, remat=remat)
    mesh = dict.fromkeys(AXES, 1)
    one_less = replace(model, num_hidden_layers=L - 1)
    estimated = activation_bytes(model, mesh, B, T) - activation_bytes(one_less, mesh, B, T)
    assert estimated == pytest.approx(stored_bytes(model) / L, rel=0.03)
