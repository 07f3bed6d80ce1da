"""Versions of the policy in a folder: `weights_v000123/` in Hugging Face's layout, and `manifest.json` with checksums.

A version is written under a temporary name, synchronized with the disk, and renamed, so a folder of this name is
complete. Its manifest has a SHA-256 of each tensor: whoever loads it sees a byte that a disk or a network file system
has changed since. The digest of all of them says which weights an engine has.

    {"format": 1, "version": 123, "dtype": "bfloat16", "digest": "…", "tensors": {NAME: SHA-256, …}}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from gspax.config import ModelConfig
from gspax.errors import UserError
from gspax.hf import tensors
from gspax.hf.parameters import named_leaves, write_checkpoint
from gspax.hf.tensors import Stored
from gspax.model.low_rank import dense
from gspax.parallel import multihost
from gspax.run.folders import atomic_folder, sync_folder, write_atomically
from gspax.types import Params, PyTree

MANIFEST = "manifest.json"
FORMAT = 1
PREFIX = "weights_v"
PIECE = 2**24  # bytes that are read at once


@dataclass(frozen=True)
class Written:
    """A version on disk."""

    path: Path  # absolute
    version: int
    digest: str
    bytes: int
    seconds: float


def write_version(folder: Path, version: int, params: Params, model: ModelConfig) -> Written:
    """Write the parameters, adapters merged, in the model's dtype. Collective; process 0 writes.

    A folder of this version that exists is replaced.

    Raises:
      UserError: the folder cannot be written.
    """
    begun, path = time.monotonic(), folder.absolute() / f"{PREFIX}{version:06d}"
    leaves = named_leaves(_merge(params))
    if jax.process_index() != 0:
        for leaf in leaves.values():
            multihost.to_host(leaf)
        digest, size = "", 0
    else:
        if path.exists():
            shutil.rmtree(path)
        with atomic_folder(path) as temporary:
            checksums, size = _write(temporary, leaves, model)
            digest = digest_of(checksums)
            manifest = {"format": FORMAT, "version": version, "dtype": model.dtype, "digest": digest}
            write_atomically(temporary / MANIFEST, json.dumps({**manifest, "tensors": checksums}, indent=1) + "\n")
            for file in temporary.iterdir():
                _sync(file)
            sync_folder(temporary)
        sync_folder(path.parent)
    digest, size = multihost.gather((digest, size))[0]
    return Written(path, version, digest, size, time.monotonic() - begun)


_merge = jax.jit(dense)  # of parameters without adapters it copies nothing


def _write(folder: Path, leaves: Mapping[str, PyTree], model: ModelConfig) -> tuple[dict[str, str], int]:
    """The SHA-256 of each tensor by name, and the bytes of all."""
    write_checkpoint(folder, model, lambda name: multihost.to_host(leaves[name]), dtype=model.dtype)
    stored = tensors.find(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checksums = dict(zip(stored, pool.map(_checksum, stored.values()), strict=True))
    return dict(sorted(checksums.items())), sum(tensor.nbytes for tensor in stored.values())


def _checksum(stored: Stored) -> str:
    """The SHA-256 of a tensor's bytes."""
    checksum, left = hashlib.sha256(), stored.nbytes
    with stored.file.open("rb") as opened:
        opened.seek(stored.start)
        while left and (piece := opened.read(min(PIECE, left))):
            checksum.update(piece)
            left -= len(piece)
    return checksum.hexdigest()


def digest_of(checksums: dict[str, str]) -> str:
    """The SHA-256 of the checksums of all tensors, in the order of their names."""
    return hashlib.sha256("".join(f"{name} {checksums[name]}\n" for name in sorted(checksums)).encode()).hexdigest()


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def remove_others(folder: Path, kept: Path) -> None:
    """Delete every version but one, and what killed pushes have left, on process 0."""
    if jax.process_index() != 0:
        return
    for path in folder.absolute().glob(f"{PREFIX}*"):
        if path != kept:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)


def require_folder(folder: Path) -> None:
    """Make the folder. UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"engine.folder: wanted a folder to write to, got {folder}: {problem.strerror}") from problem
