"""What `rehearse_gpu.py` measures: GSPO with random weights in the shapes of published models, and nothing to download.

A completion has no stop token, so every step samples and trains the same number of tokens. `model=` chooses the shape:
`gpu_workload.smollm2_135m`, or `gpu_workload.qwen3_moe` with as many layers as fit.

Run: gspax bench experiments/benchmarks/gpu_workload.py model=gpu_workload.qwen3_moe model.num_hidden_layers=4
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gspax import advantages, losses
from gspax.config import Experiment, ModelConfig, Optimizer, Sampling, Schedule
from gspax.data import Problem
from gspax.model.presets import qwen3_30b_a3b

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
class Bytes:
    """One id per byte, the vocabulary of a model, and no stop id."""

    vocab_size: int
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i % 256) for i in ids)


@dataclass(frozen=True)
class Lines:
    """Numbered prompts of one length."""

    length: int = 128

    def train(self, index: int) -> Problem:
        return Problem(prompt=f"{index:>{self.length}}", answer="")

    heldout = train


def share_of_digits(problem: Problem, completion: str) -> float:
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


experiment = Experiment(
    name="gpu_workload",
    model=qwen3_moe,
    data=Lines(),
    tokenizer=Bytes(qwen3_moe.vocab_size),
    reward=share_of_digits,
    advantage=advantages.standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=16, group=8, max_prompt_tokens=128, max_tokens=256),
    optimizer=Optimizer(learning_rate=1e-6),
    schedule=Schedule(minibatches=1),
)
