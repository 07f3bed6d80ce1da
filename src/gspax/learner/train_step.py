"""Compiles one optimizer update, and the pass that computes the old log-probs for its ratios.

The loss of a minibatch is Σ value / Σ weight over its rows. Each microbatch differentiates its Σ value; the gradients
are summed and divided once, so every split gives the same update. Microbatch m of M has the rows m, m + M, ..., so that
every device keeps its own rows.

The first update of a rollout needs no old log-probs: it uses the log-probs that it computes itself (`on_policy`).

Left to the partitioner, each microbatch's gradient is added up over all devices with different rows. Over the axes
that parameters are sharded over this is necessary, since no device has room for more than its part. Over the others,
slices of a TPU or copies of the model (`sharding.replica_axes`), each adds up its own microbatches, and the sums are
added once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gspax import losses, unstable
from gspax.config import Guard, Regularizers, expert_id_dtype, has_experts
from gspax.config.term import Compare, Comparison
from gspax.errors import UserError
from gspax.learner.adapters import trained_axes
from gspax.learner.forward import NO_OTHERS, Inputs, OtherRows, StepSettings, forward
from gspax.learner.metrics import expert_counts, expert_load
from gspax.learner.objective import Objective, Scores, UpdateConstants, router_logp
from gspax.learner.optimizer import balancing_steps, update_if
from gspax.losses import sequences
from gspax.losses.proximal import interpolated_logp
from gspax.losses.regularizers import next_coefficient
from gspax.model.low_rank import combine, partition
from gspax.model.moe import exchanges_rows
from gspax.model.transformer import head_params
from gspax.parallel.sharding import constrain, replica_axes, within_replica
from gspax.types import Array, Batch, Params, PyTree, TrainState, known, segment_ids

Scalars = dict[str, Array]  # float32 scalars by the name of their metric
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Scalars]]
Update = Callable[..., tuple[TrainState, Scalars, Scores]]  # see `make_update`
Score = Callable[..., Scores]  # see `make_score`

# (state, batch, on_policy, other_heads) -> the gradient of the loss, the loss's terms of every row, the scores
Gradient = Callable[..., tuple[Params, losses.Terms, Scores]]

NO_LIMITS = Guard()
NO_REGULARIZERS = Regularizers()


def make_train_step(settings: StepSettings, objective: Objective, optimizer: optax.GradientTransformation) -> TrainStep:
    """Make a pure, jitted `(state, batch) -> (state, metrics)`, as `make_update`; the state argument is donated."""
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
    regularizers: Regularizers = NO_REGULARIZERS,
) -> Update:
    """Make a pure, jitted `(state, batch, on_policy, other_heads) -> (state, metrics, scores)`; the state is donated.

    `other_heads` has the parameters that `transformer.head` reads, of each other model whose logits
    `settings.comparison` takes.

    With `on_policy` the batch's old log-probs are not read: the old log-probs are the policy's own before the update,
    without a gradient, so that every ratio is exactly 1 and its gradient that of log π. The scores are those of the
    policy before the update, with the experts' counts. One compiled program serves both (`fill_old_logp`).

    An update whose loss or gradient is not finite, or beyond a limit, is skipped: parameters and optimizer state stay
    as they are, bit for bit, and `state.step` counts it. An update without a response token changes nothing either,
    and is `empty` instead of skipped.

    The metrics are float32 scalars: the objective's own, `loss`, `grad_norm` (before clipping), `skipped` and `empty`,
    0 or 1, and with experts that are sharded over devices `ring_fallbacks`, see `Scores`.

    Args:
      objective: the function to minimize, such as `make_objective(losses.gspo)`.
      guard: limits of the gradient norm and of the policy ratio.
      regularizers: `adaptive_entropy` adapts the coefficient of the objective's entropy bonus, in `state.adapted`, by
        the entropy of the whole minibatch; it is the metric `entropy_coefficient`.
    """
    update = _update(settings, objective, optimizer, guard, regularizers)
    return jax.jit(update, donate_argnums=0, compiler_options=unstable.light_compilation(settings.mesh))


def fill_old_logp(batch: Batch) -> tuple[Batch, bool]:
    """Return a batch for the compiled update, and `on_policy`: True if the batch has no old log-probs yet.

    The update is compiled for a batch that has them. NaN stands in for those that are missing, so that a use shows.
    """
    if batch.old_logp_BT is not None:
        return batch, False
    return replace(batch, old_logp_BT=jnp.full_like(batch.tokens_BT, jnp.nan, jnp.float32)), True


def _update(
    settings: StepSettings,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    guard: Guard,
    regularizers: Regularizers = NO_REGULARIZERS,
) -> Callable[..., tuple[TrainState, Scalars, Scores]]:
    """Make the function that `make_update` compiles."""
    gradient = make_gradient(settings, objective)
    exchanges = has_experts(settings.config) and exchanges_rows(settings.mesh)

    def update(
        state: TrainState, batch: Batch, on_policy: bool | Array, other_heads: tuple[Params, ...] = ()
    ) -> tuple[TrainState, Scalars, Scores]:
        grads, terms, scores = gradient(state, batch, on_policy, other_heads)
        trained, frozen = partition(state.params)
        value, metrics = losses.reduce(terms)
        grad_norm = optax.tree.norm(grads)

        healthy, empty = is_healthy(guard, value, grad_norm, metrics), ~batch.mask_BT.any()
        if settings.bias_update_speed and scores.count_LE is not None:
            grads = balancing_steps(grads, scores.count_LE, settings.config, settings.bias_update_speed)
        with jax.named_scope("update"):
            updated, opt_state = update_if(healthy & ~empty, optimizer, grads, state.opt_state, trained)
        if (adaptive_entropy := regularizers.adaptive_entropy) is not None:
            before = metrics["entropy_coefficient"] = state.adapted.entropy
            adapted = next_coefficient(before, metrics["entropy_bonus"], **vars(adaptive_entropy))
            adapted = constrain(jnp.where(healthy & ~empty, adapted, before), settings.mesh)
            state = replace(state, adapted=state.adapted._replace(entropy=adapted))
        state = replace(state, step=state.step + 1, params=combine(updated, frozen), opt_state=opt_state)
        flags = {"skipped": ~healthy & ~empty, "empty": empty}
        if exchanges and scores.fallbacks is not None:
            flags["ring_fallbacks"] = scores.fallbacks
        counts = {name: jnp.float32(flag) for name, flag in flags.items()}
        return state, {"loss": value, "grad_norm": grad_norm, **counts, **metrics}, scores

    return update


def is_healthy(guard: Guard, loss: Array, grad_norm: Array, metrics: Scalars) -> Array:
    """Return whether an update is finite and within the guard's limits, a bool array."""
    healthy = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if guard.max_grad_norm:
        healthy &= grad_norm <= guard.max_grad_norm
    if guard.max_ratio:
        if (largest := largest_ratio(metrics)) is None:
            raise UserError("guard.max_ratio: wanted a loss with the metric ratio_max, the experiment's has none")
        healthy &= largest <= guard.max_ratio
    return healthy


def largest_ratio(metrics: Scalars) -> Array | None:
    """Return the largest ratio of a token, or of a sequence for losses of sequence ratios; None if not reported."""
    return metrics.get("token_ratio_max", metrics.get("ratio_max"))


def make_gradient(settings: StepSettings, objective: Objective) -> Gradient:
    """Make the gradient function that `make_update` applies, not compiled."""
    config, mesh, microbatch_rows = settings.config, settings.mesh, settings.microbatch_rows
    replicas = math.prod(mesh.shape[axis] for axis in replica_axes(mesh))

    def of_replica(
        mesh: jax.sharding.Mesh,
        batch: Batch,
        params: Params,
        constants: UpdateConstants,
        on_policy: bool | Array,
        count: Array | None,
    ) -> tuple[PyTree, tuple[losses.Terms, Scores]]:
        """Compute sums over one replica's rows (gradient, tokens by expert, fallbacks), and terms and scores by row."""
        trained, frozen = partition(params)
        on_mesh = replace(settings, mesh=mesh)

        def loss_sum(trained: Params, added_BT: Array, part: Batch) -> tuple[Array, PyTree]:
            """Compute Σ value. `added_BT` is 0: the gradient by it is the one by the log-probs."""
            expert_BLTA = known(part, "expert_BLTA") if settings.routing_replay else None
            rows = Inputs(part.tokens_BT, part.segment_BT, part.mask_BT, expert_BLTA, part.prefix_BT, part.kept_BTK)
            outputs = forward(combine(trained, frozen), on_mesh, rows, _others(settings, part, constants))
            outputs = outputs._replace(logp_BT=outputs.logp_BT + added_BT)
            with jax.named_scope("loss"):
                part = _with_old_logp(part, outputs.logp_BT, on_policy, constants.updates, settings.updates_per_rollout)
                terms = objective(outputs, part, constants)
            by_expert = _count_choices(outputs.routing.expert, part.mask_BT, config.num_experts)
            counts = by_expert, jnp.sum(outputs.routing.fell_back)
            return terms.value.sum(), (terms, Scores(outputs.logp_BT, outputs.entropy_BT), counts)

        def of_microbatch(part: Batch) -> tuple[PyTree, tuple[losses.Terms, Scores]]:
            added_BT = jnp.zeros_like(part.tokens_BT, jnp.float32)
            differentiate = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)
            (grads, by_logp_BT), (terms, scores, counts) = differentiate(trained, added_BT, part)
            metrics = terms.metrics | gradient_metrics(by_logp_BT, part)
            return (grads, counts), (terms._replace(metrics=metrics), scores)

        return run_microbatches(of_microbatch, batch, microbatch_rows // replicas, count)

    def gradient(
        state: TrainState, batch: Batch, on_policy: bool | Array, other_heads: tuple[Params, ...] = ()
    ) -> tuple[Params, losses.Terms, Scores]:
        load_LE, head = _response_load(batch, config.num_experts), other_heads or _kept_head(settings, state)
        constants = UpdateConstants(state.adapted, load_LE, state.step, head)
        shared = state.params, constants, on_policy, count_held(settings, batch.segment_BT)
        (grads, ((count_LE, response_LE), fallbacks)), (terms, scores) = sum_over_replicas(
            of_replica, batch, *shared, mesh=mesh
        )
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(terms.weight.sum(), 1e-30), grads)
        # Otherwise the partitioner may shard a small parameter differently, and the next step would be compiled again.
        axes = trained_axes(config, partition(state.params)[0])
        grads = jax.tree.map(lambda grad, names: constrain(grad, mesh, *names), grads, axes)
        fallbacks = fallbacks // replicas  # all fall back at once
        return grads, terms, scores._replace(count_LE=count_LE, response_LE=response_LE, fallbacks=fallbacks)

    return gradient


def _count_choices(expert_LBTA: Array, mask_BT: Array, num_experts: int) -> tuple[Array, Array]:
    """Compute `expert_counts` of all tokens, and of the response tokens."""
    of_responses_LBTA = jnp.where(mask_BT[None, :, :, None], expert_LBTA, num_experts)
    return expert_counts(expert_LBTA, num_experts), expert_counts(of_responses_LBTA, num_experts)


def gradient_metrics(gradient_BT: Array, batch: Batch) -> losses.Metrics:
    """Measure how much each sequence, or row of demonstrations, moves the policy: Σ_t |∂L/∂log π_t| over its tokens."""
    mask_BT, ids = batch.mask_BT, None if batch.advantage is None else segment_ids(batch)
    moved_BS = sequences.total(jnp.abs(gradient_BT), mask_BT, ids)
    return {"gradient": losses.Evenness(moved_BS, sequences.count(mask_BT, ids) > 0)}


def _with_old_logp(
    batch: Batch, logp_BT: Array, on_policy: bool | Array, updates: Array | int, updates_per_rollout: int
) -> Batch:
    """Set the old log-probs that depend on the policy's own: interpolated ones, and on policy, where they are equal."""
    if batch.version_BT is not None:
        return interpolate_old_logp(batch, logp_BT, updates, updates_per_rollout)
    if batch.old_logp_BT is None:
        return batch
    return replace(batch, old_logp_BT=jnp.where(on_policy, jax.lax.stop_gradient(logp_BT), batch.old_logp_BT))


def interpolate_old_logp(batch: Batch, logp_BT: Array, updates: Array | int, updates_per_rollout: int) -> Batch:
    """Set the old log-probs between the sampler's and the policy's (`losses.proximal`)."""
    rollouts, done = updates // updates_per_rollout, updates % updates_per_rollout
    age_BT = jnp.maximum(rollouts - known(batch, "version_BT"), 0)
    sampler_logp_BT, progress = known(batch, "sampler_logp_BT"), done / updates_per_rollout
    return replace(batch, old_logp_BT=interpolated_logp(logp_BT, sampler_logp_BT, age_BT, progress))


def _kept_head(settings: StepSettings, state: TrainState) -> tuple[Params, ...]:
    """Return the head of another model that the state holds, if updates compare its logits."""
    kept = None if settings.comparison is None else settings.comparison.kept
    return () if kept is None else (head_params(kept(state)),)


def _others(settings: StepSettings, part: Batch, constants: UpdateConstants) -> OtherRows:
    """Return the heads and hidden states of the other models whose logits are compared."""
    hidden = None if settings.comparison is None else settings.comparison.hidden
    return NO_OTHERS if hidden is None else OtherRows(constants.other_heads, *hidden(part))


def make_score(
    settings: StepSettings,
    *,
    keep_experts: bool = False,
    keep_router_logp: bool = False,
    measure: Compare | None = None,
) -> Score:
    """Make a jitted `(params, tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT, *, kept_BTK) -> Scores`.

    With `expert_BLTA`, not None, the tokens go to these experts; with `kept_BTK` all values are over these of the
    vocabulary. `keep_experts` and `keep_router_logp` return the experts that they went to, and the router's
    log-probabilities of them, and `measure` what it computes of each token (`Term.measure`).

    It runs in the update's microbatches, so that ratios between the two differ from 1 by float32 rounding alone.
    Experts are ids in the smallest integer type that holds them (`config.expert_id_dtype`), `num_experts` on padding.
    It takes the arrays that it reads, so one compiled program serves every minibatch, whatever else that holds.
    """
    alone = None if measure is None else Comparison(measure)
    settings = replace(settings, comparison=alone)

    @partial(jax.jit, compiler_options=unstable.light_compilation(settings.mesh))
    def score(
        params: Params,
        tokens_BT: Array,
        segment_BT: Array,
        mask_BT: Array,
        expert_BLTA: Array | None = None,
        prefix_BT: Array | None = None,
        *,
        kept_BTK: Array | None = None,
    ) -> Scores:
        def of_microbatch(part: PyTree) -> tuple[tuple[()], Scores]:
            with jax.named_scope("score"):
                logp_BT, entropy_BT, routing, measured_BT = forward(params, settings, Inputs(**part))
            expert_BLTA = routing.expert.swapaxes(0, 1)
            return (), Scores(
                logp_BT,
                entropy_BT,
                expert_BLTA.astype(expert_id_dtype(settings.config)) if keep_experts else None,
                router_logp(routing, expert_BLTA, settings.config.router) if keep_router_logp else None,
                measured_BT,
            )

        arrays: dict[str, Array | None] = {"tokens_BT": tokens_BT, "segment_BT": segment_BT, "mask_BT": mask_BT}
        arrays |= {"expert_BLTA": expert_BLTA, "prefix_BT": prefix_BT, "kept_BTK": kept_BTK}
        return run_microbatches(of_microbatch, arrays, settings.microbatch_rows, count_held(settings, segment_BT))[1]

    return score


def _response_load(batch: Batch, num_experts: int) -> Array | None:
    """Compute `expert_load` of a whole minibatch's response tokens, if the batch has the experts."""
    if batch.expert_BLTA is None:
        return None
    expert_BLTA = jnp.where(batch.mask_BT[:, None, :, None], batch.expert_BLTA, num_experts)
    return expert_load(expert_BLTA.swapaxes(0, 1), num_experts)


Part = TypeVar("Part")  # a tree of arrays [B, ...]
Sums = TypeVar("Sums")  # a tree of arrays to add up
Rows = TypeVar("Rows")  # a tree of arrays with a row for each of a part's


def run_microbatches(
    compute: Callable[[Part], tuple[Sums, Rows]], batch: Part, rows: int, count: Array | None = None
) -> tuple[Sums, Rows]:
    """Call `compute` on every microbatch; add up its first results in float32, and join the rows of its second results.

    Args:
      rows: the rows of a microbatch; 0: all rows.
      count: the number of microbatches to run, the first ones; the results of the others are zeros. None: all.

    Raises:
      ValueError: `rows` does not divide B.
    """
    total = jax.tree.leaves(batch)[0].shape[0]
    if rows in (0, total):
        return compute(batch)
    if total % rows:
        raise ValueError(f"microbatch_rows must divide the batch's {total} rows, got {rows}")
    M = total // rows
    parts = jax.tree.map(partial(_split, parts=M), batch)
    sums, by_row = jax.eval_shape(compute, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(_zeros, sums)

    def add(sums: Sums, part: Part) -> tuple[Sums, Rows]:
        more, by_row = compute(part)
        return jax.tree.map(jnp.add, sums, more), by_row

    if count is None:
        sums, by_row = jax.lax.scan(add, start, parts)
        return sums, jax.tree.map(_join, by_row)

    def step(m: Array, carry: tuple[Sums, Rows]) -> tuple[Sums, Rows]:
        sums, by_row = carry
        sums, now = add(sums, jax.tree.map(lambda x: x[m], parts))
        return sums, jax.tree.map(lambda of_all, x: of_all.at[m].set(x), by_row, now)

    empty = jax.tree.map(lambda like: jnp.zeros((M, *like.shape), like.dtype), by_row)
    sums, by_row = jax.lax.fori_loop(0, count, step, (start, empty))
    return sums, jax.tree.map(_join, by_row)


def count_held(settings: StepSettings, segment_BT: Array) -> Array | None:
    """Count the microbatches that hold a token, int32, if only these are to be run; None: all are run."""
    if not settings.packed or settings.worst_case:
        return None
    rows = settings.microbatch_rows or segment_BT.shape[0]
    return (_split(segment_BT, segment_BT.shape[0] // rows) > 0).any(axis=(1, 2)).sum(dtype=jnp.int32)


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Return zeros for a sum."""
    return jnp.zeros(like.shape, _sum_dtype(like.dtype))


def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of a sum: sums of floats are float32 whatever the dtype of the terms."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _split(x: Array, parts: int) -> Array:
    """Split `[B, ...]` into `[M, B / M, ...]`; part m holds the rows m, m + M, ..."""
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)


def _join(x: Array) -> Array:
    """Invert `_split`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _sum_over(axes: tuple[str, ...], x: Array) -> Array:
    """Add up x over mesh axes. At a sum in 16 bits XLA aborts on a CPU (jax 0.10)."""
    return jax.lax.psum(x.astype(_sum_dtype(x.dtype)), axes).astype(x.dtype)


def sum_over_replicas(
    of_replica: Callable[..., tuple[Sums, Rows]], batch: Part, *shared: PyTree, mesh: jax.sharding.Mesh
) -> tuple[Sums, Rows]:
    """Call `of_replica(mesh, batch, *shared)` on each replica, for its rows of the batch, and add up the sums.

    Args:
      of_replica: (the mesh of a replica, its rows, *shared) -> (sums, rows).
      shared: trees of arrays that all replicas have; `of_replica` may read no other computed array.
    """
    axes = replica_axes(mesh)
    if not axes:
        return of_replica(mesh, batch, *shared)
    inner, everywhere, by_row = within_replica(mesh, axes), PartitionSpec(), PartitionSpec(axes)

    def on_replica(batch: Part, *shared: PyTree) -> tuple[Sums, Rows]:
        sums, rows = of_replica(inner, batch, *shared)
        return jax.tree.map(partial(_sum_over, axes), sums), rows

    return jax.shard_map(
        on_replica,
        mesh=mesh,
        in_specs=(by_row, *[everywhere] * len(shared)),
        out_specs=(everywhere, by_row),
        axis_names=set(axes),
        check_vma=False,  # with the check, the gradient of replicated parameters is added up where it is computed
    )(batch, *shared)
