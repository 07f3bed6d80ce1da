"""Qwen3-235B-A22B by GSPO on 512 chips of v5p (v5p:8x8x8, Google's v5p-1024): responses of up to 7,168 tokens.

Everything else as in qwen3_30b_a3b_v5p_64.py. Compiled for this topology (memory and times: README.md), never trained.

Run: gspax train experiments/qwen3_235b_a22b_v5p_512.py --workdir runs/qwen3_235b_a22b (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5p_64 import Qwen3Chat
from qwen3_30b_a3b_v5p_64 import experiment as smaller

from gspax.config import Sampling, Schedule
from gspax.model import presets

CHECKPOINT = "Qwen/Qwen3-235B-A22B"

experiment = replace(
    smaller,
    name="qwen3_235b_a22b_v5p_512",
    model=replace(presets.qwen3_235b_a22b, checkpoint=CHECKPOINT),
    tokenizer=Qwen3Chat(CHECKPOINT),
    sampling=Sampling(prompts=512, group=16, max_prompt_tokens=1024, max_tokens=7168),
    schedule=Schedule(steps=500, minibatches=4, microbatch_rows=512, eval_every=50, checkpoint_every=25),
)
