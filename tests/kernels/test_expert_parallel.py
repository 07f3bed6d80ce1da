"""Experts split over devices against all of them on one, in value and gradient, by every way that rows take."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gspax.kernels import expert_parallel as ways
from gspax.kernels.expert_ffn import expert_ffn

X, N, A, K, D, F = 4, 6, 2, 2, 6, 10  # devices of the axis, rows and choices on each, experts on each
E = X * K
MESH = jax.make_mesh((2, X), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `lax.ragged_all_to_all` documents, from everything that everyone sends."""
    here = lax.axis_index(axis_name)
    everything = lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    index = jnp.arange(len(output))
    for sender in range(lax.axis_size(axis_name)):
        rows, start, size, place = (a[sender] for a in everything)
        size, start, place = size[here], start[here], place[here]
        size = jnp.where(size == recv_sizes[sender], size, -1)  # both sides must say the same
        mine = (index >= place) & (index < place + size)
        received = rows.at[index - place + start].get(mode="fill", fill_value=jnp.nan)
        output = jnp.where(mine.reshape(-1, *[1] * (output.ndim - 1)), received, output)
    return output


WAYS = {
    "ring": ways.ring,
    "all_to_all": partial(ways.all_to_all, room=1.0, slack=8, exchange=emulated),  # 20 rows
    "all_to_all for the worst case": partial(ways.all_to_all, room=100.0, exchange=emulated),
}
ROUTINGS = {
    "even": lambda rng, rows: (np.arange(rows * A) % E).reshape(rows, A),
    "any": lambda rng, rows: np.argsort(rng.random((rows, E)), axis=1)[:, :A],
    "some nowhere": lambda rng, rows: np.where(rng.random((rows, A)) < 0.4, E, rng.integers(0, E, (rows, A))),
    "all nowhere": lambda rng, rows: np.full((rows, A), E),
    "all to one device": lambda rng, rows: rng.integers(2 * K, 3 * K, (rows, A)),  # more than a buffer holds
    "all of half the mesh to one device": lambda rng, rows: np.where(
        np.arange(rows)[:, None] < rows // 2, rng.integers(0, K, (rows, A)), (np.arange(rows * A) % E).reshape(rows, A)
    ),
}


def draw(name, dtype=jnp.float32, rows=2 * X * N):
    rng = np.random.default_rng(len(name))
    expert = jnp.asarray(ROUTINGS[name](rng, rows), jnp.int32)
    floats = [rng.normal(size=s) for s in ((rows, D), (rows, A), (E, D, F), (E, D, F), (E, F, D), (rows, D))]
    x, gate, *weights, dy = (jnp.asarray(v, dtype) for v in floats)
    return (x, expert, gate, *weights), dy


def on_mesh(visit):
    rows, experts = P(("data", "expert")), P("expert")
    specs = (rows, rows, rows, experts, experts, experts)
    return jax.shard_map(partial(visit, axis="expert"), mesh=MESH, in_specs=specs, out_specs=rows)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(visit, args, dy):
    x, expert, gate, *weights = args
    y, pullback = jax.vjp(lambda x, gate, *w: visit(x, expert, gate, *w), x, gate, *weights)
    return y, *pullback(dy)


MAPPED = {name: on_mesh(visit) for name, visit in WAYS.items()}


def assert_close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_agrees_with_all_experts_on_one_device(way, name):
    args, dy = draw(name)
    got, want = value_and_gradients(MAPPED[way], args, dy), value_and_gradients(expert_ffn, args, dy)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, 2e-6)
