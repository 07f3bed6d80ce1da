"""Whether `guard` and `gspax diagnose` notice a run that gets worse slowly, and how often they accuse a healthy one.

    python experiments/studies/alarms/gradual.py

It takes a quarter of a minute on a core and trains nothing: it simulates the metrics of runs of 200 steps, and writes
the tables in README.md. A step has 32 prompts with 8 samples each, whose rewards are 0 or 1; the pass rates of prompts
differ (a beta distribution, in which samples of one prompt correlate by 0.5). An evaluation, every 10 steps, has 256
samples. In a faulty run the reward rises to 0.6 in 50 steps, and then one metric changes evenly until the last step.
`guard` has `collapse=Collapse()`, everything else is the default. The recorded runs are those of runs.csv that do not
collapse.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from alarms import find_fall, read_runs, table

from gspax.config import Collapse, Guard
from gspax.tools.diagnosis import Record, find_causes
from gspax.training.run_guard import Watch, alarm_metrics, find_collapse, follow

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- gradual: written by gradual.py -->\n", "<!-- end of gradual -->"
STEPS, PEAK, RUNS = 200, 50, 200
PROMPTS, GROUP, HELD_OUT, EVERY = 32, 8, 256, 10
GUARD = Guard(collapse=Collapse())
Metrics = dict[str, np.ndarray]  # of a run, by name, in the order of its steps; evaluations are fewer
Curves = Mapping[str, np.ndarray]  # expected values of every step

STEP = np.arange(STEPS)
LATE = np.clip((STEP - PEAK) / (STEPS - 1 - PEAK), 0, 1)  # 0 up to the peak, 1 at the end
RISE = 0.2 + 0.4 * np.clip(STEP / PEAK, 0, 1)
LEARNING = {"reward": RISE + 0.2 * LATE, "held out": RISE + 0.1 * LATE}
HEALTHY: dict[str, Curves] = {
    "rises, then slowly": LEARNING,
    "stays at 0.6": {"reward": RISE, "held out": RISE},
    "stays at 0.05": {"reward": RISE / 12, "held out": RISE / 12},
    "reward drops to 0.45 for 20 steps": {**LEARNING, "reward": np.where((STEP >= 100) & (STEP < 120), 0.45, RISE)},
    "entropy falls to 0.05": {**LEARNING, "entropy": 0.05 ** np.clip(STEP / 100, 0, 1)},
}
FAULTY: dict[str, Curves] = {
    "reward falls to 0.4": {"reward": RISE - 0.2 * LATE, "held out": RISE - 0.2 * LATE},
    "reward falls to 0.2": {"reward": RISE - 0.4 * LATE, "held out": RISE - 0.4 * LATE},
    "reward falls to 0": {"reward": RISE - 0.6 * LATE, "held out": RISE - 0.6 * LATE},
    "entropy sinks to 0.001": {**LEARNING, "entropy": 0.001**LATE},
    "truncated responses grow to 70 %": {**LEARNING, "truncated": 0.7 * LATE},
    "truncated responses grow to 100 %": {**LEARNING, "truncated": LATE},
    "held-out falls by 0.2, training rises": {**LEARNING, "held out": RISE - 0.2 * LATE},
    "held-out falls by 0.4, training rises": {**LEARNING, "held out": RISE - 0.4 * LATE},
}


def sample(rng: np.random.Generator, curves: Curves) -> Metrics:
    """Sample the metrics of a run around their expected values."""
    mean_SP = np.clip(curves["reward"], 1e-3, 1 - 1e-3)[:, None].repeat(PROMPTS, axis=1)
    right_SP = rng.binomial(GROUP, rng.beta(mean_SP, 1 - mean_SP))  # a + b = 1: samples of a prompt correlate by 1/2
    reward, at = right_SP.mean(1) / GROUP, slice(0, None, EVERY)
    held_out = rng.binomial(HELD_OUT, np.clip(curves["held out"][at], 0, 1)) / HELD_OUT
    half = 1.96 * np.sqrt(np.maximum(held_out * (1 - held_out), 1 / HELD_OUT) / HELD_OUT)
    truncated = rng.binomial(PROMPTS * GROUP, curves.get("truncated", np.zeros(STEPS))) / (PROMPTS * GROUP)
    return {
        "reward/mean": reward,
        "reward/std": np.sqrt(reward * (1 - reward)),
        "policy/entropy": curves.get("entropy", np.ones(STEPS)) * rng.lognormal(0, 0.1, STEPS),
        "response/truncated": truncated,
        "response/length_mean": 100 + 400 * truncated,
        "eval/reward": held_out,
        "eval/reward_low": held_out - half,
        "eval/reward_high": held_out + half,
    }


def watch(metrics: Metrics) -> tuple[int, int]:
    """Return the first steps from 1 with an alarm and with a collapse; 0 if there is none."""
    found, first, collapse = Watch(), 0, 0
    of_steps = {name: values for name, values in metrics.items() if not name.startswith("eval/")}
    with contextlib.redirect_stderr(io.StringIO()):
        for number, row in enumerate(zip(*of_steps.values(), strict=True), start=1):
            found = follow(GUARD, found, dict(zip(of_steps, map(float, row), strict=True)))
            first = first or number * any(alarm_metrics(GUARD, found).values())
            collapse = collapse or number * bool(find_collapse(GUARD.collapse or Collapse(), found))
    return first, collapse


def diagnose(metrics: Metrics) -> list[str]:
    """Return the causes that `gspax diagnose` names at the end of a run."""
    low = metrics["policy/entropy"] < GUARD.min_entropy
    series = {name: ([*range(1, len(values) + 1)], values.tolist()) for name, values in metrics.items()}
    series["alarm/entropy"] = (series["policy/entropy"][0], low.astype(float).tolist())
    return [finding.cause for finding in find_causes(Record(series))[0]]


def row(name: str, runs: Sequence[Metrics]) -> list[str]:
    """Return the row of a table about some runs."""
    counts, causes = np.array([0, 0, 0]), dict[str, int]()
    for metrics in runs:
        named = diagnose(metrics)
        counts += np.array([*watch(metrics), len(named)]) > 0
        for cause in named:
            causes[cause] = causes.get(cause, 0) + 1
    shares = [f"{count / len(runs):.1%}" for count in counts]
    return [name, *shares, ", ".join(sorted(causes, key=lambda cause: -causes[cause])[:2])]


def recorded() -> list[Metrics]:
    """Return the metrics of the recorded runs that do not collapse."""
    with (HERE / "runs.csv").open(encoding="utf-8", newline="") as file:
        runs = read_runs([*csv.DictReader(file)])
    return [
        {"reward/mean": run["reward"], "reward/std": np.full(len(run["reward"]), 0.4), "policy/entropy": run["entropy"]}
        for run in runs.values()
        if not find_fall(run["reward"])
    ]


def main() -> None:
    simulated = {
        name: [sample(np.random.default_rng(number), curves) for number in range(RUNS)]
        for name, curves in (HEALTHY | FAULTY).items()
    }
    good, columns = recorded(), ["an alarm", "a collapse", "`gspax diagnose` names a cause", "which"]
    healthy = [row(name, simulated[name]) for name in HEALTHY] + [row(f"{len(good)} recorded ones", good)]
    faulty = [row(name, simulated[name]) for name in FAULTY]
    text = table([["healthy runs", *columns], *healthy]) + "\n" + table([["faulty runs", *columns], *faulty])
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
