"""The log files of a run: metrics as JSON lines and for TensorBoard, completions as JSON lines.

JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity", which `float`
parses; `read_metrics` does so.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from gspax.errors import UserError
from gspax.run.directory import RunDir
from gspax.run.folders import write_atomically

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None


class Recorder:
    """The open log files of a run, a context manager. Of several processes only process 0 writes."""

    def __init__(self, run: RunDir, resume_step: int) -> None:
        """Open the logs and drop what was recorded after `resume_step`, the restored step; 0 drops everything."""
        self._run = run
        self._writes = jax.process_index() == 0
        self._tensorboard = None
        if not self._writes:
            return
        run.samples.mkdir(parents=True, exist_ok=True)
        first = resume_step + 1 if resume_step else 0
        _drop_from(run, first)
        self._file = run.metrics.open("a", encoding="utf-8")
        if SummaryWriter is None:
            print("tensorboardX is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        else:
            # Event files are named by the second: without a suffix, two writers could use one name.
            suffix = f".{time.time_ns()}"
            folder = str(run.tensorboard)
            self._tensorboard = SummaryWriter(folder, purge_step=first, flush_secs=10, filename_suffix=suffix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writes:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def write_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Record scalars of a step. A step may have several lines, with different names."""
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in values.items()}
        self._file.write(to_line({"step": step, **numbers}))
        self._file.flush()
        if self._tensorboard is not None:
            for name, number in numbers.items():
                if math.isfinite(number):  # tensorboardX prints a warning for each number that is not
                    self._tensorboard.add_scalar(name, number, step)

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record completions of a step."""
        self.write_samples_to(self._run.samples / f"step_{step:06d}.jsonl", rows)

    def write_failures(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the completions of a step for which the reward function failed."""
        self.write_samples_to(self._run.samples / f"failed_{step:06d}.jsonl", rows)

    def write_samples_to(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record completions in a given file, such as `RunDir.before`."""
        if self._writes:
            write_atomically(path, "".join(map(to_line, rows)))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, `step` included. An incomplete last line, left by a kill, is skipped."""
    return [{name: float(value) for name, value in row.items()} | {"step": int(row["step"])} for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. An incomplete last line, left by a kill, is skipped."""
    try:
        *lines, _incomplete = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return rows


def _drop_from(run: RunDir, first: int) -> None:
    """Delete the metrics and samples of step `first` and later ones."""
    if run.metrics.exists():
        kept = [row for row in read_rows(run.metrics) if row["step"] < first]
        write_atomically(run.metrics, "".join(map(to_line, kept)))
    for path in [*run.samples.glob("step_*.jsonl"), *run.samples.glob("failed_*.jsonl")]:
        if int(path.stem.rpartition("_")[2]) >= first:
            path.unlink()


def to_line(row: Mapping[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(_to_json(row), allow_nan=False) + "\n"


def _to_json(value: Any) -> Any:
    """Numbers that are not finite as strings, arrays as numbers or lists."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if hasattr(value, "tolist"):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value
