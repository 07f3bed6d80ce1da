"""Two experts into one student: distillation, reinforcement learning on both tasks, and supervised training.

Question. An expert that sorts and an expert that adds are to become one model. Does it learn more per response from the
experts' next-token distributions on its own responses, from the tasks' rewards, or from the experts' responses? And
does the number of kept tokens of the distillation matter?

Rule, written before the runs. Five seeds, 0 to 4; none is left out. The tasks, the size and the rates were chosen with
seed 7 by the rewards of the start and of the experts alone; no student was trained before. All students of a seed
continue the warm start from which its experts came, with 60 x 256 responses in 240 updates of 64: on policy one
response to each prompt for a distillation and 8 for reinforcement learning (GSPO), for supervised training the experts'
own responses to the training problems, once at the rate of the others and once at that of the warm start. Primary
measure: the mean of both tasks' held-out rewards after the last update, sampled, 512 problems each. The distillation of
the whole vocabulary is better than another student if the 95 % interval of the paired difference is above 0, and worse
if it is below; four such differences decide, and the two with fewer kept tokens describe. Second measure: the responses
after which a student is as good as the one of reinforcement learning is at the end, by evaluations after every 10 x 256
(none for supervised training, which is evaluated at its end). What the experts cost, another 2 x 60 x 256 responses, is
not counted: the question is asked by someone who has them.

Run: python experiments/studies/distillation/students.py RUNS [JOBS]
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from gspax.report.statistics import estimate_mean
from gspax.run.folders import write_atomically

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- results: written from students.csv -->", "<!-- end of students -->"
SEEDS, TASKS = (0, 1, 2, 3, 4), ("sort", "addition")
STEPS, RESPONSES = 60, 256  # of each step
STUDENTS = {  # names, and the experiment's file with overrides
    "distillation, whole vocabulary": (
        "two_tasks_distill.py",
        "teacher.divergence=gspax.losses.distill.full_reverse_kl",
    ),
    "distillation, 8 kept": ("two_tasks_distill.py", "teacher.kept=8", "teacher.kept_by=policy"),
    "distillation, sampled token": ("two_tasks_distill.py",),
    "reinforcement learning": ("two_tasks.py",),
    "supervised": ("two_tasks.py", "warm_start.optimizer.learning_rate=3e-4"),
    "supervised, 3e-3": ("two_tasks.py", "warm_start.optimizer.learning_rate=3e-3"),
}
FIRST, RL = "distillation, whole vocabulary", "reinforcement learning"
FIELDS = ("seed", "model", "responses", *TASKS)  # of a line of students.csv: the held-out rewards of a model


def slug(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def gspax(*command: str, workdir: Path) -> None:
    """Run a subcommand on one thread, unless it has been run. RuntimeError if it fails."""
    done = workdir.with_name(workdir.name + ".done")
    if done.exists():
        return
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with workdir.with_name(workdir.name + ".log").open("a") as log:
        environment = {**os.environ, "NPROC": "1"}
        code = subprocess.run([sys.executable, "-m", "gspax", *command], stdout=log, stderr=log, env=environment)
    if code.returncode:
        raise RuntimeError(f"gspax {command[0]} ended with {code.returncode}: see {log.name}")
    done.touch()


def run_seed(runs: Path, seed: int) -> int:
    """Start, experts, their responses, and students of one seed, in `runs`/SEED."""
    own, file = runs / str(seed), str(FOLDER / "two_tasks.py")
    start, sft = own / "start", own / "start_sft"
    gspax("sft", file, "--workdir", str(sft), f"seed={seed}", f"data.seed={1000 + seed}", workdir=sft)
    gspax("export", "--from", str(sft), "--to", str(start), "--dtype", "float32", workdir=start)
    common = (f"seed={seed}", f"data.seed={seed}", f"model.checkpoint={start}")
    for task in TASKS:
        expert, settings = own / task, (*common, "warm_start=none", f"data.tasks={task},")
        gspax("train", file, "--workdir", str(expert), *settings, workdir=expert)
        lessons = ("--tasks", f"two_tasks.lessons={task}/{seed}", "--problems", str(STEPS * RESPONSES // len(TASKS)))
        gspax("eval", file, "--workdir", str(expert), *lessons, *settings, workdir=own / f"{task}_lessons")
    for name, (student, *overrides) in STUDENTS.items():
        settings = [*common, *overrides]
        if name.startswith("supervised"):
            stage = ("demonstration=two_tasks.copy_answer", f"steps={4 * STEPS}")
            settings += [*(f"warm_start.{each}" for each in stage), f"data.lessons={own}", "schedule.steps=1"]
        else:
            settings.append("warm_start=none")
        if student == "two_tasks_distill.py":
            settings += [f"teacher.models.{task}.checkpoint={own / task}" for task in TASKS]
        folder = own / slug(name)
        gspax("train", str(FOLDER / student), "--workdir", str(folder), *settings, workdir=folder)
    return seed


def read_seed(runs: Path, seed: int) -> Iterator[dict[str, object]]:
    """The lines of one seed: start, experts, and students."""
    own = runs / str(seed)
    for name, folder in [*((f"expert: {task}", task) for task in TASKS), *((name, slug(name)) for name in STUDENTS)]:
        rows = [json.loads(line) for line in (own / folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if f"eval/{TASKS[0]}/reward" not in row:
                continue
            step = int(row["step"])
            if name.startswith("supervised") and step:
                continue  # the evaluation before the one step of reinforcement learning is that of the student
            trained = STEPS if name.startswith("supervised") else step
            if trained or name == RL:
                rewards = {task: f"{row[f'eval/{task}/reward']:.5g}" for task in TASKS}
                yield dict(seed=seed, model=name if trained else "start", responses=trained * RESPONSES) | rewards


def tabulate(path: Path) -> str:
    """The table of the page, from the CSV alone."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves: dict[str, dict[int, list[tuple[int, float, float]]]] = {}
    for row in rows:
        seeds = curves.setdefault(row["model"], {})
        seeds.setdefault(int(row["seed"]), []).append((int(row["responses"]), *(float(row[task]) for task in TASKS)))
    at_end = {name: np.array([curve[-1][1:] for curve in seeds.values()]) for name, seeds in curves.items()}
    lines = [
        ["model", *(f"reward, {task}" for task in TASKS), "mean of both", "each seed", f"{FIRST} minus it"],
        ["---"] * (len(TASKS) + 4),
    ]
    for name, reward_SK in sorted(at_end.items(), key=lambda one: one[0] != "start"):
        mean_S = reward_SK.mean(1)
        minus = "" if name == FIRST or name not in STUDENTS else _show(at_end[FIRST].mean(1) - mean_S)
        each = ", ".join(f"{value:.3f}" for value in mean_S)
        lines.append([name, *(_show(reward_SK[:, k]) for k in range(len(TASKS))), _show(mean_S), each, minus])
    marks = dict(zip(curves[RL], at_end[RL].mean(1), strict=True))
    further = [["student", f"responses until it is as good as {RL} at its end, each seed"], ["---"] * 2]
    for name in STUDENTS:
        if name != RL and not name.startswith("supervised"):
            reached = (_first(curves[name][seed], mark) for seed, mark in marks.items())
            further.append([name, ", ".join("never" if at is None else f"{at:,}" for at in reached)])
    return "\n\n".join("\n".join(f"| {' | '.join(line)} |" for line in table) for table in (lines, further))


def _first(curve: list[tuple[int, float, float]], mark: float) -> int | None:
    return next((responses for responses, *rewards in curve if np.mean(rewards) >= mark), None)


def _show(value_S: np.ndarray) -> str:
    found = estimate_mean(value_S)
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main(runs: Path | None, jobs: int) -> None:
    path, page = FOLDER / "students.csv", FOLDER / "README.md"
    if runs is not None:
        with ThreadPoolExecutor(jobs) as pool:
            for seed in pool.map(partial(run_seed, runs), SEEDS):
                print(f"seed {seed}", flush=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(line for seed in SEEDS for line in read_seed(runs, seed))
        write_atomically(path, text.getvalue())
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    write_atomically(page, f"{before}{begin}\n{tabulate(path)}\n{end}{after}")


if __name__ == "__main__":
    _, *arguments = sys.argv
    main(Path(arguments[0]).absolute() if arguments else None, int(arguments[1]) if len(arguments) > 1 else 1)
