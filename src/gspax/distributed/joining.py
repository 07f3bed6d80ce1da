"""Several processes, one run: who they are, that all have come with the same experiment, and how they leave.

A run on several hosts is the same command on each of them. The processes find each other by

    options            --coordinator HOST:PORT --processes N --process I
    variables          JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    the platform       TPU VMs, GKE, SLURM, Open MPI: what jax itself detects

and nothing is looked for or waited for on a single machine; `--processes 1` says that this is one.

`join` calls the roll before jax connects them, over a plain connection to the coordinator's port, because jax ends a
process without naming who is missing. Afterwards jax's coordination service watches: if a process dies, the others
end when a collective operation fails or its heartbeat has been missing for 100 seconds.
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
from gspax.errors import AbsentError, UserError
from gspax.experiment.description import difference

TIMEOUT = 300.0  # seconds until all processes must have joined
FAREWELL = 10.0  # seconds that a failing process waits for the others to fail the same way
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

Card = Mapping[str, Any]  # what must be equal on all processes: JSON


@dataclass(frozen=True)
class ProcessInfo:
    """One process among several: process `index` of `count`; number 0 is the coordinator, at `address`."""

    address: str  # HOST:PORT
    count: int
    index: int


def find_process(
    address: str | None = None, count: int | None = None, index: int | None = None, timeout: float = TIMEOUT
) -> ProcessInfo | None:
    """This process's place by the arguments, the variables or the platform; None if it is alone.

    Raises:
      UserError: some but not all is said, or it makes no sense.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = _variable("JAX_NUM_PROCESSES") if count is None else count
    index = _variable("JAX_PROCESS_ID") if index is None else index
    if count == 1:
        return None
    if (address, count, index) == (None, None, None):
        try:
            return _detected(timeout)
        except Exception as error:
            raise UserError(
                f"processes: the platform does not say who takes part ({type(error).__name__}: {error}); "
                "give --coordinator, --processes and --process, or --processes 1 for this machine alone"
            ) from error
    if address is None or count is None or index is None:
        raise UserError(
            "processes: wanted all of --coordinator HOST:PORT, --processes N and --process I (or the variables "
            f"JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), got {address}, {count}, {index}"
        )
    if not 0 <= index < count:
        raise UserError(f"processes: wanted a process of 0 to {count - 1}, got {index}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"processes: wanted the coordinator as HOST:PORT, got {address!r}")
    return ProcessInfo(address, count, index)


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise UserError(f"{name}: wanted a whole number, got {text!r}")
    return int(text) if text else None


def _detected(timeout: float) -> ProcessInfo | None:
    """What the platform says, through the parts of jax that `jax.distributed.initialize` itself asks."""
    found = next((kind for kind in unstable.cluster_types() if _present(kind)), None)
    if found is None or found.get_process_count() == 1:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = found.get_coordinator_address(timeout_secs=int(timeout), override_coordinator_port=port)
    return ProcessInfo(address, found.get_process_count(), found.get_process_id())


def _present(kind: Any) -> bool:
    # a pod that is not one of an indexed job is alone, and may not ask Kubernetes about itself
    alone = unstable.is_kubernetes(kind) and "JOB_COMPLETION_INDEX" not in os.environ
    return not kind.opt_in_only_method and not alone and kind.is_env_present()


def join(place: ProcessInfo | None, card: Card, timeout: float = TIMEOUT) -> None:
    """Wait for all processes, compare their cards and connect them. To be called before jax is asked for devices.

    Raises:
      UserError: on every process, if one brings another card or was told another number of processes.
      AbsentError: on every process that is there, if one does not come within `timeout` seconds.
    """
    if place is None:
        return
    rendezvous(place, card, timeout)
    # on CPUs a collective operation holds a thread while it waits, and several programs may be under way at once
    os.environ.setdefault("NPROC", "64")  # how many threads XLA makes for the devices of a CPU; by default one per core
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM, which `interrupt` watches
    jax.distributed.initialize(place.address, place.count, place.index, initialization_timeout=max(1, int(timeout)))


def leave(code: int) -> None:
    """Before a process ends with this exit code: if it fails alone, end it here and now.

    Leaving jax's service in good order takes all processes, and one that fails would wait for those that wait for it.
    If all fail alike within ten seconds, each may end by itself.
    """
    client = unstable.coordination_client()
    if code == 0 or client is None:
        return
    try:
        client.wait_at_barrier("gspax_leave", int(FAREWELL * 1000))
    except Exception:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rendezvous(place: ProcessInfo, card: Card, timeout: float) -> None:
    """Process 0 hears all others, compares, and tells them what it found; see `join`."""
    deadline = time.monotonic() + timeout
    message = {"index": place.index, "count": place.count, "card": card}
    verdict = _listen(place, message, deadline) if place.index == 0 else _report(place, message, deadline, timeout)
    if verdict["wrong"]:
        raise UserError(f"processes: {'; '.join(verdict['wrong'])}")
    if verdict["absent"]:
        raise AbsentError(f"processes: {verdict['absent']}")


def _listen(place: ProcessInfo, message: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Process 0's part. The verdict: what is wrong with those that came, and who is absent; empty if all is well."""
    card, port = message["card"], int(place.address.rpartition(":")[2])
    came: dict[int, dict[str, Any]] = {0: message}
    verdict: dict[str, Any] = {"wrong": [], "absent": ""}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_server(port))
        except OSError as error:
            raise UserError(f"processes: cannot listen on port {port}: {error.strerror}") from error
        guests = []
        while len(came) < place.count and not verdict["wrong"] and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # anyone may knock at a port
                guest = stack.enter_context(server.accept()[0])
                guest.settimeout(5)
                told = _receive(guest)
                index = int(told["index"])
                if index in came or told["count"] != place.count or not 0 <= index < place.count:
                    verdict["wrong"].append(_misplaced(index, told["count"], place.count))
                came.setdefault(index, told)
                guests.append(guest)
        server.close()  # jax will listen here, and the others connect as soon as they hear the verdict
        missing = [index for index in range(place.count) if index not in came]
        if missing:
            names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(map(str, missing))}"
            seconds = time.monotonic() - began
            verdict["absent"] = f"{names} of {place.count} did not join within {seconds:.0f} seconds"
        for index in sorted(came):
            if changed := difference(card, came[index]["card"]):
                verdict["wrong"].append(f"process {index} differs from process 0 in {'; '.join(changed)}")
        for guest in guests:
            with contextlib.suppress(OSError):  # it has gone in the meantime: jax will notice
                _send(guest, verdict)
    return verdict


def _report(place: ProcessInfo, message: dict[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
    """The part of all others: what process 0 says, once it is there."""
    host, _, port = place.address.rpartition(":")
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError, ValueError, TypeError),  # it is not there yet
            socket.create_connection((host.strip("[]"), int(port)), timeout=5) as coordinator,
        ):
            _send(coordinator, message)
            coordinator.settimeout(timeout + 10)  # it may have begun to wait later than this process
            return dict(_receive(coordinator))
        time.sleep(0.1)
    sentence = f"process 0 of {place.count} did not answer at {place.address} within {timeout:.0f} seconds"
    return {"wrong": [], "absent": sentence}


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _misplaced(index: int, count: int, wanted: int) -> str:
    if count != wanted:
        return f"process {index} was told of {count} processes, process 0 of {wanted}"
    return f"two processes were told that they are process {index} of {count}"


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    with connection.makefile("rb") as file:
        return json.loads(file.readline())
