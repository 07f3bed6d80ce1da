"""What a run leaves on disk while it goes: metrics as JSON lines and for TensorBoard, completions as JSON lines.

JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity", from which
`float` makes the number again; `read_metrics` does so.
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
from gspax.run.directory import RunDir, write_atomically

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None


class Recorder:
    """Owns the open logs of a run. Use it as a context manager. In a multi-host run only the first process writes."""

    def __init__(self, run: RunDir, resume_step: int) -> None:
        """Cut what was recorded after `resume_step`, the restored step; 0 cuts everything: the run begins anew."""
        self._run = run
        self._writes = jax.process_index() == 0
        self._tensorboard = None
        if not self._writes:
            return
        run.samples.mkdir(parents=True, exist_ok=True)
        first = resume_step + 1 if resume_step else 0
        _cut(run, first)
        self._file = run.metrics.open("a", encoding="utf-8")
        if SummaryWriter is None:
            print("tensorboardX is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        else:
            # Event files are named by the second: without a suffix a second writer could overwrite the first one's.
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

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of a step. A step may have several lines, with different names."""
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in values.items()}
        self._file.write(_line({"step": step, **numbers}))
        self._file.flush()
        if self._tensorboard is not None:
            for name, number in numbers.items():
                if math.isfinite(number):  # tensorboardX prints a warning for each of the others
                    self._tensorboard.add_scalar(name, number, step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record completions of a step."""
        self.samples_to(self._run.samples / f"step_{step:06d}.jsonl", rows)

    def samples_to(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record completions under a name of their own, such as `RunDir.before`."""
        if self._writes:
            write_atomically(path, "".join(map(_line, rows)))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, `step` included. A last line that a kill cut short is left out."""
    return [{name: float(value) for name, value in row.items()} | {"step": int(row["step"])} for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that a kill cut short."""
    try:
        *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return rows


def _cut(run: RunDir, first: int) -> None:
    """Remove the metrics and samples of the steps from `first` on."""
    if run.metrics.exists():
        kept = [row for row in read_rows(run.metrics) if row["step"] < first]
        write_atomically(run.metrics, "".join(map(_line, kept)))
    for path in run.samples.glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) >= first:
            path.unlink()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """As JSON has it: numbers that are not finite as strings, arrays as numbers or lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value
