"""GSPO on MATH: Qwen3-30B-A3B with thinking, responses of up to 7,168 tokens, on 64 chips of v5p.

Put train.jsonl and test.jsonl of the MATH splits of openai/prm800k (12,000 and 500 problems) into the folder math
(where: see gsm8k_gspo.py); none of MATH-500 is trained on. Responses truncated at the limit are left out of the loss
and the advantages. Settings as in gsm8k_gspo.py. Never trained at this size.

Run: gspax train experiments/math_gspo.py --workdir runs/math_gspo (on every host)
"""

from dataclasses import replace

import gsm8k_gspo
from gsm8k_gspo import DATA
from qwen3_30b_a3b_v5p_64 import CHECKPOINT, Qwen3Chat

from gspax import data
from gspax.config import Evaluation, Sampling
from gspax.evaluation import tasks

math500 = tasks.math500(f"{DATA}/math/test.jsonl", samples=4)

experiment = replace(
    gsm8k_gspo.experiment,
    name="math_gspo",
    data=data.jsonl(f"{DATA}/math/train.jsonl", prompt="problem", template=tasks.BOXED, exclude=(math500.data,)),
    tokenizer=Qwen3Chat(CHECKPOINT, thinking=True),
    sampling=Sampling(prompts=128, group=16, max_prompt_tokens=1024, max_tokens=7168),
    filter_overlong=True,
    schedule=replace(gsm8k_gspo.experiment.schedule, steps=500, microbatch_rows=128),
    evaluation=Evaluation(problems=128, tasks=(math500,)),
)
