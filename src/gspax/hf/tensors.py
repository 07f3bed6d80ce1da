"""The safetensors format: finds the tensors of a folder, and reads and writes them one at a time.

A file is 8 bytes (the length of the header, little-endian), the header, a JSON object `name -> dtype, shape, byte
range`, and the tensors' bytes. A checkpoint of several files has an index. The `safetensors` package maps files into
memory, where pages count as the process's memory, and writes only whole files; this module reads and writes single
tensors in place. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from gspax.data.files import SHOWN, parse_json, read_object, show
from gspax.errors import UserError
from gspax.storage.files import open_storage

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES = np.dtype(np.uint8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
MOST_AXES = 32
STRIP = 2**18  # numbers checked at a time
SHORT = 512  # bytes: if a part has shorter contiguous ranges, the whole tensor is read
PARTS_OF_PACKED = {"U8": BYTES, "F8_E4M3": FP8}  # of tensors in fewer than 16 bits (`packed`)
NO_BUFFER = np.empty(0, np.uint8)
NO_OTHERS: Mapping[str, np.dtype] = MappingProxyType({})  # dtypes besides that of most tensors
LONGEST_HEADER = 100_000_000  # bytes; the limit of the format


class Packed(Protocol):
    """The parts of a tensor that is stored in fewer than 16 bits and read as bfloat16."""

    @property
    def title(self) -> str:
        """What its numbers are called in a sentence."""

    def numbers(self, first: int, last: int) -> np.ndarray:
        """Read numbers `first` to `last` of the flattened tensor, bfloat16 [last - first]."""


@dataclass(frozen=True)
class Stored:
    """The location of a tensor in a file; with `packed` in the decoded tensor."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte offset
    packed: Packed | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """A range of a tensor seen as [outer, total, inner]: `length` indices of the middle axis, from `start` on."""

    outer: int
    start: int
    length: int
    total: int

    def of_rows(self, rows: int, size: int) -> Part:
        """Return the part of `rows` of the `size` rows of the tensor's first axis."""
        return self if self.outer == 1 else self._replace(outer=self.outer * rows // size)


WHOLE = Part(outer=1, start=0, length=1, total=1)  # all of any tensor


def find(folder: Path) -> dict[str, Stored]:
    """Find the tensors of a checkpoint folder by name, from the headers of all its files; no tensor is read.

    Raises:
      UserError: a file is missing, truncated or corrupt, or there is no safetensors file. Pickles are rejected.
    """
    weight_map = _weight_map(folder)
    tensors: dict[str, Stored] = {}
    for file in sorted({folder / name for name in weight_map.values()} or {folder / SINGLE}):
        if not file.is_file():
            raise UserError(f"{file}: wanted this file, which {INDEX} names; there is none")
        for name, stored in read_header(file).items():
            if name in tensors:
                raise UserError(f"{file}: tensor {name} is in {tensors[name].file.name} too")
            tensors[name] = stored
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise UserError(f"{folder / file_name}: wanted the tensor {name}, which {INDEX} says is in it; it is not")
    return tensors


def narrow(stored: Stored, first: int, last: int, size: int) -> Stored:
    """Return numbers `first` to `last` of a tensor whose first axis, or the beginning of that axis, has this size."""
    if (first, last) == (0, size):
        return stored
    shape = (math.prod(stored.shape) // size * (last - first),)
    return replace(stored, shape=shape, start=stored.start + stored.nbytes // size * first)


def require_shapes(folder: Path, tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a UserError unless the tensors of a folder are exactly the model's, by name and shape."""
    for name, shape in shapes.items():
        if name not in tensors:
            missing = len(shapes.keys() - tensors.keys()) - 1
            raise UserError(f"{folder}: tensor {name} is missing" + (f", and {missing} more" if missing else ""))
        if tensors[name].shape != shape:
            got = list(tensors[name].shape)
            raise UserError(f"{tensors[name].file}: tensor {name}: wanted the shape {list(shape)}, got {got}")
    if unexpected := sorted(tensors.keys() - shapes.keys()):
        name = unexpected[0]
        raise UserError(f"{tensors[name].file}: tensor {name} is not part of the model in config.json")
    require_scales(tensors)


def require_scales(tensors: Mapping[str, Stored]) -> None:
    """Raise a UserError if a tensor is in fewer than 16 bits and was not joined with its scales (`packed.join`)."""
    for name, each in tensors.items():
        if each.dtype in PARTS_OF_PACKED.values():
            raise UserError(f"{each.file}: tensor {name}: wanted scales beside its numbers of {each.dtype}, got none")


def _weight_map(folder: Path) -> dict[str, str]:
    """Read the file of each tensor from the index; empty for a single file, which has no index."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return {}
        if shards := sorted(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: wanted {INDEX} beside {shards[0].name}, there is none")
        if pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
            raise UserError(
                f"{folder / pickles[0]}: wanted safetensors; this is a pickle, which can run code when loaded, "
                "and gspax does not read pickles"
            )
        raise UserError(f"{folder}: wanted {SINGLE} or {INDEX}, there is neither")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: wanted an object with tensors in weight_map, got {show(weight_map)}")
    files = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{index}: wanted the name of a safetensors file beside it for tensor {name}, got {file!r}")
        files[name] = file
    return files


def read_header(file: Path) -> dict[str, Stored]:
    """Read the tensors of one file by name. UserError unless the header describes the whole file."""
    storage = open_storage(file)
    size, length = storage.size(file), int.from_bytes(_read_part(file, 0, 8), "little")
    most = LONGEST_HEADER if size is None else min(size - 8, LONGEST_HEADER)
    header = _read_part(file, 8, length) if 0 < length <= most else b""
    if not header:
        bytes_ = "" if size is None else f"{size} bytes, "
        raise UserError(f"{file}: no safetensors file, or a truncated one ({bytes_}header of {length})")
    try:
        entries = parse_json(header)
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        raise UserError(f"{file}: corrupt: its header is no JSON object")
    entries.pop("__metadata__", None)
    end = 8 + length
    tensors = {name: _entry(file, name, entry, end) for name, entry in entries.items()}
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != end:
            raise UserError(f"{file}: corrupt: tensor {name} begins at byte {stored.start}, wanted {end}")
        end += stored.nbytes
    if not storage.ends_at(file, end):
        has = "more or fewer" if size is None else size
        raise UserError(f"{file}: truncated or corrupt: its header wants {end} bytes, it has {has}")
    return tensors


def _read_part(file: Path, start: int, length: int) -> bytes:
    """Read bytes of a file; none if it is too short."""
    part = bytearray(length)
    return bytes(part) if open_storage(file).read_into(file, [(start, length)], memoryview(part)) else b""


def _entry(file: Path, name: str, entry: Any, first: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        ours = len(shape) <= MOST_AXES and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    except (KeyError, TypeError, ValueError):
        ours = False
    if not ours:
        raise UserError(f"{file}: corrupt: the header's entry of tensor {name} has no dtype, shape and byte range")
    kind = (DTYPES | PARTS_OF_PACKED).get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise UserError(f"{file}: tensor {name}: wanted one of {', '.join(DTYPES)}, got {str(dtype)[:SHOWN]}")
    stored = Stored(name, file, kind, shape, first + begin)
    if end - begin != stored.nbytes:
        raise UserError(
            f"{file}: corrupt: tensor {name}, {dtype}{list(shape)}, has {end - begin} bytes, wanted {stored.nbytes}"
        )
    return stored


def read(stored: Stored) -> np.ndarray:
    """Read one tensor. UserError as for `read_part`."""
    return read_part(stored, WHOLE).reshape(stored.shape)


def read_part(stored: Stored, part: Part, buffer: np.ndarray = NO_BUFFER) -> np.ndarray:
    """Read the numbers of a part of a tensor, [outer, length, inner], flattened.

    Args:
      stored: the tensor's location.
      part: the part to read.
      buffer: bytes to read into, if large enough: allocating memory costs more than reading.

    Raises:
      UserError: the file is too short, or the part contains NaN or infinity.
    """
    if stored.packed is not None:
        first = stored.start // stored.dtype.itemsize
        return _require_finite(stored, _read_packed(stored, stored.packed, first, part))
    if part.outer > 1 and _stretch(stored, part) < SHORT:
        return _take(read(stored), part)
    pieces = _pieces(stored, part)
    nbytes = sum(length for _, length in pieces)
    if buffer.size < nbytes:
        buffer = np.empty(nbytes, np.uint8)
    flat = buffer[:nbytes]
    if not open_storage(stored.file).read_into(stored.file, pieces, flat.data):
        raise UserError(f"{stored.file}: became shorter while being read")
    return _require_finite(stored, flat.view(stored.dtype))


def _require_finite(stored: Stored, numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of a tensor. UserError if one is NaN or infinite."""
    if stored.dtype == BYTES:
        return numbers
    bits = numbers.reshape(-1).view(f"u{stored.dtype.itemsize}")
    exponent = np.array(np.inf, stored.dtype).view(bits.dtype)  # NaN and infinity have an exponent of ones
    for first in range(0, bits.size, STRIP):
        if (bits[first : first + STRIP] & exponent == exponent).any():
            raise UserError(f"{stored.file}: tensor {stored.name}: wanted finite numbers, got NaN or infinity")
    return numbers


def _read_packed(stored: Stored, packed: Packed, first: int, part: Part) -> np.ndarray:
    """Decode a tensor whose numbers begin with number `first`, or a part of it; of a range no more than that."""
    size = math.prod(stored.shape)
    if part.outer > 1:
        return _take(packed.numbers(first, first + size), part)
    inner = size // part.total
    return packed.numbers(first + part.start * inner, first + (part.start + part.length) * inner)


def _take(numbers: np.ndarray, part: Part) -> np.ndarray:
    """Return the numbers of a part of a tensor, flattened."""
    taken = numbers.reshape(part.outer, part.total, -1)[:, part.start : part.start + part.length]
    return np.ascontiguousarray(taken).reshape(-1)


def _stretch(stored: Stored, part: Part) -> int:
    """Return the number of contiguous bytes in each range of a part."""
    return stored.nbytes // part.outer // part.total * part.length


def _pieces(stored: Stored, part: Part) -> list[tuple[int, int]]:
    """Return the file offset and the length, in bytes, of each contiguous range of a part."""
    step = stored.nbytes // part.outer  # of the outer axis
    unit = step // part.total
    return [(stored.start + number * step + part.start * unit, part.length * unit) for number in range(part.outer)]


def lay_out(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    shard_size: int,
    own: Mapping[str, np.dtype] = NO_OTHERS,
) -> dict[str, Stored]:
    """Create the files of a checkpoint with headers, index and space for every tensor, in the order of `shapes`.

    The files are those of `divide`. `own` overrides `dtype` for the tensors that it names.
    """
    files = divide(shapes, dtype, shard_size, own)
    write_index(folder, files, dtype, own)
    tensors: dict[str, Stored] = {}
    for file, shard in files.items():
        tensors |= create(folder / file, shard, dtype, own)
    return tensors


def divide(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, shard_size: int, own: Mapping[str, np.dtype]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Divide tensors into files: return the shapes of each file's tensors by the file's name.

    A file has at most `shard_size` bytes of tensors, unless it contains a single larger tensor.
    """
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * own.get(name, dtype).itemsize
        if shards[-1] and used + nbytes > shard_size:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write_index(
    folder: Path,
    files: Mapping[str, Mapping[str, tuple[int, ...]]],
    dtype: np.dtype,
    own: Mapping[str, np.dtype],
) -> None:
    """Write the index of a checkpoint of several files; do nothing for a single file."""
    if len(files) > 1:
        shapes = {name: shape for shard in files.values() for name, shape in shard.items()}
        total = sum(math.prod(shape) * own.get(name, dtype).itemsize for name, shape in shapes.items())
        names = {name: file for file, shard in files.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def create(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, own: Mapping[str, np.dtype] = NO_OTHERS
) -> dict[str, Stored]:
    """Create a file with its header and space for every tensor, in the order of `shapes`; dtypes as in `lay_out`."""
    kinds = {supported: kind for kind, supported in DTYPES.items()}
    tensors, end = {}, 0
    for name, shape in shapes.items():
        tensors[name] = Stored(name, file, own.get(name, dtype), shape, end)
        end += tensors[name].nbytes
    entries = {
        name: {
            "dtype": kinds[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [each.start, each.start + each.nbytes],
        }
        for name, each in tensors.items()
    }
    header = {"__metadata__": {"format": "pt"}, **entries}  # the metadata is required by transformers
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    first = 8 + len(text)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(first + end)
    return {name: replace(each, start=first + each.start) for name, each in tensors.items()}


def write(stored: Stored, tensor: np.ndarray, part: Part = WHOLE) -> None:
    """Write a contiguous tensor of the stored dtype to its location, or a part of a tensor to the part's location."""
    assert tensor.dtype == stored.dtype
    if part.outer > 1 and _stretch(stored, part) < SHORT:
        shape = part.outer, part.total, math.prod(stored.shape) // part.outer // part.total
        mapped = np.memmap(stored.file, stored.dtype, "r+", stored.start, shape)
        mapped[:, part.start : part.start + part.length] = tensor.reshape(part.outer, part.length, -1)
        return
    flat, written = tensor.reshape(-1).view(np.uint8), 0
    with stored.file.open("r+b") as opened:
        for start, length in _pieces(stored, part):
            opened.seek(start)
            opened.write(flat[written : written + length].data)
            written += length
    assert written == flat.size
