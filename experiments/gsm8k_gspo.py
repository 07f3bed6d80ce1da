"""GSPO on GSM8K: Qwen3-30B-A3B without thinking, responses of up to 1,024 tokens, on 64 chips of v5p.

Put train.jsonl and test.jsonl of openai/grade-school-math into the folder gsm8k, here or in the folder or bucket that
the variable GSPAX_DATA names. The clip range and the four minibatches are the GSPO paper's (arXiv 2507.18071); the
learning rate and sizes are ours. Never trained at this size.

Run: gspax train experiments/gsm8k_gspo.py --workdir runs/gsm8k_gspo (on every host)
"""

import os
from dataclasses import replace
from functools import partial

from qwen3_30b_a3b_v5p_64 import CHECKPOINT, Qwen3Chat

from gspax import advantages, data, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule
from gspax.evaluation import tasks
from gspax.model import presets

DATA = os.environ.get("GSPAX_DATA", ".")  # gs://BUCKET/NAME on TPUs, whose hosts share no disk

experiment = Experiment(
    name="gsm8k_gspo",
    model=replace(presets.qwen3_30b_a3b, checkpoint=CHECKPOINT),
    data=data.jsonl(
        f"{DATA}/gsm8k/train.jsonl", heldout=f"{DATA}/gsm8k/test.jsonl", prompt="question", template=tasks.BOXED
    ),
    tokenizer=Qwen3Chat(CHECKPOINT),
    reward=tasks.reward_math,
    advantage=advantages.standardize,
    loss=partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
    sampling=Sampling(prompts=128, group=16, max_prompt_tokens=512, max_tokens=1024),
    optimizer=Optimizer(learning_rate=1e-6),
    schedule=Schedule(steps=200, minibatches=4, microbatch_rows=256, eval_every=20, checkpoint_every=20),
    evaluation=Evaluation(problems=256, tasks=(tasks.gsm8k(f"{DATA}/gsm8k/test.jsonl", samples=4),)),
)
