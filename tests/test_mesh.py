"""Every mesh computes what one device computes, and holds of every array what the table says and no more."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from gspax import config, losses, sampler, sharding
from gspax.config import Mesh, Sampling
from gspax.model.low_rank import partition
from gspax.objective import of_loss
from gspax.optimizer import make_optimizer
from gspax.state import abstract_state, init_state, new_state
from gspax.train_step import make_train_step
from gspax.types import Batch

MOE = replace(tiny.MOE, num_hidden_layers=2, num_experts=4, vocab_size=24)
DENSE = replace(MOE, num_experts=0)
OPTIMIZER = make_optimizer(config.Optimizer(learning_rate=1e-2, eps=1e-2))  # of a size at which rounding stays rounding
ROWS, LENGTH = 16, 8


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    index_T = np.arange(LENGTH)
    length_B1 = rng.integers(4, LENGTH + 1, (ROWS, 1))
    there = index_T[None] < length_B1
    floats = rng.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
    return Batch(
        tokens_BT=np.where(there, rng.integers(0, MOE.vocab_size, there.shape), 0).astype(np.int32),
        segment_BT=there.astype(np.int32),
        mask_BT=there & (index_T[None] >= 2),
        old_logp_BT=-3 + 0.1 * floats[0],
        advantage_B=floats[1, :, 0],
    )


def update(model, mesh):
    """One update from the same parameters: the new state and the metrics."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, OPTIMIZER, mesh))
    state = jax.tree.map(jnp.array, new_state(tiny.params(model), OPTIMIZER, jax.random.key(1)))
    step = make_train_step(model, of_loss(losses.grpo), OPTIMIZER, mesh=mesh)
    return step(jax.device_put(state, shardings), jax.device_put(batch(), sharding.named(mesh, "batch")))


def make(mesh, devices=8):
    return sharding.make_mesh(mesh, jax.devices()[:devices])


@functools.cache
def alone(model):
    return jax.device_get(update(model, make(Mesh(), 1)))


def assert_close(got, want, tolerance=1e-5):
    """To a relative 1e-5 of the largest number of each array."""
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
        if not jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=1e-6))


MESHES = {
    "fsdp": Mesh(),
    "expert and tensor": Mesh(fsdp=2, expert=2, tensor=2),
    "slices and experts": Mesh(slice=2, data=2, expert=2),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [MOE])
def test_an_update_is_that_of_one_device(model, mesh):
    state, metrics = update(model, make(MESHES[mesh]))
    wanted, wanted_metrics = alone(model)
    assert_close(state.opt_state, wanted.opt_state)
    assert_close(state.params, wanted.params)
    assert_close(metrics, wanted_metrics)
