"""Writes and checks the manifest of a checkpoint, and manages the folders of a checkpoint directory.

A manifest holds the size and SHA-256 of each file, so that damage is found before a checkpoint is loaded. It is written
last, after the other files were synchronized with the disk: a manifest that survives a power loss describes files that
survived it too.

STEP           a checkpoint; finished once it has a manifest
damaged_STEP   a step with files that differ from its manifest, left to the user
deleted_STEP   a step that is being deleted

In a bucket nothing is renamed: a step is saved where it stays, and its manifest is written on the condition that there
is none. A step that is deleted loses its manifest first, and one that is damaged keeps its files, with the manifest as
`damaged_manifest.json`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gspax.errors import UserError, warn
from gspax.run import lock
from gspax.run.folders import remove_folder, set_aside
from gspax.storage.files import open_storage
from gspax.storage.local import sync_folder
from gspax.storage.paths import open_file, read_bytes

MANIFEST, EXTRA, DAMAGED = "manifest.json", "extra.json", "damaged_manifest.json"
VERSION = 1  # of the format
PACKAGES = ("gspax", "jax", "orbax-checkpoint", "tensorstore", "numpy")
DELETED, UNFINISHED = "deleted_", ".orbax-checkpoint-tmp"  # UNFINISHED: in the names of folders that Orbax writes to
PROBE, PROBE_SUFFIX = 2**16, ".probe.tmp"  # bytes


class Entry(NamedTuple):
    """The size and the SHA-256 of a file."""

    bytes: int
    sha256: str


def write_manifest(folder: Path) -> None:
    """Write the manifest of a complete checkpoint. OSError if a file cannot be read or written, or there is one."""
    names = _list_files(folder)
    with ThreadPoolExecutor(open_storage(folder).readers) as pool:
        entries = list(pool.map(lambda name: _digest(folder / name, sync=True), names))
    for parent in {folder, *((folder / name).parent for name in names)}:
        sync_folder(parent)
    files = {name: entry._asdict() for name, entry in zip(names, entries, strict=True)}
    content = {"version": VERSION, "packages": installed_versions(PACKAGES), "files": files, "name": folder.name}
    lock.require_held(fresh=True)
    open_storage(folder).create(folder / MANIFEST, _render(content).encode())


def has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (folder / MANIFEST).exists()


def size_of(folder: Path) -> int:
    """Return the bytes of a checkpoint's files; 0 if its manifest is damaged."""
    try:
        return sum(entry.bytes for entry in _read(folder).values())
    except UserError:
        return 0


def find_damage(folder: Path, part: int = 0, parts: int = 1, *, hashes: bool = True) -> list[str]:
    """Return a phrase for each file that differs from the manifest; none if the checkpoint is intact.

    Args:
      part, parts: check only every `parts`-th file, so that several processes share the work.
      hashes: compare the contents too, not only the sizes.
    """
    try:
        files = _read(folder)
    except UserError as error:
        return [str(error)]
    if folder.name.isdecimal() and (name := _name(folder)).isdecimal() and name != folder.name:
        return [f"it is checkpoint {name} under another name"]
    if not (hashes or open_storage(folder).has_sizes):
        return [f"{name} is missing" for name in sorted({*files} - {*_list_files(folder)})]
    with ThreadPoolExecutor(open_storage(folder).readers) as pool:
        checked = pool.map(lambda name: _compare(folder, name, files[name], hashes=hashes), sorted(files)[part::parts])
        return [problem for problem in checked if problem is not None]


def _list_files(folder: Path) -> list[str]:
    names = open_storage(folder).list(folder)
    return sorted(name for name in names if name not in (MANIFEST, f"{MANIFEST}.tmp"))


def _render(content: Mapping[str, object]) -> str:
    """Render a manifest as text, with the SHA-256 of its content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _read(folder: Path) -> dict[str, Entry]:
    """Read the entries of a manifest by file name. UserError if any byte of it was changed, or it has another form."""
    try:
        text = read_bytes(folder / MANIFEST)
        content = json.loads(text)
        content.pop("sha256")
        if _render(content).encode() != text:
            raise ValueError("the SHA-256 differs")
        files = {name: Entry(**entry) for name, entry in content["files"].items()}
        for entry in files.values():
            if [type(value) for value in entry] != [int, str]:
                raise ValueError("an entry has no size and SHA-256")
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    return files


def _name(folder: Path) -> str:
    """Return the name of the folder that a manifest was written for; "" if it is not recorded."""
    return str(json.loads((folder / MANIFEST).read_bytes()).get("name", ""))


def _digest(path: Path, *, sync: bool = False) -> Entry:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            open_storage(path).sync(file)
        return Entry(file.seek(0, os.SEEK_END), digest)


def _compare(folder: Path, name: str, wanted: Entry, *, hashes: bool) -> str | None:
    path = folder / name
    try:
        storage = open_storage(folder)
        if storage.has_links and not storage.resolve(path).is_relative_to(storage.resolve(folder)):
            return f"{name} is outside of the checkpoint"
        got = _digest(path) if hashes else wanted._replace(bytes=path.stat().st_size)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if got.bytes != wanted.bytes:
        return f"{name} has {got.bytes} bytes instead of {wanted.bytes}"
    return None if got == wanted else f"{name} has another SHA-256"


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages."""
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def list_steps(directory: Path) -> list[int]:
    """List all steps that have a folder, finished or not, in order."""
    return sorted(int(name) for name in open_storage(directory).folders(directory) if name.isdecimal())


def finished_steps(directory: Path) -> list[int]:
    """List the steps with a finished save, damaged since or not, in order."""
    return sorted(int(name) for name in open_storage(directory).folders(directory, MANIFEST) if name.isdecimal())


def _own_steps(directory: Path) -> list[int]:
    """List all steps that are not set aside where they are."""
    aside = open_storage(directory).folders(directory, DAMAGED)
    return [step for step in list_steps(directory) if str(step) not in aside]


def lost_step(directory: Path, note: Path) -> int | None:
    """Return the newest saved step by `note`, if nothing is left of it, not even a folder set aside; else None."""
    try:
        newest = json.loads(read_bytes(note))["newest"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    if type(newest) is not int or (directory / f"damaged_{newest}").exists():
        return None
    return None if newest in list_steps(directory) else newest


def extra_file(directory: Path, step: int) -> Path:
    """Return the path of the JSON file with a step's `extra`."""
    return directory / str(step) / EXTRA


def remove_steps(directory: Path, steps: Sequence[int]) -> None:
    """Delete steps. Each one disappears at once; its space is freed file by file. LostError if the lock is lost."""
    if steps:
        lock.require_held(fresh=True)
    for step in steps:
        target = directory / str(step)
        if open_storage(directory).has_folders:
            target = target.rename(directory / f"{DELETED}{step}")
        else:
            (target / MANIFEST).unlink(missing_ok=True)
        remove_folder(target)


def set_step_aside(directory: Path, step: int, why: str) -> None:
    """Set a damaged step aside for the user, and warn of it: as folder `damaged_STEP`, in a bucket without manifest."""
    folder = directory / str(step)
    if open_storage(directory).has_folders:
        return set_aside(folder, why)
    (folder / DAMAGED).write_bytes((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).unlink()
    warn(f"{folder} {why}: its manifest was renamed to {DAMAGED}")


def remove_unfinished(directory: Path) -> None:
    """Delete the steps without a finished save, and other remains of a failed save."""
    remove_leftovers(directory)
    remove_steps(directory, sorted({*_own_steps(directory)} - {*finished_steps(directory)}))


def remove_leftovers(directory: Path) -> None:
    """Delete the remains of killed processes and failed saves: half-written or half-deleted folders, and probes.

    In a bucket there are none: a step is overwritten where it is, or deleted by `prune`.
    """
    if not open_storage(directory).has_folders:
        return
    for folder in [*directory.glob(f"{DELETED}*"), *directory.glob(f"*{UNFINISHED}*")]:
        shutil.rmtree(folder, ignore_errors=True)
    for probe in directory.glob(f"*{PROBE_SUFFIX}"):
        probe.unlink(missing_ok=True)


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` steps. A step with missing or truncated files does not count as kept."""
    steps = finished_steps(directory)
    kept = [step for step in steps if not find_damage(directory / str(step), hashes=False)][-keep:]
    if kept and not open_storage(directory).has_folders:  # a process that is killed leaves steps without a manifest
        steps = _own_steps(directory)
    if kept:
        remove_steps(directory, [step for step in steps if step < kept[0]])


def require_space(directory: Path) -> None:
    """Raise OSError if the newest step would not fit once more: a save that must fail is not begun."""
    free = open_storage(directory).free_bytes(directory)
    steps = finished_steps(directory) if free < math.inf else []
    if steps and (wanted := size_of(directory / str(steps[-1]))) > free:
        raise OSError(errno.ENOSPC, f"no space left: wanted {wanted:,} bytes, {free:,} are free")


def require_writable(directory: Path) -> None:
    """Raise OSError if this process cannot write a file there: no space, quota or permission. A bucket is not asked."""
    if not open_storage(directory).has_folders:
        return
    probe = directory / f"{socket.gethostname()}.{os.getpid()}{PROBE_SUFFIX}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
