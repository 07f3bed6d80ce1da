"""`gspax report`: report.html of a run."""

from __future__ import annotations

import argparse

from gspax.commands.arguments import Parser, require_directory, subcommand_parser
from gspax.errors import display
from gspax.storage.paths import to_path


def make_parser() -> Parser:
    parser = subcommand_parser(
        "report", "Write report.html of a run: curves, samples, settings.", "gspax report runs/sort"
    )
    parser.add_argument("workdir", type=to_path, metavar="DIR", help="the run directory")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.workdir)
    from gspax.report.run_page import write

    display(write(options.workdir))
    return 0
