"""Matrices in 8 bits with a factor for each block of 128 x 128 numbers, as DeepSeek-V3 and Qwen3-FP8 are published."""

import itertools
import json
import shutil

import families
import jax
import ml_dtypes
import numpy as np
import pytest
from api import named_leaves, parameters, tensors
from published import load
from safetensors.numpy import save_file

from gspax.errors import UserError
from gspax.hf import packed

QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
KEPT = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "e_score_correction_bias")


def quantize(weight, rng):
    """Random numbers of 8 bits in a matrix's shape, factors of its blocks, and their product by loops."""
    rows, columns = weight.shape
    bits = rng.integers(0, 127, weight.shape).astype(np.uint8) | (rng.integers(0, 2, weight.shape) << 7).astype(
        np.uint8
    )
    numbers = bits.view(ml_dtypes.float8_e4m3fn)
    factors = rng.uniform(1e-4, 1e-3, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    product = np.empty((rows, columns), np.float32)
    for i, j in itertools.product(range(factors.shape[0]), range(factors.shape[1])):
        block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        product[block] = numbers[block].astype(np.float32) * factors[i, j]
    return numbers, factors, product.astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model, saved twice: in bfloat16, and with the matrices of its layers, without routers, in 8 bits."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    pytest.importorskip("transformers")
    model = families.make_model("deepseek_v3", "bfloat16", hidden_size=160, intermediate_size=136)
    plain, small = (tmp_path_factory.mktemp(name) for name in ("plain", "small"))
    model.save_pretrained(plain)
    model.save_pretrained(small)
    whole, rng = load(plain), np.random.default_rng(0)
    in_8_bits = dict(whole)
    for name in [name for name in whole if not name.endswith(KEPT) and whole[name].ndim == 2]:
        in_8_bits[name], in_8_bits[f"{name}_scale_inv"], whole[name] = quantize(whole[name], rng)
    save_file(whole, plain / "model.safetensors")
    save_file(in_8_bits, small / "model.safetensors")
    raw = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(raw | {"quantization_config": QUANTIZED}))
    return plain, small, in_8_bits


@pytest.mark.parametrize("piece", [parameters.PIECE, 1000])
def test_numbers_of_8_bits_are_read_and_exported_in_16(folders, piece, monkeypatch, tmp_path, capsys):
    """In one piece, and in pieces that cut blocks; a sentence says what an export has."""
    monkeypatch.setattr(parameters, "PIECE", piece)
    (config, plain), (again, small) = map(families.read, folders[:2])
    assert config == again
    jax.tree.map(np.testing.assert_array_equal, plain, small)
    assert "the numbers of 8 bits (fp8) are read as bfloat16, and an export has them as such" in capsys.readouterr().err
    exported = load(families.write(tmp_path / "exported", config, small, "bfloat16"))
    assert exported.keys() == load(folders[0]).keys()
    for name, each in load(folders[0]).items():
        if not name.endswith("e_score_correction_bias"):  # float32 in every export
            assert exported[name].tobytes() == each.tobytes(), name
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())


def test_layers_that_are_only_copied_are_copied_in_16_bits(folders, tmp_path):
    """DeepSeek's files have a layer that predicts several tokens ahead (MTP) after the model's last one."""
    folder = shutil.copytree(folders[1], tmp_path / "published")
    config, params = families.read(folder)
    numbers, factors, product = quantize(np.empty((160, 320)), np.random.default_rng(3))
    name = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    more = {name: numbers, f"{name}_scale_inv": factors}
    save_file(folders[2] | more, folder / "model.safetensors")
    (target := tmp_path / "exported").mkdir()
    parameters.write_checkpoint(
        target, config, named_leaves(params).__getitem__, origin=tensors.find(folder), dtype="bfloat16"
    )
    written = load(target)
    assert written[name].tobytes() == product.tobytes() and f"{name}_scale_inv" not in written
    save_file(folders[2] | {name: numbers}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{name}: wanted scales beside its numbers"):
        parameters.write_checkpoint(target, config, named_leaves(params).__getitem__, origin=tensors.find(folder))


@pytest.mark.parametrize("shape", [(300, 260), (2, 130, 140)])
def test_any_part_is_that_of_the_whole(shape, tmp_path):
    rng = np.random.default_rng(1)
    found = [quantize(np.empty(shape[-2:]), rng) for _ in range(shape[0] if len(shape) == 3 else 1)]
    numbers, factors, product = (
        np.stack(each).reshape(*shape[:-2], *each[0].shape) for each in zip(*found, strict=True)
    )
    save_file({"a.weight": numbers, "a.weight_scale_inv": factors}, tmp_path / "model.safetensors")
    stored = packed.join(tensors.find(tmp_path))["a.weight"]
    np.testing.assert_array_equal(tensors.read(stored), product)
    for first, last in ((0, 1), (7, shape[0]), (0, shape[0])) if len(shape) == 2 else ((0, 1), (1, 2)):
        narrow = tensors.narrow(stored, first, last, shape[0])
        assert tensors.read(narrow).tobytes() == product[first:last].tobytes()
        part = tensors.Part(1, 0, 1, 2)
        half = product[first:last].reshape(-1)[: product[first:last].size // 2]
        assert tensors.read_part(narrow, part).tobytes() == half.tobytes()
    columns = tensors.Part(int(np.prod(shape[:-1])), 3, 50, shape[-1])
    assert tensors.read_part(stored, columns).tobytes() == np.ascontiguousarray(product[..., 3:53]).tobytes()


def test_whole_blocks_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    numbers, factors, _ = quantize(np.empty((256, 384)), np.random.default_rng(2))
    save_file({"a": numbers, "a_scale_inv": factors}, tmp_path / "model.safetensors")
    as_theirs = torch.tensor(numbers.view(np.uint8)).view(torch.float8_e4m3fn), torch.tensor(factors)
    wanted = theirs.Fp8Dequantize(None)._dequantize_one(*as_theirs, torch.bfloat16)
    got = tensors.read(packed.join(tensors.find(tmp_path))["a"])
    np.testing.assert_array_equal(got.astype(np.float32), wanted.float().numpy())


def test_what_is_no_number_or_has_no_factors_is_refused(folders, tmp_path):
    folder, found = shutil.copytree(folders[1], tmp_path / "a"), folders[2]
    name = "model.layers.0.self_attn.o_proj.weight"
    for change, sentence in (
        ({name: np.full_like(found[name], np.nan)}, f"{name}: wanted finite numbers, got NaN"),
        ({f"{name}_scale_inv": None}, f"{name}: wanted scales beside its numbers of float8_e4m3fn, got none"),
        ({f"{name}_scale_inv": np.ones((9, 9), np.float32)}, f"{name}_scale_inv is not part of the model"),
    ):
        changed = {key: value for key, value in (found | change).items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UserError, match=sentence):
            families.read(folder)


@pytest.mark.parametrize("change", [{"weight_block_size": [64, 64]}, {"weight_block_size": None}, {"fmt": "e5m2"}])
def test_other_blocks_and_formats_are_refused(folders, tmp_path, change):
    folder = shutil.copytree(folders[1], tmp_path / "a")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = QUANTIZED | change
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="quantization_config: wanted null, got"):
        families.read(folder)
