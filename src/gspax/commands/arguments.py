"""The parts that the program's command lines are made of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from gspax.errors import UserError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def verb_parser(verb: str, description: str, example: str) -> Parser:
    """The parser of one verb, with an example at the end of its help."""
    return Parser(
        prog=f"gspax {verb}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least: int) -> Callable[[str], int]:
    """A type of argument: whole numbers of at least that much."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wanted a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def size(text: str) -> int:
    """`5GB`, `500MB` or `1000000` as a number of bytes."""
    found = re.fullmatch(r"(\d+)(|KB|MB|GB)", text)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"wanted a size such as 5GB or 500MB, got {text!r}")
    return int(found[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]
