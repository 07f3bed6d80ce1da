"""One optimiser update, and the learner's own log-probs that its ratios start from.

Microbatches: the loss of a minibatch is Σ value / Σ weight over its rows. Each microbatch differentiates its Σ value;
the gradients are summed and divided once, so every split gives the same update. Microbatch m of M takes the rows
m, m + M, ..., so that every device keeps its own rows.
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
from gspax.config import LOGIT_BUDGET, Experiment, ModelConfig, expert_id_dtype
from gspax.learner.adapters import trained_axes
from gspax.learner.expert_load import expert_load
from gspax.learner.objective import Objective, Outputs, UpdateConstants, make_objective
from gspax.learner.scoring import score_tokens
from gspax.model import transformer
from gspax.model.low_rank import combine, partition
from gspax.sharding import batch_shards, constrain
from gspax.types import Array, Batch, Params, TrainState

Metrics = dict[str, Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Score = Callable[[Params, Array, Array], tuple[Array, Array, Array]]  # see `make_score`


def make_train_step(
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    microbatch_rows: int = 0,
    routing_replay: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainStep:
    """A pure, jitted `(state, batch) -> (state, metrics)`; the state given is donated.

    Args:
      objective: what is minimised, such as `make_objective(losses.gspo)`.
      temperature: the sampler's; log-probs are of the logits divided by it.
      microbatch_rows: rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once.
      routing_replay: each token goes to the experts in `batch.expert_BLTA`, with the live router's gates (Routing
        Replay, arXiv 2507.18071).

    An update whose loss or gradient is not finite is skipped: parameters and optimiser state stay as they are, bit for
    bit, and `state.step` counts it.

    The metrics are float32 scalars: the objective's own, `loss`, `grad_norm` (before clipping) and `skipped`, 0 or 1.
    """

    def outputs_of(params: Params, batch: Batch) -> Outputs:
        if routing_replay and batch.expert_BLTA is None:
            raise ValueError("batch.expert_BLTA: wanted the experts to replay, got None")
        replayed = batch.expert_BLTA if routing_replay else None
        return forward(
            params,
            config,
            batch.tokens_BT,
            batch.segment_BT,
            temperature=temperature,
            expert_BLTA=replayed,
            mesh=mesh,
        )

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        constants = UpdateConstants(state.clip_range, _response_load(batch, config.num_experts))
        trained, frozen = partition(state.params)

        def summed(trained: Params, part: Batch) -> tuple[Array, losses.Terms]:
            outputs = outputs_of(combine(trained, frozen), part)
            with jax.named_scope("loss"):
                terms = objective(outputs, part, constants)
            return terms.value.sum(), terms

        grads, terms = _summed_gradient(summed, trained, batch, microbatch_rows)
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(terms.weight.sum(), 1e-30), grads)
        value, metrics = losses.reduce(terms)
        grads = _shard_like_params(grads, trained, config, mesh)
        grad_norm = optax.tree.norm(grads)

        def apply() -> tuple[Params, Any]:
            updates, opt_state = optimizer.update(grads, state.opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state

        def skip() -> tuple[Params, Any]:
            return trained, state.opt_state

        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        with jax.named_scope("update"):
            updated, opt_state = jax.lax.cond(finite, apply, skip)
        skipped = (~finite).astype(jnp.float32)
        state = replace(state, step=state.step + 1, params=combine(updated, frozen), opt_state=opt_state)
        return state, {"loss": value, "grad_norm": grad_norm, "skipped": skipped, **metrics}

    return train_step


def make_score(
    config: ModelConfig, *, temperature: float = 1.0, microbatch_rows: int = 0, mesh: jax.sharding.Mesh | None = None
) -> Score:
    """A jitted `(params, tokens_BT, segment_BT) -> (logp_BT, entropy_BT, expert_LBTA)` of the learner.

    It runs in the train step's microbatches, so that the first update's ratios are 1 to float32 rounding. Experts are
    ids in the smallest integer type that holds them (`config.expert_id_dtype`), `num_experts` on padding. It takes the
    two arrays that it reads, so one compiled program serves every minibatch, whatever else that holds.
    """

    @jax.jit
    def score(params: Params, tokens_BT: Array, segment_BT: Array) -> tuple[Array, Array, Array]:
        rows = tokens_BT.shape[0]

        def each(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            with jax.named_scope("score"):
                outputs = forward(params, config, *part, temperature=temperature, mesh=mesh)
            expert_LBTA = outputs.routing.expert.astype(expert_id_dtype(config))
            return outputs.logp_BT, outputs.entropy_BT, expert_LBTA

        if microbatch_rows in (0, rows):
            return each((tokens_BT, segment_BT))
        logp, entropy, expert = jax.lax.map(each, _split((tokens_BT, segment_BT), rows // microbatch_rows))
        return _join(logp), _join(entropy), jax.vmap(_join, in_axes=1)(expert)

    return score


def make_steps(
    experiment: Experiment, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[TrainStep, Score]:
    """The train step and the scoring of an experiment, with one temperature and one split into microbatches."""
    shared: dict[str, Any] = {
        "temperature": experiment.sampling.temperature,
        "microbatch_rows": experiment.schedule.microbatch_rows,
        "mesh": mesh,
    }
    objective = make_objective(
        experiment.loss,
        correction=experiment.correction,
        rejection=experiment.rejection,
        reference=experiment.reference,
        regularizers=experiment.regularizers,
        calibration=experiment.calibration,
    )
    replay = experiment.routing_replay
    return (
        make_train_step(experiment.model, objective, optimizer, routing_replay=replay, **shared),
        make_score(experiment.model, **shared),
    )


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: Array,
    segment_BT: Array,
    *,
    temperature: float = 1.0,
    expert_BLTA: Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Outputs:
    """The policy's log-probs, entropies and routing of these tokens; routed to `expert_BLTA` if that is given.

    Logits exist for one chunk of time steps at a time (`LOGIT_BUDGET`) and are recomputed in the backward pass.
    """
    (rows, T), vocabulary, fill = tokens_BT.shape, config.vocab_size, (0, 0)
    if mesh is not None:
        rows, vocabulary = rows // batch_shards(mesh), vocabulary // mesh.shape["tensor"]
        fill = (0, -T % mesh.shape["context"])  # padding, so that the devices of a row have equal chunks of it
    tokens_BT, segment_BT = (jnp.pad(x_BT, ((0, 0), fill)) for x_BT in (tokens_BT, segment_BT))
    forced_LBTA = None
    if expert_BLTA is not None:
        forced_LBTA = jnp.pad(expert_BLTA.astype(jnp.int32).swapaxes(0, 1), ((0, 0), (0, 0), fill, (0, 0)))
    hidden_BTD, routing = transformer.apply(params, config, tokens_BT, segment_BT, forced_LBTA=forced_LBTA, mesh=mesh)
    chunk = max(1, LOGIT_BUDGET // (rows * vocabulary))
    scores = score_tokens(params, hidden_BTD, tokens_BT, temperature=temperature, chunk=chunk, mesh=mesh)
    logp_BT, entropy_BT = (x_BT[:, :T] for x_BT in scores)
    return Outputs(logp_BT, entropy_BT, jax.tree.map(lambda x_LBT: x_LBT[:, :, :T], routing))


def _response_load(batch: Batch, num_experts: int) -> Array | None:
    """`expert_load` of the response tokens of a whole minibatch, if the batch has the experts."""
    if batch.expert_BLTA is None:
        return None
    expert_BLTA = jnp.where(batch.mask_BT[:, None, :, None], batch.expert_BLTA, num_experts)
    return expert_load(expert_BLTA.swapaxes(0, 1), num_experts)


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


def _shard_like_params(grads: Params, trained: Params, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> Params:
    """The gradients, sharded as the parameters are.

    Otherwise the partitioner may shard a small parameter differently, and the next step would be compiled again.
    """
    return jax.tree.map(lambda grad, axes: constrain(grad, mesh, *axes), grads, trained_axes(config, trained))


def _split(tree: Any, parts: int) -> Any:
    """`[B, ...]` leaves to `[M, B / M, ...]`, part m holding the rows m, m + M, ..."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def _join(x: Array) -> Array:
    """The inverse of `_split` for one array."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
