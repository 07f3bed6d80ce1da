"""Runs in processes of their own that share their imports and compiled programs, and what is compared of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moments
import tensorstore

from gspax.run.growing import read_growing

VICTIM = str(Path(__file__).with_name("victim.py"))
CACHE = str(Path(__file__).parents[2] / ".cache" / "faults")
CLOCKS = (
    "time/",
    "cpu/",
    "perf/",
    "bucket/",
    "engine/write_seconds",
    "engine/load_seconds",
)  # of the metrics, what two equal runs differ in
STEPS = 24  # of victim.py

# A server that has imported gspax, but not initialized a device, forks a child for each run: 3 CPU-seconds less each.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["gspax.commands.train", "gspax.training.loop", "gspax.report.run_page", "matplotlib.figure"]
)


@dataclass(frozen=True)
class Run:
    """A process that runs `gspax` with some arguments."""

    process: multiprocessing.process.BaseProcess
    output: Path

    def wait(self, timeout: float = 300) -> int:
        """The exit code, negative for a signal; AssertionError if the process does not end."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}")
        return code

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def resumed(self) -> int | None:
        """The step that it continued from, 0 for a new run; None if it was killed before."""
        path = _resumed(self.output)
        return int(path.read_text()) if path.exists() else None


def start(
    workdir: Path,
    *overrides: str,
    file: str = VICTIM,
    kill: moments.Kill | None = None,
    steps: int = STEPS,
    with_report: bool = True,
    optimize: bool = False,
    log: str = "",
    url: str = "",
    env: Mapping[str, str] | None = None,
) -> Run:
    """Start or resume the run in `workdir`, or at `url`. Its output goes to a file beside `workdir`, named by `log`."""
    output = workdir.with_name(f"{log or workdir.name}.log")
    _resumed(output).unlink(missing_ok=True)
    arguments = ["train", file, "--workdir", url or str(workdir), f"schedule.steps={steps}", *overrides]
    given = (arguments, output, kill, workdir, steps, with_report, optimize, dict(env or {}))
    process = _server.Process(target=_run, args=given, daemon=True)
    process.start()
    return Run(process, output)


def environment() -> dict[str, str]:
    """The variables of a run that is started as a program, with the settings of the others."""
    chosen = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "GSPAX_COMPILATION_CACHE": CACHE}
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **chosen, "PYTHONPATH": paths}


def _run(
    arguments: list[str],
    output: Path,
    kill: moments.Kill | None,
    workdir: Path,
    steps: int,
    with_report: bool,
    optimize: bool,
    env: dict[str, str],
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env | {"GSPAX_COMPILATION_CACHE": CACHE})
    import jax

    from gspax.commands import main
    from gspax.report import run_page

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", not optimize)  # compilation would take most of the time
    if not with_report:
        run_page.write = lambda workdir: workdir
    _watch_start(_resumed(output))
    if kill is not None:
        moments.arm(kill, workdir, steps)
    code = main.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a program ends: without the handlers of multiprocessing


def _resumed(output: Path) -> Path:
    return output.with_suffix(".resumed")


def _watch_start(resumed: Path) -> None:
    """Write down the step that the run continues from, and mark the moments until then."""
    from gspax.training import loop, run_log

    class Recorder(run_log.Recorder):
        def __init__(self, run: Any, resume_step: int, *others: Any) -> None:
            super().__init__(run, resume_step, *others)
            resumed.write_text(str(resume_step))
            moments.reached("compile")

    def restore_or_start(*args: Any) -> Any:
        moments.reached("restore")
        return original(*args)

    original, loop.restore_or_start = loop.restore_or_start, restore_or_start
    run_log.Recorder = Recorder  # type: ignore[misc]


def metrics(workdir: Path) -> list[dict[str, str]]:
    """The lines of metrics.jsonl, without clocks."""
    rows = [json.loads(line) for line in read_growing(workdir / "metrics.jsonl").decode().splitlines() if line]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def arrays(workdir: Path, step: int) -> dict[bytes, bytes]:
    """The stored bytes of every array of a checkpoint: parameters, moments, key, counters."""
    base = (workdir / "checkpoints" / str(step)).absolute().as_uri() + "/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def samples(workdir: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted((workdir / "samples").iterdir())}


def skipped(workdir: Path) -> str:
    path = workdir / "skipped_problems.jsonl"
    return path.read_text() if path.exists() else ""


def recorded(workdir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workdir / "rollouts").glob("*")}


def copy(workdir: Path, target: Path) -> Path:
    return Path(shutil.copytree(workdir, target))


def differences(workdir: Path, reference: Path, steps: int = STEPS) -> Sequence[str]:
    """The differences of a finished run from an uninterrupted one: none if no bit was lost."""
    found = []
    if metrics(workdir) != metrics(reference):
        found.append("metrics.jsonl")
    if arrays(workdir, steps) != arrays(reference, steps):
        found.append(f"checkpoint {steps}")
    if samples(workdir) != samples(reference):
        found.append("samples/")
    if skipped(workdir) != skipped(reference):
        found.append("skipped_problems.jsonl")
    if recorded(workdir) != recorded(reference):
        found.append("rollouts/")
    return found
