"""A reward model or a judge behind HTTP.

    reward=partial(http.reward, url="http://10.0.0.2:8000/score")

One POST of JSON for each completion, up to 16 at one time (`grading.concurrency`). Attempts that may succeed later are
repeated; then the completion counts as failed (`gspax.rewards.calls`).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import concurrent

REPEATED = (408, 425, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
_PAUSE = 0.5  # seconds before the second attempt, give or take a half
_LONGEST_PAUSE = 30.0  # seconds, whatever Retry-After says
_LARGEST = 2**20  # bytes of a response


def to_request(problem: Problem, completion: str) -> Any:
    """`{"prompt", "answer", "completion", "task", "metadata"}`: the default body of a request."""
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "completion": completion,
        "task": problem.task,
        "metadata": dict(problem.metadata),
    }


def from_response(response: Any) -> float | tuple[float, ...]:
    """The number `reward`, or the list `rewards`, of a response. ValueError if it has neither."""
    if isinstance(response, dict):
        if isinstance(response.get("reward"), int | float):
            return float(response["reward"])
        if isinstance(response.get("rewards"), list):
            return tuple(response["rewards"])
    raise ValueError(f"wanted a JSON object with the number reward or the list rewards, got {str(response)[:200]}")


@concurrent(16)
def reward(
    problem: Problem,
    completion: str,
    *,
    url: str,
    request: Callable[[Problem, str], Any] = to_request,
    response: Callable[[Any], float | tuple[float, ...]] = from_response,
    token_variable: str | None = None,
    timeout: float = 10.0,
    attempts: int = 4,
) -> float | tuple[float, ...]:
    """What a server gives for a completion.

    All attempts and the pauses between them should fit into `grading.timeout`; with the defaults they take up to 44 s.

    Args:
      problem: for `request`.
      completion: for `request`.
      url: of http or https. It is part of the run's description, so it should hold no secret.
      request: makes the body of the request, anything that JSON can hold.
      response: takes the reward, or several, from the parsed body of the response.
      token_variable: an environment variable whose value is sent as `Authorization: Bearer`.
      timeout: seconds for the connection, and for each wait for data.
      attempts: the number of attempts if there is no connection, no complete answer, or a status of `REPEATED`. The
        pause after the first is about half a second and doubles each time; a server may ask for more by `Retry-After`.

    Raises:
      UserError: the URL is of another kind, or the environment variable is not set.
      RuntimeError: the server cannot be reached, refuses the request or redirects it; with its status and the start of
        its answer.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"reward.url: wanted a URL of http or https, got {url!r}")
    body = json.dumps(request(problem, completion)).encode()
    for attempt in range(1, attempts + 1):
        try:
            return response(_post(url, body, token_variable, timeout))
        except _UnavailableError as failure:
            if attempt == attempts:
                raise RuntimeError(f"{url}: no answer in {attempts} attempts; the last one: {failure}") from None
            pause = _PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            time.sleep(min(_LONGEST_PAUSE, max(pause, failure.pause)))
    raise UserError(f"reward.attempts: wanted at least 1, got {attempts}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another server would get the token, and a GET without the completion."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_open = urllib.request.build_opener(_NoRedirects).open


class _UnavailableError(Exception):
    """An attempt that failed and may be repeated, after `pause` seconds at least."""

    pause = 0.0


def _post(url: str, body: bytes, token_variable: str | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token_variable is not None:
        if token_variable not in os.environ:
            raise UserError(f"reward.token_variable: wanted the environment variable {token_variable}, it is not set")
        headers["Authorization"] = f"Bearer {os.environ[token_variable]}"
    try:
        with _open(urllib.request.Request(url, body, headers), timeout=timeout) as answer:
            text = answer.read(_LARGEST + 1)
    except urllib.error.HTTPError as problem:
        raise _refusal(url, problem) from None
    except (OSError, http.client.HTTPException) as problem:  # no connection, time-out, an incomplete answer
        reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
        raise _UnavailableError(f"{type(reason).__name__}: {reason}") from problem
    if len(text) > _LARGEST:
        raise RuntimeError(f"{url}: wanted an answer of at most {_LARGEST} bytes, got more")
    try:
        return json.loads(text)
    except ValueError:
        raise RuntimeError(f"{url}: wanted JSON, got {_start(text)}") from None


def _refusal(url: str, problem: urllib.error.HTTPError) -> Exception:
    try:
        text = problem.read(_LARGEST)
    except (OSError, http.client.HTTPException):
        text = b""
    sentence = f"HTTP {problem.code} {problem.reason}: {_start(text)}"
    if location := problem.headers.get("Location"):
        sentence += f", a redirect to {location[:200]!r}"
    if problem.code not in REPEATED:
        return RuntimeError(f"{url}: {sentence}")
    unavailable = _UnavailableError(sentence)
    asked = problem.headers.get("Retry-After", "")
    unavailable.pause = float(asked) if asked.isdecimal() else 0.0
    return unavailable


def _start(text: bytes) -> str:
    return repr(" ".join(text[:1000].decode(errors="replace").split())[:200])
