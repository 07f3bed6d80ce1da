"""Asks a reward model or a judge by HTTP.

    reward=partial(http.reward, url="http://10.0.0.2:8000/score")

One POST of JSON for each completion, up to 16 at a time (`grading.concurrency`). Attempts that may succeed later are
repeated; then the completion counts as failed (`gspax.rewards.calls`).
"""

from __future__ import annotations

import inspect
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gspax.config.functions import title_of
from gspax.config.ranges import Positive, PositiveInt
from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.http_client import Client, RefusedError, UnreachableError
from gspax.rewards.calls import concurrent, needs

_PAUSE = 0.5  # seconds before the second attempt, give or take a half
_LONGEST_PAUSE = 30.0  # seconds, whatever Retry-After says
_LARGEST = 2**20  # bytes of a response


def to_request(problem: Problem, completion: str) -> dict[str, object]:
    """Build the default body of a request: `{"prompt", "answer", "completion", "task", "metadata"}`."""
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "completion": completion,
        "task": problem.task,
        "metadata": json.loads(json.dumps(dict(problem.metadata), default=str)),
    }


def from_response(response: object) -> float | tuple[float, ...]:
    """Return the number `reward`, or the list `rewards`, of a response. ValueError if it has neither."""
    match response:
        case {"reward": int() | float() as reward}:
            return float(reward)
        case {"rewards": list() as rewards}:
            return tuple(rewards)
    raise ValueError(f"wanted a JSON object with the number reward or the list rewards, got {str(response)[:200]}")


def find_mistake(settings: Mapping[str, Any]) -> str:
    """Explain what prevents asking a server with these keywords; empty if nothing."""
    url, variable, attempts = (settings[name] for name in ("url", "token_variable", "attempts"))
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_usable = is_usable and url.isprintable() and " " not in url
    except (ValueError, TypeError, AttributeError):  # no text, or a broken address or port
        is_usable = False
    if not is_usable:
        return f"url: wanted a URL of http or https, got {url!r}"
    if parts.username is not None:  # it is not shown: it may hold a password
        return "url: wanted none with a user name, which would not be sent; token_variable names a token that is"
    for name, count in (("request", 2), ("response", 1)):
        try:
            inspect.signature(settings[name]).bind(*range(count))
        except TypeError as error:
            return f"{name}: wanted a function of {count} arguments, got {title_of(settings[name])}: {error}"
        except ValueError:  # a built-in function without a signature
            continue
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
    timeout: Positive = 10.0,
    attempts: PositiveInt = 4,
) -> float | tuple[float, ...]:
    """Ask a server for the reward of a completion.

    All attempts and the pauses between them should fit into `grading.timeout`; with the defaults they take up to 44 s.

    Args:
      problem: passed to `request`.
      completion: passed to `request`.
      url: an http or https URL. It is part of the run's description, so it should contain no secret.
      request: makes the body of the request, any value that JSON can represent.
      response: extracts the reward, or several, from the parsed body of the response.
      token_variable: an environment variable whose value is sent as `Authorization: Bearer`.
      timeout: seconds for one attempt.
      attempts: the number of attempts if there is no connection, no complete answer, or a status of 500 and above or of
        `http_client.BUSY`. The pause after the first is about half a second and doubles each time; a server may ask for
        more by `Retry-After`.

    Raises:
      UserError: the URL is not http or https, or the environment variable is not set.
      RuntimeError: the server cannot be reached, refuses the request or redirects it; with its status and the start of
        its answer.
    """
    given = {"url": url, "token_variable": token_variable, "attempts": attempts}
    if mistake := find_mistake({**given, "request": request, "response": response}):
        raise UserError(f"reward.{mistake}")
    target, sent = urlsplit(url), request(problem, completion)
    headers = {} if token_variable is None else {"Authorization": f"Bearer {os.environ[token_variable]}"}
    client = Client(f"{target.scheme}://{target.netloc}", timeout, headers=headers, proxy=_find_proxy(url))
    path, failure = urlunsplit(("", "", target.path or "/", target.query, "")), UnreachableError()
    try:
        for attempt in range(attempts):
            if attempt:
                pause = _PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                time.sleep(min(_LONGEST_PAUSE, max(pause, failure.pause)))
            try:
                answer = client.post(path, sent, most=_LARGEST)
            except UnreachableError as unreachable:
                failure = unreachable
            except RefusedError as refusal:
                raise RuntimeError(str(refusal)) from None
            else:
                return response(answer)
        raise RuntimeError(f"{url}: no answer in {attempts} attempts; the last one: {failure}")
    finally:
        client.release()


def _find_proxy(url: str) -> str:
    """Return the proxy of the environment (`https_proxy`, `no_proxy`) for a URL; empty if there is none."""
    target = urlsplit(url)
    if urllib.request.proxy_bypass(target.hostname or ""):
        return ""
    return urllib.request.getproxies().get(target.scheme, "")
