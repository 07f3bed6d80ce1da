"""What every test runs under. This must come before the first use of a device."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # an installed libtpu without a TPU may wait for one
jax.config.update("jax_num_cpu_devices", 8)  # every sharding test runs on any machine
# an advantage [B] where [B, T] was due is an error, B == T or not
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of the suite's time is compilation, much of it of the same programs. What XLA's costly passes do to a program is
# its speed; the tests that start a process of their own (test_loop.py) run with them.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


RESIDENT_BUDGET = 10**9  # bytes of a worker between two files; compiled programs are most of it


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs():
    """Between two files, if the worker has grown large: keeping the programs of all files takes several GB."""
    yield
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return
    if pages * os.sysconf("SC_PAGE_SIZE") > RESIDENT_BUDGET:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc: hand the freed pages back, more than half of them
            ctypes.CDLL(None).malloc_trim(0)
