"""Instruments: what a run measures around the last update of a rollout batch, every few steps (`config.Instruments`).

Some rows of the update's minibatch are run again: by the policy before and after the update, for the experts that they
choose and how surely; in float32 and in bfloat16, for the choices that rounding alone changes; and backwards, for the
angle between the gradient that is applied and the policy gradient on policy in float32. The ratios of the whole
minibatch cost a reduction. Everything stays on the devices until the step's metrics are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspax import losses
from gspax.config import Instruments, ModelConfig, has_experts, is_sparse
from gspax.learner.expert_load import changed_by_layer, router_confidence
from gspax.learner.forward import pad_rows
from gspax.learner.objective import Objective, PolicyLoss, make_objective, segments
from gspax.learner.train_step import Scalars, Scores, StepSettings, Update, make_gradient
from gspax.losses.ratio_spread import fit_exponent, ratio_spread
from gspax.losses.traits import aggregate_of
from gspax.model import transformer
from gspax.model.moe import Routing
from gspax.parallel.sharding import batch_shards
from gspax.types import Array, Batch, Params, TrainState

EXACT = "highest"  # the precision of float32 products; TPUs round their factors to bfloat16 otherwise


class Readings(NamedTuple):
    """What the instruments measured around one update, on the devices."""

    by_layer: dict[str, Any]  # float32 [L]
    gradient: dict[str, Any]  # float32 []
    ratio: dict[str, Any]  # of `ratio_spread`; empty if every ratio is 1 by construction


# (update, state, batch, on_policy) -> what the update returns, and what was measured; see `make_measure`
Measure = Callable[[Update, TrainState, Batch, bool], tuple[TrainState, Scalars, Scores, Readings]]


def make_measure(settings: StepSettings, objective: Objective, loss: PolicyLoss, instruments: Instruments) -> Measure:
    """`update` with the instruments around it; its results are untouched.

    Args:
      objective: that the update minimizes.
      loss: its policy loss; the gradient on policy is aggregated in the same way.
    """
    config, mesh = settings.config, settings.mesh
    compare = make_gradient_comparison(settings, objective, loss)
    spread = jax.jit(ratio_spread)
    take = jax.jit(partial(take_rows, rows=instruments.rows, shards=batch_shards(mesh), adjacent=settings.packed))
    routers = make_router_probe(config, mesh) if has_experts(config) else None
    changed = jax.jit(partial(changed_by_layer, num_experts=config.num_experts))

    def measure(
        update: Update, state: TrainState, batch: Batch, on_policy: bool
    ) -> tuple[TrainState, Scalars, Scores, Readings]:
        rows = take(batch)
        by_layer: dict[str, Array] = {}
        gradient = compare(replace(state, opt_state=None), rows, on_policy)
        if routers is not None:
            before, by_layer = routers.confidence(state.params, rows)
            by_layer |= {"routing/changed_by_rounding": routers.changed_by_rounding(state.params, rows)}
        state, metrics, scores = update(state, batch, on_policy)
        if routers is not None:
            after, _ = routers.confidence(state.params, rows)
            by_layer |= {"routing/changed_by_update": changed(before, after)}
        ratio = {} if on_policy else spread(scores.logp_BT, batch.old_logp_BT, batch.mask_BT, **segments(batch))
        return state, metrics, scores, Readings(by_layer, gradient, ratio)

    return measure


def take_rows(batch: Batch, *, rows: int, shards: int, adjacent: bool) -> Batch:
    """So many rows of a batch, the same number from each device's part; 0: all.

    They are evenly spaced, so that they belong to several prompts, or the first ones of each device (`adjacent`): a
    packed row has several sequences, and the last rows may be empty.
    """

    def some(x: Array) -> Array:
        here = x.shape[0] // shards
        count = min(here, max(1, rows // shards)) if rows else here
        by_device = x.reshape(shards, here, *x.shape[1:])[:, :: 1 if adjacent else here // count]
        return by_device[:, :count].reshape(-1, *x.shape[1:])

    return jax.tree.map(some, batch)


class RouterProbe(NamedTuple):
    """Jitted functions of (parameters, rows)."""

    confidence: Callable[[Params, Batch], tuple[Array, dict[str, Array]]]  # expert_LBTA, `router_confidence` by name
    changed_by_rounding: Callable[[Params, Batch], Array]  # float32 [L]: share of choices, float32 against bfloat16


def make_router_probe(config: ModelConfig, mesh: jax.sharding.Mesh) -> RouterProbe:
    """The routers' choices for the tokens of some rows, prompts included."""

    def route(params: Params, config: ModelConfig, rows: Batch) -> tuple[Routing, Array]:
        tokens_BT, segment_BT, prefix_BT = pad_rows((rows.tokens_BT, rows.segment_BT, rows.prefix_BT), mesh)
        routing = transformer.apply(params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, mesh=mesh)[1]
        return routing, segment_BT > 0

    @jax.jit
    def confidence(params: Params, rows: Batch) -> tuple[Array, dict[str, Array]]:
        routing, valid_BT = route(params, config, rows)
        found = router_confidence(routing.logits, valid_BT, config.num_experts_per_tok)
        return routing.expert, {f"routing/{name}": x_L for name, x_L in found.items()}

    @jax.jit
    def changed_by_rounding(params: Params, rows: Batch) -> Array:
        with jax.default_matmul_precision(EXACT):
            exact, _ = route(to_float32(params), replace(config, dtype="float32"), rows)
        rounded, _ = route(params, replace(config, dtype="bfloat16"), rows)
        return changed_by_layer(exact.expert, rounded.expert, config.num_experts)

    return RouterProbe(confidence, changed_by_rounding)


def make_gradient_comparison(
    settings: StepSettings, objective: Objective, loss: PolicyLoss
) -> Callable[[TrainState, Batch, bool], dict[str, Array]]:
    """A jitted `(state, rows, on_policy) -> {"gradient/cosine", "gradient/norm_ratio"}`, float32 scalars.

    Both compare the gradient of the objective with that of the plain policy gradient on policy, with nothing clipped,
    corrected, penalised or replayed, in float32, of the same rows. 0 if either gradient is 0.
    """
    on_policy_objective = make_objective(
        partial(losses.importance_sampling, aggregate=aggregate_of(loss) or losses.by_sequence)
    )

    @jax.jit
    def compare(state: TrainState, rows: Batch, on_policy: bool | Array) -> dict[str, Array]:
        microbatch_rows = math.gcd(settings.microbatch_rows, rows.tokens_BT.shape[0])
        these = replace(settings, microbatch_rows=microbatch_rows, packed=False, worst_case=False)
        applied = make_gradient(these, objective)(state, rows, on_policy)[0]
        float32 = replace(settings.config, dtype="float32")
        exact = make_gradient(replace(these, config=float32, routing_replay=False), on_policy_objective)
        with jax.default_matmul_precision(EXACT):
            wanted = exact(replace(state, params=to_float32(state.params)), rows, True)[0]
        return compare_trees(applied, wanted)

    return compare


def compare_trees(one: Any, other: Any) -> dict[str, Array]:
    """Cosine of the angle between two trees of arrays, and the norm of the first over that of the second."""

    one, other = to_float32(one), to_float32(other)
    across = optax.tree.sum(jax.tree.map(lambda x, y: x * y, one, other))  # not vdot: it would gather sharded leaves
    norms = optax.tree.norm(one), optax.tree.norm(other)
    both = norms[0] * norms[1]
    return {
        "gradient/cosine": jnp.where(both == 0, 0, across / both),
        "gradient/norm_ratio": jnp.where(both == 0, 0, norms[0] / norms[1]),
    }


def to_float32(tree: Any) -> Any:
    """The tree with its floating-point arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def instrument_metrics(readings: Readings, config: ModelConfig) -> dict[str, float]:
    """The metrics of docs/metrics.md, from readings on the host."""
    sparse = [number for number in range(config.num_hidden_layers) if is_sparse(config, number)]
    metrics = {name: float(value) for name, value in readings.gradient.items()}
    for name, value_L in readings.by_layer.items():
        metrics[name] = float(np.mean(value_L))
        metrics |= {f"{name}/layer_{number}": float(x) for number, x in zip(sparse, value_L, strict=True)}
    return metrics | (ratio_metrics(readings.ratio) if readings.ratio else {})


def ratio_metrics(ratio: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The scalars of `ratio_spread`, the fitted exponent, and the bins of lengths that have two sequences."""
    metrics = {f"ratio/{name}": float(x) for name, x in ratio.items() if not name.startswith("bin_")}
    sequences_K = ratio["bin_sequences"]
    exponent = fit_exponent(ratio["bin_length"], ratio["bin_sequence_std"], sequences_K)
    if not math.isnan(exponent):
        metrics["ratio/length_exponent"] = exponent
    for k in np.flatnonzero(sequences_K >= 2):
        for name in ("sequences", "token_std", "sequence_std"):
            metrics[f"ratio/{name}/length_{2**k}"] = float(ratio[f"bin_{name}"][k])
    return metrics
