"""What the processes of a run tell each other, and which rows of an array each of them holds.

Every process runs the same loop over the same global arrays, also one whose devices hold no part of some. What happens
on the host (tokenizing, rewards) each does for the rows of its own devices; numbers and errors are then exchanged, so
that all go on with the same. With one process nothing is sent, and every row is its own.

`gather`, `agreed`, `merged` and `to_host` are collective: all processes call them at the same places.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gspax.errors import UserError
from gspax.unstable import coordination_client

T = TypeVar("T")

PATIENCE = 7 * 24 * 3600 * 1000  # ms; a process that dies is noticed by jax's service, not here


def gather(value: T) -> list[T]:
    """What each process gave, in their order, on all of them.

    It travels pickled, through the store of jax's coordination service: no device takes part, so that it does not wait
    for what the devices are doing.
    """
    if jax.process_count() == 1:
        return [value]
    store: Any = coordination_client()
    index = jax.process_index()
    number = store.key_value_increment(f"gspax/gathered/{index}", 1)
    given, whole, own = f"gspax/given/{number}", f"gspax/whole/{number}", pickle.dumps(value)
    if index == 0:
        others = range(1, jax.process_count())
        parts = [own, *(store.blocking_key_value_get_bytes(f"{given}/{i}", PATIENCE) for i in others)]
        store.key_value_set_bytes(whole, pickle.dumps(parts))
        store.key_value_delete(given)  # with all below it
        store.key_value_delete(f"gspax/whole/{number - 1}")  # who has given now has read that
    else:
        store.key_value_set_bytes(f"{given}/{index}", own)
        parts = pickle.loads(store.blocking_key_value_get_bytes(whole, PATIENCE))
    return [pickle.loads(part) for part in parts]


def all_or_raise(work: Callable[[], T]) -> T:
    """What `work` gives here, after it has gone well everywhere.

    Raises:
      UserError: it failed on another process; that process raises its own exception.
    """
    try:
        answer, problem = work(), None
    except Exception as error:
        answer, problem = None, error
    told = gather(None if problem is None else _sentence(problem))
    if problem is not None:
        raise problem
    for index, sentence in enumerate(told):
        if sentence is not None:
            raise UserError(f"process {index}: {sentence}")
    return answer  # type: ignore[return-value]


def gather_rows(entries: Sequence[T | None]) -> list[T]:
    """A list of which each process has some entries and None elsewhere, whole: the first that has one gives it."""
    if jax.process_count() == 1:
        return list(entries)  # type: ignore[arg-type]
    found: dict[int, T] = {}
    for part in gather({row: entry for row, entry in enumerate(entries) if entry is not None}):
        found = part | found
    return [found[row] for row in range(len(entries))]


def _sentence(problem: Exception) -> str:
    return str(problem) if isinstance(problem, UserError) else f"{type(problem).__name__}: {problem}"


def local_rows(make: Callable[[int], T], ids: Sequence[int], sharding: Sharding) -> list[T | None]:
    """`make(id)` for the rows that this process's devices hold if `ids` are split by `sharding`, else None."""
    indices = sharding.addressable_devices_indices_map((len(ids),)).values()
    mine = {row for (box,) in filter(None, indices) for row in range(*box.indices(len(ids)))}
    return [make(each) if row in mine else None for row, each in enumerate(ids)]


def owned_rows(array: Any) -> dict[int, np.ndarray]:
    """The rows of an array, by number, such that each belongs to one process, also where several hold a copy."""
    if not isinstance(array, jax.Array):
        return dict(enumerate(array))
    rows: dict[int, np.ndarray] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            first = shard.index[0].indices(array.shape[0])[0]
            rows |= {first + row: values for row, values in enumerate(np.asarray(shard.data))}
    return rows


def to_devices(tree: Any, sharding: Sharding) -> Any:
    """numpy arrays, of which each process needs only the rows of its devices to be right, as arrays on the devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _placed(np.asarray(x), sharding), tree)


def _placed(array: np.ndarray, sharding: Sharding) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # for a process that has no part to tell it by
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=dtype)


def to_host(tree: Any) -> Any:
    """Every array of a tree whole, as numpy, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    spread = {i: leaf for i, leaf in enumerate(leaves) if _is_spread(leaf)}
    if spread:
        mesh = next(iter(spread.values())).sharding.mesh
        spread = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(spread)
    leaves = [spread.get(i, leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, _known_to_all(leaves))


def _is_spread(leaf: Any) -> bool:
    """Whether the processes that hold an array hold a part of it only."""
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _known_to_all(leaves: list[Any]) -> list[Any]:
    """Arrays that some processes have whole and the others not at all, as numpy, told by the first that has one."""
    holders = [_holders(leaf) for leaf in leaves]
    here = [jax.process_index() in each for each in holders]
    found = jax.device_get([leaf if mine else None for leaf, mine in zip(leaves, here, strict=True)])
    foreign = [i for i, each in enumerate(holders) if len(each) < jax.process_count()]
    if foreign:
        first = {i: min(holders[i]) for i in foreign}
        told = gather({i: found[i] for i in foreign if first[i] == jax.process_index()})
        for i in foreign:
            found[i] = told[first[i]][i]
    return found


def _holders(leaf: Any) -> set[int]:
    """The processes that have an array; what is not on a mesh, each has for itself."""
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        return process_indices(leaf.sharding.mesh)
    return set(range(jax.process_count()))


def process_indices(mesh: Any) -> set[int]:
    """Those with devices in a mesh."""
    return {device.process_index for device in mesh.devices.flat}


def remote_array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on devices of other processes alone."""
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def _same(tree: Any) -> Any:  # at the top of the module: jax compiles it once for each shape, not at each call
    return tree
