"""Reading a published checkpoint into sharded parameters: each host reads each tensor once, and keeps its shards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspax.config import ModelConfig
from gspax.errors import UserError
from gspax.hf import names, tensors
from gspax.hf.names import Chunk
from gspax.hf.tensors import Stored
from gspax.parallel import multihost
from gspax.types import Params

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUFFER = 2**24  # bytes; larger tensors get memory of their own
Box = tuple[tuple[int, int], ...]  # start and stop of each axis


def read_params(folder: Path, config: ModelConfig, wanted: Params) -> Params:
    """The parameters of a checkpoint folder.

    A host holds its devices' shards of one parameter, and one tensor per core; on CPU the arrays share the shards'
    memory. All headers are validated before the first tensor is read.

    Args:
      folder: with `model.safetensors`, or several files and their index; experts in either layout.
      config: as in its `config.json`.
      wanted: `ShapeDtypeStruct`s with shardings; the tensors are cast to their dtypes.

    Raises:
      UserError: files or tensors are missing, unexpected, corrupt, not finite or of another shape; the message names
        them.
    """
    stored = tensors.find(folder)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    fused = any(name.endswith(names.FUSED_NAME) for name in stored)
    table = names.list_chunks(config, {name: leaf.shape for name, leaf in leaves.items()}, fused=fused)
    _validate(folder, config, stored, table)
    thread = threading.local()

    def read(name: str) -> np.ndarray:
        tensor = tensors.read(stored[name], thread.buffer)
        tensors.require_finite(name, stored[name], tensor)
        return tensor

    def prepare() -> None:
        thread.buffer = np.empty(BUFFER, np.uint8)

    with ThreadPoolExecutor(os.cpu_count(), initializer=prepare) as pool:
        arrays = [_read_parameter(table[name], read, leaf, pool) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def path_name(path: Sequence[Any]) -> str:
    """A path in the parameter tree as `runs/0/attention/query`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _validate(
    folder: Path, config: ModelConfig, stored: Mapping[str, Stored], table: Mapping[str, Sequence[Chunk]]
) -> None:
    """UserError unless the tensors are those of the model. A tied model may have a copy of its embedding as head."""
    expected = {chunk.published: chunk.shape for each in table.values() for chunk in each}
    copied_head = config.tie_word_embeddings and HEAD in stored
    if copied_head:
        expected[HEAD] = expected[EMBEDDING]
    for name, shape in expected.items():
        if name not in stored:
            missing = sum(each not in stored for each in expected) - 1
            raise UserError(f"{folder}: tensor {name} is missing" + (f", and {missing} more" if missing else ""))
        if stored[name].shape != shape:
            got = list(stored[name].shape)
            raise UserError(f"{stored[name].file}: tensor {name}: wanted the shape {list(shape)}, got {got}")
    for name, each in stored.items():
        if name not in expected and not names.BUFFER.fullmatch(name):
            raise UserError(f"{each.file}: tensor {name} is not part of the model in config.json")
    if copied_head:
        head, embedding = (tensors.read(stored[name]).view(np.uint8) for name in (HEAD, EMBEDDING))
        if not np.array_equal(head, embedding):  # a different head would be lost
            raise UserError(
                f"{stored[HEAD].file}: tensor {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings"
            )


def _read_parameter(
    chunks: Sequence[Chunk],
    read: Callable[[str], np.ndarray],
    leaf: jax.ShapeDtypeStruct,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """One array on its devices."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    if not indices:
        return multihost.remote_array(leaf)
    shards = {box: empty_aligned(box, leaf.dtype) for box in {_box(index, leaf.shape) for index in indices}}
    list(pool.map(lambda chunk: _copy_chunk(chunk, read, shards, leaf.shape), chunks))
    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: shards[_box(index, leaf.shape)])
    return array.block_until_ready()  # free this parameter's shards before reading the next


def _copy_chunk(
    chunk: Chunk, read: Callable[[str], np.ndarray], shards: Mapping[Box, np.ndarray], shape: tuple[int, ...]
) -> None:
    """Read a chunk's tensor and copy it into the shards that overlap it; without any, do not read it."""
    depth = len(chunk.index)
    holders = {
        box: shard
        for box, shard in shards.items()
        if all(first <= i < last for i, (first, last) in zip(chunk.index, box, strict=False))
    }
    if holders:
        view = names.to_ours(chunk.row, read(chunk.published), shape[depth:])
    for box, shard in holders.items():
        index = tuple(i - first for i, (first, _) in zip(chunk.index, box, strict=False))
        names.copy(shard[index], view[tuple(slice(*each) for each in box[depth:])])


def _box(index: Any, shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def empty_aligned(box: Box, dtype: Any) -> np.ndarray:
    """An uninitialised array aligned to 64 bytes, whose memory jax shares on CPU instead of copying it."""
    shape = [last - first for first, last in box]
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    return buffer[(first := -buffer.ctypes.data % 64) : first + size].view(dtype).reshape(shape)
