"""Qwen3-30B-A3B learns from Qwen3-235B-A22B on its own responses, on 64 chips of v5p (v5p:4x4x4, Google's v5p-128).

One response for each prompt, of up to 7,168 tokens, and no reward: every update reduces the reverse KL of the
next-token distributions, exactly for the teacher's 32 most probable tokens and estimated from the sampled token for the
others (docs/distillation.md). The teacher stays on the same mesh, in bfloat16, 6.8 of the 17 to 22 GiB that the dry run
counts on each device: one pass before each update gives its last hidden states. The prompts are those of
qwen3_30b_a3b_v5p_64.py; replace `data` with your own, whose answers are not needed. Compiled for these chips
(README.md), never trained.

Run: gspax train experiments/qwen3_30b_a3b_distill_v5p_64.py --workdir runs/distill (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5p_64 import experiment as of_student

from gspax import losses
from gspax.config import Optimizer, Sampling, Schedule, Teacher
from gspax.model import presets

experiment = replace(
    of_student,
    name="qwen3_30b_a3b_distill_v5p_64",
    loss=losses.grpo,
    teacher=Teacher(
        model=replace(presets.qwen3_235b_a22b, checkpoint="Qwen/Qwen3-235B-A22B", param_dtype="bfloat16"), kept=32
    ),
    sampling=Sampling(prompts=512, group=1, max_prompt_tokens=1024, max_tokens=7168),
    optimizer=Optimizer(learning_rate=2e-6, warmup_updates=30),
    schedule=Schedule(steps=200, minibatches=1, microbatch_rows=128, eval_every=50, checkpoint_every=25),
)
