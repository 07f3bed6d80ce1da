"""Writes a file of lines that grows with a run: appended to locally, written in parts to a bucket, and read as one.

An object cannot be appended to, and Cloud Storage accepts one write of an object a second. So the newest part, of up to
`PART` bytes, is written again every `WAIT` seconds and before a save: one request, however long the run is.

metrics.jsonl               all lines of a local run; in a bucket those that were there when the run was last started
metrics.jsonl.part_000000   the lines since then
"""

from __future__ import annotations

import time
from pathlib import Path

from gspax.run import lock
from gspax.run.folders import write_atomically
from gspax.storage.files import open_storage
from gspax.storage.paths import read_bytes

PART = 2**20  # bytes
WAIT, WAIT_AFTER_FAILURE = 10.0, 60.0  # seconds


class File:
    """A local file that lines are appended to; data that cannot be written is retried with the next write."""

    def __init__(self, path: Path) -> None:
        self._file, self._unwritten = path.open("ab", buffering=0), b""

    def write(self, data: bytes) -> None:
        """Append data. OSError on a full disk; LostError without the lock of the run."""
        lock.require_held()
        self._unwritten += data
        self.flush()

    def flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()


class Parts:
    """The new parts of a file in a bucket; data that cannot be written is retried with a later write."""

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._part = path, 0, b""
        self._is_written, self._due = True, time.monotonic() + WAIT
        self._problem: OSError | None = None  # of the last write

    def write(self, data: bytes) -> None:
        """Add lines. OSError if the last write failed; LostError without the lock of the run."""
        self._part, self._is_written = self._part + data, False
        if time.monotonic() >= self._due:
            self.flush()
        elif self._problem is not None:
            raise self._problem

    def flush(self) -> None:
        if self._is_written:
            return
        try:
            write_atomically(self._path.with_name(f"{self._path.name}.part_{self._number:06d}"), self._part)
        except OSError as problem:
            self._problem, self._due = problem, time.monotonic() + WAIT_AFTER_FAILURE
            raise
        self._is_written, self._problem, self._due = True, None, time.monotonic() + WAIT
        if len(self._part) >= PART:
            self._number, self._part = self._number + 1, b""

    def close(self) -> None:
        """Do nothing: no file is open."""


def open_growing(path: Path) -> File | Parts:
    """Open a file to add lines to. OSError if it cannot be opened."""
    return File(path) if open_storage(path).appends else Parts(path)


def read_growing(path: Path) -> bytes:
    """Read the content of a file and its parts. A line that a killed process has left in both is read once."""
    content = read_bytes(path)
    if parts := list_parts(path):
        content = b"".join([content, *(part.read_bytes() for part in parts)])
        content = b"\n".join([*dict.fromkeys(content.split(b"\n")[:-1]), b""])
    return content


def merge_parts(path: Path, content: str) -> None:
    """Replace a file and its parts."""
    parts = list_parts(path)
    write_atomically(path, content)
    for part in parts:
        part.unlink()


def list_parts(path: Path) -> list[Path]:
    """List the parts of a file in a bucket, or of a file that was copied from a bucket, in order."""
    return sorted(path.parent.glob(f"{path.name}.part_*"))
