"""Judges what sampled a rollout before it is trained on, by the learner's log-probs (`learner.sources`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gspax.config import row_shape
from gspax.learner.minibatches import Layout, gather_logp, score_rows, to_rows
from gspax.learner.objective import Scores
from gspax.learner.sources import (
    choose_rows,
    count_lacking,
    differences_by_source,
    find_outliers,
    source_metrics,
    turn_metrics,
)
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rollout.runtime import Runtime
from gspax.types import Batch, Params, Rollout


def judge(
    runtime: Runtime,
    params: Params,
    rollout: Rollout,
    batches: Sequence[Batch],
    scores: Mapping[int, Scores],
    layouts: Sequence[Layout],
) -> tuple[dict[str, float], dict[int, str]]:
    """Compare the log-probs of a rollout's sources with the learner's, before its first update. Collective.

    It reads the log-probs that a pass has computed anyway, `scores`, and computes those of further rows only where a
    source has too few of them.

    Returns:
      A metric, and why not to train on what some sources sampled, by their number from 1. A source that was set
      aside before is among them if it sampled any token.
    """
    if rollout.source_BT is None:
        return {}, {}
    held, old_logp_NT = hold(rollout), gather_logp(scores, layouts, rollout.tokens_BT.shape)
    rest = {index: batch for index, batch in enumerate(batches) if index not in scores}
    old_logp_NT = add_rows(runtime, params, held, rest, layouts, old_logp_NT)
    distrusted = runtime.sampler.set_aside.numbers()
    differences = differences_by_source(old_logp_NT, held)
    sampled = set(np.unique(np.asarray(held.source_BT)).tolist())
    outliers = {index + 1: reason for index, reason in find_outliers(differences).items()}
    wrong = outliers | dict.fromkeys(distrusted & sampled, "it was before")
    return {"engine/set_aside": float(len(distrusted))}, wrong


def measure(
    runtime: Runtime,
    rollout: Rollout,
    judged: Collection[int],
    scored: Sequence[tuple[Batch, Scores]],
    layouts: Sequence[Layout],
) -> dict[str, float]:
    """Measure how a rollout's sources, and its turns, differ from the learner, after its updates. Collective.

    The log-probs of a minibatch that its own update computed are whole only now: a source that is wrong there alone
    is set aside for the rollouts to come.

    Args:
      judged: the minibatches that `judge` has known whole.
      scored: from `Updated`; of the first minibatches, mostly all.
    """
    if rollout.source_BT is None and rollout.reply_B is None:
        return {}
    scores = {index: own for index, (_, own) in enumerate(scored)}
    held, old_logp_NT = hold(rollout), gather_logp(scores, layouts, rollout.tokens_BT.shape)
    metrics = {} if rollout.reply_B is None else turn_metrics(old_logp_NT, held)
    if held.source_BT is None:
        return metrics
    late = {index: own for index, own in scores.items() if index not in judged}
    if late and runtime.sampler.set_aside.addresses:  # a replay may have no servers
        late_NT = gather_logp(late, layouts, rollout.tokens_BT.shape)
        outliers = find_outliers(differences_by_source(late_NT, held))
        runtime.sampler.set_aside.add({index + 1: reason for index, reason in outliers.items()}, was_trained_on=True)
    return metrics | source_metrics(differences_by_source(old_logp_NT, held).mean_S)


def hold(rollout: Rollout) -> Rollout:
    """Return the rollout with what is compared on the host. Collective."""
    names = ("mask_BT", "logp_BT", "source_BT")
    return replace(rollout, **multihost.to_host({name: getattr(rollout, name) for name in names}))


def add_rows(
    runtime: Runtime,
    params: Params,
    held: Rollout,
    batches: Mapping[int, Batch],
    layouts: Sequence[Layout],
    old_logp_NT: np.ndarray,
) -> np.ndarray:
    """Compute log-probs of rows of these minibatches, until enough tokens of each source are known. Collective.

    Args:
      held: the rollout, on the host.
      old_logp_NT: what is known already; NaN elsewhere. It is changed.
    """
    experiment, mesh = runtime.experiment, runtime.mesh
    size = row_shape(experiment.sampling, experiment.schedule, batch_shards(mesh)).microbatch
    lacking_S = count_lacking(old_logp_NT, held)
    source_NT = np.where(np.asarray(held.mask_BT), np.asarray(held.source_BT), 0)
    for index, batch in batches.items():
        if not lacking_S.any():
            break
        layout = layouts[index]
        response_RT, column_RT = np.broadcast_arrays(layout.response, layout.column)
        source_RT = np.where(response_RT >= 0, source_NT[response_RT, column_RT], 0)
        chosen, lacking_S = choose_rows(source_RT, lacking_S, size)
        for rows in chosen.reshape(-1, size):
            part = replace(layout, response=response_RT[rows], column=column_RT[rows])
            logp_RT = score_rows(runtime.steps.score, params, batch, rows, mesh)
            old_logp_NT = to_rows([logp_RT], [part], old_logp_NT)
    return old_logp_NT
