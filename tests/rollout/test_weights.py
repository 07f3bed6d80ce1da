"""Versions in a folder: what vLLM's workers read is what was written."""

from dataclasses import replace

import fake_vllm
import jax
import numpy as np
import pytest
import tiny
from published import random_params
from small_experiment import experiment

from gspax.hf import parameters, tensors
from gspax.rollout.servers import weights
from gspax.rollout.servers.weights import Writer

worker = fake_vllm.worker
BFLOAT16 = replace(experiment.model, dtype="bfloat16")
# Tensors of several parameters in turn (kv_b_proj), and float32 tensors in a model of bfloat16 (the router's bias)
JOINED = replace(tiny.CONFIGS["latent attention"], dtype="bfloat16")


def train(params, seed, share=0.02):
    """The parameters, on the host, with this share of them changed."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.where(rng.random(leaf.shape) < share, leaf * 1.1 + 0.01, leaf), params)


def read(path):
    """The tensors that our worker extension reads, by name, after it has compared their checksums."""
    assert worker.find_damage(path) == ""
    return {each.name: each.bits for each in worker.read_tensors(path)}


def assert_equal(path, params, model, folder):
    """A version is, bit for bit, what an export of the parameters is."""
    folder.mkdir()
    leaves = parameters.named_leaves(jax.device_get(params))
    parameters.write_checkpoint(folder, model, leaves.__getitem__, dtype=model.dtype)
    wanted, got = tensors.find(folder), read(path)
    assert got.keys() == wanted.keys()
    for name, stored in wanted.items():
        np.testing.assert_array_equal(got[name], tensors.read(stored).reshape(-1).view(got[name].dtype), name)


@pytest.mark.parametrize("model", [BFLOAT16, JOINED], ids=["experts", "joined tensors"])
def test_a_version_is_an_export_of_the_parameters(model, tmp_path):
    """Also one that is written again, as by a run that has returned to an earlier step."""
    writer, params = Writer(tmp_path / "versions", model), random_params(model)
    first = writer.write(0, params)
    assert first.bytes == sum(bits.nbytes for bits in read(first.path).values())
    changed = train(params, 1)
    written = [writer.write(version, changed) for version in (1, 0)]
    assert [one.path.name for one in written] == ["weights_v000001", "weights_v000000"]
    assert written[0].digest == written[1].digest != first.digest, "the digest is of the weights alone"
    for one in written:
        assert_equal(one.path, changed, model, tmp_path / f"export {one.version}")
    weights.remove_others(written[0].path)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["weights_v000001"]


def test_a_damaged_version_is_refused(tmp_path):
    written = Writer(tmp_path, BFLOAT16).write(0, random_params(BFLOAT16))
    file = written.path / "model.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for at in range(begin, len(whole), len(whole) // 20):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "wanted the checksum" in worker.find_damage(written.path)
    file.write_bytes(whole)
    assert worker.find_damage(written.path) == ""


def test_a_write_that_is_interrupted_leaves_no_version(tmp_path, monkeypatch):
    writer, params = Writer(tmp_path, BFLOAT16), random_params(BFLOAT16)
    writer.write(0, params)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tensors, "write", killed)
        writer.write(1, train(params, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["weights_v000000"]
    changed = train(params, 2)
    assert_equal(writer.write(1, changed).path, changed, BFLOAT16, tmp_path / "export")
