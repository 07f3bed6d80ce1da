"""Resolving and validating mesh axes, the table of logical axes, and the order of TPU devices."""

import math
from dataclasses import replace

import jax
import pytest
import tiny
from api import presets, sharding
from jax.sharding import PartitionSpec

from gspax import config
from gspax.config import Mesh
from gspax.errors import UserError

ONES = dict.fromkeys(sharding.AXES, 1)


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (Mesh(), 1, {}),
        (Mesh(), 8, {"fsdp": 8}),
        (Mesh(data=-1, fsdp=2), 8, {"data": 4, "fsdp": 2}),
        (Mesh(data=2, fsdp=4), 8, {"data": 2, "fsdp": 4}),
        (Mesh(slice=2, tensor=2), 8, {"slice": 2, "fsdp": 2, "tensor": 2}),
        (Mesh(fsdp=2, expert=-1), 8, {"fsdp": 2, "expert": 4}),
        (Mesh(fsdp=1, context=4, tensor=2), 8, {"context": 4, "tensor": 2}),
    ],
)
def test_the_free_axis_gets_the_remaining_devices(mesh, devices, expected):
    sizes = sharding.resolve_axes(mesh, devices)
    assert sizes == ONES | expected and tuple(sizes) == sharding.AXES


@pytest.mark.parametrize(
    ("mesh", "got"),
    [
        (Mesh(data=3), "data=3, fsdp=-1"),
        (Mesh(data=2, fsdp=2), "data=2, fsdp=2"),
        (Mesh(data=-1), "data=-1, fsdp=-1"),
        (Mesh(data=0), "data=0, fsdp=-1"),
        (Mesh(fsdp=1), "all of size 1"),
        (Mesh(expert=3), "fsdp=-1, expert=3"),
        (Mesh(tensor=16), "fsdp=-1, tensor=16"),
    ],
)
def test_a_mesh_that_does_not_fit_is_rejected(mesh, got):
    with pytest.raises(UserError, match=f"product is the 8 available devices .* got {got}$"):
        sharding.resolve_axes(mesh, 8)


def test_the_slice_axis_is_the_number_of_slices():
    assert sharding.resolve_axes(Mesh(), 8, slices=2) == ONES | {"slice": 2, "fsdp": 4}
    assert sharding.resolve_axes(Mesh(slice=2), 8, slices=2) == ONES | {"slice": 2, "fsdp": 4}
    with pytest.raises(UserError, match=r"mesh\.slice: wanted the 2 available TPU slices, got 4"):
        sharding.resolve_axes(Mesh(slice=4), 8, slices=2)


@pytest.mark.parametrize(
    ("model", "devices", "expert"),
    [
        (presets.qwen3_30b_a3b, 64, 8),
        (presets.qwen3_30b_a3b, 4, 4),
        (presets.qwen3_30b_a3b, 1, 1),
        (presets.qwen3_235b_a22b, 512, 8),
        (replace(presets.qwen3_30b_a3b, num_experts=126), 64, 2),
        (presets.qwen3_0_6b, 64, 1),
        (presets.tiny_moe, 64, 1),
        (None, 64, 1),
    ],
)
def test_the_expert_axis_is_chosen_from_the_model(model, devices, expert):
    sizes = sharding.resolve_axes(Mesh(), devices, model)
    assert sizes == ONES | {"expert": expert, "fsdp": devices // expert}
    if model is not None and devices > 1:
        why = sharding.explain_mesh(Mesh(), sizes, model)
        assert ("sending them" in why) == (expert > 1) and "\n" not in why
    assert sharding.resolve_axes(Mesh(expert=1), devices, model)["expert"] == 1
    assert sharding.resolve_axes(Mesh(fsdp=devices), devices, model)["expert"] == 1


def test_expert_parallelism_breaks_even_at_equal_bytes():
    model = presets.qwen3_30b_a3b
    weights = 3 * 128 * 2048 * 768  # of the experts of one layer
    assert sharding.break_even_tokens(model) * 2 * 8 * 2048 == weights
    assert sharding.explain_mesh(Mesh(), ONES, model) == "one device"
    assert sharding.explain_mesh(Mesh(fsdp=2, expert=4), ONES | {"fsdp": 2, "expert": 4}, model).startswith(
        "parameters"
    )
    assert sharding.explain_mesh(Mesh(slice=1, fsdp=2, expert=4), ONES | {"fsdp": 2, "expert": 4}, model) == "as given"


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("fsdp", "model.hidden_size: wanted a multiple of mesh.fsdp (3), got 16"),
        ("tensor", "model.num_key_value_heads: wanted a multiple of mesh.tensor (3), got 2"),
        ("tensor", "model.vocab_size: wanted a multiple of mesh.tensor (3), got 23"),
        ("expert", "model.num_experts: wanted a multiple of mesh.expert (3), got 5"),
    ],
)
def test_sizes_that_do_not_divide_evenly_are_rejected(axis, said):
    assert said in sharding.find_mismatches(ONES | {axis: 3}, tiny.MOE)
    assert not list(sharding.find_mismatches(ONES, tiny.MOE))


def test_the_product_of_two_axes_must_divide_their_dimension():
    (said,) = sharding.find_mismatches(ONES | {"fsdp": 4, "expert": 5, "tensor": 1}, replace(tiny.MOE, hidden_size=4))
    assert said == "model.hidden_size: wanted a multiple of mesh.fsdp x mesh.expert (20), got 4"
    dense = list(sharding.find_mismatches(ONES | {"expert": 2}, tiny.CONFIGS["dense"]))
    assert dense == ["mesh.expert: wanted 1 for a model without experts, got 2"]


LAYOUTS = {
    "30B": (presets.qwen3_30b_a3b, {"fsdp": 8, "expert": 8}, 128, [{"expert": 64}, {"expert": 32, "tensor": 2}]),
    "235B": (presets.qwen3_235b_a22b, {"fsdp": 64, "expert": 8}, 512, [{"data": 4, "expert": 128}]),
    "few prompts": (presets.qwen3_30b_a3b, {"fsdp": 8, "expert": 8}, 32, [{"expert": 32, "tensor": 2}]),
    "a dense model": (presets.qwen3_0_6b, {"fsdp": 8}, 8, [{"data": 8}, {"data": 4, "tensor": 2}]),
    "two slices": (presets.qwen3_30b_a3b, {"slice": 2, "fsdp": 8}, 64, [{"slice": 2, "expert": 8}]),
}


@pytest.mark.parametrize(("model", "given", "prompts", "first"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_layouts_of_the_sampler(model, given, prompts, first):
    ones = dict.fromkeys(sharding.AXES, 1)
    found = list(sharding.sampler_layouts(ones | given, model, prompts))
    assert found[: len(first)] == [ones | each for each in first]
    assert found[-1] == ones | given, "as the learner's"


def test_a_layout_keeps_the_order_of_the_devices():
    mesh = sharding.make_mesh(Mesh(fsdp=4, tensor=2), jax.devices())
    other = sharding.reshape_mesh(mesh, dict.fromkeys(sharding.AXES, 1) | {"expert": 8})
    assert other.shape["expert"] == 8 and list(other.devices.flat) == list(mesh.devices.flat)
    assert sharding.reshape_mesh(mesh, dict(mesh.shape)) is mesh


def test_a_mesh_that_does_not_divide_the_model_is_not_made():
    with pytest.raises(UserError, match=r"model\.hidden_size: wanted a multiple of"):
        sharding.make_mesh(Mesh(fsdp=8), jax.devices(), replace(tiny.CONFIGS["dense"], hidden_size=12))


def test_the_table_of_logical_axes():
    assert sharding.spec("batch", "time") == PartitionSpec(("slice", "data", "fsdp", "expert"), "context")
    assert sharding.spec("vocab", "embed") == PartitionSpec("tensor", ("fsdp", "expert"))
    assert sharding.spec("expert", "mlp", "expert_embed") == PartitionSpec("expert", "tensor", "fsdp")
    assert sharding.spec("embed", "heads", "head") == PartitionSpec(("fsdp", "expert"), "tensor", None)
    assert sharding.spec() == PartitionSpec()


def test_unknown_and_repeated_axes_are_errors():
    with pytest.raises(UserError, match=r"wanted logical axes out of batch, .* got 'embd'"):
        sharding.spec("expert", "embd")
    with pytest.raises(UserError, match="each mesh axis once in an array, got 'expert' twice"):
        sharding.spec("expert", "embed", "mlp")


def test_time_is_sharded_if_the_axis_divides_it():
    mesh = sharding.make_mesh(Mesh(context=4))
    assert sharding.token_spec(mesh, 2, 8) == sharding.spec("batch", "time")
    assert sharding.token_spec(mesh, 8, 6) == sharding.token_spec(mesh, 6, 1) == sharding.spec("batch")
    assert sharding.token_spec(mesh, 8, 1) == PartitionSpec(("slice", "data", "fsdp", "expert", "context"))


def test_one_device_is_a_mesh_of_size_one():
    mesh = sharding.make_mesh(Mesh(), jax.devices()[:1])
    assert mesh.size == 1 and sharding.batch_shards(mesh) == 1
    spread = sharding.make_mesh(Mesh(data=2, tensor=2))
    assert dict(spread.shape) == ONES | {"data": 2, "fsdp": 2, "tensor": 2} and sharding.batch_shards(spread) == 4
    assert [device.id for device in spread.devices.flat] == list(range(8)), "neighbors share the innermost axis"
    assert math.prod(spread.shape.values()) == len(jax.devices())


class Chip:
    """The attributes of a TPU that `make_mesh` reads."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, number, slice_index=0, coords=(0, 0, 0)):
        self.id, self.slice_index, self.coords = number, slice_index, coords

    def __repr__(self):
        return f"{self.slice_index}.{self.id}"


def test_slices_lie_along_the_outermost_axis(monkeypatch):
    chips = [Chip(number, number % 2) for number in range(8)]  # in any order
    monkeypatch.setattr(sharding, "_make_grid", lambda devices, shape: sharding.np.array(devices).reshape(shape))
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, axes, axis_types: grid)
    grid = sharding.make_mesh(config.Mesh(tensor=2), chips)
    assert grid.shape == (2, 1, 2, 1, 1, 2)
    assert [[chip.slice_index for chip in part.flat] for part in grid] == [[0] * 4, [1] * 4]


def make_grid(chips, **axes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.sharding, "Mesh", lambda grid, axes, axis_types: grid)
        return sharding.make_mesh(config.Mesh(**axes), chips)


def test_mesh_axes_follow_the_torus():
    """jax orders devices by process, where neighbors on an axis need not be neighbors on the torus."""
    places = [(x, y, 0) for tile in (0, 2) for y in range(4) for x in (tile, tile + 1)]  # two processes of 2 x 4 chips
    grid = make_grid([Chip(number, coords=place) for number, place in enumerate(places)], tensor=4)
    for chips in grid.reshape(4, 4):
        fixed = [axis for axis in range(2) if len({chip.coords[axis] for chip in chips}) == 1]
        assert len(fixed) == 1, "each group is a row or a column"


def test_devices_that_form_no_box_give_a_warning():
    corner = [Chip(number, coords=place) for number, place in enumerate([(0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 0, 0)])]
    with pytest.warns(UserWarning, match="mesh: 4 TPU devices do not fill a box of their slice"):
        grid = make_grid(corner, tensor=2)
    assert [chip.id for chip in grid.flat] == [0, 1, 2, 3], "in the given order"


def test_an_error_in_the_torus_mesh_propagates(monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("a new kind of TPU")

    monkeypatch.setattr(sharding.unstable, "create_device_mesh", fail)
    with pytest.raises(AssertionError, match="a new kind of TPU"):
        make_grid([Chip(number, coords=(number, 0, 0)) for number in range(4)])
