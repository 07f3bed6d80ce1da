"""One table between gspax's parameters and the tensors of a published checkpoint, for import and export.

A row names a parameter, the tensor that it is made of, and how their axes correspond. Axes are named as in
docs/architecture.md; axes in brackets form one axis of the published tensor. There is one tensor per layer and, where
the name has `{expert}`, per expert; gspax stacks them along leading axes. So

    Row("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H")

is a published matrix [N·H, D] for every layer, which gspax holds as [layers, D, N, H].
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspax.config import ModelConfig, layer_runs
from gspax.hf.config_json import family_of

STRIP, GAP = 2**17, 32  # elements of a strip and after each of its rows, in `copy`


@dataclass(frozen=True)
class Row:
    """A parameter of gspax, the published tensor that it is made of, and the axes of both."""

    ours: str
    published: str
    axes: str  # "published -> ours"
    half: int | None = None  # 0, 1: only the first or second half of the published tensor's axis 1


def _mlp(
    ours: str, published: str, projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Row, ...]:
    """The gate, up and down projections of a feed-forward network."""
    axes = {"gate": "F D -> D F", "up": "F D -> D F", "down": "D F -> F D"}
    return tuple(
        Row(f"{ours}/{name}", f"{published}.{projection}.weight", axes[name])
        for name, projection in zip(axes, projections, strict=True)
    )


OUTER = (
    Row("embedding", "model.embed_tokens.weight", "V D -> V D"),
    Row("norm/scale", "model.norm.weight", "D -> D"),
    Row("head", "lm_head.weight", "V D -> D V"),
)
LAYER = (
    Row("attention_norm/scale", "input_layernorm.weight", "D -> D"),
    Row("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H"),
    Row("attention/key", "self_attn.k_proj.weight", "(K H) D -> D K H"),
    Row("attention/value", "self_attn.v_proj.weight", "(K H) D -> D K H"),
    Row("attention/out", "self_attn.o_proj.weight", "D (N H) -> N H D"),
    Row("attention/query_bias", "self_attn.q_proj.bias", "(N H) -> N H"),
    Row("attention/key_bias", "self_attn.k_proj.bias", "(K H) -> K H"),
    Row("attention/value_bias", "self_attn.v_proj.bias", "(K H) -> K H"),
    Row("attention/out_bias", "self_attn.o_proj.bias", "D -> D"),
    Row("attention/query_norm/scale", "self_attn.q_norm.weight", "H -> H"),
    Row("attention/key_norm/scale", "self_attn.k_norm.weight", "H -> H"),
    Row("mlp_norm/scale", "post_attention_layernorm.weight", "D -> D"),
)
DENSE = _mlp("mlp", "mlp")
ROUTER = (Row("mlp/router", "mlp.gate.weight", "E D -> D E"),)
SHARED = (  # the shared expert of Qwen2-MoE
    *_mlp("mlp/shared", "mlp.shared_expert"),
    Row("mlp/shared_gate", "mlp.shared_expert_gate.weight", "O D -> D O"),
)
EXPERTS = _mlp("mlp", "mlp.experts.{expert}")  # the Hub's layout, which is also the one that is written
FUSED_EXPERTS = (  # transformers 5 with save_original_format=False
    Row("mlp/gate", "mlp.experts.gate_up_proj", "E F D -> E D F", half=0),
    Row("mlp/up", "mlp.experts.gate_up_proj", "E F D -> E D F", half=1),
    Row("mlp/down", "mlp.experts.down_proj", "E D F -> E F D"),
)
FUSED_NAME = "mlp.experts.gate_up_proj"  # distinguishes the two layouts
MIXTRAL_ROUTER = (Row("mlp/router", "block_sparse_moe.gate.weight", "E D -> D E"),)
MIXTRAL_EXPERTS = _mlp("mlp", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))
BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed from rope_theta


@dataclass(frozen=True)
class Chunk:
    """The part of a parameter that one published tensor, or half of one, holds."""

    published: str  # the tensor's name
    index: tuple[int, ...]  # into the parameter's leading axes: layer of the run, expert
    row: Row


def list_chunks(config: ModelConfig, parameters: Collection[str], *, fused: bool = False) -> dict[str, list[Chunk]]:
    """The chunks of each parameter.

    Args:
      parameters: their paths, such as `runs/0/attention/query`.
      fused: whether a layer's experts are one tensor.
    """
    table = {row.ours: [Chunk(row.published, (), row)] for row in OUTER if row.ours in parameters}  # tied: no head
    first = 0
    for run, (sparse, count) in enumerate(layer_runs(config)):
        for row in LAYER + (_expert_rows(config, fused) if sparse else DENSE):
            if (name := f"runs/{run}/{row.ours}") not in parameters:  # biases, in a model without them
                continue
            shape = (count, config.num_experts) if "{expert}" in row.published else (count,)
            table[name] = [
                Chunk(f"model.layers.{first + index[0]}.{row.published}".format(expert=index[-1]), index, row)
                for index in np.ndindex(shape)
            ]
        first += count
    return table


def _expert_rows(config: ModelConfig, fused: bool) -> tuple[Row, ...]:
    """The rows of a sparse layer. transformers 5 has the same fused names for every family."""
    if fused:
        return ROUTER + FUSED_EXPERTS + SHARED
    if family_of(config) == "mixtral":
        return MIXTRAL_ROUTER + MIXTRAL_EXPERTS
    return ROUTER + EXPERTS + SHARED


def tensor_shapes(
    table: Mapping[str, Sequence[Chunk]], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shape of each published tensor by its name.

    Args:
      table: `list_chunks` of the parameters.
      parameters: the shape of each parameter by its path.
    """
    return {
        chunk.published: published_shape(chunk.row, parameters[name][len(chunk.index) :])
        for name, chunks in table.items()
        for chunk in chunks
    }


def published_shape(row: Row, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the published tensor for a chunk of shape `shape`."""
    groups, ours = _axes(row)
    sizes = dict(zip(ours, shape, strict=True))
    lengths = [math.prod(sizes[letter] for letter in group) for group in groups]
    if row.half is not None:
        lengths[1] *= 2
    return tuple(lengths)


def to_ours(row: Row, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A view of a published tensor with our axes, of shape `shape`."""
    groups, ours = _axes(row)
    letters = "".join(groups)
    sizes = dict(zip(ours, shape, strict=True))
    if row.half is not None:
        tensor = np.split(tensor, 2, axis=1)[row.half]
    return tensor.reshape([sizes[letter] for letter in letters]).transpose([letters.index(letter) for letter in ours])


def to_published(row: Row, array: np.ndarray) -> np.ndarray:
    """The inverse of `to_ours`: a chunk as a contiguous published tensor. Not for halves."""
    groups, ours = _axes(row)
    ordered = array.transpose([ours.index(letter) for letter in "".join(groups)])
    tensor = np.empty(ordered.shape, array.dtype)
    copy(tensor, ordered)
    return tensor.reshape(published_shape(row, array.shape))


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, where source may be a transposed view and of another dtype.

    The source is copied in strips in its memory order, with a gap after each row: rows whose lengths are powers of two
    would otherwise evict each other from the cache. That makes it five times as fast.
    """
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


def _axes(row: Row) -> tuple[list[str], str]:
    """`"(N H) D -> D N H"` as (["NH", "D"], "DNH")."""
    published, ours = row.axes.replace(" ", "").split("->")
    return [group.strip("()") for group in re.findall(r"\(\w+\)|\w", published)], ours
