"""SmolLM2-135M-Instruct learns by GSPO to keep to two instructions in one sentence, which a program checks.

Four pairs of instructions are trained and the other two held out. The reward is the share of a pair that is kept.
`make real` fetches the weights and runs this. Figures: README.md.

Run: gspax train experiments/smollm2_constraints.py --workdir runs/smollm2_constraints
"""

import itertools
import re
from dataclasses import dataclass

import numpy as np

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule
from gspax.data import Problem, hf_chat
from gspax.hf import hf

CHECKPOINT = ".cache/smollm2"  # `make real` writes it
TOPICS = [
    *("rain", "snow", "bread", "coffee", "tea", "music", "books", "winter", "summer"),
    *("cats", "dogs", "horses", "gardens", "rivers", "mountains", "cities"),
]
KINDS = (  # an instruction, what its gap may hold, and whether a text with these words keeps to it
    ("Begin with the word {}.", ("Today", "Sometimes", "Every", "My"), lambda gap, _, words: words[0] == gap.lower()),
    ("Use the word {}.", ("blue", "quiet", "home", "light", "old", "happy"), lambda gap, _, words: gap in words),
    ("End with {} mark.", ("an exclamation", "a question"), lambda gap, text, _: text[-1] == "!?"["que" in gap]),
    ("Write at most {} words.", ("eight",), lambda gap, _, words: len(words) <= 8),
)
PAIRS = list(itertools.combinations(range(len(KINDS)), 2))
HELDOUT = [(0, 2), (1, 3)]


@dataclass(frozen=True)
class Constraints:
    seed: int = 0

    def train(self, index: int) -> Problem:
        return make(np.random.default_rng((self.seed, index)), [pair for pair in PAIRS if pair not in HELDOUT])

    def heldout(self, index: int) -> Problem:
        return make(np.random.default_rng(index), HELDOUT)


def make(rng: np.random.Generator, pairs: list[tuple[int, int]]) -> Problem:
    wanted = [(kind, str(rng.choice(KINDS[kind][1]))) for kind in pairs[rng.integers(len(pairs))]]
    said = " ".join(KINDS[kind][0].format(gap) for kind, gap in wanted)
    return Problem(prompt=f"Write one sentence about {rng.choice(TOPICS)}. {said}", metadata={"wanted": wanted})


def reward(problem: Problem, completion: str) -> float:
    text, words = completion.strip(), re.findall(r"[\w']+", completion.lower())
    kept = [len(words) >= 3 and KINDS[kind][2](gap, text, words) for kind, gap in problem.metadata["wanted"]]
    return sum(kept) / len(kept)


experiment = Experiment(
    name="smollm2_constraints",
    model=hf(CHECKPOINT),
    data=Constraints(),
    tokenizer=hf_chat(CHECKPOINT),
    reward=reward,
    advantage=advantages.standardize,
    loss=losses.gspo,
    old_logp="sampler",
    sampling=Sampling(prompts=8, group=8, max_prompt_tokens=52, max_tokens=24),
    optimizer=Optimizer(learning_rate=2e-5),
    schedule=Schedule(steps=16, minibatches=1, microbatch_tokens=400, share_prompts=True, eval_every=0),
    evaluation=Evaluation(problems=48),
)
