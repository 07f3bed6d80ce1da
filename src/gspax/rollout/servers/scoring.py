"""A teacher behind HTTP: its log-probs of sampled tokens, for `Teacher.score`.

    teacher=Teacher(score=partial(scoring.score, addresses=("http://10.0.0.3:8000",)))

The servers have the teacher's weights and are started by their usual commands, `vllm serve NAME` or
`python3 -m sglang.launch_server --model-path NAME`; nothing is pushed to them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import numpy as np

from gspax.errors import FailureError, warn
from gspax.http_client import RefusedError, UnreachableError
from gspax.model.presets import tiny_moe
from gspax.parallel import watchdog
from gspax.rollout.servers.failover import PAUSE
from gspax.rollout.servers.server import Server
from gspax.rollout.servers.sglang import SGLang
from gspax.rollout.servers.vllm import VLLM
from gspax.run import interrupt


def score(
    sequences: Sequence[Sequence[int]],
    *,
    addresses: tuple[str, ...],
    server: Literal["vllm", "sglang"] = "vllm",
    requests: int = 32,
    timeout: float = 600.0,
) -> list[np.ndarray]:
    """Return the log-probs of the tokens after the first of each sequence, float32, at temperature 1.

    A request that gets no answer is sent to the next server.

    Args:
      sequences: token ids, at least two of each.
      addresses: of servers with the teacher's weights, http://HOST:PORT.
      server: the program that runs at all of them.
      requests: at one time, to all servers together.
      timeout: seconds for one answer, and for servers that are gone to come back.

    Raises:
      UserError: an address is none.
      FailureError: no server answers in time, or one has refused a request.
    """
    kind = partial(VLLM, name=None) if server == "vllm" else SGLang
    servers = [kind(address, tiny_moe, timeout) for address in addresses]  # no server is asked for a model's experts
    first, gone = itertools.cycle(range(len(servers))), set[str]()
    pool = ThreadPoolExecutor(requests, thread_name_prefix="gspax_teacher")
    try:
        work = [
            pool.submit(_score, [*servers[n:], *servers[:n]], tokens, timeout, gone)
            for n, tokens in zip(first, sequences, strict=False)
        ]
        interrupt.wait(work)
        return [future.result() for future in work]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for one in servers:
            one.close()


def _score(servers: Sequence[Server], tokens: Sequence[int], timeout: float, gone: set[str]) -> np.ndarray:
    """Return the answer of the first server that responds, and add the addresses of silent servers to `gone`."""
    end = time.monotonic() + timeout
    for server in itertools.cycle(servers):
        try:
            found = server.score(tokens)
            watchdog.progress()
            return found
        except UnreachableError as problem:
            if time.monotonic() > end:
                raise FailureError(f"teacher.score: no server for {timeout:g} seconds (timeout): {problem}") from None
            if server.address not in gone:
                gone.add(server.address)
                warn(f"teacher.score: {problem}; its requests are sent again, to another server or once it is back")
            time.sleep(PAUSE)
        except RefusedError as problem:
            raise FailureError(f"teacher.score: {problem}") from None
    raise AssertionError("a cycle does not end")
