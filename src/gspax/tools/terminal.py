"""Output of the subcommands on a terminal: texts of a model, which may hold anything, without control characters."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from gspax.data.chat import CLOSE, OPEN
from gspax.errors import printable


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the program end as for every output whose reader has exited, not by an exit code of rich."""
        raise BrokenPipeError


def make_console(*, quiet: bool = False) -> Console:
    """A console of standard output that interprets no markup; a quiet one prints nothing."""
    return _Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet)


def dim_thinking(text: str, *, opened: bool = False) -> Text:
    """The printable text, with thinking blocks dim.

    Args:
      text: a completion, or its beginning.
      opened: the prompt already contains `<think>`.
    """
    shown, thinks = Text(), opened
    for part in re.split(f"({OPEN}|{CLOSE})", text):
        shown.append(printable(part), style="dim" if thinks or part in (OPEN, CLOSE) else "")
        thinks = part == OPEN or (thinks and part != CLOSE)
    return shown
