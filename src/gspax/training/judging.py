"""Judges what sampled a rollout before it is trained on, by the learner's log-probs (`learner.sources`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gspax.learner.minibatches import Layout, gather_old_logp
from gspax.learner.sources import differences_by_source, find_outliers, source_metrics, turn_metrics
from gspax.parallel import multihost
from gspax.rollout.runtime import Runtime
from gspax.types import Batch, Rollout


def judge(
    runtime: Runtime, rollout: Rollout, batches: Sequence[Batch], layouts: Sequence[Layout]
) -> tuple[dict[str, float], dict[int, str]]:
    """Compare the log-probs of a rollout's sources, and of its turns, with the learner's. Collective.

    Returns:
      The metrics, and why not to train on what some sources sampled, by their number from 1. A source that was set
      aside before is among them if it sampled any token.
    """
    if rollout.source_BT is None and rollout.reply_B is None:
        return {}, {}
    old_logp_NT = gather_old_logp(batches, layouts, rollout.tokens_BT.shape)
    names = ("mask_BT", "logp_BT", "source_BT")
    held = replace(rollout, **multihost.to_host({name: getattr(rollout, name) for name in names}))
    metrics = {} if rollout.reply_B is None else turn_metrics(old_logp_NT, held)
    if held.source_BT is None:
        return metrics, {}
    distrusted = runtime.sampler.aside.numbers()
    differences = differences_by_source(old_logp_NT, held)
    sampled = set(np.unique(np.asarray(held.source_BT)).tolist())
    outliers = {index + 1: reason for index, reason in find_outliers(differences).items()}
    wrong = outliers | dict.fromkeys(distrusted & sampled, "it was before")
    return metrics | source_metrics(differences.mean_S) | {"engine/set_aside": float(len(distrusted))}, wrong
