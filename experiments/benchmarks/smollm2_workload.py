"""The workload of `bench_smollm2.py`: GSPO on SmolLM2-135M-Instruct, 16 prompts x 8 answers x 64 tokens, one update.

Without a stop token every answer has 64 tokens; the reward is the share of digits. A microbatch has two
prompts of at most 16 tokens, each with its 8 answers and 8 copies of its last token.

Run: gspax bench experiments/benchmarks/smollm2_workload.py (after `make real`, which writes the weights)
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from gspax.config import Optimizer, Schedule
from gspax.data import HFTokenizer
from gspax.hf import hf

sys.path.append(str(Path(__file__).parents[1]))
import bench_small_moe

CHECKPOINT = ".cache/smollm2"


@dataclass(frozen=True)
class Endless(HFTokenizer):
    """No token ends an answer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return ()


experiment = replace(
    bench_small_moe.experiment,
    name="smollm2_workload",
    model=hf(CHECKPOINT),
    tokenizer=Endless(CHECKPOINT),
    optimizer=Optimizer(learning_rate=1e-6),
    schedule=Schedule(minibatches=1, microbatch_tokens=2 * (16 + 8 * 65), share_prompts=True),
)
