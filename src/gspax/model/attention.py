"""Grouped-query attention with QK-norm and RoPE.

The layer projects; an `Attend` function decides what is attended to: the row itself (`attend_within_segments`, for the
learner and prefill) or a cache (`model.decoding`).

Axes: as in docs/architecture.md; R = N/K query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from gspax.config import ModelConfig
from gspax.model.kernels.attention import RowSharding, row_attention
from gspax.model.kernels.quantization import contract
from gspax.model.layers import RMSNorm, add_bias, init_bias, init_weight, rotate
from gspax.parallel.sharding import spec, token_spec
from gspax.types import Array

# (q [B, T, N, H], k [B, T, K, H], v, cache, layer) -> (context [B, T, N, H], cache)
Attend = Callable[[Array, Array, Array, Any, Array | int], tuple[Array, Any]]


class Attention(nnx.Module):
    """Projections to queries, keys and values, `attend`, output projection."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        scale = config.initializer_range
        self.query = init_weight(rngs, scale, embed=D, heads=N, head=H)
        self.key = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.value = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.out = init_weight(rngs, scale, heads=N, head=H, embed=D)
        has_bias = config.attention_bias or config.qkv_bias
        self.query_bias = init_bias(has_bias, heads=N, head=H)
        self.key_bias = init_bias(has_bias, heads=K, head=H)
        self.value_bias = init_bias(has_bias, heads=K, head=H)
        self.out_bias = init_bias(config.attention_bias, embed=D)
        self.query_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None

    def __call__(
        self, x_BTD: Array, angles: tuple[Array, Array], attend: Attend, cache: Any, layer: Array | int
    ) -> tuple[Array, Any]:
        q_BTNH = add_bias(contract("btd,dnh->btnh", x_BTD, self.query.get_value()), self.query_bias)
        k_BTKH = add_bias(contract("btd,dkh->btkh", x_BTD, self.key.get_value()), self.key_bias)
        v_BTKH = add_bias(contract("btd,dkh->btkh", x_BTD, self.value.get_value()), self.value_bias)
        q_BTNH = rotate(q_BTNH if self.query_norm is None else self.query_norm(q_BTNH), angles)
        k_BTKH = rotate(k_BTKH if self.key_norm is None else self.key_norm(k_BTKH), angles)
        context_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, cache, layer)
        return add_bias(contract("btnh,nhd->btd", context_BTNH, self.out.get_value()), self.out_bias), cache


def attend_within_segments(
    segment_BT: Array,
    mesh: jax.sharding.Mesh,
    windows: tuple[int, ...] = (),
    prefix_BT: Array | None = None,
) -> Attend:
    """Causal attention of each token to its own segment (padding is segment 0), and to all of segment `prefix_BT`.

    The cache is returned unchanged.
    """
    rows, time = (*token_spec(mesh, *segment_BT.shape), None)[:2]
    sharding = RowSharding(mesh, rows, time, spec("heads")[0])

    def attend(q_BTNH, k_BTKH, v_BTKH, cache, layer):
        context_BTNH = row_attention(
            q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, windows=windows, prefix_BT=prefix_BT, sharding=sharding
        )
        return context_BTNH, cache

    return attend
