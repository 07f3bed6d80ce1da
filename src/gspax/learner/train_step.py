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
from gspax.config import LOGIT_BUDGET, Experiment, ModelConfig
from gspax.learner.adapters import trained_axes
from gspax.learner.expert_load import expert_load
from gspax.learner.objective import Common, Objective, Outputs, from_experiment
from gspax.learner.scoring import score_tokens
from gspax.model import transformer
from gspax.model.low_rank import combine, partition
from gspax.sharding import batch_shards, constrain
from gspax.types import Array, Batch, Params, TrainState

Metrics = dict[str, Array]
Score = tuple[Array, Array, Array]  # log-probs, entropies, experts: see `make_score`


def make_train_step(
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    microbatch_rows: int = 0,
    routing_replay: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure, jitted `(state, batch) -> (state, metrics)`; the state given is donated.

    Args:
      objective: what is minimised, such as `objective.from_loss(losses.gspo)`.
      temperature: of the sampler; log-probs are those of the logits divided by it.
      microbatch_rows: rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once.
      routing_replay: each token goes to the experts in `batch.expert_BLTA`, with the live router's gates (Routing
        Replay, arXiv 2507.18071).

    The metrics are float32 scalars: the objective's own, `loss` and `grad_norm` (before clipping).
    """
    policy = partial(forward, config=config, temperature=temperature, routing_replay=routing_replay, mesh=mesh)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        common = Common(state.clip_range, _response_load(batch, config.num_experts))
        trained, frozen = partition(state.params)

        def summed(trained: Params, part: Batch) -> tuple[Array, losses.Terms]:
            terms = objective(policy(combine(trained, frozen), batch=part), part, common)
            return terms.value.sum(), terms

        grads, terms = _summed_gradient(summed, trained, batch, microbatch_rows)
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(terms.weight.sum(), 1e-30), grads)
        value, metrics = losses.reduce(terms)
        grads = _placed(grads, trained, config, mesh)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        params = combine(optax.apply_updates(trained, updates), frozen)
        state = replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return state, {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}

    return train_step


def make_score(
    config: ModelConfig, *, temperature: float = 1.0, microbatch_rows: int = 0, mesh: jax.sharding.Mesh | None = None
) -> Callable[[Params, Batch], Score]:
    """A jitted `(params, batch) -> (logp_BT, entropy_BT, expert_LBTA)`: what the learner thinks of a batch.

    It runs in the micro-batches of the train step, so that the first update's ratios are 1 to float32 rounding.
    """

    @jax.jit
    def score(params: Params, batch: Batch) -> Score:
        rows = batch.tokens_BT.shape[0]

        def each(part: Batch) -> Score:
            outputs = forward(params, config, part, temperature=temperature, mesh=mesh)
            return outputs.logp_BT, outputs.entropy_BT, outputs.routing.expert

        if microbatch_rows in (0, rows):
            return each(batch)
        logp, entropy, expert = jax.lax.map(each, _split(batch, rows // microbatch_rows))
        return _join(logp), _join(entropy), jax.vmap(_join, in_axes=1)(expert)

    return score


def make_steps(
    experiment: Experiment, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[Callable[[TrainState, Batch], tuple[TrainState, Metrics]], Callable[[Params, Batch], Score]]:
    """The train step and the scoring of an experiment, with one temperature and one split into micro-batches."""
    alike: dict[str, Any] = {
        "temperature": experiment.sampling.temperature,
        "microbatch_rows": experiment.schedule.microbatch_rows,
        "mesh": mesh,
    }
    replay, minimised = experiment.routing_replay, from_experiment(experiment)
    return (
        make_train_step(experiment.model, minimised, optimizer, routing_replay=replay, **alike),
        make_score(experiment.model, **alike),
    )


def forward(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    temperature: float = 1.0,
    routing_replay: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Outputs:
    """The policy's log-probs, entropies and routing of a batch.

    Logits exist for a stretch of time steps at once (`LOGIT_BUDGET`) and are recomputed in the backward pass.
    """
    forced_LBTA = None
    if routing_replay:
        if batch.expert_BLTA is None:
            raise ValueError("batch.expert_BLTA: wanted the experts to replay, got None")
        forced_LBTA = batch.expert_BLTA.swapaxes(0, 1)
    (rows, T), vocabulary, fill = batch.tokens_BT.shape, config.vocab_size, (0, 0)
    if mesh is not None:
        rows, vocabulary = rows // batch_shards(mesh), vocabulary // mesh.shape["tensor"]
        fill = (0, -T % mesh.shape["context"])  # with padding, so that the devices of a row have equal parts of it
    tokens_BT, segment_BT = (jnp.pad(x_BT, ((0, 0), fill)) for x_BT in (batch.tokens_BT, batch.segment_BT))
    if forced_LBTA is not None:
        forced_LBTA = jnp.pad(forced_LBTA, ((0, 0), (0, 0), fill, (0, 0)))
    hidden_BTD, routing = transformer.apply(params, config, tokens_BT, segment_BT, forced_LBTA=forced_LBTA, mesh=mesh)
    chunk = max(1, LOGIT_BUDGET // (rows * vocabulary))
    scores = score_tokens(params, hidden_BTD, tokens_BT, temperature=temperature, chunk=chunk, mesh=mesh)
    logp_BT, entropy_BT = (x_BT[:, :T] for x_BT in scores)
    return Outputs(logp_BT, entropy_BT, jax.tree.map(lambda x_LBT: x_LBT[:, :, :T], routing))


def _response_load(batch: Batch, num_experts: int) -> Array | None:
    """`routing.expert_load` of the response tokens of a whole mini-batch, where the batch has the experts."""
    if batch.expert_BLTA is None:
        return None
    counted_BLTA = jnp.where(batch.mask_BT[:, None, :, None], batch.expert_BLTA, num_experts)
    return expert_load(counted_BLTA.swapaxes(0, 1), num_experts)


def _summed_gradient(summed, trained: Params, batch: Batch, microbatch_rows: int) -> tuple[Params, losses.Terms]:
    """Gradient of Σ value over the whole batch, and the loss's terms of every row."""
    gradient = jax.grad(summed, has_aux=True)
    rows = batch.tokens_BT.shape[0]
    if microbatch_rows in (0, rows):
        return gradient(trained, batch)
    if rows % microbatch_rows:
        raise ValueError(f"microbatch_rows must divide the batch's {rows} rows, got {microbatch_rows}")

    def add(total: Params, part: Batch) -> tuple[Params, losses.Terms]:
        grads, terms = gradient(trained, part)
        return jax.tree.map(jnp.add, total, grads), terms

    zeros = jax.tree.map(lambda param: jnp.zeros_like(param, jnp.float32), trained)
    grads, terms = jax.lax.scan(add, zeros, _split(batch, rows // microbatch_rows))
    return grads, jax.tree.map(_join, terms)


def _placed(grads: Params, trained: Params, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> Params:
    """The gradients, lying as the parameters do.

    Else the partitioner may leave a small parameter split in another way, and the next step compiles anew.
    """
    return jax.tree.map(lambda grad, axes: constrain(grad, mesh, *axes), grads, trained_axes(config, trained))


def _split(tree: Any, parts: int) -> Any:
    """`[B, ...]` leaves to `[M, B / M, ...]`, part m holding the rows m, m + M, ..."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def _join(x: Array) -> Array:
    """The inverse of `_split` for one array."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
