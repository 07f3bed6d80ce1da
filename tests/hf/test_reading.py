"""Reading published checkpoints onto any mesh, with errors that name file and tensor."""

import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from api import abstract_params, make_mesh, names, parameter_shapes, parameters, tensors
from published import published, random_params, save

from gspax import config as experiment_config
from gspax.errors import UserError

CONFIGS = {
    name: tiny.CONFIGS[name]
    for name in ("moe", "dense", "tied", "some layers dense", "every second layer sparse", "biases")
} | {"the last layer dense": replace(tiny.MOE, mlp_only_layers=(2,))}
MOE = tiny.MOE


def wanted(config, devices=1, dtype="float32"):
    return abstract_params(config, make_mesh(experiment_config.Mesh(), jax.devices()[:devices]), dtype)


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), one, other)))


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_read_from_its_tensors(name, files, tmp_path):
    config = CONFIGS[name]
    params = random_params(config)
    save(tmp_path, config, published(config, params), files=files)
    assert equal(parameters.read_params(tmp_path, config, wanted(config)), params)


@pytest.mark.parametrize("devices", [1, 8])
def test_fused_experts_are_the_same_parameters(devices, tmp_path):
    config = tiny.CONFIGS["some layers dense"]
    params = random_params(config)
    save(tmp_path, config, published(config, params, fused=True))
    assert equal(parameters.read_params(tmp_path, config, wanted(config, devices)), params)


@pytest.mark.parametrize("name", CONFIGS)
def test_arrays_are_sharded_by_the_table(name, tmp_path):
    config = CONFIGS[name]
    params = random_params(config)
    save(tmp_path, config, published(config, params))
    found, asked = parameters.read_params(tmp_path, config, wanted(config, 8)), wanted(config, 8)
    assert equal(found, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, asked)
    gate = found["runs"][0]["mlp"]["gate"]
    assert gate.addressable_shards[0].data.size * 8 == gate.size


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_cast_to_the_wanted_dtype(stored, dtype, tmp_path):
    params = random_params(MOE)
    save(tmp_path, MOE, published(MOE, params, stored))
    found = parameters.read_params(tmp_path, MOE, wanted(MOE, 8, dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(jax.numpy.dtype(dtype))}
    assert equal(found, jax.tree.map(lambda leaf: np.asarray(leaf).astype(stored).astype(dtype), params))


def test_buffers_saved_by_older_versions_are_ignored(tmp_path):
    params = random_params(MOE)
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for layer in range(3)}
    buffers["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save(tmp_path, MOE, published(MOE, params) | buffers)
    assert equal(parameters.read_params(tmp_path, MOE, wanted(MOE)), params)
    save(tmp_path, MOE, published(MOE, params) | {"model.layers.0.rotary_emb.freq": np.ones(4, np.float32)})
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.rotary_emb\.freq is not part of the model"):
        parameters.read_params(tmp_path, MOE, wanted(MOE))


def test_on_a_cpu_the_host_keeps_no_second_copy(tmp_path, monkeypatch):
    """The arrays use the memory that the shards were read into."""
    rooms = []
    aligned = parameters.empty_aligned
    monkeypatch.setattr(parameters, "empty_aligned", lambda *where: rooms.append(aligned(*where)) or rooms[-1])
    save(tmp_path, MOE, published(MOE, random_params(MOE)))
    found = parameters.read_params(tmp_path, MOE, wanted(MOE, 8))
    own = {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(found) for shard in leaf.addressable_shards}
    assert own == {room.ctypes.data for room in rooms}


def test_each_tensor_is_read_once_for_all_devices(tmp_path, monkeypatch):
    read, seen = tensors.read_part, []
    monkeypatch.setattr(tensors, "read_part", lambda stored, *rest: seen.append(stored) or read(stored, *rest))
    ours = published(MOE, random_params(MOE))
    save(tmp_path, MOE, ours)
    parameters.read_params(tmp_path, MOE, wanted(MOE, 8))
    assert len(seen) == len(set(seen)) == len(ours)


@pytest.mark.parametrize("devices", [1, 8])
def test_large_tensors_are_read_in_pieces(devices, tmp_path, monkeypatch):
    """Pieces of a few rows, or of less than a row; several devices may share a piece."""
    params = random_params(MOE)
    save(tmp_path, MOE, published(MOE, params))
    for piece in (100, 7):
        monkeypatch.setattr(parameters, "PIECE", piece)
        assert equal(parameters.read_params(tmp_path, MOE, wanted(MOE, devices)), params)


def test_a_host_does_not_read_experts_that_its_devices_do_not_hold(tmp_path):
    params, shape = random_params(MOE), wanted(MOE)["runs"][0]["mlp"]["gate"].shape
    stored = tensors.find(save(tmp_path, MOE, published(MOE, params)))
    box = ((0, 3), (2, 4), (0, 16), (4, 8))  # all layers, two experts, part of the width
    shard = np.zeros([last - first for first, last in box], np.float32)
    read = []
    for chunk in names.list_chunks(MOE, parameter_shapes(MOE))["runs/0/mlp/gate"]:

        def read_part(name, rows, part):
            read.append(name)
            return tensors.read_part(tensors.narrow(stored[name], *rows), part)

        parameters._copy_chunk(chunk, read_part, {box: shard}, shape)
    experts = [(layer, expert) for layer in range(3) for expert in (2, 3)]
    assert sorted(read) == [f"model.layers.{layer}.mlp.experts.{e}.gate_proj.weight" for layer, e in experts]
    assert (shard == np.asarray(params["runs"][0]["mlp"]["gate"])[:, 2:4, :, 4:8]).all()


# Rejected input


def refused(folder, config, said):
    with pytest.raises(UserError, match=re.escape(said)) as problem:
        parameters.read_params(folder, config, wanted(config))
    assert "\n" not in str(problem.value)


def ours(config=MOE, **options):
    return published(config, random_params(config), **options)


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


def test_a_missing_tensor_is_rejected(tmp_path):
    found = ours()
    del found[GATE], found["model.norm.weight"]
    refused(save(tmp_path, MOE, found), MOE, f"{tmp_path}: tensor model.norm.weight is missing, and 1 more")


def test_an_unknown_tensor_is_rejected(tmp_path):
    save(tmp_path, MOE, ours() | {"model.layers.0.mlp.shared_expert.gate_proj.weight": np.zeros((2, 2), np.float32)})
    refused(tmp_path, MOE, "model.safetensors: tensor model.layers.0.mlp.shared_expert.gate_proj.weight is not part")


def test_experts_in_both_layouts_at_once_are_rejected(tmp_path):
    refused(save(tmp_path, MOE, ours() | ours(fused=True)), MOE, "is not part of the model in config.json")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_tensor_that_is_not_finite_is_rejected(dtype, value, tmp_path):
    found = ours(dtype=dtype)
    found[GATE][-1, -1] = value
    save(tmp_path, MOE, found, files=2)
    refused(tmp_path, MOE, f"tensor {GATE}: wanted finite numbers, got NaN or infinity")
    found[GATE][-1, -1] = np.finfo(np.float16).max  # in every dtype
    save(tmp_path, MOE, found, files=2)
    parameters.read_params(tmp_path, MOE, wanted(MOE))


@pytest.mark.parametrize("name", ["a router of sigmoids", "latent attention"])
def test_layers_that_predict_several_tokens_ahead_are_not_read_and_a_warning_says_so(name, tmp_path, capsys):
    """Those after the last layer of GLM-4.5 and DeepSeek-V3; in a family that has none, a layer too many is refused."""
    config = tiny.CONFIGS[name]
    params = random_params(config)
    ahead = {f"model.layers.3.{name}.weight": np.ones(4, np.float32) for name in ("enorm", "mlp.gate", "eh_proj")}
    save(tmp_path, config, published(config, params) | ahead)
    assert equal(parameters.read_params(tmp_path, config, wanted(config)), params)
    said = capsys.readouterr().err
    assert "3 tensors of a vision tower or of layers that predict several tokens ahead (MTP) are not read" in said


def test_an_extra_layer_is_rejected(tmp_path):
    save(tmp_path, MOE, ours())
    fewer = replace(MOE, num_hidden_layers=2)
    refused(tmp_path, fewer, "tensor model.layers.2.input_layernorm.weight is not part of the model in config.json")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (GATE, (16, 12), "wanted the shape [12, 16], got [16, 12]"),
        ("model.embed_tokens.weight", (24, 16), "wanted the shape [23, 16], got [24, 16]"),
        ("model.norm.weight", (1, 16), "wanted the shape [16], got [1, 16]"),
    ],
)
def test_a_tensor_of_another_shape_is_rejected(name, shape, said, tmp_path):
    save(tmp_path, MOE, ours() | {name: np.zeros(shape, np.float32)}, files=2)
    refused(tmp_path, MOE, f"tensor {name}: {said}")


def test_the_head_of_a_tied_model_must_equal_its_embedding(tmp_path):
    config = tiny.CONFIGS["tied"]
    found = ours(config)
    save(tmp_path, config, found | {"lm_head.weight": found["model.embed_tokens.weight"]})
    assert equal(parameters.read_params(tmp_path, config, wanted(config)), random_params(config))
    save(tmp_path, config, found | {"lm_head.weight": 2 * found["model.embed_tokens.weight"]})
    refused(tmp_path, config, "tensor lm_head.weight differs from model.embed_tokens.weight, but config.json has")


def test_all_headers_are_validated_before_any_tensor_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "read_part", lambda *_: pytest.fail("a tensor was read"))
    save(tmp_path, MOE, ours(), files=3)
    last = tmp_path / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    refused(tmp_path, MOE, f"{last}: truncated or corrupt")
    save(tmp_path, MOE, ours() | {"another": np.zeros(1, np.float32)}, files=3)
    refused(tmp_path, MOE, "tensor another is not part of the model in config.json")
