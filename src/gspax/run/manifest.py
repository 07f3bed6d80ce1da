"""The manifest of a checkpoint: size and SHA-256 of each of its files, by which damage is found before it is loaded.

It is the last file of a checkpoint to be written. The others are synchronised with the disk first, so a manifest that
survives a power loss describes files that survived it too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from gspax.run.folders import sync_folder, write_atomically

MANIFEST = "manifest.json"
VERSION = 1  # of the format
PACKAGES = ("gspax", "jax", "orbax-checkpoint", "tensorstore", "numpy")
THREADS = 8  # hashlib releases the GIL


def write_manifest(folder: Path) -> None:
    """Write the manifest of a complete checkpoint. OSError if a file cannot be read or written."""
    names = _list_files(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: _digest(folder / name, sync=True), names)
        files = dict(zip(names, entries, strict=True))
    for each in {folder, *((folder / name).parent for name in names)}:
        sync_folder(each)
    versions = {name: found for name in PACKAGES if (found := installed_version(name))}
    write_atomically(folder / MANIFEST, _render({"version": VERSION, "packages": versions, "files": files}))


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def size_of(folder: Path) -> int:
    """The bytes of the files of a checkpoint; 0 if its manifest is damaged."""
    try:
        return sum(each["bytes"] for each in _read(folder).values())
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return 0


def find_damage(folder: Path, part: int = 0, parts: int = 1, *, hashes: bool = True) -> list[str]:
    """What differs from the manifest, a phrase for each file; nothing if the checkpoint is whole.

    Args:
      part, parts: check only every `parts`-th file, so that several processes share the work.
      hashes: compare the contents too, not only the sizes.
    """
    try:
        files = _read(folder)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    with ThreadPoolExecutor(THREADS) as pool:
        found: Iterable[str | None] = pool.map(
            lambda name: _compare(folder, name, files[name], hashes=hashes), sorted(files)[part::parts]
        )
        return [problem for problem in found if problem is not None]


def _list_files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in paths if name not in (MANIFEST, f"{MANIFEST}.tmp"))


def _render(content: dict[str, Any]) -> str:
    """The text of a manifest, with a digest of its own content."""
    own = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": own}, indent=1, sort_keys=True) + "\n"


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a manifest. ValueError if any byte of it was changed, or it is not of this form."""
    text = (folder / MANIFEST).read_bytes()
    content = json.loads(text)
    content.pop("sha256")
    if _render(content).encode() != text:
        raise ValueError("the digest differs")
    for name, entry in content["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError("it names a file of another folder")
        if {key: type(value) for key, value in entry.items()} != {"bytes": int, "sha256": str}:
            raise ValueError("an entry has no size and SHA-256")
    return content["files"]


def _digest(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
        if sync:
            os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest}


def _compare(folder: Path, name: str, wanted: dict[str, Any], *, hashes: bool) -> str | None:
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} is a link out of the checkpoint"
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{name} has {size} bytes instead of {wanted['bytes']}"
        if hashes and _digest(path) != wanted:
            return f"{name} has another SHA-256"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
