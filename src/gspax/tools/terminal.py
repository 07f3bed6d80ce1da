"""Prints the subcommands' output on a terminal, without the control characters that a model's texts may hold."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from gspax.data.chat import CLOSE, OPEN
from gspax.errors import printable


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the program end as for every closed output, not by an exit code of rich."""
        raise BrokenPipeError


def make_console(*, quiet: bool = False) -> Console:
    """Make a console for standard output that interprets no markup; a quiet one prints nothing."""
    return _Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet)


def dim_thinking(text: str, *, opened: bool = False) -> Text:
    """Return the printable text, with thinking blocks dim.

    Args:
      text: a completion, or its beginning.
      opened: the prompt already contains `<think>`.
    """
    shown, thinks = Text(), opened
    for part in re.split(f"({OPEN}|{CLOSE})", text):
        shown.append(printable(part), style="dim" if thinks or part in (OPEN, CLOSE) else "")
        thinks = part == OPEN or (thinks and part != CLOSE)
    return shown
