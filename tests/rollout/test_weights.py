"""Versions in a folder, in full or as changes: what vLLM's workers read is what was written."""

from dataclasses import replace

import fake_vllm
import jax
import numpy as np
import pytest
import tiny
from published import random_params
from small_experiment import experiment

from gspax.hf import parameters, tensors
from gspax.rollout.engines import weights
from gspax.rollout.engines.weights import Writer

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


def versions(folder, model, count, share=0.02):
    """A writer of changes, what it has written, and the newest parameters."""
    writer, params, written = Writer(folder, model, changes=True), random_params(model), []
    for version in range(count):
        params = params if version == 0 else train(params, version, share)
        written.append(writer.write(version, params))
    return writer, written, params


@pytest.mark.parametrize("model", [BFLOAT16, JOINED], ids=["experts", "joined tensors"])
def test_changes_give_the_weights_that_were_written_in_full(model, tmp_path):
    writer, written, params = versions(tmp_path / "changes", model, 4)
    files = [sorted(path.name for path in each.path.iterdir() if path.suffix != ".json") for each in written]
    assert files == [["model.safetensors"], *[["changes-00000.npz"]] * 3]
    assert all(each.bytes < 0.1 * written[0].bytes for each in written[1:])
    assert_equal(written[-1].path, params, model, tmp_path / "export")
    alone = Writer(tmp_path / "full", model, changes=False).write(3, params)
    assert (alone.digest, alone.bytes) == (written[-1].digest, written[0].bytes), "the digest is of the weights alone"
    weights.remove_others(tmp_path / "changes", writer.kept)
    assert len(list((tmp_path / "changes").iterdir())) == 4, "all are needed to read the newest"


def test_a_version_is_written_in_full_when_its_changes_would_be_no_smaller(tmp_path):
    """Also every so many versions, so that not many are read for one."""
    writer, written, params = versions(tmp_path, BFLOAT16, 3, share=0.2)
    assert written[2].bytes == written[0].bytes > written[1].bytes, "0.6 and 0.6 of the bytes are more than all"
    assert writer.kept == [written[2].path]
    everything = writer.write(3, train(params, 9, share=1.0))
    assert everything.bytes == written[0].bytes
    back = writer.write(3, params)  # a run that has returned to an earlier step writes a version again
    assert back.bytes == written[0].bytes and back.digest == written[2].digest
    assert_equal(back.path, params, BFLOAT16, tmp_path / "export")
    assert writer.write(3, train(params, 10)).bytes == written[0].bytes, "no version is its own base"


def test_equal_weights_have_no_changes(tmp_path):
    writer, (first,), params = versions(tmp_path, BFLOAT16, 1)
    again = writer.write(1, params)
    assert (again.bytes, again.digest) == (0, first.digest) and read(again.path).keys() == read(first.path).keys()


def is_refused(path):
    try:
        return worker.find_damage(path) != ""
    except Exception:  # of the zip file
        return True


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_changes_of_another_version_and_damaged_ones_are_refused(tmp_path):
    _, written, params = versions(tmp_path / "a", BFLOAT16, 3)
    newest = written[2].path
    changes = newest / "changes-00000.npz"
    whole, right, refused = changes.read_bytes(), read(newest), 0
    for at in range(0, len(whole), len(whole) // 40):
        flip(changes, at)
        if not is_refused(newest):  # a time in the zip file
            jax.tree.map(np.testing.assert_array_equal, read(newest), right)
        else:
            refused += 1
        changes.write_bytes(whole)
    assert refused > 20
    base = written[0].path / "model.safetensors"
    flip(base, -1)
    assert "wanted the checksum" in worker.find_damage(newest)
    flip(base, -1)
    assert worker.find_damage(newest) == ""
    other = Writer(tmp_path / "b", BFLOAT16, changes=True).write(1, train(params, 7))
    written[1].path.rename(tmp_path / "moved")
    other.path.rename(written[1].path)
    with pytest.raises(
        ValueError, match=r"wanted the version \S+ to apply the changes of weights_v000002 to, weights_v000001 is"
    ):
        worker.find_damage(newest)


def test_a_writer_that_was_interrupted_writes_in_full_next(tmp_path, monkeypatch):
    writer, (first,), params = versions(tmp_path, BFLOAT16, 1)

    def killed(*arguments, **changes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez", killed)
        writer.write(1, train(params, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["weights_v000000"]
    changed = train(params, 2)
    written = writer.write(1, changed)
    assert written.bytes == first.bytes
    assert_equal(written.path, changed, BFLOAT16, tmp_path / "export")
