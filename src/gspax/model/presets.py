"""Named model shapes: one small enough to train on a laptop, and published Qwen3 shapes."""

from dataclasses import replace

from gspax.config import ModelConfig

tiny_moe = ModelConfig(
    vocab_size=16,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    rope_theta=1e4,
    tie_word_embeddings=True,
    initializer_range=0.1,
    max_position_embeddings=512,
)

qwen3_0_6b = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    tie_word_embeddings=True,
    dtype="bfloat16",
    remat="full",
)

qwen3_30b_a3b = replace(
    qwen3_0_6b,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    intermediate_size=6144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    tie_word_embeddings=False,
)

qwen3_235b_a22b = replace(
    qwen3_30b_a3b,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    intermediate_size=12288,
    moe_intermediate_size=1536,
)
