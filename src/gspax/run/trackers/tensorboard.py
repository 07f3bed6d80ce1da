"""Scalars for TensorBoard, written in the caller's thread.

`tensorboardX.SummaryWriter` hands events to a thread. On a full disk that thread ends, and the next scalars wait for it
for ever.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from gspax.run.folders import write_atomically
from gspax.storage.buckets import is_bucket

# tensorboardX imports PyTorch where that is installed, for seconds and without need: scalars are plain numbers.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
try:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
finally:
    if sys.modules["torch"] is None:
        del sys.modules["torch"]

FLUSH = 10.0  # seconds between two synchronizations with the disk
PART = 2**20  # bytes of a file in a bucket


class Tracker:
    """The event files of a folder; a new one after each that could not be written, whose end may be damaged.

    For a bucket they are written to a temporary folder and copied, and a new one begins after `PART` bytes.
    """

    def __init__(self, folder: Path, first: int) -> None:
        """Step `first` and later ones that are in the folder already become invalid."""
        self._folder, self._first = folder, first
        self._writer: EventsWriter | None = None
        self._flushed = 0.0
        self._local = tempfile.TemporaryDirectory() if is_bucket(folder) else None

    def start(self, config: Mapping[str, object], name: str, id: str) -> None:
        """The run directory has the settings, the name, and the report."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the finite metrics of a step. OSError if the disk is full: they are lost."""
        values = [
            Summary.Value(tag=name, simple_value=number) for name, number in metrics.items() if math.isfinite(number)
        ]
        try:
            self._writer = self._writer or self._open()
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            if time.monotonic() > self._flushed + FLUSH:
                self.flush(step + 1)
        except OSError:
            self._writer, self._first = None, step
            raise

    def flush(self, following: int | None = None) -> None:
        """Write what is buffered. OSError if the disk is full.

        Args:
          following: the next step, if a new file may begin with it.
        """
        if self._writer is None:
            return
        self._flushed = time.monotonic()
        self._writer.flush()
        if self._local is not None and self._copy(Path(self._local.name)) >= PART and following is not None:
            self._writer.close()
            self._writer, self._first = None, following

    def finish(self, report: Path | None) -> None:
        """Write what is buffered. OSError if the disk is full."""
        if self._writer is not None:
            self._writer.close()
            if self._local is not None:
                self._copy(Path(self._local.name))
        if self._local is not None:
            self._local.cleanup()

    def _copy(self, local: Path) -> int:
        """Copy the newest file of a folder to the bucket. Its size in bytes."""
        newest = max(local.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        content = newest.read_bytes()
        write_atomically(self._folder / newest.name, content)
        return len(content)

    def _open(self) -> EventsWriter:
        folder = self._folder if self._local is None else Path(self._local.name)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # files are named by the second: two writers could use one name
        try:
            writer = EventsWriter(str(folder / "events"), suffix)
            start = SessionLog(status=SessionLog.START)
            writer.write_event(Event(wall_time=time.time(), step=self._first, session_log=start))
            writer.flush()
        except OSError:  # the disk is still full: leave no empty file for each step
            for path in folder.glob(f"*{suffix}"):
                path.unlink()
            raise
        return writer
