"""Drafts while three tasks are trained on problems that come again: tokens a pass gives, and what a rollout costs.

    python experiments/benchmarks/bench_drafts.py FOLDER [NAME ...]

Each task is trained for five epochs of 64 problems, once with each kind of noise (`sampling.noise`). Every rollout is
sampled with 0, 1, and 3 drafts, and with 3 while they pay (`sampling.draft_cost`), one after the other and twice, with
the same weights and noise, so that the samples can be compared too. CPU-seconds are those of this process, the less of
both, and of these the median over the rollouts of the third to the fifth epoch. Tasks whose results are in FOLDER are
not measured again. The table is written into drafts.md.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax

from gspax.commands.environment import prepare, skip_absent_tpu
from gspax.config import Experiment
from gspax.experiment import load
from gspax.learner.state import init_state
from gspax.rollout.contract import Request, Weights
from gspax.rollout.grading import Started, count_sampled
from gspax.rollout.in_process import InProcess
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import make_runtime
from gspax.sampler.sampler import lengths_to_host
from gspax.training.in_flight import InFlight
from gspax.training.step import run_step
from gspax.types import Rollout

sys.path.append(str(Path(__file__).parents[1] / "studies" / "noise"))
from epochs import Epochs

EXPERIMENTS = Path(__file__).parents[1]
TASKS = ("addition_gspo", "word_problems_gspo", "calculator_gspo_token")
NOISES = ("fresh", "problem")
COST = 2.9  # of a pass with three drafts on two cores, in passes without
SETTINGS = {"0": {"drafts": 0}, "1": {"drafts": 1}, "3": {"drafts": 3}, "paying": {"drafts": 3, "draft_cost": COST}}
PROBLEMS, EPOCHS = 64, 5
PAGE = Path(__file__).with_name("drafts.md")
BEGIN, END = "<!-- drafts: written by bench_drafts.py -->", "<!-- end of drafts -->"


def measure(experiment: Experiment) -> list[dict[str, float]]:
    """The figures of each rollout."""
    rows, sample = [], InProcess.sample

    def sample_each(sampler: InProcess, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample the request with every setting."""
        figures, plain = {}, None
        for name, setting in 2 * list(SETTINGS.items()):
            sampling = replace(request.options.sampling, **setting)
            before = time.process_time()
            sampled = sample(sampler, weights, replace(request, options=replace(request.options, sampling=sampling)))
            rollout = lengths_to_host(jax.block_until_ready(sampled.result()[0]))
            seconds = time.process_time() - before
            figures[f"cpu_s_{name}"] = min(seconds, figures.get(f"cpu_s_{name}", seconds))
            if plain is None:
                plain = rollout
                figures["samples"] = len(rollout.length_B)
            if name != "0":
                figures[f"tokens_per_pass_{name}"] = float(count_sampled(rollout).sum() / rollout.passes_B.sum())
                figures[f"differ_{name}"] = int((rollout.tokens_BT != plain.tokens_BT).any(axis=1).sum())
        rows.append(figures)
        return sampled

    runtime = make_runtime(experiment)
    with mock.patch.object(InProcess, "sample", sample_each), contextlib.ExitStack() as calls:
        calls.enter_context(runtime.rewards)
        if runtime.interaction is not None:
            calls.enter_context(runtime.interaction.steps)
        state = init_state(experiment.model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
        in_flight = InFlight(Skipped(experiment.sampling.max_failed))
        for _ in range(EPOCHS * PROBLEMS // experiment.sampling.prompts):
            state = run_step(runtime, state, in_flight).state
    return rows


def start(name: str, folder: Path) -> Experiment:
    """The experiment after its warm start, whose checkpoint is made if FOLDER lacks it."""
    checkpoint, words = folder / name / "checkpoint", name.startswith("word_problems")
    file, overrides = EXPERIMENTS / f"{name}.py", []
    if words:
        tokenizer = folder / name / "tokenizer"
        file, overrides = EXPERIMENTS / "word_problems_sft.py", [f"tokenizer.path={tokenizer}"]
        if not tokenizer.exists():
            subprocess.run([sys.executable, str(EXPERIMENTS / "word_problems.py"), str(tokenizer)], check=True)
    if not checkpoint.exists():
        trained = str(folder / name / "sft")
        gspax("sft", str(file), "--workdir", trained, *overrides)
        gspax("export", "--from", trained, "--to", str(checkpoint), "--dtype", "float32")
    experiment = load(EXPERIMENTS / f"{name}.py")
    tokenizer = replace(experiment.tokenizer, path=str(checkpoint)) if words else experiment.tokenizer
    model = replace(experiment.model, checkpoint=str(checkpoint))
    data = Epochs(experiment.data, PROBLEMS)
    return replace(experiment, model=model, tokenizer=tokenizer, data=data, warm_start=None)


def gspax(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "gspax", *command], check=True)


def tabulate(found: dict[tuple[str, str], list[dict[str, float]]]) -> Iterator[str]:
    """The lines of the table, and how many samples differ."""
    yield "| task, noise | tokens per pass, k = 3, epochs 1 to 5 | k = 1 | CPU-seconds, k = 0, 1, 3 | while they pay |"
    yield "| --- | --- | --- | --- | --- |"
    for (name, noise), rows in found.items():
        size = len(rows) // EPOCHS
        three = [
            statistics.mean(row["tokens_per_pass_3"] for row in rows[n * size : n * size + size]) for n in range(EPOCHS)
        ]
        later = rows[2 * size :]
        one = statistics.mean(row["tokens_per_pass_1"] for row in later)
        *seconds, paying = (statistics.median(row[f"cpu_s_{each}"] for row in later) for each in SETTINGS)
        tokens, costs = ", ".join(f"{value:.2f}" for value in three), ", ".join(f"{value:.3f}" for value in seconds)
        change = f"{round(100 * paying / seconds[0] - 100):+d} %"
        yield f"| `{name}`, {noise} | {tokens} | {one:.2f} | {costs} | {paying:.3f} ({change}) |"
    rows = [row for each in found.values() for row in each]
    differ = " and ".join(f"{sum(row[f'differ_{k}'] for row in rows)} with k = {k}" for k in ("1", "3"))
    yield ""
    yield f"Of {sum(row['samples'] for row in rows):,} samples {differ} differed from those without drafts."


def main(folder: Path, names: list[str]) -> None:
    skip_absent_tpu()
    prepare()
    found = {}
    for name in names:
        for noise in NOISES:
            result = folder / name / f"{noise}.json"
            if not result.exists():
                experiment = start(name, folder)
                experiment = replace(experiment, sampling=replace(experiment.sampling, drafts=1, noise=noise))
                result.write_text(json.dumps(measure(experiment)))
            found[name, noise] = json.loads(result.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *tabulate(found), f"{END}{rest.partition(END)[2]}"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(TASKS))
