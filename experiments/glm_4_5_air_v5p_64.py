"""GLM-4.5-Air (106B) by GSPO on 64 chips of v5p (v5p:4x4x4, Google's v5p-128): responses of up to 7,168 tokens.

A token's cache is twice that of Qwen3-30B-A3B: half as many prompts fit.
Everything else as in qwen3_30b_a3b_v5p_64.py. Compiled for this topology (README.md), never trained.

Run: gspax train experiments/glm_4_5_air_v5p_64.py --workdir runs/glm_4_5_air (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5p_64 import Qwen3Chat
from qwen3_30b_a3b_v5p_64 import experiment as qwen3

from gspax.config import ModelConfig, Router, Sampling

CHECKPOINT = "zai-org/GLM-4.5-Air"

model = ModelConfig(
    vocab_size=151552,
    hidden_size=4096,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=False,
    qkv_bias=True,
    intermediate_size=10944,
    mlp_only_layers=(0,),
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=1408,
    shared_expert_gate=False,
    router=Router(scoring="sigmoid", correction_bias=True),
    rms_norm_eps=1e-5,
    rope_fraction=0.5,
    max_position_embeddings=131072,
    dtype="bfloat16",
    remat="full",
    checkpoint=CHECKPOINT,
)

experiment = replace(
    qwen3,
    name="glm_4_5_air_v5p_64",
    model=model,
    tokenizer=Qwen3Chat(CHECKPOINT, vocab_size=151365, stop_ids=(151336, 151329, 151338)),
    sampling=Sampling(prompts=64, group=16, max_prompt_tokens=1024, max_tokens=7168),
)
