"""Writes versions of the policy to a folder, in Hugging Face's layout: `weights_v000123/`.

A version is written under a temporary name, synchronized with the disk, and renamed, so a folder of this name is
complete. Every process writes a share of its tensors; the first one writes the manifest last. It has a SHA-256 of each
tensor: whoever loads the version sees a byte that a disk or a network file system has changed since. The digest of all
of them says which weights a server has.

    {"format": 1, "version": 123, "dtype": "bfloat16", "digest": "…", "tensors": {NAME: SHA-256, …}}
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
from gspax.hf.config_json import text_only
from gspax.hf.tensors import Part
from gspax.model.low_rank import dense
from gspax.parallel import multihost
from gspax.run.folders import atomic_folder, write_atomically
from gspax.storage.local import sync_folder
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
    bytes: int  # of the tensors
    seconds: float


class Writer:
    """Writes the versions of a model, adapters merged, in its dtype, and without a vision tower.

    Args:
      folder: on a file system that all processes and servers share.
      model: the model of the versions.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._folder, self._model = folder.absolute(), text_only(model)
        self._dtype = np.dtype(jax.numpy.dtype(model.dtype))
        self._table, shapes, self._own = parameters.published_tensors(self._model)
        dtypes = {name: self._own.get(name, self._dtype) for name in shapes}
        self._bytes = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        share = min(parameters.SHARD_SIZE, -(-self._bytes // jax.process_count()))
        self._files = tensors.divide(shapes, self._dtype, share, self._own)
        self._mine = dict(list(self._files.items())[jax.process_index() :: jax.process_count()])

    def write(self, version: int, params: Params) -> Written:
        """Write a version. Collective. A folder of this version that exists is replaced.

        Raises:
          UserError: the folder cannot be written.
        """
        begun, path = time.monotonic(), self._folder / f"{PREFIX}{version:06d}"
        numbers = self._collect(params)
        with _shared_folder(path) as temporary:
            checksums = dict[str, str]()
            for part in multihost.gather(multihost.all_or_raise(lambda: self._write_share(temporary, numbers))):
                checksums |= part
            digest = digest_of(checksums)
            if jax.process_index() == 0:
                manifest = {"format": FORMAT, "version": version, "dtype": self._model.dtype, "digest": digest}
                manifest["tensors"] = dict(sorted(checksums.items()))
                write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        return Written(path, version, digest, self._bytes, time.monotonic() - begun)

    def _collect(self, params: Params) -> dict[str, np.ndarray]:
        """Collect this process's share of the tensors, each in one axis. Collective."""
        leaves = named_leaves(_merge(params))
        shapes = {name: shape for shard in self._mine.values() for name, shape in shard.items()}
        dtypes = {name: self._own.get(name, self._dtype) for name in shapes}
        collected = {name: np.empty(math.prod(shape), dtypes[name]) for name, shape in shapes.items()}

        def copy(name: str, numbers: np.ndarray, part: Part) -> None:
            tensor = collected[name]
            outer, start, length, total = part
            place = tensor.reshape(outer, total, -1)[:, start : start + length]
            place[...] = numbers.reshape(place.shape)

        several = jax.process_count() > 1
        parameters.publish(
            self._table,
            lambda name: _Layers(leaves[name]) if several else multihost.to_host(leaves[name]),
            dtypes,
            copy,
        )
        return collected

    def _write_share(self, folder: Path, numbers: dict[str, np.ndarray]) -> dict[str, str]:
        """Write this process's files to the disk, and return the checksums of their tensors."""
        for file, shard in self._mine.items():
            for name, stored in tensors.create(folder / file, shard, self._dtype, self._own).items():
                tensors.write(stored, numbers[name])
        if jax.process_index() == 0:
            parameters.write_config(folder, self._model, self._model.dtype)
            tensors.write_index(folder, self._files, self._dtype, self._own)
        for path in folder.iterdir():
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(numbers, pool.map(_checksum, numbers.values()), strict=True))


_merge = jax.jit(dense)  # of parameters without adapters it copies nothing


@dataclass(frozen=True)
class _Layers:
    """A parameter on the devices of several processes, gathered one layer at a time. Collective."""

    leaf: jax.Array

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        everywhere = NamedSharding(self.leaf.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        gathered: np.ndarray = multihost.to_host(jax.jit(_select, out_shardings=everywhere)(self.leaf, index))
        return gathered


def _select(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return leaf[index]


def _checksum(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.view("u1").data).hexdigest()


@contextlib.contextmanager
def _shared_folder(path: Path) -> Iterator[Path]:
    """Open an `atomic_folder` on process 0 for all processes to write to. Collective. An existing `path` is deleted."""
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
    """Compute the SHA-256 of the checksums of all tensors, in the order of their names."""
    return hashlib.sha256("".join(f"{name} {checksums[name]}\n" for name in sorted(checksums)).encode()).hexdigest()


def remove_others(kept: Path) -> None:
    """Delete every version except `kept`, and the remains of killed pushes, on process 0."""
    if jax.process_index() != 0:
        return
    for path in kept.parent.glob(f"{PREFIX}*"):
        if path != kept:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)


def require_folder(folder: Path) -> None:
    """Create the folder. UserError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"engine.folder: wanted a folder to write to, got {folder}: {problem.strerror}") from problem
