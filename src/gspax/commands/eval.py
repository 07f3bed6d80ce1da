"""`gspax eval`: held-out rewards of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspax.commands import launch
from gspax.commands.arguments import Parser, add_experiment, at_least, subcommand_parser
from gspax.commands.inputs import load_experiment, require_directory


def make_parser() -> Parser:
    parser = subcommand_parser(
        "eval",
        "Measure a checkpoint on held-out problems, sampled at temperature 1 and decoded greedily.",
        "gspax eval experiments/sort_gspo.py --workdir runs/sort --step 100 evaluation.problems=1024",
    )
    add_experiment(parser)
    parser.add_argument("--workdir", type=Path, metavar="DIR", required=True, help="the run directory")
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    launch.add_options(parser)
    return parser


def execute(options: argparse.Namespace) -> int:
    experiment = load_experiment(options)
    require_directory(options.workdir)
    launch.join("eval", options, experiment)
    from gspax.evaluation.heldout import run

    run(experiment, options.workdir, options.step)
    return 0
