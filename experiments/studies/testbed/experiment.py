"""The testbed of the studies of collapse: sorting long numbers with many small experts and many updates per rollout.

4 layers, 16 experts each, top-2, 16 minibatches per rollout batch, and a learning rate at which GRPO collapses, while
it learns on policy. README.md has the search that led here.

Run: gspax train experiments/studies/testbed/experiment.py --workdir runs/testbed
"""

from dataclasses import replace
from functools import partial

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule, WarmStart
from gspax.data.tasks import sort
from gspax.model import presets

experiment = Experiment(
    name="testbed",
    model=replace(
        presets.tiny_moe,
        vocab_size=sort.tokenizer.vocab_size,
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    data=sort.Problems(min_digits=8, max_digits=16),
    tokenizer=sort.tokenizer,
    reward=sort.reward,
    advantage=advantages.standardize,
    loss=partial(losses.grpo, clip_low=0.2, clip_high=0.27),
    sampling=Sampling(prompts=32, group=8, max_prompt_tokens=17, max_tokens=18),
    optimizer=Optimizer(learning_rate=5e-4),
    schedule=Schedule(steps=40, minibatches=16, eval_every=0, checkpoint_every=0),
    evaluation=Evaluation(problems=128),
    warm_start=WarmStart(demonstration=sort.half_wrong, steps=300, rows=64, optimizer=Optimizer(learning_rate=3e-3)),
)
