"""The parts that the subcommands' parsers are made of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspax.errors import UserError


class Parser(argparse.ArgumentParser):
    """Reports a usage error as one sentence, without the usage text."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def subcommand_parser(name: str, description: str, example: str, kind: type[Parser] = Parser) -> Parser:
    """The parser of one subcommand, with an example at the end of its help."""
    return kind(
        prog=f"gspax {name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_experiment(parser: Parser) -> None:
    """`FILE` and its overrides."""
    parser.add_argument("file", metavar="FILE", help="a Python file that defines `experiment = Experiment(...)`")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="set a field of the experiment; the last one wins (null for None)"
    )


def add_dry_run(parser: Parser) -> None:
    """`--workdir`, and `--dry-run` with its `--devices`."""
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="the run directory (not needed for a dry run)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print settings and costs, and stop")
    parser.add_argument("--devices", type=at_least(1), metavar="N", help="devices that a dry run assumes (default: 1)")


def add_target(parser: Parser, dtype: str) -> None:
    """`--to` and `--dtype` of a command that writes a checkpoint; `dtype` is the default."""
    parser.add_argument(
        "--to",
        dest="target",
        type=Path,
        metavar="DIR",
        required=True,
        help="a new folder, complete or absent",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=dtype, help=f"of the parameters (default: {dtype})"
    )


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wanted an integer of at least {least}, got {text!r}")
        return int(text)

    return parse


def require_address(text: str) -> None:
    """UserError unless the coordinator is `HOST:PORT` with a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    if not host.strip() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535:
        raise UserError(f"--coordinator: wanted HOST:PORT with a port from 1 to 65535, got {text[:200]!r}")


def size(text: str) -> int:
    """`5GB`, `500MB` or `1000000` as a number of bytes."""
    found = re.fullmatch(r"(\d+)(|KB|MB|GB)", text)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"wanted a size such as 5GB or 500MB, got {text!r}")
    return int(found[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]
