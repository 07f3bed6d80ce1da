"""Rewards from an HTTP service, tested against a server on loopback."""

import datetime
import itertools
import json
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler

import local_server
import pytest

from gspax.config import Grading
from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import http
from gspax.rewards.scores import reward_calls

PROBLEM = Problem("2+2=", "4", task="sums", metadata={"level": 1})
GOOD = (200, b'{"reward": 0.5}')


@contextmanager
def serve(*answers):
    """A server that gives these answers in turn and then repeats the last; `seen` holds the requests."""
    seen, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            with lock:
                answer = answers[min(len(seen), len(answers) - 1)]
                seen.append((time.monotonic(), dict(self.headers), body))
            if callable(answer):
                answer = answer(self, body)
            if answer is None:
                return
            status, text, *headers = answer
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    with local_server.serve(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}/score", seen


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(http, "_PAUSE", 0.01)


def ask(url, **settings):
    return http.reward(PROBLEM, "four", url=url, **{"timeout": 5.0} | settings)


def test_a_request_contains_the_problem_and_the_completion():
    with serve(GOOD) as (url, seen):
        assert ask(url) == 0.5
    ((_, headers, body),) = seen
    assert body == {
        "prompt": "2+2=",
        "answer": "4",
        "completion": "four",
        "task": "sums",
        "metadata": {"level": 1},
    }
    assert headers["Content-Type"] == "application/json" and "Authorization" not in headers


def test_metadata_that_is_no_json_is_sent_as_text():
    problem = Problem("1=", "1", metadata={"day": datetime.date(2026, 1, 2), "level": 3})
    assert http.to_request(problem, "1")["metadata"] == {"day": "2026-01-02", "level": 3}


def test_a_service_may_return_several_rewards():
    with serve((200, b'{"rewards": [1, 0.5]}')) as (url, _):
        assert ask(url) == (1, 0.5)


def test_a_service_with_another_schema(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")

    def request(problem, completion):
        return {"messages": [{"role": "user", "content": f"{problem.prompt}{completion}"}]}

    def response(answer):
        return float(answer["choices"][0]["message"]["content"])

    judge = partial(http.reward, request=request, response=response, token_variable="JUDGE_TOKEN")
    with serve((200, b'{"choices": [{"message": {"content": "0.25"}}]}')) as (url, seen):
        assert judge(PROBLEM, "four", url=url) == 0.25
    ((_, headers, body),) = seen
    assert headers["Authorization"] == "Bearer s3cret"
    assert body == {"messages": [{"role": "user", "content": "2+2=four"}]}
    assert "s3cret" not in json.dumps(describe(judge))


def drop(handler, body):
    handler.connection.close()
    handler.close_connection = True


def break_off(handler, body):
    """Announce more than is sent; what comes is JSON, too."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 20\r\n\r\n" + b'{"reward": 12}')
    drop(handler, body)


TRANSIENT = {"broken off": break_off, "429": (429, b"slow down"), "500": (500, b""), "dropped": drop}


@pytest.mark.parametrize("first", TRANSIENT.values(), ids=TRANSIENT)
def test_transient_errors_are_retried(first):
    with serve(first, first, GOOD) as (url, seen):
        assert ask(url) == 0.5
    assert len(seen) == 3


def test_retries_back_off_and_honor_retry_after(monkeypatch):
    monkeypatch.setattr(http, "_PAUSE", 0.1)
    with serve((503, b""), (503, b""), (503, b"", ("Retry-After", "1")), GOOD) as (url, seen):
        assert ask(url) == 0.5
    pauses = [later[0] - earlier[0] for earlier, later in itertools.pairwise(seen)]
    assert pauses[0] >= 0.05 and pauses[1] >= 0.1 and 1.0 <= pauses[2] < 10


@pytest.mark.parametrize(
    ("answer", "sentence", "requests"),
    [
        ((404, b"no such\nmodel"), r"/score: HTTP 404: no such model$", 1),
        ((302, b"", ("Location", "http://127.0.0.1:9/")), r"HTTP 302: , a redirect to http://127.0.0.1:9/$", 1),
        ((200, b"<html>"), r"wanted JSON, at most 64 levels deep, got <html>$", 1),
        ((200, b'{"score": 1}'), r"wanted a JSON object with the number reward or the list rewards", 1),
        ((503, b"busy"), r"no answer in 3 attempts; the last one: \S+/score: HTTP 503: busy$", 3),
        ((200, b"x" * (2**20 + 1)), "at most 1048576 bytes, got more", 1),
    ],
)
def test_permanent_errors_are_one_line(answer, sentence, requests):
    with serve(answer) as (url, seen), pytest.raises((RuntimeError, ValueError), match=sentence):
        ask(url, attempts=3)
    assert len(seen) == requests


def test_a_server_that_hangs_or_does_not_exist():
    with serve(lambda handler, body: time.sleep(2) or GOOD) as (url, seen):
        with pytest.raises(
            RuntimeError, match=r"no answer in 2 attempts; the last one: \S+ gave no answer within 0.1 seconds"
        ):
            ask(url, timeout=0.1, attempts=2)
        assert len(seen) == 2
    with pytest.raises(RuntimeError, match=r"the last one: http://127.0.0.1:\d+ is not reachable: Connection refused"):
        ask(url, attempts=2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"url": "http://127.0.0.1:port/"},
            r"reward\.url: wanted a URL of http or https, got 'http://127.0.0.1:port/'",
        ),
        ({"url": "file:///etc/passwd"}, r"reward\.url: wanted a URL of http or https, got 'file:///etc/passwd'"),
        ({"token_variable": "NOT_SET_ANYWHERE"}, "wanted the environment variable NOT_SET_ANYWHERE, it is not set"),
        ({"attempts": 0}, r"reward\.attempts: wanted at least 1, got 0"),
    ],
)
def test_invalid_settings_are_rejected(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ask(**{"url": "http://127.0.0.1:9/"} | settings)


@pytest.mark.parametrize(("concurrency", "most"), [(0, 16), (4, 4)])
def test_concurrent_requests_are_limited_and_a_failure_affects_one_completion(concurrency, most):
    lock, now, seen, full = threading.Lock(), [0], [0], threading.Event()

    def slow(handler, body):
        with lock:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
            if now[0] == most:
                full.set()
        full.wait(5)  # until as many as there may be are here
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return (400, b"too long") if body["completion"] == "7" else GOOD

    with serve(slow) as (url, _):
        reward = partial(http.reward, url=url)
        with reward_calls(reward, Grading(concurrency=concurrency)) as calls:
            futures = calls.submit([PROBLEM] * 32, [str(each) for each in range(32)])
            found = [future.result(timeout=30) for future in futures]
    assert seen[0] == most
    assert [each.rewards for each in found] == [() if each == 7 else (0.5,) for each in range(32)]
    assert found[7].error == f"RuntimeError: {url}: HTTP 400: too long"
