"""Checkpoint files, written by Orbax: for each step a flat table `name -> array` and a JSON `extra`.

`Files` is for processes whose devices hold shards of the arrays. `NoFiles` has the same methods for the other
processes: it reads and writes nothing. `checkpoints.Checkpoints` uses one of the two.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gspax.errors import UserError
from gspax.parallel import multihost
from gspax.run import step_folders
from gspax.run.folders import write_atomically
from gspax.run.manifest import find_damage, write_manifest
from gspax.run.save_barrier import SaveBarrier
from gspax.run.step_folders import EXTRA, STATE

CHUNK_BYTES, FILE_BYTES = 2**26, 2**28  # compressed at once, and in a file: the memory of a save beyond the arrays

Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Files:
    """A directory that `processes` read, and write unless `keep` is None; see `Checkpoints`.

    Orbax commits a checkpoint in a thread. A second thread waits for it; that of the first process then writes the
    manifest, and deletes the checkpoints beyond the newest `keep`.

    Where one process cannot write, the others wait in Orbax's barriers, for up to 20 minutes. So `wait` only polls, the
    processes compare what it gives (`Checkpoints.wait`), and `abandon` ends the barriers of a save that has failed.
    """

    def __init__(
        self, directory: Path, keep: int | None, concurrent_gb: int, processes: set[int], note: Path | None = None
    ) -> None:
        self.directory, self.keep, self.note = directory, keep, note
        self.is_first = jax.process_index() == min(processes)
        self.part, self.parts = sorted(processes).index(jax.process_index()), len(processes)  # of the verification
        self.saving: futures.Future[None] | None = None
        self.shared: dict[str, Any] = {}
        is_subset = processes != set(range(jax.process_count()))
        self.barrier = SaveBarrier(processes if is_subset else None)
        if is_subset:
            self.shared["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=min(processes), active_processes=processes, barrier_sync_key_prefix="gspax"
            )
            if keep is not None:  # for a subset of processes Orbax does not create the directory
                directory.mkdir(parents=True, exist_ok=True)
        self.is_alone = is_subset and len(processes) == 1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None,  # Orbax would delete the old checkpoints before the manifest of the new one is written
            read_only=keep is None,
            cleanup_tmp_directories=keep is not None,
            create=not is_subset,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=self.barrier),
            **self.shared,
        )
        self.open = partial(_open_manager, directory, options, concurrent_gb, self.shared)
        self.manager = self.open()
        if keep is not None and self.is_first:
            step_folders.remove_leftovers(directory)

    def abandon(self) -> None:
        """End a save that has failed on this process or on another one."""
        self.barrier.fail()
        self.saving = None

    def reopen(self) -> None:
        """Prepare for another save after one that was abandoned, and delete what that has written."""
        self.close()  # this manager would raise its errors in the next save
        self.barrier.renew()
        self.manager = self.open()
        if self.is_first:
            step_folders.remove_unfinished(self.directory)

    def find_damage(self, step: int) -> list[str]:
        """The damaged files among those that this process checks, a phrase for each."""
        return find_damage(self.directory / str(step), self.part, self.parts)

    def save(self, step: int, table: Mapping[str, jax.Array], extra: Mapping[str, Any]) -> None:
        """Start writing; the arrays may be donated as soon as this returns."""
        self.barrier.begin()
        self.manager.reload()  # the directory may have changed
        if self.is_alone:
            table = jax.device_get(table)  # Orbax would treat the arrays as replicated over all processes
        arrays = ocp.args.PyTreeSave(
            dict(table),
            save_args={name: _save_args(name, leaf) for name, leaf in table.items()},
            ocdbt_target_data_file_size=FILE_BYTES,
        )
        items = ocp.args.Composite(**{STATE: arrays, EXTRA: ocp.args.JsonSave(dict(extra))})
        self.manager.save(step, args=items, force=True)
        self.saving = futures.Future()
        threading.Thread(target=self._finish, args=(step, self.saving), name="gspax_manifest", daemon=True).start()

    def _finish(self, step: int, saving: futures.Future[None]) -> None:
        """Write the manifest of a checkpoint as soon as Orbax has committed it, then delete the oldest ones."""
        try:
            self.manager.wait_until_finished()
            if self.is_first:
                self._write_manifest(step)
            saving.set_result(None)
        except Exception as error:
            saving.set_exception(error)

    def _write_manifest(self, step: int) -> None:
        write_manifest(self.directory / str(step))
        if self.note is not None:
            write_atomically(self.note, json.dumps({"newest": step}) + "\n")
        step_folders.prune(self.directory, self.keep or 1)

    def wait(self, seconds: float | None) -> str | None:
        """Wait so long for the last save: "" once it is on disk, what failed, or None. Without a number, to the end."""
        if self.saving is None:
            return ""
        if not futures.wait([self.saving], timeout=seconds).done:
            return None
        error = self.saving.exception()
        return shorten(error) if isinstance(error, Exception) else ""

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of a failed save, which `save` or `wait` has raised
            self.manager.close()

    def read(self, step: int, target: Shapes) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The full table, which must have these shapes, and the JSON."""
        if problem := _mismatch(self._stored(step), target):
            raise UserError(f"checkpoint {step} in {self.directory} is of another model or optimiser: {problem}")
        shardings = ocp.checkpoint_utils.construct_restore_args(dict(target))
        table = ocp.args.PyTreeRestore(dict(target), restore_args=shardings)
        try:
            items = ocp.args.Composite(**{STATE: table, EXTRA: ocp.args.JsonRestore()})
            restored = self.manager.restore(step, args=items)
        except Exception as error:
            raise self._unreadable(step, error) from error
        return restored[STATE], restored[EXTRA]

    def read_extra(self, step: int) -> dict[str, Any]:
        """The JSON alone."""
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{EXTRA: ocp.args.JsonRestore()}))[EXTRA]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def read_some(self, step: int, wanted: Shapes) -> dict[str, Any]:
        """Some entries, cast to the wanted dtypes; see `Checkpoints.restore_some`."""
        arguments = {name: _restore_args(leaf) for name, leaf in wanted.items()}
        if problem := _find_other_shape(self._stored(step), wanted):
            raise UserError(f"checkpoint {step} in {self.directory} is of another model: {problem}")
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**self.shared), **self.shared) as reader:
                return reader.restore(
                    self.directory / str(step) / STATE,
                    args=ocp.args.PyTreeRestore(item=dict(wanted), restore_args=arguments, partial_restore=True),
                )
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _stored(self, step: int) -> Mapping[str, Any]:
        try:
            return self.manager.item_metadata(step)[STATE].tree
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> UserError:
        return UserError(f"checkpoint {step} in {self.directory} cannot be read: {shorten(error)}")


def _open_manager(
    directory: Path, options: ocp.CheckpointManagerOptions, concurrent_gb: int, shared: Mapping[str, Any]
) -> ocp.CheckpointManager:
    state = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=concurrent_gb, save_device_host_concurrent_gb=concurrent_gb, **shared
    )
    handlers = {STATE: state, EXTRA: ocp.JsonCheckpointHandler(**shared)}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


class NoFiles:
    """The methods of `Files` for a process whose devices hold none of the arrays."""

    def find_damage(self, step: int) -> list[str]:
        return []

    def save(self, step: int, table: Mapping[str, jax.Array], extra: Mapping[str, Any]) -> None: ...
    def abandon(self) -> None: ...
    def reopen(self) -> None: ...
    def close(self) -> None: ...

    def wait(self, seconds: float | None) -> str:
        return ""

    def read(self, step: int, target: Shapes) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        return self.read_some(step, target), {}

    def read_extra(self, step: int) -> dict[str, Any]:
        return {}

    def read_some(self, step: int, wanted: Shapes) -> dict[str, Any]:
        """Arrays without a shard on this process."""
        return {name: multihost.remote_array(leaf) for name, leaf in wanted.items()}


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _save_args(name: str, leaf: Any) -> ocp.SaveArgs:
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if _is_stacked(name, leaf) else ())


def _is_stacked(name: str, leaf: Any) -> bool:
    """Whether an array is a parameter of several layers. Chunks of one layer let `run.arrays` read one."""
    return leaf.ndim > 1 and name.removeprefix("params/").startswith("runs/")


def _mismatch(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first difference of the stored table from the wanted one, and the number of further ones."""
    differences = []
    for name in {**wanted, **stored}:
        if name not in stored:
            differences.append(f"it has no {name}")
        elif name not in wanted:
            differences.append(f"it has {name}, which is not wanted")
        elif _kind(stored[name]) != _kind(wanted[name]):
            differences.append(f"{name} is {_kind(stored[name])}, wanted {_kind(wanted[name])}")
    more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
    return differences[0] + more if differences else None


def _find_other_shape(stored: Mapping[str, Any], wanted: Shapes) -> str | None:
    """The first of the wanted arrays that is missing or has another shape."""
    for name, leaf in wanted.items():
        if name not in stored or tuple(stored[name].shape) != leaf.shape:
            got = f"is {_kind(stored[name])}, wanted {_kind(leaf)}" if name in stored else "is missing"
            return f"{name} {got}"
    return None


def _kind(leaf: Any) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"


def shorten(error: Exception) -> str:
    """The type of an error and the start of its first line; Orbax's messages fill pages."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"
