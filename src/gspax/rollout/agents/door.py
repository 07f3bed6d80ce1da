"""The endpoint of a rollout's agents on this machine: HTTP by starlette and uvicorn, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gspax.errors import FailureError, describe_error
from gspax.rollout.agents import openai
from gspax.rollout.agents.openai import Answered, Asked, Refusal
from gspax.types import JsonObject

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_BYTES = 2**26  # of a request
START = 30.0  # seconds in which the endpoint must be there


class Talks(Protocol):
    """What answers the requests of one key."""

    def ask(self, asked: Asked, *, again: bool = False) -> Future[Answered]:
        """Begin the answer to a request for one message or completion. Raises Refusal."""


@contextlib.contextmanager
def open_door(find: Callable[[str], Talks], model: str, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve the endpoint until the block ends; yield its address, http://HOST:PORT.

    Args:
      find: returns what answers the requests with a key. Raises Refusal if there is nothing.
      model: the only name that requests may have.
      host: the address that it listens at.
      port: 0 for any that is free.

    Raises:
      OSError: the port is taken.
      FailureError: the endpoint does not start.
    """
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    config = uvicorn.Config(
        make_app(find, model), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    http = uvicorn.Server(config)
    thread = threading.Thread(
        target=http.run, kwargs={"sockets": [listener]}, name="gspax-agents-endpoint", daemon=True
    )
    thread.start()
    until = time.monotonic() + START
    try:
        while not http.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise FailureError("environment: the endpoint of the agents did not start")
            time.sleep(0.002)
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(START)
        listener.close()


def make_app(find: Callable[[str], Talks], model: str) -> Starlette:
    """Make the application that answers requests."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def key_of(request: Request) -> str:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key if scheme.lower() == "bearer" else ""

    async def models(request: Request) -> Response:
        find(key_of(request))
        return JSONResponse(openai.models_body(model))

    async def chat(request: Request) -> Response:
        talks = find(key_of(request))
        asked = openai.read_chat(await _read_json(request), model)
        (answered,) = await _answer(talks, [asked], request)
        head = _head("chatcmpl", model)
        if asked.stream:
            return StreamingResponse(openai.chat_events(answered, head, counts=asked.counts), media_type=_EVENTS)
        return JSONResponse(openai.chat_body(answered, head))

    async def complete(request: Request) -> Response:
        talks = find(key_of(request))
        asked = openai.read_completion(await _read_json(request), model)
        each = [replace(asked, prompts=(prompt,)) for prompt in asked.prompts]
        answers, head = await _answer(talks, each, request), _head("cmpl", model)
        if asked.stream:
            return StreamingResponse(openai.completion_events(answers, head, counts=asked.counts), media_type=_EVENTS)
        return JSONResponse(openai.completion_body(answers, head))

    async def refuse(request: Request, problem: Exception) -> Response:
        known = problem if isinstance(problem, Refusal) else Refusal(describe_error(problem), status=500)
        return JSONResponse(known.body, status_code=known.status)

    async def gone(request: Request, problem: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def missing(request: Request, problem: Exception) -> Response:
        code = getattr(problem, "status_code", 404)
        wanted = "POST /v1/chat/completions, POST /v1/completions or GET /v1/models"
        path = f"{request.method} {request.url.path[:80]}"
        return JSONResponse(Refusal(f"wanted {wanted}, got {path}", status=code).body, status_code=code)

    routes = [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    handlers = {Refusal: refuse, ClientDisconnect: gone, 404: missing, 405: missing, 500: refuse}
    return Starlette(routes=routes, exception_handlers=handlers)


_EVENTS = "text/event-stream"


async def _read_json(request: Request) -> object:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise Refusal(f"wanted a request of at most {MOST_BYTES} bytes, got more", status=413)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as problem:
        raise Refusal(f"wanted a body in JSON, got something else: {str(problem)[:80]}") from None


async def _answer(talks: Talks, asked: Sequence[Asked], request: Request) -> list[Answered]:
    """Wait for the answers; encoding a request may take a while, so it has a thread."""
    again = request.headers.get("x-stainless-retry-count", "0") != "0"  # of OpenAI's own clients
    begun = [await asyncio.to_thread(talks.ask, one, again=again) for one in asked]
    return [await asyncio.wrap_future(future) for future in begun]


def _head(kind: str, model: str) -> JsonObject:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
