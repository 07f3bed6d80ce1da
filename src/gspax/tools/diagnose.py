"""Implements `gspax diagnose`: looks for the usual causes of a flat reward in a run."""

from __future__ import annotations

import argparse

from gspax.commands.arguments import Parser, require_directory, subcommand_parser
from gspax.errors import display
from gspax.storage.paths import to_path


def make_parser() -> Parser:
    parser = subcommand_parser(
        "diagnose",
        "Look for the usual causes of a flat reward in a run's metrics and samples, and say what to try.",
        "gspax diagnose runs/sort",
    )
    parser.add_argument("workdir", type=to_path, metavar="DIR", help="the directory of a run, finished or not")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.workdir)
    from gspax.tools.diagnosis import find_causes, read_record, summarize

    record = read_record(options.workdir)
    causes, missing = find_causes(record)
    display(summarize(record))
    for number, (cause, evidence, remedy, page) in enumerate(causes, start=1):
        display(f"\n{number}. {cause}: {evidence}.\n   Try {remedy}.\n   See {page}")
    if not causes:
        display("None of the usual causes of a flat reward shows (docs/howto/flat_reward.md).")
    if missing:
        display(f"Not looked for, because metrics are missing: {', '.join(missing)}.")
    return 0
