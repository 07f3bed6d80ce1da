"""Reads and changes a run's files in the file system or in a bucket; `open_storage(path)` chooses by the path."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from pathlib import Path
from typing import Protocol

from gspax.errors import naming
from gspax.storage import objects
from gspax.storage.paths import is_bucket


class Storage(Protocol):
    """An interface that reads and changes whole files and folders. OSError if an operation fails."""

    has_folders: bool  # a folder can exist without files, and can stand where a file should be
    readers: int  # threads that read files at once

    def write(self, path: Path, data: bytes, *, private: bool) -> None:
        """Write a file so that a reader finds the old content or the new; `private`: only the user may read it."""

    def move(self, path: Path, target: Path) -> None:
        """Rename a file, or a folder where there are any."""

    def remove(self, folder: Path) -> None:
        """Delete a folder and all that is in it, as far as this process may."""

    def list(self, folder: Path) -> list[str]:
        """Return the names of all files below a folder, relative to it."""

    def free_bytes(self, folder: Path) -> float:
        """Return the free space; infinity if it has no limit."""


class Local:
    """The file system of this machine."""

    has_folders, readers = True, 8  # hashlib releases the GIL

    def write(self, path: Path, data: bytes, *, private: bool) -> None:
        """Write a file that survives a kill or a power loss: the content is on the disk before it gets its name."""
        temporary = path.with_name(path.name + ".tmp")
        try:
            with naming(path), temporary.open("wb") as file:
                if private:
                    os.fchmod(file.fileno(), 0o600)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()  # on a full disk it would keep its bytes
            raise
        sync_folder(path.parent)

    def move(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def list(self, folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def free_bytes(self, folder: Path) -> float:
        return shutil.disk_usage(folder).free


class Bucket:
    """The objects of a bucket, each written as a whole or not at all. Its own rules decide who may read them."""

    has_folders, readers = False, 2  # an object is read into memory as a whole

    def write(self, path: Path, data: bytes, *, private: bool) -> None:
        path.write_bytes(data)

    def move(self, path: Path, target: Path) -> None:
        target.write_bytes(path.read_bytes())
        path.unlink()

    def remove(self, folder: Path) -> None:
        objects.delete_folder(folder)

    def list(self, folder: Path) -> list[str]:
        return objects.list_files(folder)

    def free_bytes(self, folder: Path) -> float:
        return math.inf


def open_storage(path: Path) -> Storage:
    """Return the storage that holds a path."""
    return Bucket() if is_bucket(path) else Local()


def sync_folder(folder: Path) -> None:
    """Synchronize the entries of a folder with the disk, where its file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
