"""The folders of a checkpoint directory: which steps are finished, which are whole, and removing the others.

STEP           a checkpoint; finished once it has a manifest
damaged_STEP   one whose files differ from its manifest, kept for the user
deleted_STEP   one that is being deleted
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from gspax.run import lock
from gspax.run.folders import unused_name
from gspax.run.manifest import find_damage, has_manifest, size_of

STATE, EXTRA = "state", "extra"
DELETED, DAMAGED = "deleted_", "damaged"
PROBE, PROBE_SUFFIX = 2**16, ".probe.tmp"  # bytes


def list_steps(directory: Path) -> list[int]:
    """All steps that have a folder, complete or not, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def finished_steps(directory: Path) -> list[int]:
    """The steps whose save was finished, damaged since or not: those with a manifest."""
    return [step for step in list_steps(directory) if has_manifest(directory / str(step))]


def extra_file(directory: Path, step: int) -> Path:
    """The JSON file in which Orbax stores a step's `extra`."""
    return directory / str(step) / EXTRA / "metadata"


def remove(directory: Path, steps: Sequence[int]) -> None:
    """Delete these steps. Each one disappears at once; its space is freed file by file. `lock.LostError` as it says."""
    lock.require_held()
    for step in steps:
        target = directory / f"{DELETED}{step}"
        (directory / str(step)).rename(target)
        shutil.rmtree(target, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Delete the steps whose save was not finished."""
    remove(directory, sorted({*list_steps(directory)} - {*finished_steps(directory)}))


def remove_leftovers(directory: Path) -> None:
    """Delete what killed processes left: the folders that they had begun to delete, and their probes."""
    for folder in directory.glob(f"{DELETED}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for probe in directory.glob(f"*{PROBE_SUFFIX}"):
        probe.unlink(missing_ok=True)


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` steps. A step with missing or truncated files does not count as kept."""
    steps = finished_steps(directory)
    kept = [step for step in steps if not find_damage(directory / str(step), hashes=False)][-keep:]
    if kept:
        remove(directory, [step for step in steps if step < kept[0]])


def set_aside(directory: Path, step: int) -> str:
    """Rename a damaged step, so that no run continues from it, and give its new name."""
    target = unused_name(directory / str(step), DAMAGED)
    (directory / str(step)).rename(target)
    return target.name


def require_space(directory: Path) -> None:
    """OSError if the newest step would not fit once more: a save that must fail is not begun."""
    steps = finished_steps(directory)
    if steps and (wanted := size_of(directory / str(steps[-1]))) > (free := shutil.disk_usage(directory).free):
        raise OSError(errno.ENOSPC, f"no space left: wanted {wanted:,} bytes, {free:,} are free")


def require_writable(directory: Path) -> None:
    """OSError if this process cannot write a file there: no space, quota or right."""
    probe = directory / f"{socket.gethostname()}.{os.getpid()}{PROBE_SUFFIX}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
