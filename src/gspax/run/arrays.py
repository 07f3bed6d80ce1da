"""Arrays of a checkpoint, read layer by layer: the experts of all layers are one array, which few memories hold.

tensorstore is what Orbax stores arrays with, and installs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from gspax.errors import UserError
from gspax.run.checkpoint_files import STATE, shorten


class StoredArray:
    """An array on disk. `array[()]` reads all of it, `array[layer, ...]` the layers that are stored together.

    The last of these are kept, so layers in order are read once.
    """

    def __init__(self, name: str, store: Any) -> None:
        self.name, self.store = name, store
        self.layers = max(1, store.chunk_layout.read_chunk.shape[0]) if store.ndim else 1  # stored together
        self.first, self.block = -1, np.empty(0)

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        if not index:
            return self._read(())
        layer, *rest = index
        first = layer - layer % self.layers
        if first != self.first:
            self.block = np.empty(0)  # freed before the next one is read
            self.block, self.first = self._read(slice(first, min(first + self.layers, self.store.shape[0]))), first
        return self.block[(layer - first, *rest)]

    def _read(self, part: Any) -> np.ndarray:
        try:
            return self.store[part].read().result()
        except ValueError as error:  # what tensorstore raises for damaged data
            raise UserError(f"{self.name} cannot be read: {shorten(error)}") from error


def open_array(directory: Path, step: int, name: str, shape: tuple[int, ...]) -> StoredArray:
    """An array by its path, such as `params/embedding`. UserError if it is missing or of another shape."""
    where = f"{name} of checkpoint {step} in {directory}"
    base = (directory / str(step) / STATE).absolute().as_uri() + "/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise UserError(f"{where} cannot be read: {shorten(error)}") from error
    if tuple(store.shape) != tuple(shape):
        raise UserError(f"{where}: wanted the shape {list(shape)}, got {list(store.shape)}: it is of another model")
    return StoredArray(where, store)
