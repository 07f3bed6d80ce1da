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

from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.run.checkpoint_files import Files, NoFiles, brief
from gspax.unstable import key_impl_name


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
        processes = set(range(jax.process_count())) if mesh is None else multihost.process_indices(mesh)
        takes_part = jax.process_index() in processes
        self._files = Files(self.directory, keep, concurrent_gb, processes) if takes_part else NoFiles()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            self._files.close()

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
            for later in multihost.gather([old for old in self._files.steps() if old >= step])[0]:
                self._files.delete(later)
            self._files.save(step, _storable(_table(state)), extra)
        except Exception as error:
            raise UserError(f"checkpoint {step} could not be written to {self.directory}: {brief(error)}") from error
        self._saved.add(step)

    def wait(self) -> None:
        """Return when the last save is on disk."""
        try:
            self._files.wait()
        except Exception as error:
            raise UserError(f"a checkpoint could not be written to {self.directory}: {brief(error)}") from error

    def steps(self) -> list[int]:
        """The steps on disk, oldest first. A directory that lacks a part, as a broken copy does, is left out.

        Of several processes the first one looks, for all: they must not disagree about a file that is just appearing.
        """
        self.wait()
        return multihost.gather([step for step in self._files.steps() if self._files.is_whole(step)])[0]

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
        found, extra = multihost.all_or_raise(lambda: self._files.read(step, target))
        leaves = [_as_wanted(found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), multihost.gather(extra)[0]

    def restore_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Any]:
        """Read only some leaves, by their paths such as `params/embedding`, each cast to the dtype that is wanted.

        Leaves with a sharding become arrays placed by it, the others numpy arrays.
        """
        return multihost.all_or_raise(lambda: self._files.read_some(step, wanted))


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
    return jax.random.wrap_key_data(array, impl=key_impl_name(leaf.dtype))
