"""Defines the layout of a run directory (`RunDir`), and decides if a run starts, resumes or is refused."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gspax.errors import UserError
from gspax.experiment.description import difference, resumable
from gspax.experiment.origin import Origin
from gspax.parallel import multihost
from gspax.run import lock
from gspax.run.folders import as_warning, make_room, remove_folder, set_aside, write_atomically
from gspax.run.manifest import extra_file, finished_steps, installed_versions
from gspax.run.redaction import recorded_variables, redact, redact_arguments
from gspax.storage.files import open_storage
from gspax.storage.paths import read_bytes, to_path
from gspax.types import JsonObject

# An evaluation may change these keys too: the number of completions sampled at once, and their devices
LAYOUT = ("sampling.*", "mesh.*", "sampler_mesh", "sampler_mesh.*", "placement", "placement.*")
# What changes the results by rounding alone: how an update's rows are divided
SPLITS = ("schedule.microbatch_rows", "schedule.microbatch_tokens", "schedule.share_prompts", "mesh.*")
SHOWN = 20  # fields that differ, in a message
PACKAGES = ("gspax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


NOWHERE = Origin()


def step_of(name: str) -> int | None:
    """Return the step in the name of a samples file, without suffix; None for another file, such as a copy."""
    match = re.fullmatch(r"(?:step|failed)_(\d+)", name)
    return int(match[1]) if match else None


class RunDir:
    """The paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiment = path / "experiment.json"  # the resolved experiment
        self.environment = path / "environment.json"  # versions, devices and settings: a list, an entry per attempt
        self.source = path / "source"  # the experiment file and the user's modules, as they were at the start
        self.lock = path / "lock.json"  # the process that writes here (`run.lock`)
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"  # the same metrics
        self.tracker_id = path / "tracker_id"  # of the run for trackers (`run.trackers`), if it has any
        self.timeline = path / "trace.json"  # what the host, devices and servers did when (`gspax.parallel.timeline`)
        self.samples = path / "samples"  # completions, JSON lines
        self.before = self.samples / "before.jsonl"  # of held-out prompts, before the first update
        self.after = self.samples / "after.jsonl"  # of the same prompts, by the newest policy
        self.checkpoints = path / "checkpoints"
        self.newest = path / "newest_checkpoint.json"  # its step: a trace of it if `checkpoints/` is lost
        self.start = path / "start"  # a checkpoint before the first update, if a reference or adapters need it
        self.skipped = path / "skipped_problems.jsonl"  # training problems that could not be used, with reasons
        self.rollbacks = path / "rollbacks.jsonl"  # where the run went back after it diverged (`training.run_guard`)
        self.rollouts = path / "rollouts"  # what the steps trained on (`training.recorded_rollouts`)
        self.dumps = path / "dumps"  # minibatches and states of skipped updates, a folder for each
        self.evaluations = path / "evaluations.jsonl"  # held-out rewards by `gspax eval`
        self.tasks = path / "evaluations"  # a folder for each step, and in it TASK.json, TASK.jsonl and TASK.html
        self.report = path / "report.html"

    @property
    def warm_start(self) -> RunDir:
        """The directory of the supervised warm start, which has separate metrics and checkpoints."""
        return RunDir(self.path / "warm_start")

    def tasks_at(self, step: int) -> Path:
        """Return the folder of a step's tasks."""
        return self.tasks / f"step_{step:06d}"


@contextlib.contextmanager
def enter_run(workdir: Path, description: Mapping[str, object], origin: Origin = NOWHERE) -> Iterator[RunDir]:
    """Open a run directory as its only writer until the block ends. Collective.

    Raises:
      UserError: as `open_run`, or another process writes there; nothing is changed then.
    """
    run = RunDir(to_path(workdir))
    multihost.all_or_raise(lambda: _create(run, description))
    with lock.hold(run.lock):  # before anything is written: two runs may start at the same moment
        multihost.all_or_raise(lambda: open_run(workdir, description, origin))
        wait_until_shared(run)
        yield run


def _create(run: RunDir, description: Mapping[str, object]) -> None:
    """Create the directory of a run. UserError as `open_run`."""
    if jax.process_index() == 0:
        require_same(run, description)
        if open_storage(run.path).has_folders and run.lock.is_dir():
            set_aside(run.lock, "is a folder")
        run.path.mkdir(parents=True, exist_ok=True)


def open_run(workdir: Path, description: Mapping[str, object], origin: Origin = NOWHERE) -> RunDir:
    """Create the run directory, or open that of the same experiment to resume it. Only process 0 writes.

    The caller holds the lock, as `enter_run` does. Fields that a resumed run may change (`description.resumable`) get
    their new values in `experiment.json`. The code of the `origin` is copied once, at the start.

    Raises:
      UserError: `workdir` is a file, cannot be written to, is of another experiment, or not empty and no run; nothing
        is changed then.
    """
    run = RunDir(to_path(workdir))
    if jax.process_index() != 0:
        return run
    old = require_same(run, description)
    run.path.mkdir(parents=True, exist_ok=True)
    _clear_places(run)
    if old and _has_begun(run) and difference(old, description, ignore=resumable(description)):
        set_aside(run.experiment, "is not of the experiment of the newest checkpoint")
    if old != description:
        write_atomically(run.experiment, json.dumps(description, indent=2) + "\n")
    if (attempts := read_attempts(run)) is None:  # a damaged file does not block a resume
        set_aside(run.environment)
    attempts = [*(attempts or []), describe_environment() | _describe_origin(origin)]
    write_atomically(run.environment, json.dumps(attempts, indent=2) + "\n", private=True)
    _keep_code(run, origin)
    return run


def _keep_code(run: RunDir, origin: Origin) -> None:
    """Copy the user's code, unless the run has begun and has a copy. A full disk is a warning."""
    has_code = run.source.exists()
    if has_code and _has_begun(run):
        return
    with as_warning(run.source):
        if has_code:
            remove_folder(run.source)
        for code in origin.code:
            path = run.source / code.place
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, code.content, private=True)


def require_same(run: RunDir, description: Mapping[str, object]) -> JsonObject | None:
    """Read experiment.json of a directory where this experiment may run; None without one that can be read.

    It is compared with the experiment, unless nothing has been done by it, as after a mistake that no check found. If
    it is damaged, lost, or of another experiment, the description in the newest checkpoint is compared instead, because
    the run continues from that checkpoint. UserError as `open_run`.
    """
    storage = open_storage(run.path)
    storage.require_usable(run.path)
    if storage.has_folders and run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file, not a run directory")
    old, saved = _read_object(run.experiment), _read_saved(run)
    if old and not _has_begun(run):
        return old
    if old and (saved is None or difference(saved, description, ignore=resumable(description))):
        _require_same(run, old, description)
    elif saved is not None:
        _require_same(run, saved, description)
    elif not run.experiment.exists() and _has_foreign_files(run):
        raise UserError(f"{run.path} is not empty and not a gspax run (it has no experiment.json)")
    return old


def _has_begun(run: RunDir) -> bool:
    """Return whether the run's experiment has trained or measured anything."""
    places = run.metrics, run.start, run.newest, run.evaluations, run.tasks, run.warm_start.path
    return any(path.exists() for path in places) or bool(finished_steps(run.checkpoints))


def _read_saved(run: RunDir) -> JsonObject | None:
    """Read the description in the newest checkpoint; None if none can be read."""
    steps = finished_steps(run.checkpoints)
    extra = _read_object(extra_file(run.checkpoints, steps[-1])) if steps else None
    description = (extra or {}).get("experiment")
    return description if isinstance(description, dict) else None


def _read_object(path: Path) -> JsonObject | None:
    """Read the object in a JSON file; None if the file is missing, unreadable, or empty."""
    try:
        content = read_json(path)
    except UserError:
        return None
    return content if isinstance(content, dict) and content else None


def read_description(run: RunDir) -> JsonObject | None:
    """Read the experiment of a run, from experiment.json or the newest checkpoint; None if neither can be read."""
    return _read_object(run.experiment) or _read_saved(run)


def _clear_places(run: RunDir) -> None:
    """Set aside folders where the run writes files, files where it needs folders, and an unreadable experiment.json."""
    logs = run.metrics, run.environment, run.newest, run.skipped, run.rollbacks, run.evaluations
    folders = run.checkpoints, run.tensorboard, run.samples, run.rollouts, run.start, run.warm_start.path, run.tasks
    if open_storage(run.path).has_folders:  # elsewhere an object does not stand in the way of others below its name
        for path in (*logs, run.report, run.before, run.after):
            make_room(path)
        for path in (*folders, run.source):
            if path.exists() and not path.is_dir():
                set_aside(path, "is no folder")
    if run.experiment.exists() and _read_object(run.experiment) is None:
        set_aside(run.experiment)


def _has_foreign_files(run: RunDir) -> bool:
    """Return whether there are files that no run writes before experiment.json."""
    names = [entry.name for entry in run.path.glob("*")]
    return any(name != run.lock.name and not name.endswith(".tmp") for name in names)


def read_attempts(run: RunDir) -> list[JsonObject] | None:
    """Read the entries of environment.json; [] without the file, None if it is damaged."""
    try:
        attempts = read_json(run.environment) if run.environment.exists() else []
    except UserError:
        return None
    return attempts if isinstance(attempts, list) else None


def first_start(run: RunDir) -> float:
    """Return when a run was first started, in seconds since the epoch; now, if that is not recorded."""
    try:
        return datetime.datetime.fromisoformat(str((read_attempts(run) or [])[0]["started"])).timestamp()
    except (IndexError, KeyError, TypeError, ValueError):
        return time.time()


def read_objective(run: RunDir) -> str:
    """Read the equation that the newest attempt minimized; empty if it is not recorded."""
    attempts = read_attempts(run) or [{}]
    lines = attempts[-1].get("objective") if isinstance(attempts[-1], dict) else None
    return "\n".join(map(str, lines)) if isinstance(lines, list) else ""


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


def find_run(workdir: Path, description: Mapping[str, object]) -> RunDir:
    """Find the existing run directory of this experiment, to read from. UserError if it is none or of another one."""
    run = RunDir(to_path(workdir))
    if (recorded := read_description(run)) is None:
        raise UserError(f"{run.path} is not a gspax run (it has no experiment.json that can be read)")
    if different := difference(recorded, description, ignore=(*resumable(description), *LAYOUT)):
        raise UserError(
            f"{run.path} is a run of another experiment; give the FILE of that run, without overrides of what it was "
            f"trained with: {_list(different)}"
        )
    return run


def _require_same(run: RunDir, old: Mapping[str, object], new: Mapping[str, object]) -> None:
    if different := difference(old, new, ignore=resumable(new)):
        only_bits = not difference(old, new, ignore=(*resumable(new), *SPLITS))
        why = ". With them sums round differently, but a resumed run must be bit-identical to an uninterrupted one"
        raise UserError(
            f"{run.path} holds another experiment; take another directory or undo: {_list(different)}"
            f"{why if only_bits else ''}"
        )


def _list(different: Sequence[str]) -> str:
    """Join the fields that differ; of another or a damaged experiment, which may be all, the first ones."""
    more = [f"and {len(different) - SHOWN} more"] if len(different) > SHOWN else []
    return "; ".join([*different[:SHOWN], *more])


def describe_environment() -> JsonObject:
    """Describe the versions, devices and settings that results depend on, with likely secrets hidden."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redact_arguments(sys.argv),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": installed_versions(PACKAGES),
        "backend": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
        "variables": recorded_variables(os.environ),
    }


def read_json(path: Path) -> Any:
    """Read the content of a JSON file. UserError if it cannot be read."""
    try:
        return json.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _describe_origin(origin: Origin) -> JsonObject:
    """Describe the paths of the experiment file and the data, the file's commit, and the objective; empty without them.

    The commit ends in -dirty if the repository's files differ from it, or if it lacks some of the run's code.
    """
    described: JsonObject = {"data": {key: [redact(path) for path in paths] for key, paths in origin.data.items()}}
    described["objective"] = [*origin.objective]
    if origin.file is not None:
        commit = _describe_commit(origin.file.parent)
        files = [str(code.path) for code in origin.code]
        if commit is not None and not commit.endswith("-dirty") and not _is_tracked(origin.file.parent, files):
            commit += "-dirty"
        described |= {"experiment_file": str(origin.file), "experiment_commit": commit}
    return {name: value for name, value in described.items() if value}


def _commit() -> str | None:
    """Return the commit of the checkout that contains this module, ending in -dirty if files differ from it."""
    here = Path(__file__)
    return _describe_commit(here.parent) if _is_tracked(here.parent, [here.name]) else None


def _describe_commit(folder: Path) -> str | None:
    """Return the commit of a folder, ending in -dirty if files of its repository differ; None without a repository."""
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _is_tracked(folder: Path, files: Sequence[str]) -> bool:
    """Return whether the repository of a folder has all these files."""
    return _git(folder, "--literal-pathspecs", "ls-files", "--error-unmatch", "--", *files) is not None


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git in a folder and return its output; None if it fails, without git, or after 5 seconds."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
