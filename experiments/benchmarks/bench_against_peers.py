"""gspax, google-tunix, and TRL on three shapes; a profile; more experts; sampling in all its cases: speed.md.

Runs `gspax bench` for each shape, unless its figures are in DIR already, and writes the tables. A run that failed, as
for want of memory, is repeated by the same command; the figures that DIR has are kept.

Run: python experiments/benchmarks/bench_against_peers.py DIR --tunix PYTHON --trl PYTHON --commit COMMIT
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_sampling
import peers
import profile_parts

from gspax.experiment import load, override

HERE = Path(__file__).parent
FILE = HERE.parent / "bench_small_moe.py"
BENCH = "-m", "gspax", "bench", str(FILE)
SHAPES = {
    "moe": (),
    "dense": ("model.num_experts=0", "model.intermediate_size=512"),
    "256": ("sampling.max_tokens=256",),  # google-tunix needs more than 7 GB
}

GOALS = (  # a quantity of a shape, relative to a peer's where one is named, at most
    ("moe", "step, wall s", "TRL", 0.60),
    ("dense", "step, wall s", "TRL", 0.65),
    ("256", "step, wall s", "TRL", 0.60),
    ("moe", "step, CPU s", "TRL", 0.60),
    ("dense", "step, CPU s", "TRL", 0.60),
    ("256", "step, CPU s", "TRL", 0.60),
    ("moe", "step, wall s", "google-tunix", 0.25),
    ("dense", "step, wall s", "google-tunix", 0.40),
    ("256", "step, wall s", "google-tunix", 0.20),
    ("moe", "first step, wall s", "", 8.0),
    ("moe", "first step with a warm cache, wall s", "", 3.5),
    ("moe", "peak memory, GB", "", 1.0),
)

ROWS = {  # of one step
    128: (),
    1024: ("sampling.prompts=64", "sampling.group=16", "schedule.microbatch_rows=128"),
}


def run_once(path: Path, *command: str) -> dict[str, Any]:
    """The figures in `path`, which a Python program writes now if there are none."""
    if not path.exists():
        subprocess.run([sys.executable, *command, "--json", str(path)], check=True)
    return json.loads(path.read_text(encoding="utf-8"))


def read_or_compare(path: Path, pythons: dict[str, str], rounds: int, *overrides: str) -> dict[str, Any]:
    """The comparison in `path`, measured now if there is none."""
    if not path.exists():
        experiment = override(load(FILE), overrides)
        shape = peers.shape(experiment.model, experiment.sampling)
        result = peers.compare(pythons, [str(FILE), *overrides], shape, rounds)
        path.write_text(json.dumps({"overrides": overrides, **result}, indent=1) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def comparison_table(name: str, figures: dict[str, Any]) -> list[str]:
    """The table of one shape: each quantity, and how many times gspax's value a peer's is."""
    overrides, (ours, *others) = " ".join(figures["overrides"]), figures["runs"]
    columns = ["", ours, *others, *(f"{other} / {ours}" for other in others)]
    lines = [f"### {name}{f' (`{overrides}`)' if overrides else ''}", "", f"| {' | '.join(columns)} |"]
    lines += [f"|{' --- |' * len(columns)}"]
    for quantity, row in figures["rows"].items():
        values = [row[ours], *(row[other] for other in others), *(row[other] / row[ours] for other in others)]
        lines.append(f"| {quantity} | {' | '.join(f'{value:.2f}' for value in values)} |")
    return [*lines, ""]


def goals_table(comparisons: dict[str, dict[str, Any]], train: dict[str, float]) -> list[str]:
    """The table of the goals: what was wanted and what was measured."""
    lines = ["| shape | quantity | goal, at most | measured | |", "| --- | --- | --- | --- | --- |"]
    for shape, quantity, peer, limit in GOALS:
        row = comparisons[shape]["rows"][quantity]
        value = row["gspax"] / (row[peer] if peer else 1)
        name = f"{quantity.removesuffix(' s')}, relative to {peer}" if peer else quantity
        lines.append(f"| {shape} | {name} | {limit:.2f} | {value:.2f} | {'met' if value <= limit else 'missed'} |")
    for (name, value), limit in zip(train.items(), (75, 30), strict=True):
        lines.append(f"| | {name}, s | {limit} | {value:.0f} | {'met' if value <= limit else 'missed'} |")
    return [*lines, ""]


def make_train(path: Path) -> dict[str, float]:
    """Seconds of `make train` in a new clone, and of the run after the installation; from `path` if they are there."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "gspax"
            subprocess.run(["git", "clone", "-q", HERE.parents[1], clone], check=True)
            began = time.monotonic()
            subprocess.run(["make", "train"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
            whole = time.monotonic() - began
            report = clone / "runs" / "sort_gspo" / "report.html"
            run = report.stat().st_mtime - (clone / ".venv" / "installed").stat().st_mtime
        path.write_text(json.dumps({"make train": whole, "the run in it": run}) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def widened(folder: Path) -> list[str]:
    """The table of 8 and 64 experts, of which 2 are active."""
    lines = ["| rows | | 8 experts, CPU s | 64 experts, CPU s | ratio |", "| --- | --- | --- | --- | --- |"]
    for rows, options in ROWS.items():
        few, many = (
            run_once(folder / f"{rows}_rows_{experts}_experts.json", *BENCH, *options, f"model.num_experts={experts}")
            for experts in (8, 64)
        )
        for first, second in zip(few["figures"], many["figures"], strict=True):
            a, b = first["cpu_s"], second["cpu_s"]
            lines.append(f"| {rows:,} | {first['name']} | {a:.2f} | {b:.2f} | {b / a:.2f} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="of the JSON files")
    parser.add_argument("--tunix", required=True, metavar="PYTHON", help="an interpreter with google-tunix")
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="an interpreter with TRL")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of each shape; the first fills the compilation cache"
    )
    parser.add_argument("--commit", required=True, help="what is measured")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pythons = {"google-tunix": options.tunix, "TRL": options.trl}
    lines = [
        "# Speed compared with google-tunix and TRL",
        "",
        f"Written by `bench_against_peers.py` at {options.commit}: `bench_small_moe.py` (16 prompts x 8 samples",
        f"x 64 new tokens, 4 layers of width 128, float32) on {os.cpu_count()} CPU cores. The processes alternate.",
        "On a machine that is shared, compare CPU seconds, but not with TRL's: torch's threads spin while they wait.",
        "The first step counts from the start of the process, imports included, and compiles everything; with a",
        "warm cache gspax reads its programs. The peers have no cache.",
        "",
    ]
    comparisons = {
        name: read_or_compare(options.folder / f"{name}.json", pythons, options.rounds, *overrides)
        for name, overrides in SHAPES.items()
    }
    for name, comparison in comparisons.items():
        lines += comparison_table(name, comparison)
    lines += ["## Goals", "", *goals_table(comparisons, make_train(options.folder / "train.json"))]
    lines += ["## Where the time goes (moe)", "", *profile_parts.tables(profile_parts.measure(FILE, [])), ""]
    lines += ["## From 8 to 64 experts", "", *widened(options.folder)]
    sampling = run_once(options.folder / "sampling.json", str(HERE / "bench_sampling.py"), str(FILE))
    lines += ["## Sampling alone", "", *bench_sampling.table(sampling["figures"])]
    (HERE / "speed.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
