"""A published checkpoint -> parameters, each made already sharded: every tensor is read once and cut up on the way."""

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
from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.hf import names, tensors
from gspax.hf.names import Piece
from gspax.hf.tensors import Stored
from gspax.types import Params

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROOM = 2**24  # bytes; larger tensors than this get memory of their own
Box = tuple[tuple[int, int], ...]  # first and one past the last, of each axis


def read_params(folder: Path, config: ModelConfig, wanted: Params) -> Params:
    """The parameters of a checkpoint folder.

    A host holds the shards of one parameter that its devices own, and one tensor for each of its cores; on a CPU the
    shards are the arrays themselves. All headers are checked before the first tensor is read.

    Args:
      folder: with `model.safetensors`, or several files and their index; either layout of experts.
      config: what its `config.json` says.
      wanted: `ShapeDtypeStruct`s with shardings; numbers are cast to their dtypes.

    Raises:
      UserError: files or tensors are missing, too many, broken, or of another shape; the sentence names them.
    """
    stored = tensors.find(folder)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    fused = any(name.endswith(names.FUSED_NAME) for name in stored)
    table = names.pieces(config, {name: leaf.shape for name, leaf in leaves.items()}, fused=fused)
    _check(folder, config, stored, table)
    thread = threading.local()

    def read(name: str) -> np.ndarray:
        return tensors.read(stored[name], thread.room)

    def prepare() -> None:
        thread.room = np.empty(ROOM, np.uint8)

    with ThreadPoolExecutor(os.cpu_count(), initializer=prepare) as pool:
        arrays = [_read_parameter(table[name], read, leaf, pool) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def path_name(path: Sequence[Any]) -> str:
    """A path in the tree of parameters as `runs/0/attention/query`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _check(
    folder: Path, config: ModelConfig, stored: Mapping[str, Stored], table: Mapping[str, Sequence[Piece]]
) -> None:
    """Every tensor that the model needs, of its shape, and no other; but tied models may carry their head's copy."""
    expected = {piece.published: piece.shape for each in table.values() for piece in each}
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
        if name not in expected:
            raise UserError(f"{each.file}: tensor {name} is none that config.json asks for")
    if copied_head:
        head, embedding = (tensors.read(stored[name]).view(np.uint8) for name in (HEAD, EMBEDDING))
        if not np.array_equal(head, embedding):  # a head of its own would be lost
            raise UserError(
                f"{stored[HEAD].file}: tensor {HEAD} is not {EMBEDDING}, though config.json says tie_word_embeddings"
            )


def _read_parameter(
    pieces: Sequence[Piece],
    read: Callable[[str], np.ndarray],
    leaf: jax.ShapeDtypeStruct,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """One array on its devices."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    if not indices:
        return multihost.remote_array(leaf)
    shards = {box: _aligned(box, leaf.dtype) for box in {_box(index, leaf.shape) for index in indices}}
    list(pool.map(lambda piece: _place(piece, read, shards, leaf.shape), pieces))
    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: shards[_box(index, leaf.shape)])
    return array.block_until_ready()  # the host's shards of this parameter can go before those of the next come


def _place(
    piece: Piece, read: Callable[[str], np.ndarray], shards: Mapping[Box, np.ndarray], shape: tuple[int, ...]
) -> None:
    """Read one tensor into the shards that hold a part of it; none of them does: leave it unread."""
    depth = len(piece.index)
    holders = {
        box: shard
        for box, shard in shards.items()
        if all(first <= i < last for i, (first, last) in zip(piece.index, box, strict=False))
    }
    if holders:
        view = names.to_ours(piece.row, read(piece.published), shape[depth:])
    for box, shard in holders.items():
        index = tuple(i - first for i, (first, _) in zip(piece.index, box, strict=False))
        names.copy(shard[index], view[tuple(slice(*each) for each in box[depth:])])


def _box(index: Any, shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _aligned(box: Box, dtype: Any) -> np.ndarray:
    """Room for a shard, where jax takes it over on a CPU instead of copying it: at a multiple of 64 bytes."""
    shape = [last - first for first, last in box]
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    return room[(first := -room.ctypes.data % 64) : first + size].view(dtype).reshape(shape)
