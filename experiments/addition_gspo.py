"""GSPO on chains of additions with long responses: 58 to 103 tokens, in which a single slip costs the whole reward.

The small mixture of experts of sort_gspo.py learns a written scratchpad from demonstrations of which half contain a
slip; GSPO (arXiv 2507.18071) then improves it by rewarding the final answer alone. About 6 minutes on 2 CPU cores.
Held-out reward over three seeds, sampled: 0.40 before, 0.90 after; details in README.md.

Run: gspax train experiments/addition_gspo.py --workdir runs/addition_gspo
"""

from dataclasses import replace
from functools import partial

import addition

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule, WarmStart
from gspax.model import presets

experiment = Experiment(
    name="addition_gspo",
    model=replace(presets.tiny_moe, vocab_size=addition.tokenizer.vocab_size),
    data=addition.Problems(),
    tokenizer=addition.tokenizer,
    reward=addition.reward,
    advantage=advantages.standardize,
    loss=partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
    sampling=Sampling(prompts=32, group=8, max_prompt_tokens=33, max_tokens=104),
    optimizer=Optimizer(learning_rate=3e-4),
    schedule=Schedule(steps=60, minibatches=4, eval_every=20, checkpoint_every=20),
    evaluation=Evaluation(problems=128),
    warm_start=WarmStart(
        demonstration=addition.half_wrong, steps=500, rows=32, optimizer=Optimizer(learning_rate=6e-3)
    ),
)
