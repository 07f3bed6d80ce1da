"""gspax and TRL on SmolLM2-135M-Instruct with the same weights, in float32 and in bfloat16: speed_smollm2.md.

    python experiments/benchmarks/bench_smollm2.py DIR --trl PYTHON --commit COMMIT

The workload is `smollm2_workload.py`. It needs what `make real` fetches, an interpreter with TRL and a CPU build of
torch, 16 GB of memory, and an idle machine. DIR keeps the exported weights and the figures of each type, so that a run
that was stopped continues. In bfloat16, gspax computes in bfloat16 and keeps float32 parameters; TRL's parameters are
bfloat16, its fastest way. A processor without AMX or AVX512-BF16 gains nothing from it: `--dtypes float32`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_against_peers
import peers

from gspax.experiment import load

HERE = Path(__file__).parent
FILE = HERE / "smollm2_workload.py"
DTYPES = ("float32", "bfloat16")
STEPS = 3  # of each process, after the first
GOAL = 0.70  # of TRL's wall time of a step, each in its better type
PARTS = 8  # forward and backward passes of TRL's update: 128 rows at once need more than 24 GB


def export(folder: Path) -> Path:
    """The weights for transformers, written now if they are not there."""
    exported = folder / "weights"
    if not exported.exists():
        source = load(FILE).model.checkpoint
        command = ["-m", "gspax", "export", "--from", source, "--to", str(exported), "--dtype", "float32"]
        subprocess.run([sys.executable, *command], check=True)
    return exported


def read_or_compare(folder: Path, dtype: str, trl: str, rounds: int) -> dict[str, Any]:
    """The comparison in one type, measured now if it is not there."""
    path = folder / f"{dtype}.json"
    if not path.exists():
        experiment = load(FILE)
        shape = peers.shape(experiment.model, experiment.sampling)
        shape |= {"folder": str(export(folder).resolve()), "dtype": dtype, "parts": PARTS, "steps": 1 + STEPS}
        overrides = [f"model.dtype={dtype}"]
        result = peers.compare({"TRL": trl}, [str(FILE), "--steps", str(STEPS), *overrides], shape, rounds)
        path.write_text(json.dumps({"overrides": overrides, **result}, indent=1) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def write_table(comparisons: dict[str, dict[str, Any]], commit: str) -> list[str]:
    seconds = {
        name: min(comparison["rows"]["step, wall s"][name] for comparison in comparisons.values())
        for name in ("gspax", "TRL")
    }
    share = seconds["gspax"] / seconds["TRL"]
    lines = [
        "# SmolLM2-135M-Instruct, compared with TRL",
        "",
        f"Written by `bench_smollm2.py` at {commit}: `smollm2_workload.py` (16 prompts x 8 answers x 64 new tokens,",
        f"GSPO, one update a rollout) on {os.cpu_count()} CPU cores. The processes alternate. TRL's update is split",
        f"into {PARTS} passes. Compare wall seconds: torch's threads spin while they wait.",
        "",
    ]
    for dtype, comparison in comparisons.items():
        lines += bench_against_peers.comparison_table(dtype, comparison)
    types = "each in its better type" if len(comparisons) > 1 else f"in {next(iter(comparisons))}"
    met = "met" if share <= GOAL else "missed"
    return [
        *lines,
        f"A step takes {share:.2f} of TRL's wall time, {types} (at most {GOAL:.2f}: {met}).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="of the JSON files and the exported weights")
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="an interpreter with TRL")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="float32, bfloat16, or both")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="the first fills the compilation cache")
    parser.add_argument("--commit", required=True, help="what is measured")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    comparisons = {
        dtype: read_or_compare(options.folder, dtype, options.trl, options.rounds) for dtype in options.dtypes
    }
    lines = write_table(comparisons, options.commit)
    (HERE / "speed_smollm2.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
