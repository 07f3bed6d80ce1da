"""Optimizers and schedules of an experiment: their updates, and how their state is sharded and offloaded."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import TrainedPolicy, abstract_state, adapters, learning_rate, make_optimizer, partition, sharding, transformer

from gspax import config
from gspax.config import optimizers
from gspax.experiment.plan import plan

MODEL = replace(tiny.MOE, num_hidden_layers=1, num_experts=4, attention_bias=True)
TRANSFORMS = {
    "adamw": optimizers.adamw,
    "muon": optimizers.muon,
    "adafactor": partial(optax.adafactor, min_dim_size_to_factor=4),
}


def random_like(tree, seed=0):
    """Normal numbers with a tree's shapes, dtypes and shardings, drawn in numpy so that nothing is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put(rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding), tree
    )


PARAMS = random_like(transformer.abstract_params(MODEL))


def first_update(optimizer, params, grads):
    return jax.jit(lambda params, grads: optimizer.update(grads, optimizer.init(params), params)[0])(params, grads)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_any_optimizers_state_is_sharded_offloaded_and_has_a_master_copy(name):
    model = replace(MODEL, param_dtype="bfloat16")
    settings = config.Optimizer(learning_rate=1e-2, transform=TRANSFORMS[name])

    def stepped(settings, mesh):
        optimizer = make_optimizer(settings, "bfloat16")
        wanted = abstract_state(TrainedPolicy(model, mesh, optimizer))
        params = random_like(wanted.params)

        def update(params, grads):
            updates, opt_state = optimizer.update(grads, optimizer.init(params), params)
            return optax.apply_updates(params, updates), opt_state

        shardings = jax.tree.map(lambda leaf: leaf.sharding, (wanted.params, wanted.opt_state))
        return wanted, jax.jit(update, out_shardings=shardings)(params, random_like(params, seed=1))

    wanted, (params, state) = stepped(replace(settings, offload=True), sharding.make_mesh(config.Mesh(data=2, fsdp=4)))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jax.device_get(state.params)), jax.device_get(params)
    )
    _, (_, alone) = stepped(settings, sharding.make_mesh(config.Mesh(), jax.devices()[:1]))
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(alone.params), rtol=2e-3, atol=1e-4)
    # a moment is sharded like its parameter; Adafactor's smaller factors are replicated
    sharded = [leaf for leaf in jax.tree.leaves(wanted.opt_state.inner) if not leaf.sharding.is_fully_replicated]
    matrices = [leaf for leaf in jax.tree.leaves(wanted.params) if not leaf.sharding.is_fully_replicated]
    if name == "muon":
        assert len(sharded) >= len(matrices)
    else:
        assert all(leaf.size <= MODEL.vocab_size * MODEL.hidden_size for leaf in sharded)


def test_an_adamw_state_is_sharded_like_the_parameters():
    mesh = sharding.make_mesh(config.Mesh(data=2, fsdp=4))
    wanted = abstract_state(TrainedPolicy(MODEL, mesh, make_optimizer(config.Optimizer())))
    adam = wanted.opt_state[1][0]
    for moments in (adam.mu, adam.nu):
        jax.tree.map(lambda moment, param: chex.assert_equal(moment.sharding, param.sharding), moments, wanted.params)
    assert adam.count.sharding.is_fully_replicated


def test_muon_orthogonalizes_each_matrix_of_each_layer_and_expert():
    grads = random_like(PARAMS, seed=1)
    updates = jax.device_get(first_update(optimizers.muon(1.0, rms=0.2), PARAMS, grads))
    D, N, K, H = MODEL.hidden_size, MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.head_dim
    layers = updates["runs"][0]
    matrices = [
        *layers["attention"]["query"].reshape(-1, D, N * H),
        *layers["attention"]["key"].reshape(-1, D, K * H),
        *layers["attention"]["out"].reshape(-1, N * H, D),
        *layers["mlp"]["gate"].reshape(-1, D, MODEL.moe_intermediate_size),
        *layers["mlp"]["down"].reshape(-1, MODEL.moe_intermediate_size, D),
        *layers["mlp"]["router"],
    ]
    for matrix in matrices:
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
        assert singular.min() > 0.6 and singular.max() < 1.2
    # everything else uses Adam, whose first update has one magnitude
    for update, grad in (
        (updates["embedding"], grads["embedding"]),
        (updates["head"], grads["head"]),
        (layers["attention"]["query_bias"], grads["runs"][0]["attention"]["query_bias"]),
    ):
        np.testing.assert_allclose(update / -np.sign(grad), abs(update).max(), rtol=1e-3)


def test_muon_and_weight_decay_apply_to_adapters():
    lora = config.Lora(rank=2)
    trained, _ = partition(adapters.attach_adapters(PARAMS, random_like(adapters.abstract(MODEL, lora)), lora))
    updates = first_update(optimizers.muon(0.1), trained, random_like(trained, seed=1))
    a = np.asarray(updates["runs"][0]["attention"]["out"].a)  # [layer, head, head_dim, rank]
    singular = np.linalg.svd(a[0].reshape(-1, 2), compute_uv=False)
    assert singular.min() > 0.5 * singular.max()
    assert all(jax.tree.leaves(optimizers.matrices(trained)))


def test_weight_decay_applies_only_to_matrices_by_default():
    def decayed(transform):
        updates = first_update(transform(1.0), PARAMS, jax.tree.map(np.zeros_like, PARAMS))
        leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(updates))
        return {path[-1].key for path, leaf in leaves if leaf.any()}

    everything = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)}
    matrices = {"query", "key", "value", "out", "gate", "up", "down", "router", "head"}
    assert everything == matrices | {"embedding", "scale", "query_bias", "key_bias", "value_bias", "out_bias"}
    assert decayed(partial(optimizers.adamw, weight_decay=0.1)) == matrices
    assert decayed(partial(optimizers.adamw, weight_decay=0.1, decayed=optimizers.everything)) == everything
    assert decayed(optimizers.adamw) == set()
    assert decayed(partial(optimizers.muon, weight_decay=0.1)) == matrices - {"head"}


MODELS = tiny.CONFIGS | tiny.OTHERS | {"delta nets": tiny.DELTA}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_matrix_has_all_axes_of_its_parameter_but_those_of_a_stack(model):
    """Norms, biases, sinks, decay rates and convolutions are none; of a matrix Muon orthogonalizes the whole."""

    def is_axes(leaf):
        return isinstance(leaf, tuple)

    params, axes = transformer.abstract_params(model), transformer.logical_axes(model)
    views = optimizers._dimensions(params)
    for (path, names), is_matrix, view in zip(
        jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes),
        jax.tree.leaves(optimizers.matrices(params)),
        jax.tree.leaves(views, is_leaf=lambda leaf: leaf is None or is_axes(leaf)),
        strict=True,
    ):
        own = {*names} - {"layer", "expert"}
        is_bias = own <= {"heads", "head"}
        is_vector = len(own) == 1 or is_bias or own & {"tap", "rate"} or path[-1].key == "embedding"
        assert is_matrix != bool(is_vector), (path, names)
        if view is not None:
            assert len(view.reduction_axis) + len(view.output_axis) == len(own), (path, names)


@pytest.mark.parametrize("schedule", [optimizers.linear, optimizers.cosine])
def test_schedules_warm_up_and_decay_to_the_final_rate(schedule):
    settings = config.Optimizer(learning_rate=2.0, warmup_updates=4, schedule=partial(schedule, updates=12, final=0.25))
    rate = learning_rate(settings)
    assert [float(rate(done)) for done in (0, 1, 4)] == [0.0, 0.5, 2.0]
    middle = {optimizers.linear: 1.625, optimizers.cosine: 0.5 + 1.5 * (1 + np.cos(np.pi / 4)) / 2}[schedule]
    np.testing.assert_allclose([float(rate(done)) for done in (6, 8, 12, 100)], [middle, 1.25, 0.5, 0.5], rtol=1e-6)
    assert float(learning_rate(replace(settings, warmup_updates=0))(0)) == 2.0
    with pytest.raises(ValueError, match="wanted more updates than the warm-up's 12, got updates=12"):
        schedule(1.0, 12, updates=12)


def test_the_plan_counts_the_state_of_each_optimizer():
    from small_experiment import experiment

    def size(transform):
        optimizer = replace(experiment.optimizer, transform=transform)
        return plan(replace(experiment, optimizer=optimizer)).learner["optimizer state"]

    adamw = size(optimizers.adamw)
    assert abs(size(optax.adamw) - adamw) < 100  # the traced state without its counters
    assert 0.5 * adamw < size(optimizers.muon) < 0.75 * adamw  # matrices have one moment
    assert size(TRANSFORMS["adafactor"]) < 0.5 * adamw
