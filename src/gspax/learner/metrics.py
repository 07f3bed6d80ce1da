"""Computes the metrics of a step (rollout, updates, routing, time) as flat dicts of floats named `group/name`.

Axes: as in docs/architecture.md; L sparse layers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gspax import losses
from gspax.learner.objective import Scores
from gspax.losses import kl, masked
from gspax.losses.correction import effective_sample_sizes, mismatch_by_position, mismatch_metrics
from gspax.losses.terms import mean_over
from gspax.parallel import multihost
from gspax.types import Array, Batch, Rollout, known, segment_ids

GROUPS = {"grad_norm": "optim", "skipped": "optim", "empty": "optim", "ring_fallbacks": "routing"}  # else "policy"
COUNTS = "skipped", "empty", "ring_fallbacks"


class Clock:
    """A stopwatch for the phases of a step: wall seconds (`time/`), and CPU seconds of this process (`cpu/`)."""

    def __init__(self) -> None:
        self.start = self.last = self.now()
        self.seconds: dict[str, float] = {}

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """End a phase that began when the one before it ended."""
        self._end(name, self.last)

    def _end(self, name: str, since: tuple[float, float]) -> None:
        now = self.now()
        self.seconds |= {f"time/{name}": now[0] - since[0], f"cpu/{name}": now[1] - since[1]}
        self.last = now

    def metrics(self, tokens: int) -> dict[str, float]:
        self._end("step", self.start)
        return {**self.seconds, "perf/tokens_per_second": tokens / self.seconds["time/step"]}


def response_metrics(length_B: np.ndarray, finished_B: Array | np.ndarray) -> dict[str, float]:
    """Compute response lengths in sampled tokens, and the share of responses without a stop token."""
    return {
        "response/length_mean": float(length_B.mean()),
        "response/length_min": float(length_B.min()),
        "response/length_max": float(length_B.max()),
        "response/truncated": float(1.0 - finished_B.mean()),
    }


def staleness_metrics(rollout: Rollout, trained: int, version: int) -> dict[str, float]:
    """Compute the policy lag in rollouts of the response tokens: its mean and maximum.

    Args:
      rollout: its `version_BT`, if it has one, counts the rollouts that each token's weights had been trained on.
      trained: rollouts that the learner has been trained on.
      version: that of all tokens of a rollout without `version_BT`.
    """
    if rollout.version_BT is None:
        mean = largest = trained - version
    else:
        mean, largest = multihost.to_host(_mean_and_max(trained - rollout.version_BT, rollout.mask_BT))
    return {"rollout/staleness": float(mean), "rollout/staleness_max": float(largest)}


def ages(rollout: Rollout, trained: int, version: int) -> np.ndarray:
    """Compute the mean staleness of each response's tokens, float64 [B]; the arguments of `staleness_metrics`."""
    if rollout.version_BT is None:
        return np.full(len(np.asarray(rollout.length_B)), trained - version, np.float64)
    age_B = _age_by_row(trained - rollout.version_BT, rollout.mask_BT)
    return np.asarray(multihost.to_host(age_B), np.float64)


@jax.jit
def _age_by_row(age_BT: Array, mask_BT: Array) -> Array:
    return masked.mean(age_BT.astype(jnp.float32), mask_BT, axis=-1)


@jax.jit
def _mean_and_max(value_BT: Array, mask_BT: Array) -> tuple[Array, Array]:
    value_BT = value_BT.astype(jnp.float32)
    return masked.mean(value_BT, mask_BT), masked.max(value_BT, mask_BT)


def sampling_mask_metrics(rollout: Rollout, vocab_size: int) -> dict[str, float]:
    """Compute the mean size of a token's sampling mask and the share of tokens with a cut mask; {} without masks."""
    if rollout.kept_BTK is None or rollout.cut_BT is None:
        return {}
    means = multihost.to_host(_mask_means(rollout.kept_BTK < vocab_size, rollout.cut_BT, rollout.mask_BT))
    return {name: float(mean) for name, mean in zip(("sampling/mask_size", "sampling/mask_cut"), means, strict=True)}


@jax.jit
def _mask_means(inside_BTK: Array, cut_BT: Array, mask_BT: Array) -> tuple[Array, Array]:
    size_BT = inside_BTK.sum(axis=-1).astype(jnp.float32)
    return masked.mean(size_BT, mask_BT), masked.mean(cut_BT.astype(jnp.float32), mask_BT)


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the train step's metrics over a rollout: min of `_min`, max of `_max`, sums of counts, else the mean.

    An update without response tokens has counts only.
    """
    combined = {}
    for name in updates[0]:
        values = [float(update[name]) for update in updates if name in COUNTS or not update["empty"]]
        reduce = sum if name in COUNTS else min if name.endswith("_min") else max if name.endswith("_max") else np.mean
        if values:
            combined[f"{GROUPS.get(name, 'policy')}/{name}"] = float(reduce(values))
    return combined


def score_metrics(scored: Sequence[tuple[Batch, Scores]]) -> dict[str, float]:
    """Compute the entropies of the old policy and the sampler, their mismatch, and the KL to the reference.

    `mismatch/` has the metrics of `losses.correction.mismatch_metrics` and `mismatch_by_position`; `reference/kl` and
    `reference/kl_k1` are means over the response tokens. Without any of these there are no metrics.
    """
    parts = [_score_rows(batch, scores.logp_BT, scores.entropy_BT) for batch, scores in scored]
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *multihost.to_host(parts))
    if not rows["policy/entropy"].whole.any():
        return {}
    reduced = jax.device_get(_reduce_rows(rows))
    return {name.replace("mismatch_", "mismatch/", 1): float(value) for name, value in reduced.items()}


@jax.jit
def _reduce_rows(rows: losses.Metrics) -> dict[str, Array]:
    """Reduce the metrics of all rows, and add the effective sample sizes."""
    nothing_B = jnp.zeros(1)
    _, reduced = losses.reduce(losses.Terms(nothing_B, nothing_B, rows))
    return reduced | effective_sample_sizes(reduced)


@jax.jit
def _score_rows(batch: Batch, logp_BT: Array, entropy_BT: Array) -> losses.Metrics:
    """Compute the metrics of `score_metrics` by row."""
    mask_BT, ref_logp_BT = batch.mask_BT, batch.ref_logp_BT
    policies = logp_BT, known(batch, "sampler_logp_BT")
    metrics: losses.Metrics = {
        "policy/entropy": mean_over(entropy_BT, mask_BT),
        "policy/sampler_entropy": mean_over(-policies[1], mask_BT),
        **mismatch_metrics(*policies, mask_BT, segment_ids=segment_ids(batch)),
        **mismatch_by_position(*policies, mask_BT, segment_ids=segment_ids(batch)),
    }
    if ref_logp_BT is not None:
        metrics["reference/kl"] = mean_over(kl.k3(logp_BT, ref_logp_BT, mask_BT), mask_BT)
        metrics["reference/kl_k1"] = mean_over(kl.k1(logp_BT, ref_logp_BT, mask_BT), mask_BT)
    return metrics


def routing_metrics(count_LE: Array, response_LE: Array, before_LBTA: Array, after_LBTA: Array) -> dict[str, float]:
    """Compute the expert load before a step's updates, and the share of expert choices that the updates changed.

    Args:
      count_LE: tokens that each layer sent to each expert.
      response_LE: response tokens likewise.
      before_LBTA: the choices of some tokens before the updates; padding has the id E.
      after_LBTA: the choices of the same tokens after them.
    """
    loads, changed = multihost.to_host(_load_and_change((count_LE, response_LE), before_LBTA, after_LBTA))
    load_LE, response_load_LE = loads
    return {
        "routing/load_max": float(load_LE.max()),
        "routing/load_min": float(load_LE.min()),
        "routing/response_load_max": float(response_load_LE.max()),
        "routing/changed": float(changed),
    }


@jax.jit
def _load_and_change(
    counts: tuple[Array, Array], before_LBTA: Array, after_LBTA: Array
) -> tuple[tuple[Array, Array], Array]:
    loads = relative_load(counts[0]), relative_load(counts[1])
    return loads, changed_share(before_LBTA, after_LBTA, counts[0].shape[1])


def expert_counts(expert_LBTA: Array, num_experts: int) -> Array:
    """Count the tokens that each layer sent to each expert, int32 `[L, E]`. Ids equal to `num_experts` are padding."""
    return jax.nn.one_hot(expert_LBTA, num_experts, dtype=jnp.int32).sum(axis=(1, 2, 3))


def relative_load(count_LE: Array) -> Array:
    """Divide the counts by the mean of their layer, float32 `[L, E]`: 1 everywhere is perfect balance."""
    mean_L1 = jnp.maximum(count_LE.mean(axis=-1, keepdims=True), 1.0)
    return (count_LE / mean_L1).astype(jnp.float32)


def expert_load(expert_LBTA: Array, num_experts: int) -> Array:
    """Compute the `relative_load` of expert choices."""
    return relative_load(expert_counts(expert_LBTA, num_experts))


def changed_share(
    before_LBTA: Array, after_LBTA: Array, num_experts: int, axis: tuple[int, ...] | None = None
) -> Array:
    """Compute the share of the same tokens' expert choices that changed, 1 - |before ∩ after| / A, float32.

    The order of a token's experts does not matter; padding (id `num_experts`) is not counted.
    """
    kept_LBTA = (before_LBTA[..., :, None] == after_LBTA[..., None, :]).any(axis=-1)
    real_LBTA = before_LBTA < num_experts
    return (real_LBTA & ~kept_LBTA).sum(axis=axis) / jnp.maximum(real_LBTA.sum(axis=axis), 1)
