"""Time and memory of reading a Hugging Face checkpoint; results in README.md.

    python experiments/benchmarks/bench_checkpoints.py FOLDER

If FOLDER is empty it first writes random numbers there: Qwen3-30B-A3B cut to 3 layers, 4.98 GB in bfloat16. Each
measurement runs in a process of its own. Its memory is the peak resident set (VmHWM) minus that just before reading,
with jax imported and its devices initialized; gspax maps no file into memory, so the files' pages are not included.
"cold": the files' pages were dropped from the cache first; "warm": they had just been read. For comparison: `cat`,
which keeps nothing, and reading the same bytes unchanged into new memory, which every reader needs.

CPU-seconds depend on the memory: a page that a virtual machine uses for the first time may cost more than all work on
it. So they are measured in processes that have filled as much memory as the files take and freed it; the last line has
what that took.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

LAYERS = 3
READINGS = [(1, "bfloat16"), (8, "bfloat16"), (1, "float32")]  # devices, dtype of the parameters


def make(folder: Path) -> None:
    import ml_dtypes
    import numpy as np

    from gspax.hf import parameters
    from gspax.model import presets

    config = replace(presets.qwen3_30b_a3b, num_hidden_layers=LAYERS)
    shapes = parameters.parameter_shapes(config)
    rng = np.random.default_rng(0)

    def parameter(name: str) -> np.ndarray:
        array = np.empty(shapes[name], ml_dtypes.bfloat16)
        for index in np.ndindex(shapes[name][:-2]):
            array[index] = 0.02 * rng.standard_normal(shapes[name][-2:], np.float32)
        return array

    folder.mkdir(parents=True)
    parameters.write_checkpoint(folder, config, parameter)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop_pages(folder: Path) -> None:
    for file in files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cat(folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cat", *files(folder)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def into_memory(folder: Path) -> None:
    """In a process of its own: read the files' bytes into new memory, with a thread per core."""
    import numpy as np

    from gspax.hf.parameters import empty_aligned

    start = time.perf_counter()
    jobs = []
    for file in files(folder):
        size = file.stat().st_size
        buffer = empty_aligned(((0, size),), np.uint8)
        jobs += [(file, first, buffer[first : first + 2**24]) for first in range(0, size, 2**24)]

    def fill(job: tuple[Path, int, np.ndarray]) -> None:
        with job[0].open("rb", buffering=0) as opened:
            opened.seek(job[1])
            opened.readinto(job[2].data)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, jobs))
    print(json.dumps({"seconds": time.perf_counter() - start}))


def in_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak() -> int:
    """The largest memory of this process; `ru_maxrss` starts at that of the parent process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def fill(folder: Path) -> float:
    """CPU-seconds of filling as much memory as the files take, which is free again after that."""
    import numpy as np

    start = time.process_time()
    np.full(sum(file.stat().st_size for file in files(folder)), 1, np.uint8)
    return time.process_time() - start


def read(folder: Path, devices: int, dtype: str, *, used: bool) -> None:
    """In a process of its own: read once, into memory that it has used before if it is to, and print the result."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    from gspax.config import Mesh
    from gspax.hf.config_json import read_config
    from gspax.hf.parameters import read_params
    from gspax.learner.state import abstract_params
    from gspax.parallel.sharding import make_mesh

    config = read_config(folder)
    wanted = abstract_params(config, make_mesh(Mesh()), dtype)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    filled = fill(folder) if used else 0.0
    before, start, begin = peak(), time.perf_counter(), time.process_time()
    params = read_params(folder, config, wanted)
    seconds, cpu, rise = time.perf_counter() - start, time.process_time() - begin, peak() - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    found = {"seconds": seconds, "cpu": cpu, "peak": rise, "before": before, "arrays": size, "filled": filled}
    print(json.dumps(found))


def main(folder: Path) -> None:
    if not files(folder):
        make(folder)
    total = sum(file.stat().st_size for file in files(folder))
    print(f"{folder.name}: {total / 1e9:.2f} GB in {len(files(folder))} files; {os.cpu_count()} cores")
    for devices, dtype in READINGS:
        for state in ("cold", "warm"):
            prepare = drop_pages if state == "cold" else cat
            prepare(folder)
            alone = cat(folder)
            prepare(folder)
            kept = in_process(folder, "memory")["seconds"]
            prepare(folder)
            found = in_process(folder, devices, dtype)
            print(
                f"{devices} devices, {dtype:8}, {state}: {found['seconds']:5.1f} s ({found['cpu']:4.1f} CPU-s); "
                f"cat {alone:4.1f} s, into memory {kept:4.1f} s; peak {found['peak'] / 1e9:5.2f} GB above "
                f"{found['before'] / 1e9:4.2f} GB, {found['peak'] / total:4.2f} x the files; "
                f"arrays {found['arrays'] / total:4.2f} x",
                flush=True,
            )
        found = in_process(folder, devices, dtype, "used")
        print(
            f"{devices} devices, {dtype:8}, used memory: {total / 1e9 / found['cpu']:.2f} GB per CPU-second "
            f"({found['cpu']:.1f} CPU-s; filling as much memory first {found['filled']:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) >= 4:
        read(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], used="used" in sys.argv[4:])
    elif len(sys.argv) == 3:
        into_memory(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
