"""The train step: equal to the formula, in microbatches and on a mesh; skipped updates; memory; initial state."""

import functools
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import (
    Adapted,
    Batch,
    Inputs,
    TrainedPolicy,
    abstract_state,
    applied_updates,
    expert_counts,
    expert_load,
    forward,
    init_state,
    learning_rate,
    make_optimizer,
    make_route,
    moe,
    new_state,
    objective,
    sharding,
    train_step,
    transformer,
    warm_start,
)
from small_experiment import experiment, objective_of

from gspax import config, losses
from gspax.config import optimizers
from gspax.config.optimizers import adamw
from gspax.losses import correction, kl

CONFIG = tiny.MOE
B, T = 16, 12
LOSSES = {
    **{"gspo": losses.gspo, "gspo_token": losses.gspo_token, "grpo": losses.grpo},
    "nll": lambda logp, old_logp, advantage, mask: warm_start.nll(logp, mask),
}
SGD = optax.sgd(1.0)  # the parameters' change is the gradient
TEMPERATURE = 0.8
SCORING = 3  # shard_maps of scoring: log-probs, and two copies of the head, one of them for its gradient only


@functools.cache
def batch(seed=0):
    """Ragged prompts and completions; old log-probs near the policy's so that both clip bounds are reached."""
    rng = np.random.default_rng(seed)
    prompt, length = rng.integers(1, 5, B), rng.integers(0, 7, B)
    column = np.arange(T)[None]
    end = (prompt + length)[:, None]
    tokens = rng.integers(0, CONFIG.vocab_size, (B, T), dtype=np.int32)
    given = Batch(
        tokens_BT=jnp.asarray(tokens),
        segment_BT=jnp.asarray((column < end).astype(np.int32)),
        mask_BT=jnp.asarray((column >= prompt[:, None]) & (column < end)),
        old_logp_BT=jnp.zeros((B, T)),
        advantage=jnp.asarray(rng.normal(size=B), jnp.float32),
    )
    logp = direct(tiny.params(CONFIG), given)[0]
    return replace(given, old_logp_BT=logp + jnp.asarray(rng.normal(size=(B, T)) * 0.1, jnp.float32))


@functools.partial(jax.jit, static_argnames="temperature")
def direct(params, batch, temperature=TEMPERATURE):
    """Log-probs and entropies (both about the token in their column) and experts, from the logits of all tokens."""
    hidden, routing = transformer.apply(params, CONFIG, batch.tokens_BT, batch.segment_BT, mesh=tiny.one_device())
    logits = transformer.logits(params, hidden)
    logp_all = jax.nn.log_softmax(logits / temperature)
    entropy = jnp.pad(-(jnp.exp(logp_all) * logp_all).sum(-1)[:, :-1], ((0, 0), (1, 0)))
    return losses.token_logp(logits, batch.tokens_BT, temperature=temperature), entropy, routing.expert


def fresh(optimizer=SGD):
    state = new_state(jax.tree.map(jnp.copy, tiny.params(CONFIG)), optimizer, jax.random.key(0))
    return on_device(state)


def on_device(tree):
    """The tree placed as a run places it, so that programs are not compiled for other placements too."""
    return jax.device_put(tree, sharding.named_sharding(tiny.one_device()))


def make_step(loss, optimizer, model=CONFIG, **kwargs):
    return train_step.make_train_step(tiny.settings(model, **kwargs), objective.make_objective(loss), optimizer)


@functools.cache
def step(name="gspo", rows=0):
    """The train step of a loss on one device; most tests share one to save compilations."""
    return make_step(LOSSES[name], SGD, temperature=TEMPERATURE, microbatch_rows=rows)


@functools.cache
def whole(name):
    """State and metrics after one update of the batch without microbatches."""
    return step(name)(fresh(), batch())


def close(got, want, rtol=2e-4, atol=2e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["gspo", *(pytest.param(name, marks=pytest.mark.slow) for name in (*LOSSES,)[1:])])
def test_update_is_the_gradient_of_the_reduced_loss(name):
    data = batch()

    def reduced(params):
        logp, _, _ = direct(params, data)
        return losses.reduce(LOSSES[name](logp, data.old_logp_BT, data.advantage, data.mask_BT))

    (value, metrics), grads = jax.jit(jax.value_and_grad(reduced, has_aux=True))(tiny.params(CONFIG))
    state, got = whole(name)
    close(state.params, jax.tree.map(jnp.subtract, tiny.params(CONFIG), grads))
    np.testing.assert_allclose(got["loss"], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    close({name: got[name] for name in metrics}, metrics)
    assert state.step == 1 and state.position == 0


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gspo", 4),
        *(
            pytest.param(name, rows, marks=pytest.mark.slow)
            for name in LOSSES
            for rows in (1, 4, 8, 16)
            if (name, rows) != ("gspo", 4)
        ),
    ],
)
def test_microbatches_make_the_update_of_the_batch(name, rows):
    want_state, want = whole(name)
    state, got = step(name, rows)(fresh(), batch())
    close(state.params, want_state.params)
    close(got, want)


def test_fallbacks_to_the_ring_are_counted_over_layers_and_microbatches(monkeypatch):
    run_experts, layers = moe._run_experts, CONFIG.num_hidden_layers
    monkeypatch.setattr(moe, "_run_experts", lambda *args: (run_experts(*args)[0], jnp.int32(1)))
    monkeypatch.setattr(train_step, "exchanges_rows", lambda mesh: True)
    metrics = make_step(losses.gspo, SGD, microbatch_rows=4)(fresh(), batch())[1]
    assert metrics["ring_fallbacks"] == layers * B // 4


@pytest.mark.parametrize(("experts", "dtype"), [(128, "uint8"), (255, "uint8"), (256, "uint16")])
def test_expert_ids_have_the_smallest_dtype_that_holds_the_one_of_padding_too(experts, dtype):
    assert config.expert_id_dtype(replace(CONFIG, num_experts=experts)) == dtype
    assert np.iinfo(dtype).max >= experts


def test_rows_are_exchanged_on_a_mesh_that_shards_experts():
    assert moe.exchanges_rows(sharding.make_mesh(config.Mesh(fsdp=2, expert=4)))
    assert not moe.exchanges_rows(sharding.make_mesh(config.Mesh(fsdp=8, expert=1)))
    assert not moe.exchanges_rows(tiny.one_device())


ADAM = make_optimizer(config.Optimizer(learning_rate=1e-2))


@functools.cache
def adam_alone():
    return make_step(losses.gspo, ADAM, temperature=TEMPERATURE)(fresh(ADAM), batch())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("mesh", [config.Mesh(), config.Mesh(data=2, fsdp=4), config.Mesh(data=8, fsdp=1)], ids=str)
def test_eight_devices_make_the_update_of_one(mesh, rows):
    alone, want = adam_alone()
    devices = sharding.make_mesh(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(TrainedPolicy(CONFIG, devices, ADAM)))
    state = jax.device_put(fresh(ADAM), shardings)
    update = make_step(losses.gspo, ADAM, temperature=TEMPERATURE, microbatch_rows=rows, mesh=devices)
    spread, got = update(state, jax.device_put(batch(), sharding.named_sharding(devices, "batch")))
    close(got, want, rtol=1e-3)
    close(want, whole("gspo")[1])  # metrics do not depend on the optimizer: grad_norm is measured before clipping
    moments, wanted = spread.opt_state[1][0], alone.opt_state[1][0]
    assert int(moments.count) == int(wanted.count) == 1
    close(moments.mu, wanted.mu, rtol=1e-3, atol=1e-5)
    # Adam divides by the gradient's own size, so only gradients above rounding can be compared
    close(spread.params, alone.params, rtol=1e-3, atol=1e-3)
    kept = jax.tree.map(lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted, leaf.ndim), spread, shardings)
    assert all(jax.tree.leaves(kept))


def test_on_a_mesh_attention_experts_and_scoring_run_under_shard_map():
    devices = sharding.make_mesh(config.Mesh())
    state = abstract_state(TrainedPolicy(CONFIG, devices, SGD))
    update = make_step(losses.gspo, SGD, mesh=devices)
    assert tiny.primitives(update, state, batch()).count("shard_map") >= 2 * (2 + SCORING), "forward and backward"
    score = train_step.make_score(tiny.settings(CONFIG, devices))
    arrays = batch().tokens_BT, batch().segment_BT, batch().mask_BT
    assert tiny.primitives(score, state.params, *arrays).count("shard_map") == 2 + SCORING


@functools.cache
def score(rows):
    return train_step.make_score(
        tiny.settings(CONFIG, temperature=TEMPERATURE, microbatch_rows=rows), keep_experts=True
    )


@pytest.mark.parametrize("rows", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_score_equals_the_log_probs_of_whole_logits(rows):
    data, params = batch(), tiny.params(CONFIG)
    want, entropy, experts = direct(params, data)
    logp, got_entropy, got_experts, *_ = score(rows)(params, data.tokens_BT, data.segment_BT, data.mask_BT)
    close(logp[data.mask_BT], want[data.mask_BT], rtol=1e-5, atol=1e-5)
    close(got_entropy[data.mask_BT], entropy[data.mask_BT], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got_experts.swapaxes(0, 1), experts)
    assert got_experts.dtype == np.uint8


def with_experts(data, seed=0):
    """The batch with experts the router did not choose, and a reference near the old policy."""
    shape = (B, CONFIG.num_hidden_layers, T, 1)
    first = np.random.default_rng(seed).integers(0, CONFIG.num_experts, shape, dtype=np.int32)
    expert = jnp.asarray(np.concatenate([first, (first + 1) % CONFIG.num_experts], axis=-1))
    padding = (data.segment_BT == 0)[:, None, :, None]
    return replace(
        data,
        expert_BLTA=jnp.where(padding, CONFIG.num_experts, expert),
        ref_logp_BT=data.old_logp_BT - 0.2,
        sampler_logp_BT=data.old_logp_BT + 0.1,
    )


def test_replay_forces_the_experts_of_the_batch():
    data, params = with_experts(batch()), tiny.params(CONFIG)
    free_logp, _, free_expert = direct(params, data)
    run = jax.jit(functools.partial(forward, settings=tiny.settings(CONFIG, temperature=TEMPERATURE)))
    experts = data.expert_BLTA.astype(np.uint8)
    replayed = run(params, rows=Inputs(data.tokens_BT, data.segment_BT, expert_BLTA=experts))
    np.testing.assert_array_equal(replayed.routing.expert, data.expert_BLTA.swapaxes(0, 1))
    assert (free_expert != replayed.routing.expert).any()
    assert np.abs(replayed.logp_BT - free_logp)[data.mask_BT].max() > 1e-3
    with pytest.raises(ValueError, match=r"batch\.expert_BLTA: wanted the experts .*, got None"):
        jax.eval_shape(make_step(losses.gspo, SGD, routing_replay=True), fresh(), batch())


EVERYTHING = replace(
    experiment,
    loss=partial(losses.gspo, aggregate=losses.by_token),  # microbatches weigh differently
    correction=correction.truncate_tokens,
    reference=config.Reference(loss=kl.token_kl, coefficient=0.3),
    regularizers=config.Regularizers(entropy=0.1, load_balance=0.1, router_z=0.1),
    calibration=config.Calibration(),
)


def test_an_objective_with_every_term_equals_its_microbatches_and_balances_the_routers():
    data, results = with_experts(batch()), []
    for rows in (0, 4):
        update = train_step.make_train_step(
            tiny.settings(CONFIG, temperature=TEMPERATURE, microbatch_rows=rows, routing_replay=True),
            objective_of(EVERYTHING),
            SGD,
        )
        results.append(
            update(replace(fresh(), adapted=Adapted(jnp.float32(0.01), jnp.float32(0.02), jnp.float32(0.01))), data)
        )
    (one, want), (split, got) = results
    close(split.params, one.params)
    close(got, want)
    assert {"load_balance", "router_z", "entropy_bonus", "ref_kl", "correction_mean"} <= want.keys()
    counted = jnp.where(data.mask_BT[:, None, :, None], data.expert_BLTA, CONFIG.num_experts)
    load = expert_load(counted.swapaxes(0, 1), CONFIG.num_experts)
    rows = Inputs(data.tokens_BT, data.segment_BT, expert_BLTA=data.expert_BLTA)
    outputs = forward(tiny.params(CONFIG), tiny.settings(CONFIG), rows)
    logits = outputs.routing.logits
    share = (jax.nn.softmax(logits) * load[:, None, None]).sum(-1).mean(0)[data.mask_BT].mean()
    np.testing.assert_allclose(want["load_balance"], share, rtol=1e-4)


def test_unused_router_logits_are_not_kept():
    """In float32, [layers, rows, tokens, experts] would be the largest array of an update."""
    data = with_experts(batch())
    kept = f"f32[{CONFIG.num_hidden_layers},{B},{T},{CONFIG.num_experts}]"

    update = make_step(losses.gspo, SGD, model=replace(CONFIG, remat="full"))
    traced = update.trace(fresh(), data)
    assert kept in str(traced.jaxpr), "the forward pass returns them"
    assert kept not in traced.lower().compile().as_text()


def test_a_non_finite_loss_or_gradient_skips_the_update():
    """Parameters and optimizer state stay, and the next update continues from them."""

    def loss(logp_BT, old_logp_BT, advantage_B, mask_BT):
        """At an advantage of 0 the value is 0 and the gradient is not finite."""
        nll_B = -logp_BT.sum(axis=-1, where=mask_BT)
        return losses.Terms(jnp.sqrt(nll_B * advantage_B), jnp.ones_like(nll_B), {})

    adam, model = optax.adam(1e-2), replace(CONFIG, num_experts=0, num_hidden_layers=1)
    update = make_step(loss, adam, model=model)
    good = replace(batch(), advantage=jnp.ones(B), mask_BT=jnp.asarray(batch().mask_BT).at[:, 1].set(True))
    start = new_state(jax.tree.map(jnp.copy, tiny.params(model)), adam, jax.random.key(0))
    state, metrics = update(start, good)
    assert metrics["skipped"] == 0
    before = jax.device_get((state.params, state.opt_state))
    for step, (advantage, loss_is_finite) in enumerate([(jnp.nan, False), (0.0, True)], start=2):
        state, metrics = update(state, replace(good, advantage=good.advantage.at[3].set(advantage)))
        assert metrics["skipped"] == 1 and state.step == step
        assert np.isfinite(metrics["loss"]) == loss_is_finite and not np.isfinite(metrics["grad_norm"])
        chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), before)
    state, metrics = update(state, good)
    assert metrics["skipped"] == 0 and state.opt_state[0].count == 2


def test_the_learning_rate_is_that_of_the_applied_updates():
    settings = config.Optimizer(
        learning_rate=1.0,
        schedule=functools.partial(optimizers.linear, updates=10),
        transform=optax.sgd,
        max_grad_norm=0,
    )
    optimizer = make_optimizer(settings)
    update, state = make_step(losses.gspo, optimizer, temperature=TEMPERATURE), fresh(optimizer)
    spoiled = replace(batch(), advantage=batch().advantage.at[3].set(jnp.nan))
    for _ in range(4):
        state, metrics = update(state, spoiled)
        assert metrics["skipped"] == 1
        before = jax.device_get(state.params)
        state, _ = update(state, batch())
    rate = learning_rate(settings)(applied_updates(state) - 1)
    assert rate == pytest.approx(0.7) and state.step == 8
    exact, _ = step()(on_device(new_state(jax.tree.map(jnp.asarray, before), SGD, jax.random.key(0))), batch())
    moved, whole = (jax.tree.map(jnp.subtract, each.params, before) for each in (state, exact))
    assert optax.tree.norm(moved) / optax.tree.norm(whole) == pytest.approx(0.7, rel=1e-4)


@pytest.mark.parametrize(("name", "skipped"), [("grpo", 1), ("gspo", 0)])
def test_the_guards_ratio_is_that_of_the_loss(name, skipped):
    """One token's ratio is 1,000; over its sequence the ratio is below 10."""
    data = batch()
    row = int(data.mask_BT.sum(axis=1).argmax())
    column = int(data.mask_BT[row].argmax())
    far = replace(data, old_logp_BT=direct(tiny.params(CONFIG), data)[0].at[row, column].add(-np.log(1000)))
    settings, guard = tiny.settings(CONFIG, temperature=TEMPERATURE), config.Guard(max_ratio=10.0)
    update = train_step.make_update(settings, objective.make_objective(LOSSES[name]), SGD, guard)
    _, metrics, _ = update(fresh(), far, False)
    assert metrics["ratio_max"] < 10 and metrics["skipped"] == skipped


@pytest.mark.parametrize("rows", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_an_update_can_compute_its_own_old_log_probs(rows):
    """Exact in value and gradient, under any split: the update of a batch scored by the same policy."""
    data = batch()
    logp, entropy, experts = direct(tiny.params(CONFIG), data)
    update = train_step.make_update(
        tiny.settings(CONFIG, temperature=TEMPERATURE, microbatch_rows=rows), objective.make_objective(losses.gspo), SGD
    )
    data = jax.device_put(data, logp.sharding)
    want_state, want, _ = update(fresh(), replace(data, old_logp_BT=logp), False)
    unknown, on_policy = train_step.fill_old_logp(replace(data, old_logp_BT=None))
    assert on_policy and np.isnan(unknown.old_logp_BT).all(), "a use of the stand-in would show"
    state, got, scores = update(fresh(), unknown, on_policy)
    close(state.params, want_state.params)
    close({**got, "ratio_deviation": 0.0}, {**want, "ratio_deviation": 0.0}, atol=1e-5)
    assert got["ratio_min"] == got["ratio_max"] == 1 and got["ratio_deviation"] == got["kl"] == 0
    assert got["grad_norm"] > 0.01
    close(scores.logp_BT[data.mask_BT], logp[data.mask_BT], rtol=1e-5, atol=1e-5)
    close(scores.entropy_BT[data.mask_BT], entropy[data.mask_BT], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scores.count_LE, expert_counts(experts, CONFIG.num_experts))
    of_responses = jnp.where(data.mask_BT[None, ..., None], experts, CONFIG.num_experts)
    np.testing.assert_array_equal(scores.response_LE, expert_counts(of_responses, CONFIG.num_experts))
    pull = np.abs(data.advantage)[data.mask_BT.any(1)]  # on policy a sequence moves by its advantage
    assert got["gradient_share_max"] == pytest.approx(pull.max() / pull.sum(), rel=1e-4)
    assert got["gradient_ess_min"] == pytest.approx(pull.sum() ** 2 / (len(pull) * (pull**2).sum()), rel=1e-4)
    assert got["weight_ess_min"] == 1
    assert update._cache_size() == 1


SIGMOIDS, SPEED = tiny.CONFIGS["a router of sigmoids"], 0.01


def test_correction_biases_of_layers_that_alternate_move_toward_equal_loads():
    model = replace(SIGMOIDS, num_hidden_layers=5, decoder_sparse_step=2)
    before = tiny.params(model)
    assert_moved(model, before, *update_biases(model, before, SPEED), SPEED)


def assert_moved(model, before, after, count_LE, speed):
    """By the speed, up where an expert has fewer tokens than the mean."""
    wanted_LE = speed * np.sign(count_LE.mean(axis=1, keepdims=True) - count_LE)
    assert count_LE.shape == (config.sparse_layers(model), model.num_experts) and (wanted_LE > 0).any()
    for number, wanted_E in zip(config.sparse_numbers(model), wanted_LE, strict=True):
        place = config.layer_places(model)[number]
        old_E, new_E = (
            functools.reduce(lambda tree, key: tree[key], (*place.stack, "mlp", "correction_bias"), params["runs"])
            for params in (before, after)
        )
        close(np.asarray(new_E)[place.position] - np.asarray(old_E)[place.position], wanted_E, atol=1e-6)


def test_the_numbers_that_scale_layers_are_not_trained():
    """A weight decay of all parameters would change them."""
    params = {"layer_scale": jnp.full((2, 1), 0.8), "up": jnp.full((2, 3), 0.8)}
    optimizer = make_optimizer(config.Optimizer(learning_rate=0.1, transform=partial(optax.adamw, weight_decay=0.5)))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert jnp.all(updates["layer_scale"] == 0) and jnp.all(updates["up"] < 0)


def test_all_but_correction_biases_of_a_run_of_layers_moves_as_without_a_speed():
    """In bfloat16, beside biases in float32, which stay as they are without a speed."""
    model = replace(SIGMOIDS, param_dtype="bfloat16")
    before = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key == "correction_bias" else leaf.astype("bfloat16"),
        tiny.params(replace(model, param_dtype="float32")),
    )
    (moved, count_LE), (still, _) = (update_biases(model, before, speed) for speed in (SPEED, 0.0))
    assert_moved(model, before, moved, count_LE, SPEED)

    def leaves(params, biases):
        with_paths = jax.tree_util.tree_leaves_with_path(params)
        return [leaf for path, leaf in with_paths if (path[-1].key == "correction_bias") == biases]

    chex.assert_trees_all_equal(leaves(still, True), leaves(before, True))
    assert (leaves(moved, True)[0] != leaves(before, True)[0]).any()
    # A hundredth of a step: two programs round differently, and Adam magnifies that where a gradient is near 0.
    chex.assert_trees_all_close(leaves(moved, False), leaves(still, False), atol=1e-3)


def update_biases(model, before, speed):
    """The parameters after an update, and the tokens of each expert."""
    optimizer = make_optimizer(config.Optimizer(learning_rate=0.1), model.param_dtype)
    settings = tiny.settings(model, bias_update_speed=speed)
    step = train_step.make_update(settings, objective.make_objective(losses.gspo), optimizer)
    state = jax.tree.map(jnp.copy, new_state(before, optimizer, jax.random.key(0)))
    state, _, scores = step(state, batch(), False)
    return state.params, np.asarray(scores.count_LE)


def test_unknown_arrays_of_a_batch_are_refused_where_they_are_used():
    unknown, step = replace(batch(), old_logp_BT=None), make_step(losses.gspo, SGD)
    with pytest.raises(ValueError, match=r"batch\.old_logp_BT: wanted log-probs of the old policy .*, got None"):
        jax.eval_shape(step, fresh(), unknown)
    with pytest.raises(ValueError, match=r"batch\.advantage: wanted advantages, got None"):
        jax.eval_shape(step, fresh(), replace(batch(), advantage=None))
    known = batch()
    assert train_step.fill_old_logp(known) == (known, False)


@pytest.mark.parametrize("shards", [1, 8])
def test_some_rows_show_the_experts_that_are_chosen(shards):
    data, params = batch(), tiny.params(CONFIG)
    mesh = sharding.make_mesh(config.Mesh(), jax.devices()[:shards])
    found = make_route(CONFIG, mesh)(params, data.tokens_BT, data.segment_BT)
    rows = range(8) if shards == 1 else range(0, B, 2)
    np.testing.assert_array_equal(found, direct(params, data)[2][:, jnp.array(rows)])


def test_a_loss_can_depend_on_the_number_of_updates_before():
    @losses.has_traits(losses.Traits(updates=True))
    def from_the_second_on(*rows, updates=0):
        terms = losses.importance_sampling(*rows)
        return terms._replace(value=terms.value * (updates >= 1))

    update = make_step(from_the_second_on, SGD)
    state, first = update(fresh(), batch())
    _, second = update(state, batch())
    assert first["loss"] == first["grad_norm"] == 0
    assert second["loss"] != 0 and second["grad_norm"] > 0


def test_first_update_of_a_rollout_batch_has_ratio_one():
    data = batch()
    data = replace(data, old_logp_BT=score(4)(tiny.params(CONFIG), data.tokens_BT, data.segment_BT, data.mask_BT)[0])
    _, metrics = step("gspo", 4)(fresh(), data)
    assert abs(metrics["ratio_min"] - 1) < 1e-5 and abs(metrics["ratio_max"] - 1) < 1e-5
    assert metrics["clip_fraction_tokens"] == 0


def test_the_step_compiles_once():
    state = step()(fresh(), batch())[0]
    compiled = step()._cache_size()
    state = step()(state, replace(batch(), mask_BT=~batch().mask_BT))[0]
    assert state.step == 2 and step()._cache_size() == compiled == 1


def largest_array(function, *args):
    """Number of elements of the largest array in a function's jaxpr."""
    made = tiny.equations(jax.make_jaxpr(function)(*args).jaxpr)
    return max(array.aval.size for equation in made for array in equation.outvars if hasattr(array.aval, "size"))


def test_microbatches_halve_the_largest_array():
    data = batch()
    args = tiny.params(CONFIG), data.tokens_BT, data.segment_BT, data.mask_BT
    assert largest_array(score(4), *args) <= largest_array(score(0), *args) / 2
    state = new_state(args[0], SGD, jax.random.key(0))
    assert largest_array(step("gspo", 4), state, data) <= largest_array(step(), state, data) / 2


@pytest.mark.parametrize("chunk", [2 * B, 2**40])
def test_logits_of_the_whole_batch_exist_only_within_the_budget(monkeypatch, chunk):
    wide = replace(CONFIG, vocab_size=1000)
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: chunk)
    params = transformer.abstract_params(wide)
    state = jax.eval_shape(lambda params: new_state(params, SGD, jax.random.key(0)), params)
    update = make_step(losses.gspo, SGD, model=wide)
    assert (largest_array(update, state, batch()) >= B * (T - 1) * 1000) == (chunk == 2**40)


def test_rows_without_a_response_do_not_move_the_parameters():
    data = batch()
    empty = replace(data, mask_BT=jnp.zeros_like(data.mask_BT))
    state, metrics = step()(fresh(), empty)
    close(state.params, tiny.params(CONFIG), rtol=0, atol=0)
    assert metrics["loss"] == 0 and np.isfinite(list(metrics.values())).all()


def test_an_update_without_response_tokens_changes_nothing_and_is_no_skipped_one():
    """Adam's momentum of earlier updates would move the parameters."""
    adam, data = optax.adam(1e-2), batch()
    update = make_step(losses.gspo, adam)
    state, metrics = update(fresh(adam), data)
    assert metrics["empty"] == metrics["skipped"] == 0
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = update(state, replace(data, mask_BT=jnp.zeros_like(data.mask_BT)))
    assert metrics["empty"] == 1 and metrics["skipped"] == 0 and state.step == 2
    chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), before)


def test_the_given_state_is_donated():
    state = fresh()
    step()(state, batch())
    assert state.params["embedding"].is_deleted()


def test_rows_that_do_not_divide_into_microbatches_are_rejected():
    with pytest.raises(ValueError, match="must divide the batch's 16 rows, got 5"):
        make_step(losses.gspo, SGD, microbatch_rows=5)(fresh(), batch())


def test_warm_start_loss_is_the_mean_negative_log_likelihood_per_token():
    data = batch()
    logp = direct(tiny.params(CONFIG), data)[0]
    value, _ = losses.reduce(warm_start.nll(logp, data.mask_BT))
    np.testing.assert_allclose(value, -np.asarray(logp)[np.asarray(data.mask_BT)].mean(), rtol=1e-5)


def test_learning_rate_warms_up_then_stays_constant():
    rate = learning_rate(config.Optimizer(learning_rate=2.0, warmup_updates=4))
    assert [float(rate(count)) for count in (0, 1, 2, 4, 100)] == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert float(learning_rate(config.Optimizer(learning_rate=2.0))(0)) == 2.0


def test_gradients_are_clipped_by_their_global_norm():
    optimizer = make_optimizer(
        config.Optimizer(learning_rate=1.0, max_grad_norm=0.5, transform=partial(adamw, b1=0.0, b2=0.0, eps=1e3))
    )
    params = {"w": jnp.zeros(2)}
    updates, _ = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -np.array([0.3, 0.4]) / (np.array([0.3, 0.4]) + 1e3), rtol=1e-3)


def test_initial_state_follows_the_sharding_rules_and_does_not_depend_on_the_mesh():
    optimizer = make_optimizer(config.Optimizer())
    key = jax.random.key(3)
    spread = init_state(CONFIG, optimizer, key, sharding.make_mesh(config.Mesh(data=2, fsdp=4)))
    alone = init_state(CONFIG, optimizer, key, sharding.make_mesh(config.Mesh(), jax.devices()[:1]))
    close(spread.params, alone.params, rtol=0, atol=0)
    # parameters use fold_in(key, 0): samples use other numbers
    close(alone.params, jax.jit(transformer.init, static_argnums=0)(CONFIG, jax.random.fold_in(key, 0)))
    gate = spread.params["runs"][0]["mlp"]["gate"]
    assert gate.sharding.spec[2] == "fsdp" and gate.addressable_shards[0].data.shape[2] == CONFIG.hidden_size // 4
    moment = spread.opt_state[1][0].mu["runs"][0]["mlp"]["gate"]
    assert moment.sharding.is_equivalent_to(gate.sharding, gate.ndim)


def test_optimizer_is_adamw_and_max_grad_norm_0_means_no_clipping():
    settings = config.Optimizer(
        learning_rate=0.1,
        max_grad_norm=0.0,
        transform=partial(adamw, weight_decay=0.3, b1=0.8, b2=0.7, eps=1e-2),
    )
    optimizer, params = make_optimizer(settings), jnp.array([[2.0, -3.0]])
    state = optimizer.init(params)
    mean = square = np.zeros((1, 2))
    for count, grad in enumerate(([3.0, 40.0], [-1.0, 5.0], [2.0, 0.1]), start=1):
        grad = np.array([grad])
        mean, square = 0.8 * mean + 0.2 * grad, 0.7 * square + 0.3 * grad**2
        adam = mean / (1 - 0.8**count) / (np.sqrt(square / (1 - 0.7**count)) + 1e-2)
        expected = -0.1 * (adam + 0.3 * np.asarray(params))
        updates, state = optimizer.update(jnp.asarray(grad, jnp.float32), state, params)
        np.testing.assert_allclose(updates, expected, rtol=1e-4)
        params = params + updates
