"""Values and gradients of experts sharded over devices against all experts on one device, for each exchange."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Experts, chips, moe, sharding
from api import expert_ffn as local
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_expert_ffn import with_biases

from gspax import config
from gspax.model.kernels import expert_parallel as parallel

X, N, A, K, D, F = 4, 6, 2, 2, 6, 10  # devices of the axis, rows and choices on each, experts on each
E = X * K
MESH = jax.make_mesh((2, X), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as documented, emulated by an all-gather of all operands."""
    here, senders = lax.axis_index(axis_name), lax.axis_size(axis_name)
    rows_of, *sent = lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    slices = [a.reshape(senders, senders, -1)[:, here] for a in sent]  # from each sender to this device
    index = jnp.arange(len(output))
    for sender, number in np.ndindex(*slices[0].shape):
        start, size, place = (a[sender, number] for a in slices)
        agreed = size == recv_sizes.reshape(senders, -1)[sender, number]  # sender and receiver must agree
        mine = (index >= place) & (index < place + jnp.where(agreed, size, -1))
        received = rows_of[sender].at[index - place + start].get(mode="fill", fill_value=jnp.nan)
        output = jnp.where(mine.reshape(-1, *[1] * (output.ndim - 1)), received, output)
    return output


SMALL_BUFFER = {"capacity_factor": 1.0, "extra_rows": 8}  # 20 rows
EXCHANGES = {
    "ring": parallel.ring("expert"),
    "all_to_all": parallel.all_to_all("expert", **SMALL_BUFFER, ragged_all_to_all=emulated),
    "all_to_all for the worst case": parallel.all_to_all("expert", capacity_factor=100.0, ragged_all_to_all=emulated),
}
ROUTINGS = {
    "even": lambda rng, rows: (np.arange(rows * A) % E).reshape(rows, A),
    "any": lambda rng, rows: np.argsort(rng.random((rows, E)), axis=1)[:, :A],
    "some dropped": lambda rng, rows: np.where(rng.random((rows, A)) < 0.4, E, rng.integers(0, E, (rows, A))),
    "all dropped": lambda rng, rows: np.full((rows, A), E),
    "all to one device": lambda rng, rows: rng.integers(2 * K, 3 * K, (rows, A)),  # more than a buffer holds
    "all of half the mesh to one device": lambda rng, rows: np.where(
        np.arange(rows)[:, None] < rows // 2, rng.integers(0, K, (rows, A)), (np.arange(rows * A) % E).reshape(rows, A)
    ),
}


def make_case(name, dtype=jnp.float32, rows=2 * X * N):
    rng = np.random.default_rng(len(name))
    expert = jnp.asarray(ROUTINGS[name](rng, rows), jnp.int32)
    floats = [rng.normal(size=s) for s in ((rows, D), (rows, A), (E, D, F), (E, D, F), (E, F, D), (rows, D))]
    x, gate, *weights, dy = (jnp.asarray(v, dtype) for v in floats)
    return (x, expert, gate, *weights), dy


def expert_ffn(x, expert, gate, *weights):
    return local.expert_ffn(x, expert, gate, Experts(*weights))


ROWS, EXPERTS = P(("data", "expert")), P("expert")
ROWS_AND_FLAG = ROWS, P()


def on_mesh(visit, out_specs=ROWS_AND_FLAG):
    """`visit` of rows and matrices that are sharded over the mesh."""

    def on_device(x, expert, gate, *weights):
        return visit(x, expert, gate, Experts(*weights))

    def visit_all(*args):
        specs = (ROWS, ROWS, ROWS, *[EXPERTS] * (len(args) - 3))
        return jax.shard_map(on_device, mesh=MESH, in_specs=specs, out_specs=out_specs)(*args)

    return visit_all


@partial(jax.jit, static_argnums=0)
def value_and_gradients(visit, args, dy):
    x, expert, gate, *weights = args

    def y_of(x, gate, *weights):
        result = visit(x, expert, gate, *weights)
        return result[0] if isinstance(result, tuple) else result

    y, pullback = jax.vjp(y_of, x, gate, *weights)
    return y, *pullback(dy)


def exchanged(exchange):
    return on_mesh(partial(parallel.expert_parallel, exchange=exchange))


MAPPED = {name: exchanged(exchange) for name, exchange in EXCHANGES.items()}


def assert_close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_values_and_gradients_equal_one_device(exchange, name):
    args, dy = make_case(name)
    got, want = value_and_gradients(MAPPED[exchange], args, dy), value_and_gradients(expert_ffn, args, dy)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_experts_with_biases_equal_one_device(exchange):
    (x, expert, gate, *weights), dy = make_case("any")
    args = x, expert, gate, *with_biases(weights)
    got, want = value_and_gradients(MAPPED[exchange], args, dy), value_and_gradients(expert_ffn, args, dy)
    assert len(got) == 8
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 4e-6)


@pytest.mark.parametrize("exchange", ["all_to_all", pytest.param("ring", marks=pytest.mark.slow)])
def test_bfloat16_rows_and_float32_weights_keep_their_dtypes(exchange):
    (x, *rest), dy = make_case("any")
    args, dy = (x.astype(jnp.bfloat16), *rest), dy.astype(jnp.bfloat16)
    got, want = value_and_gradients(MAPPED[exchange], args, dy), value_and_gradients(expert_ffn, args, dy)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, 0.02)


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_garbage_in_dropped_rows_changes_nothing(exchange):
    (x, expert, gate, *weights), dy = make_case("some dropped")
    dropped_N1 = (jnp.arange(len(x)) % 3 == 0)[:, None]
    expert = jnp.where(dropped_N1, E, expert)
    dirty = jnp.where(dropped_N1, jnp.nan, x), expert, jnp.where(dropped_N1, jnp.nan, gate), *weights
    got, want = (value_and_gradients(MAPPED[exchange], args, dy) for args in (dirty, (x, expert, gate, *weights)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(got[0][dropped_N1[:, 0]])


def lost(operand, output, *offsets, axis_name):
    """A ragged all-to-all that returns NaN."""
    return jnp.full_like(output, jnp.nan) + 0 * operand.sum()


@pytest.mark.parametrize(("name", "overflows"), [("even", False), ("all to one device", True)])
def test_the_ring_replaces_an_exchange_that_would_overflow(name, overflows):
    args, dy = make_case(name)
    mapped = exchanged(parallel.all_to_all("expert", **SMALL_BUFFER, ragged_all_to_all=lost))
    got = value_and_gradients(mapped, args, dy)
    assert all(np.isfinite(a).all() == overflows for a in got[:3])
    assert jax.jit(lambda *args: mapped(*args)[1])(*args) == overflows


def test_buffer_size_is_the_share_limited_by_what_can_arrive():
    assert parallel.buffer_rows((1000, 8), 8, 16, capacity_factor=1.5, extra_rows=256) == 12256
    assert parallel.buffer_rows((3, 2), 4, 2, capacity_factor=1.0, extra_rows=3) == 16  # 9 in tiles of 8
    assert parallel.buffer_rows((4, 8), 8, 16, capacity_factor=1.5, extra_rows=256) == 8 * 4 * 8
    assert parallel.buffer_rows((4, 8), 8, 2, capacity_factor=1.5, extra_rows=256) == 8 * 4 * 2, (
        "a row uses an expert once"
    )


def test_the_platform_selects_the_exchange_of_forward_and_backward():
    visit = exchanged(parallel.by_platform("expert"))
    large, dy = make_case("any", rows=2 * X * 1000)  # too many for a worst-case buffer

    def count(function, *args, platform, word):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text().count(word)

    both = partial(value_and_gradients, visit), large, dy
    for word, forward, total in (("ragged_all_to_all", 3, 8), ("collective_permute", 4, 10)):
        assert count(visit, *large, platform="tpu", word=word) >= forward
        assert count(*both, platform="tpu", word=word) >= total
    assert count(*both, platform="cpu", word="ragged_all_to_all") == 0
    assert count(*both, platform="cpu", word="collective_permute") >= 10


@pytest.mark.parametrize(
    ("kind", "devices", "supported"),
    [("TPU v5 lite", 16, True), ("TPU v5 lite", 64, False), ("TPU v6 lite", 64, True), ("TPU v5", 512, True)],
)
def test_ragged_all_to_all_is_unsupported_only_on_large_v5e_slices(kind, devices, supported):
    assert parallel.has_ragged_all_to_all(kind, devices) == supported


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)")
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5e:4x8"])
def test_a_layer_compiled_for_a_tpu_exchanges_rows_and_scatters_gradients(topology):
    devices = chips.describe_devices(chips.parse_topology(topology))
    made = sharding.make_mesh(config.Mesh(fsdp=2, data=-1, expert=4, tensor=2), devices)
    B, T, A, E, D, F = len(devices) // 2, 256, 2, 8, 128, 256
    into, out = ("expert", "expert_embed", "mlp"), ("expert", "mlp", "expert_embed")
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(made, sharding.spec(*axes)))
        for shape, dtype, axes in [
            ((B, T, D), jnp.bfloat16, ("batch",)),
            ((B, T, A), jnp.int32, ("batch",)),
            ((B, T, A), jnp.float32, ("batch",)),
            ((E, D, F), jnp.bfloat16, into),
            ((E, D, F), jnp.bfloat16, into),
            ((E, F, D), jnp.bfloat16, out),
        ]
    ]

    def total(x, expert, gate, *weights):
        return moe._run_experts(made, x, expert, gate, Experts(*weights))[0].astype(jnp.float32).sum()

    text = jax.jit(jax.grad(total, argnums=(0, 2, 3, 4, 5))).lower(*arguments).compile().as_text()
    found = Counter(
        re.findall(r" (ragged-all-to-all|reduce-scatter|collective-permute|conditional)(?:-start)?\(", text)
    )
    assert found["reduce-scatter"] >= 3, "the gradients of the three matrices"
    assert found["collective-permute"] >= 1, "the ring, at least as the fallback"
    if topology == "v5e:4x4":
        assert found["ragged-all-to-all"] >= 5, "x, gate and dy sent, dx and dgate sent back"
        assert found["conditional"] >= 1
    else:
        assert found["ragged-all-to-all"] == 0
