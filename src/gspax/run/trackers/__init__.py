"""Sends the metrics of a run to experiment trackers, in addition to its directory.

Each tracker has a thread and a bounded queue, so a tracker that is slow, broken, or offline costs its own metrics and
never a step of the run: there is one warning. Only `tensorboard` writes in the caller's thread (`run.record`): event
files belong to the run directory, and have every metric of a step before the step is saved.
"""

from __future__ import annotations

import importlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, Self

from gspax.errors import UserError, brief, how_to_install, warn
from gspax.experiment.description import flatten
from gspax.run.directory import RunDir
from gspax.run.folders import write_atomically
from gspax.run.redaction import HIDDEN, is_secret, redact

NAMES = ("tensorboard", "wandb", "trackio", "mlflow")  # modules of this package; but the first, of their packages too
SIZE = 1000  # calls that wait for a tracker; beyond, metrics are dropped
PATIENCE = 10.0  # seconds that the end of a run waits for all trackers
IMPORT = 60.0  # seconds that a tracker waits for the imports of another one
_importing = threading.Lock()  # in Python 3.11, `ast.parse` fails where two threads call it, as imports of trackers do


class Tracker(Protocol):
    """A tracker: three functions, called in this order in one thread."""

    def start(self, config: Mapping[str, object], name: str, id: str) -> None:
        """Begin the tracker's run, or continue the one that was begun with this id.

        Args:
          config: the settings of the experiment, by dotted name.
          name: the run's, for people.
          id: letters and digits; the same for every attempt of a run.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step. After a run went back, or was killed, a step may come again."""

    def finish(self, report: Path | None) -> None:
        """Finish the tracker's run, with report.html if the run is complete."""


def check(names: Sequence[str]) -> None:
    """Raise UserError unless the trackers are known and their packages are installed."""
    for name in names:
        if name not in NAMES:
            raise UserError(f"--report-to: wanted some of {', '.join(NAMES)}, or none, got {name!r}")
        if name != "tensorboard" and find_spec(name) is None:
            raise UserError(f"--report-to: {name} is not installed: {how_to_install('trackers')}")


class Trackers:
    """The trackers of a run except `tensorboard`. No method raises or waits, except `finish`, for a bounded time."""

    def __init__(self, names: Sequence[str]) -> None:
        """Store the names; nothing is imported yet."""
        self.names = tuple(names)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def start(self, run: RunDir, description: Mapping[str, object]) -> None:
        """Begin or continue, in the process that writes the run's files."""
        if names := [name for name in self.names if name != "tensorboard"]:
            config = {key: _public(key, value) for key, value in flatten(description).items()}
            self._workers = [_Worker(name) for name in names]
            self._put("start", config, f"{description['name']}/{run.path.name}", _read_id(run))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue metrics of a step."""
        self._put("log", dict(metrics), step)

    def finish(self, report: Path | None = None) -> None:
        """Finish the trackers, with the report if there is one. Later calls do nothing."""
        self._put("finish", report)
        deadline, ended, self._workers = time.monotonic() + PATIENCE, self._workers, []
        for worker in ended:
            worker.wait(deadline)

    def _put(self, method: str, *arguments: object) -> None:
        for worker in self._workers:
            worker.put(method, arguments)


ONLY_TENSORBOARD = Trackers(("tensorboard",))


class _Worker:
    """The thread of one tracker, and its queue of calls."""

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, False
        self._calls = queue.Queue[tuple[str, tuple[object, ...]]]()
        self._thread = threading.Thread(target=self._run, name=f"gspax_{name}", daemon=True)
        self._thread.start()

    def put(self, method: str, arguments: tuple[object, ...]) -> None:
        """Queue a call, unless the thread has given up. Metrics are dropped while too many calls wait."""
        if method == "log" and self._calls.qsize() >= SIZE:
            self._warn(f"is too slow: {SIZE} calls wait for it, and metrics are dropped")
        elif self._thread.is_alive():
            self._calls.put((method, arguments))

    def wait(self, deadline: float) -> None:
        """Wait for the thread's end until a time of `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"has not finished after {PATIENCE:g} s: its last metrics may be missing")

    def _run(self) -> None:
        method = "start"
        has_turn = _importing.acquire(timeout=IMPORT)
        try:
            tracker: Tracker = importlib.import_module(f"{__name__}.{self._name}").Tracker()
        except BaseException as error:  # an import may do anything
            return self._warn(f"cannot be used: {brief(error)}")
        finally:
            if has_turn:
                _importing.release()
        while method != "finish":
            method, arguments = self._calls.get()
            try:
                getattr(tracker, method)(*arguments)
            except BaseException as error:  # SystemExit too, of a package that refuses its settings
                self._warn(f"failed in {method}: {brief(error)}; the run goes on")
                if method == "start":
                    return None
        return None

    def _warn(self, what: str) -> None:
        """Warn of this tracker, once."""
        if not self._warned:
            self._warned = True
            warn(f"the tracker {self._name} {what}")


def _read_id(run: RunDir) -> str:
    """Read the id of a run directory for its trackers; it is written at its first use."""
    try:
        return run.tracker_id.read_text(encoding="utf-8").strip()
    except OSError:
        id = secrets.token_hex(8)
        write_atomically(run.tracker_id, f"{id}\n")
        return id


def _public(key: str, value: object) -> object:
    """Return a setting with likely secrets hidden."""
    return HIDDEN if is_secret(key) else redact(value) if isinstance(value, str) else value
