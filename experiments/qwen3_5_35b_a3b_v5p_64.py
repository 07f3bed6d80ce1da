"""Qwen3.5-35B-A3B by GSPO on 64 chips of v5p (v5p:4x4x4, Google's v5p-128): responses of up to 7,168 tokens.

Three of four layers are gated delta nets, whose state of 2 MB for each row and layer takes the place of keys and
values. The text model alone is trained; a checkpoint's tower and multi-token prediction stay as they are.
Everything else as in qwen3_30b_a3b_v5p_64.py. Compiled for this topology (README.md), never trained.

Run: gspax train experiments/qwen3_5_35b_a3b_v5p_64.py --workdir runs/qwen3_5_35b_a3b (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5p_64 import Qwen3Chat
from qwen3_30b_a3b_v5p_64 import experiment as qwen3

from gspax.config import GatedDelta, ModelConfig

CHECKPOINT = "Qwen/Qwen3.5-35B-A3B"

model = ModelConfig(
    vocab_size=248320,
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    attention_gate=True,
    delta=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    delta_layers=tuple(layer for layer in range(40) if layer % 4 != 3),
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_plus_one=True,
    rope_theta=1e7,
    rope_fraction=0.25,
    max_position_embeddings=262144,
    model_type="qwen3_5_moe_text",
    dtype="bfloat16",
    remat="full",
    checkpoint=CHECKPOINT,
)

experiment = replace(
    qwen3,
    name="qwen3_5_35b_a3b_v5p_64",
    model=model,
    tokenizer=Qwen3Chat(CHECKPOINT, vocab_size=248077, stop_ids=(248046, 248044)),
)
