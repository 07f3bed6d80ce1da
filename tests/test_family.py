"""Every loss, correction, KL term, regularizer and advantage trains a small model for a few updates."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    FirstPolicy,
    InFlight,
    InProcess,
    Passes,
    Runtime,
    Steps,
    TrainedPolicy,
    first_adapted,
    init_state,
    make_mesh,
    make_optimizer,
    make_route,
    make_sampler,
    make_score,
    make_select,
    make_update,
    named_sharding,
    run_step,
)
from small_experiment import experiment, objective_of
from tethers import Tether

from gspax import advantages, config, losses
from gspax.config import Calibration, Reference, Regularizers
from gspax.experiment import validate
from gspax.losses import correction, kl, selection, shaping
from gspax.rewards.scores import reward_calls

LOSSES = (
    *(
        losses.gspo,
        losses.gspo_token,
        losses.grpo,
        losses.importance_sampling,
        losses.dr_grpo,
        losses.dapo,
        losses.cispo,
    ),
    *(losses.sapo, losses.dppo_tv, losses.dppo_kl, losses.luspo, losses.gmpo, losses.vespo),
    *(losses.dis, losses.ipo, losses.dro),
)
DENSE = replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
SPARSE = {"model": replace(experiment.model, num_hidden_layers=1)}  # only for tests of routers: it compiles longer
BASE = replace(experiment, model=DENSE, warm_start=None)
POLICY = {
    *("loss", "kl", "noise_floor", "entropy", "ratio_mean", "ratio_min", "ratio_max", "clip_fraction_tokens"),
    *("clip_fraction_sequences", "clip_fraction_high", "clip_fraction_low"),
}
MISMATCH = {
    *("kl", "k3", "chi2_tokens", "chi2_sequences", "ess_tokens", "ess_sequences", "extreme_tokens"),
    *("abs_diff", "abs_diff_largest_max", "log_ppl_diff_mean", "out_of_range_tokens", "out_of_range_sequences"),
}


MESH = make_mesh(config.Mesh(), jax.devices()[:1])  # eight devices only compile longer
OPTIMIZER = make_optimizer(BASE.optimizer)


@functools.cache
def score(model, keep, shift, measure):
    return make_score(tiny.settings(model, MESH), keep_experts=keep, keep_router_logp=shift, measure=measure)


@functools.cache
def route(model):
    return make_route(model, MESH) if config.has_experts(model) else None


READ_BY_UPDATES = (
    *("model", "loss", "correction", "rejection", "selection"),
    *("reference", "terms", "regularizers", "calibration", "routing_replay", "router_shift"),
)


@functools.cache
def step(*values):
    """The compiled update, shared by experiments with the same objective."""
    variant = replace(BASE, **dict(zip(READ_BY_UPDATES, values, strict=True)))
    objective, replay = objective_of(variant), variant.routing_replay != "off"
    settings = tiny.settings(variant.model, MESH, routing_replay=replay)
    return make_update(settings, objective, OPTIMIZER, regularizers=variant.regularizers)


def train(changes, rollouts=2, seed=0):
    """The metrics of each rollout batch of two updates, how far the parameters moved, and the last state."""
    variant = replace(BASE, **changes)
    assert validate(variant, 1) == []
    read = {name: getattr(variant, name) for name in READ_BY_UPDATES}
    if variant.reference is not None and variant.reference.loss is None:
        read["reference"] = Reference()  # only its loss is part of the objective
    update = step(*read.values())
    passes = Passes(variant)
    keep, shift, measure = passes.keeps_experts, passes.keeps_router_logp, passes.measure
    select = make_select(passes, MESH) if passes.selections else None
    scored = score(variant.model, keep, shift, measure)
    steps = Steps(None, update, scored, route(variant.model), None, passes.scored, select=select)
    rewards = reward_calls(variant.reward, variant.grading)
    sampler = InProcess(make_sampler(variant.model, MESH, MESH))
    runtime = Runtime(variant, TrainedPolicy(variant.model, MESH, OPTIMIZER), steps, sampler, rewards)
    state = init_state(variant.model, OPTIMIZER, jax.random.key(seed), MESH)
    adapted = first_adapted(variant.calibration, variant.regularizers)
    state = replace(state, adapted=jax.device_put(adapted, named_sharding(MESH)))
    start = jax.tree.map(jnp.copy, state.params)
    opened = (FirstPolicy(start),) if passes.first_policy else ()
    found = []
    for _ in range(rollouts):
        state, reported, samples, *_ = run_step(runtime, state, InFlight(), opened)
        assert all(np.isfinite(list(reported.values()))), reported
        found.append(reported)
    assert steps.score._cache_size() <= 1, "one program scores every minibatch"
    assert update._cache_size() == 1, "one program with old log-probs and without"
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params, start)
    assert max(jax.tree.leaves(moved)) > 0
    return found, state, samples


def group(found, name):
    return {key.removeprefix(f"{name}/") for key in found if key.startswith(f"{name}/")}


def each(functions, *fast):
    """These functions as parameters, all but the `fast` ones marked slow."""
    named = {getattr(function, "func", function).__name__: function for function in functions}
    return [
        pytest.param(function, id=name, marks=() if name in fast else pytest.mark.slow)
        for name, function in named.items()
    ]


@pytest.mark.parametrize("loss", each(LOSSES, "gspo", "cispo", "dppo_kl"))
def test_every_loss_trains(loss):
    (first, second), _, _ = train({"loss": loss})
    if losses.traits_of(loss).old_logp == "sampler":
        assert group(first, "policy") >= POLICY - {"noise_floor"}, "no pass computes log-probs before the updates"
    else:
        assert group(first, "policy") >= POLICY
        assert abs(first["policy/noise_floor"]) < 1e-4, "the first update of a rollout batch has ratio 1"
    assert group(first, "mismatch") >= MISMATCH
    assert second["policy/ratio_max"] > second["policy/ratio_min"]


CORRECTIONS = (
    correction.truncate_tokens,
    correction.truncate_sequences,
    correction.truncate_geometric,
    correction.mask_tokens,
    partial(correction.mask_sequences, low=0.5, high=2.0),
    partial(correction.reject_geometric, low=0.999, high=1.001),
    partial(correction.reject_tokens, high=0.001),
    partial(correction.reject_sequences, high=0.001),
    partial(
        correction.product,
        factors=(correction.truncate_tokens, partial(correction.reject_geometric, low=0.999, high=1.001)),
    ),
)


@pytest.mark.parametrize("function", each(CORRECTIONS, "truncate_tokens", "reject_geometric"))
def test_every_correction_trains(function):
    (first, _), _, _ = train({"correction": function})
    assert first["policy/correction_mean"] == pytest.approx(1, abs=1e-4), "sampler and learner are the same policy"
    assert first["policy/correction_rejected"] == 0


def test_rejection_and_correction_combine():
    opsm = partial(correction.reject_off_policy, delta=0.0)
    (first, _), _, _ = train({"rejection": opsm, "correction": correction.truncate_tokens})
    assert 0 < first["policy/correction_rejected"] < 1, "with delta 0 rounding alone rejects some bad samples"


@pytest.mark.parametrize("function", each([kl.token_kl, kl.sequence_kl, kl.grpo_kl], "token_kl"))
def test_every_kl_loss_trains(function):
    (first, second), _, _ = train({"reference": Reference(loss=function, coefficient=0.1)})
    assert first["reference/kl"] == pytest.approx(0, abs=1e-6), "the policy starts as its reference"
    assert second["reference/kl"] > 1e-6 and second["policy/ref_kl"] > 1e-6


@pytest.mark.parametrize("function", [kl.k1, kl.k2, kl.k3], ids=lambda kl: kl.__name__)
def test_every_kl_trains_as_a_reward(function):
    (_, second), _, samples = train({"reference": Reference(reward=function, coefficient=0.1)})
    assert second["reward/kl"] != 0
    reward = np.mean([each.reward for each in samples.completions])
    assert second["reward/with_added"] == pytest.approx(reward - 0.1 * second["reward/kl"], abs=1e-5)
    assert second["reward/mean"] == pytest.approx(reward, abs=1e-6), "the task's own"


def test_a_reference_can_be_measured_without_a_loss():
    (_, second), _, _ = train({"reference": Reference()})
    assert second["reference/kl"] > 0 and "policy/ref_kl" not in second and "reward/kl" not in second


def test_a_term_of_ones_own_trains():
    """The pass that fills its column is taken for it alone, and what it adds is in the metrics."""
    (first, second), _, _ = train({"terms": (Tether(coefficient=0.1),)})
    assert first["policy/tether"] < second["policy/tether"], "the first update of a run is of the first policy"
    assert {"kl", "kl_k1"} <= group(second, "reference")


def test_every_regularizer_and_routing_replay_train():
    """Updates replay the routing of the rollout, so only the score sees changed experts."""
    regularizers = Regularizers(entropy=0.01, load_balance=0.01, router_z=0.001)
    (first, second), _, _ = train(SPARSE | {"regularizers": regularizers, "routing_replay": "old"})
    assert first["policy/entropy_bonus"] == pytest.approx(first["policy/entropy"], rel=0.05)
    assert first["policy/load_balance"] > 0 and first["policy/router_z"] > 0
    assert first["policy/noise_floor"] < 1e-4 and second["policy/noise_floor"] < 1e-4


def test_the_sampler_routing_gives_the_update_of_the_learners_own():
    """Equal weights choose equal experts, so that replaying either gives the same update."""
    states = [train(SPARSE | {"routing_replay": replay}, rollouts=1)[1] for replay in ("old", "sampler")]
    old, new = (jax.tree.leaves(state.params) for state in states)
    for one, other in zip(old, new, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)


def test_the_sampler_log_probs_can_be_the_old_ones():
    """Nothing is scored; the sampler rounds like the learner here, so that the first updates agree."""
    (plain, _), _, _ = train({})
    (first, second), _, _ = train({"old_logp": "sampler"})
    assert "policy/noise_floor" not in first and "time/old_logp" in first
    for name in ("policy/entropy", "mismatch/abs_diff_largest_max", "policy/ratio_max", "policy/kl"):
        assert name in second
    assert first["policy/loss"] == pytest.approx(plain["policy/loss"], rel=1e-3, abs=1e-5)
    assert 0 < second["mismatch/abs_diff"] < 1e-4


def test_a_loss_without_an_old_policy_takes_the_sampler_log_probs():
    """Metrics are bit-identical to those with the setting."""
    parts = {"regularizers": Regularizers(log_ratio_square=1e-3)}
    (_, plain), _, _ = train({"loss": losses.dis, **parts})
    (_, second), _, _ = train({"loss": losses.dis, "old_logp": "sampler", **parts})
    same = [name for name in plain if name.startswith(("policy/", "mismatch/", "optim/"))]
    assert {name: plain[name] for name in same} == {name: second[name] for name in same}
    assert "policy/noise_floor" not in plain and plain["policy/log_ratio_square"] > 0


def test_an_adaptive_entropy_bonus_trains():
    """The first update has the first coefficient; each below the target adds a step."""
    settings = config.AdaptiveEntropy(target=100.0, step=0.01, highest=0.025)
    found, state, _ = train({"regularizers": Regularizers(entropy=0.005, adaptive_entropy=settings)})
    each = [rollout["policy/entropy_coefficient"] for rollout in found]
    np.testing.assert_allclose(each, [(0.005 + 0.015) / 2, (0.025 + 0.025) / 2], rtol=1e-5)
    np.testing.assert_allclose(state.adapted, [0, 0, 0.025])
    (fixed, _), _, _ = train({"regularizers": Regularizers(entropy=0.005)})
    (falling, _), _, _ = train({"regularizers": Regularizers(entropy=0.005, adaptive_entropy=config.AdaptiveEntropy())})
    assert falling["policy/entropy_coefficient"] == pytest.approx(0.0025), "0 after the first update"
    assert fixed["policy/entropy"] == falling["policy/entropy"] and fixed["policy/loss"] != falling["policy/loss"]


def test_a_penalty_on_covariant_tokens_trains():
    """Half of the tokens are selected, far more than by default."""
    penalty = config.CovarianceKL(share=0.5, coefficient=2.0)
    (_, second), _, _ = train({"loss": losses.dapo, "regularizers": Regularizers(kl_cov=penalty)})
    assert second["policy/kl_cov"] > 0


def test_a_selection_trains():
    """A fifth of the tokens of each minibatch."""
    (first, _), _, _ = train({"loss": losses.dapo, "selection": selection.top_entropy})
    assert 0.7 < first["policy/correction_rejected"] < 0.82, "tokens of equal entropy stay together"
    assert abs(first["policy/noise_floor"]) < 1e-4, "a pass scores the first minibatch too"


def test_router_shift_weights_train():
    (first, second), _, _ = train(SPARSE | {"router_shift": config.RouterShift(floor=0.9)})
    assert 0.9 <= second["policy/router_shift"] < 1 and first["policy/router_shift"] < 1


@pytest.mark.parametrize(
    "function",
    [
        advantages.standardize,
        advantages.center,
        advantages.leave_one_out,
        advantages.reinforce_plus_plus,
        advantages.reinforce_plus_plus_baseline,
        advantages.maxrl,
        advantages.opo,
        advantages.best_of_group,
    ],
    ids=lambda function: function.__name__,
)
def test_every_advantage_trains(function):
    train({"advantage": function}, rollouts=1)


def test_an_advantage_of_tokens_trains():
    _, _, samples = train({"advantage": advantages.otb, "loss": losses.gspo_token})
    assert samples.advantage_B.shape == (len(samples.completions),) and samples.advantage_B.any()


def share_and_length(problem, completion):
    return experiment.reward(problem, completion), -float(len(completion))


def test_several_rewards_train():
    (first,), _, samples = train({"reward": share_and_length, "advantage": advantages.gdpo}, rollouts=1)
    assert {len(each.rewards) for each in samples.completions} == {2}
    assert first["reward/mean"] == pytest.approx(np.mean([each.reward for each in samples.completions]), rel=1e-5)


def test_length_shaping_and_overlong_filtering_train():
    punish = partial(shaping.soft_overlong_punishment, max_length=4, buffer=2)
    (first,), _, samples = train({"length_reward": punish, "filter_overlong": True}, rollouts=1)
    assert 0 < first["response/truncated"] < 1
    assert first["reward/length"] == pytest.approx(
        np.mean([min(0, (2 - each.length) / 2) for each in samples.completions])
    )
    assert {line["advantage"] for line in samples.to_json() if not line["finished"]} == {0.0}


def test_a_run_adapts_its_clip_range_and_its_entropy_bonus():
    rising = Regularizers(adaptive_entropy=config.AdaptiveEntropy(target=100.0))
    (first, second), state, _ = train({"calibration": Calibration(share=0.2), "regularizers": rising}, seed=1)
    assert second["policy/clip_low"] < first["policy/clip_low"] and 0 < state.adapted.clip_low < 1
    assert first["policy/entropy_coefficient"] < second["policy/entropy_coefficient"] < state.adapted.entropy


@pytest.mark.parametrize(
    "loss", [losses.gspo, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (losses.gspo_token, losses.luspo))]
)
def test_a_calibrated_clip_range_trains(loss):
    found, state, _ = train({"loss": loss, "calibration": Calibration(share=0.2, tolerance=0.0)}, rollouts=3, seed=1)
    assert found[0]["policy/clip_low"] == found[0]["policy/clip_high"] == 1, "nothing is clipped before a measurement"
    ranges = [(each["policy/clip_low"], each["policy/clip_high"]) for each in found]
    assert ranges[0] != ranges[1] != ranges[2], "measured by the updates of the rollout batch before"
    assert min(ranges[1]) < 0.04, "so small a step moves the ratios little"
    clip_range = state.adapted[:2]
    assert min(clip_range) >= 2.0**-23 and max(clip_range) <= 1
