"""`gspax sft`: only the supervised warm start of an experiment."""

from __future__ import annotations

import argparse

from gspax.commands import processes
from gspax.commands.arguments import Parser, add_dry_run, add_experiment, load_experiment, subcommand_parser


def make_parser() -> Parser:
    parser = subcommand_parser(
        "sft",
        "Run only the supervised warm start of an experiment.",
        "gspax sft experiments/sort_gspo.py --workdir runs/sort_sft warm_start.steps=100",
    )
    add_experiment(parser)
    add_dry_run(parser)
    processes.add_options(parser)
    return parser


def execute(options: argparse.Namespace) -> int:
    experiment = load_experiment(options, for_sft=True)
    if options.dry_run:
        return 0
    processes.join("sft", options, experiment)
    from gspax.training.warm_start import run

    run(experiment, options.workdir, options.file)
    return 0
