"""The settings of a process that computes: the devices that jax looks for, a cache of compiled programs, an allocator
that keeps its pages, programs on the thread that calls them.

The command line applies them; importing gspax does not, because they hold for the whole process. Settings that the user
made, in jax or in the environment, take precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from gspax.errors import warn
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

VARIABLE = "GSPAX_COMPILATION_CACHE"  # a folder, also in a bucket, or 0 for no cache
KEPT_DAYS = 30  # a program that is older is compiled again, so the folder cannot grow for ever

ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
TPU_VARIABLES = (  # set on TPU VMs, in TPU containers, or by hand to use some of the chips
    "CLOUD_TPU_TASK_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "TPU_PROCESS_ADDRESSES",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
)


def prepare() -> None:
    """Apply all settings of a process that computes. Call before jax compiles anything."""
    import jax

    use_compilation_cache()
    silence_failed_saves()
    if has_accelerator() or not keep_freed_pages():
        return
    release_after_compilation()
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        # XLA then runs a program of one CPU device on the thread that calls it, as a rule the main one, whose arena
        # alone serves large blocks without mmap. One arena for all threads would do too, but XLA's compiler threads
        # would wait for it: the first step would take a quarter longer.
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def skip_absent_tpu() -> None:
    """Remove TPUs from the devices that jax looks for, unless there is a sign of one. Call before jax uses a device.

    Where libtpu is installed, jax loads it to look for a TPU, and without one libtpu prints errors. Other accelerators
    are found as before, and JAX_PLATFORMS is respected.
    """
    import jax
    from jax.extend import backend

    if jax.config.jax_platforms or has_tpu():  # type: ignore[attr-defined]
        return
    backend.register_backend_factory("tpu", lambda: None, priority=300, fail_quietly=True)  # None: no such backend


def use_cpu() -> None:
    """Compute on the CPU: a dry run takes no accelerator, which another process may be using."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def has_tpu() -> bool:
    """Return whether the PCI bus, a device file or a variable indicates a TPU."""
    from gspax import unstable

    chips = unstable.attached_tpu_chips() or glob.glob("/dev/accel[0-9]*")
    return bool(chips) or any(os.environ.get(name) for name in TPU_VARIABLES)


def use_compilation_cache() -> None:
    """Let jax store compiled programs in `cache_folder()`, which any number of processes may share.

    The folder must belong to the user alone: its files are executed. In a bucket, the bucket's rules decide. Nothing
    changes if jax has a folder already (JAX_COMPILATION_CACHE_DIR).
    """
    import jax

    folder = cache_folder()
    if folder is None or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        if open_storage(folder).has_folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if hasattr(os, "getuid") and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
                raise PermissionError("other users can write to it")
            remove_old(folder, KEPT_DAYS)
    except OSError as error:
        warn(f"compilation cache {folder} is not used: {error}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # reading a small program is faster too


def cache_folder() -> Path | None:
    """Return the folder of compiled programs, or None if GSPAX_COMPILATION_CACHE is 0.

    Machines that share a home directory have a folder each unless their CPUs are alike: XLA compiles for the CPU's
    instruction set.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "0":
        return None
    root = to_path(chosen).expanduser() if chosen else user_cache() / "gspax" / "compiled"
    return root / f"{platform.machine()}-{hashlib.sha256(cpu_features().encode()).hexdigest()[:8]}"


def user_cache() -> Path:
    """Return the user's folder for files that can be computed again, by the platform's convention."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def cpu_features() -> str:
    """Return the instruction sets of this machine's CPU as Linux lists them; elsewhere the processor's name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


def remove_old(folder: Path, days: float) -> None:
    """Remove the files that were written more than `days` days ago. Another process may do so at the same time."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_mtime < time.time() - days * 86_400:
                path.unlink()


def silence_failed_saves() -> None:
    """Silence what the threads of Orbax and tensorstore raise after a save that failed, as on a full disk.

    The run reports the failure in a sentence. Those threads find their event loop closed: hundreds of tracebacks.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
            report(unraisable)

    sys.unraisablehook = hook


def has_accelerator() -> bool:
    """Return whether jax may compute on a device other than the CPU."""
    import jax

    if platforms := jax.config.jax_platforms:  # type: ignore[attr-defined]
        return bool(platforms != "cpu")
    return has_tpu() or bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def keep_freed_pages() -> bool:
    """Let glibc's malloc keep freed memory for the next allocation; return whether this is glibc and it did.

    XLA on CPU allocates a program's temporaries anew in every call. By default the allocator returns that much memory
    to the kernel at once, and the next call's page faults take time: without this and the two settings that go with it
    (`prepare`), a step of `gspax bench experiments/bench_small_moe.py` took 14 % more CPU time on two cores (median of
    five pairs). Nothing changes if the user configured the allocator or loaded another one.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(*option) for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)))


def release_after_compilation(least_s: float = 0.5) -> Callable[..., None]:
    """Return freed memory to the kernel after each compilation of at least `least_s` seconds; return the listener.

    Otherwise the compiler's memory is still held, in fragments, when the program allocates its temporaries.
    """
    import jax

    from gspax.run.compilation import COMPILED

    libc = ctypes.CDLL(None)

    def release(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED and duration_secs >= least_s:
            libc.malloc_trim(0)

    jax.monitoring.register_event_duration_secs_listener(release)
    return release
