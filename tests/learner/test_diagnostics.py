"""Diagnostics against the same quantities computed directly; on a mesh, in packed rows, and only when they are due."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import (
    Batch,
    Steps,
    diagnostics,
    diagnostics_due,
    make_objective,
    new_state,
    run_updates,
    sharding,
    train_step,
    transformer,
)

from gspax import config, losses

CONFIG = replace(tiny.MOE, num_hidden_layers=2)
E, A = CONFIG.num_experts, CONFIG.num_experts_per_tok
B, T, ROWS = 8, 12, 4
SGD = optax.sgd(3.0)
SETTINGS = config.Diagnostics(every=2, rows=ROWS)


@functools.cache
def batch():
    """Rows of 2 prompt tokens and 1 to 8 response tokens, with old log-probs about 0.2 away."""
    rng = np.random.default_rng(0)
    column, end = np.arange(T)[None], rng.integers(3, 11, B)[:, None]
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (B, T), dtype=np.int32))
    segment, mask = jnp.asarray((column < end).astype(np.int32)), jnp.asarray((column >= 2) & (column < end))
    old = log_probs(tiny.params(CONFIG), tokens, segment) + jnp.asarray(0.2 * rng.normal(size=(B, T)), jnp.float32)
    advantage = jnp.asarray(rng.normal(size=B), jnp.float32)
    return Batch(tokens_BT=tokens, segment_BT=segment, mask_BT=mask, old_logp_BT=old, advantage=advantage)


@functools.partial(jax.jit, static_argnames="dtype")
def direct(params, tokens, segment, dtype="float32"):
    model = replace(CONFIG, dtype=dtype)
    hidden, routing = transformer.apply(params, model, tokens, segment, mesh=tiny.one_device())
    return losses.token_logp(transformer.logits(params, hidden), tokens), routing


def log_probs(params, tokens, segment):
    return direct(params, tokens, segment)[0]


def measured(mesh=None, on_policy=False):
    """The state, metrics and readings of an update with diagnostics; on the given mesh."""
    objective = make_objective(losses.grpo)
    update = train_step.make_update(tiny.settings(CONFIG, mesh), objective, SGD)
    measure = diagnostics.make_measure(tiny.settings(CONFIG, mesh), objective, losses.grpo, SETTINGS)
    state, data = new_state(jax.tree.map(jnp.copy, tiny.params(CONFIG)), SGD, jax.random.key(0)), batch()
    if mesh is not None:
        data = jax.device_put(data, sharding.named_sharding(mesh, "batch"))
        state = jax.device_put(state, sharding.named_sharding(mesh))
    state, metrics, scores, readings = measure(update, state, data, on_policy)
    return jax.device_get((state.params, metrics, scores, readings))


@functools.cache
def alone():
    return measured()


CHOSEN = np.arange(0, B, B // ROWS)


def test_rows_are_spread_over_the_prompts_of_each_device():
    rows = Batch(
        **{name: jnp.arange(16) for name in ("tokens_BT", "segment_BT", "mask_BT", "old_logp_BT", "advantage")}
    )

    def chosen(**options):
        return diagnostics.take_rows(rows, **{"rows": 4, "shards": 1, "adjacent": False} | options).tokens_BT.tolist()

    assert chosen() == [0, 4, 8, 12] and chosen(shards=2) == [0, 4, 8, 12]
    assert chosen(rows=3) == [0, 5, 10] and chosen(rows=99) == chosen(rows=0) == [*range(16)]
    assert chosen(shards=8) == [*range(0, 16, 2)], "at least one of each device"
    assert chosen(adjacent=True) == [0, 1, 2, 3] and chosen(adjacent=True, shards=2) == [0, 1, 8, 9]


def test_changed_choices_of_an_update_and_of_rounding_are_those_of_the_same_tokens():
    after, _, _, readings = alone()
    before, data = tiny.params(CONFIG), jax.tree.map(lambda x: x[CHOSEN], batch())

    def experts(params, dtype="float32"):
        return np.asarray(direct(params, data.tokens_BT, data.segment_BT, dtype)[1].expert)

    def changed(one, other):
        """By layer, in a loop over tokens."""
        shares = []
        for layer in range(CONFIG.num_hidden_layers):
            lost = [
                len({*one[layer, b, t]} - {*other[layer, b, t]}) / A
                for b in range(ROWS)
                for t in range(T)
                if data.segment_BT[b, t]
            ]
            shares.append(np.mean(lost))
        return shares

    update = readings.by_layer["routing/changed_by_update"]
    np.testing.assert_allclose(update, changed(experts(before), experts(after)), rtol=1e-6)
    assert (update > 0.05).all(), "the update is a large one"
    rounding = readings.by_layer["routing/changed_by_rounding"]
    np.testing.assert_allclose(rounding, changed(experts(before), experts(before, "bfloat16")), rtol=1e-6)
    assert (rounding < update).all()


def test_router_confidence_is_that_of_the_policy_before_the_update():
    data = jax.tree.map(lambda x: x[CHOSEN], batch())
    logits = np.float64(direct(tiny.params(CONFIG), data.tokens_BT, data.segment_BT)[1].logits)
    found = alone()[3].by_layer
    for layer in range(CONFIG.num_hidden_layers):
        tokens = [logits[layer, b, t] for b in range(ROWS) for t in range(T) if data.segment_BT[b, t]]
        probs = [np.exp(x) / np.exp(x).sum() for x in tokens]
        margins = [np.sort(x)[::-1][A - 1] - np.sort(x)[::-1][A] for x in tokens]
        np.testing.assert_allclose(found["routing/entropy"][layer], np.mean([-(p @ np.log(p)) for p in probs]), 1e-4)
        np.testing.assert_allclose(found["routing/confidence"][layer], np.mean([p.max() for p in probs]), 1e-4)
        np.testing.assert_allclose(found["routing/margin"][layer], np.mean(margins), 1e-4)


def test_the_gradient_is_compared_with_the_policy_gradient_on_policy():
    params, data = tiny.params(CONFIG), jax.tree.map(lambda x: x[CHOSEN], batch())

    def value(params, on_policy):
        logp = log_probs(params, data.tokens_BT, data.segment_BT)
        if on_policy:
            tokens = jnp.where(data.mask_BT, logp, 0).sum(-1) / data.mask_BT.sum(-1)
            return -(data.advantage * tokens).mean()
        return losses.reduce(losses.grpo(logp, data.old_logp_BT, data.advantage, data.mask_BT))[0]

    gradient = jax.jit(jax.grad(value), static_argnums=1)
    flat = [
        np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(gradient(params, on_policy))])
        for on_policy in (False, True)
    ]
    norms = [np.linalg.norm(each) for each in flat]
    found = alone()[3].gradient
    np.testing.assert_allclose(found["gradient/cosine"], flat[0] @ flat[1] / norms[0] / norms[1], rtol=1e-3)
    np.testing.assert_allclose(found["gradient/norm_ratio"], norms[0] / norms[1], rtol=1e-3)
    assert found["gradient/cosine"] < 0.999, "the minibatch is off-policy and clipped"


def test_trees_are_compared_as_vectors_in_float32():
    one, other = (
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])},
        {"a": jnp.array([0.0, 6.0]), "b": jnp.array([8.0])},
    )
    found = diagnostics.compare_trees(jax.tree.map(lambda x: x.astype(jnp.bfloat16), one), other)
    assert found["gradient/cosine"] == pytest.approx(32 / 50) and found["gradient/norm_ratio"] == pytest.approx(0.5)
    assert diagnostics.compare_trees(jax.tree.map(jnp.zeros_like, one), other)["gradient/cosine"] == 0
    assert np.isnan(diagnostics.compare_trees({"a": jnp.array([np.nan])}, {"a": jnp.ones(1)})["gradient/cosine"])


def test_readings_become_metrics_by_layer_and_length():
    readings = alone()[3]
    ratio = {name: np.asarray(x) for name, x in readings.ratio.items()}
    found = diagnostics.diagnostic_metrics(readings, CONFIG)
    assert found["routing/entropy"] == pytest.approx(np.mean(readings.by_layer["routing/entropy"]))
    assert found["routing/changed_by_update/layer_1"] == readings.by_layer["routing/changed_by_update"][1]
    assert {"ratio/token_max", "ratio/token_std", "ratio/sequence_std", "ratio/ess_products"} <= found.keys()
    assert {"gradient/cosine", "gradient/norm_ratio", "ratio/length_exponent"} <= found.keys()
    several = [2**k for k, count in enumerate(ratio["bin_sequences"]) if count >= 2]
    assert [int(name.split("_")[-1]) for name in found if name.startswith("ratio/sequences/")] == several
    mixed = replace(CONFIG, num_hidden_layers=3, mlp_only_layers=(0,))
    names = diagnostics.diagnostic_metrics(readings, mixed)
    assert "routing/margin/layer_2" in names and "routing/margin/layer_0" not in names


def test_an_update_is_the_same_with_diagnostics():
    update = train_step.make_update(tiny.settings(CONFIG), make_objective(losses.grpo), SGD)
    state = new_state(jax.tree.map(jnp.copy, tiny.params(CONFIG)), SGD, jax.random.key(0))
    state, metrics, _ = jax.device_get(update(state, batch(), False))
    params, found, _, _ = alone()
    jax.tree.map(np.testing.assert_array_equal, (state.params, metrics), (params, found))


@pytest.mark.slow
def test_a_mesh_gives_the_readings_of_one_device():
    mesh = sharding.make_mesh(config.Mesh(data=2, fsdp=2), jax.devices()[:4])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5), measured(mesh)[3], alone()[3])


@pytest.mark.parametrize(("epochs", "batches"), [(1, 3), (2, 2), (1, 1)])
def test_only_the_last_update_of_a_rollout_batch_diagnostics_due(epochs, batches):
    seen = []

    def update(state, batch, on_policy):
        scores = train_step.Scores(jnp.zeros((B, T)), jnp.zeros((B, T)))
        return replace(state, step=state.step + 1), {"loss": state.step, "empty": False, "skipped": False}, scores

    def measure(update, state, batch, on_policy):
        seen.append((int(state.step), on_policy))
        return *update(state, batch, on_policy), diagnostics.Readings({}, {"gradient/cosine": state.step}, {})

    state = new_state({"w": jnp.zeros(1)}, SGD, jax.random.key(0))
    rollout = [replace(batch(), old_logp_BT=None)] + [batch()] * (batches - 1)
    scores = dict.fromkeys(range(1, batches), train_step.Scores(jnp.zeros((B, T)), jnp.zeros((B, T))))
    run = functools.partial(run_updates, Steps(None, update, None, None, None, range(0)), state, rollout, scores)
    found = run(epochs=epochs, rate=optax.constant_schedule(1.0), measure=measure)
    last = epochs * batches - 1
    assert seen == [(last, last == 0)] and found.readings.gradient == {"gradient/cosine": last}
    assert len(found.metrics) == epochs * batches and found.state.step == last + 1
    assert run(epochs=epochs, rate=optax.constant_schedule(1.0)).readings.gradient == {}


@pytest.mark.parametrize(("done", "due"), [(0, False), (1, True), (2, False), (3, True), (4, True)])
def test_diagnostics_are_due_every_few_steps_and_at_the_last(done, due):
    schedule = config.Schedule(steps=5, minibatches=2)
    runtime = SimpleNamespace(experiment=SimpleNamespace(diagnostics=SETTINGS, schedule=schedule))
    assert diagnostics_due(runtime, done) == due
    runtime.experiment.diagnostics = None
    assert not diagnostics_due(runtime, done)


@pytest.mark.slow
def test_packed_rows_give_the_readings_of_one_row_per_sequence():
    """Two sequences in a row: the same tokens are routed, and the same sums make gradients and ratios."""
    objective, all_rows, data = make_objective(losses.gspo), config.Diagnostics(rows=0), batch()

    def pack(x, join=lambda x: x):
        return jnp.concatenate([x[0::2], join(x[1::2])], axis=1)

    packed = replace(
        data,
        tokens_BT=pack(data.tokens_BT),
        segment_BT=pack(data.segment_BT, lambda x: 2 * x),
        mask_BT=pack(data.mask_BT),
        old_logp_BT=pack(data.old_logp_BT),
        advantage=pack(jnp.broadcast_to(data.advantage[:, None], (B, T))),
    )
    found = []
    for given in (data, packed):
        update = train_step.make_update(tiny.settings(CONFIG), objective, SGD)
        measure = diagnostics.make_measure(
            tiny.settings(CONFIG, packed=given is packed), objective, losses.gspo, all_rows
        )
        state = new_state(jax.tree.map(jnp.copy, tiny.params(CONFIG)), SGD, jax.random.key(0))
        readings = jax.device_get(measure(update, state, given, False)[3])
        found.append(diagnostics.diagnostic_metrics(readings, CONFIG))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=2e-3, atol=1e-5, err_msg=name)
