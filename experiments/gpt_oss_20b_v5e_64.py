"""gpt-oss-20b by GSPO on 64 chips of v5e (v5e:8x8): responses of up to 1,536 tokens.

Every other layer attends to the last 128 tokens. A checkpoint in mxfp4 is read, and exported, as bfloat16.
Everything else as in qwen3_30b_a3b_v5e_64.py. Compiled for this topology (README.md), never trained.

Run: gspax train experiments/gpt_oss_20b_v5e_64.py --workdir runs/gpt_oss_20b (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5e_64 import experiment as qwen3
from qwen3_30b_a3b_v5p_64 import Qwen3Chat

from gspax.config import ModelConfig, Yarn

CHECKPOINT = "openai/gpt-oss-20b"

model = ModelConfig(
    vocab_size=201088,
    hidden_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    attention_bias=True,
    attention_sinks=True,
    qk_norm=False,
    sliding_window=128,
    sliding_layers=tuple(range(0, 24, 2)),
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=2880,
    expert_bias=True,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_scaling=Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False),
    max_position_embeddings=131072,
    dtype="bfloat16",
    remat="full",
    checkpoint=CHECKPOINT,
)

experiment = replace(
    qwen3,
    name="gpt_oss_20b_v5e_64",
    model=model,
    tokenizer=Qwen3Chat(CHECKPOINT, vocab_size=200019, stop_ids=(200002, 199999, 200012)),
)
