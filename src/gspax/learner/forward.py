"""The policy's pass over given tokens: the model, then log-probs and entropies."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from gspax.config import ModelConfig
from gspax.learner.head_logp import score_tokens
from gspax.learner.objective import Outputs
from gspax.model import transformer
from gspax.model.sizes.memory import logit_chunk
from gspax.parallel.sharding import axis_sizes, batch_shards
from gspax.types import Array, Params

Rows = TypeVar("Rows")  # a tree of arrays [B, T]


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: Array,
    segment_BT: Array,
    *,
    mesh: jax.sharding.Mesh,
    temperature: float = 1.0,
    mask_BT: Array | None = None,
    expert_BLTA: Array | None = None,
    prefix_BT: Array | None = None,
) -> Outputs:
    """The policy's log-probs, entropies and routing of these tokens; routed to `expert_BLTA` if that is given.

    Log-probs and entropies are those of the tokens in the mask (None: of all), and 0 elsewhere. Logits exist for one
    chunk of them at a time (`memory.logit_chunk`) and are recomputed in the backward pass. `prefix_BT` is that of
    `transformer.apply`.
    """
    T, sizes = tokens_BT.shape[1], axis_sizes(mesh)
    tokens_BT, segment_BT, mask_BT, prefix_BT = pad_rows((tokens_BT, segment_BT, mask_BT, prefix_BT), mesh)
    forced_LBTA = None
    if expert_BLTA is not None:
        fill = (0, tokens_BT.shape[1] - T)
        forced_LBTA = jnp.pad(expert_BLTA.astype(jnp.int32).swapaxes(0, 1), ((0, 0), (0, 0), fill, (0, 0)))
    hidden_BTD, routing = transformer.apply(
        params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, forced_LBTA=forced_LBTA, mesh=mesh
    )
    chunk = logit_chunk(config, sizes, tokens_BT.size // (batch_shards(sizes) * sizes["context"]))
    scores = score_tokens(
        params, hidden_BTD, tokens_BT, temperature=temperature, chunk=chunk, mask_BT=mask_BT, mesh=mesh
    )
    logp_BT, entropy_BT = (x_BT[:, :T] for x_BT in scores)
    routing = routing._replace(expert=routing.expert[:, :, :T], logits=routing.logits[:, :, :T])
    return Outputs(logp_BT, entropy_BT, routing)


def pad_rows(arrays: Rows, mesh: jax.sharding.Mesh) -> Rows:
    """The arrays `[B, T]` with padding at the end, so that the devices of a row have equal chunks of it."""
    size = mesh.shape["context"]
    return jax.tree.map(lambda x_BT: jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % size))), arrays)
