"""The gradient is added up over slices and copies of the model once per update, not once per microbatch."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import tiny
from api import (
    Batch,
    TrainedPolicy,
    abstract_state,
    device_bytes,
    hlo,
    make_objective,
    make_optimizer,
    make_train_step,
    sharding,
    sum_over_replicas,
)

from gspax import config, losses
from gspax.config import Mesh

MODEL = replace(tiny.MOE, num_hidden_layers=2, num_experts=4, vocab_size=24, remat="full")
MICROBATCHES, ROWS, LENGTH = 3, 24, 8


def compile_update(mesh):
    """An update of three microbatches: its compiled text, and the bytes of a device's parameters, all float32."""
    optimizer = make_optimizer(config.Optimizer())
    state = abstract_state(TrainedPolicy(MODEL, mesh, optimizer))

    def column(dtype, *shape):
        return jax.ShapeDtypeStruct((ROWS, *shape), dtype, sharding=sharding.named_sharding(mesh, "batch"))

    batch = Batch(
        tokens_BT=column(jnp.int32, LENGTH),
        segment_BT=column(jnp.int32, LENGTH),
        mask_BT=column(jnp.bool_, LENGTH),
        old_logp_BT=column(jnp.float32, LENGTH),
        advantage=column(jnp.float32),
    )
    settings = tiny.settings(MODEL, mesh, microbatch_rows=ROWS // MICROBATCHES, worst_case=True)
    step = make_train_step(settings, make_objective(losses.grpo), optimizer)
    return step.lower(state, batch).compile().as_text(), device_bytes(state.params)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(Mesh(slice=2, fsdp=2, expert=2), id="expert"),
        pytest.param(Mesh(slice=2, fsdp=2, tensor=2), id="tensor"),
    ],
)
def test_slices_exchange_the_gradient_once_per_update(axes):
    text, gradient = compile_update(sharding.make_mesh(axes, jax.devices()[:8]))
    sent = hlo.collectives(hlo.parse(text), sharding.resolve_axes(axes, 8), unknown_trips=1)
    across = {(each.kind, each.axes): bytes_ for each, bytes_ in sent.items() if "slice" in each.axes}
    once = across.pop(("all-reduce", ("slice",)))  # two devices each send half of it, twice
    assert gradient <= once < 1.01 * gradient
    assert sum(across.values()) < gradient / 10, "the metrics"


def test_replicas_add_up_numbers_of_16_bits_in_float32():
    """As parameters in bfloat16 have; XLA aborts on a CPU at such a sum in 16 bits."""
    mesh = sharding.make_mesh(Mesh(data=4, fsdp=2), jax.devices()[:8])
    rows_B = jax.device_put(jnp.array([256, 1, 1, 1], jnp.bfloat16), sharding.named_sharding(mesh))

    def of_replica(mesh, rows_B):
        return {"sum": rows_B.sum(), "count": jnp.int32(rows_B.size)}, rows_B

    sums, same_B = jax.jit(lambda rows_B: sum_over_replicas(of_replica, rows_B, mesh=mesh))(rows_B)
    assert sums["sum"].dtype == jnp.bfloat16 and sums["sum"] == jnp.bfloat16(259) and sums["count"] == 4
    assert (same_B == rows_B).all()


def test_axes_of_replicas():
    def of(**sizes):
        return sharding.replica_axes(sharding.make_mesh(Mesh(**sizes), jax.devices()[:8]))

    assert of(slice=2, data=2, fsdp=2) == ("slice", "data")
    assert of(slice=2, fsdp=2, expert=2) == ("slice",)
    assert of(fsdp=2, expert=2, context=2) == ()
    assert of(slice=2, fsdp=2, tensor=2) == ("slice",)
    assert sharding.replica_axes(tiny.one_device()) == ()
