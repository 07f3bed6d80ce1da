"""Moving arrays from one mesh to another; test_processes.py tests it between processes."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import chips, programs
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspax.parallel import transfer

DEVICES = jax.devices()
VALUES = np.arange(2 * 24 * 12, dtype=np.float32).reshape(2, 24, 12)


def mesh(devices, rows, columns):
    return Mesh(np.array(devices).reshape(rows, columns), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def shapes(devices):
    return [(size, devices // size) for size in range(1, devices + 1) if devices % size == 0 and 24 % size == 0]


def check(moved, wanted, values):
    assert moved.sharding == wanted and moved.dtype == values.dtype
    assert {shard.device for shard in moved.addressable_shards} == set(wanted.mesh.devices.flat)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


@pytest.mark.parametrize("number", [1, 2, 4, 6])
@pytest.mark.parametrize("spec", [P(), P(None, ("a", "b")), P(None, "b", "a")], ids=str)
def test_an_array_moves_to_any_sharding_and_back(number, spec):
    """From all but the last `number` devices to those, and back."""
    others = 8 - number
    for given in shapes(others)[:1]:
        for taken in shapes(number)[-2:]:
            source, target = (
                NamedSharding(mesh(devices, *shape), spec if 12 % shape[0] == 0 and 12 % shape[1] == 0 else P())
                for devices, shape in ((DEVICES[:others], given), (DEVICES[others:], taken))
            )
            array = jax.device_put(VALUES, source)
            there = transfer._transfer_array(array, target)
            check(there, target, VALUES)
            check(transfer._transfer_array(there, source), source, VALUES)
            assert not array.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool, np.int32, np.uint32])
def test_every_dtype_moves(dtype):
    values = (VALUES % 3).astype(dtype)
    source, target = NamedSharding(mesh(DEVICES[:4], 2, 2), P(None, "a")), NamedSharding(mesh(DEVICES[4:], 1, 4), P())
    check(transfer._transfer_array(jax.device_put(values, source), target), target, values)


def test_a_tree_moves_by_one_sharding_or_a_tree_of_them():
    source, target = NamedSharding(mesh(DEVICES[:4], 4, 1), P()), NamedSharding(mesh(DEVICES[4:], 4, 1), P(None, "a"))
    tree = jax.device_put({"x": VALUES, "y": VALUES[0]}, source)
    split = {"x": target, "y": NamedSharding(target.mesh, P("a"))}
    assert jax.tree.map(lambda leaf: leaf.sharding, transfer.transfer(tree, split)) == split
    assert transfer.transfer(tree, target)["x"].sharding == target


def test_device_counts_that_do_not_divide_are_rejected():
    source, target = NamedSharding(mesh(DEVICES[:5], 5, 1), P()), NamedSharding(mesh(DEVICES[5:], 3, 1), P())
    with pytest.raises(transfer.UserError, match=r"a divisor or a multiple of the other 5 devices .*, got 3"):
        transfer._transfer_array(jax.device_put(VALUES, source), target)


def test_stacked_layers_are_resharded_one_at_a_time():
    """XLA gathers the full array on every device between these two shardings, so it may be one layer only."""
    spec = P(None, "b", "a")
    given = NamedSharding(mesh(DEVICES, 8, 1), spec)
    wanted = transfer._replicated(given, NamedSharding(mesh(DEVICES[:4], 1, 4), spec))
    array = jax.ShapeDtypeStruct((16, 64, 128), jnp.float32, sharding=given)
    compiled = jax.jit(transfer._layer_by_layer, static_argnums=1, out_shardings=wanted).lower(array, wanted).compile()
    assert "all-gather" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < array.size * 4 / 2


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)")
def test_a_transfer_between_two_tpu_slices_compiles():
    devices = chips.describe_devices(chips.parse_topology("2xv5e:4x4"))
    together = Mesh(np.array(devices), "device")
    shards = jax.ShapeDtypeStruct((32, 128), jnp.bfloat16, sharding=NamedSharding(together, P("device")))
    with programs._no_persistent_cache():
        text = transfer._permute.lower(shards, together, 16).compile().as_text()
    assert {device.slice_index for device in devices} == {0, 1} and "xla_megascale" in text
