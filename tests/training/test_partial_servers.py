"""Partial rollouts with servers: what a rollout leaves unfinished goes on in the next one, with its newer weights."""

from dataclasses import replace

import fake_vllm
import jax
import numpy as np
import pytest
from api import make_runtime
from small_experiment import experiment
from test_partial import CARRIED, PARTIAL, TALKING, check_problems, completions, draw_batches

from gspax.config import Engine, PartialRollouts

pytestmark = pytest.mark.usefixtures("one_device", "unevaluated")

CHUNK = PARTIAL.sampling.chunk
SPARSE = {"model": experiment.model, "routing_replay": "sampler"}
FORMS = {
    "completions": PARTIAL,
    "experts": replace(PARTIAL, **SPARSE),
    "conversations": replace(TALKING, **SPARSE),
}


def served(fake, base):
    """An experiment of test_partial with a server in place of its devices."""
    settings = Engine(
        folder="weights",
        addresses=(fake.address,),
        timeout=30.0,
        probes=2,
        staleness=2,
        partial=PartialRollouts(carried=CARRIED, ahead=2),
    )
    return replace(base, placement=None, engine=settings)


@pytest.fixture
def fake(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_vllm.serve(getattr(request, "param", PARTIAL).model, max_tokens=64) as server:
        yield server


def of_params(model, states, rollout, row, sampled):
    """Log-probs of a row's tokens, each by its version, and experts [L, T, A] of all but the last."""
    start = rollout.prompt_length_B[row]
    tokens = rollout.tokens_BT[row, : start + rollout.length_B[row]].tolist()
    versions, scores = rollout.version_BT[row], {}
    for version in {*versions[sampled].tolist()}:
        scores[version] = fake_vllm.forward(jax.device_get(states[version].params), model, tokens)
    logps = np.array([scores[versions[t]][0][t - 1, tokens[t]] for t in sampled])
    if not model.num_experts:
        return logps, None
    following = [versions[min(t for t in sampled if t > before)] for before in range(sampled[-1])]
    return logps, np.stack([scores[version][1][before] for before, version in enumerate(following)], axis=1)


@pytest.mark.parametrize("fake", FORMS.values(), ids=FORMS, indirect=True)
def test_tokens_have_the_version_that_sampled_them_and_its_log_probs_and_experts(fake, request):
    """Also those of samples that one rollout began and another ended; no request asks for more than a chunk."""
    settings = served(fake, FORMS[request.node.callspec.id])
    runtime = make_runtime(settings)
    batches, held, states = draw_batches(runtime, renew=True)
    check_problems(batches, held)
    ages, continued = [], 0
    for done, batch in enumerate(batches):
        rollout = jax.device_get(batch.rollout)
        for row, mask_T in enumerate(rollout.mask_BT):
            (sampled,) = np.nonzero(mask_T)
            versions = rollout.version_BT[row, sampled]
            assert (np.diff(versions) >= 0).all() and done - 2 <= versions[0] and versions[-1] <= done
            ages, continued = ages + (done - versions).tolist(), continued + (versions[0] < versions[-1])
            logps, expert_LTA = of_params(settings.model, states, rollout, row, sampled)
            np.testing.assert_allclose(rollout.logp_BT[row, sampled], logps, atol=5e-5)  # of a prefix: other rounding
            if expert_LTA is not None:
                np.testing.assert_array_equal(rollout.expert_BLTA[row, :, : expert_LTA.shape[1]], expert_LTA)
    assert continued > 5 and set(ages) == {0, 1, 2}
    asked = [body["max_tokens"] for path, body in fake.seen if body and body.get("stop_token_ids")]
    assert max(asked) == CHUNK < PARTIAL.sampling.max_tokens


def test_a_server_that_restarts_changes_no_sample_of_a_partial_rollout(fake):
    runtime = make_runtime(served(fake, PARTIAL))
    undisturbed, _, _ = draw_batches(runtime, renew=True)
    fake.faults.restart_after = fake.completions + 400
    disturbed, _, _ = draw_batches(make_runtime(runtime.experiment), renew=True)
    assert fake.faults.restart_after == 0, "it did restart"
    for batch, other in zip(undisturbed, disturbed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, completions(batch.rollout), completions(other.rollout))
