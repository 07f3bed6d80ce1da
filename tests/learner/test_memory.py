"""Options that save device memory: remat policies, bfloat16 parameters, a state on the host."""

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
    Batch,
    Checkpoints,
    TrainedPolicy,
    abstract_state,
    init_state,
    make_mesh,
    make_objective,
    make_optimizer,
    make_train_step,
    named_sharding,
    transformer,
    with_master,
)

from gspax import config, losses
from gspax.config.optimizers import adamw

MODEL = replace(tiny.MOE, num_hidden_layers=2, num_experts=0)
MESH = make_mesh(config.Mesh(), jax.devices()[:4])
SETTINGS = config.Optimizer(learning_rate=1e-2)


def kept(policy):
    """Bytes of residuals between the forward and the backward scan over layers, by memory kind."""
    model = replace(MODEL, remat=policy)
    tokens_BT = jnp.ones((2, 7), jnp.int32)

    def objective(params):
        return transformer.apply(params, model, tokens_BT, tokens_BT, mesh=tiny.one_device())[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(objective))(tiny.params(MODEL))
    forward = next(each for each in jaxpr.eqns if each.primitive.name == "scan")
    stacked = forward.outvars[forward.params["num_carry"] :]
    found = {"device": 0, "host": 0}
    for each in stacked:
        found["host" if each.aval.memory_space == jax.memory.Space.Host else "device"] += each.aval.size * 4
    return found


def test_each_remat_policy_keeps_less_on_the_device_than_the_previous_one():
    none, products, full, offload = (kept(policy) for policy in ("none", "products", "full", "offload"))
    stream = 2 * 2 * 7 * MODEL.hidden_size * 4  # layers, rows, tokens
    assert none["device"] > products["device"] > full["device"] >= stream
    assert none["host"] == products["host"] == full["host"] == 0
    assert offload["host"] == stream
    assert offload["device"] == full["device"] - stream


def test_a_master_copy_accumulates_updates_below_bfloat16_resolution():
    """Parameters are float32 training rounded; without the copy they would not change."""
    plain = optax.adam(1e-4)
    start = jnp.linspace(-1.0, 1.0, 64).astype(jnp.bfloat16)
    optimizer = with_master(plain)
    half, state = start, optimizer.init(start)
    whole, plain_state = start.astype(jnp.float32), plain.init(start.astype(jnp.float32))
    lost, lost_state = start, plain.init(start)
    for seed in range(60):
        grads = 1.0 + jax.random.uniform(jax.random.key(seed), (64,))
        updates, state = optimizer.update(grads.astype(jnp.bfloat16), state, half)
        half = optax.apply_updates(half, updates)
        updates, plain_state = plain.update(grads.astype(jnp.bfloat16).astype(jnp.float32), plain_state, whole)
        whole = optax.apply_updates(whole, updates)
        updates, lost_state = plain.update(grads.astype(jnp.bfloat16), lost_state, lost)
        lost = optax.apply_updates(lost, updates)
    np.testing.assert_array_equal(state.params, whole)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, whole.astype(jnp.bfloat16))
    large = np.abs(np.asarray(start, np.float32)) > 0.5
    assert not np.array_equal(half[large], start[large])
    np.testing.assert_array_equal(lost[large], start[large])


def batch():
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(1, MODEL.vocab_size, (8, 6), dtype=np.int32)
    mask_BT = np.ones((8, 6), bool)
    mask_BT[:, :2] = False
    made = Batch(
        tokens_BT=tokens_BT,
        segment_BT=np.ones((8, 6), np.int32),
        mask_BT=mask_BT,
        old_logp_BT=np.full((8, 6), -3.0, np.float32),
        advantage=rng.standard_normal(8).astype(np.float32),
    )
    return jax.device_put(made, named_sharding(MESH, "batch"))


def updated(model, settings, updates=2, rows=0):
    """The state after some updates."""
    optimizer = make_optimizer(settings, model.param_dtype)
    state = init_state(model, optimizer, jax.random.key(0), MESH)
    step = make_train_step(
        tiny.settings(model, MESH, microbatch_rows=rows), make_objective(losses.importance_sampling), optimizer
    )
    for _ in range(updates):
        state, _ = step(state, batch())
    return state


def test_a_state_on_the_host_gives_the_same_update_and_stays_on_the_host(tmp_path):
    model = replace(MODEL, param_dtype="bfloat16")
    here, away = updated(model, SETTINGS), updated(model, replace(SETTINGS, offload=True))
    states = (jax.device_get((state.params, state.opt_state)) for state in (away, here))
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(away.opt_state)} == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(away.params)} == {"device"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(away.params)} == {"bfloat16"}
    wanted = abstract_state(TrainedPolicy(model, MESH, make_optimizer(replace(SETTINGS, offload=True), "bfloat16")))
    for leaf, abstract in zip(jax.tree.leaves(away), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim) and leaf.dtype == abstract.dtype
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, away, {})
        back, _ = checkpoints.restore(wanted)
    chex.assert_trees_all_equal(jax.device_get(back.opt_state), jax.device_get(away.opt_state))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(back.opt_state)} == {"pinned_host"}


@pytest.mark.parametrize("rows", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_bfloat16_parameters_follow_float32_training(rows):
    """Within bfloat16 rounding; sums over microbatches are float32."""
    settings = config.Optimizer(
        learning_rate=1e-2, transform=partial(adamw, b1=0.0, b2=0.0, eps=1.0), max_grad_norm=0.0
    )  # nearly SGD
    half = updated(replace(MODEL, param_dtype="bfloat16"), settings, updates=1, rows=rows)
    whole = updated(MODEL, settings, updates=1, rows=rows)
    moved = flat(whole.params) - flat(transformer.init(MODEL, jax.random.fold_in(jax.random.key(0), 0)))
    start = transformer.init(replace(MODEL, param_dtype="bfloat16"), jax.random.fold_in(jax.random.key(0), 0))
    master = flat(half.opt_state.params) - flat(start)
    assert np.linalg.norm(master - moved) < 0.05 * np.linalg.norm(moved)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)])
