"""The devices of learner and sampler, and the rates at which they can send to each other."""

import importlib.util
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_experiment
from api import UNKNOWN, chips

from gspax.config import Mesh, Placement, Sampling
from gspax.errors import UserError

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)"
)
SMALL = replace(small_experiment.experiment, warm_start=None, sampling=Sampling(prompts=32, group=2, max_tokens=4))


def grid(*lengths):
    return np.stack(np.meshgrid(*map(np.arange, lengths), indexing="ij"), axis=-1).reshape(-1, len(lengths))


@pytest.mark.parametrize(
    ("text", "axes", "links"),
    [
        ("v5p:4x4x4", "x", 2),  # a ring: both ways
        ("v5p:4x4x4", "xyz", 6),
        ("v5p:2x2x4", "x", 1),  # a line of two
        ("v5e:8x8", "xy", 2),  # a v5e dimension wraps around at 16
        ("v5e:16x16", "xy", 4),
        ("v6e:4x1", "y", 1),
        ("v5e:4x4", "", 1),
    ],
)
def test_links_that_a_device_can_use_at_once(text, axes, links):
    topology = chips.parse_topology(text)
    mesh = dict(zip("xyz", topology.shape, strict=False))
    assert chips.link_rate(tuple(axes), grid(*topology.shape), mesh, topology) == links * topology.chip.link_rate


def test_a_part_of_a_slice_does_not_wrap_around():
    topology = chips.parse_topology("v5p:8x4x4")
    rate = partial(chips.link_rate, coords=grid(4, 4, 4), mesh={"x": 4, "y": 4, "z": 4}, topology=topology)
    assert rate(("x",)) == topology.chip.link_rate
    assert rate(("x", "y", "z")) == 5 * topology.chip.link_rate


def test_axes_of_the_mesh_cross_dimensions_of_the_torus():
    """64 devices row by row, two ranges of rows for `data`: dimension 0 is a line with one link, 1 a ring with two."""
    topology = chips.parse_topology("v5e:4x16")
    rate = partial(chips.link_rate, coords=grid(4, 16), mesh={"data": 2, "fsdp": 8, "tensor": 4}, topology=topology)
    links = {axes: rate(axes) / topology.chip.link_rate for axes in (("data",), ("fsdp",), ("tensor",), ())}
    assert links == {("data",): 1, ("fsdp",): 1 + 2, ("tensor",): 2, (): 1}
    assert rate(("data", "tensor")) == 3 * topology.chip.link_rate


def test_the_rate_along_axes_of_the_mesh():
    topology = chips.parse_topology("2xv5p:4x4x4")
    link = topology.chip.link_rate
    rate = partial(chips.link_rate, topology=topology)
    both = partial(rate, coords=np.tile(grid(4, 4, 4), (2, 1)), mesh={"slice": 2, "fsdp": 16, "tensor": 4})
    assert (both(("tensor",)), both(("fsdp",)), both(UNKNOWN)) == (2 * link, 4 * link, 6 * link)
    half = partial(rate, coords=grid(4, 4, 4)[32:], mesh={"fsdp": 8, "tensor": 4})  # 2 x 4 x 4
    assert (half(("tensor",)), half(("fsdp",)), half(UNKNOWN)) == (2 * link, 3 * link, 5 * link)


def placed(devices, **changes):
    return replace(SMALL, placement=Placement(devices=devices, **changes))


@pytest.mark.parametrize("devices", [8, 24, 32, 48, 0])
def test_of_several_slices_learner_and_sampler_have_whole_ones(devices):
    with pytest.raises(
        UserError, match=r"placement\.devices: wanted whole slices of 16 devices on 2xv5e:4x4, and fewer"
    ):
        chips.make_targets(placed(devices), chips.parse_topology("2xv5e:4x4"))


@needs_libtpu
def test_one_mesh_for_both_over_all_slices():
    learner, sampler = chips.make_targets(SMALL, chips.parse_topology("2xv5e:4x4"))
    assert str(learner) == "32 devices, slice=2, fsdp=16"
    assert str(sampler) == "32 devices, slice=2, data=4, expert=4"
    for target in (learner, sampler):
        assert [device.slice_index for device in target.mesh.devices.flat] == [0] * 16 + [1] * 16
    with pytest.raises(UserError, match="mesh"):
        chips.make_targets(replace(SMALL, mesh=Mesh(slice=4)), chips.parse_topology("2xv5e:4x4"))


@needs_libtpu
def test_rows_and_widths_are_validated_per_slice():
    """Parameters are sharded over the 16 devices of a slice, not over all 64: a width of 32 is enough."""
    learner, *_ = chips.make_targets(
        replace(SMALL, sampling=Sampling(prompts=64, group=2)), chips.parse_topology("4xv5e:4x4")
    )
    assert str(learner) == "64 devices, slice=4, fsdp=16"


@needs_libtpu
def test_slices_of_learner_and_sampler():
    learner, sampler = chips.make_targets(placed(4), chips.parse_topology("3xv5e:2x2"))
    assert (str(learner), str(learner.topology)) == ("8 devices, slice=2, fsdp=4", "2xv5e:2x2")
    assert (str(sampler), str(sampler.topology)) == ("4 devices, expert=4", "v5e:2x2")
    learner, sampler = chips.make_targets(placed(8), chips.parse_topology("3xv5e:2x2"))
    assert (str(learner.topology), str(sampler)) == ("v5e:2x2", "8 devices, slice=2, expert=4")


@needs_libtpu
def test_parts_of_one_slice():
    """The sampler has the last devices; neither part wraps around."""
    whole = chips.parse_topology("v5p:4x4x4")
    learner, sampler = chips.make_targets(placed(32, mesh=Mesh(data=2, fsdp=16)), whole)
    assert (str(learner), str(sampler)) == ("32 devices, fsdp=32", "32 devices, data=2, fsdp=16")
    assert not {*learner.mesh.devices.flat} & {*sampler.mesh.devices.flat}
    assert learner.link_rate(UNKNOWN) == 5 * whole.chip.link_rate
