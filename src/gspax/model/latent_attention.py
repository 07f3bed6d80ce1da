"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): a layer's mixer with one small vector for a token.

Keys and values of all heads are projections of a normalized latent; each key has some rotated dimensions besides, one
vector for all heads. Whole rows (the learner's, and prompts) project them and attend as other layers do. The cache has
the latent and the rotated key alone. There the projections of keys and values are absorbed: of keys into the
queries, of values into the output, so that all query heads attend to one head, whose values are its keys.

Axes: B rows, T tokens, D model, N heads, C latent (its rank), R rotated dimensions, H dimensions of a query or key
that are not rotated, U value, Z = C + R numbers in the cache of a token.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from gspax.config import LatentAttention, ModelConfig, Yarn
from gspax.model.kernels.weights import Weight, contract, unpack
from gspax.model.layers import Heads, LayerInputs, RMSNorm, init_weight, mscale, rotate
from gspax.types import Array, PyTree

EPS = 1e-6  # of the norms of latents, whatever `rms_norm_eps` is (`DeepseekV3Attention` in transformers)


class LatentMixer(nnx.Module):
    """Queries, a latent, and the attention of all heads to it."""

    def __init__(self, kind: LatentAttention, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, C, Q, R = config.hidden_size, kind.heads, kind.rank, kind.query_rank, kind.rope.dim
        scale = config.initializer_range
        self.query_latent = init_weight(rngs, scale, embed=D, rank=Q) if Q else None
        self.query_norm = RMSNorm(Q, EPS) if Q else None
        self.query = init_weight(rngs, scale, embed=Q or D, heads=N, head=kind.nope_dim + R)
        self.latent = init_weight(rngs, scale, embed=D, rank=C)
        self.latent_norm = RMSNorm(C, EPS)
        self.rotated_key = init_weight(rngs, scale, embed=D, rank=R)
        self.key = init_weight(rngs, scale, embed=C, heads=N, head=kind.nope_dim)
        self.value = init_weight(rngs, scale, embed=C, heads=N, head=kind.value_dim)
        self.out = init_weight(rngs, scale, heads=N, head=kind.value_dim, embed=D)
        self.kind = kind

    def __call__(self, x_BTD: Array, shared: LayerInputs, cache: PyTree, layer: Array | int) -> tuple[Array, PyTree]:
        """Return the layer's output and its cache. With a cache of slots the attention is absorbed."""
        rope, angles = self.kind.rope, shared.angles[self.kind.rope]
        q_BTNH, q_BTNR = self._queries(x_BTD)
        q_BTNR = rotate(q_BTNR, angles, interleaved=rope.interleaved)
        latent_BTC = self.latent_norm(contract("btd,dc->btc", x_BTD, self.latent.get_value()))
        key_BTR = contract("btd,dr->btr", x_BTD, self.rotated_key.get_value())
        key_BT1R = rotate(key_BTR[:, :, None], angles, interleaved=rope.interleaved)
        cached_BT1Z = jnp.concatenate([latent_BTC[:, :, None], key_BT1R], axis=-1)
        if cache is None:
            q = self._scaled(q_BTNH, q_BTNR)
            k_BTNH = contract("btc,cnh->btnh", latent_BTC, self.key.get_value())
            key_BTNR = jnp.broadcast_to(key_BT1R, (*k_BTNH.shape[:3], rope.dim))
            v_BTNU = contract("btc,cnu->btnu", latent_BTC, self.value.get_value())
            k = jnp.concatenate([k_BTNH, key_BTNR], axis=-1)
            context_BTNU, cache = shared.attend(Heads(q, k, v_BTNU, cached_BT1Z=cached_BT1Z), cache, layer)
        else:
            q = self._scaled(absorb(q_BTNH, self.key.get_value()), q_BTNR)
            context_BTNZ, cache = shared.attend(Heads(q, None, cached_BT1Z), cache, layer)
            context_BTNC = context_BTNZ[..., : self.kind.rank]
            context_BTNU = contract("btnc,cnu->btnu", context_BTNC, self.value.get_value())
        return contract("btnu,nud->btd", context_BTNU, self.out.get_value()), cache

    def _queries(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the dimensions of the queries that are not rotated, and the dimensions that will be."""
        if self.query_latent is not None and self.query_norm is not None:
            x_BTD = self.query_norm(contract("btd,dc->btc", x_BTD, self.query_latent.get_value()))
        q_BTN = contract("btd,dnh->btnh", x_BTD, self.query.get_value())
        return q_BTN[..., : self.kind.nope_dim], q_BTN[..., self.kind.nope_dim :]

    def _scaled(self, first: Array, rotated: Array) -> Array:
        """Scale queries for `attend`, which divides scores by the root of their width, to the model's scale of scores.

        The model divides by the root of the keys' width, absorbed or not, and with YaRN multiplies by scale squared.
        """
        kind, scaling = self.kind, self.kind.rope.scaling
        queries = jnp.concatenate([first, rotated], axis=-1)
        factor = (queries.shape[-1] / (kind.nope_dim + kind.rope.dim)) ** 0.5
        if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
            factor *= mscale(scaling, scaling.mscale_all_dim) ** 2
        return queries if factor == 1 else (queries.astype(jnp.float32) * factor).astype(queries.dtype)


def absorb(q_BTNH: Array, key_CNH: Weight) -> Array:
    """Compute queries of latents [B, T, N, C], whose products with latents equal those of queries and keys."""
    values_CNH, scale_NH = unpack(key_CNH, q_BTNH.dtype)
    if scale_NH is not None:
        q_BTNH = (q_BTNH * scale_NH[None, None]).astype(q_BTNH.dtype)
    return jnp.einsum("btnh,cnh->btnc", q_BTNH, values_CNH.astype(q_BTNH.dtype))
