"""A soak: two runs under faults at random for an hour, and a table of them. `make soak MINUTES=5 SEED=1`.

- One run is killed, damaged and started again until it ends; then it is compared, bit by bit, with a run to which
  nothing happened, and the next one begins.
- The other one is a single process that trains to the end of the soak under the faults that a process survives. Its
  resident memory is measured.

A sample is lost if the step that learned from it is missing, doubled or, in the first run, different in any bit. The
exit code is 1 if a fault was not survived or a sample was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import runs
from moments import BEGIN, SPAN, Kill

SAMPLES = 32  # of a step of the victim
PAUSE = 5.0  # seconds between two faults of the steady run, on average
BLOCKS = 20  # of time, whose mean memory the slope is fitted to
T_95 = 2.10  # quantile of Student's t for BLOCKS - 2 degrees of freedom
WARM_UP = 0.25  # share of the time before memory is counted


@dataclass
class Tally:
    """A record of what happened; `problems` are faults that the run did not survive."""

    injected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lost: int = 0  # samples
    trained: int = 0  # samples

    def settle(self, faults: Counter[str], problem: str) -> None:
        """Count faults, as survived if there is no problem."""
        self.injected += faults
        if problem:
            self.problems.append(problem)
        else:
            self.survived += faults


# --- the run that is killed ------------------------------------------------------------------------------------------


def run_killed(folder: Path, reference: Path, rng: random.Random, ends: float, tally: Tally) -> None:
    """Runs of the victim, one after the other, each killed and damaged until it ends."""
    number = 0
    while time.monotonic() < ends:
        workdir, faults = folder / f"killed{number}", Counter[str]()
        problem = _run_until_it_ends(workdir, rng, ends, faults)
        different = runs.differences(workdir, reference) if not problem else []
        if different:
            problem = f"{workdir}: {', '.join(different)} differ after {dict(faults)}"
        tally.trained += SAMPLES * runs.STEPS
        tally.lost += SAMPLES * _count_different(workdir, reference)
        tally.settle(faults, problem)
        if not problem:
            shutil.rmtree(workdir)
        number += 1


def _run_until_it_ends(workdir: Path, rng: random.Random, ends: float, faults: Counter[str]) -> str:
    """Kill and damage the run until it ends; what it did not survive, or nothing."""
    while True:
        kill = _draw_kill(rng) if time.monotonic() < ends else None
        run = runs.start(workdir, kill=kill)
        code = run.wait()
        if "Traceback" in run.text() or code not in (0, -signal.SIGKILL):
            return f"{workdir}, exit code {code} with {kill}: {run.text()[-2000:]}"
        if code == 0:
            return ""
        assert kill is not None
        faults[f"killed: {kill.moment}"] += 1
        if rng.random() < 0.3 and (name := _damage(workdir, rng)):
            faults[name] += 1


def _draw_kill(rng: random.Random) -> Kill:
    moment = rng.choice([*SPAN])
    after = 0 if moment in ("report", *BEGIN) else rng.randrange(runs.STEPS)
    return Kill(moment, after, rng.uniform(0, SPAN[moment]))


def _damage(workdir: Path, rng: random.Random) -> str | None:
    """Damage a file of a stopped run that has two checkpoints: one of the newest, or one beside them."""
    steps = sorted((path for path in workdir.glob("checkpoints/*") if path.name.isdecimal()), key=lambda p: int(p.name))
    whole = [path for path in steps if (path / "manifest.json").exists()]
    if len(whole) < 2:
        return None
    files = [path for path in whole[-1].rglob("*") if path.is_file() and path.stat().st_size]
    files += [workdir / "environment.json", workdir / "newest_checkpoint.json"]
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    kind = rng.choice(["bit flipped", "truncated", "deleted"])
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return f"{kind}: a file {'of the newest checkpoint' if path.parent != workdir else 'beside the checkpoints'}"


def _count_different(workdir: Path, reference: Path) -> int:
    """The steps whose metrics are missing or not those of the reference."""

    def by_step(path: Path) -> dict[int, list[dict[str, str]]]:
        found: dict[int, list[dict[str, str]]] = {}
        for row in runs.metrics(path):
            if "policy/loss" in row:
                found.setdefault(int(row["step"]), []).append(row)
        return found

    got, wanted = by_step(workdir), by_step(reference)
    return sum(got.get(step) != rows for step, rows in wanted.items())


# --- the run that is not killed --------------------------------------------------------------------------------------


def run_steadily(workdir: Path, rng: random.Random, ends: float, tally: Tally) -> np.ndarray:
    """One process under faults until the end; seconds, MB resident and the machine's load, a row for each second."""
    long = "schedule.keep_checkpoints=2", "schedule.checkpoint_every=20", "schedule.eval_every=500"
    run = runs.start(workdir, *long, steps=10**7, with_report=False)
    pid, faults, memory, start = run.process.pid, Counter[str](), [], time.monotonic()
    assert pid is not None
    next_fault = start + 60
    while time.monotonic() < ends and run.process.is_alive():
        time.sleep(1)
        memory.append((time.monotonic() - start, _resident(pid), os.getloadavg()[0]))
        if time.monotonic() > next_fault:
            name = rng.choice([*STEADY])
            STEADY[name](pid, workdir, rng)
            faults[name] += 1
            next_fault = time.monotonic() + rng.expovariate(1 / PAUSE)
    if run.process.is_alive():
        os.kill(pid, signal.SIGTERM)
    code = run.wait()
    problem = "" if code == 143 and "Traceback" not in run.text() else f"exit code {code}: {run.text()[-2000:]}"
    steps = [int(json.loads(line)["step"]) for line in _lines(workdir) if "policy/loss" in line]
    newest = json.loads((workdir / "newest_checkpoint.json").read_text())["newest"]
    if steps != [*range(1, newest + 1)]:
        missing = len({*range(1, newest + 1)} - {*steps}) + len(steps) - len({*steps})
        tally.lost += SAMPLES * missing
        problem += f"; {missing} steps of {newest} missing or doubled in {workdir}/metrics.jsonl"
    tally.trained += SAMPLES * newest
    tally.settle(faults, problem)
    return np.array(memory)


def _lines(workdir: Path) -> list[str]:
    return (workdir / "metrics.jsonl").read_text().splitlines()


def _resident(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _fill_disk(pid: int, workdir: Path, rng: random.Random) -> None:
    """No file of the process can grow beyond some bytes for up to three seconds."""
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (rng.choice([0, 100, 5000]), before[1]))
        time.sleep(rng.uniform(0.1, 3))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def _suspend(pid: int, workdir: Path, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 3))
        os.kill(pid, signal.SIGCONT)


def _damage_older(pid: int, workdir: Path, rng: random.Random) -> None:
    """Flip a bit of a finished checkpoint that is about to be replaced."""
    files = [path for path in workdir.glob("checkpoints/[0-9]*/state/**/*") if path.is_file()]
    with contextlib.suppress(OSError, IndexError, ValueError):  # deleted meanwhile
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1
        path.write_bytes(data)


def _start_second(pid: int, workdir: Path, rng: random.Random) -> None:
    """A second run of the directory, which must be refused."""
    second = runs.start(workdir, steps=10**7, log="second")
    assert second.wait() == 1 and "is in use by another run" in second.text(), second.text()


def _delete_logs(pid: int, workdir: Path, rng: random.Random) -> None:
    """Remove what a user may remove: completions and TensorBoard's files."""
    for path in [*workdir.glob("samples/step_*"), *workdir.glob("tensorboard/*")][:3]:
        path.unlink(missing_ok=True)


STEADY: dict[str, Callable[[int, Path, random.Random], None]] = {
    "disk full for up to 3 s": _fill_disk,
    "suspended for up to 3 s": _suspend,
    "bit flipped: a file of an older checkpoint": _damage_older,
    "second run of the directory": _start_second,
    "logs deleted": _delete_logs,
}


def slope(memory: np.ndarray) -> tuple[float, float]:
    """MB an hour and the half width of its 95 % interval: a line through the means of blocks of time."""
    kept = memory[(memory[:, 0] > memory[-1, 0] * WARM_UP) & np.isfinite(memory[:, 1])]
    blocks = np.array([block.mean(axis=0) for block in np.array_split(kept, BLOCKS)])
    hours, mb = blocks[:, 0] / 3600, blocks[:, 1]
    centred = hours - hours.mean()
    rate = float(centred @ mb / (centred @ centred))
    residual = mb - mb.mean() - rate * centred
    error = float(np.sqrt(residual @ residual / (BLOCKS - 2) / (centred @ centred)))
    return rate, T_95 * error


# --- the table -------------------------------------------------------------------------------------------------------


def table(tally: Tally, memory: np.ndarray, minutes: float, seed: int) -> str:
    rate, width = slope(memory)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    rows = [f"| {name} | {tally.injected[name]} | {tally.survived[name]} |" for name in sorted(tally.injected)]
    total = f"| **all** | {tally.injected.total()} | {tally.survived.total()} |"
    return "\n".join(
        [
            "# Soak",
            "",
            f"Written by `make soak MINUTES={minutes:g} SEED={seed}` at {commit}, {os.cpu_count()} cores,",
            f"Python {platform.python_version()}, mean load {memory[:, 2].mean():.1f} (the soak itself is about 2).",
            "[tests/faults/soak.py](../../tests/faults/soak.py) describes what it does.",
            "",
            "| fault | injected | survived |",
            "| --- | --- | --- |",
            *rows,
            total,
            "",
            f"Samples trained on: {tally.trained:,}. **Samples lost: {tally.lost}.**",
            "",
            f"Resident memory of the run that was not killed: {memory[-1, 1]:.0f} MB at the end, slope {rate:+.1f} ± "
            f"{width:.1f} MB an hour",
            f"(95 %, {BLOCKS} means over the last {100 * (1 - WARM_UP):.0f} % of {memory[-1, 0] / 60:.0f} minutes).",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="file to write the table to")
    options = parser.parse_args()
    folder, tally = Path(tempfile.mkdtemp(prefix="soak_")), Tally()
    reference = folder / "reference"
    run = runs.start(reference)
    assert run.wait() == 0, run.text()
    ends = time.monotonic() + 60 * options.minutes
    killing = threading.Thread(
        target=run_killed, args=(folder, reference, random.Random(options.seed), ends, tally), name="killed"
    )
    killing.start()
    memory = run_steadily(folder / "steady", random.Random(options.seed + 1), ends, tally)
    killing.join()
    text = table(tally, memory, options.minutes, options.seed)
    print(text)
    print("\n".join(tally.problems), file=sys.stderr)
    failed = bool(tally.problems or tally.lost)
    if failed:
        print(f"kept: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
        if options.table is not None:
            options.table.write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
