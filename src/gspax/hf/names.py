"""One table between gspax's parameters and the tensors of a published checkpoint, for import and export.

A row names a parameter, the tensor that it is made of, and how their axes correspond. Axes are those of
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
DENSE = (
    Row("mlp/gate", "mlp.gate_proj.weight", "F D -> D F"),
    Row("mlp/up", "mlp.up_proj.weight", "F D -> D F"),
    Row("mlp/down", "mlp.down_proj.weight", "D F -> F D"),
)
ROUTER = (Row("mlp/router", "mlp.gate.weight", "E D -> D E"),)
SHARED = (  # the expert of every token, of Qwen2-MoE
    Row("mlp/shared/gate", "mlp.shared_expert.gate_proj.weight", "F D -> D F"),
    Row("mlp/shared/up", "mlp.shared_expert.up_proj.weight", "F D -> D F"),
    Row("mlp/shared/down", "mlp.shared_expert.down_proj.weight", "D F -> F D"),
    Row("mlp/shared_gate", "mlp.shared_expert_gate.weight", "O D -> D O"),
)
MIXTRAL_ROUTER = (Row("mlp/router", "block_sparse_moe.gate.weight", "E D -> D E"),)
MIXTRAL_EXPERTS = (
    Row("mlp/gate", "block_sparse_moe.experts.{expert}.w1.weight", "F D -> D F"),
    Row("mlp/up", "block_sparse_moe.experts.{expert}.w3.weight", "F D -> D F"),
    Row("mlp/down", "block_sparse_moe.experts.{expert}.w2.weight", "D F -> F D"),
)
EXPERTS = (  # the Hub's layout, which is also the one that is written
    Row("mlp/gate", "mlp.experts.{expert}.gate_proj.weight", "F D -> D F"),
    Row("mlp/up", "mlp.experts.{expert}.up_proj.weight", "F D -> D F"),
    Row("mlp/down", "mlp.experts.{expert}.down_proj.weight", "D F -> F D"),
)
FUSED_EXPERTS = (  # transformers 5 with save_original_format=False
    Row("mlp/gate", "mlp.experts.gate_up_proj", "E F D -> E D F", half=0),
    Row("mlp/up", "mlp.experts.gate_up_proj", "E F D -> E D F", half=1),
    Row("mlp/down", "mlp.experts.down_proj", "E D F -> E F D"),
)
FUSED_NAME = "mlp.experts.gate_up_proj"  # distinguishes the two layouts
BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed from rope_theta


@dataclass(frozen=True)
class Chunk:
    """The part of a parameter that one published tensor, or half of one, holds."""

    published: str  # the tensor's name
    shape: tuple[int, ...]  # of the published tensor
    index: tuple[int, ...]  # into the parameter's leading axes: layer of the run, expert
    row: Row


def list_chunks(
    config: ModelConfig, parameters: Mapping[str, tuple[int, ...]], *, fused: bool = False
) -> dict[str, list[Chunk]]:
    """The chunks of each parameter.

    Args:
      parameters: the shape of each parameter by its path, such as `runs/0/attention/query`.
      fused: whether a layer's experts are one tensor.
    """
    return {
        name: [
            Chunk(published, published_shape(row, parameters[name][len(index) :]), index, row)
            for row, published, index in tensors
        ]
        for name, tensors in list_tensors(config, parameters, fused=fused).items()
    }


def list_tensors(
    config: ModelConfig, parameters: Collection[str], *, fused: bool = False
) -> dict[str, list[tuple[Row, str, tuple[int, ...]]]]:
    """For each parameter its published tensors: (row of the table, name, index into the parameter's leading axes)."""
    found: dict[str, list[tuple[Row, str, tuple[int, ...]]]] = {}

    def add(name: str, row: Row, published: str, index: tuple[int, ...]) -> None:
        found.setdefault(name, []).append((row, published, index))

    for row in OUTER:
        if row.ours in parameters:  # tied embeddings: no head
            add(row.ours, row, row.published, ())
    first = 0
    for run, (sparse, count) in enumerate(layer_runs(config)):
        for row in LAYER + (_expert_rows(config, fused) if sparse else DENSE):
            name = f"runs/{run}/{row.ours}"
            for layer in range(count) if name in parameters else ():  # a model without biases has no such rows
                published = f"model.layers.{first + layer}.{row.published}"
                if "{expert}" in published:
                    for expert in range(config.num_experts):
                        add(name, row, published.replace("{expert}", str(expert)), (layer, expert))
                else:
                    add(name, row, published, (layer,))
        first += count
    return found


def _expert_rows(config: ModelConfig, fused: bool) -> tuple[Row, ...]:
    """The rows of a sparse layer. transformers 5 has the same fused names for every family."""
    if fused:
        return ROUTER + FUSED_EXPERTS + SHARED
    if family_of(config) == "mixtral":
        return MIXTRAL_ROUTER + MIXTRAL_EXPERTS
    return ROUTER + EXPERTS + SHARED


def published_shape(row: Row, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the published tensor for a chunk of shape `shape`."""
    groups, ours = _axes(row)
    sizes = dict(zip(ours, shape, strict=True))
    found = [math.prod(sizes[letter] for letter in group) for group in groups]
    if row.half is not None:
        found[1] *= 2
    return tuple(found)


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
