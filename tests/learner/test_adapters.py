"""Adapters: the weights they stand for, their initialization, their training, and whole runs."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import (
    Batch,
    Checkpoints,
    Inputs,
    RunDir,
    Skipped,
    TrainedPolicy,
    abstract_state,
    adapters,
    add_adapters,
    combine,
    dense,
    enter_run,
    evaluate_run,
    forward,
    init_state,
    is_low_rank,
    load_first,
    loop,
    make_inference_weights,
    make_runtime,
    new_state,
    objective,
    partition,
    peft,
    record,
    sampler,
    sharding,
    train_step,
    transformer,
    write_adapters,
)
from api import named_leaves as by_path
from orbax.checkpoint import PyTreeCheckpointer
from small_experiment import experiment

from gspax import config, losses
from gspax.experiment import describe

LORA = config.Lora(rank=3, alpha=6.0)
CONFIG = replace(tiny.MOE, num_hidden_layers=2, mlp_only_layers=(0,))  # a dense layer and one with experts
B, T = 8, 6


init = jax.jit(adapters.init, static_argnums=(0, 1))


@functools.cache
def policy(seed=0, lora=LORA):
    """The parameters of CONFIG with adapters whose b is not 0."""
    factors = init(CONFIG, lora, jax.random.key(seed))
    noise = jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(factors)))
    leaves, tree = jax.tree.flatten(factors)
    leaves = [0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(noise, leaves, strict=True)]
    return adapters.attach_adapters(tiny.params(CONFIG), jax.tree.unflatten(tree, leaves), lora)


def base(params):
    """The tree with every `LowRank` replaced by its frozen matrix."""
    return jax.tree.map(lambda leaf: leaf.base if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank)


def low_ranks(params):
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_low_rank)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves if is_low_rank(leaf)}


def by_hand(name, leaf):
    """base + alpha / rank · a b of one weight, with explicit axes."""
    equation = {
        "query": "ldr,lrnh->ldnh",
        "key": "ldr,lrnh->ldnh",
        "value": "ldr,lrnh->ldnh",
        "out": "lnhr,lrd->lnhd",
        "gate": "ledr,lerf->ledf",
        "up": "ledr,lerf->ledf",
        "down": "lefr,lerd->lefd",
    }[name]
    if leaf.base.ndim == 3:  # of a dense layer
        equation = equation.replace("e", "")
    parts = [np.asarray(part, np.float64) for part in (leaf.base, leaf.a, leaf.b)]
    return parts[0] + LORA.alpha / LORA.rank * np.einsum(equation, *parts[1:])


def test_a_weight_equals_its_base_plus_the_scaled_product_of_its_factors():
    found = low_ranks(policy())
    attention, mlp = ("query", "key", "value", "out"), ("gate", "up", "down")
    names = {f"runs/{run}/attention/{name}" for run in range(2) for name in attention}
    assert found.keys() == names | {f"runs/{run}/mlp/{name}" for run in range(2) for name in mlp}
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf.dense(), by_hand(path.split("/")[-1], leaf), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("attention", "mlp"), [(True, False), (False, True)])
def test_attention_and_mlp_can_be_adapted_separately(attention, mlp):
    found = low_ranks(policy(lora=replace(LORA, attention=attention, mlp=mlp)))
    assert {path.split("/")[2] for path in found} == {"attention" if attention else "mlp"}


def test_some_weights_of_a_part_can_be_adapted():
    lora = replace(LORA, attention=("value", "query"), mlp=("down",))
    found = low_ranks(policy(lora=lora))
    assert {"/".join(path.split("/")[2:]) for path in found} == {"attention/query", "attention/value", "mlp/down"}


def test_adapters_are_initialized_as_a_no_op_with_unit_gain():
    fresh = init(CONFIG, config.Lora(rank=64), jax.random.key(0))
    whole = adapters.attach_adapters(tiny.params(CONFIG), fresh, LORA)
    chex.assert_trees_all_equal(dense(whole), tiny.params(CONFIG))
    chex.assert_trees_all_equal(base(policy()), tiny.params(CONFIG))
    for path, leaf in low_ranks(whole).items():
        incoming = leaf.a.size // leaf.a.shape[-1] // np.prod(leaf.b.shape[: leaf.b.ndim - 2], dtype=int)
        incoming = (
            leaf.base.shape[-3] * leaf.base.shape[-2] if path.endswith("out") else leaf.base.shape[leaf.a.ndim - 2]
        )
        assert np.var(leaf.a) == pytest.approx(1 / incoming, rel=0.35), path


def test_adapters_of_delta_nets_are_those_of_merged_weights_and_every_factor_has_a_gradient():
    lora = replace(LORA, attention=False, mlp=False, delta=True)
    factors = jax.tree.map(lambda leaf: leaf + 0.02, init(tiny.DELTA, lora, jax.random.key(0)))
    whole = adapters.attach_adapters(tiny.params(tiny.DELTA), factors, lora)
    names = {"query", "key", "value", "gate", "decay", "beta", "out"}
    assert {"/".join(path.split("/")[-2:]) for path in low_ranks(whole)} == {f"mixer/{name}" for name in names}
    trained, frozen = partition(whole)
    tokens = jnp.arange(18).reshape(2, 9)

    def loss(trained):
        mesh = tiny.one_device()
        hidden, _ = transformer.apply(combine(trained, frozen), tiny.DELTA, tokens, jnp.ones_like(tokens), mesh=mesh)
        return transformer.logits(whole, hidden).std()

    value, gradient = jax.jit(jax.value_and_grad(loss))(trained)
    assert all(np.abs(leaf).max() > 1e-7 for leaf in jax.tree.leaves(gradient))
    frozen = dense(whole)
    merged = jax.jit(loss)(jax.tree.map(lambda _: None, frozen))
    np.testing.assert_allclose(value, merged, rtol=1e-5)
    assert abs(value - loss_of_base(tokens)) > 1e-4


def loss_of_base(tokens):
    params = tiny.params(tiny.DELTA)
    hidden, _ = transformer.apply(params, tiny.DELTA, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
    return transformer.logits(params, hidden).std()


@pytest.mark.slow
def test_model_and_sampler_with_adapters_equal_those_with_merged_weights():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (B, T)), jnp.int32)
    run = jax.jit(functools.partial(transformer.apply, mesh=tiny.one_device()), static_argnums=1)
    with_adapters, _ = run(policy(), CONFIG, tokens, jnp.ones_like(tokens))
    summed, _ = run(dense(policy()), CONFIG, tokens, jnp.ones_like(tokens))
    chex.assert_trees_all_close(with_adapters, summed, rtol=1e-5, atol=1e-5)
    sampling = config.Sampling(group=2, max_prompt_tokens=4, max_tokens=5)
    generate = functools.partial(sampler.sample, prompts=[[1, 2], [3]], prompt_ids=[0, 1])
    generate = functools.partial(generate, key=jax.random.key(0), options=tiny.options(CONFIG, sampling, (0,)))
    weights = (make_inference_weights(params, CONFIG, tiny.one_device()) for params in (policy(), dense(policy())))
    chex.assert_trees_all_equal(*map(generate, weights))


def a_batch():
    rng = np.random.default_rng(1)
    return Batch(
        tokens_BT=jnp.asarray(rng.integers(0, CONFIG.vocab_size, (B, T)), jnp.int32),
        segment_BT=jnp.ones((B, T), jnp.int32),
        mask_BT=jnp.asarray(np.arange(T)[None] >= rng.integers(1, T, (B, 1))),
        old_logp_BT=-jnp.asarray(rng.random((B, T)) * 4, jnp.float32),
        advantage=jnp.asarray(rng.normal(size=B), jnp.float32),
    )


SGD = optax.sgd(1.0)


@pytest.mark.parametrize("rows", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_an_update_changes_only_the_factors_by_the_chain_rule(rows):
    before, batch = policy(), a_batch()
    step = train_step.make_train_step(
        tiny.settings(CONFIG, microbatch_rows=rows), objective.make_objective(losses.grpo), SGD
    )
    state, metrics = step(new_state(jax.tree.map(jnp.copy, before), SGD, jax.random.key(0)), batch)
    chex.assert_trees_all_equal(base(state.params), base(before))

    def value(params):
        outputs = forward(params, tiny.settings(CONFIG), Inputs(batch.tokens_BT, batch.segment_BT))
        terms = losses.grpo(outputs.logp_BT, batch.old_logp_BT, batch.advantage, batch.mask_BT)
        return losses.reduce(terms)[0]

    of_weight, squares = jax.jit(jax.grad(value))(dense(before)), 0.0
    for (path, new), old in zip(low_ranks(state.params).items(), low_ranks(before).values(), strict=True):
        gradient = functools.reduce(
            lambda tree, key: tree[int(key) if key.isdigit() else key], path.split("/"), of_weight
        )
        stack = old.base.shape[: old.a.ndim + old.b.ndim - 2 - old.base.ndim]
        a, b = old.a.reshape(*stack, -1, 3), old.b.reshape(*stack, 3, -1)
        gradient = 2.0 * gradient.reshape(*stack, a.shape[-2], b.shape[-1])
        wanted = (gradient @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ gradient)
        got = ((old.a - new.a).reshape(a.shape), (old.b - new.b).reshape(b.shape))
        chex.assert_trees_all_close(got, wanted, rtol=1e-3, atol=2e-5)
        squares += sum(float((part**2).sum()) for part in wanted)
    assert metrics["grad_norm"] == pytest.approx(squares**0.5, rel=1e-4), "the norm of the factors' gradient"


def test_combine_inverts_partition():
    for params in (policy(), tiny.params(CONFIG)):
        trained, frozen = partition(params)
        chex.assert_trees_all_equal(combine(trained, frozen), params)
        assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(params))
    assert jax.tree.leaves(partition(tiny.params(CONFIG))[1]) == []
    assert {leaf.shape for leaf in jax.tree.leaves(partition(policy())[1])} == {
        leaf.shape for leaf in jax.tree.leaves(tiny.params(CONFIG))
    }


def test_state_follows_the_sharding_rules_and_moments_exist_only_for_factors():
    mesh = sharding.make_mesh(config.Mesh(data=2, fsdp=4))
    policy = TrainedPolicy(CONFIG, mesh, optax.adam(1e-3), LORA)
    state = add_adapters(init_state(CONFIG, optax.identity(), jax.random.key(0), mesh), policy, LORA)
    wanted = abstract_state(policy)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, wanted)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    query = state.params["runs"][0]["attention"]["query"]
    assert query.a.sharding.spec[1] == "fsdp" and not query.a.is_fully_replicated
    trained = sum(leaf.size for leaf in jax.tree.leaves(partition(state.params)[0]))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * trained + 1


@pytest.mark.parametrize("warm_start", [None, replace(experiment.warm_start, steps=1)], ids=["loaded", "warm start"])
def test_the_reference_is_the_base_with_the_adapters_that_the_run_starts_from(warm_start, tmp_path):
    folder, lora = tmp_path / "adapter", config.Lora(rank=2, alpha=2.0)
    shapes = {path: leaf.shape for path, leaf in by_path(adapters.abstract(experiment.model, lora)).items()}
    folder.mkdir()
    rng = np.random.default_rng(0)
    write_adapters(folder, experiment.model, lora, shapes, lambda path: rng.standard_normal(shapes[path], np.float32))
    made = replace(experiment, lora=peft(folder), reference=config.Reference(), warm_start=warm_start)
    runtime = make_runtime(made)
    with enter_run(tmp_path / "run", describe(made)) as run, Checkpoints(run.checkpoints, keep=1) as checkpoints:
        state = loop.restore_or_start(runtime, run, checkpoints, Skipped())
        reference = load_first(run, state, runtime.policy)
        resumed = replace(state, step=state.step + 1, params=jax.tree.map(jnp.zeros_like, state.params))
        again = load_first(run, resumed, runtime.policy)
    chex.assert_trees_all_equal(combine(reference, partition(state.params)[1]), state.params)
    chex.assert_trees_all_equal(again, reference)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(reference)) > 0
    assert state.step == 0 and (state.position > 0) == (warm_start is not None)


WITH = replace(
    experiment,
    lora=config.Lora(rank=2),
    reference=config.Reference(),
    warm_start=replace(experiment.warm_start, steps=1),
    schedule=replace(experiment.schedule, steps=3, eval_every=0, checkpoint_every=1),
)


@pytest.mark.slow
def test_a_run_with_adapters_starts_at_its_reference_and_stores_no_base(tmp_path, capsys):
    loop.train(WITH, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = [row for row in record.read_metrics(run.metrics) if "policy/loss" in row]
    assert rows[0]["reference/kl"] < 1e-9 < rows[1]["reference/kl"]
    stored = PyTreeCheckpointer().restore(run.checkpoints / "3")
    assert "params/runs/0/attention/query/a" in stored and "params/embedding" not in stored
    assert not any(name.endswith("/base") for name in stored)
    capsys.readouterr()
    evaluate_run(WITH, run.path, None)
    (last,) = [row for row in record.read_metrics(run.metrics) if "eval/reward" in row and row["step"] == 3]
    assert f"eval/reward            {last['eval/reward']:.4f}" in capsys.readouterr().out
