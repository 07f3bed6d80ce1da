"""The table of tensor names covers each element of each parameter once; axes are checked in plain numpy."""

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from api import names, parameter_shapes, presets, tensors
from published import published, random_params
from safetensors.numpy import load_file

from gspax.hf import rows

CONFIGS = {**tiny.CONFIGS, "the 0.6B": presets.qwen3_0_6b, "the 30B": presets.qwen3_30b_a3b}
ROWS = [*rows.OUTER, *rows.LAYER, *rows.DENSE, *rows.SPARSE, *rows.FUSED_EXPERTS]
SIZES = dict(zip("VDNKHEF", (23, 16, 4, 2, 8, 5, 12), strict=True))


def shape_of(row):
    return tuple(SIZES[letter] for letter in row.axes.split("->")[1].split())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_covered_once(name, fused):
    shapes = parameter_shapes(CONFIGS[name])
    table = names.list_chunks(CONFIGS[name], shapes, fused=fused)
    assert table.keys() == shapes.keys()
    for parameter, chunks in table.items():
        depth = len(chunks[0].index)
        assert sorted(chunk.index for chunk in chunks) == list(np.ndindex(shapes[parameter][:depth]))
    parts = [(chunk.published, chunk.part) for chunks in table.values() for chunk in chunks]
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_names_and_shapes_equal_the_published_layout(name, fused):
    config = tiny.CONFIGS[name]
    table = names.list_chunks(config, parameter_shapes(config), fused=fused)
    expected = published(config, random_params(config), fused=fused)
    assert names.tensor_shapes(table, parameter_shapes(config)) == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_the_30b_model_has_a_tensor_for_each_expert():
    config = presets.qwen3_30b_a3b
    shapes = names.tensor_shapes(names.list_chunks(config, parameter_shapes(config)), parameter_shapes(config))
    assert len(shapes) == 3 + 48 * (9 + 3 * 128)
    assert shapes[max(shapes, key=len)] == (768, 2048)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.published)
def test_to_ours_transposes_and_reshapes_for_the_layers(row):
    """gspax computes x W, torch W x: a published matrix is transposed, then reshaped to our axes."""
    shape = shape_of(row)
    tensor = np.random.default_rng(0).standard_normal(names.published_shape(row, shape))
    view = names.to_ours(row, tensor, shape)
    assert view.shape == shape and np.shares_memory(view, tensor)
    table = row.ours == "embedding" or tensor.ndim == 1
    assert (view == (tensor if table else tensor.swapaxes(-1, -2)).reshape(shape)).all()


@pytest.mark.parametrize(
    ("axes", "axis"), [("(N H) D -> D N H", 1), ("V D -> V D", 0), ("1 E -> E", 0), ("(K H)+ 1 T -> K H T", 0)]
)
def test_the_axis_that_a_tensor_begins_with(axes, axis):
    assert names.leading_axis(rows.Row("ours", "tensor", axes)) == axis


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.published)
def test_to_published_inverts_to_ours(row, dtype):
    part = np.random.default_rng(0).standard_normal(shape_of(row)).astype(dtype)
    tensor = names.to_published(row, part)
    assert tensor.flags.c_contiguous and tensor.dtype == dtype
    assert (names.to_ours(row, tensor, part.shape) == part).all()


FUSED = {  # tensors that hold several parameters: the axes of each in ours, and the tensor made of them by hand
    "queries, keys, and values": (
        {"query": "(N H)+ D -> D N H", "key": "(K H)+ D -> D K H", "value": "(K H)+ D -> D K H"},
        lambda query, key, value: np.concatenate([x.reshape(SIZES["D"], -1).T for x in (query, key, value)]),
    ),
    "their biases": (
        {"query": "(N H)+ -> N H", "key": "(K H)+ -> K H", "value": "(K H)+ -> K H"},
        lambda query, key, value: np.concatenate([x.reshape(-1) for x in (query, key, value)]),
    ),
    "gate and up": (
        {"gate": "F+ D -> D F", "up": "F+ D -> D F"},
        lambda gate, up: np.concatenate([gate.T, up.T]),
    ),
    "gate and up of experts": (
        {"gate": "E F+ D -> E D F", "up": "E F+ D -> E D F"},
        lambda gate, up: np.concatenate([gate.swapaxes(1, 2), up.swapaxes(1, 2)], axis=1),
    ),
    "a query and a gate of each head": (
        {"query": "(N H+) D -> D N H", "gate": "(N H+) D -> D N H"},
        lambda query, gate: np.concatenate([query, gate], axis=2).reshape(SIZES["D"], -1).T,
    ),
    "keys of each key head, and values of its value heads": (
        {"key": "(K H+) D -> D K H", "value": "(K (E F)+) D -> D K E F"},
        lambda key, value: np.concatenate([key, value.reshape(*key.shape[:2], -1)], axis=2).reshape(SIZES["D"], -1).T,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_parameters_that_share_a_tensor_are_written_and_read_as_its_parts(name, tmp_path):
    axes, by_hand = FUSED[name]
    joined = [rows.Row(ours, "tensor", each) for ours, each in axes.items()]
    rng, shapes = np.random.default_rng(0), {row: shape_of(row) for row in joined}
    arrays = {row: rng.standard_normal(shape).astype(np.float32) for row, shape in shapes.items()}
    expected, parts = by_hand(*arrays.values()), names._parts(shapes)
    for row, part in parts.items():
        assert names.published_shape(row, shapes[row], part) == expected.shape
    stored = tensors.create(tmp_path / "model.safetensors", {"first": (3,), "tensor": expected.shape}, expected.dtype)
    for row in reversed(joined):  # in any order
        tensors.write(stored["tensor"], names.to_published(row, arrays[row]), parts[row])
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["tensor"], expected)
    for row in joined:
        flat = tensors.read_part(stored["tensor"], parts[row])
        np.testing.assert_array_equal(names.to_ours(row, flat, shapes[row]), arrays[row])


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((700,), (0,)),
        ((0, 3), (1, 0)),
        ((300, 700), (0, 1)),
        ((300, 700), (1, 0)),  # several strips, the last of them partial
        ((2, 30000), (1, 0)),
        ((3, 70, 700), (2, 0, 1)),
        ((700, 3, 70), (1, 2, 0)),
        ((5, 300, 70), (0, 2, 1)),
        ((300, 1, 1), (2, 1, 0)),
    ],
)
def test_copy_equals_assignment(shape, order, dtypes, monkeypatch):
    monkeypatch.setattr(names, "STRIP", 10000)
    source = np.random.default_rng(0).standard_normal(shape).astype(jax.numpy.dtype(dtypes[0])).transpose(order)
    outer = np.zeros([size + 2 for size in source.shape], jax.numpy.dtype(dtypes[1]))
    inside = (slice(1, -1),) * source.ndim
    expected = outer.copy()
    expected[inside] = source
    names.copy(outer[inside], source)  # a shard of a larger array
    assert (outer == expected).all()


def test_copy_fills_a_slice():
    """As for a device that holds some of the columns."""
    tensor = np.arange(64.0 * 48).reshape(64, 48)
    part = tensor.T[12:24]
    target = np.zeros(part.shape)
    names.copy(target, part)
    assert (target == part).all()
