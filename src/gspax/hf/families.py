"""How the checkpoints of each `model_type` describe a model: tables that `hf.config_json` reads and writes with.

This module imports no accelerator code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gspax.data.files import Json

Keys = dict[str, tuple[str, ...]]
REQUIRED = object()  # no default for an absent key
COPIED: dict[str, object] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": REQUIRED,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
}
COPIED_OF_EXPERTS: dict[str, object] = {
    "num_experts_per_tok": REQUIRED,
    "moe_intermediate_size": REQUIRED,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
NUM_EXPERTS: dict[str, object] = {"num_experts": REQUIRED}
EXPERT_KEYS: Keys = {"num_experts": ("num_experts", "num_local_experts")}
# Of families without dense layers, whose `intermediate_size` is the experts' width.
ALL_SPARSE = {"moe_intermediate_size" if name == "intermediate_size" else name: COPIED[name] for name in COPIED}
QWEN3: dict[str, Json] = {"qk_norm": True, "qkv_bias": False}
PLAIN: dict[str, Json] = {"qk_norm": False, "qkv_bias": False}
# The router of DeepSeek-V3 and of those after it.
SIGMOID: dict[str, Json] = {"router.scoring": "sigmoid", "router.correction_bias": True}
GROUPS: dict[str, object] = {"router.groups": 1, "router.top_groups": 1, "router.scale": 1.0}
GROUP_KEYS: Keys = {
    "router.groups": ("n_group",),
    "router.top_groups": ("topk_group",),
    "router.scale": ("routed_scaling_factor",),
}
ROUTED: Keys = {"num_experts": ("n_routed_experts", "num_local_experts")}
SIGMOID_KEYS: dict[str, tuple[Json, ...]] = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
GELU = "gelu_pytorch_tanh"
LATENT: dict[str, object] = dict.fromkeys(
    ("head_dim", "latent.rank", "latent.query_rank", "latent.nope_dim", "latent.value_dim"), REQUIRED
)
LATENT_KEYS: Keys = {
    "head_dim": ("qk_rope_head_dim",),
    "latent.rank": ("kv_lora_rank",),
    "latent.query_rank": ("q_lora_rank",),
    "latent.nope_dim": ("qk_nope_head_dim",),
    "latent.value_dim": ("v_head_dim",),
}
PLAIN_LATENT: dict[str, Json] = PLAIN | {"attention_bias": False, "shared_expert_gate": False}
# Computed from others, or of a loss in training.
BESIDE_LATENT = ("qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")


def _code(version: str) -> dict[str, Json]:
    """The code that comes with the files of DeepSeek, which became transformers' own classes."""
    return {
        "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
        "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
    }


# Qwen3-Next and Qwen3.5: three layers of four have a gated delta net, unless the file says which.
DELTA_KEYS: Keys = {
    "delta.key_heads": ("linear_num_key_heads",),
    "delta.value_heads": ("linear_num_value_heads",),
    "delta.key_dim": ("linear_key_head_dim",),
    "delta.value_dim": ("linear_value_head_dim",),
    "delta.taps": ("linear_conv_kernel_dim",),
    "rope_fraction": ("partial_rotary_factor",),
}
DELTA: dict[str, object] = {"delta.key_heads": 16, "delta.value_heads": 32, "delta.key_dim": 128} | {
    **{"delta.value_dim": 128, "delta.taps": 4, "rope_fraction": 0.25, "attention_bias": False}
}
GATED: dict[str, Json] = QWEN3 | {"attention_gate": True, "norm_plus_one": True}
GATED_KEYS: dict[str, tuple[Json, ...]] = {
    **{"attn_output_gate": (None, True), "output_gate_type": (None, "swish"), "mamba_ssm_dtype": (None, "float32")},
    "mlp_only_layers": (None, list[Json]()),
}
OF_MTP = (  # the keys of layers that predict several tokens ahead, which are not run
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)
# Of the first files of Phi-3: what became transformers' own class.
PHI3_CODE: Json = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


@dataclass(frozen=True)
class Family:
    """How the checkpoints of one `model_type` describe a model.

    A field of `ModelConfig` that is neither copied nor implied has its default in all models of the family. Fields of
    the router are written `router.scale`.
    """

    architecture: str
    copied: dict[str, object]  # fields of ModelConfig that have a key, with the default of an absent one
    implied: dict[str, Json]  # fields of ModelConfig that all models of the family share
    keys: Keys = field(default_factory=dict)  # of fields with another name; the first is written
    permitted: dict[str, tuple[Json, ...]] = field(default_factory=dict)  # further keys, and the only values of each
    head_dim: int = 0  # of a file without one; 0: hidden_size / num_attention_heads
    has_head_dim: bool = True  # False: its files have no such key, unless the size is another than that
    harmless: tuple[str, ...] = ()  # further keys that do not affect what gspax computes
    # Which layers a window is on: those that `layer_types` or `max_window_layers` says, if the switch
    # `use_sliding_window` is on; all layers, if there is one; none; or those that `layer_types` says, or all but every
    # n-th layer.
    window: Literal["switch", "all", "none"] | int = "switch"
    sliding_window: int = 0  # of a file without the key, with window "all" or a number
    theta: float = 1e4  # the RoPE base of a file without one
    rope: dict[str, Json] = field(default_factory=dict)  # `rope_scaling` of a file without it
    sliding_theta: float = 0.0  # RoPE base of the layers with a window, where these have a RoPE of their own
    # Keys with the number of leading layers without experts, and with that of shared experts, each as wide as the
    # others; and what a file without them has.
    dense_layers: tuple[str, object] | None = None
    shared_experts: tuple[str, object] | None = None
    dense_or_sparse: str = ""  # a key that says the same as that of leading layers, by layer
    ungrouped: Json = None  # the value of `topk_method` with which its router ignores groups; None: there is none
    null: tuple[str, ...] = ()  # fields whose 0 is a null in its files
    delta: bool = False  # it has gated delta nets, in the layers that `layer_types` says
    by_layer: tuple[str, ...] = ()  # keys that may hold a list with the same number for each layer
    ropes: tuple[str, ...] = ("yarn", "llama3", "linear")  # its rope_types other than "default"
    quantized: str = ""  # the `quant_method` of its files, which are read
    ahead: bool = False  # its files may have layers that predict several tokens ahead (MTP), which are copied
    written: dict[str, Json] = field(default_factory=dict)  # further keys of an export

    @property
    def experts(self) -> bool:
        """Whether the family's models have experts."""
        return "num_experts" in self.copied

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The keys that hold a field."""
        return self.keys.get(name, (name,))


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", COPIED | {"attention_bias": False}, QWEN3, head_dim=128),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        COPIED | COPIED_OF_EXPERTS | {"attention_bias": False} | NUM_EXPERTS,
        QWEN3,
        keys=EXPERT_KEYS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        COPIED | COPIED_OF_EXPERTS | {"shared_expert_intermediate_size": REQUIRED, "qkv_bias": True} | NUM_EXPERTS,
        {"qk_norm": False, "attention_bias": False},
        keys=EXPERT_KEYS,
        has_head_dim=False,
        window="none",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
        | NUM_EXPERTS,
        PLAIN | {"attention_bias": False, "norm_topk_prob": True},
        keys={
            "num_experts": ("num_local_experts", "num_experts"),
            "moe_intermediate_size": ("intermediate_size",),
        },
        window="all",
        theta=1e6,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        COPIED,
        {"qk_norm": False, "qkv_bias": True, "attention_bias": False},
        permitted={"use_mrope": (None, False)},
        has_head_dim=False,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        COPIED | {"attention_bias": False, "max_position_embeddings": 2048},
        PLAIN,
        permitted={"mlp_bias": (None, False)},
        window="none",
    ),
    "mistral": Family(
        "MistralForCausalLM",
        COPIED | {"max_position_embeddings": 131072},
        PLAIN | {"attention_bias": False},
        window="all",
        sliding_window=4096,
    ),
    "phi3": Family(  # and Phi-4
        "Phi3ForCausalLM",
        COPIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_fraction": 1.0},
        PLAIN | {"attention_bias": False},
        keys={"rope_fraction": ("partial_rotary_factor",)},
        permitted={"resid_pdrop": (0,), "embd_pdrop": (0,), "auto_map": (None, PHI3_CODE)},
        harmless=("original_max_position_embeddings",),  # of "longrope"
        has_head_dim=False,
        window="all",
        ropes=(),
        written={"pad_token_id": None},  # whose default a small vocabulary does not have
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "norm_topk_prob": True}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "qk_norm": False, "qkv_bias": False}
        | {"rope_fraction": 0.5}
        | GROUPS
        | NUM_EXPERTS,
        SIGMOID | {"attention_bias": False, "shared_expert_gate": False},
        keys=GROUP_KEYS
        | ROUTED
        | {"qk_norm": ("use_qk_norm",), "qkv_bias": ("attention_bias",), "rope_fraction": ("partial_rotary_factor",)},
        permitted=SIGMOID_KEYS,
        window="none",
        dense_layers=("first_k_dense_replace", 1),
        shared_experts=("n_shared_experts", 1),
        ahead=True,
        written={"num_nextn_predict_layers": 0},
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "norm_topk_prob": False}
        | {"max_position_embeddings": 2048, "attention_bias": False}
        | GROUPS
        | NUM_EXPERTS,
        SIGMOID | QWEN3 | {"shared_expert_gate": False},
        keys=GROUP_KEYS | ROUTED,
        permitted=SIGMOID_KEYS | {"moe_layer_freq": (None, 1)},
        window="none",
        dense_layers=("first_k_dense_replace", 0),
        shared_experts=("n_shared_experts", REQUIRED),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "max_position_embeddings": 2048}
        | (LATENT | GROUPS | NUM_EXPERTS),
        PLAIN_LATENT | {"norm_topk_prob": False, "rope_interleaved": True, "router.group_best": 1},
        keys=LATENT_KEYS | GROUP_KEYS | {"num_experts": ("n_routed_experts", "num_experts")},
        permitted={"auto_map": (None, _code("V2")), "scoring_func": (None, "softmax"), "moe_layer_freq": (None, 1)}
        | {"topk_method": (None, "greedy", "group_limited_greedy"), "mlp_bias": (None, False)},
        harmless=BESIDE_LATENT,
        window="none",
        dense_layers=("first_k_dense_replace", 0),
        shared_experts=("n_shared_experts", 2),
        ungrouped="greedy",
        null=("latent.query_rank",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "norm_topk_prob": True}
        | {"max_position_embeddings": 4096, "rope_interleaved": True}
        | {"router.groups": 8, "router.top_groups": 4, "router.scale": 2.5}
        | (LATENT | NUM_EXPERTS),
        SIGMOID | PLAIN_LATENT,
        keys=LATENT_KEYS | GROUP_KEYS | ROUTED | {"rope_interleaved": ("rope_interleave",)},
        permitted=SIGMOID_KEYS | {"auto_map": (None, _code("V3")), "moe_layer_freq": (None, 1)},
        harmless=BESIDE_LATENT,
        window="none",
        dense_layers=("first_k_dense_replace", 3),
        shared_experts=("n_shared_experts", 1),
        null=("latent.query_rank",),
        ahead=True,
        written={"num_nextn_predict_layers": 0},
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "norm_topk_prob": True}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "rope_interleaved": True}
        | (LATENT | GROUPS | NUM_EXPERTS | {"router.scale": 1.8}),
        SIGMOID | PLAIN_LATENT,
        keys=LATENT_KEYS | GROUP_KEYS | ROUTED | {"rope_interleaved": ("rope_interleave",)},
        permitted=SIGMOID_KEYS,
        harmless=BESIDE_LATENT,
        window="none",
        dense_layers=("first_k_dense_replace", 1),
        shared_experts=("n_shared_experts", 1),
        dense_or_sparse="mlp_layer_types",
        null=("latent.query_rank",),
        ahead=True,
        written={"num_nextn_predict_layers": 0},
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "max_position_embeddings": 196608, "rope_fraction": 1.0}
        | NUM_EXPERTS,
        SIGMOID | QWEN3 | {"attention_bias": False, "norm_topk_prob": True, "qk_norm_projection": True},
        keys={
            "num_experts": ("num_local_experts", "num_experts"),
            "moe_intermediate_size": ("intermediate_size",),
            "rope_fraction": ("rotary_dim", "partial_rotary_factor"),
        },
        permitted=SIGMOID_KEYS
        | {"use_routing_bias": (None, True), "qk_norm_type": (None, "per_layer"), "shared_intermediate_size": (None, 0)}
        | {"attn_type_list": (None, 1)},
        head_dim=128,
        window="none",
        theta=5e6,
        by_layer=("attn_type_list",),
        ahead=True,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        COPIED
        | {"num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": True}
        | NUM_EXPERTS,
        PLAIN
        | {"attention_bias": False, "norm_topk_prob": True, "router.correction_bias": True}
        | {"shared_expert_gate": False, "rope_interleaved": True},
        keys={"num_experts": ("moe_num_experts",), "num_experts_per_tok": ("moe_k",)},
        permitted={"use_bias": (None, False), "moe_layer_interval": (None, 1), "moe_gate_act": (None,)}
        | {"moe_gate": (None, "topk"), "moe_use_aux_free": (None, True), "moe_norm_min": (None, 1e-12)},
        window="none",
        theta=5e5,
        dense_layers=("moe_layer_start_index", 1),
        shared_experts=("moe_num_shared_experts", 2),
        ahead=True,
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "shared_expert_intermediate_size": REQUIRED}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False}
        | NUM_EXPERTS,
        QWEN3 | {"norm_topk_prob": True, "qk_norm_after_rope": True, "shared_expert_gate": False},
        keys={
            "num_experts": ("num_experts", "num_local_experts"),
            "num_experts_per_tok": ("moe_topk",),
            "moe_intermediate_size": ("intermediate_size",),
            "shared_expert_intermediate_size": ("intermediate_size",),
        },
        permitted={"num_shared_expert": (None, 1), "use_mixed_mlp_moe": (None, True), "mlp_bias": (None, False)}
        | {"use_cla": (None, False), "use_mla": (None, False), "moe_layer_num_skipped": (None, 0)}
        | {"norm_type": (None, "rms", "hf_rms"), "position_embedding_xdrope": (None, False)}
        | {"group_limited_greedy": (None, False), "routed_scaling_factor": (None, 1, False)},
        window="none",
        by_layer=("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"),
        ropes=("yarn", "llama3", "linear", "dynamic"),  # its "dynamic" has an alpha, and does not depend on the length
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        COPIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
        QWEN3 | {"qk_norm_projection": True, "norm_place": "after"},
        has_head_dim=False,
        window="none",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        COPIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
        QWEN3 | {"qk_norm_projection": True, "norm_place": "after"},
        has_head_dim=False,
        window=4,
        sliding_window=4096,
        theta=5e5,
        sliding_theta=5e5,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        COPIED
        | {"max_position_embeddings": 131072, "tie_word_embeddings": True, "attention_bias": False}
        | {"query_pre_attn_scalar": 256},
        QWEN3 | {"norm_place": "around", "norm_plus_one": True} | {"activation": "gelu_tanh", "scale_embedding": True},
        keys={"sliding_rope_theta": ("rope_local_base_freq",)},
        permitted={"hidden_activation": (None, GELU), "hidden_act": (None, GELU)}
        | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}
        | {"use_bidirectional_attention": (None, False), "sliding_window_pattern": (None, 6)},
        harmless=("rope_local_base_freq", "cache_implementation", "_sliding_window_pattern"),
        head_dim=256,
        window=6,
        sliding_window=4096,
        theta=1e6,
        sliding_theta=1e4,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "attention_bias": True}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
        | NUM_EXPERTS,
        PLAIN | {"norm_topk_prob": True, "attention_sinks": True, "expert_bias": True},
        keys={
            "num_experts": ("num_local_experts", "num_experts"),
            "moe_intermediate_size": ("intermediate_size",),
        },
        permitted={"swiglu_limit": (None, 7), "swiglu_alpha": (None, 1.702)},
        harmless=("experts_per_token", "initial_context_length"),
        head_dim=64,
        window=2,
        sliding_window=128,
        theta=1.5e5,
        rope={"rope_type": "yarn", "factor": 32, "truncate": False, "original_max_position_embeddings": 4096},
        quantized="mxfp4",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "norm_topk_prob": False}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "attention_bias": False}
        | NUM_EXPERTS,
        QWEN3 | {"qk_norm_projection": True},
        keys=EXPERT_KEYS | {"moe_intermediate_size": ("intermediate_size",)},
        permitted={"clip_qkv": (None,)},
        has_head_dim=False,
        window="none",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        COPIED
        | COPIED_OF_EXPERTS
        | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True}
        | DELTA
        | NUM_EXPERTS,
        GATED,
        keys=EXPERT_KEYS | DELTA_KEYS,
        permitted=GATED_KEYS,
        head_dim=256,
        window="none",
        delta=True,
        ahead=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        COPIED | DELTA,
        GATED,
        keys=DELTA_KEYS,
        permitted=GATED_KEYS,
        head_dim=256,
        window="none",
        delta=True,
        ahead=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        ALL_SPARSE
        | {"num_experts_per_tok": REQUIRED, "shared_expert_intermediate_size": REQUIRED}
        | DELTA
        | NUM_EXPERTS,
        GATED | {"norm_topk_prob": True},
        keys=EXPERT_KEYS | DELTA_KEYS,
        permitted=GATED_KEYS,
        head_dim=256,
        window="none",
        delta=True,
        ahead=True,
    ),
}

# The text models of checkpoints with a vision tower, by the `model_type` of the whole, and its class.
WRAPPERS = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
}
ALIASES = {  # model_types of files that are another family's in all but this name, or around it
    "kimi_k2": "deepseek_v3",
    **{name: text for name, (text, _) in WRAPPERS.items()},
}

_MISSING: dict[str, tuple[str, ...]] = {
    "a scale of queries by position": ("mistral4",),
    "sparse attention": ("deepseek_v32", "glm_moe_dsa"),
    "Kimi delta attention": ("kimi_linear",),
    "lightning attention": ("minimax", "bailing_hybrid"),
    "attention in chunks": ("llama4_text",),
    "a cap on attention scores": ("gemma2", "vaultgemma"),
    "RoPE on some layers only": ("exaone4", "exaone_moe", "smollm3"),
    "LayerNorm": (
        *("cohere", "cohere2", "starcoder2", "stablelm", "phi", "olmo", "nemotron", "dbrx", "persimmon"),
        *("gpt2", "gptj", "gpt_neox", "falcon", "opt", "bloom", "mpt"),
    ),
    "a multiplier of residuals": ("granite", "granite_swa", "granitemoe", "granitemoeshared"),
    "squared ReLU": ("arcee",),
    "an embedding for each layer": ("gemma3n_text", "gemma4_text"),
    "a router that masks experts between its two choices": ("phimoe",),
    "an expert without weights": ("longcat_flash",),
    "hyper-connections": ("deepseek_v4",),
    "a head size for each kind of layers": ("mimo_v2_flash",),
    "a short convolution": ("lfm2", "lfm2_moe"),
    "a state space layer (Mamba)": (
        *("nemotron_h", "granitemoehybrid", "falcon_h1", "falcon_mamba"),
        *("jamba", "bamba", "zamba", "zamba2", "mamba", "mamba2"),
    ),
    "a recurrent layer": ("recurrent_gemma", "rwkv", "xlstm"),
}
MISSING = {name: part for part, names in _MISSING.items() for name in names}  # what gspax does not have, by model_type
TOWERS = {"vision_config": "a vision tower", "audio_config": "an audio tower"}  # of other families than `WRAPPERS`
