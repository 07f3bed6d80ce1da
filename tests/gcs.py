"""A bucket of Google Cloud Storage on the loopback: the requests of its JSON API that tensorstore's driver sends.

    with gcs.serve("bucket") as server:
        os.environ.update(server.env)
        train(experiment, to_path("gs://bucket/run"))

As a program, `python tests/gcs.py BUCKET`, it serves a bucket at port 9023 until it is interrupted.

Objects are in memory, and every write gives an object a new generation, on which `ifGenerationMatch` is decided under a
lock. `faults` is asked before a request is answered and may return what to do instead of answering it.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import local_server

UPLOAD, OBJECTS = r"/upload/storage/v1/b/([^/]+)/o", r"/storage/v1/b/([^/]+)/o(?:/(.+))?"
PAGE = 1000  # names of a page of a listing, as Google has them


class Request(NamedTuple):
    """The request of a client: GET (an object), LIST, PUT or DELETE, and the object's name or the listed prefix."""

    method: str
    bucket: str
    name: str


class Status(NamedTuple):
    """An answer with only a code, such as 503."""

    code: int


class Slow(NamedTuple):
    """The right answer after some seconds."""

    seconds: float


# A connection is reset in the middle of a request, in the middle of its answer, or before its answer
RESET, TRUNCATED, RESET_AFTER = "reset", "truncated", "reset after"
Fault = Status | Slow | str | None


class Server:
    """The buckets of a server, `name -> object name -> (content, generation)`, and the requests that it has had."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, tuple[bytes, int]]] = {bucket: {} for bucket in buckets}
        self.requests: list[Request] = []
        self.faults: Callable[[Request], Fault] = lambda request: None
        self.lock, self.generation, self.url = threading.Lock(), 1_700_000_000_000_000, ""
        self.refuses_ranges = True  # that begin after the end of an object; gcp-storage-emulator answers with nothing

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that finds this server instead of Google's."""
        return {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def copy_to(self, bucket: str, prefix: str, folder: Path) -> None:
        """Copy the objects below a prefix to files, as `gcloud storage cp` does."""
        for name in self.names(bucket, f"{prefix}/"):
            path = folder / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.buckets[bucket][name][0])

    def copy_from(self, folder: Path, bucket: str, prefix: str) -> None:
        """Copy the files of a folder to objects below a prefix."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.generation += 1
            name = f"{prefix}/{path.relative_to(folder).as_posix()}"
            self.buckets[bucket][name] = path.read_bytes(), self.generation

    def count(self) -> Counter[str]:
        """How many requests of each method there were."""
        return Counter(request.method for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, 2**16

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        store, url = self.server.store, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        length = int(self.headers.get("Content-Length", 0))
        upload, objects = re.fullmatch(UPLOAD, url.path), re.fullmatch(OBJECTS, url.path)
        match = upload or objects
        if match is None:
            return self._send(400, b"")
        name = query.get("name", "") if upload else unquote(match[2] or query.get("startOffset", ""))
        method = "PUT" if upload else "DELETE" if self.command == "DELETE" else "GET" if match[2] else "LIST"
        request = Request(method, match[1], name)
        with store.lock:
            store.requests.append(request)
            fault = store.faults(request)
        if isinstance(fault, Slow):
            time.sleep(fault.seconds)
        if isinstance(fault, Status):
            self.rfile.read(length)
            return self._send(fault.code, json.dumps({"error": {"code": fault.code, "message": "a fault"}}).encode())
        body = self.rfile.read(length // 2 if fault == RESET else length)
        if fault == RESET or len(body) < length:  # the client may be killed while it sends
            return self._reset()
        with store.lock:
            code, content, generation = _carry_out(store, request, query, body)
        if request.method == "GET" and code == 200 and query.get("alt") != "media":
            content = json.dumps({"name": name, "generation": str(generation), "size": str(len(content))}).encode()
        if fault == RESET_AFTER:
            return self._reset()
        self._send_object(code, content, generation, is_truncated=fault == TRUNCATED)

    def _send_object(self, code: int, content: bytes, generation: int, *, is_truncated: bool) -> None:
        headers = {"x-goog-generation": str(generation)} if generation else {}
        if code == 200 and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            if first >= len(content) and self.server.store.refuses_ranges:
                return self._send(416, b"")
            code, whole, content = 206, len(content), content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{whole}"
        if is_truncated:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content) + 1))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return self._reset()
        return self._send(code, content, headers)

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _carry_out(store: Server, request: Request, query: dict[str, str], body: bytes) -> tuple[int, bytes, int]:
    """The code, the content and the generation that answer a request."""
    objects = store.buckets.get(request.bucket)
    if objects is None:
        return 404, b'{"error": {"code": 404, "message": "The specified bucket does not exist."}}', 0
    if request.method == "LIST":
        return 200, json.dumps(_list(objects, query)).encode(), 0
    content, generation = objects.get(request.name, (b"", 0))
    if int(query.get("ifGenerationMatch", generation)) != generation:
        return 412, b"", 0
    if int(query.get("ifGenerationNotMatch", -1)) == generation:
        return 304, b"", 0
    if request.method == "PUT":
        store.generation += 1
        objects[request.name] = body, store.generation
        return 200, json.dumps({"name": request.name, "generation": str(store.generation)}).encode(), 0
    if generation == 0:
        return 404, b"", 0
    if request.method == "DELETE":
        del objects[request.name]
        return 204, b"", 0
    return 200, content, generation


def _list(objects: dict[str, tuple[bytes, int]], query: dict[str, str]) -> dict[str, object]:
    first, end = max(query.get("startOffset", ""), query.get("pageToken", "")), query.get("endOffset")
    names = sorted(
        name
        for name in objects
        if name.startswith(query.get("prefix", "")) and name >= first and (not end or name < end)
    )
    page, rest = names[:PAGE], names[PAGE:]
    answer: dict[str, object] = {"kind": "storage#objects"}
    if page:
        answer["items"] = [
            {"name": name, "generation": str(objects[name][1]), "size": str(len(objects[name][0]))} for name in page
        ]
    return answer | ({"nextPageToken": rest[0]} if rest else {})


@contextlib.contextmanager
def serve(*buckets: str, port: int = 0) -> Iterator[Server]:
    """A server with these buckets until the block ends, on a free port."""
    store = Server(*buckets)
    with local_server.serve(_Handler, port, store=store) as http:
        store.url = f"http://127.0.0.1:{http.server_port}"
        yield store


if __name__ == "__main__":
    with serve(sys.argv[1], port=9023), contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
