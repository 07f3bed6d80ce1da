"""What `rehearse_gpu.py` measures: GSPO with random weights in the shapes of published models, and nothing to download.

A completion has no stop token, so every step samples and trains the same number of tokens. `model=` chooses the shape:
`gpu_workload.smollm2_135m`, or `gpu_workload.qwen3_moe` with as many layers as fit.

Run: gspax bench experiments/benchmarks/gpu_workload.py model=gpu_workload.qwen3_moe model.num_hidden_layers=4
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from gspax.config import ModelConfig, Optimizer, Sampling
from gspax.data import Problem
from gspax.model.presets import qwen3_30b_a3b

sys.path.append(str(Path(__file__).parents[1]))
import bench_small_moe

smollm2_135m = ModelConfig(  # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=1e5,
    tie_word_embeddings=True,
    qk_norm=False,
    dtype="bfloat16",
    remat="full",
)
qwen3_moe = replace(qwen3_30b_a3b, num_hidden_layers=4, param_dtype="bfloat16")


@dataclass(frozen=True)
class Lines:
    """Numbered prompts of one length."""

    length: int = 128

    def train(self, index: int) -> Problem:
        return Problem(prompt=f"{index:>{self.length}}", answer="")

    heldout = train


experiment = replace(
    bench_small_moe.experiment,
    name="gpu_workload",
    model=qwen3_moe,
    data=Lines(),
    tokenizer=bench_small_moe.Bytes(qwen3_moe.vocab_size),
    sampling=Sampling(prompts=16, group=8, max_prompt_tokens=128, max_tokens=256),
    optimizer=Optimizer(learning_rate=1e-6),
)
