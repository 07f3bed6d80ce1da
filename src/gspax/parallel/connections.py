"""Connects the processes of a run with authenticated channels, and exchanges values over them.

Both ends of a channel hold the run's secret. Each sends a nonce, then a proof: an HMAC-SHA256, keyed by the secret, of
its role and both nonces, so the secret never travels and nothing recorded earlier is of use. Every message after that
carries an HMAC under the channel's own key, which covers its direction, number, kind, and content. Contents are not
encrypted. Everything that is read has a size limit, and until the run begins a deadline for the whole exchange.

Each process keeps its channel to process 0 until the run ends, and a thread reads from it. The kernel closes the
channels of a process that is killed, so the other end notices at once; process 0 then names it to all others, and every
process exits with code 1. A process that fails announces its exit code first: the others have `LEAVE_TIMEOUT` seconds
to fail in the same way, as they do when the input is invalid on all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import queue
import secrets
import socket
import threading
import time
from typing import Any

from gspax.parallel import wire
from gspax.parallel.watchdog import end_process
from gspax.parallel.wire import MessageError

HANDSHAKE_TIMEOUT = 5.0  # seconds for the whole exchange of nonces and proofs
MAGIC = b"gspax-1\n"  # the protocol and its version
NONCE = DIGEST = 32  # bytes
ACCEPTED, REFUSED = b"\x01", b"\x00"
HEADER = 1 + 8 + DIGEST  # kind, length, HMAC
READ = 2**20  # bytes at a time: memory grows with what arrives, not with what is announced
# A host that disappears without closing its connections is noticed by the kernel after 5 + 3 * 2 seconds. No thread of
# Python takes part, so a process that holds the interpreter's lock for a while is not taken for dead.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


class SecretError(MessageError):
    """Raised if the other end has another secret."""


class Channel:
    """An ordered channel of messages, each a kind (0 to 255) and bytes. One thread may receive while others send."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        self.connection = connection
        self.host = connection.getpeername()[0]
        self._keys = [_hmac(key, role) for role in (b"server", b"client")]
        if not is_server:
            self._keys.reverse()
        self._sent = self._received = 0
        self._sending = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not all of them exist on macOS
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: int, content: bytes) -> None:
        """Send a message. OSError if the connection is lost."""
        with self._sending:
            head = bytes([kind]) + len(content).to_bytes(8, "big")
            mac = _hmac(self._keys[0], self._sent.to_bytes(8, "big"), head, content)
            self._sent += 1
            self.connection.sendall(head + mac + content)

    def receive(self, limit: int, deadline: float = math.inf) -> tuple[int, bytes]:
        """Receive the next message.

        Raises:
          OSError: the connection is lost, or `deadline` (of `time.monotonic`) has passed.
          MessageError: the message has more than `limit` bytes, or was not sent by the other end.
        """
        header = receive_exactly(self.connection, HEADER, deadline)
        head, mac = header[:9], header[9:]
        size = int.from_bytes(head[1:], "big")
        if size > limit:
            raise MessageError(f"a message of {size} bytes, wanted at most {limit}")
        content = receive_exactly(self.connection, size, deadline)
        if not hmac.compare_digest(mac, _hmac(self._keys[1], self._received.to_bytes(8, "big"), head, content)):
            raise MessageError("a message with a wrong HMAC")
        self._received += 1
        return head[0], content

    def wait_without_deadline(self) -> None:
        """Block from now on until something arrives. Call before threads share the channel."""
        self.connection.settimeout(None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def accept(connection: socket.socket, secret: bytes) -> Channel:
    """Run the server's side of the handshake.

    Raises:
      OSError: the connection was lost or too slow.
      MessageError: the other end is no process of gspax, or has another secret.
    """
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    theirs, ours = _receive_nonce(connection, deadline), secrets.token_bytes(NONCE)
    connection.sendall(MAGIC + ours)
    proof = receive_exactly(connection, DIGEST, deadline)
    if not hmac.compare_digest(proof, _hmac(secret, b"client", theirs, ours)):
        connection.sendall(REFUSED + bytes(DIGEST))
        raise SecretError("it has another secret")
    connection.sendall(ACCEPTED + _hmac(secret, b"server", theirs, ours))
    return Channel(connection, _hmac(secret, b"messages", theirs, ours), is_server=True)


def connect(connection: socket.socket, secret: bytes) -> Channel:
    """Run the client's side of the handshake; raises as `accept`."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    connection.settimeout(HANDSHAKE_TIMEOUT)
    ours = secrets.token_bytes(NONCE)
    connection.sendall(MAGIC + ours)
    theirs = _receive_nonce(connection, deadline)
    connection.sendall(_hmac(secret, b"client", ours, theirs))
    answer = receive_exactly(connection, 1 + DIGEST, deadline)
    if answer[:1] != ACCEPTED or not hmac.compare_digest(answer[1:], _hmac(secret, b"server", ours, theirs)):
        raise SecretError("it has another secret")
    return Channel(connection, _hmac(secret, b"messages", ours, theirs), is_server=False)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive the next `size` bytes. OSError if the connection ends first, or `deadline` passes."""
    data = bytearray()
    while len(data) < size:
        if deadline < math.inf:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it was too slow")
            connection.settimeout(left)
        received = connection.recv(min(size - len(data), READ))
        if not received:
            raise ConnectionError("it closed the connection")
        data += received
    return bytes(data)


def _receive_nonce(connection: socket.socket, deadline: float) -> bytes:
    received = receive_exactly(connection, len(MAGIC) + NONCE, deadline)
    if not received.startswith(MAGIC):
        raise MessageError("it is no process of this version of gspax")
    return received[len(MAGIC) :]


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """Compute HMAC-SHA256. All parts but the last have a fixed length, so their boundaries are unambiguous."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


LEAVE_TIMEOUT = 8.0  # seconds that a failing process and the others wait for each other
CAUSE_TIMEOUT = 2.0  # seconds in which a lost connection is taken for the cause of this process's failure
LIMIT = 4 * 2**30  # bytes of a message: the rows of a rollout batch have some megabytes
SENT, RESULT, LEAVING, ALL_LEAVE, LOST = range(16, 21)  # kinds
CONTINUES = "the same command continues the run"

_current: Connections | None = None


class Connections:
    """The connections of process `index` of `count`; process 0 has one to each other, the others one to process 0."""

    def __init__(self, index: int, count: int, channels: dict[int, Channel]) -> None:
        self._index, self._count, self._channels = index, count, channels
        self._received: dict[int, queue.SimpleQueue[Any]] = {peer: queue.SimpleQueue() for peer in channels}
        self._announced: dict[int, int] = {}  # exit codes of processes that are about to exit
        self._announced_at = 0.0  # the time of this process's announcement
        self._all_leave = threading.Event()
        for peer in channels:
            threading.Thread(target=self._read, args=(peer,), name=f"gspax_connection_{peer}", daemon=True).start()

    def exchange(self, value: object) -> list[Any]:
        """Return the values that all processes pass to this call, in process order. All call it in the same order.

        TypeError for a value that cannot be sent (`wire.encode`), in every process that passes such a value.
        """
        own = wire.encode(value)  # also in process 0: it must not wait for others that raise here
        if self._index:
            self._channels[0].send(SENT, own)
            return self._received[0].get()
        encoded = wire.encode([value, *(self._received[peer].get() for peer in range(1, self._count))])
        for channel in self._channels.values():
            channel.send(RESULT, encoded)
        return wire.decode(encoded)

    def leave(self, code: int) -> bool:
        """Announce that this process is about to exit, and wait for the others; return whether all of them are.

        With code 0 nobody waits here: jax's own shutdown does. A second call changes nothing.
        """
        if self._index in self._announced:
            return True
        self._announced_at = time.monotonic()
        self._announced[self._index] = code
        self._tell(LEAVING, {"process": self._index, "code": code})
        self._check_all_leave()
        return code == 0 or self._all_leave.wait(LEAVE_TIMEOUT)

    def _read(self, peer: int) -> None:
        """Handle the messages of another process until the connection is lost."""
        try:
            while True:
                kind, encoded = self._channels[peer].receive(LIMIT)
                content = wire.decode(encoded)
                if kind in (SENT, RESULT):
                    self._received[peer].put(content)
                else:
                    self._handle(kind, content)
        except (OSError, MessageError, TypeError, KeyError, ValueError) as problem:
            if peer not in self._announced:
                host = self._channels[peer].host
                self._end_if_cause(f"process {peer} of {self._count} on {host} has ended ({problem}); {CONTINUES}")

    def _handle(self, kind: int, content: dict[str, str | int]) -> None:
        if kind == ALL_LEAVE:
            self._all_leave.set()
        elif kind == LOST:
            self._end_if_cause(str(content["sentence"]))
        elif kind == LEAVING:
            process, code = int(content["process"]), int(content["code"])
            if process == self._index:
                return
            self._announced[process] = code
            if self._index == 0:
                self._tell(LEAVING, content)
                self._check_all_leave()
            if code != 0:
                sentence = f"process {process} of {self._count} ended with exit code {code}, see its output"
                timer = threading.Timer(LEAVE_TIMEOUT, self._end_if_alone, [sentence])
                timer.daemon = True
                timer.start()

    def _check_all_leave(self) -> None:
        """Tell all processes, on process 0, once every process has announced its exit."""
        if self._index == 0 and len(self._announced) == self._count:
            self._tell(ALL_LEAVE, None)
            self._all_leave.set()

    def _end_if_alone(self, sentence: str) -> None:
        """End this process because another one failed, unless this one is about to exit."""
        if self._index not in self._announced:
            self._end(sentence)

    def _end_if_cause(self, sentence: str) -> None:
        """End this process because another one is gone, unless this one exits for an unrelated reason."""
        code = self._announced.get(self._index)
        follows = code == 1 and time.monotonic() - self._announced_at < CAUSE_TIMEOUT
        if code is None or follows:
            self._end(sentence)

    def _end(self, sentence: str) -> None:
        def tell() -> None:
            if self._index == 0:
                self._tell(LOST, {"sentence": sentence})

        end_process(f"processes: {sentence}", 1, first=tell)

    def _tell(self, kind: int, content: object) -> None:
        """Send a message to all reachable processes."""
        encoded = wire.encode(content)
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(kind, encoded)


def start(index: int, count: int, channels: dict[int, Channel]) -> Connections:
    """Start the connections of this process."""
    global _current
    _current = Connections(index, count, channels)
    return _current


def current() -> Connections | None:
    """Return the connections of this process; None if it runs alone."""
    return _current
