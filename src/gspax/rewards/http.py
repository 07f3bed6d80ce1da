"""A reward model or a judge behind HTTP.

    reward=partial(http.reward, url="http://10.0.0.2:8000/score")

One POST of JSON for each completion, up to 16 at a time (`grading.concurrency`). Attempts that may succeed later are
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
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from gspax.data.files import parse_json
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import concurrent, needs

REPEATED = (408, 425, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
_PAUSE = 0.5  # seconds before the second attempt, give or take a half
_LONGEST_PAUSE = 30.0  # seconds, whatever Retry-After says
_LARGEST = 2**20  # bytes of a response


def to_request(problem: Problem, completion: str) -> dict[str, object]:
    """`{"prompt", "answer", "completion", "task", "metadata"}`: the default body of a request."""
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "completion": completion,
        "task": problem.task,
        "metadata": dict(problem.metadata),
    }


def from_response(response: object) -> float | tuple[float, ...]:
    """The number `reward`, or the list `rewards`, of a response. ValueError if it has neither."""
    match response:
        case {"reward": int() | float() as reward}:
            return float(reward)
        case {"rewards": list() as rewards}:
            return tuple(rewards)
    raise ValueError(f"wanted a JSON object with the number reward or the list rewards, got {str(response)[:200]}")


def find_mistake(settings: Mapping[str, Any]) -> str:
    """What keeps these keywords from asking a server; empty if nothing."""
    url, variable, attempts = (settings[name] for name in ("url", "token_variable", "attempts"))
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except (ValueError, TypeError, AttributeError):  # no text, or a broken address
        is_usable = False
    if not is_usable:
        return f"url: wanted a URL of http or https, got {url!r}"
    if variable is not None and variable not in os.environ:
        return f"token_variable: wanted the environment variable {variable}, it is not set"
    return "" if attempts >= 1 else f"attempts: wanted at least 1, got {attempts}"


@needs(find_mistake)
@concurrent(16)
def reward(
    problem: Problem,
    completion: str,
    *,
    url: str,
    request: Callable[[Problem, str], object] = to_request,
    response: Callable[[Any], float | tuple[float, ...]] = from_response,
    token_variable: str | None = None,
    timeout: float = 10.0,
    attempts: int = 4,
) -> float | tuple[float, ...]:
    """The reward that a server gives for a completion.

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
    if mistake := find_mistake({"url": url, "token_variable": token_variable, "attempts": attempts}):
        raise UserError(f"reward.{mistake}")
    post = _make_request(url, request(problem, completion), token_variable)
    reason, asked = "", 0.0
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(_LONGEST_PAUSE, max(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5), asked)))
        try:
            with _open(post, timeout=timeout) as answer:
                text = answer.read(_LARGEST + 1)
                if len(text) <= _LARGEST and answer.length:  # of what was announced and did not come
                    raise http.client.IncompleteRead(text, answer.length)
        except urllib.error.HTTPError as error:
            reason = _describe_refusal(error)
            if error.code not in REPEATED:
                raise RuntimeError(f"{url}: {reason}") from None
            seconds = error.headers.get("Retry-After", "")
            asked = float(seconds) if seconds.isdecimal() else 0.0
        except (OSError, http.client.HTTPException) as error:  # no connection, time-out, an incomplete answer
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason, asked = f"{type(cause).__name__}: {cause}", 0.0
        else:
            return response(_parse(url, text))
    raise RuntimeError(f"{url}: no answer in {attempts} attempts; the last one: {reason}")


def _make_request(url: str, body: object, token_variable: str | None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token_variable is not None:
        headers["Authorization"] = f"Bearer {os.environ[token_variable]}"
    return urllib.request.Request(url, json.dumps(body).encode(), headers)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another server would get the token, and a GET without the completion."""

    def redirect_request(self, *arguments: object) -> None:
        return None


_open = urllib.request.build_opener(_NoRedirects).open


def _parse(url: str, text: bytes) -> object:
    if len(text) > _LARGEST:
        raise RuntimeError(f"{url}: wanted an answer of at most {_LARGEST} bytes, got more")
    try:
        return parse_json(text)
    except ValueError:
        raise RuntimeError(f"{url}: wanted JSON, got {_start(text)}") from None


def _describe_refusal(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(_LARGEST)
    except (OSError, http.client.HTTPException):
        text = b""
    location = error.headers.get("Location")
    redirect = f", a redirect to {location[:200]!r}" if location else ""
    return f"HTTP {error.code} {error.reason}: {_start(text)}{redirect}"


def _start(text: bytes) -> str:
    return repr(" ".join(text[:1000].decode(errors="replace").split())[:200])
