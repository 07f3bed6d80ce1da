"""`gspax doctor`: whether gspax computes correctly and fast on the devices of this machine or of all hosts.

It needs no experiment and downloads nothing. Each check compares what the devices compute with a reference, or a rate
with a limit, and prints a line when it is done: ok, slow, wrong, or skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gspax.commands import processes
from gspax.commands.arguments import Parser, require_directory, require_file, subcommand_parser
from gspax.errors import naming
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from rich.text import Text

    from gspax.tools.doctor.results import Check
    from gspax.types import JsonObject

STALL_TIMEOUT = 600  # seconds; no check takes as long
COLORS = {"ok": "green", "skipped": "dim", "slow": "yellow", "wrong": "bold red"}  # by status
PAGE = "docs/howto/check_hardware.md"


def make_parser() -> Parser:
    parser = subcommand_parser(
        "doctor",
        "Check that gspax computes correctly and fast on these devices, in a few minutes, without an experiment. The "
        "exit code is 1 if something is wrong; what is slow is only reported.",
        "gspax doctor --output doctor.txt",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed, for a bug report")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results as JSON")
    parser.add_argument(
        "--workdir", type=to_path, metavar="DIR", help="the folder for runs: write the checkpoint there, and delete it"
    )
    parser.add_argument(
        "--log-probs", action="store_true", help="compare log-probs for every kind of layer, in several minutes more"
    )
    processes.add_options(parser)
    parser.set_defaults(file=None, stall_timeout=STALL_TIMEOUT)
    return parser


def execute(options: argparse.Namespace) -> int:
    """Print the table of versions and a line for each result; return 1 if one is wrong."""
    if options.workdir is not None:
        storage = open_storage(options.workdir)
        storage.require_usable(options.workdir)
        if storage.has_folders:
            require_directory(options.workdir)
    for file in filter(None, (options.output, options.json)):
        require_file(file)
    is_primary = processes.join("doctor", options, None)
    from gspax.tools.doctor import checklist, results
    from gspax.tools.terminal import make_console

    place = results.Place(options.workdir or Path(tempfile.gettempdir()), shared=options.workdir is not None)
    console = make_console(quiet=not is_primary)
    with contextlib.ExitStack() as stack:
        file, status = None, None
        if is_primary and options.output is not None:
            file = stack.enter_context(options.output.open("w", encoding="utf-8"))
        if console.is_terminal:
            status = stack.enter_context(console.status(""))

        def show(line: str) -> None:
            console.print(color(line))
            if file is not None:
                print(line, file=file, flush=True)  # a check may hang, until the watchdog ends the process

        checks = checklist.make_checks(place, every_kind=options.log_probs)
        report = run(checks, show, announce=status.update if status else announce_nothing)
    if is_primary and options.json is not None:
        with naming(options.json):
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["status"] == "wrong" for result in report["results"]) else 0


def color(line: str) -> Text:
    """Color the status at the beginning of a line, where the terminal has colors."""
    from rich.text import Text

    status = line.partition(" ")[0]
    return Text.assemble((status, COLORS.get(status, "")), line[len(status) :])


def announce_nothing(name: str) -> None:
    """Announce no check, where there is no terminal."""


def run(
    checks: Mapping[str, Check], show: Callable[[str], None], announce: Callable[[str], None] = announce_nothing
) -> JsonObject:
    """Run the checks, show their results, announce each before it runs, and return what `--json` writes."""
    from gspax.parallel import watchdog
    from gspax.tools.doctor import hardware, results

    began, cpu, described = time.perf_counter(), time.process_time(), hardware.describe()
    for name, value in described.items():
        pairs = [f"{key} {each}" for key, each in value.items()] if isinstance(value, dict) else [value]
        show(f"{name:12} {shlex.join(value) if isinstance(value, list) else ', '.join(map(str, pairs))}")
    show("\n" + results.row("status", "check", "difference or rate", "note"))
    finished = []
    for name, check in checks.items():
        watchdog.progress(name)
        announce(name)
        for result in results.run(name, check):
            finished.append(result)
            show(str(result))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    counts = Counter(result.status for result in finished)
    found = ", ".join(f"{counts[status]} {status}" for status in results.WORST if counts[status])
    show(f"\n{found} in {seconds:.0f} s ({cpu:.0f} s of CPU time)")
    if counts["wrong"] or counts["slow"]:
        show(f"What this means and what to try: {PAGE}")
    return {"environment": described, "results": [vars(result) for result in finished], "seconds": seconds}
