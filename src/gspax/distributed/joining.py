"""Joining the processes of one run: find them, check that all have the same experiment, connect them, leave.

A run on several hosts is the same command on each of them. The processes find each other by

    options            --coordinator HOST:PORT --processes N --process I
    variables          JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    the platform       TPU VMs, GKE, SLURM, Open MPI: what jax itself detects

A single machine neither searches nor waits; `--processes 1` makes one host of many run alone.

`join` holds a rendezvous over a plain connection to the coordinator's port before jax connects the processes, because
jax ends a process without naming the ones that are missing. From then on jax's coordination service watches them: if a
process dies, the others end when a collective operation fails or after 100 seconds without its heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from gspax import unstable
from gspax.errors import JoinTimeoutError, UserError
from gspax.experiment.description import difference

JOIN_TIMEOUT = 300.0  # seconds until all processes must have joined
LEAVE_TIMEOUT = 10.0  # seconds that a failing process waits for the others to fail in the same way
CONNECTION_TIMEOUT = 5.0  # seconds to connect, and to read what a process sends first
RESPONSE_MARGIN = 10.0  # seconds beyond the timeout to wait for process 0, which may have started later

Fingerprint = Mapping[str, Any]  # what must be equal on all processes: JSON
Message = dict[str, Any]  # of one process: its index, the process count it was given, its fingerprint
Outcome = dict[str, Any]  # of a rendezvous: "errors", a list of sentences; "missing", a sentence or ""


@dataclass(frozen=True)
class ProcessInfo:
    """Process `index` of `count`; process 0 is the coordinator, at `address`."""

    address: str  # HOST:PORT
    count: int
    index: int


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


def join(info: ProcessInfo | None, fingerprint: Fingerprint, timeout: float = JOIN_TIMEOUT) -> None:
    """Wait for all processes, compare their fingerprints and connect them; before any use of jax's devices.

    On CPU devices set the variable NPROC to 64 or so first, as `gspax.commands.launch` does: a collective operation
    holds one of XLA's threads while it waits, and by default there is one per core.

    Raises:
      UserError: on every process, if the fingerprints or process counts differ.
      JoinTimeoutError: on every process that has joined, if another one does not within `timeout` seconds.
    """
    if info is None:
        return
    rendezvous(info, fingerprint, timeout)
    jax.config.update("jax_enable_preemption_service", False)  # it would consume the SIGTERM that `interrupt` watches
    jax.distributed.initialize(info.address, info.count, info.index, initialization_timeout=max(1, int(timeout)))


def leave(code: int) -> None:
    """Call before a process ends with this exit code. A process that fails alone is ended here, at once.

    An orderly shutdown of jax's service needs all processes: a failing one would wait for processes that wait for it.
    If all of them fail within `LEAVE_TIMEOUT` seconds, each ends normally.
    """
    client = unstable.coordination_client()
    if code == 0 or client is None:
        return
    try:
        client.wait_at_barrier("gspax_leave", int(LEAVE_TIMEOUT * 1000))
    except Exception:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rendezvous(info: ProcessInfo, fingerprint: Fingerprint, timeout: float) -> None:
    """Process 0 collects a message from each other process, compares them and sends all the outcome; see `join`."""
    deadline = time.monotonic() + timeout
    message = {"index": info.index, "count": info.count, "fingerprint": fingerprint}
    if info.index == 0:
        outcome = _coordinate(info, message, deadline)
    else:
        outcome = _report_to_coordinator(info, message, deadline, timeout)
    if outcome["errors"]:
        raise UserError(f"processes: {'; '.join(outcome['errors'])}")
    if outcome["missing"]:
        raise JoinTimeoutError(f"processes: {outcome['missing']}")


def _coordinate(info: ProcessInfo, message: Message, deadline: float) -> Outcome:
    """Process 0's part of the rendezvous."""
    port = int(info.address.rpartition(":")[2])
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            raise UserError(f"processes: cannot listen on port {port}: {error.strerror}") from error
        messages, connections, errors = _collect(server, info.count, message, deadline, stack)
        server.close()  # jax listens on this port next, and the others connect as soon as they have the outcome
        missing = [index for index in range(info.count) if index not in messages]
        for index in sorted(messages):
            if changed := difference(message["fingerprint"], messages[index]["fingerprint"]):
                errors.append(f"process {index} differs from process 0 in {'; '.join(changed)}")
        sentence = _missing_sentence(missing, info.count, time.monotonic() - began) if missing else ""
        outcome = {"errors": errors, "missing": sentence}
        for connection in connections:
            with contextlib.suppress(OSError):  # the process died in the meantime: jax will notice
                _send(connection, outcome)
    return outcome


def _collect(
    server: socket.socket, count: int, own: Message, deadline: float, stack: contextlib.ExitStack
) -> tuple[dict[int, Message], list[socket.socket], list[str]]:
    """The messages by process, the open connections, and the numbering errors; ends at the first of these."""
    messages = {0: own}
    connections: list[socket.socket] = []
    errors: list[str] = []
    while len(messages) < count and not errors and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # anything may connect to a port
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(CONNECTION_TIMEOUT)
            message = _receive(connection)
            index = int(message["index"])
            if index in messages or message["count"] != count or not 0 <= index < count:
                errors.append(_numbering_error(index, message["count"], count))
            messages.setdefault(index, message)
            connections.append(connection)
    return messages, connections, errors


def _report_to_coordinator(info: ProcessInfo, message: Message, deadline: float, timeout: float) -> Outcome:
    """The part of all other processes: send the message and wait for the outcome."""
    host, _, port = info.address.rpartition(":")
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError, ValueError, TypeError),  # process 0 is not listening yet
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTION_TIMEOUT) as connection,
        ):
            _send(connection, message)
            connection.settimeout(timeout + RESPONSE_MARGIN)
            return dict(_receive(connection))
        time.sleep(0.1)
    sentence = f"process 0 of {info.count} did not answer at {info.address} within {timeout:.0f} seconds"
    return {"errors": [], "missing": sentence}


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _missing_sentence(missing: list[int], count: int, seconds: float) -> str:
    names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(map(str, missing))}"
    return f"{names} of {count} did not join within {seconds:.0f} seconds"


def _numbering_error(index: int, count: int, expected: int) -> str:
    if count != expected:
        return f"process {index} was started as one of {count} processes, process 0 as one of {expected}"
    return f"two processes were started as process {index} of {count}"


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    with connection.makefile("rb") as file:
        return json.loads(file.readline())
