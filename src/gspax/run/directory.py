"""The run directory: its layout, and whether a run starts, resumes or is refused.

experiment.json    the resolved experiment          metrics.jsonl   one line per record
environment.json   one entry per attempt            tensorboard/    the same metrics
checkpoints/       of the run                       samples/        completions by step, before and after
start/             parameters before the first update, if a reference or adapters need them
warm_start/        the warm start's own metrics and checkpoints
evaluations/       tasks: result, completions, page  report.html, curves.png
evaluations.jsonl  held-out rewards by `gspax eval`  lock.json       the process that writes here
newest_checkpoint.json  its step                     skipped_problems.jsonl  with reasons
rollbacks.jsonl    where a run went back             dumps/          what its skipped updates met
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gspax.errors import UserError
from gspax.experiment.description import difference, resumable
from gspax.parallel import multihost
from gspax.run import lock
from gspax.run.folders import set_aside, write_atomically
from gspax.run.manifest import extra_file, finished_steps, installed_version
from gspax.run.redaction import recorded_variables, redact_arguments

# What an evaluation may change besides: how many completions are sampled at once, and where
LAYOUT = ("sampling.*", "mesh.*", "sampler_mesh", "sampler_mesh.*", "placement", "placement.*")
PACKAGES = ("gspax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


@dataclass(frozen=True)
class RunDir:
    """The paths of a run."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The resolved experiment, JSON."""
        return self.path / "experiment.json"

    @property
    def lock(self) -> Path:
        """The process that writes here, see `run.lock`."""
        return self.path / "lock.json"

    @property
    def environment(self) -> Path:
        """Versions, devices and settings, a JSON list with one entry per attempt."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """The metrics, JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def samples(self) -> Path:
        """Completions, JSON lines."""
        return self.path / "samples"

    @property
    def before(self) -> Path:
        """Completions of held-out prompts before the first update, JSON lines."""
        return self.samples / "before.jsonl"

    @property
    def after(self) -> Path:
        """Completions of the same prompts by the newest policy, JSON lines."""
        return self.samples / "after.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the run."""
        return self.path / "checkpoints"

    @property
    def newest(self) -> Path:
        """The step of the newest checkpoint, JSON: a trace of it if `checkpoints/` is lost."""
        return self.path / "newest_checkpoint.json"

    @property
    def skipped(self) -> Path:
        """Training problems that could not be used, JSON lines."""
        return self.path / "skipped_problems.jsonl"

    @property
    def rollbacks(self) -> Path:
        """Where the run went back after it diverged, JSON lines (`training.rollback`)."""
        return self.path / "rollbacks.jsonl"

    @property
    def dumps(self) -> Path:
        """Minibatches and states of skipped updates, a folder for each (`training.rollback`)."""
        return self.path / "dumps"

    @property
    def start(self) -> Path:
        """The parameters before the first update, as a checkpoint."""
        return self.path / "start"

    @property
    def warm_start(self) -> RunDir:
        """The directory of the supervised warm start."""
        return RunDir(self.path / "warm_start")

    @property
    def evaluations(self) -> Path:
        """Held-out rewards by `gspax eval`, JSON lines."""
        return self.path / "evaluations.jsonl"

    @property
    def tasks(self) -> Path:
        """Results of tasks: a folder for each step, and in it TASK.json, TASK.jsonl and TASK.html."""
        return self.path / "evaluations"

    def tasks_at(self, step: int) -> Path:
        """The folder of a step's tasks."""
        return self.tasks / f"step_{step:06d}"

    @property
    def report(self) -> Path:
        """The report, a self-contained page."""
        return self.path / "report.html"

    @property
    def curves(self) -> Path:
        """The curves of the report as an image."""
        return self.path / "curves.png"


@contextlib.contextmanager
def enter_run(workdir: Path, description: Mapping[str, Any]) -> Iterator[RunDir]:
    """Open a run directory as its only writer until the block ends. Collective.

    Raises:
      UserError: as `open_run`, or another process writes there; nothing is changed then.
    """
    run = RunDir(Path(workdir))
    multihost.all_or_raise(lambda: _create(run, description))
    with lock.hold(run.lock):  # before anything is written: two runs may start at the same moment
        multihost.all_or_raise(lambda: open_run(workdir, description))
        wait_until_shared(run)
        yield run


def _create(run: RunDir, description: Mapping[str, Any]) -> None:
    """Create the directory of a run. UserError as `open_run`, or if another process writes there."""
    if jax.process_index() == 0:
        _read_same(run, json.loads(json.dumps(description)))
        if run.lock.is_dir():
            set_aside(run.lock, "is a folder")
        lock.require_free(run.lock)
        run.path.mkdir(parents=True, exist_ok=True)


def open_run(workdir: Path, description: Mapping[str, Any]) -> RunDir:
    """Create the run directory, or open that of the same experiment to resume it. Only process 0 writes.

    It does not look at the lock: `enter_run` holds that meanwhile.

    Fields that a resumed run may change (`description.resumable`) get their new values in `experiment.json`.

    Raises:
      UserError: `workdir` is a URL, a file, of another experiment, or not empty and no run; nothing is changed then.
    """
    run = RunDir(Path(workdir))
    if jax.process_index() != 0:
        return run
    description = json.loads(json.dumps(description))
    old = _read_same(run, description)
    run.path.mkdir(parents=True, exist_ok=True)
    _clear_places(run)
    if old and _find_changes(old, description):
        set_aside(run.experiment, "is not of the experiment of the newest checkpoint")
    if old != description:
        write_atomically(run.experiment, json.dumps(description, indent=2) + "\n")
    attempts = _read_or_set_aside(run)
    attempts = [*attempts, describe_environment()]
    write_atomically(run.environment, json.dumps(attempts, indent=2) + "\n", private=True)
    return run


def _read_same(run: RunDir, description: Mapping[str, Any]) -> Any:
    """experiment.json of a directory where this experiment may run; None without one that can be read.

    It is compared with the experiment. So is the description in the newest checkpoint, where that file is damaged, lost
    or another one's: the checkpoint is what the run continues from. UserError as `open_run`.
    """
    if re.match(r"[a-z][a-z0-9]+:/", str(run.path)):  # Path turns two slashes into one
        raise UserError(f"{run.path}: wanted a directory of a file system (mount the bucket), got a URL")
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file, not a run directory")
    old, saved = _read_object(run.experiment), _read_saved(run)
    if old and (saved is None or _find_changes(saved, description)):
        _require_same(run, old, description)
    elif saved is not None:
        _require_same(run, saved, description)
    elif not run.experiment.exists() and _has_foreign_files(run):
        raise UserError(f"{run.path} is not empty and not a gspax run (it has no experiment.json)")
    return old


def _read_saved(run: RunDir) -> dict[str, Any] | None:
    """The description in the newest checkpoint; None if there is none that can be read."""
    steps = finished_steps(run.checkpoints)
    extra = _read_object(extra_file(run.checkpoints, steps[-1])) if steps else None
    found = (extra or {}).get("experiment")
    return found if isinstance(found, dict) else None


def _read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none, or nothing in it."""
    try:
        found = read_json(path)
    except UserError:
        return None
    return found if isinstance(found, dict) and found else None


def read_description(run: RunDir) -> dict[str, Any] | None:
    """The experiment of a run, from experiment.json or the newest checkpoint; None if neither can be read."""
    return _read_object(run.experiment) or _read_saved(run)


def _clear_places(run: RunDir) -> None:
    """Set aside what is in the place of a file or folder of the run and is of another kind, or cannot be read."""
    logs = run.metrics, run.environment, run.newest, run.skipped, run.rollbacks, run.evaluations
    for path in (*logs, run.report, run.curves, run.before, run.after):
        if path.is_dir():
            set_aside(path, "is a folder")
    for path in (run.checkpoints, run.tensorboard, run.samples, run.start, run.warm_start.path, run.tasks):
        if path.exists() and not path.is_dir():
            set_aside(path, "is no folder")
    if run.experiment.exists() and _read_object(run.experiment) is None:
        set_aside(run.experiment)


def _has_foreign_files(run: RunDir) -> bool:
    """Whether there are files besides those that a run writes before experiment.json."""
    names = [entry.name for entry in run.path.iterdir()] if run.path.exists() else []
    return any(name != run.lock.name and not name.endswith(".tmp") for name in names)


def read_attempts(run: RunDir) -> list[Any] | None:
    """The entries of environment.json; none without the file, None if it is damaged."""
    try:
        found = read_json(run.environment) if run.environment.exists() else []
    except UserError:
        return None
    return found if isinstance(found, list) else None


def _read_or_set_aside(run: RunDir) -> list[Any]:
    """The earlier attempts. A damaged file is renamed and named in a warning: it does not block a resume."""
    attempts = read_attempts(run)
    if attempts is not None:
        return attempts
    set_aside(run.environment)
    return []


def wait_until_shared(run: RunDir, timeout: float = 30.0) -> None:
    """Wait until every process sees the files that process 0 wrote. Collective.

    Raises:
      UserError: a process does not see them after `timeout` seconds: its directory is a different one.
    """

    def wait() -> None:
        deadline = time.monotonic() + timeout
        while not run.experiment.exists():
            if time.monotonic() > deadline:
                raise UserError(f"{run.path} is not the run directory of process 0: hosts must share it")
            time.sleep(0.1)

    multihost.all_or_raise(wait)


def find_run(workdir: Path, description: Mapping[str, Any]) -> RunDir:
    """The existing run directory of this experiment, to read from. UserError if it is none or another experiment's."""
    run = RunDir(Path(workdir))
    if (found := read_description(run)) is None:
        raise UserError(f"{run.path} is not a gspax run (it has no experiment.json that can be read)")
    new = json.loads(json.dumps(description))
    if different := difference(found, new, ignore=(*resumable(new), *LAYOUT)):
        raise UserError(
            f"{run.path} is a run of another experiment; give the FILE of that run, without overrides of what it was "
            f"trained with: {'; '.join(different)}"
        )
    return run


def _find_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return difference(old, new, ignore=resumable(new))


def _require_same(run: RunDir, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if different := _find_changes(old, new):
        raise UserError(f"{run.path} holds another experiment; take another directory or undo: {'; '.join(different)}")


def describe_environment() -> dict[str, Any]:
    """What results depend on besides the experiment, without what looks like a secret."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redact_arguments(sys.argv),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "backend": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
        "variables": recorded_variables(os.environ),
    }


def read_json(path: Path) -> Any:
    """The content of a JSON file. UserError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _commit() -> str | None:
    """The commit of the checkout that contains this module, ending in -dirty if files differ from it."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
