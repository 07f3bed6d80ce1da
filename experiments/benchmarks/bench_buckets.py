"""A state of 1 GiB, saved and restored in a folder and in a bucket; the table goes into buckets.md.

    python experiments/benchmarks/bench_buckets.py FOLDER experiments/benchmarks/buckets.md

The bucket's server is `tests/gcs.py` in a process of its own, at once or 50 ms late with every answer. CPU-seconds are
those of all threads of this process, not of the server. The numbers are random, so they do not compress. A run that
restores has verified the SHA-256 of every file before, so it reads everything twice.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import gcs

ROUNDS, ARRAYS, ARRAY_BYTES = 2, 16, 2**26
LATE = 0.05  # seconds
START, END = "<!-- written by bench_buckets.py -->\n", "<!-- end -->\n"
ROWS = {
    "hold": "A save holds the run for (s)",
    "complete": "It is complete after (s)",
    "save_cpu": "It takes CPU-seconds",
    "save_requests": "It sends requests",
    "restore": "Verifying and restoring it takes (s)",
    "restore_cpu": "That takes CPU-seconds",
    "restore_requests": "That sends requests",
}


def answer(pipe: Connection) -> None:
    """Serve a bucket; the pipe carries the environment of its clients, then seconds to be late, until None."""
    with gcs.serve("bucket") as server:
        pipe.send(server.env)
        while (late := pipe.recv()) is not None:
            server.faults = lambda request, late=late: gcs.Slow(late) if late else None
            server.buckets["bucket"].clear()
            pipe.send(late)


def measure(folder: str, seed: int) -> dict[str, float]:
    """A save and a restore."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # an installed libtpu without a TPU may wait for one

    from gspax.run.checkpoints import Checkpoints
    from gspax.storage import objects
    from gspax.storage.paths import to_path

    keys = jax.random.split(jax.random.key(seed), ARRAYS)
    state = {str(i): jax.random.normal(key, (ARRAY_BYTES // 2**14, 2**12)) for i, key in enumerate(keys)}
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    jax.block_until_ready(state)
    with Checkpoints(to_path(folder), keep=1) as checkpoints:
        found, begun, used, before = {}, time.perf_counter(), time.process_time(), objects.measure_traffic()
        checkpoints.save(1, state, {})
        found["hold"] = time.perf_counter() - begun
        checkpoints.wait()
        found |= {"complete": time.perf_counter() - begun, "save_cpu": time.process_time() - used}
        found["save_requests"] = objects.measure_traffic().requests - before.requests
    with Checkpoints(to_path(folder)) as checkpoints:
        begun, used, before = time.perf_counter(), time.process_time(), objects.measure_traffic()
        restored, _ = checkpoints.restore(wanted, 1)
        jax.block_until_ready(restored)
        found |= {"restore": time.perf_counter() - begun, "restore_cpu": time.process_time() - used}
        found["restore_requests"] = objects.measure_traffic().requests - before.requests
    assert all((restored[name] == state[name]).all() for name in state)
    return found


def main(folder: Path, page: Path) -> None:
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=answer, args=(other,), daemon=True)
    server.start()
    os.environ.update(pipe.recv())
    found: dict[str, list[dict[str, float]]] = {"a local folder": [], "a bucket": [], "a bucket, 50 ms away": []}
    load = os.getloadavg()[0]
    for number in range(-1, ROUNDS):  # the first one warms up
        for name, measured in found.items():
            pipe.send(LATE if "50" in name else 0.0)
            pipe.recv()
            one = measure("gs://bucket/run" if "bucket" in name else str(folder / "run"), number)
            measured += [one] if number >= 0 else []
            shutil.rmtree(folder / "run", ignore_errors=True)
            print(name, one, file=sys.stderr, flush=True)
    pipe.send(None)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [f"| 1 GiB in | {' | '.join(found)} |", f"|{' --- |' * (len(found) + 1)}"]
    for key, title in ROWS.items():
        columns = (describe([one[key] for one in measured], key) for measured in found.values())
        lines.append(f"| {title} | {' | '.join(columns)} |")
    lines += [
        "",
        f"Measured at commit {commit} with `experiments/benchmarks/bench_buckets.py`: the median (smallest to largest)",
        f"of {ROUNDS} saves, on {os.cpu_count()} {platform.machine()} cores at a load of {load:.1f} to "
        f"{os.getloadavg()[0]:.1f}.",
    ]
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    page.write_text(before + START + "\n".join(["", *lines, "", ""]) + END + after, encoding="utf-8")


def describe(values: list[float], key: str) -> str:
    if key.endswith("requests"):
        return f"{statistics.median(values):.0f}"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
