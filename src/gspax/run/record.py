"""Writes the log files of a run: metrics as JSON lines and for TensorBoard, completions as JSON lines.

JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity", which `float`
parses; `read_metrics` does so.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self, SupportsFloat, TypeVar

import jax

from gspax.errors import UserError, warn
from gspax.parallel import multihost, timeline
from gspax.run.directory import RunDir, step_of
from gspax.run.folders import unused_name, write_atomically
from gspax.run.growing import File, Parts, merge_parts, open_growing, read_growing
from gspax.run.trackers import ONLY_TENSORBOARD, Trackers
from gspax.storage.files import open_storage
from gspax.types import JsonObject

if TYPE_CHECKING:
    from gspax.run.trackers.tensorboard import EventFile

LARGEST_STEP = 10**7  # more is a damaged line: an array of all steps is made from it
T = TypeVar("T")


class Recorder:
    """The open log files of a run, a context manager. Of several processes only process 0 writes.

    In a bucket a thread writes the metrics, so that no step and no save waits for an answer.
    """

    def __init__(self, run: RunDir, resume_step: int, trackers: Trackers = ONLY_TENSORBOARD) -> None:
        """Open the logs and drop what was recorded after `resume_step`, the restored step; 0 drops everything.

        `trackers` get the metrics too; TensorBoard's event files are written unless they leave it out.
        """
        self._run, self._trackers = run, trackers
        self._writes = jax.process_index() == 0
        self._events: EventFile | None = None
        self._failing: set[Path] = set()
        self._files = dict[Path, File | Parts]()  # of metrics, and of the timeline if there is one
        self._kept: list[dict[str, float]] = []
        self._storage = open_storage(run.path)
        self._thread = None if self._storage.appends else ThreadPoolExecutor(1, "gspax_logs")
        self._problem: Exception | None = None  # of the thread
        self._traffic = self._storage.traffic()
        if not self._writes:
            return
        run.samples.mkdir(parents=True, exist_ok=True)
        first = resume_step + 1 if resume_step else 0
        self._kept = _drop_from(run, first)
        self._files[run.metrics] = open_growing(run.metrics)
        if "tensorboard" in trackers.names:
            self._events = _open_events(run.tensorboard, first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._writes:
            return
        try:
            self.flush()()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            for file in self._files.values():
                file.close()
            if self._events is not None:
                self._events.close()

    def has(self, step: int, name: str) -> bool:
        """Return whether a metric of a step was recorded before this process. Collective."""
        return multihost.gather(any(row["step"] == step and name in row for row in self._kept))[0]

    def largest(self, name: str) -> float:
        """Return the largest value of a metric that was recorded before this process; 0 if there is none."""
        return max((row[name] for row in self._kept if name in row), default=0.0)

    def write_metrics(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Record scalars of a step. A step may have several lines, with different names."""
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in values.items()}

        def write() -> None:
            with self._warned(self._run.metrics):
                self._files[self._run.metrics].write(to_line({"step": step, **numbers}).encode())
            if self._events is not None:
                with self._warned(self._run.tensorboard):
                    self._events.log(numbers, step)

        self._in_order(write)
        self._trackers.log(numbers, step)

    def write_timeline(self, lines: str) -> None:
        """Add events to the run's timeline, which is created with the first ones."""

        def write() -> None:
            with self._warned(path := self._run.timeline):
                if path not in self._files:
                    self._files[path] = _open_timeline(path)
                self._files[path].write(lines.encode())

        if self._writes and lines:
            self._in_order(write)

    def measure_traffic(self) -> dict[str, float]:
        """Return this process's bucket requests since the last call, as metrics; {} for a local run."""
        before, self._traffic = self._traffic, self._storage.traffic()
        return {} if self._traffic is None or before is None else self._traffic.since(before, "bucket/")

    def flush(self) -> Callable[[], object]:
        """Write what is buffered, for a save, and return a function that waits until it is written."""

        def flush() -> None:
            for path, file in self._files.items():
                with self._warned(path):
                    file.flush()
            if self._events is not None:
                with self._warned(self._run.tensorboard):
                    self._events.flush()

        return self._in_order(flush) if self._writes else lambda: None

    def _in_order(self, work: Callable[[], None]) -> Callable[[], object]:
        """Do `work` now, or for a bucket in the thread; return a function that waits for it. Raises earlier errors."""
        if self._thread is None:
            work()
            return lambda: None
        if self._problem is not None:
            raise self._problem

        def run() -> None:
            try:
                work()
            except Exception as problem:
                self._problem = problem
                raise

        return self._thread.submit(run).result

    def write_samples(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Record completions of a step."""
        self.write_samples_to(self._run.samples / f"step_{step:06d}.jsonl", rows)

    def write_failures(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append the completions of a step, or of the evaluation after it, for which the reward function failed."""
        path = self._run.samples / f"failed_{step:06d}.jsonl"
        if self._writes:
            with self._warned(path):
                before = path.read_text(encoding="utf-8") if path.exists() else ""
                write_atomically(path, before + "".join(map(to_line, rows)))

    def write_samples_to(self, path: Path, rows: Iterable[Mapping[str, object]]) -> None:
        """Record completions in a given file, such as `RunDir.before`."""
        if self._writes:
            with self._warned(path):
                write_atomically(path, "".join(map(to_line, rows)))

    @contextlib.contextmanager
    def _warned(self, path: Path) -> Iterator[None]:
        """Turn a failed write into a warning, shown once until the file can be written again: the run goes on."""
        try:
            yield
        except OSError as error:
            if path not in self._failing:
                warn(f"{path} could not be written: {error.strerror}; the run goes on")
            self._failing.add(path)
        else:
            if path in self._failing:
                warn(f"{path} is written again")
            self._failing.discard(path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the lines of metrics.jsonl, `step` included; unreadable lines are skipped as in `read_rows`."""
    rows, unreadable = _parse(path, _to_numbers)
    _warn_of_unreadable(path, unreadable)
    return rows


def read_rows(path: Path) -> list[JsonObject]:
    """Read the objects of a file of JSON lines. Others, such as a power loss's NULs, are skipped and counted.

    An incomplete last line, left by a kill, is skipped without a warning.
    """
    rows, unreadable = _parse(path, _to_object)
    _warn_of_unreadable(path, unreadable)
    return rows


def read_completions(path: Path) -> list[JsonObject]:
    """Read the completions of a file of samples, each with its reward as a float; rows of another kind are left out."""
    completions = []
    for row in read_rows(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            reward = float(row["reward"])  # a text if it is not finite, as `to_line` writes it
            if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
                completions.append({**row, "reward": reward})
    return completions


def _parse(path: Path, parse: Callable[[str], T]) -> tuple[list[T], list[int]]:
    """Parse the lines of a file, and list the numbers of lines for which `parse` raises. Blank lines are skipped."""
    try:
        *lines, _incomplete = read_growing(path).decode(errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append(parse(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            unreadable.append(number)
    return rows, unreadable


def _to_object(line: str) -> JsonObject:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    return row


def _to_numbers(line: str) -> dict[str, float]:
    row = _to_object(line)
    if not 0 <= (step := float(row["step"])) <= LARGEST_STEP:
        raise ValueError("no step")
    return {name: float(value) for name, value in row.items()} | {"step": int(step)}


def _warn_of_unreadable(path: Path, numbers: list[int], more: str = "") -> None:
    if numbers:
        lines = f"line {numbers[0]} is" if len(numbers) == 1 else f"{len(numbers)} lines, the first {numbers[0]}, are"
        warn(f"{path}: {lines} not JSON and skipped{more}")


def _open_timeline(path: Path) -> File | Parts:
    """Open the timeline of a run, after the last whole line that an earlier process wrote."""
    content = read_growing(path).decode(errors="replace") if path.exists() else ""
    merge_parts(path, content[: content.rfind("\n") + 1] or timeline.BEGIN)
    return open_growing(path)


def _open_events(folder: Path, first: int) -> EventFile | None:
    """Open TensorBoard's event file, which imports tensorboardX only if needed; None without tensorboardX."""
    try:
        from gspax.run.trackers.tensorboard import EventFile
    except ImportError:
        warn("tensorboardX is not installed: metrics go to metrics.jsonl only")
        return None
    return EventFile(folder, first)


def _drop_from(run: RunDir, first: int) -> list[dict[str, float]]:
    """Delete the metrics and samples of step `first` and later ones, and warn of earlier metrics that are lost.

    Returns the earlier metrics.
    """
    kept = []
    if run.metrics.exists():
        rows, unreadable = _parse(run.metrics, _to_numbers)
        if unreadable:
            copy = unused_name(run.metrics, "damaged")
            copy.write_bytes(read_growing(run.metrics))
            _warn_of_unreadable(run.metrics, unreadable, f"; a copy of the file is {copy.name}")
        kept = [row for row in rows if row["step"] < first]
        merge_parts(run.metrics, "".join(map(to_line, kept)))
        _warn_of_gaps(run.metrics, {row["step"] for row in kept}, first)
    elif not open_storage(run.metrics).appends:
        write_atomically(run.metrics, "\n")  # which says that there are metrics: the lines go to parts
    for path in [*run.samples.glob("*.jsonl"), *run.rollouts.glob("*.npz")]:
        step = step_of(path.stem)
        if step is not None and step >= first and path.is_file():
            path.unlink()
    return kept


def _warn_of_gaps(path: Path, steps: set[float], first: int) -> None:
    missing = [step for step in range(1, first) if step not in steps]
    if missing:
        named = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        warn(f"{path} has no metrics of {len(missing)} steps: {named}")


def to_line(row: Mapping[str, object]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(_to_json(row), allow_nan=False) + "\n"


def _to_json(value: object) -> object:
    """Convert numbers that are not finite to strings, and arrays to numbers or lists."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value
