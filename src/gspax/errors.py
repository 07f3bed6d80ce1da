"""Messages for the user: the exceptions that a user can cause, and warnings."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib.metadata
import json
import os
import re
import shlex
import signal
import sys
import sysconfig
import traceback
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # with space the same command may succeed
# Controls, and characters that turn the direction of a text; U+2028 and U+2029 end a line for some programs
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape the control characters of a text except tabs and line breaks, so that none reaches a terminal."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def display(text: str | Path) -> None:
    """Print the output that a command was asked for, on stdout, whoever wrote parts of it."""
    print(printable(str(text)), flush=True)


def warn(sentence: str) -> None:
    """Warn the user, on stderr. With several processes see `multihost.warn_from_primary`."""
    _tell(f"gspax: warning: {sentence}")


def tell(sentence: str) -> None:
    """Tell the user on stderr, whoever wrote the words of the sentence."""
    _tell(f"gspax: {sentence}")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        print(printable(line), file=sys.stderr, flush=True)


@functools.cache
def warn_once(sentence: str) -> None:
    """Warn the user of something that recurs, the first time in this process."""
    warn(sentence)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `did you mean 'gspo'?` with the known name that is most like a wrong one; empty if none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra into the environment that this runs in.

    An editable clone remains editable, and pinned packages keep their versions. Without the constraint and
    `--editable`, pip would replace both without a word.
    """
    clone, editable = _origin()
    if clone is None:  # gspax is on no package index
        return f"pip install '.[{extra}]' in a clone of gspax, see docs/install.md"
    if not editable:
        return f"pip install {shlex.quote(f'{clone}[{extra}]')}"
    if Path(sys.prefix).resolve() == (clone / ".venv").resolve():
        return f"make extras NAMES={extra} in {clone}"
    pins, source = shlex.quote(str(clone / "requirements.txt")), shlex.quote(f"{clone}[{extra}]")
    return f"pip install --constraint {pins} --editable {source}"


def _origin() -> tuple[Path | None, bool]:
    """Find the folder that gspax was installed from, if it is still there, and whether its source is what runs."""
    for installed in importlib.metadata.distributions(name="gspax"):
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        url = urllib.parse.urlsplit(origin.get("url", ""))
        clone = Path(urllib.parse.unquote(url.path))
        if url.scheme == "file" and (clone / "setup.cfg").is_file():
            return clone, origin.get("dir_info", {}).get("editable", False)
    return None, False


def shorten(text: str) -> str:
    """Return the text on one line of at most 300 characters, which a terminal shows and does not obey."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 300 else f"{line[:300]}…"


def describe_error(error: BaseException) -> str:
    """Return `KeyError: 'unit' (my_rewards.py:12)`: an exception of a user's code, and the line that raised it."""
    text = shorten(str(error))
    return f"{type(error).__name__}{text and f': {text}'}{place_of(error)}"


def brief(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type if it has no message."""
    return shorten(str(error)) or type(error).__name__


def place_of(error: BaseException) -> str:
    """Return ` (my_rewards.py:12)`: the last line of a user's own code that an exception passed; empty if none.

    The path is relative to the working directory if it is below it.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if not frames:
        return ""
    path, below = frames[-1].filename, os.path.join(os.getcwd(), "")
    return f" ({path.removeprefix(below)}:{frames[-1].lineno})"


def is_library(path: str) -> bool:
    """Return whether a file belongs to gspax, to Python or to an installed package."""
    folders = (os.path.dirname(__file__), sysconfig.get_path("stdlib"))
    installed = any(f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages"))
    return installed or path.startswith(("<frozen ", *(os.path.join(folder, "") for folder in folders)))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError of its writes, which do not know it: `PATH: No space left on device`."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None and problem.errno is not None:  # without a number its text would be lost
            problem.filename = str(path)
        raise


class UserError(Exception):
    """Raised for invalid input: one sentence that names the field, what was wanted, and what it got."""

    exit_code = 2


class FailureError(UserError):
    """Raised if a run failed although its input is valid, in one sentence. Trying again may help."""

    exit_code = 1


class DivergedError(FailureError):
    """Raised if updates are skipped in a row, parameters not finite, or a run collapses. Trying again does not help."""

    exit_code = 3

    def __init__(self, message: str, *, step: int = 0, position: int = 0, final: bool = False) -> None:
        super().__init__(message)
        self.step, self.position = step, position  # where the run was, and the problems that it had consumed
        self.final = final  # going back to an earlier state would not help either


def unwritable(target: object, problem: OSError) -> UserError:
    """Return the error of a folder that cannot be written; on a full disk trying again may help."""
    kind = FailureError if problem.errno in FULL_DISK else UserError
    return kind(f"{target}: cannot be written: {problem.strerror}")


class Interrupted(Exception):  # noqa: N818  (not an error)
    """Raised if a signal ends the run, whose completed steps are saved, or what `ended` names, which saves nothing."""

    def __init__(self, signum: int, ended: str = "") -> None:
        then = f"{ended} has ended" if ended else "completed steps are saved, the same command continues"
        super().__init__(f"{signal.Signals(signum).name}: {then}")
        self.signum = signum
