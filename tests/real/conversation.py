"""Conversations of SmolLM2 with a tool, for a run that is killed: a message, the tool's reply, a second message."""

from dataclasses import dataclass, replace

import smollm2_constraints
from moments import reached

from gspax import advantages
from gspax.config import Evaluation, Sampling, Schedule, Turns
from gspax.rewards.environments import Step


@dataclass(frozen=True)
class CountWords:
    """A tool that is called on every message."""

    def reset(self, problem):
        return None, [{"role": "user", "content": problem.prompt}]

    def step(self, state, message):
        return Step(state, [{"role": "tool", "content": f"{len(message.split())} words"}])


def standardize(reward_PG):
    reached("update")
    return advantages.standardize(reward_PG)


experiment = replace(
    smollm2_constraints.experiment,
    name="conversation",
    environment=CountWords(),
    turns=Turns(limit=2),
    advantage=standardize,
    sampling=Sampling(prompts=2, group=2, max_prompt_tokens=64, max_tokens=48, stop=(".",)),
    schedule=Schedule(steps=2, minibatches=1, eval_every=0, checkpoint_every=1, keep_checkpoints=1),
    evaluation=Evaluation(problems=1),
)
