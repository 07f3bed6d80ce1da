"""Parses paths that may be in a bucket: `gs://bucket/run` becomes an `etils.epath` path, with pathlib's methods.

Imports tensorstore for a bucket only, so that `--help` of subcommands that take a path answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from importlib import metadata
from pathlib import Path
from typing import cast

from gspax.errors import UserError
from gspax.storage import objects
from gspax.storage.objects import SCHEME

URL = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^/]+)+/*")
AMAZON = (
    "a URL of S3, where Orbax cannot write the arrays of a checkpoint: "
    "use a directory and copy it (docs/howto/bucket.md#s3)"
)
OLDEST = {"orbax-checkpoint": (0, 12, 5), "tensorstore": (0, 1, 84)}  # the first releases that write to a bucket


def to_path(text: str | os.PathLike[str]) -> Path:
    """Return a path of the file system, or for `gs://BUCKET/NAME` a path of a bucket, with the same methods.

    UserError for any other URL.
    """
    url = os.fspath(text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/|(gs|gcs|s3)(:|//)", url) is None:
        return Path(url)
    if URL.fullmatch(url) is None:
        got = AMAZON if re.match(r"s3[an]?(:|//)", url) else "another URL"
        raise UserError(f"{url}: wanted a local path or {SCHEME}BUCKET/NAME, got {got}")
    from etils import epath

    from gspax.storage import object_files

    object_files.register()
    return cast(Path, epath.Path(url.rstrip("/")))


def is_bucket(path: str | Path) -> bool:
    """Return whether a path is in a bucket."""
    return str(path).startswith(SCHEME)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file to read. OSError for a pipe or a device, which could be waited for, or read, for ever."""
    if not is_bucket(path) and path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device", str(path))
    return cast(io.BufferedReader, path.open("rb"))


def read_bytes(path: Path) -> bytes:
    """Read the content of a file. OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def require_usable(path: Path) -> None:
    """Raise UserError if this process cannot write to a path's bucket: it writes an object there and deletes it."""
    for package, oldest in OLDEST.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            if tuple(map(int, re.findall(r"\d+", version)))[: len(oldest)] < oldest:
                wanted = ".".join(map(str, oldest))
                raise UserError(f"{path}: wanted {package} {wanted} or newer to write to a bucket, got {version}")
    try:
        objects.require_bucket(path)
    except OSError as problem:
        wanted = (
            "credentials that may write to the bucket" if problem.errno == errno.EACCES else "a bucket that answers"
        )
        raise UserError(f"{path}: wanted {wanted}: {problem.strerror}") from problem
