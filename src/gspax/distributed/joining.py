"""Joining the processes of one run: find them, check that all have the same experiment, connect them, leave.

A run on several hosts is the same command on each of them. The processes find each other by

    options            --coordinator HOST:PORT --processes N --process I
    variables          JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    the platform       TPU VMs, GKE, SLURM, Open MPI: what jax itself detects

A single machine neither searches nor waits; `--processes 1` makes one host of many run alone.

`join` holds the rendezvous (`rendezvous`) on the coordinator's port before jax connects the processes: it authenticates
them, compares what they run, and names the ones that are missing. Its connections are kept for the run (`links`).
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import jax

from gspax import unstable
from gspax.distributed import _service, links
from gspax.distributed.rendezvous import Fingerprint, ProcessInfo, bind_host, rendezvous
from gspax.errors import UserError

JOIN_TIMEOUT = 300.0  # seconds until all processes must have joined


def find_process(
    address: str | None = None, count: int | None = None, index: int | None = None, timeout: float = JOIN_TIMEOUT
) -> ProcessInfo | None:
    """This process by the arguments, the variables or the platform, in this order; None if it runs alone.

    Raises:
      UserError: the arguments and variables are incomplete or invalid, or the platform cannot be queried.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = _read_variable("JAX_NUM_PROCESSES") if count is None else count
    index = _read_variable("JAX_PROCESS_ID") if index is None else index
    if count == 1:
        return None
    if (address, count, index) == (None, None, None):
        try:
            return _detect_process(timeout)
        except Exception as error:
            raise UserError(
                f"processes: cannot find the processes of this platform ({type(error).__name__}: {error}); "
                "give --coordinator, --processes and --process, or --processes 1 to run on this machine alone"
            ) from error
    if address is None or count is None or index is None:
        raise UserError(
            "processes: wanted all of --coordinator HOST:PORT, --processes N and --process I (or the variables "
            f"JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), got {address}, {count}, {index}"
        )
    if not 0 <= index < count:
        raise UserError(f"processes: wanted a process from 0 to {count - 1}, got {index}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"processes: wanted the coordinator as HOST:PORT, got {address!r}")
    return ProcessInfo(address, count, index)


def _read_variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise UserError(f"{name}: wanted an integer, got {text!r}")
    return int(text) if text else None


def _detect_process(timeout: float) -> ProcessInfo | None:
    """What the platform reports, through the classes that `jax.distributed.initialize` uses."""
    cluster = next((kind for kind in unstable.cluster_types() if _is_present(kind)), None)
    if cluster is None or cluster.get_process_count() == 1:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = cluster.get_coordinator_address(timeout_secs=int(timeout), override_coordinator_port=port)
    return ProcessInfo(address, cluster.get_process_count(), cluster.get_process_id())


def _is_present(cluster: Any) -> bool:
    # A pod outside an indexed job runs alone, and may not have the right to query Kubernetes.
    alone = unstable.is_kubernetes(cluster) and "JOB_COMPLETION_INDEX" not in os.environ
    return not cluster.opt_in_only_method and not alone and cluster.is_env_present()


def join(
    info: ProcessInfo | None, fingerprint: Fingerprint, timeout: float = JOIN_TIMEOUT, secret: bytes = b""
) -> None:
    """Wait for all processes, compare their fingerprints and connect them; before any use of jax's devices.

    On CPU devices set the variable NPROC to 64 or so first, as `gspax.commands.processes` does: a collective operation
    holds one of XLA's threads while it waits, and by default there is one per core.

    Args:
      secret: of the run, the same on all processes; a process with another one cannot join (see `secret`).

    Raises:
      UserError: on every process, if the fingerprints or process counts differ.
      JoinTimeoutError: on every process that has joined, if another one does not within `timeout` seconds.
    """
    if info is None:
        return
    links.start(info.index, info.count, rendezvous(info, fingerprint, timeout, secret))
    jax.config.update("jax_enable_preemption_service", False)  # it would consume the SIGTERM that `interrupt` watches
    own_service = None
    if info.index == 0:
        atexit.register(_service.start(_service_address(info), info.count))
        own_service = "127.0.0.1:0"  # jax insists on one in process 0: nothing connects to it
    jax.distributed.initialize(
        info.address,
        info.count,
        info.index,
        initialization_timeout=max(1, int(timeout)),
        coordinator_bind_address=own_service,
    )
    atexit.register(_leave_at_exit)  # before jax's shutdown, which was registered earlier


def _service_address(info: ProcessInfo) -> str:
    """Where jax's coordination service listens."""
    host = bind_host(info.host) or "::"
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"{f'[{host}]' if ':' in host else host}:{info.port}"


def _leave_at_exit() -> None:
    leave(1 if getattr(sys, "last_value", None) is not None else 0)


def leave(code: int) -> None:
    """Call before a process ends with this exit code. A process that fails alone is ended here.

    An orderly shutdown of jax's service needs all processes: a failing one would wait for processes that wait for it.
    If all of them fail within `links.LEAVE_TIMEOUT` seconds, each ends normally.
    """
    current = links.current()
    if current is not None and not current.leave(code):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
