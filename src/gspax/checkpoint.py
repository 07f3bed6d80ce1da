"""Checkpoints on disk: the whole state and a JSON `extra`, or nothing.

A state is stored as a flat table `path in the tree -> array`, so that any pytree can be saved (integer keys, typed
PRNG keys, optimiser tuples) and a checkpoint of another model is told apart by its names, shapes and dtypes before an
array is read. Orbax writes into a temporary directory and renames it; a killed save leaves nothing that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from gspax import exchange
from gspax.errors import UserError

STATE, EXTRA = "state", "extra"
CHUNK, FILE = 2**26, 2**28  # bytes that are compressed at once, and of a file: what a save needs besides the arrays


class Checkpoints:
    """Owns a directory of checkpoints, the newest `keep` of them. Use it as a context manager.

    Without `keep` it only reads: nothing is created, cleaned up or saved, and another process may be writing there.
    A save compresses arrays of `concurrent_gb` GB at a time, whose compressed bytes lie beside them in memory; every
    array must be smaller than that. It raises the level of the `absl` logger, through which Orbax speaks, to ERROR.

    All processes of a run call the same methods. Those without devices in `mesh`, that of what is saved and restored,
    touch no file: they are told what the others found. Process 0 is never among them.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int | None = None,
        *,
        mesh: jax.sharding.Mesh | None = None,
        concurrent_gb: int = 96,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.directory = Path(directory).absolute()
        self._saved: set[int] = set()
        everyone = set(range(jax.process_count()))
        active = everyone if mesh is None else exchange.processes(mesh)
        self._looks_on, self._alone = jax.process_index() not in active, len(active) == 1 < len(everyone)
        if self._looks_on:
            self._manager: Any = _Onlooker()
            return
        self._manager = _manager(self.directory, keep, concurrent_gb, None if active == everyone else active)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; `state` may be donated as soon as this returns.

        The writing goes on in the background: the step counts once `wait`, `steps` or `latest` has returned. Saving
        a step twice writes it once. After a run went back to an older checkpoint, the first save deletes the
        later ones, which belong to a run that was abandoned.
        """
        self.wait()
        if step in self._saved:
            return
        try:
            for later in exchange.gather([old for old in self._manager.all_steps() if old >= step])[0]:
                self._manager.delete(later)
            table = _storable(_table(state))
            if self._alone and not self._looks_on:
                table = jax.device_get(table)  # Orbax would take it for parts that several processes have alike
            whole = ocp.args.PyTreeSave(
                table,
                save_args={name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in table},
                ocdbt_target_data_file_size=FILE,
            )
            items = ocp.args.Composite(**{STATE: whole, EXTRA: ocp.args.JsonSave(dict(extra))})
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise UserError(f"checkpoint {step} could not be written to {self.directory}: {_brief(error)}") from error
        self._saved.add(step)

    def wait(self) -> None:
        """Return when the last save is on disk."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise UserError(f"a checkpoint could not be written to {self.directory}: {_brief(error)}") from error

    def steps(self) -> list[int]:
        """The steps on disk, oldest first. A directory that lacks a part, as a broken copy does, is left out.

        Of several processes the first one looks, for all: they must not disagree about a file that is just appearing.
        """
        self.wait()
        return exchange.gather(sorted(step for step in self._manager.all_steps() if self._whole(step)))[0]

    def latest(self) -> int | None:
        """The newest step on disk, if there is one."""
        return max(self.steps(), default=None)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint (the newest without `step`) and place each array by its sharding in `abstract_state`.

        `abstract_state` has the structure of the saved state and `jax.ShapeDtypeStruct` leaves with shardings. They may
        name other devices and another mesh than the ones that the state was saved from.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"there is no checkpoint in {self.directory}")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise UserError(f"there is no checkpoint {step} in {self.directory}, only {', '.join(map(str, steps))}")
        wanted = _table(abstract_state)
        target = {name: _abstract_storable(leaf) for name, leaf in wanted.items()}
        found, extra = exchange.agreed(lambda: self._read(target, step))
        leaves = [_as_wanted(found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), exchange.gather(extra)[0]

    def _read(self, target: dict[str, jax.ShapeDtypeStruct], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._looks_on:
            return {name: _no_part(leaf) for name, leaf in target.items()}, {}
        try:
            stored = self._manager.item_metadata(step)[STATE].tree
        except Exception as error:
            raise self._unreadable(step, error) from error
        if problem := _mismatch(stored, target):
            raise UserError(f"checkpoint {step} in {self.directory} is of another model or optimiser: {problem}")
        places = ocp.checkpoint_utils.construct_restore_args(target)
        reading = ocp.args.PyTreeRestore(target, restore_args=places)
        try:
            read = self._manager.restore(
                step, args=ocp.args.Composite(**{STATE: reading, EXTRA: ocp.args.JsonRestore()})
            )
        except Exception as error:
            raise self._unreadable(step, error) from error
        return read[STATE], read[EXTRA]

    def restore_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Any]:
        """Read only some leaves, by their paths such as `params/embedding`, each cast to the dtype that is wanted.

        Leaves with a sharding become arrays placed by it, the others numpy arrays.
        """
        return exchange.agreed(lambda: self._read_some(wanted, step))

    def _read_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Any]:
        if self._looks_on:
            return {name: _no_part(leaf) for name, leaf in wanted.items()}
        arguments = {
            name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
            if leaf.sharding is None
            else ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in wanted.items()
        }
        try:
            stored = self._manager.item_metadata(step)[STATE].tree
        except Exception as error:
            raise self._unreadable(step, error) from error
        for name, leaf in wanted.items():
            if name not in stored or tuple(stored[name].shape) != leaf.shape:
                got = f"is {_kind(stored[name])}, wanted {_kind(leaf)}" if name in stored else "is missing"
                raise UserError(f"checkpoint {step} in {self.directory} is of another model: {name} {got}")
        try:
            with ocp.PyTreeCheckpointer() as reader:
                return reader.restore(
                    self.directory / str(step) / STATE,
                    args=ocp.args.PyTreeRestore(item=dict(wanted), restore_args=arguments, partial_restore=True),
                )
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _whole(self, step: int) -> bool:
        folder = self.directory / str(step)
        return (folder / STATE / "_METADATA").exists() and (folder / EXTRA / "metadata").exists()

    def _unreadable(self, step: int, error: Exception) -> UserError:
        return UserError(f"checkpoint {step} in {self.directory} cannot be read: {_brief(error)}")


class _Onlooker:
    """The part of Orbax's manager that `Checkpoints` uses, for a process with no part in the checkpoints."""

    def all_steps(self) -> list[int]:
        return []

    def save(self, step: int, **arguments: Any) -> None: ...
    def delete(self, step: int) -> None: ...
    def wait_until_finished(self) -> None: ...
    def close(self) -> None: ...


def _manager(
    directory: Path, keep: int | None, concurrent_gb: int, processes: set[int] | None
) -> ocp.CheckpointManager:
    """Orbax's, for these processes; without them, for all."""
    some: dict[str, Any] = {}
    if processes is not None:  # Orbax makes no directory then
        some["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=processes, barrier_sync_key_prefix="gspax"
        )
        if keep is not None and jax.process_index() == 0:
            directory.mkdir(parents=True, exist_ok=True)
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=concurrent_gb, save_device_host_concurrent_gb=concurrent_gb, **some
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        read_only=keep is None,
        cleanup_tmp_directories=keep is not None,
        create=processes is None,
        **some,
    )
    handlers = {STATE: handler, EXTRA: ocp.JsonCheckpointHandler(**some)}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def _no_part(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of which this process holds nothing."""
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def _table(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `params/layers/0/router`, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    table = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(table) != len(leaves):
        raise ValueError("two leaves of the state have the same path, such as the keys 0 and '0' of one dict")
    return table


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(table: dict[str, Any]) -> dict[str, Any]:
    """Typed PRNG keys as their integers; arrays as they are."""
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in table.items()}


def _abstract_storable(leaf: Any) -> jax.ShapeDtypeStruct:
    """What to read for a leaf: its shape, dtype and sharding, those of the integers for a typed key."""
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _as_wanted(array: Any, leaf: Any) -> Any:
    """The inverse of `_storable` for one leaf."""
    if not _is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=str(leaf.dtype._impl.name))


def _mismatch(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """How the stored table differs from the wanted one: its first difference, and how many more there are."""
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


def _kind(leaf: Any) -> str:
    return f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _brief(error: Exception) -> str:
    """The type of an error and the beginning of its first line: Orbax's messages fill pages."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"
