"""One optimiser update, and the learner's own log-probs that its ratios start from.

The loss of a minibatch is Σ value / Σ weight over its rows. Each microbatch differentiates its Σ value; the gradients
are summed and divided once, so every split gives the same update.

The first update of a rollout batch needs no old log-probs: they are those that it computes itself (`on_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspax import losses, unstable
from gspax.config import (
    Guard,
    ModelConfig,
    expert_id_dtype,
    has_experts,
)
from gspax.errors import UserError
from gspax.learner.adapters import trained_axes
from gspax.learner.expert_load import expert_counts, expert_load
from gspax.learner.forward import forward, pad_rows
from gspax.learner.microbatches import count_held, run_microbatches
from gspax.learner.objective import Objective, Outputs, UpdateConstants, router_logp
from gspax.learner.replicas import sum_over_replicas
from gspax.model import transformer
from gspax.model.low_rank import combine, partition
from gspax.model.moe import exchanges_rows
from gspax.parallel.sharding import batch_shards, constrain, replica_axes
from gspax.types import Array, Batch, Params, TrainState


class Scores(NamedTuple):
    """What a pass over a minibatch shows of the policy."""

    logp_BT: Array  # float32
    entropy_BT: Array  # float32
    expert_BLTA: Array | None = None  # as in `Batch`
    router_logp_BLTA: Array | None = None  # as in `Batch`
    count_LE: Array | None = None  # int32  tokens that each layer sent to each expert
    fallbacks: Array | None = None  # int32  exchanges of rows, a layer's of a microbatch, that fell back to the ring


Scalars = dict[str, Array]  # float32 scalars by the name of their metric
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Scalars]]
Update = Callable[[TrainState, Batch, bool], tuple[TrainState, Scalars, Scores]]  # see `make_update`
Score = Callable[[Params, Array, Array, Array, Array | None, Array | None], Scores]  # see `make_score`
Route = Callable[[Params, Array, Array, Array | None], Array]  # see `make_route`

# (state, batch, on_policy) -> the gradient of the loss, the loss's terms of every row, the scores; see `make_gradient`
Gradient = Callable[[TrainState, Batch, bool | Array], tuple[Params, losses.Terms, Scores]]

NO_LIMITS = Guard()
ROUTED_ROWS = 8  # of a minibatch, for the share of expert choices that a step's updates change


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that the learner's compiled functions share."""

    config: ModelConfig
    mesh: jax.sharding.Mesh  # that the arrays are sharded over
    temperature: float = 1.0  # the sampler's; log-probs are of the logits divided by it
    microbatch_rows: int = 0  # rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once
    # Rows are packed (`packing`): advantages are [B, T], and microbatches without a token are not run. Their number may
    # change without a new compilation.
    packed: bool = False
    worst_case: bool = False  # run every microbatch and every position, so that each loop has a known length
    # Each token goes to the experts in `batch.expert_BLTA`, with the current router's gates (Routing Replay, arXiv
    # 2507.18071).
    routing_replay: bool = False


def make_train_step(settings: StepSettings, objective: Objective, optimizer: optax.GradientTransformation) -> TrainStep:
    """A pure, jitted `(state, batch) -> (state, metrics)`, as `make_update`; the state argument is donated."""
    update = _update(settings, objective, optimizer, NO_LIMITS)

    @partial(jax.jit, donate_argnums=0, compiler_options=unstable.light_compilation(settings.mesh))
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Scalars]:
        return update(state, batch, False)[:2]

    return train_step


def make_update(
    settings: StepSettings,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    guard: Guard = NO_LIMITS,
) -> Update:
    """A pure, jitted `(state, batch, on_policy) -> (state, metrics, scores)`; the state argument is donated.

    With `on_policy` the batch's old log-probs are not read: the old log-probs are the policy's own before the update,
    without a gradient, so that every ratio is exactly 1 and its gradient that of log π. The scores are those of the
    policy before the update, with the experts' counts. One compiled program serves both.

    An update whose loss or gradient is not finite, or beyond a limit, is skipped: parameters and optimizer state stay
    as they are, bit for bit, and `state.step` counts it. An update without a response token changes nothing either,
    and is `empty` instead of skipped.

    The metrics are float32 scalars: the objective's own, `loss`, `grad_norm` (before clipping), `skipped` and `empty`,
    0 or 1, and with experts that are sharded over devices `ring_fallbacks`, see `Scores`.

    Args:
      objective: the function to minimize, such as `make_objective(losses.gspo)`.
      guard: limits of the gradient norm and of the policy ratio.
    """
    update = _update(settings, objective, optimizer, guard)
    return jax.jit(update, donate_argnums=0, compiler_options=unstable.light_compilation(settings.mesh))


def _update(
    settings: StepSettings, objective: Objective, optimizer: optax.GradientTransformation, guard: Guard
) -> Callable[[TrainState, Batch, bool | Array], tuple[TrainState, Scalars, Scores]]:
    """The function that `make_update` compiles."""
    gradient = make_gradient(settings, objective)
    exchanges = has_experts(settings.config) and exchanges_rows(settings.mesh)

    def update(state: TrainState, batch: Batch, on_policy: bool | Array) -> tuple[TrainState, Scalars, Scores]:
        grads, terms, scores = gradient(state, batch, on_policy)
        trained, frozen = partition(state.params)
        value, metrics = losses.reduce(terms)
        grad_norm = optax.tree.norm(grads)

        def apply() -> tuple[Params, Any]:
            updates, opt_state = optimizer.update(grads, state.opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state

        def skip() -> tuple[Params, Any]:
            return trained, state.opt_state

        healthy, empty = is_healthy(guard, value, grad_norm, metrics), ~batch.mask_BT.any()
        with jax.named_scope("update"):
            updated, opt_state = jax.lax.cond(healthy & ~empty, apply, skip)
        state = replace(state, step=state.step + 1, params=combine(updated, frozen), opt_state=opt_state)
        flags = {"skipped": ~healthy & ~empty, "empty": empty}
        own = {"loss": value, "grad_norm": grad_norm} | {name: jnp.float32(flag) for name, flag in flags.items()}
        if exchanges:
            own["ring_fallbacks"] = jnp.float32(scores.fallbacks)
        return state, {**own, **metrics}, scores

    return update


def is_healthy(guard: Guard, loss: Array, grad_norm: Array, metrics: Scalars) -> Array:
    """Whether an update is finite and within the guard's limits; a bool."""
    healthy = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if guard.max_grad_norm:
        healthy &= grad_norm <= guard.max_grad_norm
    if guard.max_ratio:
        if (largest := largest_ratio(metrics)) is None:
            raise UserError("guard.max_ratio: wanted a loss with the metric ratio_max, the experiment's has none")
        healthy &= largest <= guard.max_ratio
    return healthy


def largest_ratio(metrics: Scalars) -> Array | None:
    """The largest ratio: of a token, or of a sequence if the loss has that; None if it is not reported."""
    return metrics.get("token_ratio_max", metrics.get("ratio_max"))


def make_gradient(settings: StepSettings, objective: Objective) -> Gradient:
    """The gradient that `make_update` applies, not compiled."""
    config, mesh, microbatch_rows = settings.config, settings.mesh, settings.microbatch_rows
    replicas = math.prod(mesh.shape[axis] for axis in replica_axes(mesh))

    def outputs_of(params: Params, batch: Batch, mesh: jax.sharding.Mesh) -> Outputs:
        if settings.routing_replay and batch.expert_BLTA is None:
            raise ValueError("batch.expert_BLTA: wanted the experts to replay, got None")
        replayed = batch.expert_BLTA if settings.routing_replay else None
        return forward(
            params,
            config,
            batch.tokens_BT,
            batch.segment_BT,
            temperature=settings.temperature,
            mask_BT=None if settings.worst_case else batch.mask_BT,
            expert_BLTA=replayed,
            prefix_BT=batch.prefix_BT,
            mesh=mesh,
        )

    def local(
        mesh: jax.sharding.Mesh,
        batch: Batch,
        params: Params,
        constants: UpdateConstants,
        on_policy: bool | Array,
        count: Array | None,
    ) -> tuple[Any, Any]:
        """From the rows of one replica: gradient and experts' counts, summed, and terms and scores by row."""
        trained, frozen = partition(params)

        def summed(trained: Params, part: Batch) -> tuple[Array, Any]:
            outputs = outputs_of(combine(trained, frozen), part, mesh)
            with jax.named_scope("loss"):
                own_BT = jax.lax.stop_gradient(outputs.logp_BT)
                part = replace(part, old_logp_BT=jnp.where(on_policy, own_BT, part.old_logp_BT))
                terms = objective(outputs, part, constants)
            counts = expert_counts(outputs.routing.expert, config.num_experts), jnp.sum(outputs.routing.fell_back)
            return terms.value.sum(), (terms, Scores(outputs.logp_BT, outputs.entropy_BT), counts)

        def of_part(part: Batch) -> tuple[Any, Any]:
            grads, (terms, scores, counts) = jax.grad(summed, has_aux=True)(trained, part)
            return (grads, counts), (terms, scores)

        return run_microbatches(of_part, batch, microbatch_rows // replicas, count)

    def gradient(state: TrainState, batch: Batch, on_policy: bool | Array) -> tuple[Params, losses.Terms, Scores]:
        constants = UpdateConstants(state.clip_range, _response_load(batch, config.num_experts), state.step)
        count = count_held(batch.segment_BT, microbatch_rows) if settings.packed and not settings.worst_case else None
        shared = state.params, constants, on_policy, count
        (grads, counts), (terms, scores) = sum_over_replicas(local, batch, *shared, mesh=mesh)
        count_LE, fallbacks = counts[0], counts[1] // replicas  # which all fall back at once
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(terms.weight.sum(), 1e-30), grads)
        grads = _shard_like_params(grads, partition(state.params)[0], config, mesh)
        return grads, terms, scores._replace(count_LE=count_LE, fallbacks=fallbacks)

    return gradient


def make_score(settings: StepSettings, *, keep_experts: bool = False, keep_router_logp: bool = False) -> Score:
    """A jitted `(params, tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT) -> Scores`.

    With `expert_BLTA`, not None, the tokens go to these experts. `keep_experts` and `keep_router_logp` return the
    experts that they went to, and the router's log-probabilities of them.

    It runs in the update's microbatches, so that ratios between the two differ from 1 by float32 rounding alone.
    Experts are ids in the smallest integer type that holds them (`config.expert_id_dtype`), `num_experts` on padding.
    It takes the arrays that it reads, so one compiled program serves every minibatch, whatever else that holds.
    """
    config, mesh, microbatch_rows = settings.config, settings.mesh, settings.microbatch_rows

    @partial(jax.jit, compiler_options=unstable.light_compilation(mesh))
    def score(
        params: Params,
        tokens_BT: Array,
        segment_BT: Array,
        mask_BT: Array,
        expert_BLTA: Array | None = None,
        prefix_BT: Array | None = None,
    ) -> Scores:
        def each(part: tuple[Array, Array, Array, Array | None, Array | None]) -> tuple[tuple[()], Scores]:
            tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT = part
            with jax.named_scope("score"):
                outputs = forward(
                    params,
                    config,
                    tokens_BT,
                    segment_BT,
                    temperature=settings.temperature,
                    mask_BT=None if settings.worst_case else mask_BT,
                    expert_BLTA=expert_BLTA,
                    prefix_BT=prefix_BT,
                    mesh=mesh,
                )
            went_BLTA = outputs.routing.expert.swapaxes(0, 1)
            return (), Scores(
                outputs.logp_BT,
                outputs.entropy_BT,
                went_BLTA.astype(expert_id_dtype(config)) if keep_experts else None,
                router_logp(outputs.routing, went_BLTA) if keep_router_logp else None,
            )

        count = count_held(segment_BT, microbatch_rows) if settings.packed and not settings.worst_case else None
        arrays = tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT
        return run_microbatches(each, arrays, microbatch_rows, count)[1]

    return score


def make_route(config: ModelConfig, mesh: jax.sharding.Mesh) -> Route:
    """A jitted `(params, tokens_BT, segment_BT, prefix_BT) -> expert_LBTA`: the experts that some of the rows choose.

    There are `ROUTED_ROWS` of them, or one for each device that rows are sharded over if those are more; each device
    keeps its own. No log-probs are computed.
    """
    shards = batch_shards(mesh)

    @partial(jax.jit, compiler_options=unstable.fast_compilation(mesh))
    def route(params: Params, tokens_BT: Array, segment_BT: Array, prefix_BT: Array | None = None) -> Array:
        def some(x_BT: Array) -> Array:
            T = x_BT.shape[1]
            return x_BT.reshape(shards, -1, T)[:, : max(1, ROUTED_ROWS // shards)].reshape(-1, T)

        rows = jax.tree.map(some, (tokens_BT, segment_BT, prefix_BT))
        tokens_BT, segment_BT, prefix_BT = pad_rows(rows, mesh)
        return transformer.apply(params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, mesh=mesh)[1].expert

    return route


def _response_load(batch: Batch, num_experts: int) -> Array | None:
    """`expert_load` of the response tokens of a whole minibatch, if the batch has the experts."""
    if batch.expert_BLTA is None:
        return None
    expert_BLTA = jnp.where(batch.mask_BT[:, None, :, None], batch.expert_BLTA, num_experts)
    return expert_load(expert_BLTA.swapaxes(0, 1), num_experts)


def _shard_like_params(grads: Params, trained: Params, config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """The gradients, sharded as the parameters are.

    Otherwise the partitioner may shard a small parameter differently, and the next step would be compiled again.
    """
    return jax.tree.map(lambda grad, axes: constrain(grad, mesh, *axes), grads, trained_axes(config, trained))
