"""Which signals of an update warn before a policy collapses, and how often they warn of a healthy run.

    python experiments/studies/alarms/alarms.py

It takes a quarter of an hour on a core. runs.csv keeps the signals of every step of every run, and only runs that it
lacks are made; the tables in README.md are written from it.

Rule, written before the runs. The task is to sort 2 to 5 digits, with two layers of four experts, a warm start on
demonstrations of which half are wrong, and 40 rollouts of 16 x 8 samples in four minibatches. Seed 99, which is in no
table, served to choose the learning rates. A run *collapses* if the mean reward of five steps falls below half of its
best such mean, and ends below it; its *fall* is the first step at which that mean is below 0.8 of its best up to then
and does not reach it again. A signal *warns* at the first of two steps in a row beyond its threshold.

1. The threshold of a signal is a quarter beyond its most extreme value in any run of seed 0 that does not
   collapse: 1.25 times the largest, or 0.8 times the smallest for an effective sample size.
2. Of the runs of seeds 1 to 3, a signal's sensitivity is the share of collapses of which it warns before the fall; a
   false alarm is a run that does not collapse and has a warning.
3. A signal becomes an alarm of `guard`, with this threshold rounded, if it is sensitive to at least half of the
   collapses and has at most one false alarm. Otherwise it stays a metric.

A second rule, written after the runs of seeds 0 to 3 and before those of seeds 4 and 5: no signal had passed, because a
policy that collapses here is gone after its first step, and nothing stays beyond a threshold for two. In that first
step the KL of an update was above its threshold of 0.42 in all collapses. So, for this signal alone: a warning is one
step above 0.4, and it becomes an alarm if seeds 4 and 5 of the four variants with the largest updates show it before
the fall in all collapses but one at most, and otherwise in one run at most.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule, WarmStart
from gspax.data.tasks import sort
from gspax.model import presets
from gspax.report.curves import read_series
from gspax.training.loop import train

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "runs.csv", HERE / "README.md"
BEGIN, END = "<!-- results: written from runs.csv -->\n", "<!-- end of results -->"
STEPS, WINDOW = 40, 5
CALIBRATION, TEST, AGAIN = (0,), (1, 2, 3), (4, 5)  # seeds
LARGEST, KL = 0.4, "KL of an update"  # of the second rule
BASE = Experiment(
    name="alarms",
    model=replace(presets.tiny_moe, vocab_size=sort.tokenizer.vocab_size, hidden_size=32, moe_intermediate_size=32),
    data=sort.Problems(min_digits=2, max_digits=5),
    tokenizer=sort.tokenizer,
    reward=sort.reward,
    advantage=advantages.standardize,
    loss=partial(losses.grpo, clip_low=0.2, clip_high=0.27),
    sampling=Sampling(prompts=16, group=8, max_prompt_tokens=6, max_tokens=7),
    optimizer=Optimizer(learning_rate=5e-4),
    schedule=Schedule(steps=STEPS, minibatches=4, eval_every=0, checkpoint_every=0),
    evaluation=Evaluation(problems=16),
    warm_start=WarmStart(demonstration=sort.half_wrong, steps=120, rows=64, optimizer=Optimizer(learning_rate=3e-3)),
)
GSPO = partial(losses.gspo, clip_low=3e-4, clip_high=4e-4)
FAST = Optimizer(learning_rate=5e-3)
VARIANTS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GSPO": {"loss": GSPO},
    "GRPO, 8-bit sampler": {"sampling": replace(BASE.sampling, weights_dtype="int8")},
    "GRPO, 4 x rate": {"optimizer": Optimizer(learning_rate=2e-3)},
    "GRPO, 10 x rate": {"optimizer": FAST},
    "GSPO, 10 x rate": {"loss": GSPO, "optimizer": FAST},
    "no clip, 4 epochs": {
        "loss": losses.importance_sampling,
        "optimizer": Optimizer(learning_rate=5e-4),
        "schedule": replace(BASE.schedule, epochs=4),
    },
}
SIGNALS = {  # name: the metrics of a step to the signal, and whether a small value is bad
    "effective sample size of the ratios": (lambda row: row["policy/weight_ess_min"], True),
    "effective sample size of the gradient": (lambda row: row["policy/gradient_ess_min"], True),
    "share of the gradient from one sequence": (lambda row: row["policy/gradient_share_max"], False),
    "expert load of responses": (lambda row: row["routing/response_load_max"], False),
    "entropies apart": (lambda row: abs(row["policy/entropy"] - row["policy/sampler_entropy"]), False),
    "gradient norm": (lambda row: row["optim/grad_norm"], False),
    "entropy": (lambda row: row["policy/entropy"], True),
    "KL of an update": (lambda row: row["policy/kl"], False),
}
LARGE = tuple(VARIANTS)[3:]
COLUMNS = ("variant", "seed", "step", "reward", *SIGNALS)
Run = dict[str, np.ndarray]  # of a run, by column, in the order of its steps


def make_run(variant: str, seed: int) -> list[dict[str, str]]:
    """Train, and return a row for each step."""
    experiment = replace(BASE, seed=seed, data=replace(BASE.data, seed=seed), **VARIANTS[variant])
    with tempfile.TemporaryDirectory() as folder:
        train(experiment, Path(folder, "run"), report_to=())
        series = read_series(Path(folder, "run", "metrics.jsonl"))
    rows = []
    for number, step in enumerate(series["policy/loss"][0]):
        metrics = {name: values[1][number] for name, values in series.items() if len(values[1]) > number}
        signals = {name: f"{compute(metrics):.5g}" for name, (compute, _) in SIGNALS.items()}
        reward = f"{series['reward/mean'][1][number]:.5g}"
        rows.append({"variant": variant, "seed": str(seed), "step": str(step), "reward": reward, **signals})
    return rows


def find_fall(reward: np.ndarray) -> int:
    """Return the step from 1 at which the reward of a run that collapses falls; 0 if it does not collapse."""
    mean = np.convolve(reward, np.full(WINDOW, 1 / WINDOW), "valid")
    best = np.maximum.accumulate(mean)
    if not mean[-1] < 0.5 * best[-1]:
        return 0
    return int(np.flatnonzero(mean >= 0.8 * best)[-1]) + 1 + WINDOW


def find_warning(signal: np.ndarray, threshold: float, low: bool) -> int:
    """Return the first step from 1 of two in a row beyond a threshold; 0 if there is none."""
    beyond = ~(signal >= threshold) if low else ~(signal <= threshold)
    both = np.flatnonzero(beyond[:-1] & beyond[1:])
    return int(both[0]) + 1 if len(both) else 0


def choose_threshold(runs: Sequence[Run], name: str) -> float:
    """Return a signal's threshold by the runs that do not collapse."""
    values = np.concatenate([run[name] for run in runs if not find_fall(run["reward"])])
    return 0.8 * values.min() if SIGNALS[name][1] else 1.25 * values.max()


def write_tables(runs: Mapping[tuple[str, int], Run]) -> str:
    lines = [["variant", *(f"seed {seed}" for seed in (*CALIBRATION, *TEST))]]
    for variant in VARIANTS:
        cells = []
        for seed in (*CALIBRATION, *TEST):
            reward = runs[variant, seed]["reward"]
            fall = find_fall(reward)
            cells.append(
                f"falls at {fall}" if fall else f"{reward[:WINDOW].mean():.2f} → {reward[-WINDOW:].mean():.2f}"
            )
        lines.append([variant, *cells])
    tables = table(lines) + "\n"
    calibration, test = ([runs[v, s] for v in VARIANTS for s in seeds] for seeds in (CALIBRATION, TEST))
    falls = [find_fall(run["reward"]) for run in test]
    collapsed, healthy = sum(map(bool, falls)), sum(not fall for fall in falls)
    lines = [["signal", "threshold", "collapses warned of", "steps before the fall, median", "false alarms"]]
    for name, (_, low) in SIGNALS.items():
        threshold = choose_threshold(calibration, name)
        warned = [find_warning(run[name], threshold, low) for run in test]
        ahead = [fall - at for fall, at in zip(falls, warned, strict=True) if fall and 0 < at < fall]
        false = sum(bool(at) for fall, at in zip(falls, warned, strict=True) if not fall)
        side = "below" if low else "above"
        early = f"{np.median(ahead):.0f}" if ahead else ""
        lines.append([name, f"{side} {threshold:.3g}", f"{len(ahead)} of {collapsed}", early, f"{false} of {healthy}"])
    return tables + table(lines) + "\n" + write_again(runs)


def write_again(runs: Mapping[tuple[str, int], Run]) -> str:
    """Write the table of the second rule."""
    lines = [["variant", *(f"seed {seed}: fall, first warning" for seed in AGAIN)]]
    for variant in LARGE:
        cells = []
        for seed in AGAIN:
            run = runs[variant, seed]
            above = np.flatnonzero(run[KL] > LARGEST)
            cells.append(f"{find_fall(run['reward']) or 'none'}, {above[0] + 1 if len(above) else 'none'}")
        lines.append([variant, *cells])
    return table(lines)


def table(lines: list[list[str]]) -> str:
    header, *rows = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *rows))


def read_runs(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, int], Run]:
    found: dict[tuple[str, int], list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault((row["variant"], int(row["seed"])), []).append(row)
    return {
        key: {name: np.array([float(row[name]) for row in steps]) for name in COLUMNS[2:]}
        for key, steps in found.items()
    }


def main() -> None:
    rows: list[dict[str, str]] = []
    if RESULTS.exists():
        with RESULTS.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    wanted = [(variant, seed) for seed in (*CALIBRATION, *TEST) for variant in VARIANTS]
    for variant, seed in (*wanted, *((variant, seed) for seed in AGAIN for variant in LARGE)):
        if not any((row["variant"], row["seed"]) == (variant, str(seed)) for row in rows):
            rows += make_run(variant, seed)
            with RESULTS.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + write_tables(read_runs(rows)) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
