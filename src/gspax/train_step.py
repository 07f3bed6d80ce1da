"""One optimiser update, and the learner's own log-probs that its ratios start from.

Micro-batches: the loss of a mini-batch is Σ value / Σ weight over its rows. Each micro-batch differentiates its
Σ value, the gradients are added up and divided once, so any split gives the same update. Micro-batch m of M takes the
rows m, m + M, ... so that every device keeps its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspax import losses
from gspax.config import LOGIT_BUDGET
from gspax.losses.logprobs import chunked_token_logp
from gspax.model import transformer
from gspax.model.config import ModelConfig
from gspax.sharding import batch_shards
from gspax.types import Array, Batch, Params, TrainState

Loss = Callable[[Array, Array, Array, Array], losses.Terms]
Metrics = dict[str, Array]


def make_train_step(
    config: ModelConfig,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    microbatch_rows: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure, jitted `(state, batch) -> (state, metrics)`; the state given is donated.

    Args:
      loss: `(logp_BT, old_logp_BT, advantage_B, mask_BT) -> losses.Terms`.
      temperature: of the sampler; log-probs are those of the logits divided by it.
      microbatch_rows: rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once.

    The metrics are float32 scalars: the loss's own, `loss` and `grad_norm` (before clipping).
    """

    def objective(params: Params, batch: Batch) -> tuple[Array, losses.Terms]:
        logp_BT, _, _ = token_logp(params, config, batch, temperature=temperature, mesh=mesh)
        terms = loss(logp_BT, batch.old_logp_BT, batch.advantage_B, batch.mask_BT)
        return terms.value.sum(), terms

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, terms = _summed_gradient(objective, state.params, batch, microbatch_rows)
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(terms.weight.sum(), 1e-30), grads)
        value, metrics = losses.reduce(terms)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return state, {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}

    return train_step


def make_score(
    config: ModelConfig, *, temperature: float = 1.0, microbatch_rows: int = 0, mesh: jax.sharding.Mesh | None = None
) -> Callable[[Params, Batch], tuple[Array, Array, Array]]:
    """A jitted `(params, batch) -> (logp_BT, entropy_BT, expert_LBTA)`: what the learner thinks of a batch.

    It runs in the micro-batches of the train step, so that the first update's ratios are 1 to float32 rounding.
    """

    @jax.jit
    def score(params: Params, batch: Batch) -> tuple[Array, Array, Array]:
        rows = batch.tokens_BT.shape[0]
        each = partial(token_logp, params, config, temperature=temperature, mesh=mesh)
        if microbatch_rows in (0, rows):
            return each(batch)
        parts = _split(batch, rows // microbatch_rows)
        logp, entropy, expert = jax.lax.map(each, parts)
        return _join(logp), _join(entropy), jax.vmap(_join, in_axes=1)(expert)

    return score


def token_logp(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    temperature: float = 1.0,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Array, Array]:
    """Log-prob of each token and entropy of its distribution, both `[B, T]` float32, and the experts `[L, B, T, A]`.

    Column 0 is 0. Logits exist for a stretch of time steps at once (`LOGIT_BUDGET`) and are recomputed in the
    backward pass.
    """
    hidden_BTD, expert_LBTA = transformer.apply(params, config, batch.tokens_BT, batch.segment_BT, mesh=mesh)
    rows = batch.tokens_BT.shape[0] // (batch_shards(mesh) if mesh is not None else 1)
    logp_BT, entropy_BT = chunked_token_logp(
        partial(transformer.logits, params),
        hidden_BTD,
        batch.tokens_BT,
        temperature=temperature,
        chunk=max(1, LOGIT_BUDGET // (rows * config.vocab_size)),
    )
    return logp_BT, entropy_BT, expert_LBTA


def _summed_gradient(objective, params: Params, batch: Batch, microbatch_rows: int) -> tuple[Params, losses.Terms]:
    """Gradient of Σ value over the whole batch, and the loss's terms of every row."""
    gradient = jax.grad(objective, has_aux=True)
    rows = batch.tokens_BT.shape[0]
    if microbatch_rows in (0, rows):
        return gradient(params, batch)
    if rows % microbatch_rows:
        raise ValueError(f"microbatch_rows must divide the batch's {rows} rows, got {microbatch_rows}")

    def add(total: Params, part: Batch) -> tuple[Params, losses.Terms]:
        grads, terms = gradient(params, part)
        return jax.tree.map(jnp.add, total, grads), terms

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, terms = jax.lax.scan(add, zeros, _split(batch, rows // microbatch_rows))
    return grads, jax.tree.map(_join, terms)


def _split(tree: Any, parts: int) -> Any:
    """`[B, ...]` leaves to `[M, B / M, ...]`, part m holding the rows m, m + M, ..."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def _join(x: Array) -> Array:
    """The inverse of `_split` for one array."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
