"""Reads and writes the objects of a bucket, conditional on a generation, which files do not have.

tensorstore, whose driver writes the arrays of a checkpoint, reads and writes all other objects, too. So a run has one
client, one set of credentials and one policy of retries. gcsfs would be a second one: of conditional writes it has only
that of a new object, and it creates a bucket that is missing.

An object is written as a whole or not at all. There are no folders: one exists while there are objects below it.
"""

from __future__ import annotations

import errno
import functools
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gspax.errors import warn

if TYPE_CHECKING:
    import tensorstore

SCHEME = "gs://"
QUIET = 60.0  # seconds
TOO_SHORT = "OUT_OF_RANGE", "FAILED_PRECONDITION: Unexpected Content-Range"  # errors: Google's, gcp-storage-emulator's
RETRIES = {"max_retries": 5, "initial_delay": "1s", "max_delay": "8s"}  # of 429, 5xx and resets: 20 seconds in all


def read_object(path: Path) -> tuple[bytes | None, bytes]:
    """Read the content of an object, None if there is none, and its generation for `write_if`."""
    store, key = locate(path)
    read = result(store.read(key), path)
    return (read.value if read.state == "value" else None), read.stamp.generation


def read_ranges(path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
    """Read parts of an object, each a first byte and a length, requested together; None if it is too short for one."""
    store, key = locate(path)
    asked = [store.read(key, byte_range=slice(start, start + length)) for start, length in ranges if length]
    try:
        answers = iter([result(future, path) for future in asked])
    except OSError as problem:
        if str(problem.__cause__).startswith(TOO_SHORT):
            return None
        raise
    return [next(answers).value if length else b"" for _, length in ranges]


def ends_at(path: Path, size: int) -> bool:
    """Return whether an object has exactly `size` bytes; tensorstore does not report the size."""
    return read_ranges(path, [(size - 1, 1)]) is not None and read_ranges(path, [(size, 1)]) is None


def write_if(path: Path, content: bytes | None, generation: bytes) -> bytes | None:
    """Replace an object, or delete it for None, if it has this generation; return the new generation, else None.

    A content must be unlike earlier ones of the object: where the answer to a write is lost, the write is repeated
    and refused, and its content shows that it was done.
    """
    store, key = locate(path)
    written: bytes = result(store.write(key, content, if_equal=generation), path).generation
    if written:
        return written
    stored, now = read_object(path)
    if stored is None and content is not None:
        require_bucket(path.parent)
    return now if stored == content else None


def require_bucket(folder: Path) -> None:
    """Raise OSError if nothing can be written to a bucket. A deleted bucket looks empty to tensorstore's reads."""
    store, key = locate(folder / f"{secrets.token_hex(8)}.probe.tmp")
    result(store.write(key, b"1"), folder)
    result(store.write(key, None), folder)


def list_files(folder: Path) -> list[str]:
    """List the names of all objects below a folder, relative to it, in order."""
    store, key = locate(folder)
    names = list_names(store, f"{key}/", f"{key}0", folder)
    return [name.removeprefix(f"{key}/") for name in names if not name.endswith("/")]


def delete_folder(folder: Path) -> None:
    """Delete all objects below a folder, in any order."""
    store, key = locate(folder)
    for deleted in [store.write(name, None) for name in list_names(store, f"{key}/", f"{key}0", folder)]:
        result(deleted, folder)


class Traffic(NamedTuple):
    """The requests of this process to all buckets since it started, Orbax's included."""

    requests: int  # with the repeated ones
    repeated: int  # because the answer was 429 or 5xx, was cut short, or did not come
    read_bytes: int  # of objects
    written_bytes: int

    def since(self, before: Traffic, prefix: str) -> dict[str, float]:
        """Return the differences to an earlier measurement as metrics."""
        pairs = zip(self._fields, self, before, strict=True)
        return {f"{prefix}{name}": float(now - earlier) for name, now, earlier in pairs}


def measure_traffic() -> Traffic:
    """Read the counters of tensorstore."""
    import tensorstore

    gcs = "/tensorstore/kvstore/gcs/"
    names = "/tensorstore/http/request_started", f"{gcs}retries", f"{gcs}bytes_read", f"{gcs}bytes_written"
    collected = [tensorstore.experimental_collect_matching_metrics(name) for name in names]
    return Traffic(*(int(metrics[0]["values"][0]["value"]) if metrics else 0 for metrics in collected))


class Repeats:
    """A counter of repeated requests of this process: a line on stderr, at most one in `QUIET` seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._due = folder, measure_traffic().repeated, time.monotonic()

    def warn(self) -> None:
        """Print the number of repeated requests since the last line, if there are any."""
        repeated, now = measure_traffic().repeated, time.monotonic()
        if repeated > self._seen and now >= self._due:
            count = repeated - self._seen
            warn(f"{self._folder}: requests sent again after 429, 5xx, or no answer: {count}")
            self._seen, self._due = repeated, now + QUIET


@functools.cache
def _open_store(bucket: str) -> tensorstore.KvStore:
    import tensorstore

    spec = {"driver": "gcs", "bucket": bucket, "context": {"gcs_request_retries": RETRIES}}
    return tensorstore.KvStore.open(spec).result()


def locate(path: Path | str) -> tuple[tensorstore.KvStore, str]:
    """Return the store of a path's bucket, and the path in it."""
    bucket, _, key = str(path).removeprefix(SCHEME).strip("/").partition("/")
    return _open_store(bucket), key


def list_names(store: tensorstore.KvStore, first: str, end: str, path: Path | str) -> list[str]:
    """List the names from `first` up to but without `end`, in order. A server may ignore the bounds: emulators do."""
    import tensorstore

    names: list[bytes] = result(store.list(tensorstore.KvStore.KeyRange(first, end)), path)
    return sorted(name for name in map(bytes.decode, names) if first <= name < end or not end)


def result(future: Any, path: Path | str) -> Any:
    """Return the result of a request. OSError if it fails, after it was repeated where that may help."""
    try:
        return future.result()
    except ValueError as error:
        status, _, text = str(error).partition(" [")[0].partition(": ")
        code = errno.EACCES if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") else errno.EIO
        raise OSError(code, f"{text or status} ({status})", str(path)) from error
