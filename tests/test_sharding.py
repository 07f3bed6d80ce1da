"""The mesh is filled in, clashes are said, the table knows its names."""

import jax
import pytest
from jax.sharding import PartitionSpec

from gspax import config, sharding
from gspax.errors import UserError


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (config.Mesh(), 1, {"data": 1, "fsdp": 1}),
        (config.Mesh(), 8, {"data": 1, "fsdp": 8}),
        (config.Mesh(data=-1, fsdp=2), 8, {"data": 4, "fsdp": 2}),
        (config.Mesh(data=2, fsdp=4), 8, {"data": 2, "fsdp": 4}),
    ],
)
def test_the_free_axis_takes_the_devices_that_are_left(mesh, devices, expected):
    assert sharding.mesh_shape(mesh, devices) == expected


@pytest.mark.parametrize(("data", "fsdp"), [(3, -1), (2, 2), (-1, -1), (0, -1)])
def test_a_mesh_that_does_not_fit_is_refused(data, fsdp):
    mesh = config.Mesh(data=data, fsdp=fsdp)
    with pytest.raises(UserError, match=r"multiply to the 8 devices .* got data="):
        sharding.mesh_shape(mesh, 8)


def test_the_table():
    assert sharding.spec("batch") == PartitionSpec(("data", "fsdp"))
    assert sharding.spec("embed") == PartitionSpec("fsdp")
    whole = sharding.RULES.keys() - {"batch", "embed"}
    assert sharding.spec(*whole) == PartitionSpec(*[None] * len(whole)), "no code splits these"
    assert sharding.spec() == PartitionSpec()


def test_an_unknown_axis_is_an_error_and_not_a_replica():
    assert sharding.spec("expert", "embed", "mlp") == PartitionSpec(None, "fsdp", None)
    with pytest.raises(KeyError):
        sharding.spec("embd")


def test_one_device_is_a_mesh_of_size_one():
    mesh = sharding.make_mesh(config.Mesh(), jax.devices()[:1])
    assert mesh.size == 1 and sharding.batch_shards(mesh) == 1
    spread = sharding.make_mesh(config.Mesh(data=2))
    assert dict(spread.shape) == {"data": 2, "fsdp": 4} and sharding.batch_shards(spread) == 8
