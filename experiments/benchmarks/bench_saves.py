"""The cost of a checkpoint's manifest: saves of 512 MiB with and without it, alternating; results in saves.md.

    python experiments/benchmarks/bench_saves.py FOLDER > experiments/benchmarks/saves.md

FOLDER is where the checkpoints are written; each is deleted again. The state is random float32 numbers, which do not
compress. A save without a manifest is what Orbax does; for the manifest each file is synchronized with the disk and
hashed. In each round each kind of save is made twice: alone, and with a jitted loop of a fixed length beside it, which
begins when `save` returns. The loop keeps the cores busy that compress, write and hash; on an accelerator it would not.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from gspax.run import manifest
from gspax.run.checkpoints import Checkpoints

ROUNDS = 6
ARRAYS, ARRAY_BYTES = 8, 2**26
LOOP = 2.5  # seconds that the loop takes on an idle machine
SAMPLES = {
    "hold": "seconds that `save` holds the run",
    "complete": "seconds until the save is complete",
    "cpu": "CPU-seconds of all threads until then",
    "beside": "seconds that the loop takes beside a save",
}


def make_state() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    return {str(i): jax.random.normal(key, (ARRAY_BYTES // 2**14, 2**12)) for i, key in enumerate(keys)}


def make_loop() -> Callable[[], float]:
    """A fixed amount of work; calling it gives the seconds it took."""
    x_NN = jnp.eye(384)

    @jax.jit
    def loop(count):
        return jax.lax.fori_loop(0, count, lambda _, y_NN: jnp.tanh(x_NN @ y_NN), x_NN)

    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(count))
        return time.perf_counter() - start

    run(1)
    count = int(LOOP * 200 / min(run(200) for _ in range(5)))
    return lambda: run(count)


def synchronize(path: Path, *, sync: bool = False) -> manifest.Entry:
    """`manifest._digest` without the hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return manifest.Entry(path.stat().st_size, "")


def measure(folder: Path, state: dict[str, jax.Array], loop: Callable[[], float]) -> dict[str, float]:
    """One save alone and one beside the loop."""
    found = {}
    for beside in (False, True):
        with Checkpoints(folder, keep=1) as checkpoints:
            start, used = time.perf_counter(), time.process_time()
            checkpoints.save(1, state, {})
            if beside:
                found["beside"] = loop()
            else:
                found["hold"] = time.perf_counter() - start
                checkpoints.wait()
                found |= {"complete": time.perf_counter() - start, "cpu": time.process_time() - used}
        shutil.rmtree(folder)
    return found


def describe(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(folder: Path) -> None:
    state, loop, alone = make_state(), make_loop(), []
    kinds: dict[str, Any] = {  # what to patch
        "without a manifest": mock.patch.object(manifest, "write_manifest", lambda folder: None),
        "synchronized, not hashed": mock.patch.object(manifest, "_digest", synchronize),
        "with a manifest": contextlib.nullcontext(),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    before = os.getloadavg()[0]
    for index in range(-1, ROUNDS):  # the first one warms up
        idle = loop()
        for name in kinds if index % 2 else reversed(kinds):
            with kinds[name]:
                measured = measure(folder, state, loop)
            if index >= 0:
                found[name].append(measured)
        if index >= 0:
            alone.append(idle)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"# Saves, measured\n\n`bench_saves.py` at commit {commit}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} {platform.machine()} cores, load {before:.1f} to {os.getloadavg()[0]:.1f}.")
    print(f"Saves of {ARRAYS * ARRAY_BYTES >> 20} MiB, {ROUNDS} of each: median (smallest to largest).\n")
    print(f"| | {' | '.join(kinds)} |\n|{' --- |' * (len(kinds) + 1)}")
    for key, title in SAMPLES.items():
        columns = [[each[key] for each in found[name]] for name in kinds]
        print(f"| {title} | {' | '.join(map(describe, columns))} |")
    print(f"\nThe loop alone takes {describe(alone)} seconds.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
