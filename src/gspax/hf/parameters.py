"""Reads the parameters of a published checkpoint onto the devices of a mesh, and writes them in the Hub's layout.

Each host reads each tensor once, and keeps its shards. transformers, vLLM and SGLang load the written files.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from gspax.config import ModelConfig
from gspax.errors import UserError
from gspax.hf import config_json, names, packed, tensors
from gspax.hf.names import Chunk
from gspax.hf.tensors import Part, Stored
from gspax.model import transformer
from gspax.parallel import multihost
from gspax.types import Params, named_leaves

HEAD = "lm_head.weight"
PIECE = 2**22  # numbers read into a buffer at a time: touching new memory costs more than reading
SHARD_SIZE = 5_000_000_000  # bytes of tensors in a file, as in transformers up to version 4
Box = tuple[tuple[int, int], ...]  # start and stop of each axis


Rows = tuple[int, int, int]  # first and last index on a tensor's first axis (or the start of it), and its size
Table = Mapping[str, Sequence[Chunk]]  # the chunks of each parameter by its path
NOTHING: Mapping[str, Any] = MappingProxyType({})
Read = Callable[[str, Rows, Part], np.ndarray]  # reads these rows of the named tensor, or of a part of it


class Readable(Protocol):
    """An array, or an object that reads part of an array when it is indexed."""

    def __getitem__(self, index: tuple[int, ...], /) -> np.ndarray: ...


def named_shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the leaves of a parameter tree by path."""
    return {name: leaf.shape for name, leaf in named_leaves(tree).items()}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model by path."""
    return named_shapes(transformer.abstract_params(config))


# Reading


def read_params(folder: Path, config: ModelConfig, wanted: Params) -> Params:
    """Read the parameters of a checkpoint folder.

    A host keeps its devices' shards of one parameter, and a piece of a tensor per core, in memory; on CPU the arrays
    share the shards' memory. All headers are validated before the first tensor is read.

    Args:
      folder: contains `model.safetensors`, or several files and their index; experts in either layout.
      config: the model in the folder's `config.json`.
      wanted: `ShapeDtypeStruct`s with shardings; the tensors are cast to these dtypes.

    Raises:
      UserError: tensors or files are missing, unexpected, corrupt, not finite or of another shape; the message names
        them.
    """
    found = tensors.find(folder)
    stored = {name: tensor for name, tensor in found.items() if not names.is_unread(name, config)}
    if carried := sum(names.is_carried(name, config) for name in found):
        multihost.warn_from_primary(
            f"{folder}: {carried} tensors of a vision tower or of layers that predict several tokens ahead (MTP) are "
            "not read; they are not trained, and `gspax export` copies them"
        )
    leaves = named_leaves(wanted)
    fused, stored = names.is_fused(config, stored), packed.join(stored)
    for title in sorted({each.packed.title for each in stored.values() if each.packed is not None}):
        multihost.warn_from_primary(f"{folder}: {title} are read as bfloat16, and an export has them as such")
    shapes = named_shapes(wanted)
    table = names.list_chunks(config, shapes, fused=fused)
    _validate(folder, config, stored, names.tensor_shapes(table, shapes))
    thread = threading.local()

    def read(name: str, rows: Rows, part: Part) -> np.ndarray:
        return tensors.read_part(tensors.narrow(stored[name], *rows), part, thread.buffer)

    def prepare() -> None:
        thread.buffer = np.empty(4 * PIECE, np.uint8)

    with ThreadPoolExecutor(os.cpu_count(), initializer=prepare) as pool:
        arrays = [_read_parameter(table[name], read, leaf, pool) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def _validate(
    folder: Path, config: ModelConfig, stored: Mapping[str, Stored], expected: dict[str, tuple[int, ...]]
) -> None:
    """Raise a UserError unless the tensors are the model's. A tied model may have a copy of its embedding as head."""
    copied_head = config.tie_word_embeddings and HEAD in stored
    table = names.embedding_name(config)
    if copied_head:
        expected[HEAD] = expected[table]
    tensors.require_shapes(folder, stored, expected)
    if copied_head:
        head, embedding = (tensors.read(stored[name]).view(np.uint8) for name in (HEAD, table))
        if not np.array_equal(head, embedding):  # a different head would be lost
            raise UserError(
                f"{stored[HEAD].file}: tensor {HEAD} differs from {table}, but config.json has tie_word_embeddings"
            )


def _read_parameter(
    chunks: Sequence[Chunk], read: Read, leaf: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor
) -> jax.Array:
    """Read one parameter onto its devices."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    if not indices:
        return multihost.remote_array(leaf)
    shards = {box: empty_aligned(box, leaf.dtype) for box in {_box(index or (), leaf.shape) for index in indices}}
    list(pool.map(lambda chunk: _copy_chunk(chunk, read, shards, leaf.shape), chunks))
    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: shards[_box(index or (), leaf.shape)])
    return array.block_until_ready()  # free this parameter's shards before reading the next


def _copy_chunk(chunk: Chunk, read: Read, shards: Mapping[Box, np.ndarray], shape: tuple[int, ...]) -> None:
    """Copy a chunk's part of its tensor into the shards that overlap it, in pieces along its first axis.

    Pieces that no shard overlaps are not read.
    """
    depth = len(chunk.index)
    whole, axis = shape[depth:], names.leading_axis(chunk.row)
    holders = {  # the part of each shard by its bounds in the chunk
        box[depth:]: shard[tuple(i - first for i, (first, _) in zip(chunk.index, box, strict=False))]
        for box, shard in shards.items()
        if all(first <= i < last for i, (first, last) in zip(chunk.index, box, strict=False))
    }
    for first, last in _pieces(chunk, whole, axis):
        overlapping = [bounds for bounds in holders if bounds[axis][0] < last and first < bounds[axis][1]]
        if not overlapping:
            continue
        numbers = read(chunk.published, (first, last, whole[axis]), chunk.part.of_rows(last - first, whole[axis]))
        view = names.to_ours(chunk.row, numbers, (*whole[:axis], last - first, *whole[axis + 1 :]))
        for bounds in overlapping:
            start, stop = bounds[axis]
            low, high = max(first, start), min(last, stop)
            inside = [slice(*each) for each in bounds]
            inside[axis] = slice(low - first, high - first)
            target = holders[bounds][(slice(None),) * axis + (slice(low - start, high - start),)]
            names.copy(target, view[tuple(inside)])


def _pieces(chunk: Chunk, shape: tuple[int, ...], axis: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each piece of a chunk on its tensor's leading axis; a range of that axis is one piece."""
    size, part = shape[axis], chunk.part
    is_range = part.length < part.total and part.outer % size
    rows = size if is_range else max(1, PIECE * size // max(1, math.prod(shape)))
    return [(first, min(first + rows, size)) for first in range(0, size, rows)]


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def empty_aligned(box: Box, dtype: DTypeLike) -> np.ndarray:
    """Allocate an uninitialized array aligned to 64 bytes, whose memory jax shares on CPU instead of copying it."""
    shape = [last - first for first, last in box]
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    return buffer[(first := -buffer.ctypes.data % 64) : first + size].view(dtype).reshape(shape)


# Writing


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    parameter: Callable[[str], Readable],
    *,
    dtype: str = "bfloat16",
    shard_size: int = SHARD_SIZE,
    more: Mapping[str, object] = NOTHING,
    origin: Mapping[str, Stored] = NOTHING,
) -> None:
    """Write config.json and safetensors in the Hub's order and layout; tied models have no `lm_head.weight`.

    Args:
      folder: an existing, empty folder.
      parameter: returns a parameter by its path, such as `runs/0/attention/query`. Called once for each; its result
        is indexed once for each layer in order, so that neither all parameters nor all layers of one need to be in
        memory together.
      dtype: the dtype of the tensors, `bfloat16` or `float32`.
      shard_size: the maximum size of a file, in bytes of tensors.
      more: additional keys of config.json, such as `eos_token_id`.
      origin: the tensors of the checkpoint that the model was trained from. Its layout of experts is kept, float32
        tensors among tensors of another dtype stay float32, and unread tensors (`names.is_carried`) are copied.
    """
    write_config(folder, config, dtype, more)
    origin = packed.join(origin)
    carried = {name: each for name, each in origin.items() if names.is_carried(name, config)}
    tensors.require_scales(carried)
    numbers = [name for name, each in origin.items() if name not in carried and each.packed is None]
    table, shapes, own = published_tensors(config, fused=names.is_fused(config, numbers))  # 4 bits are not written
    shapes |= {name: each.shape for name, each in carried.items()}
    own |= {name: each.dtype for name, each in carried.items()} | _kept_float32(config, origin)
    stored = tensors.lay_out(folder, shapes, np.dtype(jax.numpy.dtype(dtype)), shard_size, own)
    for name, each in carried.items():
        tensors.write(stored[name], tensors.read(each))
    dtypes = {name: place.dtype for name, place in stored.items()}
    publish(table, parameter, dtypes, lambda name, numbers, part: tensors.write(stored[name], numbers, part))


def write_config(folder: Path, config: ModelConfig, dtype: str, more: Mapping[str, object] = NOTHING) -> None:
    """Write config.json, for tensors of this dtype."""
    content = {**config_json.to_json(config), "torch_dtype": dtype, **more}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def published_tensors(
    config: ModelConfig, *, fused: bool = False
) -> tuple[Table, dict[str, tuple[int, ...]], dict[str, np.dtype]]:
    """Return `list_chunks` of a model, its tensors' shapes in the Hub's order, and the float32 tensors' dtypes."""
    parameters = parameter_shapes(config)
    table = names.list_chunks(config, parameters, fused=fused)
    shapes = dict(sorted(names.tensor_shapes(table, parameters).items(), key=lambda item: _model_order(item[0])))
    own = {chunk.published: np.dtype(np.float32) for chunks in table.values() for chunk in chunks if chunk.row.float32}
    return table, shapes, own


def publish(
    table: Table,
    parameter: Callable[[str], Readable],
    dtypes: Mapping[str, np.dtype],
    write: Callable[[str, np.ndarray, Part], None],
) -> None:
    """Call `write` with the name and the numbers of each published tensor, or of each part of one, in threads.

    Args:
      table: `list_chunks` of the model.
      parameter: as in `write_checkpoint`; also called for parameters without any tensor to write.
      dtypes: the dtypes of the tensors to write.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, chunks in table.items():
            array = parameter(name)
            for first, layer in itertools.groupby(chunks, key=lambda chunk: chunk.index[:1]):
                part = np.asarray(array[first])

                def convert(chunk: Chunk, part: np.ndarray = part) -> None:
                    if chunk.published in dtypes:
                        tensor = part[chunk.index[1:]].astype(dtypes[chunk.published], copy=False)
                        write(chunk.published, names.to_published(chunk.row, tensor), chunk.part)

                list(pool.map(convert, layer))


def _kept_float32(config: ModelConfig, origin: Mapping[str, Stored]) -> dict[str, np.dtype]:
    """Return the float32 tensors of a checkpoint whose embedding is not float32, such as Qwen3.5's decay rates."""
    embedding, single = origin.get(names.embedding_name(config)), np.dtype(np.float32)
    if embedding is None or embedding.dtype == single:
        return {}
    return {name: single for name, each in origin.items() if each.dtype == single}


def _model_order(tensor: str) -> tuple[int, int]:
    """Return a sort key: embedding, layers, norm and head; within a layer the order of the table."""
    parts = tensor.replace("language_model.", "").split(".")
    if parts[1] == "layers":
        return 1, int(parts[2])
    return (0 if parts[1].startswith("embed") else 2), 0
