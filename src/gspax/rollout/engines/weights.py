"""Versions of the policy in a folder: `weights_v000123/`, in Hugging Face's layout or as changes of the one before.

A version is written under a temporary name, synchronized with the disk, and renamed, so a folder of this name is
complete. Every process writes a share of its tensors; the first one writes the manifest last. It has a SHA-256 of each
tensor: whoever loads the version sees a byte that a disk or a network file system has changed since. The digest of all
of them says which weights an engine has.

    {"format": 1, "version": 123, "dtype": "bfloat16", "digest": "…", "tensors": {NAME: SHA-256, …}}

A training step changes about a percent of the numbers of bfloat16 weights. So a version may hold changes instead of
tensors: files `changes-00000.npz`, which have for a tensor its changed numbers, each with its place and its bits, or
all of its bits. Its manifest has the version that they are applied to, and checksums of the tensors that result:

    {…, "base": {"folder": "weights_v000122", "digest": "…"}}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gspax.config import ModelConfig
from gspax.errors import UserError
from gspax.hf import parameters, tensors
from gspax.hf.tensors import Part
from gspax.model.low_rank import dense
from gspax.parallel import multihost
from gspax.run.folders import atomic_folder, sync_folder, write_atomically
from gspax.types import Params, named_leaves

MANIFEST = "manifest.json"
FORMAT = 1
PREFIX = "weights_v"


@dataclass(frozen=True)
class Written:
    """A version on disk."""

    path: Path  # absolute
    version: int
    digest: str
    bytes: int  # of the tensors, or of the changes
    seconds: float


class Writer:
    """Writes the versions of a model, adapters merged, in its dtype.

    It holds this process's share of the newest version's tensors in memory, as bits.

    Args:
      folder: on a file system that all processes and servers share.
      changes: whether the servers can read versions that hold changes.
    """

    def __init__(self, folder: Path, model: ModelConfig, *, changes: bool) -> None:
        self._folder, self._model, self._changes = folder.absolute(), model, changes
        self._dtype = np.dtype(jax.numpy.dtype(model.dtype))
        self._table, shapes, self._own = parameters.published_tensors(model)
        self._dtypes = {name: self._own.get(name, self._dtype) for name in shapes}
        self._bytes = sum(math.prod(shape) * self._dtypes[name].itemsize for name, shape in shapes.items())
        share = min(parameters.SHARD_SIZE, -(-self._bytes // jax.process_count()))
        self._files = tensors.divide(shapes, self._dtype, share, self._own)
        self._mine = dict(list(self._files.items())[jax.process_index() :: jax.process_count()])
        self._bits = {
            name: np.zeros(math.prod(shape), f"u{self._dtypes[name].itemsize}")
            for shard in self._mine.values()
            for name, shape in shard.items()
        }
        self._chain: list[Written] = []  # the newest version in full, and those of its changes up to the newest

    @property
    def kept(self) -> list[Path]:
        """The folders that the newest version is read from."""
        return [written.path for written in self._chain]

    def write(self, version: int, params: Params) -> Written:
        """Write a version: its changes, or all of it, if the changes since the last one that was written so have more
        bytes than it. Collective. A folder of this version that exists is replaced.

        Raises:
          UserError: the folder cannot be written.
        """
        begun, path = time.monotonic(), self._folder / f"{PREFIX}{version:06d}"
        chain, self._chain = self._chain, []  # until the version is there, nothing is known to be
        if not self._changes or path in [written.path for written in chain]:
            chain = []
        changed = self._take(params, compare=bool(chain))
        size = sum(multihost.gather(sum(change.nbytes for change in changed.values())))
        if sum(written.bytes for written in chain[1:]) + size >= self._bytes:
            chain, size = [], self._bytes
        with _shared_folder(path) as temporary:
            work = (lambda: self._write_changes(temporary, changed)) if chain else (lambda: self._write_all(temporary))
            checksums = dict[str, str]()
            for part in multihost.gather(multihost.all_or_raise(work)):
                checksums |= part
            digest = digest_of(checksums)
            manifest = {"format": FORMAT, "version": version, "dtype": self._model.dtype, "digest": digest}
            if chain:
                manifest["base"] = {"folder": chain[-1].path.name, "digest": chain[-1].digest}
            if jax.process_index() == 0:
                manifest["tensors"] = dict(sorted(checksums.items()))
                write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        written = Written(path, version, digest, size, time.monotonic() - begun)
        self._chain = [*chain, written]
        return written

    def _take(self, params: Params, *, compare: bool) -> dict[str, np.ndarray]:
        """Take over the weights. Collective.

        Returns:
          The changes of each tensor of this process that has some: places and bits, or all bits if that is less.
        """
        leaves = named_leaves(_merge(params))
        changed, whole = dict[str, list[np.ndarray]](), set[str]()

        def update(name: str, numbers: np.ndarray, part: Part | None) -> None:
            bits = self._bits[name]
            part = part or Part(1, 0, bits.size, bits.size)
            held = bits.reshape(part.outer, part.total, -1)[:, part.start : part.start + part.length]
            new = numbers.reshape(-1).view(bits.dtype).reshape(held.shape)
            if compare:
                differs = held != new
                if 2 * np.count_nonzero(differs) >= differs.size or bits.size > 2**32:
                    whole.add(name)  # its places would have more bytes
                else:
                    outer, place = np.divmod(np.flatnonzero(differs), step := held[0].size)
                    record = np.empty(place.size, [("place", "<u4"), ("bits", bits.dtype)])
                    record["place"] = outer * (bits.size // part.outer) + part.start * (step // part.length) + place
                    record["bits"] = new.reshape(-1)[outer * step + place]
                    changed.setdefault(name, []).append(record)
            held[...] = new

        several = jax.process_count() > 1
        parameters.publish(
            self._table,
            lambda name: _Layers(leaves[name]) if several else multihost.to_host(leaves[name]),
            {name: self._dtypes[name] for name in self._bits},
            update,
        )
        if not compare:
            return self._bits
        found = {name: np.concatenate(records) for name, records in changed.items()}
        return {name: found[name] for name in found if found[name].size} | {name: self._bits[name] for name in whole}

    def _write_changes(self, folder: Path, changed: dict[str, np.ndarray]) -> dict[str, str]:
        """Write this process's changes; the checksums of all its tensors."""
        np.savez(folder / f"changes-{jax.process_index():05}.npz", **changed)  # type: ignore[arg-type]
        return self._finish(folder)

    def _write_all(self, folder: Path) -> dict[str, str]:
        """Write this process's files; the checksums of all its tensors."""
        for file, shard in self._mine.items():
            for name, stored in tensors.create(folder / file, shard, self._dtype, self._own).items():
                tensors.write(stored, self._bits[name].view(stored.dtype))
        if jax.process_index() == 0:
            parameters.write_config(folder, self._model, self._model.dtype)
            tensors.write_index(folder, self._files, self._dtype, self._own)
        return self._finish(folder)

    def _finish(self, folder: Path) -> dict[str, str]:
        """Synchronize the files with the disk; the checksums of this process's tensors."""
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(self._bits, pool.map(_checksum, self._bits.values()), strict=True))


_merge = jax.jit(dense)  # of parameters without adapters it copies nothing


@dataclass(frozen=True)
class _Layers:
    """A parameter on the devices of several processes, which is gathered one layer at a time. Collective."""

    leaf: jax.Array

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        everywhere = NamedSharding(self.leaf.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        gathered: np.ndarray = multihost.to_host(jax.jit(_select, out_shardings=everywhere)(self.leaf, index))
        return gathered


def _select(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return leaf[index]


def _checksum(bits: np.ndarray) -> str:
    return hashlib.sha256(bits.data).hexdigest()


@contextlib.contextmanager
def _shared_folder(path: Path) -> Iterator[Path]:
    """`atomic_folder` of process 0, for all to write to. Collective. What was there is deleted."""
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            if jax.process_index() != 0:
                return ""
            shutil.rmtree(path, ignore_errors=True)
            return stack.enter_context(atomic_folder(path)).name

        temporary = path.with_name(multihost.gather(multihost.all_or_raise(begin))[0])
        multihost.all_or_raise(lambda: _require_there(temporary))
        yield temporary
        sync_folder(temporary)
    sync_folder(path.parent)


def _require_there(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"engine.folder: wanted a folder that all processes share, got {folder.parent}")


def digest_of(checksums: dict[str, str]) -> str:
    """The SHA-256 of the checksums of all tensors, in the order of their names."""
    return hashlib.sha256("".join(f"{name} {checksums[name]}\n" for name in sorted(checksums)).encode()).hexdigest()


def remove_others(folder: Path, kept: list[Path]) -> None:
    """Delete every version but these, and what killed pushes have left, on process 0."""
    if jax.process_index() != 0:
        return
    for path in folder.absolute().glob(f"{PREFIX}*"):
        if path not in kept:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)


def require_folder(folder: Path) -> None:
    """Make the folder. UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"engine.folder: wanted a folder to write to, got {folder}: {problem.strerror}") from problem
