"""gspax, google-tunix, and TRL on three shapes; more experts; sampling in all its cases: the tables of speed.md.

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
from pathlib import Path
from typing import Any

import bench_sampling
import peers

from gspax.experiment import load, override

HERE = Path(__file__).parent
FILE = HERE.parent / "bench_small_moe.py"
BENCH = "-m", "gspax", "bench", str(FILE)
SHAPES = {
    "moe": (),
    "dense": ("model.num_experts=0", "model.intermediate_size=512"),
    "256": ("sampling.max_tokens=256",),  # google-tunix needs more than 7 GB
}

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
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="of each shape; the second reads the compilation cache"
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
    for name in options.shapes:
        path = options.folder / f"{name}.json"
        lines += comparison_table(name, read_or_compare(path, pythons, options.rounds, *SHAPES[name]))
    lines += ["## From 8 to 64 experts", "", *widened(options.folder)]
    sampling = run_once(options.folder / "sampling.json", str(HERE / "bench_sampling.py"), str(FILE))
    lines += ["## Sampling alone", "", *bench_sampling.table(sampling["figures"])]
    (HERE / "speed.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
