"""The experts of gpt-oss in 4 bits are read as transformers reads them, without torch's kernels for them."""

import json

import families
import jax
import numpy as np
import pytest
from api import parameters
from published import load
from safetensors.numpy import save_file

from gspax.errors import UserError
from gspax.hf.packed import unpack

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
pytest.importorskip("transformers")

E, D, F = 3, 64, 32


@pytest.fixture
def folders(tmp_path):
    """One model, saved twice: its experts in bfloat16, as transformers converts them, and in 4 bits."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = families.make_model(
        "gpt_oss", "bfloat16", hidden_size=D, intermediate_size=F, num_local_experts=E, num_hidden_layers=2
    )
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model.save_pretrained(plain)
    model.save_pretrained(packed)
    whole = load(plain)
    in_4_bits, rng = dict(whole), np.random.default_rng(0)
    for name in [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = whole[name].shape
        blocks = rng.integers(0, 256, (E, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(118, 127, blocks.shape[:-1]).astype(np.uint8)
        numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        whole[name] = numbers.numpy().astype(whole[name].dtype)
        del in_4_bits[name]
        in_4_bits |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(whole, plain / "model.safetensors")
    save_file(in_4_bits, packed / "model.safetensors")
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(raw))
    return plain, packed


@pytest.mark.parametrize("piece", [parameters.PIECE, 2000])
def test_numbers_of_4_bits_are_those_of_transformers(folders, piece, monkeypatch, tmp_path, capsys):
    """In one piece, and expert by expert; a sentence says what an export has."""
    monkeypatch.setattr(parameters, "PIECE", piece)
    (config, plain), (again, packed) = map(families.read, folders)
    assert config == again
    jax.tree.map(np.testing.assert_array_equal, plain, packed)
    assert "(mxfp4) are read as bfloat16, and an export has them as such" in capsys.readouterr().err
    exported = load(families.write(tmp_path / "exported", config, packed, "bfloat16"))
    assert {name: tensor.tobytes() for name, tensor in exported.items()} == {
        name: tensor.tobytes() for name, tensor in load(folders[0]).items()
    }


def test_a_scale_beyond_bfloat16_and_another_method_are_refused(folders):
    _, folder = folders
    found = load(folder)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    found[name] = np.full_like(found[name], 255)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"down_proj_blocks: wanted finite numbers, got NaN or infinity"):
        families.read(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r'quantization_config: wanted null, got {"quant_method": "gptq"}'):
        families.read(folder)


def test_blocks_without_scales_are_no_part_of_a_model(folders):
    _, folder = folders
    found = load(folder)
    del found["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(found, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"down_proj_blocks: wanted the shape \[3, 64, 32\], got \[3, 64, 1, 16\]"):
        families.read(folder)


def test_numbers_are_read_by_their_4_bits():
    blocks = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], np.uint8)
    got = unpack(blocks, np.array([128], np.uint8)).astype(np.float32).reshape(2, 16)
    np.testing.assert_array_equal(got[0], [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
