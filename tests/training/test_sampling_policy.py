"""Runs whose updates compare the policy with the one that sampled, which may be some rollouts old."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import RunDir, loop, record, step, transformer
from few_devices import few_devices
from small_experiment import experiment as small
from test_loop import final_state

from gspax import losses
from gspax.config import Placement

DENSE = replace(small.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
BASE = replace(small, model=DENSE, warm_start=None, loss=losses.importance_sampling, center_scores=True)
STALE = replace(BASE, placement=Placement(devices=1, staleness=2), old_logp="sampler")


def train(experiment, folder, steps, **schedule):
    schedule = replace(experiment.schedule, steps=steps, eval_every=steps, **schedule)
    with few_devices(2):
        loop.train(replace(experiment, schedule=schedule), folder)
    return RunDir(folder)


@pytest.mark.slow
def test_a_rollout_is_read_with_the_parameters_that_sampled_it(tmp_path, monkeypatch):
    """So the law over the vocabulary has the sampler's own log-probs, and untruncated weights need no centering."""
    run_updates, differences = step.run_updates, []

    def checked(steps, state, batches, scores, **options):
        (head,) = steps.update.__closure__[0].cell_contents
        for batch in batches:
            hidden = jnp.asarray(jax.device_get(batch.sampler_hidden_BTE))
            logp = jax.nn.log_softmax(transformer.logits(jax.device_get(head), hidden))[:, :-1]
            found = np.take_along_axis(np.asarray(logp), np.asarray(batch.tokens_BT)[:, 1:, None], -1)[..., 0]
            mask = np.asarray(batch.mask_BT)[:, 1:]
            differences.append(np.abs(found - np.asarray(batch.sampler_logp_BT)[:, 1:])[mask].max())
        return run_updates(steps, state, batches, scores, **options)

    monkeypatch.setattr(step, "run_updates", checked)
    whole = train(STALE, tmp_path / "whole", 4)
    rows = [row for row in record.read_metrics(whole.metrics) if "policy/centering" in row]
    assert max(row["rollout/staleness_max"] for row in rows) >= 1, "no rollout was stale"
    assert len(differences) == 8 and max(differences) < 1e-5
    assert max(row["policy/centering"] for row in rows) < 1e-5
    train(STALE, tmp_path / "halves", 2)
    halves = train(STALE, tmp_path / "halves", 4)
    with few_devices(2):
        states = [final_state(run, experiment=STALE) for run in (halves, whole)]
    jax.tree.map(np.testing.assert_array_equal, *states)
