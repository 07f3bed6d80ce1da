"""The file system of this machine, as a `Storage`."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspax.errors import UserError, naming, unwritable


class Local:
    """The file system of this machine."""

    has_folders, has_links, has_sizes, appends = True, True, True, True
    readers = 8  # hashlib releases the GIL

    def holds(self, path: Path | str) -> bool:
        return True

    def require_usable(self, path: Path) -> None:
        """Do nothing: a folder shows it when it is made."""

    def absolute(self, path: Path) -> Path:
        return path.absolute()

    def resolve(self, path: Path) -> Path:
        return Path(os.path.realpath(path))  # `Path.resolve` raises where links lead in a circle

    def write(self, path: Path, data: bytes, *, private: bool = False) -> None:
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

    def create(self, path: Path, data: bytes) -> None:
        self.write(path, data)  # the folder is this process's own

    def append(self, path: Path, data: bytes) -> None:
        with naming(path), path.open("ab") as file:
            file.write(data)

    def sync(self, file: io.BufferedReader) -> None:
        os.fsync(file.fileno())

    def move(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def build(self, target: Path, last: Sequence[str]) -> Iterator[Path]:
        """Build the folder beside its place, as `NAME.*.tmp`, so that it appears whole."""
        if os.path.ismount(target):
            raise UserError(f"{target}: wanted a folder that can be replaced, it is a mount point: take a folder in it")
        place = target.resolve()
        temporary = place.with_name(f"{place.name}.{secrets.token_hex(8)}.tmp")
        try:
            temporary.mkdir(parents=True)
        except OSError as problem:
            raise unwritable(target, problem) from problem
        try:
            yield temporary
            os.replace(temporary, place)
        except OSError as problem:
            raise unwritable(target, problem) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def copied(self, folder: Path, names: Sequence[str]) -> Iterator[Path]:
        yield folder

    def list(self, folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def folders(self, folder: Path, holding: str = "") -> Sequence[str]:
        if not folder.is_dir():
            return []
        return [path.name for path in folder.iterdir() if path.is_dir() and (path / holding).exists()]

    def size(self, path: Path) -> int | None:
        return path.stat().st_size

    def ends_at(self, path: Path, size: int) -> bool:
        return path.stat().st_size == size

    def read_into(self, path: Path, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> bool:
        filled = 0
        with path.open("rb") as opened:
            for start, length in ranges:
                opened.seek(start)
                if opened.readinto(buffer[filled : filled + length]) < length:
                    return False
                filled += length
        return True

    def version(self, path: Path) -> int | bytes:
        return path.stat().st_mtime_ns

    def traffic(self) -> None:
        return None

    def free_bytes(self, folder: Path) -> float:
        return shutil.disk_usage(folder).free


def sync_folder(folder: Path) -> None:
    """Synchronize the entries of a folder with the disk, where its file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
