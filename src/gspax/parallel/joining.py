"""Joins the processes of one run: finds them, checks that all have the same experiment, connects them.

A run on several hosts is the same command on each of them. The processes find each other by

    options            --coordinator HOST:PORT --processes N --process I
    variables          JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    the platform       TPU VMs, GKE, SLURM, Open MPI: what jax itself detects

A single machine neither searches nor waits; `--processes 1` makes one host of many run alone.

Before jax connects the processes, `join` holds a rendezvous on the coordinator's port: every process connects to
process 0, which authenticates them, compares their fingerprints, names the ones that are missing, and sends all the
outcome. It accepts many connections at a time, each in a thread with a deadline of its own. One that does not complete
the handshake or sends no valid message is dropped and named in a warning; it neither ends nor delays the rendezvous.
The connections stay open for the run (`connections`).
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from gspax import unstable
from gspax.errors import FailureError, UserError, warn
from gspax.parallel import _service, connections, wire
from gspax.parallel.connections import Channel
from gspax.parallel.wire import MessageError

JOIN_TIMEOUT = 300.0  # seconds until all processes must have joined
MESSAGE_TIMEOUT = 30.0  # seconds to send a message after the handshake
MESSAGE_LIMIT = 16 * 2**20  # bytes of a message: a fingerprint holds the whole experiment
OUTCOME_LIMIT = 2**20
RESPONSE_MARGIN = 10.0  # seconds beyond the timeout to wait for process 0, which may have started later
PORT_TIMEOUT = 20.0  # seconds to wait for a port that is in use, as by a run that has just ended
AT_ONCE = 64  # connections that may be in the handshake at the same time
WARNINGS = 20
POLL = 0.05  # seconds
MESSAGE, OUTCOME = 1, 2  # kinds

Fingerprint = Mapping[str, object]  # what must be equal on all processes: JSON
Compare = Callable[[Fingerprint, Fingerprint], Sequence[str]]  # two fingerprints -> a sentence per difference


@dataclass(frozen=True)
class ProcessInfo:
    """The identity of a process: `index` of `count`; process 0 is the coordinator, at `address`."""

    address: str  # HOST:PORT
    count: int
    index: int

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True)
class Message:
    """The message of a process to process 0."""

    index: int
    count: int  # the number of processes that it was given
    token: str  # of this start of the process: a connection that it opens again is no second process
    fingerprint: Fingerprint


class Outcome(NamedTuple):
    """The answer of process 0. Without a sentence in either field the run can begin."""

    errors: Sequence[str] = ()
    missing: str = ""


def rendezvous(
    info: ProcessInfo, fingerprint: Fingerprint, compare: Compare, timeout: float, secret: bytes
) -> dict[int, Channel]:
    """Connect the processes; return the channels by the other end's index: from process 0 to each, from others to it.

    Raises:
      UserError: on every process, if the fingerprints or process counts differ, or process 0 cannot listen.
      FailureError: on every process that has joined, if another one does not within `timeout` seconds.
    """
    message = Message(info.index, info.count, secrets.token_hex(8), fingerprint)
    if info.index == 0:
        outcome, channels = _coordinate(info, message, compare, timeout, secret)
    else:
        outcome, channels = _report_to_coordinator(info, message, timeout, secret)
    has_failed = bool(outcome.errors or outcome.missing)
    for channel in channels.values():
        channel.close() if has_failed else channel.wait_without_deadline()
    if outcome.errors:
        raise UserError(f"processes: {'; '.join(map(str, outcome.errors))}")
    if outcome.missing:
        raise FailureError(f"processes: {outcome.missing}")
    return channels


# Process 0


@dataclass
class _Reception:
    """The messages that process 0 has received so far."""

    secret: bytes
    received: queue.SimpleQueue[tuple[Message, Channel]] = field(default_factory=queue.SimpleQueue)
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))
    warned: set[tuple[str, str]] = field(default_factory=set)

    def receive(self, connection: socket.socket, host: str) -> None:
        """Run the handshake and read the message; drop a connection that is not from a process of this run."""
        try:
            channel = connections.accept(connection, self.secret)
            _, content = channel.receive(MESSAGE_LIMIT, time.monotonic() + MESSAGE_TIMEOUT)
            self.received.put((Message(**_parse(content, index=int, count=int, token=str, fingerprint=dict)), channel))
        except (OSError, MessageError) as problem:
            connection.close()
            self.warn(host, str(problem))
        finally:
            self.slots.release()

    def warn(self, host: str, reason: str) -> None:
        """Warn once for each host and reason, and a limited number of times: anybody may connect."""
        if (host, reason) not in self.warned and len(self.warned) < WARNINGS:
            self.warned.add((host, reason))
            warn(f"processes: dropped a connection from {host}: {reason}")


def _coordinate(
    info: ProcessInfo, own: Message, compare: Compare, timeout: float, secret: bytes
) -> tuple[Outcome, dict[int, Channel]]:
    """Run process 0's side of the rendezvous, which ends at the first error in the numbers of the processes."""
    began = time.monotonic()
    messages = {0: own}
    channels: list[tuple[int, Channel]] = []
    errors: list[str] = []
    reception = _Reception(secret)
    with _listen(info, min(PORT_TIMEOUT, timeout)) as server:
        while len(messages) < info.count and not errors and time.monotonic() < began + timeout:
            _accept(server, reception)
            while not reception.received.empty():
                message, channel = reception.received.get()
                known = messages.setdefault(message.index, message)
                if message.count != info.count or known.token != message.token or not 0 <= message.index < info.count:
                    errors.append(_numbering_error(message.index, message.count, info.count))
                elif known is not message:  # it connects again: the earlier connection is lost
                    channels = [(index, earlier) for index, earlier in channels if index != message.index]
                channels.append((message.index, channel))
    # the listening socket is closed: jax's service listens on the port next
    missing = [index for index in range(info.count) if index not in messages]
    for index in sorted(messages):
        if changed := compare(own.fingerprint, messages[index].fingerprint):
            errors.append(f"process {index} differs from process 0 in {'; '.join(changed)}")
    outcome = Outcome(errors, _missing_sentence(missing, info.count, time.monotonic() - began) if missing else "")
    for _, channel in channels:
        with contextlib.suppress(OSError):  # the process died in the meantime, which `connections` notices
            channel.send(OUTCOME, wire.encode(outcome._asdict()))
    return outcome, dict(channels)


def _accept(server: socket.socket, reception: _Reception) -> None:
    """Start a thread for the next connection, if there is one within `POLL` seconds."""
    if not reception.slots.acquire(timeout=POLL):
        return  # all slots are taken, each for a limited time; the others wait in the kernel's queue
    try:
        connection, address = server.accept()
    except OSError:  # none, or it was closed at once
        reception.slots.release()
        return
    host = address[0].removeprefix("::ffff:")  # IPv4 on a socket of both families
    threading.Thread(target=reception.receive, args=(connection, host), daemon=True).start()


def _parse(content: bytes, **kinds: type) -> dict[str, Any]:
    """Parse the dict in a message, with fields of these types and no others."""
    fields = wire.decode(content)
    if type(fields) is not dict or {name: type(value) for name, value in fields.items()} != kinds:
        raise MessageError("it sent no message of a process")
    return fields


def _listen(info: ProcessInfo, timeout: float) -> socket.socket:
    """Open a socket that listens on the coordinator's address if this host has it, else on all of its interfaces."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            server = _bind(bind_host(info.host), info.port)
            server.settimeout(POLL)
            return server
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"processes: cannot listen on port {info.port}: {error.strerror}") from error
            time.sleep(POLL)


def _bind(host: str, port: int) -> socket.socket:
    if host == "" and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def bind_host(host: str) -> str:
    """Return the address to listen on: the coordinator's if it is an address of this host; "" for all interfaces.

    A name is not resolved: on its own host it may mean a loopback address.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = str(ipaddress.ip_address(host))
        _bind(address, 0).close()
    except (ValueError, OSError):
        return ""
    return address


def _missing_sentence(missing: list[int], count: int, seconds: float) -> str:
    names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(map(str, missing))}"
    return f"{names} of {count} did not join within {seconds:.0f} seconds"


def _numbering_error(index: int, count: int, expected: int) -> str:
    if count != expected:
        return f"process {index} was started as one of {count} processes, process 0 as one of {expected}"
    return f"two processes were started as process {index} of {count}"


# All other processes


def _report_to_coordinator(
    info: ProcessInfo, message: Message, timeout: float, secret: bytes
) -> tuple[Outcome, dict[int, Channel]]:
    """Send the message and wait for the outcome, again and again while process 0 does not listen yet."""
    deadline = time.monotonic() + timeout
    content = wire.encode(vars(message))
    warned = False
    while time.monotonic() < deadline:
        connection = None
        try:
            connection = socket.create_connection((info.host, info.port), timeout=connections.HANDSHAKE_TIMEOUT)
            channel = connections.connect(connection, secret)
            channel.send(MESSAGE, content)
            _, answer = channel.receive(OUTCOME_LIMIT, time.monotonic() + timeout + RESPONSE_MARGIN)
            return Outcome(**_parse(answer, errors=list, missing=str)), {0: channel}
        except (OSError, MessageError) as problem:
            if connection is not None:
                connection.close()
            if isinstance(problem, connections.SecretError) and not warned:
                warned = True
                warn(f"processes: process 0 at {info.address}: {problem}")
        time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
    sentence = f"process 0 of {info.count} did not answer at {info.address} within {timeout:.0f} seconds"
    return Outcome(missing=f"{sentence}: it has another secret" if warned else sentence), {}


# Joining


def find_process(
    address: str | None = None, count: int | None = None, index: int | None = None, timeout: float = JOIN_TIMEOUT
) -> ProcessInfo | None:
    """Identify this process by the arguments, the variables or the platform, in this order; None if it runs alone.

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
    """Identify this process by the platform, through the classes that `jax.distributed.initialize` uses."""
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
    info: ProcessInfo | None,
    fingerprint: Fingerprint,
    compare: Compare,
    timeout: float = JOIN_TIMEOUT,
    secret: bytes = b"",
) -> None:
    """Wait for all processes, compare their fingerprints and connect them; before any use of jax's devices.

    On CPU devices set the variable NPROC to 64 or so first, as `gspax.commands.processes` does: a collective operation
    holds one of XLA's threads while it waits, and by default there is one per core.

    Args:
      info: this process, from `find_process`; None joins nothing.
      fingerprint: the JSON values that must be equal on all processes.
      compare: process 0's fingerprint and another one's -> a sentence per difference.
      timeout: seconds until all processes must have joined.
      secret: the run's secret, the same on all processes; a process with another one cannot join (see `secret`).

    Raises:
      UserError: on every process, if the fingerprints or process counts differ.
      FailureError: on every process that has joined, if another one does not within `timeout` seconds.
    """
    if info is None:
        return
    connections.start(info.index, info.count, rendezvous(info, fingerprint, compare, timeout, secret))
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
    """Return the address where jax's coordination service listens."""
    host = bind_host(info.host) or "::"
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"{f'[{host}]' if ':' in host else host}:{info.port}"


def _leave_at_exit() -> None:
    leave(1 if getattr(sys, "last_value", None) is not None else 0)


def leave(code: int) -> None:
    """Announce the exit of this process with a code, before it ends. A process that fails alone is ended here.

    An orderly shutdown of jax's service needs all processes: a failing one would wait for processes that wait for it.
    If all of them fail within `connections.LEAVE_TIMEOUT` seconds, each ends normally.
    """
    current = connections.current()
    if current is not None and not current.leave(code):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
