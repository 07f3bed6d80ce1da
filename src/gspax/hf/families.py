"""The families of checkpoints, one `Family` for each `model_type`. To support a family, add one here.

A `Family` says how `config.json` describes a model, for `hf.config_json`, and how its tensors are named, by rows of
`hf.rows`, for `hf.names`. This module imports no accelerator code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gspax.data.files import Json
from gspax.hf import keys, layer_lists, parts, rows
from gspax.hf.keys import LOCAL, REQUIRED, Fields, Key, Part, experts, routed, same, sizes
from gspax.hf.layer_lists import LayerList
from gspax.hf.rope_keys import RopeKeys, TwoRopes
from gspax.hf.rows import Tensors

PLAIN: dict[str, Json] = {"qk_norm": False, "qkv_bias": False, "attention_bias": False}
QK_NORM: dict[str, Json] = {"qk_norm": True}
# The router of DeepSeek-V3 and later.
SIGMOID: dict[str, Json] = {"router.scoring": "sigmoid", "router.correction_bias": True}
SIGMOID_KEYS: dict[str, tuple[Json, ...]] = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
GELU = "gelu_pytorch_tanh"
# Keys that follow from others, or that belong to a training loss.
BESIDE_LATENT = ("qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")


def _code(version: str) -> dict[str, Json]:
    """Return the `auto_map` of DeepSeek's files, whose code became part of transformers."""
    return {
        "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
        "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
    }


# The code in Nemotron-H's files, which became part of transformers; some have no `AutoModel`.
NEMOTRON_CODE: dict[str, Json] = {
    "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
    "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
    "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
}
STATE_SPACE_KEYS: dict[str, tuple[Json, ...]] = {
    **{"mamba_proj_bias": (None, False), "normalization_function": (None, "rmsnorm")},
    # No limit: as published files write it, and as transformers does.
    "time_step_limit": (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
}
NEMOTRON_KEYS: dict[str, tuple[Json, ...]] = {
    **{"mlp_hidden_act": (None, "relu2"), "mamba_hidden_act": (None, "silu")},
    **{"use_bias": (None, False), "mlp_bias": (None, False), "mamba_proj_bias": (None, False)},
    **{"hidden_dropout": (None, 0), "residual_in_fp32": (None, False), "mamba_ssm_cache_dtype": (None, "float32")},
    **{"n_shared_experts": (None, 1), "moe_latent_size": (None,)},
    "time_step_limit": STATE_SPACE_KEYS["time_step_limit"],
    "mamba_dt_limit": STATE_SPACE_KEYS["time_step_limit"],
    "auto_map": (None, {name: value for name, value in NEMOTRON_CODE.items() if name != "AutoModel"}, NEMOTRON_CODE),
}
NEMOTRON_DOUBLES = {  # other names in some files, which must have the value of the key that is read
    **{"norm_eps": "layer_norm_epsilon", "rms_norm_eps": "layer_norm_epsilon", "attention_head_dim": "head_dim"},
}
NEMOTRON_UNREAD = (  # how parameters are drawn, how a sequence is cut, what the sizes make of the width, and MTP
    *("rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"),
    *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor", "chunk_size", "mamba_chunk_size"),
    *("expand", "mamba_expand", "num_logits_to_keep", "use_mamba_kernels", "moe_shared_expert_overlap"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
LFM2_KEYS: dict[str, tuple[Json, ...]] = {"block_use_swiglu": (None, True), "use_pos_enc": (None, True)}
LFM2_UNREAD = (  # how parameters are drawn
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
)
LFM2_DOUBLES = {  # other names, which must have the value of the key that is read
    **{"conv_dim_out": "hidden_size", "theta": "rope_theta"},
    **{"num_heads": "num_attention_heads", "block_norm_eps": "norm_eps"},
}
DELTA_ROPE = RopeKeys(fraction=Key("partial_rotary_factor", 0.25), mrope=True)
GATED = QK_NORM | {"attention_gate": True, "norm_plus_one": True}
STEPS = same(decoder_sparse_step=1, mlp_only_layers=())  # the layers with experts in Qwen's models
GATED_KEYS: dict[str, tuple[Json, ...]] = {
    **{"attn_output_gate": (None, True), "output_gate_type": (None, "swish"), "mamba_ssm_dtype": (None, "float32")},
    "mlp_only_layers": (None, list[Json]()),
}
OF_MTP = (  # keys of layers that predict several tokens ahead, which gspax does not run
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)
# The code in the first files of Phi-3, which became part of transformers.
PHI3_CODE: dict[str, Json] = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
PHI4_CODE: Json = PHI3_CODE | {"AutoTokenizer": "Xenova/gpt-4o"}  # Phi-4-mini


@dataclass(frozen=True)
class Family:
    """How the checkpoints of one `model_type` describe a model and name its tensors.

    A field of `ModelConfig` that is neither copied nor fixed nor read by a part has its default in all models of the
    family. Fields of the router are written `router.scale`.
    """

    architecture: str
    copied: Fields  # the fields that have a key
    fixed: dict[str, Json] = field(default_factory=dict)  # fields with one value in the family, if not as in `PLAIN`
    permitted: dict[str, tuple[Json, ...]] = field(default_factory=dict)  # further keys, with their permitted values
    doubles: dict[str, str] = field(default_factory=dict)  # other names of keys, which must have the same value
    harmless: tuple[str, ...] = ()  # further keys that have no effect in gspax
    assumed: dict[str, Json] = field(default_factory=dict)  # values of absent keys that `permitted` may reject
    written: dict[str, Json] = field(default_factory=dict)  # further keys of an export
    head_dim: int = 0  # default of the key; 0: hidden_size / num_attention_heads
    has_head_dim: bool = True  # False: its files have no such key, unless the size differs from that quotient
    rope: RopeKeys = field(default_factory=RopeKeys)
    layers: LayerList = field(default_factory=LayerList)  # of which kind each layer is
    parts: tuple[Part, ...] = ()  # what else several keys say together
    tensors: Tensors = field(default_factory=Tensors)
    quant_method: str = ""  # the `quant_method` of files that can be read
    ahead: bool = False  # whether files may have layers that predict several tokens ahead (MTP), which are copied
    aliases: tuple[str, ...] = ()  # model_types whose files differ from this family's only in that name
    wrapper: tuple[str, str] | None = None  # model_type and class of files that add a vision tower to its models

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """All parts, in the order in which they are read."""
        return self.rope, self.layers, *self.parts

    @property
    def known(self) -> set[str]:
        """The keys that are read as fields or by a part, or that may have any value."""
        copied = {name for key in self.copied.values() for name in (key.name, key.other)} - {""}
        return copied.union(self.harmless, self.doubles, *(part.keys for part in self.all_parts))

    @property
    def experts(self) -> bool:
        """Whether the family's models have experts."""
        return "num_experts" in self.copied

    @property
    def shared_experts(self) -> bool:
        """Whether the models' experts have a shared one beside them."""
        own = any(isinstance(part, parts.SharedExperts) for part in self.parts)
        return own or "shared_expert_intermediate_size" in self.copied

    @property
    def state(self) -> bool:
        """Whether layers of the family's models have a state: gated delta nets, or a mixer of another kind."""
        return isinstance(self.layers, layer_lists.DeltaLayers) or self.layers.mixer is not None

    @property
    def implied(self) -> dict[str, Json]:
        """The fields of ModelConfig that all models of the family share."""
        return {name: value for name, value in PLAIN.items() if name not in self.copied} | self.fixed


FAMILIES = {
    "qwen3": Family(
        "Qwen3ForCausalLM",
        sizes() | same(attention_bias=False),
        QK_NORM,
        head_dim=128,
        layers=layer_lists.SwitchedWindow(),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        sizes() | experts() | STEPS | same(norm_topk_prob=False, attention_bias=False),
        QK_NORM,
        layers=layer_lists.SwitchedWindow(whole=True),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        sizes()
        | experts()
        | STEPS
        | same(norm_topk_prob=False, shared_expert_intermediate_size=REQUIRED, qkv_bias=True),
        has_head_dim=False,
        tensors=Tensors(sparse=(*rows.SPARSE, *rows.GATED_EXPERT)),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        sizes(eps=1e-5, context=131072, dense=False) | experts(LOCAL, "num_experts", width="intermediate_size"),
        {"norm_topk_prob": True},
        rope=RopeKeys(1e6),
        layers=layer_lists.Window(),
        tensors=Tensors(sparse=rows.MIXTRAL),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        sizes(),
        {"qkv_bias": True},
        permitted={"use_mrope": (None, False)},
        has_head_dim=False,
        layers=layer_lists.SwitchedWindow(),
    ),
    "llama": Family(
        "LlamaForCausalLM",
        sizes(context=2048) | same(attention_bias=False),
        permitted={"mlp_bias": (None, False)},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        sizes(tied=True) | same(attention_bias=False),
        permitted={"mlp_bias": (None, False)},
        has_head_dim=False,
        written={"pad_token_id": None},  # the default is outside a small vocabulary
        rope=RopeKeys(2e6),
        parts=(layer_lists.ListedRope(),),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        sizes(context=2048) | keys.MULTIPLIERS | same(attention_bias=False),
        permitted={"mlp_bias": (None, False)},
        has_head_dim=False,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        sizes(context=2048, dense=False)
        | (experts(LOCAL, "num_experts", width="intermediate_size") | keys.MULTIPLIERS)
        | same(attention_bias=False),
        {"norm_topk_prob": True},
        has_head_dim=False,
        tensors=Tensors(sparse=rows.GRANITE_EXPERTS),
    ),
    "granitemoehybrid": Family(  # Granite 4
        "GraniteMoeHybridForCausalLM",
        sizes(context=2048, dense=False)
        | (experts(LOCAL, "num_experts", width="intermediate_size") | keys.STATE_SPACE | keys.MULTIPLIERS)
        | {"shared_expert_intermediate_size": Key("shared_intermediate_size", 1024)}
        | same(attention_bias=False),
        {"norm_topk_prob": True, "shared_expert_gate": False},
        permitted=STATE_SPACE_KEYS,
        harmless=("mamba_chunk_size", "init_method"),
        has_head_dim=False,
        layers=layer_lists.StateSpaceLayers(),
        parts=(layer_lists.OptionalRope(), parts.SharedAlone(("shared_intermediate_size", "intermediate_size"))),
        tensors=Tensors(layer=rows.GRANITE_LAYER, dense=rows.GRANITE_DENSE, sparse=rows.GRANITE_SPARSE),
    ),
    "nemotron_h": Family(  # and Nemotron 3 Nano
        "NemotronHForCausalLM",
        {name: key for name, key in sizes(context=4096).items() if name != "tie_word_embeddings"}
        | {"rms_norm_eps": Key("layer_norm_epsilon", 1e-5)}
        | (routed() | keys.NEMOTRON_MIXER)
        | {"shared_expert_intermediate_size": Key("moe_shared_expert_intermediate_size", 7688)}
        | same(norm_topk_prob=True),
        SIGMOID | {"activation": "relu2", "shared_expert_gate": False, "tie_word_embeddings": False},
        permitted=NEMOTRON_KEYS,
        harmless=NEMOTRON_UNREAD,
        doubles=NEMOTRON_DOUBLES,
        head_dim=128,
        ahead=True,
        written={"n_shared_experts": 1},
        layers=layer_lists.LetteredLayers(),
        tensors=Tensors(
            stem="backbone.",
            outer=rows.NEMOTRON_OUTER,
            layer=rows.NEMOTRON_LAYER,
            dense=rows.NEMOTRON_DENSE,
            sparse=rows.NEMOTRON_SPARSE,
        ),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        sizes(context=128000) | keys.LFM2,
        QK_NORM,
        permitted=LFM2_KEYS,
        harmless=LFM2_UNREAD,
        doubles=LFM2_DOUBLES,
        has_head_dim=False,
        rope=RopeKeys(1e6),
        layers=layer_lists.ConvolutionLayers(),
        parts=(parts.AdjustedWidth(),),
        tensors=Tensors(outer=rows.LFM2_OUTER, layer=rows.LFM2_LAYER, dense=rows.LFM2_DENSE),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        sizes(context=128000)
        | (keys.LFM2 | experts() | same(norm_topk_prob=True))
        | {"router.correction_bias": Key("use_expert_bias", True), "router.scale": Key("routed_scaling_factor", 1.0)},
        QK_NORM | {"router.scoring": "sigmoid"},
        has_head_dim=False,
        rope=RopeKeys(1e6),
        layers=layer_lists.ConvolutionLayers(),
        parts=(parts.LeadingDense(2, "num_dense_layers"),),
        tensors=Tensors(outer=rows.LFM2_OUTER, layer=rows.LFM2_LAYER, dense=rows.LFM2_DENSE, sparse=rows.LFM2_SPARSE),
    ),
    "mistral": Family("MistralForCausalLM", sizes(context=131072), layers=layer_lists.Window(4096)),
    "phi3": Family(  # and Phi-4
        "Phi3ForCausalLM",
        sizes(eps=1e-5, context=4096),
        permitted={"resid_pdrop": (0,), "embd_pdrop": (0,), "auto_map": (None, PHI3_CODE, PHI4_CODE)}
        | {"mlp_bias": (None, False), "lm_head_bias": (None, False)}
        | {"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        has_head_dim=False,
        written={"pad_token_id": None},  # the default is outside a small vocabulary
        rope=RopeKeys(types=("longrope",), fraction=Key("partial_rotary_factor", 1.0)),
        layers=layer_lists.Window(),
        tensors=Tensors(layer=rows.PHI3_LAYER, dense=rows.PHI3_DENSE),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        sizes(eps=1e-5, context=131072)
        | (routed() | same(norm_topk_prob=True))
        | {"qk_norm": Key("use_qk_norm", False), "qkv_bias": Key("attention_bias", False)},
        SIGMOID | {"shared_expert_gate": False},
        permitted=SIGMOID_KEYS,
        ahead=True,
        written={"num_nextn_predict_layers": 0},
        rope=RopeKeys(fraction=Key("partial_rotary_factor", 0.5)),
        parts=(parts.LeadingDense(1), parts.SharedExperts(1)),
        tensors=Tensors(sparse=rows.DEEPSEEK),
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        sizes(context=2048) | (routed() | same(norm_topk_prob=False, attention_bias=False)),
        SIGMOID | {"qk_norm": True, "shared_expert_gate": False},
        permitted=SIGMOID_KEYS | {"moe_layer_freq": (None, 1)},
        parts=(parts.LeadingDense(0), parts.SharedExperts(REQUIRED)),
        tensors=Tensors(sparse=rows.DEEPSEEK),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        sizes(context=2048) | routed(other="num_experts") | keys.LATENT,
        {"norm_topk_prob": False, "rope_interleaved": True, "router.group_best": 1, "shared_expert_gate": False},
        permitted={
            **{"auto_map": (None, _code("V2")), "scoring_func": (None, "softmax")},
            **{"moe_layer_freq": (None, 1), "mlp_bias": (None, False)},
        },
        harmless=BESIDE_LATENT,
        parts=(parts.LeadingDense(0), parts.SharedExperts(2), parts.GroupsByMethod()),
        tensors=Tensors(layer=rows.LATENT, sparse=(*rows.SPARSE, *rows.SHARED_EXPERTS)),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        sizes(context=4096)
        | (routed(8, 4, 2.5) | keys.LATENT | same(norm_topk_prob=True))
        | {"rope_interleaved": Key("rope_interleave", True)},
        SIGMOID | {"shared_expert_gate": False},
        permitted=SIGMOID_KEYS | {"auto_map": (None, _code("V3")), "moe_layer_freq": (None, 1)},
        harmless=BESIDE_LATENT,
        ahead=True,
        written={"num_nextn_predict_layers": 0},
        parts=(parts.LeadingDense(3), parts.SharedExperts(1)),
        tensors=Tensors(layer=rows.LATENT, sparse=rows.DEEPSEEK),
        aliases=("kimi_k2",),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        sizes(eps=1e-5, context=202752)
        | (routed(scale=1.8) | keys.LATENT | same(norm_topk_prob=True))
        | {"rope_interleaved": Key("rope_interleave", True)},
        SIGMOID | {"shared_expert_gate": False},
        permitted=SIGMOID_KEYS,
        harmless=BESIDE_LATENT,
        ahead=True,
        written={"num_nextn_predict_layers": 0},
        parts=(parts.LeadingDense(1), parts.SharedExperts(1), parts.DenseOrSparse()),
        tensors=Tensors(layer=rows.LATENT, sparse=rows.DEEPSEEK),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        sizes(context=196608, dense=False) | experts(LOCAL, "num_experts", width="intermediate_size"),
        SIGMOID | {"qk_norm": True, "norm_topk_prob": True, "qk_norm_projection": True},
        permitted=SIGMOID_KEYS
        | {"use_routing_bias": (None, True), "qk_norm_type": (None, "per_layer"), "shared_intermediate_size": (None, 0)}
        | {"attn_type_list": (None, 1)},
        head_dim=128,
        ahead=True,
        rope=RopeKeys(5e6, fraction=Key("rotary_dim", 1.0, other="partial_rotary_factor")),
        parts=(parts.ListsOfOneValue(("attn_type_list",)),),
        tensors=Tensors(sparse=(*rows.MIXTRAL, rows.correction("block_sparse_moe"))),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        sizes(eps=1e-5, context=131072, tied=True) | experts("moe_num_experts", "", active="moe_k"),
        {"norm_topk_prob": True, "router.correction_bias": True, "shared_expert_gate": False, "rope_interleaved": True},
        permitted={"use_bias": (None, False), "moe_layer_interval": (None, 1), "moe_gate_act": (None,)}
        | {"moe_gate": (None, "topk"), "moe_use_aux_free": (None, True), "moe_norm_min": (None, 1e-12)},
        ahead=True,
        rope=RopeKeys(5e5),
        parts=(parts.LeadingDense(1, "moe_layer_start_index"), parts.SharedExperts(2, "moe_num_shared_experts")),
        tensors=Tensors(sparse=rows.ERNIE),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        sizes(eps=1e-5, context=2048, dense=False)
        | experts(active="moe_topk", width="intermediate_size")
        | {"shared_expert_intermediate_size": Key("intermediate_size")}
        | same(attention_bias=False),
        {"qk_norm": True, "norm_topk_prob": True, "qk_norm_after_rope": True, "shared_expert_gate": False},
        permitted={"num_shared_expert": (None, 1), "use_mixed_mlp_moe": (None, True), "mlp_bias": (None, False)}
        | {"use_cla": (None, False), "use_mla": (None, False), "moe_layer_num_skipped": (None, 0)}
        | {"norm_type": (None, "rms", "hf_rms"), "position_embedding_xdrope": (None, False)}
        | {"group_limited_greedy": (None, False), "routed_scaling_factor": (None, 1, False)},
        doubles={"moe_intermediate_size": "intermediate_size"},
        # Its "dynamic" has an alpha, and does not depend on the length.
        rope=RopeKeys(types=("yarn", "llama3", "linear", "dynamic")),
        parts=(parts.ListsOfOneValue(("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size")),),
        tensors=Tensors(layer=rows.HUNYUAN_LAYER, sparse=rows.HUNYUAN),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        sizes(eps=1e-5, context=2048) | same(attention_bias=False),
        {"qk_norm": True, "qk_norm_projection": True, "norm_place": "after"},
        has_head_dim=False,
        tensors=Tensors(layer=rows.NORMS_AFTER),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        sizes(eps=1e-5, context=2048) | same(attention_bias=False),
        {"qk_norm": True, "qk_norm_projection": True, "norm_place": "after"},
        has_head_dim=False,
        rope=TwoRopes(5e5, sliding_theta=5e5),
        layers=layer_lists.Window(4096, every=4),
        tensors=Tensors(layer=rows.NORMS_AFTER),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        sizes(eps=1e-5, context=2048),
        QK_NORM | {"norm_place": "after"},
        permitted={"sliding_window_pattern": (None, 0, 4, "LLLG")},
        layers=layer_lists.Window(4096, every=4),
        parts=(layer_lists.RopeInWindows(),),
        tensors=Tensors(layer=rows.NORMS_AFTER),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        sizes(context=131072, tied=True) | same(attention_bias=False, query_pre_attn_scalar=256),
        QK_NORM | {"norm_place": "around", "norm_plus_one": True, "activation": "gelu_tanh", "scale_embedding": True},
        permitted={"hidden_activation": (None, GELU), "hidden_act": (None, GELU)}
        | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}
        | {"use_bidirectional_attention": (None, False), "sliding_window_pattern": (None, 6)},
        harmless=("cache_implementation", "_sliding_window_pattern"),
        head_dim=256,
        rope=TwoRopes(1e6, sliding_theta=1e4, sliding_key="rope_local_base_freq"),
        layers=layer_lists.Window(4096, every=6),
        tensors=Tensors(layer=rows.NORMS_AROUND),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        sizes(context=131072, dense=False, tied=True)
        | {"global_heads.head_dim": Key("global_head_dim", 512)}
        | {"global_heads.key_heads": Key("num_global_key_value_heads")}
        | {"global_heads.keys_as_values": Key("attention_k_eq_v", False)}
        | {"logit_cap": Key("final_logit_softcapping", 0.0, null=True), "num_experts": Key("num_experts", 0, null=True)}
        | {"num_experts_per_tok": Key("top_k_experts", 0, null=True)}
        | {"moe_intermediate_size": Key("moe_intermediate_size", 0, null=True)}
        | {"shared_expert_intermediate_size": Key("intermediate_size")}
        | same(attention_bias=False),
        QK_NORM
        | {"norm_place": "around", "activation": "gelu_tanh", "scale_embedding": True, "multipliers.attention": 1.0}
        | {"value_norm": True, "layer_scale": True}
        | {"normed_experts": True, "norm_topk_prob": True, "shared_expert_gate": False},
        permitted={"hidden_activation": (None, GELU), "hidden_act": (None, GELU)}
        | {"use_bidirectional_attention": (None, "vision"), "num_kv_shared_layers": (None, 0)}
        | {"hidden_size_per_layer_input": (0,), "use_double_wide_mlp": (None, False)},
        assumed={"hidden_size_per_layer_input": 256},
        written={"hidden_size_per_layer_input": 0},
        harmless=("vocab_size_per_layer_input",),
        head_dim=256,
        rope=TwoRopes(
            1e6,
            types=("proportional",),
            default={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            sliding_theta=1e4,
        ),
        layers=layer_lists.Window(512, every=6),
        parts=(
            parts.ExpertSwitch(),
            parts.SharedAlone(("moe_intermediate_size", "intermediate_size")),
            parts.GlobalHeadLists(),
        ),
        tensors=Tensors(layer=rows.GEMMA4_LAYER, sparse=rows.GEMMA4_SPARSE),
        wrapper=("gemma4", "Gemma4ForConditionalGeneration"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        sizes(eps=1e-5, context=131072, dense=False)
        | experts(LOCAL, "num_experts", width="intermediate_size")
        | same(attention_bias=True),
        {"norm_topk_prob": True, "attention_sinks": True, "expert_bias": True},
        permitted={"swiglu_limit": (None, 7), "swiglu_alpha": (None, 1.702)},
        harmless=("experts_per_token", "initial_context_length"),
        head_dim=64,
        rope=RopeKeys(
            1.5e5,
            default={
                **{"rope_type": "yarn", "factor": 32, "truncate": False, "original_max_position_embeddings": 4096},
                **{"beta_fast": 32.0, "beta_slow": 1.0},  # vLLM has no defaults of these
            },
        ),
        layers=layer_lists.Window(128, every=2),
        tensors=Tensors(sparse=rows.GPT_OSS),
        quant_method="mxfp4",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        sizes(eps=1e-5, context=4096, dense=False)
        | experts(width="intermediate_size")
        | same(norm_topk_prob=False, attention_bias=False),
        {"qk_norm": True, "qk_norm_projection": True},
        permitted={"clip_qkv": (None,)},
        has_head_dim=False,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        sizes() | experts() | STEPS | same(norm_topk_prob=True, shared_expert_intermediate_size=512) | keys.DELTA,
        GATED,
        permitted=GATED_KEYS,
        head_dim=256,
        ahead=True,
        rope=DELTA_ROPE,
        layers=layer_lists.DeltaLayers(),
        tensors=Tensors(layer=rows.QWEN3_NEXT_LAYER, sparse=(*rows.SPARSE, *rows.GATED_EXPERT)),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        sizes() | keys.DELTA,
        GATED,
        permitted=GATED_KEYS,
        head_dim=256,
        ahead=True,
        rope=DELTA_ROPE,
        layers=layer_lists.DeltaLayers(),
        tensors=Tensors(layer=rows.QWEN3_5_LAYER),
        wrapper=("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        sizes(dense=False) | experts() | same(shared_expert_intermediate_size=REQUIRED) | keys.DELTA,
        GATED | {"norm_topk_prob": True},
        permitted=GATED_KEYS,
        head_dim=256,
        ahead=True,
        rope=DELTA_ROPE,
        layers=layer_lists.DeltaLayers(),
        tensors=Tensors(layer=rows.QWEN3_5_LAYER, sparse=(*rows.SPARSE, *rows.GATED_EXPERT)),
        wrapper=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ),
}

# The family and class of checkpoints with a vision tower, by the `model_type` of the whole checkpoint.
WRAPPERS = {each.wrapper[0]: (name, each.wrapper[1]) for name, each in FAMILIES.items() if each.wrapper is not None}
# The families of model_types that share another family's code.
ALIASES = {alias: name for name, each in FAMILIES.items() for alias in each.aliases}
ALIASES |= {wrapper: text for wrapper, (text, _) in WRAPPERS.items()}
