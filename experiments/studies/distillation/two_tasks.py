"""Sorting and addition in one run: problems of both tasks, each of which names the expert that has learned it.

The start is a supervised warm start on demonstrations of both tasks, half of which are wrong. `data.tasks=sort,` trains
the expert of one task. `students.py` trains students of both experts from the same start.

Run: gspax train experiments/studies/distillation/two_tasks.py --workdir runs/two_tasks
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule, Task, WarmStart
from gspax.data.problem import GeneratedProblems, Problem
from gspax.data.tasks import sort
from gspax.data.tokenizer import CharTokenizer
from gspax.model import presets

sys.path.insert(0, str(Path(__file__).parents[2]))
import addition

TASKS = {"sort": sort, "addition": addition}
SOURCES = {"sort": sort.Problems(), "addition": addition.Problems(min_terms=3, max_terms=3)}
tokenizer = CharTokenizer("0123456789=+,#" + addition.NAMES)


@dataclass(frozen=True)
class Problems(GeneratedProblems):
    """Problems of some of the tasks, all tasks equally likely.

    With `lessons` the training problems are those that `gspax eval` gave to the experts in that folder, of the tasks in
    turn, and their answers are the experts' responses.
    """

    tasks: tuple[str, ...] = ("sort", "addition")
    lessons: str = ""

    def generate(self, rng):
        name = self.tasks[rng.integers(len(self.tasks))]
        return replace(SOURCES[name].generate(rng), task=name, teacher=name)

    def train(self, index):
        if not self.lessons:
            return super().train(index)
        name = self.tasks[index % len(self.tasks)]
        (path,) = Path(self.lessons, name).glob("evaluations/*/lessons.jsonl")
        rows = read_lines(path)
        row = rows[index // len(self.tasks) % len(rows)]
        return Problem(prompt=row["prompt"], answer=row["completion"], task=name)


@dataclass(frozen=True)
class TrainingProblems:
    """Training problems of one task as a benchmark, whose responses are the lessons of a supervised student."""

    task: str
    seed: int

    def heldout(self, index):
        return Problems(seed=self.seed, tasks=(self.task,)).train(index)


@cache
def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def reward(problem, completion):
    return TASKS[problem.task].reward(problem, completion)


def half_wrong(problem, rng):
    return TASKS[problem.task].half_wrong(problem, rng)


def copy_answer(problem, rng):
    return problem.answer


def lessons(path):
    """The benchmark `NAME/SEED`: training problems of the task NAME."""
    name, seed = path.split("/")
    return Task(name="lessons", data=TrainingProblems(name, int(seed)), reward=reward)


experiment = Experiment(
    name="two_tasks",
    model=replace(presets.tiny_moe, vocab_size=tokenizer.vocab_size),
    data=Problems(),
    tokenizer=tokenizer,
    reward=reward,
    advantage=advantages.standardize,
    loss=partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
    sampling=Sampling(prompts=32, group=8, max_prompt_tokens=9, max_tokens=32),
    optimizer=Optimizer(learning_rate=3e-4),
    schedule=Schedule(steps=60, minibatches=4, eval_every=10, checkpoint_every=60),
    evaluation=Evaluation(
        problems=16,
        tasks=tuple(Task(name=name, data=Problems(tasks=(name,)), reward=reward, problems=512) for name in TASKS),
    ),
    warm_start=WarmStart(demonstration=half_wrong, steps=600, rows=64, optimizer=Optimizer(learning_rate=3e-3)),
)
