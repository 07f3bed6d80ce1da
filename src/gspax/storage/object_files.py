"""Implements fsspec's interface on `objects`: the file system that `etils.epath` finds for gs://, also in Orbax."""

from __future__ import annotations

import errno
import functools
import io
import os
from pathlib import Path
from typing import Any, cast

import fsspec

from gspax.storage import objects


class Objects(fsspec.AbstractFileSystem):
    """The buckets of Google Cloud Storage as a file system of fsspec. OSError for a request that fails."""

    protocol = ("gs", "gcs")

    def _kind(self, path: str) -> str | None:
        """Return "file" for an object, "directory" if others lie below it, else None. OSError if the bucket fails."""
        store, key = objects.locate(self._strip_protocol(path))
        if key and objects.list_names(store, key, f"{key}\0", path):
            return "file"
        return "directory" if not key or objects.list_names(store, f"{key}/", f"{key}0", path) else None

    def info(self, path: str, **_: object) -> dict[str, object]:
        if (kind := self._kind(path)) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
        return {"name": self._strip_protocol(path), "size": None, "type": kind}

    def exists(self, path: str, **_: object) -> bool:
        return self._kind(path) is not None  # fsspec would take a request that failed for a no

    def isdir(self, path: str) -> bool:
        return self._kind(path) == "directory"

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        name = self._strip_protocol(path)
        store, key = objects.locate(name)
        kinds: dict[str, str] = {}
        first, end = (f"{key}/", f"{key}0") if key else ("", "")
        for below in objects.list_names(store, first, end, path):
            child, is_folder, _rest = below.removeprefix(f"{key}/").partition("/")
            if child:
                kinds[f"{name}/{child}"] = "directory" if is_folder else "file"
        if not kinds:
            return [self.info(path) if detail else name]
        return [{"name": child, "size": None, "type": kind} if detail else child for child, kind in kinds.items()]

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super().open(path, mode, **({} if "b" in mode else {"encoding": "utf-8"}), **options)

    def _open(self, path: str, mode: str = "rb", **_: object) -> io.BytesIO:
        if mode == "wb":
            return _Upload(path)
        content, _generation = objects.read_object(cast(Path, path))
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
        return io.BytesIO(content)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        if recursive:
            objects.delete_folder(cast(Path, path))
        store, key = objects.locate(self._strip_protocol(path))
        objects.result(store.write(key, None), path)

    def cp_file(self, path1: str, path2: str, **_: object) -> None:
        """Copy an object, which is half of what `Path.replace` does here."""
        with self.open(path1) as source, self.open(path2, "wb") as target:
            target.write(source.read())


class _Upload(io.BytesIO):
    """A new object, written when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            store, key = objects.locate(self._path)
            content = self.getvalue()
            super().close()
            objects.result(store.write(key, content), self._path)


@functools.cache
def register() -> None:
    """Let epath find `Objects` for gs://, here and in Orbax."""
    os.environ["EPATH_USE_TF"] = "false"  # TensorFlow's file system, where TensorFlow is installed
    for protocol in Objects.protocol:
        fsspec.register_implementation(protocol, Objects, clobber=True)
