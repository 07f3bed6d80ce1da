"""A fixed workload for `gspax bench`: 16 prompts x 8 samples x 64 new tokens, one update, a 1.9M-parameter Qwen3-MoE.

Without a stop token every completion has exactly 64 tokens; the reward is the share of digits. About a minute on 2 CPU
cores. Measured figures: README.md.

Run: gspax bench experiments/bench_small_moe.py
"""

from collections.abc import Iterable
from dataclasses import dataclass

import addition

from gspax import advantages, losses
from gspax.config import Experiment, ModelConfig, Optimizer, Sampling, Schedule
from gspax.data import Problem


@dataclass(frozen=True)
class Bytes:
    """One id per byte, and no stop id."""

    vocab_size: int = 512
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i) for i in ids)


def share_of_digits(problem: Problem, completion: str) -> float:
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)


experiment = Experiment(
    name="bench_small_moe",
    model=ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    ),
    data=addition.Problems(min_terms=3, max_terms=5),
    tokenizer=Bytes(),
    reward=share_of_digits,
    advantage=advantages.standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=16, group=8, max_prompt_tokens=16, max_tokens=64),
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(minibatches=1),
)
