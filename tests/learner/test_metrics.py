"""Metrics of a step, by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Batch, Rollout, Scores, metrics


def test_metrics_of_several_updates_are_extremes_means_or_sums():
    updates = [
        {
            "loss": 1.0,
            "grad_norm": 2.0,
            "skipped": 1.0,
            "ratio_min": 0.5,
            "ratio_max": 1.5,
            "ring_fallbacks": 3.0,
            "empty": 0,
        },
        {
            "loss": 4.0,
            "grad_norm": 4.0,
            "skipped": 1.0,
            "ratio_min": 0.9,
            "ratio_max": 1.2,
            "ring_fallbacks": 4.0,
            "empty": 0,
        },
    ]
    updates = [{**each, "empty": 0.0} for each in updates]
    assert metrics.update_metrics(updates) == {
        "policy/loss": 2.5,
        "optim/grad_norm": 3.0,
        "optim/skipped": 2.0,
        "optim/empty": 0.0,
        "policy/ratio_min": 0.5,
        "policy/ratio_max": 1.5,
        "routing/ring_fallbacks": 7.0,
    }


def test_updates_without_response_tokens_are_left_out_of_the_metrics():
    nothing = {"loss": 0.0, "ratio_min": 0.0, "ratio_mean": 0.0, "kl": 0.0, "skipped": 0.0, "empty": 1.0}
    some = {"loss": 2.0, "ratio_min": 1.0, "ratio_mean": 1.0, "kl": 0.5, "skipped": 0.0, "empty": 0.0}
    want = {"policy/loss": 2.0, "policy/ratio_min": 1.0, "policy/ratio_mean": 1.0, "policy/kl": 0.5}
    counts = {"optim/skipped": 0.0}
    assert metrics.update_metrics([some, nothing, nothing, nothing]) == {**want, **counts, "optim/empty": 3.0}
    assert metrics.update_metrics([nothing, nothing]) == {**counts, "optim/empty": 2.0}


def a_rollout():
    """Two rows of three tokens; the first token is the prompt."""
    return Rollout(
        tokens_BT=np.zeros((2, 3), np.int32),
        mask_BT=np.array([[False, True, True], [False, True, False]]),
        logp_BT=np.array([[0, -1, -2], [0, -3, 0]], np.float32),
        prompt_length_B=np.array([1, 1], np.int32),
        length_B=np.array([2, 1], np.int32),
        finished_B=np.array([False, False]),
    )


def test_response_metrics_by_hand():
    assert metrics.response_metrics(a_rollout().length_B, a_rollout().finished_B) == {
        "response/length_mean": 1.5,
        "response/length_min": 1.0,
        "response/length_max": 2.0,
        "response/truncated": 1.0,
    }


def scored_parts(ref_logp_BT=None):
    """The rows of `a_rollout` as two batches, with the learner's log-probs and entropies of each."""
    rollout = a_rollout()
    logp = jnp.array([[9.0, -1.5, -2.0], [9.0, -3.25, 9.0]])
    entropy = jnp.array([[9.0, 0.5, 1.0], [9.0, 0.75, 9.0]])
    batch = Batch(
        tokens_BT=rollout.tokens_BT,
        segment_BT=np.ones_like(rollout.tokens_BT),
        mask_BT=rollout.mask_BT,
        advantage=np.zeros(2, np.float32),
        sampler_logp_BT=rollout.logp_BT,
        ref_logp_BT=ref_logp_BT,
    )
    return [jax.tree.map(lambda x, i=i: x[i : i + 1], (batch, Scores(logp, entropy))) for i in range(2)]


def test_without_response_tokens_there_are_no_score_metrics():
    """An entropy of 0 would be an alarm."""
    parts = scored_parts()
    empty = [(replace(batch, mask_BT=np.zeros_like(batch.mask_BT)), scores) for batch, scores in parts]
    assert metrics.score_metrics(empty) == {}
    assert metrics.score_metrics([empty[0], parts[0]]) == metrics.score_metrics(parts[:1])


def test_score_metrics_use_only_response_tokens():
    found = metrics.score_metrics(scored_parts())
    assert found["policy/entropy"] == 0.75 and found["policy/sampler_entropy"] == 2
    assert found["mismatch/abs_diff"] == 0.25 and found["mismatch/abs_diff_largest_max"] == 0.5
    assert found["mismatch/kl"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    ratio = np.exp([-0.5, 0.0, -0.25])
    assert found["mismatch/ess_tokens"] == pytest.approx(ratio.sum() ** 2 / (3 * (ratio**2).sum()), rel=1e-6)
    assert not any(name.startswith("reference/") for name in found)


def test_kl_to_the_reference_is_measured_where_there_is_one():
    reference = jnp.array([[0.0, -1.0, -2.5], [0.0, -3.0, 0.0]])
    found = metrics.score_metrics(scored_parts(reference))
    x = np.array([-0.5, 0.5, -0.25])
    assert found["reference/kl_k1"] == pytest.approx(x.mean(), rel=1e-5)
    assert found["reference/kl"] == pytest.approx((np.exp(-x) - 1 + x).mean(), rel=1e-5)


def test_routing_metrics_by_hand():
    before = jnp.array([[[[0, 1], [0, 2]]]])
    after = jnp.array([[[[1, 0], [1, 0]]]])
    found = metrics.routing_metrics(jnp.array([[2, 1, 1]]), jnp.array([[2, 0, 1]]), before, after)
    loads = {"routing/load_max": 1.5, "routing/load_min": 0.75, "routing/response_load_max": 2.0}
    assert found == pytest.approx(loads | {"routing/changed": 0.25})
