"""GSPO-token on GSM8K with tools: Qwen3-30B-A3B calls a calculator and Python, on 64 chips of v5p.

A conversation has up to 6 turns, and each turn an advantage of its own (`turns.credit`): a call that fails costs its
turn 0.1, a right answer credits all turns before it. Programs run in the sandbox of `rewards.code` (Linux with
bubblewrap). Data as in gsm8k_gspo.py. Never trained at this size.

Run: gspax train experiments/tools_gspo_token.py --workdir runs/tools_gspo_token (on every host)
"""

from dataclasses import replace
from functools import partial

import gsm8k_gspo

from gspax import losses
from gspax.config import Sampling, Turns
from gspax.rewards.environments import ToolUse, calculator, python

experiment = replace(
    gsm8k_gspo.experiment,
    name="tools_gspo_token",
    environment=ToolUse(tools=(calculator(), python(allow_code_execution=True)), failure_reward=-0.1),
    turns=Turns(limit=6, credit="turn"),
    loss=partial(losses.gspo_token, clip_low=3e-4, clip_high=4e-4),
    sampling=Sampling(prompts=128, group=16, max_prompt_tokens=1024, max_tokens=2048),
    schedule=replace(gsm8k_gspo.experiment.schedule, microbatch_rows=128),
)
