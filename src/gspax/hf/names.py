"""Maps gspax's parameters to published tensors, for import and export: one table for both.

The rows of the tables are in `hf.rows`; `hf.families` says which family has which rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspax.config import ModelConfig, layer_places, layers_of
from gspax.hf.config_json import family_of
from gspax.hf.families import FAMILIES, WRAPPERS, Family
from gspax.hf.rows import Row, fused_rows, replaced
from gspax.hf.tensors import WHOLE, Part

STRIP, GAP = 2**17, 32  # in `copy`: elements of a strip, and padding after each of its rows


FUSED_NAME, MXFP4_NAME = "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_blocks"  # identify expert layouts
TOWERS = ("model.visual.", "model.vision_tower.", "model.embed_vision.")
LAYER_NUMBER, MTP = re.compile(r"model\.layers\.(\d+)\."), re.compile(r"mtp\.|model\.mtp_")
BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed from rope_theta


@dataclass(frozen=True)
class Chunk:
    """The part of a parameter that is stored in one published tensor, or in a part of one."""

    published: str  # the tensor's name
    index: tuple[int, ...]  # into the parameter's leading axes: layer of the stack, expert
    row: Row
    part: Part = WHOLE  # the part of the tensor


def list_chunks(
    config: ModelConfig, parameters: Mapping[str, tuple[int, ...]], *, fused: bool = False
) -> dict[str, list[Chunk]]:
    """Return the chunks of each parameter.

    Args:
      parameters: the parameters' shapes by their paths, such as `runs/0/attention/query`.
      fused: whether a layer's experts are one tensor; for gpt-oss, whether that tensor is in 4 bits (mxfp4).
    """
    family = FAMILIES[family_of(config)]
    table = {
        row.ours: [Chunk(row.published, (), row)] for row in family.tensors.outer if row.ours in parameters
    }  # tied: no head
    stacks: dict[tuple[int, ...], list[int]] = {}  # the layers of each stack
    for number, place in enumerate(layer_places(config)):
        stacks.setdefault(place.stack, []).append(number)
    for stack, layers in stacks.items():
        path, sparse = "/".join(map(str, ("runs", *stack))), layers_of(config)[layers[0]].sparse
        rows = _layer_rows(config, family) + _mlp_rows(family, sparse=sparse, fused=fused)
        shapes = {row: parameters.get(f"{path}/{row.ours}") for row in rows}
        present = {row: shape[1:] for row, shape in shapes.items() if shape is not None}  # biases are not in each model
        for row, part in _parts(present).items():
            shape = (len(layers), config.num_experts) if "{expert}" in row.published else (len(layers),)
            table[f"{path}/{row.ours}"] = [
                Chunk(f"model.layers.{layers[index[0]]}.{row.published}".format(expert=index[-1]), index, row, part)
                for index in np.ndindex(shape)
            ]
    return {
        name: [replace(chunk, published=published_name(chunk.published, config)) for chunk in chunks]
        for name, chunks in table.items()
    }


def _parts(shapes: Mapping[Row, Sequence[int]]) -> dict[Row, Part]:
    """Return each row's part of its tensor, given the shapes of a layer's parameters in the table's order."""
    ends: dict[str, int] = {}
    places: dict[Row, tuple[int, int, int]] = {}
    for row, shape in shapes.items():
        if "+" in row.axes:
            outer, length = _joined(row, shape)
            start = ends.get(row.published, 0)
            places[row] = outer, start, length
            ends[row.published] = start + length
    return {row: Part(*places[row], ends[row.published]) if row in places else WHOLE for row in shapes}


def _layer_rows(config: ModelConfig, family: Family) -> tuple[Row, ...]:
    """Return the rows of a layer without its MLP, for any mixer."""
    if config.latent is None or config.latent.query_rank:
        return family.tensors.layer
    return replaced(family.tensors.layer, Row("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H"))


def _mlp_rows(family: Family, *, sparse: bool, fused: bool) -> tuple[Row, ...]:
    """Return the rows of a layer's MLP."""
    if not sparse:
        return family.tensors.dense
    return fused_rows(family.tensors.sparse, mxfp4=family.quant_method == "mxfp4") if fused else family.tensors.sparse


def is_fused(config: ModelConfig, tensors: Iterable[str]) -> bool:
    """Return whether these tensors have the fused layout of experts (`list_chunks`)."""
    name = MXFP4_NAME if FAMILIES[family_of(config)].quant_method else FUSED_NAME
    return any(tensor.endswith(name) for tensor in tensors)


def published_name(tensor: str, config: ModelConfig) -> str:
    """Return the name of a text model's tensor in its checkpoint, which may also contain a vision tower."""
    stem = "model.language_model." if config.model_type in WRAPPERS else FAMILIES[family_of(config)].tensors.stem
    return re.sub(r"^model\.", stem, tensor)


def embedding_name(config: ModelConfig) -> str:
    """Return the name of the embedding's tensor."""
    (row,) = (row for row in FAMILIES[family_of(config)].tensors.outer if row.ours == "embedding")
    return published_name(row.published, config)


def carries(config: ModelConfig) -> bool:
    """Return whether checkpoints of the model's family may have tensors for which `is_carried` holds."""
    return FAMILIES[family_of(config)].ahead


def is_carried(tensor: str, config: ModelConfig) -> bool:
    """Return whether a published tensor is not read, but copied unchanged to an export.

    Such a tensor belongs to a vision tower, or to layers that predict several tokens ahead (MTP): layers after the last
    one, or tensors with such a name.
    """
    layer = LAYER_NUMBER.match(tensor)
    after_last = layer is not None and int(layer[1]) >= config.num_hidden_layers
    of_tower = config.model_type in WRAPPERS and tensor.startswith(TOWERS)
    return of_tower or ((after_last or MTP.match(tensor) is not None) and carries(config))


def is_unread(tensor: str, config: ModelConfig) -> bool:
    """Return whether a published tensor is not a parameter: computed from the configuration, or carried."""
    return BUFFER.fullmatch(tensor) is not None or is_carried(tensor, config)


def tensor_shapes(
    table: Mapping[str, Sequence[Chunk]], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each published tensor by its name.

    Args:
      table: `list_chunks` of the parameters.
      parameters: the shape of each parameter by its path.
    """
    return {
        chunk.published: published_shape(chunk.row, parameters[name][len(chunk.index) :], chunk.part)
        for name, chunks in table.items()
        for chunk in chunks
    }


def published_shape(row: Row, shape: Sequence[int], part: Part = WHOLE) -> tuple[int, ...]:
    """Return the shape of the published tensor that contains a chunk of shape `shape`, alone or as a part."""
    groups, ours, joined = _axes(row)
    sizes = {"1": 1} | dict(zip(ours, shape, strict=True))
    lengths = [math.prod(sizes[letter] for letter in group) for group in groups]
    if part.length < part.total:
        (axis,) = (axis for axis, group in enumerate(groups) if joined in group)
        lengths[axis] = lengths[axis] // part.length * part.total
    return tuple(lengths)


def to_ours(row: Row, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return a view of a published tensor, or of the row's part of it, with gspax's axes and shape `shape`."""
    groups, ours, _ = _axes(row)
    letters = "".join(groups).replace("1", "")  # an axis of length one
    sizes = dict(zip(ours, shape, strict=True))
    return tensor.reshape([sizes[letter] for letter in letters]).transpose([letters.index(letter) for letter in ours])


def to_published(row: Row, array: np.ndarray) -> np.ndarray:
    """Invert `to_ours`: return a chunk as a contiguous published tensor, or as the row's part of it."""
    groups, ours, _ = _axes(row)
    ordered = array.transpose([ours.index(letter) for letter in "".join(groups).replace("1", "")])
    tensor = np.empty(ordered.shape, array.dtype)
    copy(tensor, ordered)
    return tensor.reshape(published_shape(row, array.shape))


def leading_axis(row: Row) -> int:
    """Return gspax's axis that is, or begins, the first axis of the published tensor."""
    groups, ours, _ = _axes(row)
    return ours.index("".join(groups).replace("1", "")[0])


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy `source` into `target`; `source` may be a transposed view and have another dtype.

    The source is copied in strips in its memory order, with a gap after each row: rows whose lengths are powers of two
    would otherwise evict each other from the cache. That makes it five times as fast.
    """
    if source.dtype == target.dtype:  # numpy copies its own dtypes faster
        source, target = (x.view(f"u{source.dtype.itemsize}") for x in (source, target))
    order = sorted(range(source.ndim), key=lambda axis: -source.strides[axis])
    if order == list(range(source.ndim)):
        target[...] = source
        return
    ordered, target = source.transpose(order), target.transpose(order)
    rows, row = ordered.shape[:-1], ordered.shape[-1]
    height = max(1, STRIP // math.prod(ordered.shape[1:]))
    gapped = np.empty((height, *rows[1:], row + GAP), source.dtype)[..., :row]
    for first in range(0, rows[0], height):
        strip = gapped[: len(ordered[first : first + height])]
        strip[...] = ordered[first : first + height]
        transposed = np.ascontiguousarray(strip.transpose(np.argsort(order)))  # casting in this step would be slow
        target[first : first + height] = transposed.transpose(order)


def _axes(row: Row) -> tuple[list[str], str, str]:
    """Parse `"(N H)+ D -> D N H"` to (["NH", "D"], "DNH", "NH"); the last is the axes before a plus, or empty."""
    published, ours = row.axes.replace(" ", "").split("->")
    joined = re.search(r"(\w)\+|\((\w+)\)\+", published)
    groups: list[str] = []
    depth = 0
    for character in published:
        depth += (character == "(") - (character == ")")
        if character == "(" and depth == 1:
            groups.append("")
        elif character.isalnum():
            groups[-1:] = [groups[-1] + character] if depth else [*groups[-1:], character]
    return groups, ours, (joined[1] or joined[2]) if joined else ""


def _joined(row: Row, shape: Sequence[int]) -> tuple[int, int]:
    """Return the product of the sizes of the axes before those with a plus, and the product of the latter's sizes."""
    groups, ours, joined = _axes(row)
    sizes, letters = {"1": 1} | dict(zip(ours, shape, strict=True)), "".join(groups)
    before = letters[: letters.index(joined)]
    return math.prod(sizes[letter] for letter in before), math.prod(sizes[letter] for letter in joined)
