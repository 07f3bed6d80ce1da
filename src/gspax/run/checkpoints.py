"""Checkpoints on disk: a complete state and a JSON `extra`, or nothing.

A state is stored as a flat table `path in the tree -> array`. So any pytree can be saved (integer keys, typed PRNG
keys, optimiser tuples), and a checkpoint of another model is rejected by its names, shapes and dtypes before an array
is read. Orbax writes to a temporary directory and renames it; a killed save leaves no checkpoint.

A manifest with the SHA-256 of every file is written last (`run.manifest`). A checkpoint is verified before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax

from gspax.errors import FailureError, UserError
from gspax.parallel import multihost
from gspax.run import lock, step_folders
from gspax.run.checkpoint_files import Files, NoFiles, shorten
from gspax.run.manifest import MANIFEST
from gspax.run.save_barrier import POLL
from gspax.unstable import key_impl_name


class Checkpoints:
    """A directory with the newest `keep` checkpoints, a context manager.

    Without `keep` it is read-only: nothing is created, cleaned up or saved, and another process may be writing there.
    A save compresses up to `concurrent_gb` GB of arrays at a time and holds the compressed bytes in memory too; every
    array must be smaller than that. Creating one sets the `absl` logger, which Orbax uses, to level CRITICAL.

    All processes of a run call the same methods. Those without devices in `mesh`, on which the state is sharded, touch
    no file and receive the results of the others. Process 0 is never one of them: it lists, renames and deletes.

    `note` is a file that records the newest step: with it, it is an error if no whole checkpoint is left.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int | None = None,
        *,
        mesh: jax.sharding.Mesh | None = None,
        concurrent_gb: int = 96,
        note: Path | None = None,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.directory = Path(directory).absolute()
        self._saved: set[int] = set()
        self._verified: set[int] = set()
        self._keep, self._note = keep, note
        processes = set(range(jax.process_count())) if mesh is None else multihost.process_indices(mesh)
        takes_part = jax.process_index() in processes
        self._files = Files(self.directory, keep, concurrent_gb, processes, note) if takes_part else NoFiles()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.wait()
            elif problem := self._files.wait(None):  # the other processes may not come here
                _warn(self.directory, f"a checkpoint could not be written: {problem}")
        finally:
            self._files.close()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Start writing a checkpoint; `state` may be donated as soon as this returns.

        Writing continues in the background; the step exists once `wait`, `steps` or `latest` has returned. Saving a
        step twice writes it once. After an older checkpoint was restored, the first save deletes the later ones.
        FailureError if this save or the one before it failed.
        """
        self.wait()
        if step in self._saved:
            return
        multihost.all_or_raise(lock.require_held)
        _make_room(self.directory, step)
        try:
            multihost.all_or_raise(lambda: self._files.save(step, _to_storable(_table(state)), extra))
        except Exception as error:
            self._files.abandon()
            problem = f"checkpoint {step} could not be written to {self.directory}: {shorten(error)}"
            raise FailureError(problem) from error
        self._saved.add(step)
        self._verified.discard(step)

    def wait(self) -> None:
        """Return when the last save is on disk. FailureError if it failed, on all processes at once."""
        if problem := _wait(self._files):
            self._saved.clear()  # it can be saved again
            raise FailureError(f"a checkpoint could not be written to {self.directory}: {problem}")

    def steps(self) -> list[int]:
        """The steps on disk whose save was finished, oldest first, damaged since or not.

        Process 0 lists them for all processes, which must not disagree about a file that is just being created.
        """
        self.wait()
        return multihost.gather(step_folders.finished_steps(self.directory))[0]

    def latest(self) -> int | None:
        """The newest whole step on disk, if there is one.

        A damaged step is set aside as `damaged_STEP` unless the directory is read-only; a line on stderr names it.

        Raises:
          UserError: there is none, but `note` records that one was saved.
        """
        steps, problem = self.steps(), None
        _warn_of_unfinished(self.directory, steps)
        for step in reversed(steps):
            damage = self.find_damage(step)
            if damage is None:
                if problem is not None:
                    _warn(self.directory, f"using checkpoint {step}, the newest whole one")
                return step
            problem = f"checkpoint {step} is damaged: {damage}"
            self._saved.discard(step)
            multihost.all_or_raise(partial(_set_aside, self.directory, step, problem, rename=self._keep is not None))
        if problem is not None and self._keep is None:
            raise UserError(f"{self.directory} has no whole checkpoint: {problem}")
        if self._keep is not None and self._note is not None:
            multihost.all_or_raise(partial(_require_unsaved, self.directory, self._note))
        return None

    def find_damage(self, step: int) -> str | None:
        """What is damaged in a finished step; None if it is whole."""
        if step in self._verified:
            return None
        found = [phrase for each in multihost.gather(self._files.find_damage(step)) for phrase in each]
        if found:
            return found[0] + (f" (and {len(found) - 1} more)" if found[1:] else "")
        self._verified.add(step)
        return None

    def require_whole(self, step: int) -> None:
        """UserError if there is no such step or if it is damaged."""
        if step not in (steps := self.steps()):
            found = ", ".join(map(str, steps)) or "none"
            raise UserError(f"there is no checkpoint {step} with a {MANIFEST} in {self.directory}, only {found}")
        if damage := self.find_damage(step):
            raise UserError(f"checkpoint {step} in {self.directory} is damaged: {damage}")

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A checkpoint's state, each array sharded as in `abstract_state`, and its `extra`.

        Args:
          abstract_state: the structure of the saved state with `jax.ShapeDtypeStruct` leaves. Their shardings may be
            on other devices and another mesh than those that the state was saved from.
          step: the newest by default.

        Raises:
          UserError: there is no such checkpoint, it is of another model or optimiser, or it is damaged.
        """
        if (step := self.latest() if step is None else step) is None:
            raise UserError(f"there is no checkpoint in {self.directory}")
        self.require_whole(step)
        wanted = _table(abstract_state)
        target = {name: _abstract_storable(leaf) for name, leaf in wanted.items()}
        found, extra = multihost.all_or_raise(lambda: self._files.read(step, target))
        leaves = [_from_storable(found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), multihost.gather(extra)[0]

    def restore_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Any]:
        """Only some leaves, by paths such as `params/embedding`, each cast to the wanted dtype.

        Leaves with a sharding become jax arrays with it, the others numpy arrays.
        """
        self.require_whole(step)
        return multihost.all_or_raise(lambda: self._files.read_some(step, wanted))


def save(
    checkpoints: Checkpoints,
    step: int,
    state: Any,
    extra: Mapping[str, Any],
    *,
    is_last: bool,
) -> None:
    """Save; if the save before failed, as on a full disk, or this one, warn, and leave it to the next one to try again.

    Only the last one is waited for.

    Raises:
      FailureError: this save is the last one and fails, or the lock of the run is lost.
    """
    multihost.all_or_raise(lock.require_held)  # also before what a failed save has left is deleted
    for act, required in (
        (checkpoints.wait, False),
        (lambda: checkpoints.save(step, state, extra), is_last),
    ):
        try:
            act()
        except FailureError as error:
            if required or isinstance(error, lock.LostError):
                raise
            multihost.warn_from_primary(f"{error}; the run goes on and tries again at the next save")
            if not isinstance(error, _NoSpaceError):
                checkpoints._files.reopen()
    if is_last:
        checkpoints.wait()


def read_extra(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """The `extra` of a checkpoint. UserError if it cannot be read."""
    return multihost.gather(multihost.all_or_raise(lambda: checkpoints._files.read_extra(step)))[0]


def _wait(files: Files | NoFiles) -> str:
    """Wait for the last save of all processes: "" once it is on disk, or what failed on one of them. Collective."""
    while None in (found := multihost.gather(files.wait(POLL))):
        if any(found):
            break
    if problem := next(filter(None, found), ""):
        files.abandon()
    return f"{problem} (process {found.index(problem)})" if problem and found[1:] else problem


class _NoSpaceError(FailureError):
    """A save that was not begun, on any process."""


def _make_room(directory: Path, step: int) -> None:
    """Delete a step and the later ones, complete or not, and check that another one can be written. Collective.

    Raises:
      _NoSpaceError: on every process, if one cannot write.
    """
    try:
        multihost.all_or_raise(lambda: _prepare(directory, step))
    except (OSError, UserError) as error:
        raise _NoSpaceError(f"checkpoint {step} could not be written to {directory}: {shorten(error)}") from error


def _prepare(directory: Path, step: int) -> None:
    if jax.process_index() == 0:
        step_folders.remove(directory, [old for old in step_folders.list_steps(directory) if old >= step])
        step_folders.require_space(directory)
    step_folders.require_writable(directory)


def _set_aside(directory: Path, step: int, problem: str, *, rename: bool) -> None:
    if jax.process_index() == 0:
        moved = f"; moved to {step_folders.set_aside(directory, step)}" if rename else ""
        _warn(directory, f"{problem}{moved}")


def _require_unsaved(directory: Path, note: Path) -> None:
    if jax.process_index() == 0 and note.exists():
        raise UserError(
            f"{directory} has no whole checkpoint, but {note.name} records that one was saved: bring one back from a "
            "copy, or take another directory to start again"
        )


def _warn_of_unfinished(directory: Path, finished: list[int]) -> None:
    for step in sorted(set(step_folders.list_steps(directory)) - set(finished)):
        _warn(directory, f"checkpoint {step} has no {MANIFEST}: its save was not finished, and it is not used")


def _warn(directory: Path, sentence: str) -> None:
    multihost.warn_from_primary(f"{directory}: {sentence}")


def _table(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as `params/layers/0/router`, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    table = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(table) != len(leaves):
        raise ValueError("two leaves of the state have the same path, such as the keys 0 and '0' of one dict")
    return table


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_storable(table: dict[str, Any]) -> dict[str, Any]:
    """Typed PRNG keys as integers; arrays unchanged."""
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in table.items()}


def _abstract_storable(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of what is stored for a leaf: for a typed key, those of its integers."""
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _from_storable(array: Any, leaf: Any) -> Any:
    """The inverse of `_to_storable` for one leaf."""
    if not _is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=key_impl_name(leaf.dtype))
