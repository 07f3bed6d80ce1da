"""Measures an update: diagnostics around a rollout's last update, every few steps (`config.Diagnostics`).

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspax import losses, unstable
from gspax.config import Diagnostics, ModelConfig, has_experts, sparse_numbers
from gspax.learner.forward import StepSettings, pad_rows
from gspax.learner.metrics import changed_share
from gspax.learner.objective import Objective, PolicyLoss, Scores, make_objective
from gspax.learner.train_step import Scalars, Update, make_gradient
from gspax.losses.ratio_spread import fit_exponent, ratio_spread
from gspax.losses.traits import aggregate_of
from gspax.model import transformer
from gspax.model.moe import Routing
from gspax.model.router_scores import softmax_logits
from gspax.parallel.sharding import batch_shards
from gspax.types import Array, Batch, Params, PyTree, TrainState, segment_ids

EXACT = "highest"  # the precision of float32 products; TPUs round their factors to bfloat16 otherwise
ROUTED_ROWS = 8  # of a minibatch, for the share of expert choices that a step's updates change

Route = Callable[[Params, Array, Array, Array | None], Array]  # see `make_route`


class Readings(NamedTuple):
    """The measurements around one update."""

    by_layer: Mapping[str, Array]  # float32 [L]
    gradient: Mapping[str, Array]  # float32 []
    ratio: Mapping[str, Array]  # of `ratio_spread`; empty if every ratio is 1 by construction


# (update, state, batch, on_policy, other_heads) -> the result of the update, and readings; see `make_measure`
Measure = Callable[..., tuple[TrainState, Scalars, Scores, Readings]]


def measure_nothing(
    update: Update, state: TrainState, batch: Batch, on_policy: bool, other_heads: tuple[Params, ...] = ()
) -> tuple[TrainState, Scalars, Scores, Readings]:
    """Run `update` without diagnostics."""
    return *update(state, batch, on_policy), Readings({}, {}, {})


def make_measure(settings: StepSettings, objective: Objective, loss: PolicyLoss, diagnostics: Diagnostics) -> Measure:
    """Make a function that runs `update` with the diagnostics around it; the update's results are unchanged.

    Args:
      objective: the function that the update minimizes.
      loss: the objective's policy loss; the gradient on policy is aggregated in the same way.
    """
    config, shards = settings.config, batch_shards(settings.mesh)
    compare = make_gradient_comparison(settings, objective, loss)
    spread = jax.jit(ratio_spread)
    take = jax.jit(partial(take_rows, rows=diagnostics.rows, shards=shards, adjacent=settings.packed))
    confidence = jax.jit(partial(measure_confidence, settings))
    changed_by_rounding = jax.jit(partial(measure_rounding, settings))
    changed = jax.jit(partial(changed_by_layer, num_experts=config.num_experts))

    def measure(
        update: Update,
        state: TrainState,
        batch: Batch,
        on_policy: bool,
        other_heads: tuple[Params, ...] = (),
    ) -> tuple[TrainState, Scalars, Scores, Readings]:
        rows = take(batch)
        by_layer: dict[str, Array] = {}
        gradient = compare(replace(state, opt_state=None), rows, on_policy, other_heads)
        if has_experts(config):
            before, by_layer = confidence(state.params, rows)
            by_layer |= {"routing/changed_by_rounding": changed_by_rounding(state.params, rows)}
        state, metrics, scores = update(state, batch, on_policy)
        if has_experts(config):
            after, _ = confidence(state.params, rows)
            by_layer |= {"routing/changed_by_update": changed(before, after)}
        ratio = {} if on_policy else spread(scores.logp_BT, batch.old_logp_BT, batch.mask_BT, segment_ids(batch))
        return state, metrics, scores, Readings(by_layer, gradient, ratio)

    return measure


def take_rows(batch: PyTree, *, rows: int, shards: int, adjacent: bool) -> PyTree:
    """Reduce the first axis of arrays to `rows` rows, the same number from each device's shard; 0: all.

    They are evenly spaced, so that they belong to several prompts, or the first ones of each device (`adjacent`): a
    packed row has several sequences, and the last rows may be empty.
    """

    def some(x: Array) -> Array:
        here = x.shape[0] // shards
        count = min(here, max(1, rows // shards)) if rows else here
        by_device = x.reshape(shards, here, *x.shape[1:])[:, :: 1 if adjacent else here // count]
        return by_device[:, :count].reshape(-1, *x.shape[1:])

    return jax.tree.map(some, batch)


def make_route(config: ModelConfig, mesh: jax.sharding.Mesh) -> Route:
    """Make a jitted `(params, tokens_BT, segment_BT, prefix_BT) -> expert_LBTA`: the experts that some rows choose.

    `ROUTED_ROWS` rows are routed, but at least one on each device that rows are sharded over. No row moves to another
    device, and no log-probs are computed.
    """

    @partial(jax.jit, compiler_options=unstable.light_compilation(mesh))
    def route(params: Params, tokens_BT: Array, segment_BT: Array, prefix_BT: Array | None = None) -> Array:
        arrays = tokens_BT, segment_BT, prefix_BT
        rows = take_rows(arrays, rows=ROUTED_ROWS, shards=batch_shards(mesh), adjacent=True)
        return _route(StepSettings(config=config, mesh=mesh), params, *rows)[0].expert

    return route


def _route(
    settings: StepSettings, params: Params, tokens_BT: Array, segment_BT: Array, prefix_BT: Array | None
) -> tuple[Routing, Array]:
    """Compute the routing of some rows, prompts included, and bool [B, T]: the positions that hold a token."""
    config, mesh = settings.config, settings.mesh
    tokens_BT, segment_BT, prefix_BT = pad_rows((tokens_BT, segment_BT, prefix_BT), mesh)
    routing = transformer.apply(params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, mesh=mesh)[1]
    return routing, segment_BT > 0


def measure_confidence(settings: StepSettings, params: Params, rows: Batch) -> tuple[Array, dict[str, Array]]:
    """Compute the chosen experts, [L, B, T, A], and the metrics of `router_confidence` by name."""
    routing, valid_BT = _route(settings, params, rows.tokens_BT, rows.segment_BT, rows.prefix_BT)
    config = settings.config
    logits_LBTE = softmax_logits(routing.logits, config.router)
    by_name = router_confidence(logits_LBTE, valid_BT, config.num_experts_per_tok)
    if config.router.correction_bias or config.router.groups > 1:
        del by_name["margin"]  # the experts are not chosen by their scores alone
    return routing.expert, {f"routing/{name}": x_L for name, x_L in by_name.items()}


def router_confidence(logits_LBTE: Array, valid_BT: Array, active: int) -> dict[str, Array]:
    """Compute the confidence of each layer's router, float32 `[L]`: means over the tokens of `valid_BT`.

    `entropy` of the softmax over the experts, in nats; `confidence`, its largest probability; `margin`, by how much the
    logit of the last chosen expert exceeds that of the first one that is not (0 if all `active` = E are chosen).
    """
    log_prob_LBTE = jax.nn.log_softmax(logits_LBTE.astype(jnp.float32))
    best_LBTA = jax.lax.top_k(log_prob_LBTE, min(active + 1, log_prob_LBTE.shape[-1]))[0]  # differences as of logits
    values = {
        "entropy": -(jnp.exp(log_prob_LBTE) * log_prob_LBTE).sum(axis=-1),
        "confidence": jnp.exp(best_LBTA[..., 0]),
        "margin": best_LBTA[..., active - 1] - best_LBTA[..., -1],
    }
    tokens = jnp.maximum(valid_BT.sum(), 1)
    return {name: jnp.where(valid_BT[None], x_LBT, 0).sum(axis=(1, 2)) / tokens for name, x_LBT in values.items()}


def measure_rounding(settings: StepSettings, params: Params, rows: Batch) -> Array:
    """Compute the share of expert choices that differ between float32 and bfloat16, float32 [L]."""
    arrays = rows.tokens_BT, rows.segment_BT, rows.prefix_BT
    float32, bfloat16 = (replace(settings, config=replace(settings.config, dtype=x)) for x in ("float32", "bfloat16"))
    with jax.default_matmul_precision(EXACT):
        exact, _ = _route(float32, to_float32(params), *arrays)
    rounded, _ = _route(bfloat16, params, *arrays)
    return changed_by_layer(exact.expert, rounded.expert, settings.config.num_experts)


def changed_by_layer(before_LBTA: Array, after_LBTA: Array, num_experts: int) -> Array:
    """Compute `changed_share` of each layer, float32 `[L]`."""
    return changed_share(before_LBTA, after_LBTA, num_experts, axis=(1, 2, 3))


def make_gradient_comparison(
    settings: StepSettings, objective: Objective, loss: PolicyLoss
) -> Callable[..., dict[str, Array]]:
    """Make a jitted `(state, rows, on_policy, other_heads) -> {"gradient/cosine", "gradient/norm_ratio"}`, scalars.

    Both compare the gradient of the objective with the plain policy gradient on policy, with nothing clipped,
    corrected, penalized, or replayed, in float32, of the same rows. 0 if either gradient is 0.
    """
    on_policy_objective = make_objective(
        partial(losses.importance_sampling, aggregate=aggregate_of(loss) or losses.by_sequence)
    )

    @jax.jit
    def compare(
        state: TrainState, rows: Batch, on_policy: bool | Array, other_heads: tuple[Params, ...] = ()
    ) -> dict[str, Array]:
        microbatch_rows = math.gcd(settings.microbatch_rows, rows.tokens_BT.shape[0])
        these = replace(settings, microbatch_rows=microbatch_rows, packed=False, worst_case=False)
        applied = make_gradient(these, objective)(state, rows, on_policy, other_heads)[0]
        float32 = replace(settings.config, dtype="float32")
        exact = make_gradient(
            replace(these, config=float32, routing_replay=False, comparison=None), on_policy_objective
        )
        with jax.default_matmul_precision(EXACT):
            on_policy_rows = replace(rows, version_BT=None)  # old log-probs are the policy's own, and not interpolated
            wanted = exact(replace(state, params=to_float32(state.params)), on_policy_rows, True)[0]
        return compare_trees(applied, wanted)

    return compare


def compare_trees(one: PyTree, other: PyTree) -> dict[str, Array]:
    """Compute the cosine of the angle between two trees of arrays, and the ratio of their norms (first over second)."""
    one, other = to_float32(one), to_float32(other)
    across = optax.tree.sum(jax.tree.map(lambda x, y: x * y, one, other))  # not vdot: it would gather sharded leaves
    norms = optax.tree.norm(one), optax.tree.norm(other)
    both = norms[0] * norms[1]
    return {
        "gradient/cosine": jnp.where(both == 0, 0, across / both),
        "gradient/norm_ratio": jnp.where(both == 0, 0, norms[0] / norms[1]),
    }


def to_float32(tree: PyTree) -> PyTree:
    """Cast the floating-point arrays of a tree to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def diagnostic_metrics(readings: Readings, config: ModelConfig) -> dict[str, float]:
    """Return the diagnostic metrics of docs/metrics.md from readings on the host."""
    sparse, metrics = sparse_numbers(config), {name: float(value) for name, value in readings.gradient.items()}
    for name, value_L in readings.by_layer.items():
        metrics[name] = float(np.mean(value_L))
        metrics |= {f"{name}/layer_{number}": float(x) for number, x in zip(sparse, value_L, strict=True)}
    return metrics | (spread_metrics(readings.ratio) if readings.ratio else {})


def spread_metrics(ratio: Mapping[str, Array]) -> dict[str, float]:
    """Return the scalars of `ratio_spread`, the fitted exponent, and the length bins with two or more sequences."""
    metrics = {f"ratio/{name}": float(x) for name, x in ratio.items() if not name.startswith("bin_")}
    bins = ("length", "sequence_std", "sequences")
    length_K, std_K, sequences_K = (np.asarray(ratio[f"bin_{name}"]) for name in bins)
    exponent = fit_exponent(length_K, std_K, sequences_K)
    if not math.isnan(exponent):
        metrics["ratio/length_exponent"] = exponent
    for k in np.flatnonzero(sequences_K >= 2):
        for name in ("sequences", "token_std", "sequence_std"):
            metrics[f"ratio/{name}/length_{2**k}"] = float(ratio[f"bin_{name}"][k])
    return metrics
