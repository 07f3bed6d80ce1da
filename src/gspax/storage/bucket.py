"""The objects of a bucket, as a `Storage`."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspax.errors import unwritable
from gspax.storage import objects
from gspax.storage.paths import is_bucket, require_usable


class Bucket:
    """The objects of a bucket, each written as a whole or not at all. Its own rules decide who may read them."""

    has_folders, has_links, has_sizes, appends = False, False, False, False
    readers = 2  # an object is read into memory as a whole

    def holds(self, path: Path | str) -> bool:
        return is_bucket(path)

    def require_usable(self, path: Path) -> None:
        require_usable(path)

    def absolute(self, path: Path) -> Path:
        return path

    def resolve(self, path: Path) -> Path:
        return path

    def write(self, path: Path, data: bytes, *, private: bool = False) -> None:
        path.write_bytes(data)

    def create(self, path: Path, data: bytes) -> None:
        there, generation = objects.read_object(path)
        if there is not None or objects.write_if(path, data, generation) is None:
            raise FileExistsError(errno.EEXIST, "another process has finished this folder", str(path))

    def append(self, path: Path, data: bytes) -> None:
        path.write_bytes((path.read_bytes() if path.exists() else b"") + data)

    def sync(self, file: io.BufferedReader) -> None:
        """Do nothing: a write has an answer only when it is stored."""

    def move(self, path: Path, target: Path) -> None:
        target.write_bytes(path.read_bytes())
        path.unlink()

    def remove(self, folder: Path) -> None:
        objects.delete_folder(folder)

    @contextlib.contextmanager
    def build(self, target: Path, last: Sequence[str]) -> Iterator[Path]:
        """Build the folder on this machine, and copy its files, those named in `last` after all others."""
        with tempfile.TemporaryDirectory() as name:
            yield (local := Path(name))
            files = (path for path in local.rglob("*") if path.is_file())
            try:
                for path in sorted(files, key=lambda path: (path.name in last, path)):
                    (target / path.relative_to(local)).write_bytes(path.read_bytes())
            except OSError as problem:
                raise unwritable(target, problem) from problem

    @contextlib.contextmanager
    def copied(self, folder: Path, names: Sequence[str]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as copy:
            for name in names:
                if (folder / name).is_file():
                    Path(copy, name).write_bytes((folder / name).read_bytes())
            yield Path(copy)

    def list(self, folder: Path) -> list[str]:
        return objects.list_files(folder)

    def folders(self, folder: Path, holding: str = "") -> Sequence[str]:
        """List the folders by one request."""
        parts = [name.partition("/") for name in objects.list_files(folder)]
        return [*dict.fromkeys(head for head, _, rest in parts if (rest == holding if holding else rest))]

    def size(self, path: Path) -> int | None:
        return None

    def ends_at(self, path: Path, size: int) -> bool:
        return objects.ends_at(path, size)

    def read_into(self, path: Path, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> bool:
        if (found := objects.read_ranges(path, ranges)) is None:
            return False
        buffer[:] = b"".join(found)
        return True

    def version(self, path: Path) -> int | bytes:
        return objects.read_object(path)[1]

    def traffic(self) -> objects.Traffic | None:
        return objects.measure_traffic()

    def free_bytes(self, folder: Path) -> float:
        return math.inf
