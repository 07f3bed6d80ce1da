"""The safetensors format, exchanged with the `safetensors` library, and errors for corrupt files."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from api import tensors
from safetensors.numpy import load_file, save_file

from gspax.errors import UserError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.standard_normal((3, 5)).astype(np.float32),
    "b.weight": RNG.standard_normal((2, 3, 4)).astype(BFLOAT16),
    "half": RNG.standard_normal(7).astype(np.float16),
    "scalar": np.array(3, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_files_of_the_safetensors_library_are_read(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    found = tensors.find(tmp_path)
    assert found.keys() == TENSORS.keys()
    for room in (np.empty(0, np.uint8), np.empty(8, np.uint8), np.empty(1000, np.uint8)):
        for name, tensor in TENSORS.items():
            read = tensors.read_part(found[name], tensors.WHOLE, room).reshape(tensor.shape)
            assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
@pytest.mark.parametrize(("shard_size", "files"), [(10**9, 1), (120, 3), (1, 5)])
def test_the_safetensors_library_reads_our_files(dtype, shard_size, files, tmp_path):
    alike = {name: tensor.astype(dtype) for name, tensor in TENSORS.items()}
    shapes = {name: tensor.shape for name, tensor in alike.items()}
    stored = tensors.lay_out(tmp_path, shapes, dtype, shard_size * dtype.itemsize // 4)
    for name in reversed(alike):
        tensors.write(stored[name], alike[name])
    assert min(each.start for each in stored.values()) % 8 == 0  # as `safetensors` aligns them
    written = sorted(tmp_path.glob("*.safetensors"))
    found = {}
    for file in written:
        found |= load_file(file)
    assert found.keys() == alike.keys()
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in alike.items())
    assert tensors.find(tmp_path) == stored
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        raw = json.loads(index.read_text())
        assert raw["metadata"]["total_size"] == sum(tensor.nbytes for tensor in alike.values())
        assert {*raw["weight_map"].values()} == {file.name for file in written}


def test_files_respect_the_shard_size_and_a_larger_tensor_gets_its_own_file(tmp_path):
    shapes = {"a": (10,), "b": (10,), "c": (5,), "large": (100,), "d": (1,)}
    stored = tensors.lay_out(tmp_path, shapes, np.dtype(np.float32), 100)
    assert [stored[name].file.name[:11] for name in shapes] == [f"model-0000{number}" for number in (1, 1, 1, 2, 3)]
    assert stored["d"].file.name == "model-00003-of-00003.safetensors"


def with_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def two_files(folder):
    save_file({"a": TENSORS["a"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"half": TENSORS["half"]}, folder / "model-00002-of-00002.safetensors")
    with_index(folder, {"a": "model-00001-of-00002.safetensors", "half": "model-00002-of-00002.safetensors"})


def missing_shard(folder):
    two_files(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def missing_index(folder):
    two_files(folder)
    (folder / "model.safetensors.index.json").unlink()


def tensor_not_in_its_file(folder):
    two_files(folder)
    with_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"})


def tensor_in_another_file(folder):
    two_files(folder)
    with_index(folder, {"a": "model-00002-of-00002.safetensors", "half": "model-00001-of-00002.safetensors"})


def tensor_twice(folder):
    two_files(folder)
    save_file({"a": TENSORS["a"], "half": TENSORS["half"]}, folder / "model-00002-of-00002.safetensors")


def pickle_only(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def outside(folder):
    with_index(folder, {"a": "../elsewhere.safetensors"})


def pickle_in_index(folder):
    with_index(folder, {"a": "pytorch_model.bin"})


def broken_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def empty_index(folder):
    with_index(folder, {})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "wanted model.safetensors or model.safetensors.index.json, there is neither"),
        (missing_shard, "model-00002-of-00002.safetensors: wanted this file, which model.safetensors.index.json names"),
        (missing_index, "wanted model.safetensors.index.json beside model-00001-of-00002.safetensors, there is none"),
        (tensor_not_in_its_file, "model-00001-of-00002.safetensors: wanted the tensor b, which"),
        (tensor_in_another_file, "model-00002-of-00002.safetensors: wanted the tensor a, which"),
        (tensor_twice, "tensor a is in model-00001-of-00002.safetensors too"),
        (pickle_only, "pytorch_model.bin: wanted safetensors; this is a pickle"),
        (outside, "for tensor a, got '../elsewhere.safetensors'"),
        (pickle_in_index, "for tensor a, got 'pytorch_model.bin'"),
        (broken_index, "model.safetensors.index.json: cannot be read: Expecting value"),
        (empty_index, "wanted an object with tensors in weight_map, got {}"),
    ],
)
def test_a_folder_without_a_checkpoint_is_rejected(make, said, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError, match=re.escape(said)):
        tensors.find(tmp_path)


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = file_of({"a": entry(0, 8), "b": entry(8, 16)}, bytes(16))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no safetensors file, or a truncated one (0 bytes"),
        (b"\x10\0\0\0", "no safetensors file, or a truncated one (4 bytes"),
        (GOOD[:30], "no safetensors file, or a truncated one (30 bytes"),
        (GOOD[:-1], "truncated or corrupt: its header wants"),
        (GOOD + b"x", "truncated or corrupt: its header wants"),
        (file_of({}, length=2**63), "no safetensors file, or a truncated one"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "no safetensors file, or a truncated one"),
        (file_of(b"{not json"), "corrupt: its header is no JSON object"),
        (file_of(b"\xff\xfe\xfd"), "corrupt: its header is no JSON object"),
        (file_of([1]), "corrupt: its header is no JSON object"),
        (file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "corrupt: tensor b begins at byte"),
        (file_of({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "corrupt: tensor b begins at byte"),
        (file_of({"a": entry(0, 12)}, bytes(12)), "corrupt: tensor a, F32[2], has 12 bytes, wanted 8"),
        (file_of({"a": entry(0, 8, (-1, -2))}, bytes(8)), "corrupt: the header's entry of tensor a"),
        (file_of({"a": entry(0, 8, (2.0,))}, bytes(8)), "corrupt: the header's entry of tensor a"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "corrupt: the header's entry of tensor a"),
        (file_of({"a": 3}, bytes(8)), "corrupt: the header's entry of tensor a"),
        (file_of({"a": entry(0, 8, (8,), "F8_E5M2")}, bytes(8)), "tensor a: wanted one of F32, BF16, F16, got F8_E5M2"),
    ],
)
def test_a_corrupt_file_is_rejected(content, said, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{file}: {said}")):
        tensors.find(tmp_path)


def test_the_valid_file_among_the_corrupt_ones_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert [*tensors.find(tmp_path)] == ["a", "b"]


def test_a_file_that_shrinks_while_being_read_is_rejected(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = tensors.find(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="became shorter while being read"):
        tensors.read(found["a"])
