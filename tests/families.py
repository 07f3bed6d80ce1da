"""One small model of each family, made by transformers' own class, and what is compared with it.

`tests/hf/test_families.py` asserts the comparisons; `tests/parity_table.py` writes them to docs/parity.md.
"""

import contextlib
import io
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from api import (
    Inputs,
    Prompts,
    abstract_params,
    adapters,
    decoding,
    dense,
    export,
    forward,
    make_inference_weights,
    named_leaves,
    pad_replies,
    parameter_count,
    parameters,
    read_config,
    read_metrics,
    read_params,
    sample,
    sampler,
    transformer,
)
from published import load, same_bytes

from gspax.commands.main import main
from gspax.config import Lora, Sampling

SIZES = {
    **{"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 24, "initializer_range": 0.3},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
GLM = {
    **{"head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 12, "first_k_dense_replace": 1},
}
LATENT = GLM | {
    **{"num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 6, "q_lora_rank": 10, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 6, "v_head_dim": 8},
}
YARN = {
    **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3},
    **{"beta_fast": 4, "beta_slow": 1},
}
DELTA = {
    **{"num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "partial_rotary_factor": 0.5},
}
MROPE = {  # one position for each token of a text, three of an image's
    **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000},
    "partial_rotary_factor": 0.25,
}
PUBLISHED_DELTA = {
    **{"full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256, "attention_bias": False},
}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}

GRANITE = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}

SMALL = {  # keys of config.json, by model_type
    "qwen3": SIZES | {"head_dim": 8},
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 20},
    "mixtral": SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "llama": SIZES | {"head_dim": 8, "rope_scaling": LLAMA3, "rope_theta": 500.0},
    "smollm3": SIZES | {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "granite": SIZES | GRANITE,
    "granitemoe": SIZES | GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "granitemoehybrid": SIZES
    | GRANITE
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 20, "mamba_n_heads": 4}
    | {"mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_head": 8, "layer_types": ["mamba", "attention", "mamba"]},
    "nemotron_h": {name: SIZES[name] for name in SIZES if name != "num_hidden_layers"}
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]}
    | {"head_dim": 8, "mamba_num_heads": 4, "n_groups": 2, "ssm_state_size": 6, "mamba_head_dim": 8}
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 3, "topk_group": 2}
    | {"moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 2.5}
    | {"time_step_min": 1e-9},  # transformers takes it for the least step, which the authors' code does not
    "lfm2": SIZES
    | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 4, "conv_bias": True}
    | {"tie_word_embeddings": True},
    "lfm2_moe": SIZES
    | EXPERTS
    | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "conv_bias": True}
    | {"routed_scaling_factor": 1.5},
    "mistral": SIZES | {"head_dim": 8, "sliding_window": 5},
    "phi3": SIZES | {"partial_rotary_factor": 0.5, "sliding_window": 5},
    "glm4_moe": SIZES | GLM | {"attention_bias": True, "use_qk_norm": True},
    "dots1": SIZES | GLM | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "deepseek_v2": SIZES
    | LATENT
    | {"q_lora_rank": None, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"}
    | {"routed_scaling_factor": 2.5, "rope_scaling": YARN},
    "deepseek_v3": SIZES | LATENT | {"n_group": 3, "topk_group": 2, "rope_scaling": YARN},
    "glm4_moe_lite": SIZES | LATENT | {"v_head_dim": 12, "first_k_dense_replace": 1, "rope_interleave": False},
    "minimax_m2": SIZES | {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 6, "num_experts_per_tok": 2},
    "ernie4_5_moe": SIZES
    | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 2},
    "hunyuan_v1_moe": SIZES | {"head_dim": 8, "num_experts": 6, "moe_topk": 2, "rope_scaling": ALPHA},
    "olmo2": SIZES | {"tie_word_embeddings": True},
    "olmo3": SIZES
    | {"num_hidden_layers": 5, "sliding_window": 5, "max_position_embeddings": 64}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "exaone4": SIZES | {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": 5},
    "gemma3_text": SIZES
    | {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 5}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma4_text": SIZES
    | {"num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 1}
    | {"attention_k_eq_v": True, "sliding_window": 5, "final_logit_softcapping": 3.0, "enable_moe_block": True}
    | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
    | {"hidden_size_per_layer_input": 0},
    "gpt_oss": SIZES | {"head_dim": 8, "sliding_window": 5, "num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": SIZES | {"num_experts": 6, "num_experts_per_tok": 2},
    "qwen3_next": SIZES | EXPERTS | DELTA | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    "qwen3_5_text": SIZES | DELTA | {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {name: SIZES[name] for name in SIZES if name != "intermediate_size"}
    | EXPERTS
    | DELTA
    | {"shared_expert_intermediate_size": 20, "hidden_size": 32}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}

KINDS = {  # of layers: a family that has them, and a model of one of each
    "attention": ("llama", {"num_hidden_layers": 1}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 1, "mlp_only_layers": []}),
    "latent attention": ("deepseek_v3", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "delta nets": ("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
}

PUBLISHED = {  # by model_type: the name on the Hub, and its config.json without keys that have their default
    "qwen3": (
        "Qwen/Qwen3-0.6B",
        {
            **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
            "rope_theta": 1000000,
        },
    ),
    "qwen3_moe": (
        "Qwen/Qwen3-30B-A3B",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1000000.0},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        },
    ),
    "qwen2_moe": (
        "Qwen/Qwen1.5-MoE-A2.7B",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "rope_theta": 1000000.0},
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "mixtral": (
        "mistralai/Mixtral-8x7B-v0.1",
        {
            **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1000000.0},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        },
    ),
    "qwen2": (
        "Qwen/Qwen2.5-7B-Instruct",
        {
            **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
            **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_window_layers": 28, "rope_theta": 1000000.0},
            **{"sliding_window": 131072, "use_sliding_window": False},
        },
    ),
    "llama": (
        "meta-llama/Llama-3.1-8B-Instruct",
        {
            **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
            **{"max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1, "attention_bias": False},
            "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
        },
    ),
    "smollm3": (
        "HuggingFaceTB/SmolLM3-3B",
        {
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 5000000.0, "rope_scaling": None},
            **{"max_position_embeddings": 65536, "no_rope_layer_interval": 4, "max_window_layers": 28},
            **{"no_rope_layers": [1, 1, 1, 0] * 9, "mlp_bias": False, "attention_bias": False, "pretraining_tp": 2},
            **{"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 36},
        },
    ),
    "granite": (
        "ibm-granite/granite-3.3-2b-instruct",
        {
            **{"vocab_size": 49159, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0},
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "max_position_embeddings": 131072, "tie_word_embeddings": True},
            **{"mlp_bias": False, "attention_bias": False, "rope_scaling": None},
        },
    ),
    "granitemoe": (
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        {
            **{"vocab_size": 49155, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1500000.0},
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
            **{"logits_scaling": 6.0, "max_position_embeddings": 131072, "tie_word_embeddings": True},
            **{"num_local_experts": 32, "num_experts_per_tok": 8, "attention_bias": False, "rope_scaling": None},
        },
    ),
    "granitemoehybrid": (
        "ibm-granite/granite-4.0-h-tiny",
        {
            **{"vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 40},
            **{"num_attention_heads": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000},
            **{"embedding_multiplier": 12, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22},
            **{"logits_scaling": 6, "max_position_embeddings": 131072, "tie_word_embeddings": True},
            **{"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024},
            **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64},
            **{"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48},
            **{"mamba_proj_bias": False, "normalization_function": "rmsnorm", "init_method": "mup"},
            **{"position_embedding_type": "nope", "rope_scaling": None, "initializer_range": 0.1},
            "layer_types": [*["mamba"] * 5, *["attention", *["mamba"] * 9] * 3, "attention", *["mamba"] * 4],
        },
    ),
    "nemotron_h": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {
            **{"vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52},
            **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "layer_norm_epsilon": 1e-05},
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            **{"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
            **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_group": 1},
            **{"topk_group": 1, "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "expand": 2},
            **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "norm_eps": 1e-05, "chunk_size": 128},
            **{"max_position_embeddings": 262144, "rope_theta": 10000, "partial_rotary_factor": 1.0},
            **{"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "residual_in_fp32": False},
            **{"rescale_prenorm_residual": True, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"},
            **{"mamba_ssm_cache_dtype": "float32", "use_bias": False, "use_conv_bias": True, "mlp_bias": False},
            **{"mamba_proj_bias": False, "hidden_dropout": 0.0, "num_logits_to_keep": 1, "use_mamba_kernels": True},
            **{"sliding_window": None, "attention_bias": False, "tie_word_embeddings": False},
        },
    ),
    "lfm2": (
        "LiquidAI/LFM2-1.2B",
        {
            **{"vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16, "max_position_embeddings": 128000},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_heads": 32, "rope_theta": 1000000.0},
            **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-05},
            **{"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_multiple_of": 256},
            **{"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-05},
            **{"block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True},
            **{"conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "use_pos_enc": True},
        },
    ),
    "lfm2_moe": (
        "LiquidAI/LFM2-8B-A1B",
        {
            **{"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000},
            **{"moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2},
            **{"layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]},
            **{"conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-05, "rope_theta": 1000000.0},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        },
    ),
    "mistral": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        {
            **{"vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
            **{"max_position_embeddings": 32768, "sliding_window": None},
        },
    ),
    "phi3": (
        "microsoft/phi-4",
        {
            **{"vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40},
            **{"num_attention_heads": 40, "num_key_value_heads": 10, "rms_norm_eps": 1e-5, "rope_theta": 250000},
            **{"max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "sliding_window": None},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_bias": False, "rope_scaling": None},
            **{"pad_token_id": 100349, "bos_token_id": 100257, "eos_token_id": 100265},
        },
    ),
    "glm4_moe": (
        "zai-org/GLM-4.5-Air",
        {
            **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46},
            **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000},
            **{"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
            **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
            **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            **{"routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072},
        },
    ),
    "dots1": (
        "rednote-hilab/dots.llm1.inst",
        {
            **{"vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 62},
            **{"num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000000},
            **{"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": True},
            **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
            **{"max_position_embeddings": 32768, "scoring_func": "sigmoid", "attention_bias": False},
        },
    ),
    "deepseek_v2": (
        "deepseek-ai/DeepSeek-V2-Lite",
        {
            **{"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1408},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
            **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "seq_aux": True},
            **{"routed_scaling_factor": 1.0, "norm_topk_prob": False, "moe_layer_freq": 1, "aux_loss_alpha": 0.001},
            **{"max_position_embeddings": 163840, "rope_theta": 10000, "attention_bias": False, "pretraining_tp": 1},
            "rope_scaling": {
                **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32},
                **{"beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
            },
        },
    ),
    "deepseek_v3": (
        "moonshotai/Moonlight-16B-A3B",
        {
            **{"vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1408},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
            **{"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "seq_aux": True},
            **{"routed_scaling_factor": 2.446, "norm_topk_prob": True, "moe_layer_freq": 1, "ep_size": 1},
            **{"max_position_embeddings": 8192, "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "rope_scaling": None},
            **{"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.001, "attention_bias": False, "pretraining_tp": 1},
        },
    ),
    "glm4_moe_lite": (
        "zai-org/GLM-4.7-Flash",
        {
            **{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47},
            **{"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512},
            **{"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "moe_intermediate_size": 1536},
            **{"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
            **{"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 1.8},
            **{"norm_topk_prob": True, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "rope_scaling": None},
            **{"max_position_embeddings": 202752, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1},
        },
    ),
    "minimax_m2": (
        "MiniMaxAI/MiniMax-M2",
        {
            **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62},
            **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64},
            **{"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "rope_theta": 5000000},
            **{"use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True},
            **{"num_mtp_modules": 3, "mtp_transformer_layers": 1, "shared_intermediate_size": 0},
            "attn_type_list": [1] * 62,
        },
    ),
    "ernie4_5_moe": (
        "baidu/ERNIE-4.5-21B-A3B-PT",
        {
            **{"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28},
            **{"num_attention_heads": 20, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000},
            **{"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "use_bias": False},
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_v1_moe": (
        "tencent/Hunyuan-A13B-Instruct",
        {
            **{"vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 10000.0},
            **{"num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32},
            **{"num_shared_expert": [1] * 32, "rope_scaling": ALPHA, "use_qk_norm": True, "tie_word_embeddings": True},
        },
    ),
    "olmo2": (
        "allenai/OLMo-2-1124-7B",
        {
            **{"vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000},
            **{"max_position_embeddings": 4096, "attention_bias": False},
        },
    ),
    "olmo3": (
        "allenai/Olmo-3-1025-7B",
        {
            **{"vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000},
            **{"max_position_embeddings": 65536, "attention_bias": False, "sliding_window": 4096},
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
    ),
    "exaone4": (
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        {
            **{"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 65536, "rope_theta": 1000000.0, "tie_word_embeddings": True},
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
            **{"sliding_window": None, "layer_types": ["full_attention"] * 30},
        },
    ),
    "gemma3_text": (
        "google/gemma-3-1b-it",
        {
            **{"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
            **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
            **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rope_theta": 1000000},
            **{"rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512},
            **{"sliding_window_pattern": 6, "cache_implementation": "hybrid", "attn_logit_softcapping": None},
        },
    ),
    "gemma4_text": (
        "google/gemma-4-26B-A4B-it",
        {
            **{"vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512},
            **{"num_global_key_value_heads": 2, "attention_k_eq_v": True, "final_logit_softcapping": 30.0},
            **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
            **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144, "sliding_window": 1024},
            **{"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144},
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    ),
    "gpt_oss": (
        "openai/gpt-oss-20b",
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150000},
            **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0},
            **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
            **{"attention_bias": True, "initial_context_length": 4096, "router_aux_loss_coef": 0.9},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            },
        },
    ),
    "olmoe": (
        "allenai/OLMoE-1B-7B-0924",
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
            **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None},
        },
    ),
    "qwen3_next": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        PUBLISHED_DELTA
        | {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "partial_rotary_factor": 0.25},
            **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
            **{"shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "decoder_sparse_step": 1},
            **{"rope_theta": 10000000, "rope_scaling": None, "max_position_embeddings": 262144},
        },
    ),
    "qwen3_5_text": (
        "Qwen/Qwen3.5-27B",
        PUBLISHED_DELTA
        | {
            **{"vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64},
            **{"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
            **{"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
            **{"mtp_use_dedicated_embeddings": False, "mlp_only_layers": [], "max_position_embeddings": 262144},
            "rope_parameters": MROPE,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen/Qwen3.5-35B-A3B",
        PUBLISHED_DELTA
        | {
            **{"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
            **{"num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "attn_output_gate": True},
            **{"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
            **{"max_position_embeddings": 262144, "rope_parameters": MROPE},
        },
    ),
}

CONSTANT = ("inv_freq", "embed_scale")  # buffers that follow from the configuration

apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))


def make_model(model_type, dtype="float32", **changes):
    """A random model of the family's class in transformers; norms, biases and buffers are random too."""
    import torch
    import transformers

    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(model_type, **SMALL[model_type] | changes)
    model = transformers.AutoModelForCausalLM.from_config(
        theirs, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith(CONSTANT):
                mean = any(part in name for part in ("norm", "scal")) * tensor  # ones, or zeros for 1 + w
                tensor.copy_(0.3 * torch.randn_like(tensor) + mean)
    return model


def read(folder):
    """The configuration and the parameters of a checkpoint in gspax."""
    config = read_config(folder)
    return config, read_params(folder, config, abstract_params(config, tiny.one_device()))


def random_tokens(config, *shape):
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)


def our_logits(params, config, tokens_BT):
    hidden_BTD, _ = apply(params, config, tokens_BT, np.ones_like(tokens_BT), mesh=tiny.one_device())
    return np.asarray(transformer.logits(params, hidden_BTD, config.logit_cap))


def their_logits(model, tokens_BT):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens_BT)).logits.float().numpy()


def relative(ours, theirs):
    """The largest difference over the largest value."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def greedy_tokens(params, config, model, steps=24):
    """(gspax's, transformers') greedy tokens after eight prompts, of which the shorter ones are padded in gspax."""
    import torch

    prompts = [tokens[: 9 - 4 * (row % 2)].tolist() for row, tokens in enumerate(random_tokens(config, 8, 9))]
    sampling = Sampling(group=1, max_prompt_tokens=9, max_tokens=steps, temperature=0.0)
    weights = make_inference_weights(params, config, tiny.one_device())
    rollout = sample(weights, prompts, range(len(prompts)), jax.random.key(0), tiny.options(config, sampling))
    ours = [rollout.tokens_BT[row, : len(prompt) + steps].tolist() for row, prompt in enumerate(prompts)]
    quiet = {"do_sample": False, "max_new_tokens": steps, "eos_token_id": None, "pad_token_id": 0}
    longer, shorter = (torch.tensor(prompts[first::2]) for first in (0, 1))  # of one length each, so none is padded
    theirs = [model.generate(ids, attention_mask=torch.ones_like(ids), **quiet).tolist() for ids in (longer, shorter)]
    return ours, [row for pair in zip(*theirs, strict=True) for row in pair]


def differences(params, config, model, folder):
    """The relative differences of the logits, and of a tensor's gradient of the mean log-prob of random tokens.

    Gradients are written as checkpoints, so that tensors of the same names are compared.
    """
    import torch

    tokens_BT = random_tokens(config, 4, 11)

    def loss(params):
        hidden_BTD, _ = transformer.apply(params, config, tokens_BT, np.ones_like(tokens_BT), mesh=tiny.one_device())
        logits_BTV = transformer.logits(params, hidden_BTD, config.logit_cap)
        log_prob_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        return jnp.take_along_axis(log_prob_BTV, tokens_BT[:, 1:, None], axis=-1).mean(), logits_BTV

    gradient, logits_BTV = jax.jit(jax.grad(loss, has_aux=True))(params)
    write(folder / "ours", config, gradient)
    model.zero_grad()
    their_logits_BTV = model(torch.tensor(tokens_BT)).logits
    log_prob = torch.log_softmax(their_logits_BTV[:, :-1], dim=-1)
    log_prob.gather(-1, torch.tensor(tokens_BT[:, 1:, None]).long()).mean().backward()
    tensors = [*model.parameters(), *model.buffers()]  # a state_dict lacks the frequencies of RoPE
    kept = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        model.save_pretrained(folder / "theirs")
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(before)
    ours, theirs = load(folder / "ours"), load(folder / "theirs")
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(each).max() for each in theirs.values())
    scales = {name: max(np.abs(each).max(), 1e-3 * largest) for name, each in theirs.items()}
    largest = max(float(np.abs(ours[name] - each).max() / scales[name]) for name, each in theirs.items())
    return relative(logits_BTV, their_logits_BTV.detach().numpy()), largest


def write(folder, config, params, dtype="float32"):
    """An exported checkpoint."""
    folder.mkdir(exist_ok=True)
    parameters.write_checkpoint(folder, config, named_leaves(params).__getitem__, dtype=dtype)
    return folder


def export_is_equal(model_type, folder, dtype):
    """Whether import and export reproduce the tensors that transformers saves in this dtype, byte for byte.

    Correction biases, which some classes save in bfloat16, are written in float32.
    """
    make_model(model_type, dtype).save_pretrained(folder / "theirs")
    config, params = read(folder / "theirs")
    write(folder / "ours", config, params, dtype)
    theirs = {
        name: tensor.astype(np.float32) if name.endswith(("e_score_correction_bias", "expert_bias")) else tensor
        for name, tensor in load(folder / "theirs").items()
    }
    return same_bytes(load(folder / "ours"), theirs) and read_config(folder / "ours") == config


def lora_difference(params, config, folder):
    """The relative difference of logits between a base with adapters in gspax and its merged export in transformers."""
    import transformers

    lora = Lora(rank=3, alpha=6.0)
    factors = jax.tree.map(
        lambda leaf: 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape),
        adapters.init(config, lora, jax.random.key(1)),
    )
    adapted = adapters.attach_adapters(params, factors, lora)
    tokens_BT = random_tokens(config, 4, 11)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        write(folder, config, dense(adapted)), attn_implementation="eager"
    )
    assert relative(our_logits(params, config, tokens_BT), our_logits(adapted, config, tokens_BT)) > 1e-2
    return relative(our_logits(adapted, config, tokens_BT), their_logits(merged.eval(), tokens_BT))


def packed_difference(params, config):
    """The relative difference of logits between two sequences in one row and each in a row of its own.

    One batch has them all, so one program runs.
    """
    tokens_BT = random_tokens(config, 3, 14)
    segment_BT = np.ones_like(tokens_BT)
    segment_BT[0, 6:] = 2
    for row, part in ((1, slice(6)), (2, slice(6, 14))):
        alone = tokens_BT[0, part]
        tokens_BT[row, : len(alone)], segment_BT[row, len(alone) :] = alone, 0
    hidden_BTD, _ = apply(params, config, tokens_BT, segment_BT, mesh=tiny.one_device())
    packed, first, second = np.asarray(transformer.logits(params, hidden_BTD, config.logit_cap))
    return relative(packed, np.concatenate([first[:6], second[:8]]))


def recurrence_difference(params, config):
    """The relative difference between logits of whole rows and those of tokens decoded one by one after a prompt.

    A delta net runs the rows in chunks, the last 80 tokens of a row in two of them, and the decoded tokens in the steps
    of its recurrence.
    """
    tokens_BT, prompt, mesh = random_tokens(config, 2, 150), 70, tiny.one_device()
    weights, length_B = make_inference_weights(params, config, mesh), np.full(2, prompt, np.int32)
    hidden_BD, prompts, _ = decoding.prefill(weights, config, tokens_BT[:, :prompt], length_B, mesh=mesh)
    cache = decoding.new_cache(prompts, config, slots=2, max_tokens=80, mesh=mesh)

    def step(carry, token_B):
        cache, first_B = carry
        slots = decoding.Slots(length_B, None, first_B, np.ones(2, np.int32))
        hidden_BD, cache, _ = decoding.decode(weights, config, token_B, cache, slots, mesh=mesh)
        return (cache, first_B + 1), decoding.logits(weights, hidden_BD, config.logit_cap)

    run = jax.jit(lambda cache: jax.lax.scan(step, (cache, jnp.zeros(2, jnp.int32)), tokens_BT[:, prompt:].T)[1])
    decoded = jnp.concatenate([decoding.logits(weights, hidden_BD, config.logit_cap)[None], run(cache)]).swapaxes(0, 1)
    return relative(decoded, our_logits(params, config, tokens_BT)[:, prompt - 1 :])


def slots_are_equal(params, config):
    """Whether samples that take one another's slots have the tokens of samples that have slots of their own."""
    prompts = [row.tolist() for row in random_tokens(config, 4, 5)]
    weights, samples = make_inference_weights(params, config, tiny.one_device()), []
    for slots in (0, 2):
        sampling = Sampling(prompts=4, group=2, max_prompt_tokens=5, max_tokens=12, slots=slots)
        options = tiny.options(config, sampling, stop_ids=(0, 1, 2))
        samples.append(np.asarray(sample(weights, prompts, list(range(4)), jax.random.key(3), options).tokens_BT))
    return bool((samples[0] == samples[1]).all())


def conversation_difference(params, config):
    """The largest difference between the log-probs of conversations in three slots and those of a whole forward pass.

    Six conversations of up to three turns take one another's slots, and their replies extend the cache.
    """
    prompts_PS, lengths_P = random_tokens(config, 3, 6), np.array([3, 6, 5], np.int32)
    sampling = Sampling(prompts=3, group=2, max_prompt_tokens=6, max_tokens=32, slots=3)
    options = tiny.options(config, sampling, stop_ids=tuple(range(6)), turns=True)
    weights = make_inference_weights(params, config, tiny.one_device())
    prompts, key, turn_B = Prompts(prompts_PS, lengths_P, np.arange(3, dtype=np.uint32)), jax.random.key(4), np.zeros(6)
    state, progress = sampler.start(weights, prompts, key, options=options)
    while not np.asarray(progress.ended_B).all():
        state, progress = sampler.advance_chunk(weights, state, key, 0, options=options)
        room_B = 31 - np.asarray(progress.length_B)
        takes_B = np.asarray(progress.waiting_B) & (turn_B < 2) & (room_B > 4)
        replies = pad_replies([[7, 9, 8, 7][: 2 + row % 3] if takes_B[row] else [] for row in range(6)])
        state, progress = sampler.resume(weights, state, replies, key, 0, options=options)
        turn_B += takes_B
    assert turn_B.sum() > 3
    rollout = sampler.assemble(prompts_PS, state, options=options)
    length_B1 = np.asarray(rollout.prompt_length_B + rollout.length_B)[:, None]
    segment_BT = (np.arange(rollout.tokens_BT.shape[1])[None] < length_B1).astype(np.int32)
    logp_BT = forward(params, tiny.settings(config), Inputs(rollout.tokens_BT, segment_BT)).logp_BT
    return float(np.abs(np.asarray(rollout.logp_BT - logp_BT))[np.asarray(rollout.mask_BT)].max())


RUN = """
from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Mesh, Optimizer, Sampling, Schedule
from gspax.data import CharTokenizer
from gspax.data.tasks import sort
from gspax.hf import hf


def reward(problem, completion):
    return completion.count("7") / 6


experiment = Experiment(
    name="family",
    model=hf({files!r}),
    data=sort.Problems(min_digits=2, max_digits=4),
    tokenizer=CharTokenizer("0123456789=abcdefghijk"),
    reward=reward,
    advantage=advantages.standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=8, group=8, max_prompt_tokens=5, max_tokens=6),
    optimizer=Optimizer(learning_rate=1e-2),
    schedule=Schedule(steps=20, minibatches=1, checkpoint_every=10),
    evaluation=Evaluation(problems=8),
    mesh=Mesh(data=-1, fsdp=1),  # any number of devices
)
"""


def train(files, folder, steps=20):
    """The mean rewards of the first and the last four steps, and whether a run resumed after half of them is the same.

    Both runs are commands of the program, without a report. They are the same if metrics and exported parameters have
    the same bits.
    """
    (folder / "family.py").write_text(RUN.format(files=str(files)))

    def run(name, *overrides):
        paths = [str(folder / "family.py"), "--workdir", str(folder / name)]
        with contextlib.redirect_stdout(io.StringIO()), mock.patch("gspax.report.run_page.write"):
            assert main(["train", *paths, "--report-to", "none", *overrides]) == 0
        rows = read_metrics(folder / name / "metrics.jsonl")
        return [
            {key: x for key, x in row.items() if not key.startswith(("time/", "cpu/", "perf/"))}
            for row in rows
            if "policy/loss" in row
        ]

    length = f"schedule.steps={steps}"
    whole, _, resumed = run("whole", length), run("parts", f"schedule.steps={steps // 2}"), run("parts", length)
    for name in ("whole", "parts"):
        export.run(folder / name, folder / f"exported_{name}", dtype="float32")
    tensors = [load(folder / f"exported_{name}") for name in ("whole", "parts")]
    rewards = [row["reward/mean"] for row in whole]
    assert len(whole) == steps
    same = whole == resumed and same_bytes(*tensors) and not same_bytes(tensors[0], load(files))
    return float(np.mean(rewards[:4])), float(np.mean(rewards[-4:])), same


def published_counts(model_type, folder):
    """(gspax's, transformers') number of parameters of the family's published configuration."""
    import torch
    import transformers

    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | PUBLISHED[model_type][1]))
    config = read_config(folder)
    with torch.device("meta"), contextlib.suppress(ImportError):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    buffers = sum(each.numel() for name, each in model.named_buffers() if not name.endswith(CONSTANT))
    return parameter_count(config), sum(each.numel() for each in model.parameters()) + buffers
