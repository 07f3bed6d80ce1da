"""`gspax bench`: how fast an experiment samples and trains on this machine.

It times `training.step.run_step`, which `gspax train` runs, and what the machine can do at most. Seconds are medians
over the calls after the first, which compiles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import gspax
from gspax.commands import processes
from gspax.commands.arguments import Parser, add_experiment, load_experiment, subcommand_parser
from gspax.errors import UserError

if TYPE_CHECKING:
    from gspax.config import Experiment

PARTS = ("step", "drawing", "scoring")


def make_parser() -> Parser:
    parser = subcommand_parser(
        "bench",
        "Measure how fast an experiment samples and trains on this machine, compared with the machine's limits.",
        "gspax bench experiments/sort_gspo.py --parts step,drawing --json bench.json sampling.prompts=128",
    )
    add_experiment(parser)
    parser.add_argument(
        "--parts",
        type=parse_parts,
        default=("step",),
        metavar="A,B",
        help="what to measure: step (whole steps and the first one), drawing (equal and ragged lengths, short and "
        "long, more experts), scoring (default: step)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of one step for Perfetto or XProf")
    processes.add_options(parser)
    return parser


def parse_parts(text: str) -> tuple[str, ...]:
    """An argument type: some of PARTS, separated by commas."""
    parts = tuple(text.split(","))
    if wrong := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"wanted some of {','.join(PARTS)}, got {wrong[0]!r}")
    return parts


def execute(options: argparse.Namespace) -> int:
    experiment = load_experiment(options)
    if options.profile and "step" not in options.parts:
        raise UserError(f"--profile: wanted the part step, got --parts {','.join(options.parts)}")
    is_primary = processes.join("bench", options, experiment)
    result = run(experiment, options.parts, options.profile, print if is_primary else lambda line: None)
    if is_primary and options.json is not None:
        text = json.dumps({"overrides": options.overrides, **result}, indent=1)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0


def run(
    experiment: Experiment, parts: tuple[str, ...], trace: Path | None, show: Callable[[str], None]
) -> dict[str, object]:
    """Measure the parts, print them, and return what `--json` writes."""
    import jax

    from gspax.commands import benchmarks
    from gspax.rollout.runtime import make_runtime

    runtime = make_runtime(experiment)
    figures: list[benchmarks.Figure] = []
    facts: dict[str, object] = {}
    if "step" in parts:  # first, for the sake of the first step and of the peak
        steps = benchmarks.measure_steps(runtime, trace)
        facts = {name: value for name, value in vars(steps).items() if name != "metrics"}
        show(
            f"first step done {steps.first_step_s:.1f} s after the start ({steps.first_step_cpu_s:.1f} CPU s); "
            f"{steps.programs} programs compiled in {steps.compile_s:.1f} s "
            f"({steps.cached_programs} read from the cache)"
        )
        show(f"peak memory {steps.peak_memory_bytes / 2**30:.2f} GiB")
        figures += benchmarks.phases(runtime, steps.metrics)
    if "drawing" in parts:
        figures += benchmarks.measure_sampling(runtime)
    if "scoring" in parts:
        figures.append(benchmarks.measure_logprobs(runtime))
    limits = benchmarks.measure_limits(experiment.model.dtype)
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    show(benchmarks.table(figures, limits))
    show(
        f"limits, measured: matmul {limits.matmul_flops / 1e9:.1f} GFLOP/s ({experiment.model.dtype}), "
        f"copy {limits.copy_bytes / 1e9:.1f} GB/s ({devices})"
    )
    if trace is not None:
        show(f"trace of one step: {trace} (open perfetto_trace.json.gz in ui.perfetto.dev, or the folder in XProf)")
    return {
        "gspax": gspax.__version__,
        "jax": metadata.version("jax"),
        "experiment": experiment.name,
        "devices": devices,
        "limits": vars(limits),
        **facts,
        "figures": [figure.to_json(limits) for figure in figures],
    }
