"""GSPO on programs: Qwen3-30B-A3B with thinking, tests of LiveCodeBench's schema, on 64 chips of v5p.

Put test*.jsonl of livecodebench/code_generation_lite into the folder livecodebench (where: see gsm8k_gspo.py).
Contests before August 2024 are trained on, later ones evaluated. This runs the programs that the model writes, in the
sandbox of `rewards.code` (Linux with bubblewrap). Settings as in math_gspo.py. Never trained at this size.

Run: gspax train experiments/code_gspo.py --workdir runs/code_gspo (on every host)
"""

from dataclasses import replace
from functools import partial

import math_gspo
from gsm8k_gspo import DATA

from gspax import data
from gspax.config import Evaluation, Grading
from gspax.evaluation import tasks

SPLIT = "2024-08-01"
known = tasks.livecodebench(f"{DATA}/livecodebench", until=SPLIT)
new = tasks.livecodebench(f"{DATA}/livecodebench", since=SPLIT, samples=4)

experiment = replace(
    math_gspo.experiment,
    name="code_gspo",
    data=data.sequence(known.data, heldout=new.data),
    reward=partial(tasks.reward_program, allow_code_execution=True),
    grading=Grading(timeout=600.0),  # a program may have many tests
    sampling=replace(math_gspo.experiment.sampling, max_prompt_tokens=2048),
    evaluation=Evaluation(problems=128, tasks=(new,)),
)
