"""Checkpoints on disk: a complete state and a JSON `extra`, or nothing.

A state is stored as a flat table `path in the tree -> array`. So any pytree can be saved (integer keys, typed PRNG
keys, optimiser tuples), and a checkpoint of another model is rejected by its names, shapes and dtypes before an array
is read. Orbax writes to a temporary directory and renames it; a killed save leaves no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.run.checkpoint_files import Files, NoFiles, shorten
from gspax.unstable import key_impl_name


class Checkpoints:
    """A directory with the newest `keep` checkpoints, a context manager.

    Without `keep` it is read-only: nothing is created, cleaned up or saved, and another process may be writing there.
    A save compresses up to `concurrent_gb` GB of arrays at a time and holds the compressed bytes in memory too; every
    array must be smaller than that. Creating one sets the `absl` logger, which Orbax uses, to level ERROR.

    All processes of a run call the same methods. Those without devices in `mesh`, on which the state is sharded, touch
    no file and receive the results of the others. Process 0 is never one of them.
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
        """Start writing a checkpoint; `state` may be donated as soon as this returns.

        Writing continues in the background; the step exists once `wait`, `steps` or `latest` has returned. Saving a
        step twice writes it once. After an older checkpoint was restored, the first save deletes the later ones.

        Raises:
          UserError: this save or the one before it failed.
        """
        self.wait()
        if step in self._saved:
            return
        try:
            for later in multihost.gather([old for old in self._files.steps() if old >= step])[0]:
                self._files.delete(later)
            self._files.save(step, _to_storable(_table(state)), extra)
        except Exception as error:
            raise UserError(f"checkpoint {step} could not be written to {self.directory}: {shorten(error)}") from error
        self._saved.add(step)

    def wait(self) -> None:
        """Return when the last save is on disk. UserError if it failed."""
        try:
            self._files.wait()
        except Exception as error:
            raise UserError(f"a checkpoint could not be written to {self.directory}: {shorten(error)}") from error

    def steps(self) -> list[int]:
        """The steps on disk, oldest first, without incomplete directories such as interrupted copies.

        Process 0 lists them for all processes, which must not disagree about a file that is just being created.
        """
        self.wait()
        return multihost.gather([step for step in self._files.steps() if self._files.is_complete(step)])[0]

    def latest(self) -> int | None:
        """The newest step on disk, if there is one."""
        return max(self.steps(), default=None)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A checkpoint's state, each array sharded as in `abstract_state`, and its `extra`.

        Args:
          abstract_state: the structure of the saved state with `jax.ShapeDtypeStruct` leaves. Their shardings may be
            on other devices and another mesh than those that the state was saved from.
          step: the newest by default.

        Raises:
          UserError: there is no such checkpoint, it is of another model or optimiser, or it cannot be read.
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
        leaves = [_from_storable(found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), multihost.gather(extra)[0]

    def restore_some(self, wanted: Mapping[str, jax.ShapeDtypeStruct], step: int) -> dict[str, Any]:
        """Only some leaves, by paths such as `params/embedding`, each cast to the wanted dtype.

        Leaves with a sharding become jax arrays with it, the others numpy arrays.
        """
        return multihost.all_or_raise(lambda: self._files.read_some(step, wanted))


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
