"""The run directory: what lies where, and the decision whether a run starts, resumes or is refused.

experiment.json    the resolved experiment          metrics.jsonl   one line per record
environment.json   one entry per attempt            tensorboard/    the same numbers
checkpoints/       of the run                       samples/        completions by step, before and after
start/             parameters before the first update, if a reference or adapters need them
warm_start/        the same for the warm start      evaluations.jsonl, report.html, curves.png
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.experiment.description import difference, resumable

PACKAGES = ("gspax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")
SETTINGS = re.compile(r"^(XLA_|JAX_|LIBTPU_|TPU_)")
SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class RunDir:
    """The paths of a run."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The resolved experiment, JSON."""
        return self.path / "experiment.json"

    @property
    def environment(self) -> Path:
        """Where and how it ran: a JSON list, one entry per attempt."""
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
        """Completions of held-out prompts before the first update."""
        return self.samples / "before.jsonl"

    @property
    def after(self) -> Path:
        """Completions of the same prompts by the newest policy."""
        return self.samples / "after.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the run."""
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """The parameters that reinforcement learning started from, as a checkpoint."""
        return self.path / "start"

    @property
    def warm_start(self) -> RunDir:
        """The supervised stage before the run: its own metrics and checkpoints."""
        return RunDir(self.path / "warm_start")

    @property
    def evaluations(self) -> Path:
        """Results of `gspax eval`, JSON lines."""
        return self.path / "evaluations.jsonl"

    @property
    def report(self) -> Path:
        """The report, one self-contained page."""
        return self.path / "report.html"

    @property
    def curves(self) -> Path:
        """The curves of the report as a picture."""
        return self.path / "curves.png"


def open_run(workdir: Path, description: Mapping[str, Any]) -> RunDir:
    """Create the run directory, or open one of the same experiment to resume it.

    What a resumed run may change (`description.resumable`) takes its new values in `experiment.json`. A directory of
    another experiment, or of something else, is refused untouched. Only the first process of a multi-host run writes.
    """
    run = RunDir(Path(workdir))
    if re.match(r"[a-z][a-z0-9]+:/", str(workdir)):  # Path makes one slash of two
        raise UserError(f"{workdir}: wanted a directory of a file system (mount the bucket), got an address")
    if jax.process_index() != 0:
        return run
    description = json.loads(json.dumps(description))
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file, not a run directory")
    old = read_json(run.experiment) if run.experiment.exists() else None
    if old is not None:
        _refuse_other(run, old, description)
    elif run.path.exists() and any(not entry.name.endswith(".tmp") for entry in run.path.iterdir()):
        raise UserError(f"{run.path} is not empty and is no gspax run (it has no experiment.json)")
    attempts = read_json(run.environment) if run.environment.exists() else []
    run.path.mkdir(parents=True, exist_ok=True)
    if old != description:
        write_atomically(run.experiment, json.dumps(description, indent=2) + "\n")
    write_atomically(run.environment, json.dumps([*attempts, environment()], indent=2) + "\n")
    return run


def wait_until_shared(run: RunDir, patience: float = 30.0) -> None:
    """Make sure that every process sees what the first one wrote. Collective; one process always does.

    Raises:
      UserError: the directory of another process is another one, or still empty after `patience` seconds.
    """

    def look() -> None:
        until = time.monotonic() + patience
        while not run.experiment.exists():
            if time.monotonic() > until:
                raise UserError(f"{run.path} is not the run directory of process 0: hosts must share it")
            time.sleep(0.1)

    multihost.all_or_raise(look)


def find_run(workdir: Path, description: Mapping[str, Any]) -> RunDir:
    """The directory of a run of this experiment, to read from. UserError if it holds none, or another's."""
    run = RunDir(Path(workdir))
    if not run.experiment.exists():
        raise UserError(f"{run.path} is no gspax run (it has no experiment.json)")
    _refuse_other(run, read_json(run.experiment), json.loads(json.dumps(description)))
    return run


def _refuse_other(run: RunDir, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if different := difference(old, new, ignore=resumable(new)):
        raise UserError(f"{run.path} holds another experiment; take another directory or undo: {'; '.join(different)}")


def environment() -> dict[str, Any]:
    """What a number depends on besides the experiment. Variables whose name speaks of a secret are left out."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "backend": jax.default_backend(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if SETTINGS.search(name) and not SECRETS.search(name)
        },
    }


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill at any moment, finds the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """The content of a JSON file that gspax wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this module lies in, ending in -dirty where files differ from it."""
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
