"""Writes arrays to a file, and reads them: minibatches of skipped updates, and rollouts."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspax.errors import UserError
from gspax.run.checkpoints import shorten
from gspax.run.folders import write_atomically
from gspax.storage.paths import read_bytes


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, not compressed, completely or not at all. OSError as the storage."""
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]  # of names that are no keywords of savez
    write_atomically(path, packed.getvalue())


def read_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of a file. UserError if it cannot be read, or is damaged."""
    try:
        content = read_bytes(path)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
        if damaged is not None:  # numpy stops reading at the shape's end, where no checksum has been compared yet
            raise UserError(f"the checksum of {damaged} differs")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged bytes
        raise UserError(f"{path} cannot be read: {shorten(error)}") from error
