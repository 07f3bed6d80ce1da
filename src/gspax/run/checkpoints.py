"""Saves checkpoints, a state and a JSON `extra`, in the background with Orbax, either completely or not at all.

A state is stored as a flat table `path in the tree -> array`, so any pytree can be saved: integer keys, typed PRNG
keys, optimizer tuples. A checkpoint of another model is rejected by its names, shapes and dtypes before an array is
loaded.

Orbax writes the arrays to a temporary folder and renames it. A thread then adds `extra` and a manifest with the SHA-256
of every file (`run.manifest`): only with a manifest is a save finished. A checkpoint is verified before it is used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from gspax.errors import FailureError, UserError, warn_once
from gspax.parallel import multihost
from gspax.run import lock, manifest
from gspax.run.folders import set_aside, write_atomically
from gspax.run.manifest import MANIFEST
from gspax.storage.files import open_storage
from gspax.storage.paths import read_bytes, to_path
from gspax.types import Array, JsonObject, PyTree, named_leaves
from gspax.unstable import key_impl_name

CHUNK_BYTES, FILE_BYTES = 2**26, 2**28  # of a compressed chunk, and of a file: bounds on a save's memory
POLL = 0.2  # seconds between two checks of a save

T = TypeVar("T")
Leaf = Array | jax.ShapeDtypeStruct


class Checkpoints:
    """A directory with the newest `keep` checkpoints, a context manager. It sets the `absl` logger to level CRITICAL.

    Without `keep` it is read-only: nothing is created, deleted or saved, and another process may be writing there.
    A save compresses up to `concurrent_gb` GB of arrays at a time, in memory. It must exceed the size of any array.

    All processes of a run call the same methods. Those without devices in `mesh`, on which the state is sharded, touch
    no file and receive the results of the others. Process 0 is never one of them: it lists, renames and deletes.
    `note` is a file that records the newest step: with it, it is an error if no intact checkpoint is left.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int = 0,
        *,
        mesh: jax.sharding.Mesh | None = None,
        concurrent_gb: int = 96,
        note: Path | None = None,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.directory, self.note = _absolute(to_path(directory)), note
        processes = set(range(jax.process_count())) if mesh is None else multihost.process_indices(mesh)
        self._is_read_only = not keep
        self._files = _Files(self.directory, keep, note, processes, concurrent_gb)
        self._verified: set[int] = set()
        self._newest: int | None = None  # the step that this object saved last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.wait()
        elif problem := self._files.poll(None):  # the other processes may not come here
            _warn(self.directory, f"a checkpoint could not be written: {problem}")

    def save(
        self, step: int, state: PyTree, extra: Mapping[str, object], wait_for_log: Callable[[], object] = lambda: None
    ) -> None:
        """Start writing a checkpoint; `state` may be donated as soon as this returns.

        Writing continues in the background; the step exists once `wait`, `steps` or `latest` has returned. Saving a
        step twice writes it once. After an older checkpoint was restored, the first save deletes the later ones.
        Before the manifest is written, process 0 calls `wait_for_log` in the background.
        FailureError if this save or the one before it failed.
        """
        self.wait()
        if step == self._newest:
            return
        if problem := _lock_problem():
            raise FailureError(f"checkpoint {step} could not be written to {self.directory}: {problem}")
        try:
            multihost.all_or_raise(lambda: self._files.make_room(step))
            table = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in _table(state).items()}
            multihost.all_or_raise(lambda: self._files.start(step, table, json.dumps(extra), wait_for_log))
        except Exception as error:
            self._files.abandon()
            raise FailureError(
                f"checkpoint {step} could not be written to {self.directory}: {shorten(error)}"
            ) from error
        self._newest = step
        self._verified.discard(step)

    def wait(self) -> None:
        """Return when the last save is on disk. FailureError if it failed, on all processes at once."""
        while None in (problems := multihost.gather(self._files.poll(POLL))) and not any(problems):
            pass
        if problem := next(filter(None, problems), ""):
            self._files.abandon()
            self._newest = None  # it can be saved again
            where = f" (process {problems.index(problem)})" if problems[1:] else ""
            raise FailureError(f"a checkpoint could not be written to {self.directory}: {problem}{where}")

    def steps(self) -> list[int]:
        """Return the steps on disk whose save was finished, oldest first, including steps damaged since."""
        self.wait()
        return _on_primary(lambda: manifest.finished_steps(self.directory))

    def latest(self) -> int | None:
        """Return the newest intact step on disk, if there is one.

        A damaged step is set aside as `damaged_STEP` unless the directory is read-only; a line on stderr names it.
        UserError if there is none but `note` records that one was saved.
        """
        steps, problem = self.steps(), ""
        for step in sorted({*_on_primary(lambda: manifest.list_steps(self.directory))} - {*steps}):
            _warn(self.directory, f"checkpoint {step} has no {MANIFEST}: its save was not finished, and it is not used")
        for step in reversed(steps):
            if (damage := self.find_damage(step)) is None:
                _on_primary(partial(_tell_used, self.directory, self.note, step, is_fallback=bool(problem)))
                return step
            problem = f"checkpoint {step} is damaged: {damage}"
            if self._is_read_only:
                _warn(self.directory, problem)
            else:
                _on_primary(partial(manifest.set_step_aside, self.directory, step, f"is damaged: {damage}"))
                self._newest = None
        if problem and self._is_read_only:
            raise UserError(f"{self.directory} has no intact checkpoint: {problem}")
        if not self._is_read_only and self.note is not None and _on_primary(self.note.exists):
            lost = f"has no intact checkpoint, but {self.note.name} records that one was saved"
            raise UserError(f"{self.directory} {lost}: bring one back from a copy, or start in another directory")
        return None

    def find_damage(self, step: int) -> str | None:
        """Return the first damage of a finished step; None if it is intact. Each process verifies some of the files."""
        if step in self._verified:
            return None
        if damage := [phrase for phrases in multihost.gather(self._files.find_damage(step)) for phrase in phrases]:
            return damage[0] + (f" (and {len(damage) - 1} more)" if damage[1:] else "")
        self._verified.add(step)
        return None

    def require_intact(self, step: int) -> None:
        """Raise UserError if there is no such step or if it is damaged."""
        if step not in (steps := self.steps()):
            others = ", ".join(map(str, steps)) or "none"
            raise UserError(f"there is no checkpoint {step} with a {MANIFEST} in {self.directory}, only {others}")
        if damage := self.find_damage(step):
            raise UserError(f"checkpoint {step} in {self.directory} is damaged: {damage}")

    def restore(self, abstract_state: T, step: int | None = None) -> tuple[T, JsonObject]:
        """Restore a checkpoint's state, each array sharded as in `abstract_state`, and its `extra`.

        Args:
          abstract_state: the structure of the saved state with `jax.ShapeDtypeStruct` leaves. Their shardings may be
            on other devices and another mesh than those that the state was saved from.
          step: the newest by default.

        Raises:
          UserError: there is no such checkpoint, it is of another model or optimizer, or it is damaged.
        """
        step = newest_step(self) if step is None else step
        wanted = _table(abstract_state)
        target = {name: _abstract_storable(leaf) for name, leaf in wanted.items()}
        arrays = self._load(step, target, is_partial=False)
        leaves = [_from_storable(arrays[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), read_extra(self, step)

    def restore_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Array]:
        """Restore only some leaves, by paths such as `params/embedding`, each cast to the wanted dtype.

        Leaves with a sharding become jax arrays with it, the others numpy arrays.
        """
        return self._load(step, wanted, is_partial=True)

    def _load(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], *, is_partial: bool) -> dict[str, Array]:
        self.require_intact(step)
        return multihost.all_or_raise(lambda: self._files.load(step, wanted, is_partial=is_partial))


def newest_step(checkpoints: Checkpoints) -> int:
    """Return the newest intact step on disk. UserError if there is none."""
    if (step := checkpoints.latest()) is None:
        raise UserError(f"there is no checkpoint in {checkpoints.directory}")
    return step


def save(
    checkpoints: Checkpoints,
    step: int,
    state: PyTree,
    extra: Mapping[str, object],
    wait_for_log: Callable[[], object] = lambda: None,
    *,
    is_last: bool,
) -> None:
    """Save a checkpoint, and only warn if this save or the previous one fails: the next save tries again.

    Waits for the last save only.

    Raises:
      FailureError: this save is the last one and fails, or the lock of the run is lost.
    """
    if problem := _lock_problem():  # also before the remains of a failed save are deleted
        if is_last:
            raise FailureError(f"checkpoint {step} could not be written to {checkpoints.directory}: {problem}")
        multihost.warn_from_primary(f"checkpoint {step} is not written: {problem}; the run goes on")
        return
    for act, is_required in (
        (checkpoints.wait, False),
        (lambda: checkpoints.save(step, state, extra, wait_for_log), is_last),
    ):
        try:
            act()
        except FailureError as error:
            if is_required or isinstance(error, lock.LostError):
                raise
            multihost.warn_from_primary(f"{error}; the run goes on and tries again at the next save")
    if is_last:
        checkpoints.wait()


def take_traffic(checkpoints: Checkpoints) -> dict[str, float]:
    """Return process 0's bucket requests during a save that ended since the last call, as metrics."""
    traffic, checkpoints._files.traffic = checkpoints._files.traffic, {}
    return traffic


def _lock_problem() -> str:
    """Return a message if the lock cannot be verified, else "". Collective. LostError if the lock is lost."""

    def check() -> str:
        try:
            lock.require_held()
        except OSError as error:
            return f"its lock cannot be renewed ({shorten(error)})"
        return ""

    return next(filter(None, multihost.gather(multihost.all_or_raise(check))), "")


def read_extra(checkpoints: Checkpoints, step: int) -> JsonObject:
    """Read the `extra` of a checkpoint. UserError if it cannot be read."""

    def read() -> JsonObject:
        try:
            return json.loads(read_bytes(manifest.extra_file(checkpoints.directory, step)))
        except (OSError, ValueError) as error:
            raise _unreadable(checkpoints.directory, step, error) from error

    return _on_primary(read)


def _warn(directory: Path, sentence: str) -> None:
    multihost.warn_from_primary(f"{directory}: {sentence}")


def _tell_used(directory: Path, note: Path | None, step: int, *, is_fallback: bool) -> None:
    """Warn if `step` is not the newest one saved: later ones are damaged, or the one that `note` records is lost."""
    if is_fallback:
        _warn(directory, f"using checkpoint {step}, the newest intact one")
    if note is not None and (lost := manifest.lost_step(directory, note)) is not None and lost > step:
        recorded = f"although {note.name} records that it was saved"
        warn_once(f"{directory}: checkpoint {lost} is lost, {recorded}: using {step}")
        if (
            open_storage(directory).has_folders and (file := directory / str(lost)).exists()
        ):  # it would be in the way of a save
            set_aside(file, "is no folder")


def _on_primary(work: Callable[[], T]) -> T:
    """Call `work()` on process 0, and return its result on all processes. Collective."""
    return multihost.gather(multihost.all_or_raise(lambda: work() if jax.process_index() == 0 else None))[0]  # type: ignore[return-value]


class _Files:
    """Reads and writes the files of one process; only processes with devices of the mesh have files.

    A process that cannot write does not reach the barriers of Orbax, where the others wait for it for up to 20 minutes.
    So `poll` returns when there is no result yet, the processes compare what it returns (`Checkpoints.wait`), and after
    a failure `abandon` ends the barriers.
    """

    def __init__(self, directory: Path, keep: int, note: Path | None, processes: set[int], concurrent_gb: int) -> None:
        self.directory, self.keep, self.note, self.concurrent_gb = directory, keep or 1, note, concurrent_gb
        everyone, self.processes = set(range(jax.process_count())), processes
        self.takes_part, self.is_primary = jax.process_index() in self.processes, jax.process_index() == 0
        subset = None if self.processes == everyone else self.processes
        self.is_alone = subset is not None and len(subset) == 1
        self.options = ocp.options.MultiprocessingOptions(
            active_processes=subset, barrier_sync_key_prefix="gspax" if subset else None
        )
        self.saving: futures.Future[None] | None = None
        self.failed, self.attempts = threading.Event(), 0
        self.traffic: dict[str, float] = {}  # of the last save that succeeded
        self.last = -1  # no later step than this one is stored
        if keep and self.takes_part:
            directory.mkdir(parents=True, exist_ok=True)
            if self.is_primary:
                manifest.remove_leftovers(directory)
                self.last = max(manifest.list_steps(directory), default=-1)

    def make_room(self, step: int) -> None:
        """Delete a step and the later ones, finished or not. OSError if this process could not write another one."""
        if not self.takes_part:
            return
        if self.is_primary:
            if step <= self.last:  # else a save would wait for a bucket to list nothing
                later = [other for other in manifest.list_steps(self.directory) if other >= step]
                manifest.remove_steps(self.directory, later)
            self.last = step
            manifest.require_space(self.directory)
        manifest.require_writable(self.directory)

    def start(self, step: int, table: Mapping[str, jax.Array], extra: str, wait_for_log: Callable[[], object]) -> None:
        """Start writing; the arrays may be donated as soon as this returns."""
        if not self.takes_part:
            return
        self.failed, self.attempts = threading.Event(), self.attempts + 1
        if self.is_alone:
            table = jax.device_get(table)  # Orbax would treat the arrays as replicated over all processes
        handler = ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=self.concurrent_gb,
            save_device_host_concurrent_gb=self.concurrent_gb,
            multiprocessing_options=self.options,
        )
        barrier = _make_barrier(self.options.active_processes, self.failed, self.attempts)
        writer = ocp.AsyncCheckpointer(
            handler,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=barrier),
            multiprocessing_options=self.options,
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),  # `make_room` has made sure
        )
        save_args = {name: _save_args(name, leaf) for name, leaf in table.items()}
        arguments = ocp.args.PyTreeSave(dict(table), save_args=save_args, ocdbt_target_data_file_size=FILE_BYTES)
        storage = open_storage(self.directory)
        before = storage.traffic()
        writer.save(self.directory / str(step), args=arguments)

        def finish() -> None:
            with contextlib.closing(writer):
                writer.wait_until_finished()
            if self.is_primary:
                wait_for_log()
                write_atomically(manifest.extra_file(self.directory, step), extra + "\n")
                manifest.write_manifest(self.directory / str(step))
                if self.note is not None:
                    write_atomically(self.note, json.dumps({"newest": step}) + "\n")
                manifest.prune(self.directory, self.keep)
                if (sent := storage.traffic()) is not None and before is not None:
                    self.traffic = sent.since(before, "bucket/save_")

        self.saving = _run_in_thread(finish)

    def poll(self, seconds: float | None) -> str | None:
        """Return the state of the last save: "" if it is on disk, its error if it failed, None if it has not ended.

        Waits up to `seconds`, or for None until the save ends.
        """
        if self.saving is None:
            return ""
        if not futures.wait([self.saving], timeout=seconds).done:
            return None
        error = self.saving.exception()
        return shorten(error) if isinstance(error, Exception) else ""

    def abandon(self) -> None:
        """End a save that has failed on this process or on another one, and delete what it has written."""
        self.failed.set()
        self.poll(None)
        self.saving = None
        if self.is_primary:
            with contextlib.suppress(OSError, lock.LostError):
                manifest.remove_unfinished(self.directory)

    def find_damage(self, step: int) -> list[str]:
        """Return a phrase for each damaged file among the files that this process verifies."""
        if not self.takes_part:
            return []
        part = sorted(self.processes).index(jax.process_index())
        return manifest.find_damage(self.directory / str(step), part, len(self.processes))

    def load(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], *, is_partial: bool) -> dict[str, Array]:
        """Load the arrays with the wanted shardings. If `is_partial`, others may be stored too, and dtypes are cast."""
        if not self.takes_part:
            return {name: multihost.remote_array(leaf) for name, leaf in wanted.items()}
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=self.options)
        folder, restore_args = self.directory / str(step), ocp.checkpoint_utils.construct_restore_args(dict(wanted))
        arguments = ocp.args.PyTreeRestore(dict(wanted), restore_args=restore_args, partial_restore=is_partial)
        try:
            with ocp.Checkpointer(handler, multiprocessing_options=self.options) as reader:
                problem = _find_difference(reader.metadata(folder).item_metadata.tree, wanted, is_partial=is_partial)
                arrays = {} if problem else reader.restore(folder, args=arguments)
        except Exception as error:
            raise _unreadable(self.directory, step, error) from error
        if problem:
            raise UserError(f"checkpoint {step} in {self.directory} is of another model or optimizer: {problem}")
        return arrays


def _make_barrier(processes: set[int] | None, failed: threading.Event, attempt: int) -> Callable[..., None]:
    """Make a `barrier_sync_fn` for Orbax that also ends when the save has failed: then a process never reaches it."""

    def wait(*, key: str, timeout_ms: int) -> None:
        barrier = ocp.multihost.get_barrier_sync_fn(processes=processes)
        waiting = _run_in_thread(lambda: barrier(key=f"{key}.{attempt}", timeout_ms=timeout_ms))
        while not futures.wait([waiting], timeout=POLL).done:
            if failed.is_set():
                raise RuntimeError("the save has failed on another process")
        waiting.result()

    return wait


def _run_in_thread(work: Callable[[], None]) -> futures.Future[None]:
    """Run `work()` in a daemon thread, and return a future; unlike a pool's, it does not delay the process's exit."""
    future: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gspax_checkpoints", daemon=True).start()
    return future


def _absolute(path: Path) -> Path:
    return open_storage(path).absolute(path)


def _unreadable(directory: Path, step: int, error: Exception) -> UserError:
    return UserError(f"checkpoint {step} in {directory} cannot be read: {shorten(error)}")


def _table(tree: PyTree) -> dict[str, PyTree]:
    """Return the leaves of a tree by path, such as `params/layers/0/router`, in the order of the tree."""
    table = named_leaves(tree)
    if len(table) != len(jax.tree.leaves(tree)):
        raise ValueError("two leaves of the state have the same path, such as the keys 0 and '0' of one dict")
    return table


def _is_key(leaf: Leaf) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _abstract_storable(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding that a leaf is stored with; a typed key is stored as its integers."""
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _from_storable(array: Array, leaf: jax.ShapeDtypeStruct) -> Array:
    """Convert a stored array to its leaf: typed keys are made from their integers."""
    return jax.random.wrap_key_data(array, impl=key_impl_name(leaf.dtype)) if _is_key(leaf) else array


def _save_args(name: str, leaf: Array) -> ocp.SaveArgs:
    """Choose an array's chunks. A chunk of a stacked parameter holds one layer, so that `StoredArray` reads one."""
    is_stacked = leaf.ndim > 1 and name.removeprefix("params/").startswith("runs/")
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if is_stacked else ())


def _find_difference(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], *, is_partial: bool) -> str | None:
    """Return the first difference of the stored arrays from the wanted ones, and the number of further ones."""
    differences = []
    for name, leaf in wanted.items():
        if name not in stored:
            differences.append(f"it has no {name}")
        elif tuple(stored[name].shape) != leaf.shape or (not is_partial and _kind(stored[name]) != _kind(leaf)):
            differences.append(f"{name} is {_kind(stored[name])}, wanted {_kind(leaf)}")
    if not is_partial:
        differences += [f"it has {name}, which is not wanted" for name in stored if name not in wanted]
    more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
    return differences[0] + more if differences else None


def _kind(leaf: Leaf) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"


def shorten(error: Exception) -> str:
    """Return the type of an error and the start of its first line; Orbax's messages fill pages."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = (str(error).strip().splitlines() or [""])[0].partition(" [")[0]
    if len(first) > 160:  # tensorstore names the files first, and the cause last
        first = f"{first[:60]} … {first[-97:]}"
    return f"{type(error).__name__}: {first}"


class StoredArray:
    """An array on disk. `array[()]` reads all of it, `array[layer, ...]` one layer of a stack.

    The experts of all layers are one array, which few memories hold. The latest layer is cached, so layers in order are
    read once.
    """

    def __init__(self, name: str, store: tensorstore.TensorStore) -> None:
        self.name, self.store = name, store
        self.layer, self.values = -1, np.empty(0)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        if not index:
            return self._read(())
        layer, *rest = index
        if layer != self.layer:
            self.values = np.empty(0)  # freed before the next layer is read
            self.values, self.layer = self._read(layer), layer
        return self.values[tuple(rest)]

    def _read(self, part: int | tuple[()]) -> np.ndarray:
        try:
            return self.store[part].read().result()
        except ValueError as error:  # tensorstore's for damaged data
            raise UserError(f"{self.name} cannot be read: {shorten(error)}") from error


def open_array(directory: Path, step: int, name: str, shape: tuple[int, ...]) -> StoredArray:
    """Open an array by its path, such as `params/embedding`. UserError if it is missing or of another shape."""
    where = f"{name} of checkpoint {step} in {directory}"
    base = _absolute(directory / str(step)).as_uri() + "/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    try:  # without asking for the manifest again at each read: a checkpoint stays as it is
        store = tensorstore.open(spec, open=True, read=True, recheck_cached_data="open").result()
    except ValueError as error:
        raise UserError(f"{where} cannot be read: {shorten(error)}") from error
    if tuple(store.shape) != tuple(shape):
        raise UserError(f"{where}: wanted the shape {list(shape)}, got {list(store.shape)}: it is of another model")
    return StoredArray(where, store)
