"""The experiment of gsm8k_gspo.py with low-rank adapters instead of all parameters, on 16 chips of v5p.

Adapters take a learning rate that is ten to a hundred times larger. Never trained at this size.

Run: gspax train experiments/gsm8k_lora.py --workdir runs/gsm8k_lora (on every host)
"""

from dataclasses import replace

import gsm8k_gspo

from gspax.config import Lora, Optimizer

experiment = replace(
    gsm8k_gspo.experiment,
    name="gsm8k_lora",
    model=replace(gsm8k_gspo.experiment.model, param_dtype="bfloat16"),
    lora=Lora(rank=32, alpha=64.0),
    optimizer=Optimizer(learning_rate=3e-5),
    sampling=replace(gsm8k_gspo.experiment.sampling, prompts=64),
    schedule=replace(gsm8k_gspo.experiment.schedule, microbatch_rows=64),
)
