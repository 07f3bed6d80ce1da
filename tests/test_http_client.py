"""The HTTP of reward services and of servers that sample: every fault is one sentence, and ends in time."""

import threading
import time
from http.server import BaseHTTPRequestHandler

import local_server
import pytest
from api import BrokenError, Client, RefusedError, UnreachableError


class Scripted(BaseHTTPRequestHandler):
    """Answers with (status, text, headers) of `server.answers` in turn; `server.seen` has (client, line, headers)."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.client_address, self.requestline, dict(self.headers)))
        status, text, *headers = self.server.answers[min(len(self.server.seen), len(self.server.answers)) - 1]
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(text)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)
        self.close_connection = ("Connection", "quietly") in headers  # the client is not told

    do_GET = do_CONNECT = do_POST

    def log_message(self, *arguments):
        pass


def serve(*answers):
    return local_server.serve(Scripted, answers=answers, seen=[])


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(status, RefusedError) for status in (400, 401, 404, 422, 201, 204)],
        *[(status, UnreachableError) for status in (408, 425, 429, 502, 503, 504)],
        (500, BrokenError),
    ],
)
def test_a_status_says_whether_another_attempt_may_succeed(status, kind):
    body = b"" if status == 204 else b'{"error": {"message": "no such\\nmodel"}}'
    with serve((status, body, ("Retry-After", "7"))) as server, pytest.raises(Exception, match="HTTP") as problem:
        Client(address(server), 5.0).post("/score", {})
    assert type(problem.value) is kind
    said = "" if status == 204 else "no such model"
    assert str(problem.value) == f"{address(server)}/score: HTTP {status}: {said}"
    assert kind is RefusedError or problem.value.pause == 7


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(status):
    """Another server would get the token, and a GET without the body: what it answers counts for nothing."""
    with serve((200, b"1")) as other, serve((status, b"moved", ("Location", address(other)))) as server:
        client = Client(address(server), 5.0, headers={"Authorization": "Bearer s3cret"})
        with pytest.raises(RefusedError, match=rf"/score: HTTP {status}: moved, a redirect to {address(other)}$"):
            client.post("/score", {})
        assert len(server.seen) == 1 and not other.seen
        assert server.seen[0][2]["Authorization"] == "Bearer s3cret"


def test_a_connection_is_kept_and_a_closed_one_is_opened_again():
    with serve((200, b"1"), (200, b"2", ("Connection", "quietly")), (200, b"3")) as server:
        client = Client(address(server), 5.0)
        assert [client.post("/x"), client.get("/y"), client.post("/x")] == [1, 2, 3]
        clients, lines, _ = zip(*server.seen, strict=True)
        assert clients[0] == clients[1] != clients[2]
        assert [line.split()[0] for line in lines] == ["POST", "GET", "POST"]


def test_closing_ends_the_requests_of_other_threads():
    ended, found = threading.Event(), []

    def ask(client):
        with pytest.raises(UnreachableError, match="is not reachable"):
            client.post("/x", {})
        found.append(True)

    with local_server.serve(Raw, parts=[20.0], ended=ended) as server:
        client = Client(address(server), 30.0)
        thread = threading.Thread(target=ask, args=(client,))
        thread.start()
        while thread.is_alive():
            client.close()
            thread.join(0.01)
        ended.set()
    assert found


def test_a_proxy_is_asked_in_the_place_of_the_server():
    with serve((200, b"1"), (403, b"")) as proxy:
        assert Client("http://far.test:8000", 5.0, proxy=address(proxy)).post("/score?a=b", {}) == 1
        with pytest.raises(UnreachableError, match=r"https://far\.test is not reachable: .*403"):
            Client("https://far.test", 5.0, proxy=address(proxy)).post("/score", {})
        lines = [line for _, line, _ in proxy.seen]
    assert lines == ["POST http://far.test:8000/score?a=b HTTP/1.1", "CONNECT far.test:443 HTTP/1.0"]


class Raw(BaseHTTPRequestHandler):
    """Answers with the bytes of `server.parts`, one after the other; a number is a pause."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for part in self.server.parts:
            if self.server.ended.wait(part if isinstance(part, float) else 0):
                return
            self.wfile.write(b"" if isinstance(part, float) else part)

    def log_message(self, *arguments):
        pass


def whole(body, length=None):
    return [f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode(), body]


DEEP = [b"[" * 10**5 + b"]" * 10**5, b'{"a":' * 10**4 + b"1" + b"}" * 10**4, b"[" * 500 + b"]" * 500, b"[" * 10**6]
HOSTILE = {
    **{f"deep {number}": (whole(body), "wanted JSON, at most 64 levels deep") for number, body in enumerate(DEEP)},
    "giant": (whole(b" ", 2**40), "wanted an answer of at most"),
    "giant chunks": (
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 9],
        "wanted an answer of at most",
    ),
    "broken off": (whole(b'{"choices": [', 100), "is not reachable"),
    "slow headers": ([b"HTTP/1.1 200 OK\r\n", *[b"A: b\r\n", 0.1] * 60], "gave no answer within 1 seconds"),
    "continue": ([b"HTTP/1.1 100 Continue\r\n\r\n", 0.01] * 600, "gave no answer within 1 seconds"),
    "a long number": (whole(b'{"choices": ' + b"9" * 10**4 + b"}"), "wanted JSON"),
    "no http": ([b"\x00\xff\r\n\r\n"], "is not reachable"),
    "a deep refusal": (
        [b"HTTP/1.1 400 Bad\r\nContent-Length: 200000\r\n\r\n", DEEP[0]],
        "HTTP 400: [[[",
    ),
    "escapes": (
        [b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\n", b"\x1b[31mred\x07"],
        r"HTTP 400: \x1b[31mred",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_on_the_wire(name):
    parts, words = HOSTILE[name]
    began, ended = time.monotonic(), threading.Event()
    with local_server.serve(Raw, parts=parts, ended=ended) as server:
        one = Client(f"http://127.0.0.1:{server.server_port}", 1.0)
        with pytest.raises((RefusedError, UnreachableError)) as problem:
            one.post("/score", {})
        ended.set()
    sentence = str(problem.value)
    assert words in sentence and sentence.isprintable() and len(sentence) < 700, sentence
    assert time.monotonic() - began < 20
