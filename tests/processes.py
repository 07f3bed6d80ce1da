"""Processes that a test starts, each with its own devices; they connect over loopback."""

import os
import socket
import subprocess
import sys

import jax

# As in conftest.py: less than half of a compilation's time. XLA aborts on a flag that it does not have.
FLAGS = (
    "use_fusion_emitters=false",
    "parallel_codegen_split_count=1",
    "enable_concurrency_optimized_scheduler=false",
)
XLA_FLAGS = " ".join(f"--xla_cpu_{flag}" for flag in FLAGS) if jax.__version_info__[:2] == (0, 10) else ""


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def variables(devices):
    """The environment of a process with `devices` CPU devices."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "XLA_FLAGS"))},
        "PYTHONPATH": os.pathsep.join(sys.path),  # the children import this file and its imports
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": XLA_FLAGS,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "NPROC": "64",  # as `gspax.commands.processes` sets it
    }


def finished(processes, code=0, timeout=500):
    """stdout and stderr of each process, all of which must exit with this code."""
    output = [process.communicate(timeout=timeout) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), output
    return [(without_gloo(out), error) for out, error in output]


def without_gloo(out):
    """Without the connection messages of gloo, whose threads write into each other's lines."""
    return "".join(line for line in out.splitlines(True) if "[Gloo]" not in line and "peer ranks" not in line)


def run_two(arguments, *last, devices=1):
    """stdout and stderr of two processes of this Python, each of which must exit with 0.

    After `arguments` each is given the coordinator's address and its index, then `last`.
    """
    address, pipes = f"localhost:{free_port()}", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, *arguments, address, str(index), *map(str, last)] for index in (0, 1)]
    processes = [subprocess.Popen(command, env=variables(devices), **pipes) for command in commands]
    try:
        return finished(processes)
    finally:
        for process in processes:
            process.kill()
