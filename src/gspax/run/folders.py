"""Writes files and folders completely or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gspax.errors import UserError, warn
from gspax.run import lock
from gspax.storage.files import open_storage

LAST = ("adapter_config.json", "config.json")  # of a checkpoint, which is none without it


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file so that a reader finds the old content or the new, even after a kill or a power loss.

    Args:
      private: only the user may read it. In a bucket its own rules decide.

    Raises:
      lock.LostError: this process has lost the lock of its run, whose file this may be.
    """
    lock.require_held()
    data = content.encode("utf-8") if isinstance(content, str) else content
    open_storage(path).write(path, data, private=private)


def append_line(path: Path, line: str) -> None:
    """Append a line, which ends in a newline, to a rarely written file: in a bucket all of it is written again.

    LostError as `write_atomically`.
    """
    lock.require_held()
    make_room(path)
    open_storage(path).append(path, line.encode())


@contextlib.contextmanager
def as_warning(path: Path) -> Iterator[None]:
    """Turn the failed write of a page into a warning: the results that it shows are in other files."""
    try:
        yield
    except OSError as problem:
        warn(f"{path} was not written: {problem.strerror or problem}")


def remove_folder(folder: Path) -> None:
    """Delete a folder and all that is in it, as far as this process may."""
    open_storage(folder).remove(folder)


def unused_name(path: Path, prefix: str) -> Path:
    """Return the path with the name `PREFIX_NAME`, or with a number after it if that exists."""
    names = (f"{prefix}_{path.name}" + (f"_{n}" if n else "") for n in range(10000))
    return next(unused for name in names if not (unused := path.with_name(name)).exists())


def set_aside(path: Path, why: str = "is damaged") -> None:
    """Rename a file or folder that a run cannot use, and warn the user."""
    target = unused_name(path, "damaged")
    open_storage(path).move(path, target)
    warn(f"{path} {why}: moved to {target.name}")


def make_room(path: Path) -> None:
    """Set aside what is in the place of a file: a folder, or a pipe, whose reader would be waited for."""
    if open_storage(path).has_folders and path.exists() and not path.is_file():
        set_aside(path, "is a folder" if path.is_dir() else "is no regular file")


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` when the block ends without an error and is deleted otherwise.

    It is `NAME.*.tmp` next to `target`; only a process that is killed leaves one behind. For a bucket it is a temporary
    folder of this machine, whose files are copied, those in `LAST` after all others.

    Raises:
      UserError: `target` exists and is not an empty folder, or cannot be written, as in a bucket that does not exist.
    """
    storage = open_storage(target)
    storage.require_usable(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: wanted a new or an empty folder, it exists and is not empty")
    with storage.build(target, LAST) as folder:
        yield folder
