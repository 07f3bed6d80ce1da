"""Renders chat templates, which are other people's programs, in a process with limits of memory and of time.

One such process serves the current one until it exits. `data/template_child.py` is its program.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gspax.errors import UserError, how_to_install, shorten

LONGEST = 30.0  # seconds for one template; rendering takes a millisecond unless a loop does not end
_CHILD = Path(__file__).with_name("template_child.py")
_lock = threading.Lock()


class TemplateError(Exception):
    """Raised when a template could not be rendered."""


def render(template: str, variables: Mapping[str, object]) -> str:
    """Render a template to a text of at most `template_child.LONGEST` characters.

    Raises:
      TemplateError: the template fails, or exceeds the limit of memory or of time.
      UserError: jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise UserError(f"chat templates need jinja2: {how_to_install('train')}")
    line = json.dumps({"template": template, "variables": variables}, default=lambda value: f"<{type(value).__name__}>")
    with _lock:
        child = _child(os.getpid())
        try:
            answer = child.ask(line, LONGEST)
        except BaseException:  # also Ctrl-C: the pending answer must not go to the next template
            child.end()
            _child.cache_clear()
            raise
    if "error" in answer:
        raise TemplateError(shorten(answer["error"]))
    return str(answer["text"])


class _Child:
    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL")}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program, with which the child ends
        )

    def ask(self, line: str, seconds: float) -> dict[str, str]:
        """Send a line and return the child's answer. TemplateError if the child exits or takes too long."""
        process, until = self._process, time.monotonic() + seconds
        assert process.stdin is not None and process.stdout is not None
        data, got = memoryview(f"{line}\n".encode()), bytearray()
        write, read = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(write, False)
        with selectors.DefaultSelector() as ready:
            ready.register(read, selectors.EVENT_READ)
            ready.register(write, selectors.EVENT_WRITE)
            while not got.endswith(b"\n"):
                if (left := until - time.monotonic()) <= 0:
                    raise TemplateError(f"no result after {seconds:g} s")
                for key, _ in ready.select(left):
                    if key.fd == read:
                        if not (part := os.read(read, 2**20)):
                            raise TemplateError("the process that rendered it has ended")
                        got += part
                        continue
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        data = data[os.write(write, data) :]
                    if not data:
                        ready.unregister(write)
        answer: dict[str, str] = json.loads(got)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.lru_cache(maxsize=1)
def _child(process: int) -> _Child:
    """Start the child of this process, once; a forked process starts its own child."""
    return _Child()
