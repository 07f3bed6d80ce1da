"""Writes TensorBoard's event files to the run directory, in the caller's thread like the run's other logs."""

import math
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gspax.run.growing import open_growing

sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # tensorboardX imports it, for seconds, without need
try:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c
finally:
    if sys.modules["torch"] is None:
        del sys.modules["torch"]


class EventFile:
    """A new event file. Step `first` and later ones in older files of the folder become invalid."""

    def __init__(self, folder: Path, first: int) -> None:
        self._unwritten = _encode(file_version="brain.Event:2") + _encode(step=first, session_log={"status": "START"})
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_growing(folder / f"events.out.tfevents.{time.time_ns()}")
        self.flush, self.close = self._file.flush, self._file.close

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the finite metrics of a step. OSError if the disk is full: they are written the next time."""
        values = [{"tag": name, "simple_value": x} for name, x in metrics.items() if math.isfinite(x)]
        records, self._unwritten = self._unwritten + _encode(step=step, summary={"value": values}), b""
        self._file.write(records)


def _encode(**fields: object) -> bytes:
    """Encode an event as a TFRecord."""
    data = Event(wall_time=time.time(), **fields).SerializeToString()
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (struct.pack("<Q", len(data)), data))
