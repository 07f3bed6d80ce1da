"""Train sort_gspo.py and sort_grpo.py with several seeds; the table of ../README.md and sort_seeds.csv.

    python experiments/benchmarks/run_seeds.py FOLDER [SEED ...]

Seeds 0 to 19 unless others are named, two processes at a time. Finished runs are not run again, and interrupted runs
are resumed. `FOLDER/sort_gspo` and `FOLDER/sort_grpo` can be given to `gspax compare` as well.
"""

import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gspax.report.statistics import Estimate, estimate_difference, estimate_mean
from gspax.run.record import read_metrics

EXPERIMENTS, CSV = Path(__file__).parents[1], Path(__file__).with_name("sort_seeds.csv")
VARIANTS = ("sort_gspo", "sort_grpo")
PROCESSES = 2
ROWS = {  # column of the CSV -> label of the table
    "before": "sampled reward after the warm start",
    "after": "**sampled reward at the end**",
    "greedy_before": "greedy reward after the warm start",
    "greedy_after": "greedy reward at the end",
    "training": "training reward, last 10 steps",
    "clipped_sequences": "clipped: share of sequences, mean over the run",
    "clipped_tokens": "clipped: share of tokens, mean over the run",
    "changed": "expert choices changed by a rollout's updates",
    "mismatch_max": "largest sampler-learner log-prob difference of the run",
}


def main(folder: Path, seeds: list[int]) -> None:
    runs = [(variant, seed) for variant in VARIANTS for seed in seeds]
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda each: train(folder, *each), runs))
    report(folder, runs)


def report(folder: Path, runs: list[tuple[str, int]]) -> None:
    """Write the CSV and print the table."""
    rows = [{"variant": variant, "seed": seed, **summarize(workdir(folder, variant, seed))} for variant, seed in runs]
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(tabulate(rows))
    environment = json.loads((workdir(folder, *runs[0]) / "environment.json").read_text())
    print(f"\nCommit {environment[0]['commit'][:7]}.")


def workdir(folder: Path, variant: str, seed: int) -> Path:
    return folder / variant / str(seed)


def train(folder: Path, variant: str, seed: int) -> None:
    path = workdir(folder, variant, seed)
    if (path / "report.html").exists():  # written last
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gspax", "train", str(EXPERIMENTS / f"{variant}.py"), "--workdir", str(path)]
    with (folder / f"{variant}_{seed}.log").open("a") as log:
        subprocess.run([*command, f"seed={seed}", f"data.seed={seed}"], check=True, stdout=log, stderr=log)


def summarize(path: Path) -> dict[str, float]:
    """The figures of a run, by column."""
    records = read_metrics(path / "metrics.jsonl")

    def series(name: str) -> list[float]:
        return [row[name] for row in records if name in row]

    sampled, greedy = series("eval/reward"), series("eval/greedy_reward")
    return {
        "before": sampled[0],
        "after": sampled[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "training": float(np.mean(series("reward/mean")[-10:])),
        "clipped_sequences": float(np.mean(series("policy/clip_fraction_sequences"))),
        "clipped_tokens": float(np.mean(series("policy/clip_fraction_tokens"))),
        "changed": float(np.mean(series("routing/changed"))),
        "mismatch_max": max(series("mismatch/abs_diff_largest_max")),
    }


def tabulate(rows: list[dict]) -> str:
    """Mean, 95 % interval and standard deviation over seeds of both variants, their paired difference, every seed."""
    lines = ["| mean [95 % interval] (standard deviation) | GSPO | GRPO | GRPO - GSPO |", "| --- | --- | --- | --- |"]
    for column, label in ROWS.items():
        gspo, grpo = ({row["seed"]: row[column] for row in rows if row["variant"] == variant} for variant in VARIANTS)
        both = [seed for seed in gspo if seed in grpo]
        difference = estimate_difference(*(np.array([variant[seed] for seed in both]) for variant in (gspo, grpo)))
        lines.append(f"| {label} | {mean(gspo)} | {mean(grpo)} | {interval(difference)} |")
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    lines += ["", f"| sampled reward at the end, seed | {' | '.join(map(str, seeds))} |"]
    lines.append("| --- |" + " --- |" * len(seeds))
    for variant in VARIANTS:
        after = {row["seed"]: f"{row['after']:.3f}" for row in rows if row["variant"] == variant}
        lines.append(f"| `{variant}.py` | {' | '.join(after.get(seed, '') for seed in seeds)} |")
    return "\n".join(lines)


def mean(values: dict[int, float]) -> str:
    of_seeds = np.array([*values.values()])
    return f"{interval(estimate_mean(of_seeds))} ({number(of_seeds.std(ddof=1))})"


def interval(found: Estimate) -> str:
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def number(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 5e-3 or value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or list(range(20)))
