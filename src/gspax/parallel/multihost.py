"""Exchanges host-side values between the processes of a run, and tells which rows of an array each process holds.

Every process runs the same loop over the same global arrays, including those on devices of other processes only. Work
on the host (tokenizing, rewards) is done by each process for the rows on its own devices; results and errors are then
exchanged, so that all continue with the same values. With one process nothing is sent and every row is local.

`gather`, `all_or_raise`, `gather_rows`, `to_host` and `key_to_host` are collective: all processes call them in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from gspax.errors import FailureError, UserError, warn
from gspax.parallel import connections, watchdog
from gspax.types import Array, PyTree

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Gather the values of all processes, in their order, on all of them.

    Values travel over `connections`, as plain types and arrays (`wire`): no device is involved, so this does not wait
    for running computations.

    Raises:
      UserError: the processes did not join through `joining.join`.
    """
    if jax.process_count() == 1:
        return [value]
    current = connections.current()
    if current is None:
        raise UserError("processes: wanted processes that were connected by gspax.parallel.joining.join")
    return current.exchange(value)


def all_or_raise(work: Callable[[], T]) -> T:
    """Return this process's `work()`, once it has succeeded on every process.

    Raises:
      UserError: it failed on another process by its input; the process on which it failed raises its own exception.
      FailureError: it failed there in another way, so that trying again may help.
    """
    try:
        result, problem = work(), None
    except Exception as error:
        result, problem = None, error
    kind = "" if isinstance(problem, UserError) else f"{type(problem).__name__}: "
    problems = gather(None if problem is None else (f"{kind}{problem}", getattr(problem, "exit_code", 1)))
    if problem is not None:
        raise problem
    for index, failure in enumerate(problems):
        if failure is not None:
            sentence, code = failure
            raise (UserError if code == 2 else FailureError)(f"process {index}: {sentence}")
    return result  # type: ignore[return-value]


def gather_rows(own: Mapping[int, T], count: int) -> list[T]:
    """Gather a list of `count` rows from processes that each have some of them, by number. Collective.

    If several processes have an entry, the first process's counts.
    """
    rows: dict[int, T] = {}
    for part in gather(dict(own)):
        rows = part | rows
    return [rows[row] for row in range(count)]


def warn_from_primary(sentence: str) -> None:
    """Warn the user once, on process 0."""
    if jax.process_index() == 0:
        warn(sentence)


def local_rows(make: Callable[[int], T], ids: Sequence[int], sharding: Sharding, *, group: int = 1) -> list[T | None]:
    """Return `make(id)` for the ids with a row on this process's devices, else None.

    Args:
      sharding: the sharding of an array in which each id has `group` adjacent rows.
    """
    rows = group * len(ids)
    indices = sharding.addressable_devices_indices_map((rows,)).values()
    local = {row // group for (box,) in filter(None, indices) for row in range(*box.indices(rows))}
    return [make(id_) if index in local else None for index, id_ in enumerate(ids)]


def owned_rows(array: Array | np.ndarray) -> dict[int, np.ndarray]:
    """Return rows of an array by number: each row belongs to exactly one process, even where several hold a replica."""
    if not isinstance(array, jax.Array):
        return dict(enumerate(array))
    rows: dict[int, np.ndarray] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            first = shard.index[0].indices(array.shape[0])[0]
            rows |= {first + row: values for row, values in enumerate(np.asarray(shard.data))}
    return rows


def to_devices(tree: PyTree, sharding: Sharding) -> PyTree:
    """Convert numpy arrays to global arrays; each process reads only the rows of its devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _make_array(np.asarray(x), sharding), tree)


def _make_array(array: np.ndarray, sharding: Sharding) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # for a process without a shard to infer it from
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=dtype)


def to_host(tree: PyTree) -> PyTree:
    """Fetch every array of a tree in full, as numpy, on every process."""
    leaves, structure = jax.tree.flatten(tree)
    if jax.process_count() == 1:
        leaves = jax.device_get(leaves)
    else:
        partial = {i: leaf for i, leaf in enumerate(leaves) if _is_partial(leaf)}
        if partial:
            mesh = next(iter(partial.values())).sharding.mesh
            partial = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))(partial)
        leaves = _read_everywhere([partial.get(i, leaf) for i, leaf in enumerate(leaves)])
    watchdog.progress()
    return jax.tree.unflatten(structure, leaves)


def key_to_host(key: jax.Array) -> jax.Array:
    """Return a typed PRNG key that every process may use in local computations, and on any mesh.

    A process without devices of the key's mesh must not compute with the key itself.
    """
    return jax.random.wrap_key_data(to_host(jax.random.key_data(key)), impl=jax.random.key_impl(key))


def _is_partial(leaf: PyTree) -> bool:
    """Return whether each process that holds an array holds only some of its shards."""
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _read_everywhere(leaves: list[PyTree]) -> list[PyTree]:
    """Return numpy arrays that some processes hold in full, others not at all; the first holder sends its copy."""
    holders = [_holders(leaf) for leaf in leaves]
    here = [jax.process_index() in processes for processes in holders]
    arrays = jax.device_get([leaf if held else None for leaf, held in zip(leaves, here, strict=True)])
    remote = [i for i, processes in enumerate(holders) if len(processes) < jax.process_count()]
    if remote:
        sender = {i: min(holders[i]) for i in remote}
        received = gather({i: arrays[i] for i in remote if sender[i] == jax.process_index()})
        for i in remote:
            arrays[i] = received[sender[i]][i]
    return arrays


def _holders(leaf: PyTree) -> set[int]:
    """Return the processes that hold an array; every process holds a copy of values on no mesh."""
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        return process_indices(cast(Mesh, leaf.sharding.mesh))
    return set(range(jax.process_count()))


def process_indices(mesh: Mesh) -> set[int]:
    """Return the processes with devices in a mesh."""
    return {device.process_index for device in mesh.devices.flat}


def remote_array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array that lies on devices of other processes only."""
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def _identity(tree: PyTree) -> PyTree:
    return tree  # a function of the module: jax compiles it once for each shape, not for each call
