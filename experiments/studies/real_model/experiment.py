"""The experiment on SmolLM2-135M-Instruct with smaller rollouts, and a task that is not trained.

The task `untrained` asks for instructions of other kinds than those that are trained, one at a time.

Run: gspax train experiments/studies/real_model/experiment.py --workdir runs/real_model
"""

from dataclasses import dataclass, replace
from pathlib import Path

from gspax.config import Evaluation, Task
from gspax.data import Problem
from gspax.experiment import load

trained = load(Path(__file__).parents[2] / "smollm2_constraints.py")
TOPICS = ("rain", "bread", "music", "winter", "dogs", "gardens", "mountains", "cities")
KINDS = (  # an instruction, and whether a text keeps to it
    ("Use only lower case letters.", lambda text: text == text.lower()),
    ("Use only capital letters.", lambda text: text == text.upper()),
    ("Put the sentence in double quotation marks.", lambda text: text[0] == text[-1] == '"'),
    ("Do not use the letter z.", lambda text: "z" not in text.lower()),
    ("Write at least fifteen words.", lambda text: len(text.split()) >= 15),
    ("Use a comma.", lambda text: "," in text),
)


@dataclass(frozen=True)
class Untrained:
    """Every topic with every instruction."""

    heldout_count = len(TOPICS) * len(KINDS)

    def heldout(self, index: int) -> Problem:
        kind, topic = divmod(index, len(TOPICS))
        return Problem(prompt=f"Write one sentence about {TOPICS[topic]}. {KINDS[kind][0]}", metadata={"kind": kind})


def keeps(problem: Problem, completion: str) -> float:
    """1 if the completion has three words and keeps to the instruction."""
    text = completion.strip()
    return float(len(text.split()) >= 3 and KINDS[problem.metadata["kind"]][1](text))


experiment = replace(
    trained,
    name="real_model",
    sampling=replace(trained.sampling, prompts=4),
    schedule=replace(trained.schedule, checkpoint_every=0),
    evaluation=Evaluation(
        problems=32,
        tasks=(Task(name="untrained", data=Untrained(), reward=keeps, temperature=0.0),),
    ),
)
