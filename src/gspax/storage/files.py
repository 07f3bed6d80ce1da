"""What gspax asks of a place that holds files; `open_storage(path)` finds the place of a path."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from gspax.storage.bucket import Bucket
from gspax.storage.local import Local
from gspax.storage.objects import Traffic


class Storage(Protocol):
    """An interface that reads and changes whole files and folders. OSError if an operation fails."""

    @property
    def has_folders(self) -> bool:
        """Whether folders exist on their own: without files, where a file should be, under a new name."""

    @property
    def has_links(self) -> bool:
        """Whether links and pipes can stand among files."""

    @property
    def has_sizes(self) -> bool:
        """Whether the size of a file is known before it is read."""

    @property
    def appends(self) -> bool:
        """Whether a file can grow; else each change of it writes all of it, by a request."""

    @property
    def readers(self) -> int:
        """The number of threads that read files at once."""

    def holds(self, path: Path | str) -> bool:
        """Return whether a path, or the text of one, is here."""

    def require_usable(self, path: Path) -> None:
        """Raise UserError if nothing can be written below a path, where that shows before a folder is made."""

    def absolute(self, path: Path) -> Path:
        """Return the path from the root."""

    def resolve(self, path: Path) -> Path:
        """Return the place that a path leads to, through links."""

    def write(self, path: Path, data: bytes, *, private: bool = False) -> None:
        """Write a file so that a reader finds the old content or the new; `private`: only the user may read it."""

    def create(self, path: Path, data: bytes) -> None:
        """Write a file that marks a folder as complete. FileExistsError if another process has done so."""

    def append(self, path: Path, data: bytes) -> None:
        """Add data to the end of a file, which may be new."""

    def sync(self, file: io.BufferedReader) -> None:
        """Make sure that the content of a file survives a power loss."""

    def move(self, path: Path, target: Path) -> None:
        """Rename a file, or a folder where there are any."""

    def remove(self, folder: Path) -> None:
        """Delete a folder and all that is in it, as far as this process may."""

    def build(self, target: Path, last: Sequence[str]) -> AbstractContextManager[Path]:
        """Open a new folder of this machine that becomes `target` when the block ends without an error.

        UserError if it cannot. Files named in `last` appear after all others.
        """

    def copied(self, folder: Path, names: Sequence[str]) -> AbstractContextManager[Path]:
        """Open a folder of this machine with these files of a folder, for libraries that read no other."""

    def list(self, folder: Path) -> list[str]:
        """Return the names of all files below a folder, relative to it."""

    def folders(self, folder: Path, holding: str = "") -> Sequence[str]:
        """Return the names of the folders in a folder; with `holding` of those that have this file."""

    def size(self, path: Path) -> int | None:
        """Return the bytes of a file; None without `has_sizes`."""

    def ends_at(self, path: Path, size: int) -> bool:
        """Return whether a file has exactly `size` bytes."""

    def read_into(self, path: Path, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> bool:
        """Fill a buffer with parts of a file, each a first byte and a length; False if the file is too short."""

    def version(self, path: Path) -> int | bytes:
        """Return a value that changes whenever a file is written."""

    def traffic(self) -> Traffic | None:
        """Return the requests that this process has sent so far; None where there are none."""

    def free_bytes(self, folder: Path) -> float:
        """Return the free space; infinity if it has no limit."""


STORAGES: list[Storage] = [Bucket(), Local()]  # the first that holds a path is asked


def open_storage(path: Path | str) -> Storage:
    """Return the storage that holds a path."""
    return next(storage for storage in STORAGES if storage.holds(path))
