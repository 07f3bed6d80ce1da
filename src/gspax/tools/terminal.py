"""Prints the subcommands' output on a terminal, without the control characters that a model's texts may hold."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from gspax.data.chat_template import thinking_marks
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
      opened: the prompt already contains the start of thinking, such as `<think>`.
    """
    shown, thinks = Text(), opened
    opening, end = marks = thinking_marks(text)
    for part in re.split("(" + "|".join(map(re.escape, marks)) + ")", text):
        shown.append(printable(part), style="dim" if thinks or part in marks else "")
        thinks = part == opening or (thinks and part != end)
    return shown
