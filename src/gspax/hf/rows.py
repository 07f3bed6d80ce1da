"""The tensors of published checkpoints, layer by layer: rows from which `hf.families` composes each family's names.

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

This module imports no accelerator code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """A parameter of gspax, the published tensor that it is made of, and the axes of both."""

    ours: str
    published: str
    axes: str  # "published -> ours"
    float32: bool = False  # whether every export writes the tensor in float32


def mlp(
    ours: str, published: str, projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Row, ...]:
    """Return the rows of the gate, up and down projections of a feed-forward network."""
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
    Row("attention_out_norm/scale", "post_attention_layernorm.weight", "D -> D"),  # in layers with four norms
    Row("mlp_out_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
)
LATENT = (  # replace the rows of ordinary attention
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
DENSE = mlp("mlp", "mlp")
ROUTER = (Row("mlp/router", "mlp.gate.weight", "E D -> D E"),)
EXPERTS = mlp("mlp", "mlp.experts.{expert}")  # the Hub's layout, which exports use too
SPARSE = (*ROUTER, *EXPERTS)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a family's checkpoints."""

    stem: str = "model."  # of the names of tensors, which rows and adapters write so in all families
    outer: tuple[Row, ...] = OUTER  # outside of layers
    layer: tuple[Row, ...] = LAYER  # of a layer without its MLP
    dense: tuple[Row, ...] = DENSE  # of a dense MLP
    sparse: tuple[Row, ...] = SPARSE  # of an MLP with experts


FUSED_EXPERTS = (  # transformers 5 with save_original_format=False
    Row("mlp/gate", "mlp.experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/up", "mlp.experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/down", "mlp.experts.down_proj", "E D F -> E F D"),
)
MIXTRAL = (
    Row("mlp/router", "block_sparse_moe.gate.weight", "E D -> D E"),
    *mlp("mlp", "block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
)


def correction(published: str, axes: str = "E -> E") -> Row:
    """Return the row of the bias that affects the choice of experts but not their weights."""
    return Row("mlp/correction_bias", f"{published}.e_score_correction_bias", axes, float32=True)


SHARED_EXPERTS = mlp("mlp/shared", "mlp.shared_experts")
GATED_EXPERT = (
    *mlp("mlp/shared", "mlp.shared_expert"),
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
MXFP4 = (  # in published files: the rows whose numbers have 4 bits, with other axes
    Row("mlp/gate", "mlp.experts.gate_up_proj_blocks", "E (F 1+) D -> E D F"),
    Row("mlp/up", "mlp.experts.gate_up_proj_blocks", "E (F 1+) D -> E D F"),
    Row("mlp/down", "mlp.experts.down_proj_blocks", "E D F -> E F D"),
)
DEEPSEEK = (*SPARSE, *SHARED_EXPERTS, correction("mlp.gate"))
ERNIE = (
    Row("mlp/router", "mlp.gate.weight", "E D -> D E", float32=True),
    *(*EXPERTS, *SHARED_EXPERTS, correction("mlp.moe_statics", "1 E -> E")),
)
HUNYUAN = (
    Row("mlp/router", "mlp.gate.wg.weight", "E D -> D E", float32=True),
    *(*EXPERTS, *mlp("mlp/shared", "mlp.shared_mlp")),
)
FUSED_NAMES = (("block_sparse_moe.", "mlp."), ("mlp.moe_statics.", "mlp.gate.moe_statics."))  # in the fused layout


def replaced(rows: Sequence[Row], *own: Row) -> tuple[Row, ...]:
    """Return `rows`, with the rows of `own` replacing those of the same parameters."""
    by_parameter = {row.ours: row for row in own}
    return tuple(by_parameter.get(row.ours, row) for row in rows)


NORMS_AFTER = replaced(
    LAYER,
    Row("attention_norm/scale", "post_attention_layernorm.weight", "D -> D"),
    Row("mlp_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
)
NORMS_AROUND = replaced(LAYER, Row("mlp_norm/scale", "pre_feedforward_layernorm.weight", "D -> D"))
GEMMA4_LAYER = (*NORMS_AROUND, Row("layer_scale", "layer_scalar", "O -> O"))
HUNYUAN_LAYER = replaced(
    LAYER,
    Row("attention/query_norm/scale", "self_attn.query_layernorm.weight", "H -> H"),
    Row("attention/key_norm/scale", "self_attn.key_layernorm.weight", "H -> H"),
)
PHI3_LAYER = replaced(
    LAYER,
    Row("attention/query", "self_attn.qkv_proj.weight", "(N H)+ D -> D N H"),
    Row("attention/key", "self_attn.qkv_proj.weight", "(K H)+ D -> D K H"),
    Row("attention/value", "self_attn.qkv_proj.weight", "(K H)+ D -> D K H"),
)
PHI3_DENSE = replaced(
    DENSE,
    Row("mlp/gate", "mlp.gate_up_proj.weight", "F+ D -> D F"),
    Row("mlp/up", "mlp.gate_up_proj.weight", "F+ D -> D F"),
)
GATED_LAYER = (
    Row("attention/query", "self_attn.q_proj.weight", "(N H+) D -> D N H"),
    Row("attention/gate", "self_attn.q_proj.weight", "(N H+) D -> D N H"),
    *(row for row in LAYER if row.ours != "attention/query"),
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
QWEN3_5_LAYER = (
    *GATED_LAYER,
    Row("mixer/query", "linear_attn.in_proj_qkv.weight", "(K H)+ D -> D K H"),
    Row("mixer/key", "linear_attn.in_proj_qkv.weight", "(K H)+ D -> D K H"),
    Row("mixer/value", "linear_attn.in_proj_qkv.weight", "(K R U)+ D -> D K R U"),
    Row("mixer/gate", "linear_attn.in_proj_z.weight", "(K R U) D -> D K R U"),
    Row("mixer/beta", "linear_attn.in_proj_b.weight", "(K R) D -> D K R"),
    Row("mixer/decay", "linear_attn.in_proj_a.weight", "(K R) D -> D K R"),
    *DELTA_NET,
)
QWEN3_NEXT_LAYER = (  # by key head
    *GATED_LAYER,
    Row("mixer/query", "linear_attn.in_proj_qkvz.weight", "(K H+) D -> D K H"),
    Row("mixer/key", "linear_attn.in_proj_qkvz.weight", "(K H+) D -> D K H"),
    Row("mixer/value", "linear_attn.in_proj_qkvz.weight", "(K (R U)+) D -> D K R U"),
    Row("mixer/gate", "linear_attn.in_proj_qkvz.weight", "(K (R U)+) D -> D K R U"),
    Row("mixer/beta", "linear_attn.in_proj_ba.weight", "(K R+) D -> D K R"),
    Row("mixer/decay", "linear_attn.in_proj_ba.weight", "(K R+) D -> D K R"),
    *DELTA_NET,
)

GRANITE_LAYER = (  # attention, or a state space layer with K groups of R heads
    *LAYER,
    Row("mixer/gate", "mamba.in_proj.weight", "(K R U)+ D -> D K R U"),
    Row("mixer/input", "mamba.in_proj.weight", "(K R U)+ D -> D K R U"),
    Row("mixer/write", "mamba.in_proj.weight", "(K H)+ D -> D K H"),
    Row("mixer/read", "mamba.in_proj.weight", "(K H)+ D -> D K H"),
    Row("mixer/step", "mamba.in_proj.weight", "(K R)+ D -> D K R"),
    Row("mixer/input_taps", "mamba.conv1d.weight", "(K R U)+ 1 J -> K R U J"),
    Row("mixer/write_taps", "mamba.conv1d.weight", "(K H)+ 1 J -> K H J"),
    Row("mixer/read_taps", "mamba.conv1d.weight", "(K H)+ 1 J -> K H J"),
    Row("mixer/input_bias", "mamba.conv1d.bias", "(K R U)+ -> K R U"),
    Row("mixer/write_bias", "mamba.conv1d.bias", "(K H)+ -> K H"),
    Row("mixer/read_bias", "mamba.conv1d.bias", "(K H)+ -> K H"),
    Row("mixer/decay_rate", "mamba.A_log", "(K R) -> K R"),
    Row("mixer/decay_bias", "mamba.dt_bias", "(K R) -> K R"),
    Row("mixer/skip_scale", "mamba.D", "(K R) -> K R"),
    Row("mixer/norm", "mamba.norm.weight", "(K R U) -> K R U"),
    Row("mixer/out", "mamba.out_proj.weight", "D (K R U) -> K R U D"),
)


def _alone(row: Row) -> Row:
    """Return a row with the names of layers that have one part and one norm, whatever the part is."""
    name = row.published.replace("self_attn.", "mixer.").replace("mamba.", "mixer.")
    return replace(row, published="norm.weight" if row.ours in ("attention_norm/scale", "mlp_norm/scale") else name)


def _joined_mlp(ours: str, published: str) -> tuple[Row, ...]:
    """Return the rows of a feed-forward network whose gate and up projections are one tensor."""
    return (
        Row(f"{ours}/gate", f"{published}.input_linear.weight", "F+ D -> D F"),
        Row(f"{ours}/up", f"{published}.input_linear.weight", "F+ D -> D F"),
        Row(f"{ours}/down", f"{published}.output_linear.weight", "D F -> F D"),
    )


NEMOTRON_OUTER = replaced(
    OUTER,
    Row("embedding", "model.embeddings.weight", "V D -> V D"),
    Row("norm/scale", "model.norm_f.weight", "D -> D"),
)
NEMOTRON_LAYER = tuple(_alone(row) for row in GRANITE_LAYER)
NEMOTRON_DENSE = mlp("mlp", "mixer")
NEMOTRON_SPARSE = (
    Row("mlp/router", "mixer.gate.weight", "E D -> D E"),
    *(*mlp("mlp", "mixer.experts.{expert}"), *mlp("mlp/shared", "mixer.shared_experts"), correction("mixer.gate")),
)
LFM2_OUTER = replaced(OUTER, Row("norm/scale", "model.embedding_norm.weight", "D -> D"))
LFM2_LAYER = (  # attention, or a short convolution with C channels
    *replaced(
        LAYER,
        Row("attention_norm/scale", "operator_norm.weight", "D -> D"),
        Row("attention/out", "self_attn.out_proj.weight", "D (N H) -> N H D"),
        Row("attention/query_norm/scale", "self_attn.q_layernorm.weight", "H -> H"),
        Row("attention/key_norm/scale", "self_attn.k_layernorm.weight", "H -> H"),
        Row("mlp_norm/scale", "ffn_norm.weight", "D -> D"),
    ),
    Row("mixer/input_gate", "conv.in_proj.weight", "C+ D -> D C"),
    Row("mixer/output_gate", "conv.in_proj.weight", "C+ D -> D C"),
    Row("mixer/input", "conv.in_proj.weight", "C+ D -> D C"),
    Row("mixer/input_gate_bias", "conv.in_proj.bias", "C+ -> C"),
    Row("mixer/output_gate_bias", "conv.in_proj.bias", "C+ -> C"),
    Row("mixer/input_bias", "conv.in_proj.bias", "C+ -> C"),
    Row("mixer/input_taps", "conv.conv.weight", "C 1 J -> C J"),
    Row("mixer/convolution_bias", "conv.conv.bias", "C -> C"),
    Row("mixer/output", "conv.out_proj.weight", "D C -> C D"),
    Row("mixer/output_bias", "conv.out_proj.bias", "D -> D"),
)
LFM2_DENSE = mlp("mlp", "feed_forward", ("w1", "w3", "w2"))
LFM2_SPARSE = (
    Row("mlp/router", "feed_forward.gate.weight", "E D -> D E"),
    *mlp("mlp", "feed_forward.experts.{expert}", ("w1", "w3", "w2")),
    Row("mlp/correction_bias", "feed_forward.expert_bias", "E -> E", float32=True),
)
GRANITE_DENSE = _joined_mlp("mlp", "shared_mlp")
GRANITE_EXPERTS = (
    Row("mlp/router", "block_sparse_moe.router.layer.weight", "E D -> D E"),
    Row("mlp/gate", "block_sparse_moe.input_linear.weight", "E F+ D -> E D F"),
    Row("mlp/up", "block_sparse_moe.input_linear.weight", "E F+ D -> E D F"),
    Row("mlp/down", "block_sparse_moe.output_linear.weight", "E D F -> E F D"),
)
GRANITE_SPARSE = (*GRANITE_EXPERTS, *_joined_mlp("mlp/shared", "shared_mlp"))


GEMMA4_SPARSE = (  # the dense MLP is the shared expert
    Row("mlp/router", "router.proj.weight", "E D -> D E"),
    Row("mlp/router_norm/scale", "router.scale", "D -> D"),
    Row("mlp/expert_scale", "router.per_expert_scale", "E -> E"),
    Row("mlp/gate", "experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/up", "experts.gate_up_proj", "E F+ D -> E D F"),
    Row("mlp/down", "experts.down_proj", "E D F -> E F D"),
    Row("mlp/expert_norm/scale", "pre_feedforward_layernorm_2.weight", "D -> D"),
    Row("mlp/expert_out_norm/scale", "post_feedforward_layernorm_2.weight", "D -> D"),
    Row("mlp/shared_norm/scale", "pre_feedforward_layernorm.weight", "D -> D"),
    Row("mlp/shared_out_norm/scale", "post_feedforward_layernorm_1.weight", "D -> D"),
    *mlp("mlp/shared", "mlp"),
)


def fused_rows(rows: Sequence[Row], *, mxfp4: bool) -> tuple[Row, ...]:
    """Return a layer's rows with all experts in one tensor, named as in transformers 5, or in mxfp4."""
    if mxfp4:
        return replaced(rows, *MXFP4)
    rest = [row for row in rows if "{expert}" not in row.published]
    for theirs, in_fused in FUSED_NAMES:
        rest = [replace(row, published=row.published.replace(theirs, in_fused)) for row in rest]
    return (*rest, *FUSED_EXPERTS)
