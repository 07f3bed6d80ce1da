"""GSPO on word problems whose order of steps the model has read no solution of, from a checkpoint trained here.

The checkpoint is that of word_problems_sft.py, whose docstring has the commands that make it. Most of the solutions it
has read are the answer alone, so that it guesses more often than it calculates. Evaluated are 4 samples of each of 256
held-out problems of new types and 128 of familiar ones, before and after. Figures: README.md.

Run: gspax train experiments/word_problems_gspo.py --workdir runs/word_problems/gspo
"""

from dataclasses import replace

import word_problems
import word_problems_sft

from gspax.config import Evaluation, Optimizer, Schedule, Task
from gspax.data import HFTokenizer

CHECKPOINT = "runs/word_problems/checkpoint"
pretrained = word_problems_sft.experiment
new_types = word_problems.Problems(kind="new", min_steps=3)
tasks = (
    Task(name="new_types", data=new_types, reward=pretrained.reward, problems=256, samples=4),
    Task(name="familiar_types", data=word_problems.Problems(), reward=pretrained.reward, problems=128, samples=4),
)

experiment = replace(
    pretrained,
    name="word_problems_gspo",
    model=replace(pretrained.model, checkpoint=CHECKPOINT),
    tokenizer=HFTokenizer(CHECKPOINT),
    data=new_types,
    warm_start=None,
    optimizer=Optimizer(learning_rate=5e-4),
    schedule=Schedule(steps=60, minibatches=4, eval_every=0, checkpoint_every=20),
    evaluation=Evaluation(problems=128, tasks=tasks),
)
