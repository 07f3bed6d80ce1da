"""Implements `gspax bench`: measures how fast an experiment samples and trains on this machine.

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
from gspax.commands.arguments import (
    Parser,
    add_experiment,
    at_least,
    load_experiment,
    require_file,
    require_possible,
    subcommand_parser,
)
from gspax.errors import display, naming

if TYPE_CHECKING:
    from gspax.config import Experiment


def make_parser() -> Parser:
    parser = subcommand_parser(
        "bench",
        "Measure how fast an experiment samples and trains on this machine, compared with the machine's limits.",
        "gspax bench experiments/sort_gspo.py --json bench.json sampling.prompts=128",
    )
    add_experiment(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of one step for Perfetto or XProf")
    parser.add_argument("--steps", type=at_least(1), default=7, metavar="N", help="steps after the first (default: 7)")
    processes.add_options(parser)
    return parser


def execute(options: argparse.Namespace) -> int:
    if options.json is not None:
        require_file(options.json)
    if options.profile is not None:
        require_possible(options.profile)
    experiment = load_experiment(options)
    is_primary = processes.join("bench", options, experiment)
    show = display if is_primary else lambda line: None
    result = run(experiment, options.profile, show, options.steps)
    if is_primary and options.json is not None:
        text = json.dumps({"overrides": options.overrides, **result}, indent=1)
        with naming(options.json):
            options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0


def run(experiment: Experiment, trace: Path | None, show: Callable[[str], None], number: int) -> dict[str, object]:
    """Measure so many steps after the first, print the figures, and return what `--json` writes."""
    import jax

    from gspax.rollout.runtime import make_runtime
    from gspax.tools import benchmarks

    runtime = make_runtime(experiment)
    steps = benchmarks.measure_steps(runtime, trace, number)
    figures = benchmarks.phases(runtime, steps.metrics)
    show(
        f"first step done {steps.first_step_s:.1f} s after the start ({steps.first_step_cpu_s:.1f} CPU s); "
        f"{steps.programs} programs compiled in {steps.compile_s:.1f} s "
        f"({steps.cached_programs} read from the cache)"
    )
    show(f"peak memory {steps.peak_memory_bytes / 2**30:.2f} GiB")
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
        **{name: value for name, value in vars(steps).items() if name != "metrics"},
        "figures": [figure.to_json(limits) for figure in figures],
    }
