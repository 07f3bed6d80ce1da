"""An authenticated connection between two processes of a run.

Both ends hold the run's secret. Each sends a nonce, then a proof: an HMAC-SHA256, keyed by the secret, of its role
and both nonces, so the secret never travels and nothing recorded earlier is of use. Every message after that
carries an HMAC under the connection's own key, which covers its direction, number, kind and content. Contents are
not encrypted.

Everything that is read has a size limit, and all of it until the run begins a deadline for the whole exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time

from gspax.distributed.wire import MessageError

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
    """The other end has another secret."""


class Channel:
    """Messages of a kind (0 to 255) and bytes, in order. One thread may receive while others send."""

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

    def receive(self, limit: int, deadline: float | None = None) -> tuple[int, bytes]:
        """The next message.

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
        """From now on block until something arrives. Call before threads share the channel."""
        self.connection.settimeout(None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def accept(connection: socket.socket, secret: bytes) -> Channel:
    """The server's side of the handshake.

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
    """The client's side; raises as `accept`."""
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


def receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    """So many bytes. OSError if the connection ends first, or `deadline` passes."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it was too slow")
            connection.settimeout(left)
        received = connection.recv(min(size - len(data), READ))
        if not received:
            raise ConnectionError("it closed the connection")
        data += received
    return bytes(data)


def _receive_nonce(connection: socket.socket, deadline: float) -> bytes:
    found = receive_exactly(connection, len(MAGIC) + NONCE, deadline)
    if not found.startswith(MAGIC):
        raise MessageError("it is no process of this version of gspax")
    return found[len(MAGIC) :]


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256. All parts but the last have a fixed length, so the boundaries between them are unambiguous."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()
