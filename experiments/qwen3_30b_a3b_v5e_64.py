"""Qwen3-30B-A3B by GSPO on 64 chips of v5e (v5e:8x8): a sixth of a v5p's memory, responses of up to 1,536 tokens.

The TPU compiler has no ragged all-to-all for more than 16 chips of v5e, so tokens travel around the expert axis in a
ring; those of a decoding step are gathered.
Everything else as in qwen3_30b_a3b_v5p_64.py. Compiled for this topology (memory and times: README.md), never trained.

Run: gspax train experiments/qwen3_30b_a3b_v5e_64.py --workdir runs/qwen3_30b_a3b (on every host)
"""

from dataclasses import replace

from qwen3_30b_a3b_v5p_64 import experiment as v5p

from gspax.config import Sampling

experiment = replace(
    v5p,
    name="qwen3_30b_a3b_v5e_64",
    sampling=Sampling(prompts=64, group=16, max_prompt_tokens=512, max_tokens=1536),
    schedule=replace(v5p.schedule, microbatch_rows=64),
)
