"""Grouped-query attention with QK-norm and RoPE, and the two sources of its keys and values.

The layer projects; an `Attend` function decides what is attended to: the row itself (`attend_within_segments`, for the
learner and prefill) or a cache (`attend_over_cache`, for decode).

Axes: as in docs/architecture.md; R = N/K query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gspax.config import ModelConfig
from gspax.kernels.attention import MASKED, RowSharding, row_attention
from gspax.model.layers import RMSNorm, add_bias, init_bias, init_weight, rotate
from gspax.sharding import spec, token_spec
from gspax.types import Array

# (q [B, T, N, H], k [B, T, K, H], v, cache, layer) -> (context [B, T, N, H], cache)
Attend = Callable[[Array, Array, Array, Any, Array], tuple[Array, Any]]


class Attention(nnx.Module):
    """Projections to queries, keys and values, `attend`, output projection."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        scale = config.initializer_range
        self.query = init_weight(rngs, scale, embed=D, heads=N, head=H)
        self.key = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.value = init_weight(rngs, scale, embed=D, heads=K, head=H)
        self.out = init_weight(rngs, scale, heads=N, head=H, embed=D)
        self.query_bias = init_bias(config.attention_bias, heads=N, head=H)
        self.key_bias = init_bias(config.attention_bias, heads=K, head=H)
        self.value_bias = init_bias(config.attention_bias, heads=K, head=H)
        self.out_bias = init_bias(config.attention_bias, embed=D)
        self.query_norm = RMSNorm(H, config.rms_norm_eps)
        self.key_norm = RMSNorm(H, config.rms_norm_eps)

    def __call__(
        self, x_BTD: Array, angles: tuple[Array, Array], attend: Attend, cache: Any, layer: Array
    ) -> tuple[Array, Any]:
        dtype = x_BTD.dtype
        q_BTNH = add_bias(jnp.einsum("btd,dnh->btnh", x_BTD, self.query.astype(dtype)), self.query_bias)
        k_BTKH = add_bias(jnp.einsum("btd,dkh->btkh", x_BTD, self.key.astype(dtype)), self.key_bias)
        v_BTKH = add_bias(jnp.einsum("btd,dkh->btkh", x_BTD, self.value.astype(dtype)), self.value_bias)
        q_BTNH = rotate(self.query_norm(q_BTNH), angles)
        k_BTKH = rotate(self.key_norm(k_BTKH), angles)
        context_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, cache, layer)
        return add_bias(jnp.einsum("btnh,nhd->btd", context_BTNH, self.out.astype(dtype)), self.out_bias), cache


def _in_window(back: Array, windows: tuple[int, ...], layer: Array) -> Array | bool:
    """Whether a key so many positions back is in the layer's window; without windows, True."""
    return back < jnp.asarray(windows)[layer] if windows else True


def attend_within_segments(
    segment_BT: Array, windows: tuple[int, ...] = (), mesh: jax.sharding.Mesh | None = None
) -> Attend:
    """Causal attention of each token to its own segment (padding is segment 0). The cache is returned unchanged."""
    sharding = None
    if mesh is not None:
        rows, time = (*token_spec(mesh, *segment_BT.shape), None)[:2]
        sharding = RowSharding(mesh, rows, time, spec("heads")[0])

    def attend(q_BTNH, k_BTKH, v_BTKH, cache, layer):
        return row_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, layer, windows=windows, sharding=sharding), cache

    return attend


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values: the prompt's once per prompt, the completion's per sample (C positions, written from 0)."""

    prompt_k_LPKSH: Array
    prompt_v_LPKSH: Array
    k_LBKCH: Array
    v_LBKCH: Array


def storing_prompt(attend: Attend) -> Attend:
    """`attend` that also writes its keys and values into the cache `(k, v)`, each `[L, P, K, S, H]`."""

    def attend_and_store(q, k_PSKH, v_PSKH, cache, layer):
        context, _ = attend(q, k_PSKH, v_PSKH, None, layer)
        k_LPKSH, v_LPKSH = cache
        k_LPKSH = k_LPKSH.at[layer].set(k_PSKH.swapaxes(1, 2))
        v_LPKSH = v_LPKSH.at[layer].set(v_PSKH.swapaxes(1, 2))
        return context, (k_LPKSH, v_LPKSH)

    return attend_and_store


def attend_over_cache(prompt_length_P: Array, step: Array, windows: tuple[int, ...] = ()) -> Attend:
    """One new token per sample attends to its prompt (shared by the prompt's samples) and its completion so far.

    Row b belongs to prompt b // (B // P); `step` is the completion position of the new token.
    """

    def attend(q_BTNH, k_BTKH, v_BTKH, cache: Cache, layer):
        B, _, N, H = q_BTNH.shape
        P, K, S = cache.prompt_k_LPKSH.shape[1:4]
        C = cache.k_LBKCH.shape[3]
        G, R = B // P, N // K
        k_1BK1H, v_1BK1H = k_BTKH.swapaxes(1, 2)[None], v_BTKH.swapaxes(1, 2)[None]
        k_LBKCH = jax.lax.dynamic_update_slice(cache.k_LBKCH, k_1BK1H, (layer, 0, 0, step, 0))
        v_LBKCH = jax.lax.dynamic_update_slice(cache.v_LBKCH, v_1BK1H, (layer, 0, 0, step, 0))

        q_BKRH = q_BTNH.reshape(B, K, R, H)
        q_PGKRH = q_BKRH.reshape(P, G, K, R, H)
        prompt_BKRS = jnp.einsum(
            "pgkrh,pksh->pgkrs", q_PGKRH, cache.prompt_k_LPKSH[layer], preferred_element_type=jnp.float32
        ).reshape(B, K, R, S)
        own_BKRC = jnp.einsum("bkrh,bkch->bkrc", q_BKRH, k_LBKCH[layer], preferred_element_type=jnp.float32)
        before_end_PS = prompt_length_P[:, None] - jnp.arange(S)[None]
        visible_PS = (before_end_PS > 0) & _in_window(before_end_PS + step, windows, layer)
        visible_BS = jnp.repeat(visible_PS, G, axis=0)
        back_C = step - jnp.arange(C)
        visible_C = (back_C >= 0) & _in_window(back_C, windows, layer)
        prompt_BKRS = jnp.where(visible_BS[:, None, None], prompt_BKRS * H**-0.5, MASKED)
        own_BKRC = jnp.where(visible_C[None, None, None], own_BKRC * H**-0.5, MASKED)

        weight = jax.nn.softmax(jnp.concatenate([prompt_BKRS, own_BKRC], axis=-1), axis=-1).astype(v_BTKH.dtype)
        weight_PGKRS, weight_BKRC = weight[..., :S].reshape(P, G, K, R, S), weight[..., S:]
        context = jnp.einsum("pgkrs,pksh->pgkrh", weight_PGKRS, cache.prompt_v_LPKSH[layer]).reshape(B, K, R, H)
        context += jnp.einsum("bkrc,bkch->bkrh", weight_BKRC, v_LBKCH[layer])
        updated = Cache(
            prompt_k_LPKSH=cache.prompt_k_LPKSH,
            prompt_v_LPKSH=cache.prompt_v_LPKSH,
            k_LBKCH=k_LBKCH,
            v_LBKCH=v_LBKCH,
        )
        return context.reshape(B, 1, N, H), updated

    return attend
