"""What a step reports: rollouts, updates, routing and time as flat dicts of floats, named `group/name`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gspax import advantages
from gspax.routing import changed_share, expert_load
from gspax.types import Array, Rollout


class Clock:
    """Seconds of the parts of a step: wall (`time/`), and of this process's processors (`cpu/`)."""

    def __init__(self) -> None:
        self.start = self.last = self.now()
        self.seconds: dict[str, float] = {}

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def lap(self, name: str, since: tuple[float, float] | None = None) -> None:
        now, since = self.now(), since or self.last
        self.seconds |= {f"time/{name}": now[0] - since[0], f"cpu/{name}": now[1] - since[1]}
        self.last = now

    def metrics(self, tokens: int) -> dict[str, float]:
        self.lap("step", since=self.start)
        return {**self.seconds, "perf/tokens_per_second": tokens / self.seconds["time/step"]}


def reward_metrics(reward_PG: Array) -> dict[str, float]:
    return {
        "reward/mean": float(reward_PG.mean()),
        "reward/std": float(reward_PG.std()),
        "reward/zero_std_groups": float(advantages.constant_groups(reward_PG).mean()),
    }


def response_metrics(rollout: Rollout) -> dict[str, float]:
    """Lengths in tokens; truncated is the share of responses cut at the limit without a stop token."""
    return {
        "response/length_mean": float(rollout.length_B.mean()),
        "response/length_min": float(rollout.length_B.min()),
        "response/length_max": float(rollout.length_B.max()),
        "response/truncated": float(1.0 - rollout.finished_B.mean()),
    }


def update_metrics(updates: list[dict[str, Any]]) -> dict[str, float]:
    """The train step's metrics over the rollout batch's updates: least of the `_min`, most of the `_max`, else mean."""
    combined = {}
    for name in updates[0]:
        values = [float(update[name]) for update in updates]
        reduce = min if name.endswith("_min") else max if name.endswith("_max") else np.mean
        group = "optim" if name == "grad_norm" else "policy"
        combined[f"{group}/{name}"] = float(reduce(values))
    return combined


def score_metrics(rollout: Rollout, scores: list[tuple[Array, Array, Array]]) -> dict[str, float]:
    """Entropy of the policy that sampled, and how far sampler and learner disagree about their log-probs."""
    mask_BT = rollout.mask_BT
    learner_logp_BT = np.concatenate([np.asarray(logp) for logp, _, _ in scores])
    entropy_BT = np.concatenate([np.asarray(entropy) for _, entropy, _ in scores])
    gap = np.abs(learner_logp_BT - rollout.logp_BT)[mask_BT]
    return {
        "policy/entropy": float(entropy_BT[mask_BT].mean()),
        "mismatch/logp_diff_mean": float(gap.mean()),
        "mismatch/logp_diff_max": float(gap.max()),
    }


def routing_metrics(before_LBTA: Array, after_LBTA: Array, num_experts: int) -> dict[str, float]:
    """Expert load before some updates and the choices changed by them, on the same tokens; empty without experts."""
    if before_LBTA.size == 0:
        return {}
    load_LE = expert_load(before_LBTA, num_experts)
    return {
        "routing/load_max": float(load_LE.max()),
        "routing/load_min": float(load_LE.min()),
        "routing/changed": float(changed_share(before_LBTA, after_LBTA, num_experts)),
    }
