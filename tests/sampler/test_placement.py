"""A disaggregated sampler: devices, staleness, validation, and resumption."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from api import (
    InFlight,
    InProcess,
    TrainedPolicy,
    add_adapters,
    checkpoint,
    evaluate,
    find_last_ahead,
    in_flight,
    init_state,
    make_inference_weights,
    make_mesh,
    make_meshes,
    make_optimizer,
    make_runtime,
    make_sampler,
    open_run,
    reshape_mesh,
    reward_completions,
    run_step,
    sampler,
    start_rollout,
)
from small_experiment import experiment

from gspax import config
from gspax.config import Lora, Mesh, Placement
from gspax.errors import UserError
from gspax.experiment import describe, validate, warnings
from gspax.losses.correction import truncate_geometric

# The learning rate is large enough for one rollout batch to change the samples; one dense layer compiles fast.
DISAGGREGATED = replace(
    experiment,
    model=replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32),
    warm_start=None,
    optimizer=config.Optimizer(learning_rate=0.3),
    schedule=replace(experiment.schedule, steps=4, eval_every=0, checkpoint_every=2),
    evaluation=config.Evaluation(problems=8, samples=4),
    placement=Placement(devices=4, staleness=1),
)
CLOCKS = ("time/", "cpu/", "perf/")


@pytest.fixture(scope="module")
def runtime():
    return make_runtime(DISAGGREGATED)


def fresh(runtime):
    """A new state: an update donates its state."""
    return init_state(DISAGGREGATED.model, runtime.optimizer, jax.random.key(0), runtime.mesh)


def texts(runtime, started):
    """The completions of a `PendingBatch`."""
    rollout = sampler.lengths_to_host(started.samples.result()[0])
    completions = reward_completions(started.problems, rollout, tokenizer=experiment.tokenizer, calls=runtime.rewards)
    return [each.texts.completion for each in completions]


def devices(tree):
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set}


def test_learner_and_sampler_have_disjoint_devices(runtime):
    state = fresh(runtime)
    assert devices(state) == set(jax.devices()[:4]) and set(runtime.mesh.devices.flat) == set(jax.devices()[:4])
    pushed = runtime.sampler.push(state.params, 0).params
    assert devices(pushed) == set(jax.devices()[4:])
    jax.tree.map(
        np.testing.assert_array_equal, pushed, make_inference_weights(state.params, DISAGGREGATED.model, runtime.mesh)
    )
    started = start_rollout(runtime, runtime.sampler.push(state.params, 0), state, 0, InFlight())
    assert devices(started.samples.result()[0]) == set(jax.devices()[4:])


def test_without_staleness_a_step_equals_the_colocated_step_bit_for_bit(runtime):
    """The colocated sampler's mesh has the same shape."""
    mesh = reshape_mesh(runtime.mesh, dict(runtime.sampler.mesh.shape))
    colocated = replace(runtime, sampler=InProcess(make_sampler(DISAGGREGATED.model, mesh, runtime.mesh)))
    results = [run_step(each, fresh(runtime), InFlight()) for each in (runtime, colocated)]
    (state, metrics, samples, *_), (state_too, metrics_too, samples_too, *_) = results
    assert samples.to_json() == samples_too.to_json()
    jax.tree.map(np.testing.assert_array_equal, state.params, state_too.params)
    assert {name: x for name, x in metrics.items() if not name.startswith(CLOCKS)} == {
        name: x for name, x in metrics_too.items() if not name.startswith(CLOCKS)
    }


def test_evaluation_runs_where_the_sampler_runs(runtime, monkeypatch, tmp_path):
    policies = []
    monkeypatch.setattr(checkpoint, "evaluate_heldout", lambda *args, **_: policies.append(args[:2]) or ({}, [], []))
    evaluate(runtime, fresh(runtime), tmp_path)
    ((policy, key),) = policies
    assert devices(policy.weights.params) == set(runtime.sampler.mesh.devices.flat) == set(jax.devices()[4:])
    assert len(devices(key)) == 1, "every process has a copy of its own"


def test_staleness_1_samples_with_the_parameters_before_the_last_update(runtime):
    state, flight, stale = fresh(runtime), InFlight(), []
    first, second = range(8, 16), range(16, 24)

    def texts_now(index):
        return texts(runtime, start_rollout(runtime, runtime.sampler.push(state.params, 0), state, index, InFlight()))

    by_first = texts_now(first[0])
    for done in (0, 1):
        if done == 1:
            assert texts_now(first[0]) != by_first, "the update should change the samples"
            by_second = texts_now(second[0])
        state, metrics, samples, *_ = run_step(no_checkpoints(runtime), state, flight)
        assert [pending.version for pending in flight.batches] == [done]
        if done == 1:
            assert [each.texts.completion for each in samples.completions] == by_first
            assert texts(runtime, flight.batches[0]) == by_second
        stale.append(metrics["rollout/staleness"])
        if done == 0:
            assert metrics["mismatch/kl"] < 1e-6
    assert stale == [0.0, 1.0]
    assert metrics["mismatch/abs_diff"] > 1e-3, "old log-probs come from the newest parameters"


@pytest.mark.parametrize(
    ("staleness", "wanted"),
    [
        (0, ["sample 0", "take 0", "learn", "sample 1", "take 1", "learn", "sample 2", "take 2", "learn"]),
        (1, ["sample 0", "take 0", "sample 1", "learn", "take 1", "sample 2", "learn", "take 2", "sample 3", "learn"]),
        (
            2,
            [
                "sample 0",
                "take 0",
                "sample 1",
                "sample 2",
                "learn",
                "take 1",
                "sample 3",
                "learn",
                "take 2",
                "sample 4",
                "learn",
            ],
        ),
    ],
)
def test_a_rollout_is_received_before_the_next_is_sampled(runtime, monkeypatch, staleness, wanted):
    """In the other order, with several processes, receiving would wait for the rollout that was queued last."""
    events, flight = [], InFlight()
    ahead_of = no_checkpoints(runtime)
    ahead_of = replace(
        ahead_of, experiment=replace(ahead_of.experiment, placement=Placement(devices=4, staleness=staleness))
    )
    on_devices = replace(runtime.sampler.sampler, push=lambda params: params)
    ahead_of = replace(ahead_of, sampler=InProcess(on_devices))
    state = replace(fresh(runtime), params=None, opt_state=None)

    def start_rollout(runtime, params, state, first, skipped):
        events.append(f"sample {first // 8}")
        return SimpleNamespace(first=first, taken=8)

    monkeypatch.setattr(in_flight, "start_rollout", start_rollout)

    def receive(runtime, pending):
        events.append(f"take {pending.first // 8}")
        return pending

    monkeypatch.setattr(in_flight, "receive", receive)
    for done in range(3):
        minibatches = ahead_of.experiment.schedule.minibatches
        now = replace(state, step=state.step + minibatches * done, position=state.position + 8 * done)
        in_flight.next_rollout(ahead_of, now, flight)
        events.append("learn")
    assert events == wanted


def no_checkpoints(runtime):
    return replace(
        runtime,
        experiment=replace(DISAGGREGATED, schedule=replace(DISAGGREGATED.schedule, steps=9, checkpoint_every=0)),
    )


@pytest.mark.parametrize(
    ("staleness", "wanted"), [(0, [0, 1, 2, 3, 4, 5]), (1, [1, 2, 2, 4, 5, 5]), (9, [2, 2, 2, 5, 5, 5])]
)
def test_no_rollout_is_drawn_across_a_checkpoint(staleness, wanted):
    assert [find_last_ahead(staleness, done, lambda n: n % 3 == 0) for done in range(6)] == wanted


def test_parameters_are_pushed_in_their_compute_dtype_with_adapters_merged():
    half = replace(DISAGGREGATED, model=replace(experiment.model, dtype="bfloat16"), lora=Lora(rank=2))
    mesh, sampler_mesh = make_meshes(half)
    push = make_sampler(half.model, sampler_mesh, mesh).push
    state = init_state(half.model, optax.identity(), jax.random.key(0), mesh)
    whole = push(state.params)
    policy = TrainedPolicy(half.model, mesh, make_optimizer(half.optimizer))
    adapted = add_adapters(state, policy, half.lora)
    pushed = push(adapted.params)
    assert jax.tree.structure(pushed) == jax.tree.structure(whole)
    for path, leaf in jax.tree_util.tree_leaves_with_path(pushed):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert leaf.dtype == ("float32" if "norm" in name or "router" in name else "bfloat16"), name


def test_meshes_are_drawn_without_a_look_at_the_loss():
    """What is drawn was checked before, by `make_runtime`."""
    wrong = replace(DISAGGREGATED, loss=None, data=None)
    assert make_meshes(wrong) == make_meshes(DISAGGREGATED)
    with pytest.raises(UserError, match="loss: wanted a function"):
        make_runtime(wrong)


def test_parameters_are_pushed_in_8_bits(runtime):
    """Quantized where the parameters are, so that bytes are sent."""
    model, mesh = DISAGGREGATED.model, runtime.sampler.mesh
    params = fresh(runtime).params
    pushed = make_sampler(model, mesh, runtime.mesh, "int8").push(params)
    assert devices(pushed) == set(jax.devices()[4:])
    jax.tree.map(
        np.testing.assert_array_equal, pushed, make_inference_weights(params, model, runtime.mesh, weights_dtype="int8")
    )


def test_invalid_placements_are_rejected():
    def problems(**changes):
        return validate(replace(DISAGGREGATED, placement=replace(DISAGGREGATED.placement, **changes)), 8)

    assert problems() == []
    assert validate(replace(DISAGGREGATED, mesh=Mesh(fsdp=4)), 8) == [], "fsdp counts the learner's devices"
    assert "product is the 4 available devices" in validate(replace(DISAGGREGATED, mesh=Mesh(fsdp=8)), 8)[0]
    assert problems(devices=8) == ["placement.devices: wanted fewer than the 8 devices, got 8"]
    assert problems(staleness=-1) == ["placement.staleness: wanted at least 0, got -1"]
    assert "placement.mesh: wanted axes whose product is the 4 available devices" in problems(mesh=Mesh(fsdp=3))[0]
    (said, *_) = problems(devices=3, mesh=Mesh(data=3, fsdp=1))
    assert said.startswith("sampling.prompts: wanted rows in multiples of the 3 devices of placement.mesh for rows, ")


def test_parameters_are_sharded_over_the_devices_of_one_slice():
    """Width 32 fits the 32 devices of a slice, but not the 64 of two slices."""
    sampling = replace(DISAGGREGATED.sampling, prompts=64)
    wide = replace(
        DISAGGREGATED, placement=None, sampling=sampling, schedule=replace(DISAGGREGATED.schedule, minibatches=1)
    )
    too_few = "model.hidden_size: wanted a multiple of mesh.fsdp (64), got 32"
    assert too_few in validate(wide, 64)
    assert validate(wide, 64, slices=(2, 1, 1)) == []
    disaggregated = replace(wide, placement=Placement(devices=64))
    assert validate(disaggregated, 128, slices=(2, 1, 1)) == ["placement: " + too_few]
    assert validate(disaggregated, 128, slices=(2, 2, 1)) == []


@pytest.mark.parametrize(("devices", "fits"), [(1, True), (2, True), (3, False), (4, True), (5, False), (6, True)])
def test_with_several_processes_one_device_count_must_divide_the_other(monkeypatch, devices, fits):
    mesh, learner = make_mesh(Mesh(), jax.devices()[-devices:]), make_mesh(Mesh(), jax.devices()[:-devices])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    if fits:
        assert make_sampler(DISAGGREGATED.model, mesh, learner).mesh is mesh
        return
    with pytest.raises(
        UserError, match=f"placement.devices: wanted a divisor or a multiple of the other {8 - devices}"
    ):
        make_sampler(DISAGGREGATED.model, mesh, learner)


def test_staleness_without_a_correction_warns():
    (sentence,) = warnings(DISAGGREGATED)
    assert sentence.startswith("placement.staleness=1: ")
    assert warnings(replace(DISAGGREGATED, correction=truncate_geometric)) == []
    assert warnings(replace(DISAGGREGATED, placement=Placement(devices=4))) == []


def test_checkpoint_every_may_change_on_resumption_only_without_staleness(tmp_path):
    open_run(tmp_path, describe(DISAGGREGATED)).metrics.touch()
    rarer = replace(DISAGGREGATED, schedule=replace(DISAGGREGATED.schedule, checkpoint_every=4))
    with pytest.raises(UserError, match=r"schedule\.checkpoint_every: 2 -> 4"):
        open_run(tmp_path, describe(rarer))
    for placement in (None, Placement(devices=4)):
        workdir = tmp_path.with_name(f"{tmp_path.name}_{placement is None}")
        open_run(workdir, describe(replace(DISAGGREGATED, placement=placement)))
        open_run(workdir, describe(replace(rarer, placement=placement)))
