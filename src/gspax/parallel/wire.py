"""Encodes values between processes as bytes: plain types and numeric arrays. Reading them runs no code.

A message is the length of a JSON text (4 bytes), the text, and the bytes of the arrays. The text holds the value as
`value`, with {"dict": pairs}, {"tuple": items} and {"array": number} for what JSON lacks, and under `arrays` the dtype
and shape of each array; a scalar of numpy is an array without axes. Floats keep their bits.
"""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np

MAX_DEPTH = 64  # of nested containers
DTYPES = {  # the only ones that are read: none of them holds a Python object
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", ml_dtypes.bfloat16),
    )
}
LENGTH = 4  # bytes


class MessageError(Exception):
    """Raised if a message does not fit the schema, is too long, or was not sent by its claimed sender."""


def encode(value: object) -> bytes:
    """Encode a value as bytes. TypeError unless it has only None, bool, int, float, str, list, tuple, dict, arrays."""
    arrays: list[np.ndarray] = []
    described = _describe(value, arrays)
    header = {"value": described, "arrays": [[array.dtype.name, array.shape] for array in arrays]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(LENGTH, "big"), text, *(array.tobytes() for array in arrays)])


def _describe(value: object, arrays: list[np.ndarray]) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_describe(item, arrays) for item in value]
    if type(value) is tuple:
        return {"tuple": [_describe(item, arrays) for item in value]}
    if type(value) is dict:
        return {"dict": [[_describe(item, arrays) for item in pair] for pair in value.items()]}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.name not in DTYPES or not array.dtype.isnative:
            raise TypeError(f"an array of dtype {array.dtype} cannot be sent to another process")
        arrays.append(array)
        return {"array": len(arrays) - 1}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process: {value!r:.200}")


def decode(data: bytes | memoryview) -> Any:
    """Decode a value. MessageError if the bytes do not fit the schema."""
    data = memoryview(data)
    size = int.from_bytes(data[:LENGTH], "big")
    if len(data) < LENGTH + size:
        raise MessageError(f"wanted {LENGTH + size} bytes, got {len(data)}")
    try:
        header = json.loads(bytes(data[LENGTH : LENGTH + size]))
        described, entries = header["value"], header["arrays"]
        arrays = _read_arrays(entries, data[LENGTH + size :])
        return _rebuild(described, arrays, 0)
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise MessageError(f"not a message of gspax ({type(error).__name__})") from error


def _read_arrays(entries: list[tuple[str, list[int]]], data: memoryview) -> list[np.ndarray]:
    arrays, first = [], 0
    for name, shape in entries:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise MessageError(f"wanted the shape of an array, got {shape!r:.100}")
        dtype = DTYPES[name]
        last = first + math.prod(shape) * dtype.itemsize
        if last > len(data):
            raise MessageError(f"wanted {last} bytes of arrays, got {len(data)}")
        arrays.append(np.frombuffer(data[first:last], dtype).reshape(shape).copy())
        first = last
    if first != len(data):
        raise MessageError(f"wanted {first} bytes of arrays, got {len(data)}")
    return arrays


def _rebuild(described: object, arrays: list[np.ndarray], depth: int) -> object:
    if not isinstance(described, (list, dict)):
        return described
    if depth == MAX_DEPTH:
        raise MessageError(f"wanted at most {MAX_DEPTH} nested containers")
    if isinstance(described, list):
        return [_rebuild(item, arrays, depth + 1) for item in described]
    ((kind, content),) = described.items()
    if kind == "array" and type(content) is int and content >= 0:
        array = arrays[content]
        return array if array.shape else array[()]
    if kind == "tuple":
        return tuple(_rebuild(item, arrays, depth + 1) for item in content)
    if kind == "dict":
        return {_rebuild(key, arrays, depth + 1): _rebuild(item, arrays, depth + 1) for key, item in content}
    raise MessageError(f"wanted a tuple, a dict or an array, got {kind!r:.100}")
