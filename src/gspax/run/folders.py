"""Folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gspax.errors import UserError


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder, which becomes `target` when the block ends without an error and is deleted otherwise.

    It is `NAME.*.tmp` beside `target`; only a process that is killed leaves one behind.

    Raises:
      UserError: `target` exists and is not an empty folder, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: wanted a new or an empty folder, it exists and is not empty")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as problem:
        raise UserError(f"{target}: cannot be written: {problem.strerror}") from problem
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # as for any new folder; mkdtemp makes it private
        os.replace(temporary, target)
    except OSError as problem:
        raise UserError(f"{target}: cannot be written: {problem.strerror}") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
