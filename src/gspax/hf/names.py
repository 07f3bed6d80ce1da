"""One table between gspax's parameters and the tensors of a published checkpoint, for import and export.

A row names a parameter, the tensor that it is made of, and how their axes correspond. Axes are named as in
docs/architecture.md; axes in brackets form one axis of the published tensor. There is one tensor per layer and, where
the name has `{expert}`, per expert; gspax stacks them along leading axes. So

    Row("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H")

is a published matrix [N·H, D] for every layer, which gspax holds as [layers, D, N, H]. One tensor may hold several
parameters: the rows with its name follow one another along the axis, or the brackets, before a plus. So

    Row("mlp/gate", "mlp.gate_up_proj.weight", "F+ D -> D F")
    Row("mlp/up", "mlp.gate_up_proj.weight", "F+ D -> D F")

are a matrix [2·F, D], the gate's rows before the other's, and rows with "(N H+) D" alternate from head to head. An axis
1 has the length one: rows with "(F 1+) D" alternate one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspax.config import ModelConfig, layer_places, layers_of
from gspax.hf.config_json import family_of
from gspax.hf.families import FAMILIES, WRAPPERS
from gspax.hf.tensors import Part

STRIP, GAP = 2**17, 32  # elements of a strip and after each of its rows, in `copy`


@dataclass(frozen=True)
class Row:
    """A parameter of gspax, the published tensor that it is made of, and the axes of both."""

    ours: str
    published: str
    axes: str  # "published -> ours"
    float32: bool = False  # whether the published tensor is that in every export


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
    Row("attention/sinks", "self_attn.sinks", "N -> N"),
    Row("mlp_norm/scale", "post_attention_layernorm.weight", "D -> D"),
    Row("attention_out_norm/scale", "post_attention_layernorm.weight", "D -> D"),  # of layers with four norms, ...
    Row("mlp_out_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
)
LATENT = (  # in place of the rows of other attention
    Row("attention_norm/scale", "input_layernorm.weight", "D -> D"),
    Row("attention/query_latent", "self_attn.q_a_proj.weight", "Q D -> D Q"),
    Row("attention/query_norm/scale", "self_attn.q_a_layernorm.weight", "Q -> Q"),
    Row("attention/query", "self_attn.q_b_proj.weight", "(N H) Q -> Q N H"),
    Row("attention/latent", "self_attn.kv_a_proj_with_mqa.weight", "C+ D -> D C"),
    Row("attention/rotated_key", "self_attn.kv_a_proj_with_mqa.weight", "R+ D -> D R"),
    Row("attention/latent_norm/scale", "self_attn.kv_a_layernorm.weight", "C -> C"),
    Row("attention/key", "self_attn.kv_b_proj.weight", "(N H+) C -> C N H"),
    Row("attention/value", "self_attn.kv_b_proj.weight", "(N H+) C -> C N H"),
    Row("attention/out", "self_attn.o_proj.weight", "D (N H) -> N H D"),
    Row("mlp_norm/scale", "post_attention_layernorm.weight", "D -> D"),
)
DENSE = _mlp("mlp", "mlp")
ROUTER = (Row("mlp/router", "mlp.gate.weight", "E D -> D E"),)
EXPERTS = _mlp("mlp", "mlp.experts.{expert}")  # the Hub's layout, which is also the one that is written
FUSED_EXPERTS = (  # transformers 5 with save_original_format=False
    Row("mlp/gate", "mlp.experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/up", "mlp.experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/down", "mlp.experts.down_proj", "E D F -> E F D"),
)
FUSED_NAME = "mlp.experts.gate_up_proj"  # distinguishes the two layouts; of gpt-oss, the next
MXFP4_NAME = "mlp.experts.gate_up_proj_blocks"
MIXTRAL = (
    Row("mlp/router", "block_sparse_moe.gate.weight", "E D -> D E"),
    *_mlp("mlp", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
)


def _correction(published: str, axes: str = "E -> E") -> Row:
    return Row("mlp/correction_bias", f"{published}.e_score_correction_bias", axes, float32=True)


SHARED_EXPERTS = _mlp("mlp/shared", "mlp.shared_experts")
GATED_EXPERT = (
    *_mlp("mlp/shared", "mlp.shared_expert"),
    Row("mlp/shared_gate", "mlp.shared_expert_gate.weight", "O D -> D O"),
)
GPT_OSS = (  # gates and ups alternate
    Row("mlp/router", "mlp.router.weight", "E D -> D E"),
    Row("mlp/router_bias", "mlp.router.bias", "E -> E"),
    Row("mlp/gate", "mlp.experts.gate_up_proj", "E D (F 1+) -> E D F"),
    Row("mlp/up", "mlp.experts.gate_up_proj", "E D (F 1+) -> E D F"),
    Row("mlp/gate_bias", "mlp.experts.gate_up_proj_bias", "E (F 1+) -> E F"),
    Row("mlp/up_bias", "mlp.experts.gate_up_proj_bias", "E (F 1+) -> E F"),
    Row("mlp/down", "mlp.experts.down_proj", "E F D -> E F D"),
    Row("mlp/down_bias", "mlp.experts.down_proj_bias", "E D -> E D"),
)
MXFP4 = {  # of published files: the rows whose numbers have 4 bits, and other axes
    "mlp/gate": Row("mlp/gate", "mlp.experts.gate_up_proj_blocks", "E (F 1+) D -> E D F"),
    "mlp/up": Row("mlp/up", "mlp.experts.gate_up_proj_blocks", "E (F 1+) D -> E D F"),
    "mlp/down": Row("mlp/down", "mlp.experts.down_proj_blocks", "E D F -> E F D"),
}
SPARSE = {  # by model_type, the rows of a layer with experts; of all others ROUTER and EXPERTS
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"), (*ROUTER, *EXPERTS, *GATED_EXPERT)),
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "minimax_m2": (*MIXTRAL, _correction("block_sparse_moe")),
    "deepseek_v2": (*ROUTER, *EXPERTS, *SHARED_EXPERTS),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1"),
        (*ROUTER, *EXPERTS, *SHARED_EXPERTS, _correction("mlp.gate")),
    ),
    "ernie4_5_moe": (
        Row("mlp/router", "mlp.gate.weight", "E D -> D E", float32=True),
        *(*EXPERTS, *SHARED_EXPERTS, _correction("mlp.moe_statics", "1 E -> E")),
    ),
    "hunyuan_v1_moe": (
        Row("mlp/router", "mlp.gate.wg.weight", "E D -> D E", float32=True),
        *(*EXPERTS, *_mlp("mlp/shared", "mlp.shared_mlp")),
    ),
}
FUSED_NAMES = (("block_sparse_moe.", "mlp."), ("mlp.moe_statics.", "mlp.gate.moe_statics."))  # in the fused layout
NORMS_AFTER = (
    Row("attention_norm/scale", "post_attention_layernorm.weight", "D -> D"),
    Row("mlp_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
)
OWN = {  # by model_type, the rows that differ from `LAYER` and `DENSE`
    "olmo2": NORMS_AFTER,
    "olmo3": NORMS_AFTER,
    "gemma3_text": (Row("mlp_norm/scale", "pre_feedforward_layernorm.weight", "D -> D"),),  # ... and this
    "hunyuan_v1_moe": (
        Row("attention/query_norm/scale", "self_attn.query_layernorm.weight", "H -> H"),
        Row("attention/key_norm/scale", "self_attn.key_layernorm.weight", "H -> H"),
    ),
    "phi3": (
        Row("attention/query", "self_attn.qkv_proj.weight", "(N H)+ D -> D N H"),
        Row("attention/key", "self_attn.qkv_proj.weight", "(K H)+ D -> D K H"),
        Row("attention/value", "self_attn.qkv_proj.weight", "(K H)+ D -> D K H"),
        Row("mlp/gate", "mlp.gate_up_proj.weight", "F+ D -> D F"),
        Row("mlp/up", "mlp.gate_up_proj.weight", "F+ D -> D F"),
    ),
}
GATED_QUERY = (
    Row("attention/query", "self_attn.q_proj.weight", "(N H+) D -> D N H"),
    Row("attention/gate", "self_attn.q_proj.weight", "(N H+) D -> D N H"),
)
DELTA_NET = (  # a gated delta net, with R value heads for each of K key heads
    Row("mixer/decay_rate", "linear_attn.A_log", "(K R) -> K R"),
    Row("mixer/decay_bias", "linear_attn.dt_bias", "(K R) -> K R"),
    Row("mixer/query_taps", "linear_attn.conv1d.weight", "(K H)+ 1 J -> K H J"),
    Row("mixer/key_taps", "linear_attn.conv1d.weight", "(K H)+ 1 J -> K H J"),
    Row("mixer/value_taps", "linear_attn.conv1d.weight", "(K R U)+ 1 J -> K R U J"),
    Row("mixer/norm", "linear_attn.norm.weight", "U -> U"),
    Row("mixer/out", "linear_attn.out_proj.weight", "D (K R U) -> K R U D"),
)
DELTA_PROJECTIONS = {  # by model_type, those of its inputs
    "qwen3_5_text": (
        Row("mixer/query", "linear_attn.in_proj_qkv.weight", "(K H)+ D -> D K H"),
        Row("mixer/key", "linear_attn.in_proj_qkv.weight", "(K H)+ D -> D K H"),
        Row("mixer/value", "linear_attn.in_proj_qkv.weight", "(K R U)+ D -> D K R U"),
        Row("mixer/gate", "linear_attn.in_proj_z.weight", "(K R U) D -> D K R U"),
        Row("mixer/beta", "linear_attn.in_proj_b.weight", "(K R) D -> D K R"),
        Row("mixer/decay", "linear_attn.in_proj_a.weight", "(K R) D -> D K R"),
    ),
    "qwen3_next": (  # by key head
        Row("mixer/query", "linear_attn.in_proj_qkvz.weight", "(K H+) D -> D K H"),
        Row("mixer/key", "linear_attn.in_proj_qkvz.weight", "(K H+) D -> D K H"),
        Row("mixer/value", "linear_attn.in_proj_qkvz.weight", "(K (R U)+) D -> D K R U"),
        Row("mixer/gate", "linear_attn.in_proj_qkvz.weight", "(K (R U)+) D -> D K R U"),
        Row("mixer/beta", "linear_attn.in_proj_ba.weight", "(K R+) D -> D K R"),
        Row("mixer/decay", "linear_attn.in_proj_ba.weight", "(K R+) D -> D K R"),
    ),
}
DELTA_PROJECTIONS["qwen3_5_moe_text"] = DELTA_PROJECTIONS["qwen3_5_text"]
TOWER = "model.visual."
LAYER_NUMBER, MTP = re.compile(r"model\.layers\.(\d+)\."), re.compile(r"mtp\.|model\.mtp_")
BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed from rope_theta


@dataclass(frozen=True)
class Chunk:
    """The part of a parameter that one published tensor, or a part of one, holds."""

    published: str  # the tensor's name
    index: tuple[int, ...]  # into the parameter's leading axes: layer of the stack, expert
    row: Row
    part: Part | None = None  # of the tensor; None: all of it


def list_chunks(
    config: ModelConfig, parameters: Mapping[str, tuple[int, ...]], *, fused: bool = False
) -> dict[str, list[Chunk]]:
    """The chunks of each parameter.

    Args:
      parameters: their shapes by their paths, such as `runs/0/attention/query`.
      fused: whether a layer's experts are one tensor; of gpt-oss, whether that is in 4 bits (mxfp4).
    """
    table = {row.ours: [Chunk(row.published, (), row)] for row in OUTER if row.ours in parameters}  # tied: no head
    family = family_of(config)
    stacks: dict[tuple[int, ...], list[int]] = {}  # and the layers in each of them
    for number, place in enumerate(layer_places(config)):
        stacks.setdefault(place.stack, []).append(number)
    for stack, layers in stacks.items():
        path, sparse = "/".join(map(str, ("runs", *stack))), layers_of(config)[layers[0]].sparse
        rows = _own(family, _mixer_rows(config)) + (
            _sparse_rows(family, fused=fused) if sparse else _own(family, DENSE)
        )
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


def _parts(shapes: Mapping[Row, Sequence[int]]) -> dict[Row, Part | None]:
    """Which part of its tensor each row is, given the shapes of a layer's parameters in the table's order."""
    ends: dict[str, int] = {}
    places: dict[Row, tuple[int, int, int]] = {}
    for row, shape in shapes.items():
        if "+" in row.axes:
            outer, length = _joined(row, shape)
            start = ends.get(row.published, 0)
            places[row] = outer, start, length
            ends[row.published] = start + length
    return {row: Part(*places[row], ends[row.published]) if row in places else None for row in shapes}


def _mixer_rows(config: ModelConfig) -> tuple[Row, ...]:
    """The rows of a layer without its MLP, whichever mixer it has."""
    if config.delta is not None:
        attention = [row for row in LAYER if row.ours != "attention/query"]
        return (*GATED_QUERY, *attention, *DELTA_PROJECTIONS[family_of(config)], *DELTA_NET)
    if config.latent is None:
        return LAYER
    if config.latent.query_rank:
        return LATENT
    return tuple(replace(row, published=row.published.replace("q_b_proj", "q_proj")) for row in LATENT)


def _own(family: str, rows: Sequence[Row]) -> tuple[Row, ...]:
    """These rows, or the family's own in their places."""
    own = {row.ours: row for row in OWN.get(family, ())}
    return tuple(own.get(row.ours, row) for row in rows)


def _sparse_rows(family: str, *, fused: bool) -> tuple[Row, ...]:
    """The rows of a layer's experts. transformers 5 has the same fused names for every family but gpt-oss."""
    rows = SPARSE.get(family, ROUTER + EXPERTS)
    if not fused:
        return rows
    if rows is GPT_OSS:
        return tuple(MXFP4.get(row.ours, row) for row in rows)
    rest = [row for row in rows if "{expert}" not in row.published]
    for theirs, in_fused in FUSED_NAMES:
        rest = [replace(row, published=row.published.replace(theirs, in_fused)) for row in rest]
    return (*rest, *FUSED_EXPERTS)


def is_fused(config: ModelConfig, tensors: Iterable[str]) -> bool:
    """Whether these tensors are in the other layout of experts (`list_chunks`)."""
    name = MXFP4_NAME if family_of(config) == "gpt_oss" else FUSED_NAME
    return any(tensor.endswith(name) for tensor in tensors)


def published_name(tensor: str, config: ModelConfig) -> str:
    """The name of a text model's tensor in its checkpoint, which may have a vision tower beside it."""
    return re.sub(r"^model\.", "model.language_model.", tensor) if config.model_type in WRAPPERS else tensor


def carries(config: ModelConfig) -> bool:
    """Whether the checkpoints of the model's family may have tensors that `is_carried`."""
    return FAMILIES[family_of(config)].ahead


def is_carried(tensor: str, config: ModelConfig) -> bool:
    """Whether a published tensor is not read, and an export has it as it is.

    It is of a vision tower, or of layers that predict several tokens ahead (MTP): those after the last, or by its name.
    """
    layer = LAYER_NUMBER.match(tensor)
    after_last = layer is not None and int(layer[1]) >= config.num_hidden_layers
    of_tower = config.model_type in WRAPPERS and tensor.startswith(TOWER)
    return of_tower or ((after_last or MTP.match(tensor) is not None) and carries(config))


def is_unread(tensor: str, config: ModelConfig) -> bool:
    """Whether a published tensor is no part of the model: computed from the configuration, or carried."""
    return BUFFER.fullmatch(tensor) is not None or is_carried(tensor, config)


def tensor_shapes(
    table: Mapping[str, Sequence[Chunk]], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shape of each published tensor by its name.

    Args:
      table: `list_chunks` of the parameters.
      parameters: the shape of each parameter by its path.
    """
    return {
        chunk.published: published_shape(chunk.row, parameters[name][len(chunk.index) :], chunk.part)
        for name, chunks in table.items()
        for chunk in chunks
    }


def published_shape(row: Row, shape: Sequence[int], part: Part | None = None) -> tuple[int, ...]:
    """The shape of the published tensor that holds a chunk of shape `shape`, alone or as a part."""
    groups, ours, joined = _axes(row)
    sizes = {"1": 1} | dict(zip(ours, shape, strict=True))
    lengths = [math.prod(sizes[letter] for letter in group) for group in groups]
    if part is not None:
        (axis,) = (axis for axis, group in enumerate(groups) if joined in group)
        lengths[axis] = lengths[axis] // part.length * part.total
    return tuple(lengths)


def to_ours(row: Row, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A view, with our axes and of shape `shape`, of a published tensor or of the part of it that the row is."""
    groups, ours, _ = _axes(row)
    letters = "".join(groups).replace("1", "")  # an axis of length one
    sizes = dict(zip(ours, shape, strict=True))
    return tensor.reshape([sizes[letter] for letter in letters]).transpose([letters.index(letter) for letter in ours])


def to_published(row: Row, array: np.ndarray) -> np.ndarray:
    """The inverse of `to_ours`: a chunk as a contiguous published tensor, or as the part of it that the row is."""
    groups, ours, _ = _axes(row)
    ordered = array.transpose([ours.index(letter) for letter in "".join(groups).replace("1", "")])
    tensor = np.empty(ordered.shape, array.dtype)
    copy(tensor, ordered)
    return tensor.reshape(published_shape(row, array.shape))


def leading_axis(row: Row) -> int:
    """Our axis that the first axis of the published tensor is, or begins with."""
    groups, ours, _ = _axes(row)
    return ours.index("".join(groups).replace("1", "")[0])


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, where source may be a transposed view and of another dtype.

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
    """`"(N H)+ D -> D N H"` as (["NH", "D"], "DNH", "NH"), the last before a plus; without one, empty."""
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
    """The sizes of the axes before those with a plus, and of these, each multiplied."""
    groups, ours, joined = _axes(row)
    sizes, letters = {"1": 1} | dict(zip(ours, shape, strict=True)), "".join(groups)
    before = letters[: letters.index(joined)]
    return math.prod(sizes[letter] for letter in before), math.prod(sizes[letter] for letter in joined)
