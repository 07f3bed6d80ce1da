"""Locks a run directory for one writer: a lock file, with a heartbeat for file systems that hosts share.

The file is created whole, by a link if the file system has them, so of several processes one succeeds. It names host,
process and the process's start. On the same machine a lock is stale if that process is gone; on another one, if nobody
has touched the file for `STALE` seconds, which a second run waits for.

In a bucket the lock is an object. Its generation replaces the time of a file: every write of it names the
generation that it replaces, and is refused if another process has written the object.

A process may lose its lock: it was suspended until another run took over, or somebody deleted the file. It looks at
the lock again before each write of the run (`require_held`), and ends if it is not as this process has left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gspax.errors import FailureError, naming, tell, warn
from gspax.storage import objects
from gspax.storage.files import open_storage
from gspax.storage.paths import is_bucket, read_bytes

HEARTBEAT, STALE = 10.0, 60.0  # seconds
FRESH = 1.0  # seconds; Cloud Storage accepts one write of an object a second

_held: list[_FileLock | _ObjectLock] = []  # the locks that this process holds, usually one


class LostError(FailureError):
    """Raised if the lock of the run directory was lost: nothing more is written there."""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; process 0 does so for all. Collective.

    Raises:
      FailureError: another process holds it.
    """
    import jax  # here, so that `--help` of subcommands that write files answers at once

    from gspax.parallel import multihost

    lock: _FileLock | _ObjectLock = _ObjectLock(path) if is_bucket(path) else _FileLock(path)
    is_primary = jax.process_index() == 0
    multihost.all_or_raise(lambda: lock.acquire() if is_primary else None)
    done = threading.Event()
    watch = lock.watch()  # counts from here, not from the thread's start
    beating = threading.Thread(target=_beat, args=(lock, done, watch), name="gspax_heartbeat", daemon=True)
    if is_primary:
        _held.append(lock)
        beating.start()
    try:
        yield
    finally:
        if is_primary:
            done.set()
            beating.join()
            _held.remove(lock)
            lock.release()


def require_held(*, fresh: bool = False) -> None:
    """Raise `LostError` if another process has taken a lock of this one, or if it was deleted.

    A lock file that cannot be read counts as held.

    Args:
      fresh: renew a lock in a bucket now, before an irreversible change. Else the heartbeat does so, and nobody waits.

    Raises:
      OSError: the lock is in a bucket that does not answer, so that another process may have taken it.
    """
    for lock in [*_held]:
        if not lock.is_held(FRESH if fresh else 2 * HEARTBEAT):
            raise LostError(f"{lock.path} is no longer the lock of this run: another may write here, so this one ends")


def _beat(lock: _FileLock | _ObjectLock, done: threading.Event, watch: Callable[[], None]) -> None:
    """Renew the lock until `done`, or until another process has taken it, and call `watch` each time."""
    while not done.wait(HEARTBEAT):
        watch()
        with contextlib.suppress(OSError):
            if not lock.renew():
                return


class _FileLock:
    """A lock file, created whole, by a link if the file system has them: of several processes one succeeds."""

    def __init__(self, path: Path) -> None:
        self.path, self._content = path, json.dumps(_describe())

    def acquire(self) -> None:
        """Create the lock file. FailureError if another process holds the lock."""
        path = self.path
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with naming(temporary):
            temporary.write_text(self._content, encoding="utf-8")
        try:
            for last in (False, False, True):
                require_free(path)
                try:
                    _create(path, temporary)
                    return
                except FileExistsError:
                    if last:
                        raise _just_taken(path) from None
        finally:
            temporary.unlink(missing_ok=True)

    def watch(self) -> Callable[[], None]:
        return lambda: None

    def is_held(self, _age: float = 0.0) -> bool:
        with contextlib.suppress(OSError):
            return _read(self.path) == self._content
        return True

    def renew(self) -> bool:
        """Touch the file; False if another process wrote it."""
        if _read(self.path) != self._content:
            return False
        os.utime(self.path)
        return True

    def release(self) -> None:
        if _read(self.path) == self._content:
            self.path.unlink(missing_ok=True)


class _ObjectLock:
    """A lock in a bucket: each write of it names the generation that it replaces, so of several processes one succeeds.

    It counts as held for some of the `STALE` seconds after it was renewed, for which another process waits.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._description = path, {**_describe(), "token": secrets.token_hex(8)}
        self._guard = threading.Lock()  # the heartbeat and the run renew it
        self._generation: bytes | None = None  # of the object as this process has written it; None once it is lost
        self._renewed, self._count = 0.0, 0

    def acquire(self) -> None:
        """Write the lock object. FailureError if another process holds the lock."""
        for _ in range(3):
            content, self._generation = objects.read_object(self.path)
            if content is not None:
                _require_stale(self.path, content.decode(errors="replace"))
            if self.renew():
                if content is not None:
                    warn(f"{self.path}: took the lock of a run that has ended")
                return
        raise _just_taken(self.path)

    def watch(self) -> Callable[[], None]:
        """Return a function that prints a line for requests that were repeated."""
        return objects.Repeats(self.path.parent).warn

    def is_held(self, age: float = 0.0) -> bool:
        """Return whether the lock was renewed at most `age` seconds ago, or can be renewed."""
        return self._generation is not None and (time.monotonic() < self._renewed + age or self.renew())

    def renew(self) -> bool:
        """Write the object again; False if it is not as this process has left it."""
        with self._guard:
            if self._generation is not None:
                began, self._count = time.monotonic(), self._count + 1
                content = json.dumps({**self._description, "renewed": self._count}).encode()
                generation = objects.write_if(self.path, content, self._generation)
                if generation is None:  # unless an earlier write arrived, and its answer did not
                    stored, now = objects.read_object(self.path)
                    holder = _parse((stored or b"").decode(errors="replace"))
                    if holder.get("token") == self._description["token"]:
                        generation = objects.write_if(self.path, content, now)
                self._generation, self._renewed = generation, began
            return self._generation is not None

    def release(self) -> None:
        with contextlib.suppress(OSError):  # it becomes stale
            if self._generation is not None:
                objects.write_if(self.path, None, self._generation)


def _just_taken(path: Path) -> FailureError:
    return FailureError(f"{path.parent} is in use by another run that has just started")


def require_free(path: Path) -> None:
    """Remove a stale lock. FailureError if a process holds it."""
    text = _read(path)
    if text is None:
        return
    _require_stale(path, text)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != text:  # another process has removed the stale lock and holds its own
            with contextlib.suppress(OSError):
                _create(path, aside)
        aside.unlink()
    warn(f"{path}: removed the lock of a run that has ended")


def _require_stale(path: Path, text: str) -> None:
    """Raise FailureError if a process holds the lock with this content."""
    holder = _parse(text)
    if not _is_stale(path, text, holder):
        where = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
        raise FailureError(f"{path.parent} is in use by another run ({where}): wait for it or take another directory")


def _create(path: Path, source: Path) -> None:
    """Create a lock with the content of another file. FileExistsError if there is one."""
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as a mounted bucket
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))


def _is_stale(path: Path, text: str, holder: dict[str, object]) -> bool:
    if holder.get("machine") == _machine():
        return _start_of(holder.get("pid")) != holder.get("start")
    return not _is_touched(path, text)


def _is_touched(path: Path, text: str) -> bool:
    """Return whether the file changes within `STALE` seconds. Clocks of two hosts are not compared: they may differ."""
    with contextlib.suppress(FileNotFoundError):
        version = open_storage(path).version
        first, deadline = version(path), time.monotonic() + STALE
        tell(f"{path} belongs to another host: waiting up to {STALE:.0f} s for its heartbeat")
        while time.monotonic() < deadline:
            time.sleep(min(0.5, STALE / 10))
            if version(path) != first or _read(path) != text:
                return True
    return False


def _describe() -> dict[str, object]:
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return {"host": platform.node(), "machine": _machine(), "pid": pid, "start": _start_of(pid), "since": since}


def _machine() -> str:
    """Identify the kernel's boot and the namespace of process ids: where both are equal, process ids are comparable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _start_of(pid: object) -> str | None:
    """Return the start time of a running process, in the kernel's ticks if available; None if it does not run."""
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(int(str(pid)), 0)
            return "running"
        state, *fields = Path(f"/proc/{int(str(pid))}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]  # a zombie writes no more
    except PermissionError:
        return "running"
    except (OSError, ValueError, IndexError):
        return None


def _read(path: Path) -> str | None:
    try:
        return read_bytes(path).decode(errors="replace")
    except FileNotFoundError:
        return None


def _parse(text: str) -> dict[str, object]:
    """Parse the content of a lock; empty if it is damaged, which counts as a lock of another host."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
