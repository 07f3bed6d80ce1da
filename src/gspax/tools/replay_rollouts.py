"""Implements `gspax replay-rollouts`: trains on the recorded rollouts of a run, without sampling."""

from __future__ import annotations

import argparse
import re

from gspax.commands import processes
from gspax.commands.arguments import (
    Parser,
    add_dry_run,
    add_experiment,
    load_experiment,
    require_directory,
    subcommand_parser,
)
from gspax.errors import UserError, display
from gspax.storage.paths import to_path


def make_parser() -> Parser:
    parser = subcommand_parser(
        "replay-rollouts",
        "Train on the rollouts that a run recorded (schedule.record_rollouts), without sampling: from the run's "
        "checkpoint after step A, on the rollouts of the steps after it up to step B. With the run's own settings the "
        "parameters are those of the run, bit for bit; overrides show what another loss makes of the same samples.",
        "gspax replay-rollouts runs/sort --steps 10:20 experiments/sort_gspo.py --workdir runs/replayed",
    )
    parser.add_argument("run", type=to_path, metavar="RUN", help="the directory of the run")
    add_experiment(parser)
    parser.add_argument(
        "--steps", type=_steps, required=True, metavar="A:B", help="from the state after step A (0: the start) to B"
    )
    add_dry_run(parser)
    processes.add_options(parser)
    return parser


def _steps(text: str) -> range:
    """Return the steps whose rollouts to train on: those after A, up to B."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"wanted A:B with A less than B, such as 10:20, got {text[:50]!r}")
    return range(int(match[1]) + 1, int(match[2]) + 1)


def execute(options: argparse.Namespace) -> int:
    """Train; process 0 then prints a summary."""
    require_directory(options.run)
    experiment = load_experiment(options)
    if options.dry_run:
        return 0
    is_primary = processes.join("replay-rollouts", options, experiment)
    from gspax.experiment.origin import find_origin
    from gspax.report.run_page import summarize
    from gspax.rollout.runtime import make_runtime
    from gspax.run.directory import RunDir
    from gspax.training.replay import replay

    if options.run.absolute() == options.workdir.absolute():
        raise UserError(f"--workdir: wanted another directory than that of the run, got {options.workdir}")
    origin, runtime = find_origin(experiment, options.file), make_runtime(experiment)
    replay(runtime, RunDir(options.run), options.steps, options.workdir, origin=origin)
    if is_primary:
        display(summarize(options.workdir))
    return 0
