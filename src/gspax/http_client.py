"""JSON over HTTP with one server: every wait has an end, and connections are kept.

Standard library only. The errors say whether another attempt may succeed: a server that is `UnreachableError` may come
back, one that `RefusedError` has understood the request and will refuse it again.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from gspax.data.files import DEEPEST, parse_json
from gspax.errors import shorten

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
SMALL = 2**22  # bytes of an answer that holds no tokens
PIECE = 2**16
BUSY = (408, 425, 429)  # statuses below 500 after which another attempt may succeed


class UnreachableError(Exception):
    """No answer, or not a whole one: the server is gone, restarts, is overloaded, or is too slow."""

    pause: float = 0.0  # seconds that the server asks to wait before the next attempt


class BrokenError(UnreachableError):
    """HTTP 500: something has failed in the server, which may have ended with it."""


class RefusedError(Exception):
    """An answer with another status, a redirect included, or one that is not what was asked for."""


class Call(NamedTuple):
    """A request."""

    method: str
    path: str
    body: object
    most: int  # bytes of an answer that may be right


class Client:
    """The connections to one server, one for each thread that calls it.

    No redirect is followed: another server would get what this one was sent.

    Args:
      address: http://HOST:PORT or https://HOST:PORT; the port may be left out.
      timeout: seconds for one request, from the connection to the last byte of the answer.
      headers: of every request.
      proxy: http://HOST:PORT of a proxy that is asked in the server's place; empty: none.
    """

    def __init__(
        self, address: str, timeout: float, *, headers: Mapping[str, str] = NO_HEADERS, proxy: str = ""
    ) -> None:
        self.address, self.timeout = address.rstrip("/"), timeout
        self._parts, self._proxy = urlsplit(self.address), urlsplit(proxy)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        self._own = threading.local()
        self._all: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def get(self, path: str, *, timeout: float = 0) -> Any:
        """Request a path and return the parsed answer, within `timeout` seconds if it is not 0."""
        return self._call(Call("GET", path, None, SMALL), timeout)

    def post(
        self,
        path: str,
        body: object = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        timeout: float = 0,
        most: int = SMALL,
    ) -> Any:
        """Send a body and return the parsed answer, of at most `most` bytes; None for an empty one.

        It must come within `timeout` seconds, or if that is 0 within those of every request.

        Raises:
          UnreachableError, RefusedError: as above; the message names the address.
        """
        return self._call(Call("POST", path + (f"?{urlencode(query)}" if query else ""), body, most), timeout)

    def _call(self, call: Call, timeout: float) -> Any:
        limit = timeout or self.timeout
        end = time.monotonic() + limit
        for fresh in (False, True):  # a kept connection may have been closed by the server since its last answer
            connection = self._connection(fresh)
            kept = connection.sock is not None
            try:
                return self._exchange(connection, call, end)
            except (RefusedError, UnreachableError):
                self.release()
                raise
            except TimeoutError:
                self.release()
                raise UnreachableError(f"{self.address} gave no answer within {limit:g} seconds") from None
            except (OSError, http.client.HTTPException) as problem:
                self.release()
                if not kept:
                    cause = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
                    raise UnreachableError(
                        f"{self.address} is not reachable: {shorten(cause) or type(problem).__name__}"
                    ) from None
        raise AssertionError("the second attempt returns or raises")

    def _exchange(self, connection: http.client.HTTPConnection, call: Call, end: float) -> Any:
        where = f"{self.address}{call.path}"
        connection.timeout = _left(end)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        connection.response_class = _until(end)
        data = None if call.body is None else json.dumps(call.body).encode()
        is_forwarded = self._proxy.hostname is not None and self._parts.scheme == "http"
        connection.request(call.method, where if is_forwarded else call.path, data, self._headers)
        answer, pieces, size = connection.getresponse(), [], 0
        while piece := answer.read1(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size + (answer.length or 0) > call.most:  # what has come, and what is announced
                raise RefusedError(f"{where}: wanted an answer of at most {call.most} bytes, got more")
        text = b"".join(pieces)
        if answer.length:  # of what was announced and did not come
            raise http.client.IncompleteRead(text, answer.length)
        answer.close()  # else the connection cannot be used again
        if answer.status != 200:
            raise _refusal(where, answer, text)
        try:
            return parse_json(text) if text.strip() else None
        except ValueError:
            raise RefusedError(f"{where}: wanted JSON, at most {DEEPEST} levels deep, got {_start(text)}") from None

    def _connection(self, fresh: bool) -> http.client.HTTPConnection:
        connection = None if fresh else getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect()
            with self._lock:
                self._all.add(connection)
        return connection

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        through = self._proxy if self._proxy.hostname else self._parts
        connection = kind(through.hostname or "", through.port, timeout=self.timeout)
        if through is self._proxy and self._parts.scheme == "https":
            connection.set_tunnel(self._parts.hostname or "", self._parts.port)
        return connection

    def release(self) -> None:
        """Close the connection of this thread."""
        connection, self._own.connection = getattr(self._own, "connection", None), None
        if connection is not None:
            connection.close()
            with self._lock:
                self._all.discard(connection)

    def close(self) -> None:
        """Close all connections, also those on which other threads wait: they get an UnreachableError."""
        with self._lock:
            connections = list(self._all)  # they stay: one that has just been made may not be connected yet
        for connection in connections:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _refusal(where: str, answer: http.client.HTTPResponse, text: bytes) -> UnreachableError | RefusedError:
    """The error of an answer with another status than 200."""
    location = answer.headers.get("Location")
    redirect = f", a redirect to {shorten(location)}" if location else ""
    sentence = f"{where}: HTTP {answer.status}: {_start(text)}{redirect}"
    if answer.status < 500 and answer.status not in BUSY:
        return RefusedError(sentence)
    problem = BrokenError(sentence) if answer.status == 500 else UnreachableError(sentence)
    seconds = answer.headers.get("Retry-After", "")
    if seconds.isdecimal() and len(seconds) < 10:
        problem.pause = float(seconds)
    return problem


class _Timed(io.RawIOBase):
    """What a socket receives until a time, whatever it is read for: the status, headers, or the body."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end
        self._file = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._end))
        return self._file.readinto(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Make the file that `http.client` reads."""
        return io.BufferedReader(self)

    def close(self) -> None:
        self._file.close()
        super().close()


def _until(end: float) -> Any:
    """A class of answers that are read until then."""
    return lambda sock, **settings: http.client.HTTPResponse(_Timed(sock, end), **settings)  # type: ignore[arg-type]


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _start(text: bytes) -> str:
    """The reason in an answer, or its first characters."""
    with contextlib.suppress(ValueError, AttributeError):
        parsed: Any = parse_json(text)
        error = parsed.get("error", parsed.get("detail", parsed.get("message", parsed)))
        return shorten(str(error.get("message", error) if isinstance(error, dict) else error))
    return shorten(text[:1000].decode(errors="replace"))
