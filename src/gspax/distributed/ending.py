"""Ending the process at once, from any thread, with one sentence as the last line of its output."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor and may not be able to restore it
PATIENCE = 2.0  # seconds for what may block: another thread may hold a lock or wait for a host that is gone


def end_process(sentence: str, code: int, *, first: Callable[[], object] = lambda: None) -> NoReturn:
    """Call `first`, write the sentence to stderr and exit with `code`, whatever the other threads are doing.

    Nothing is cleaned up: the main thread may wait for a collective operation that never ends.
    """
    for work in (first, _flush):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE)
    cursor, stderr, nowhere = SHOW_CURSOR if os.isatty(2) else "", os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what the other threads still print, such as a traceback that follows from this
        os.dup2(nowhere, descriptor)
    os.write(stderr, f"{cursor}\ngspax: {sentence}\n".encode(errors="backslashreplace"))
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
