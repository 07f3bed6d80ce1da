"""A pool of worker processes that answer one task at a time, each within a deadline.

A worker is a Python script started as a new process, not forked and without imports from this one: it has none of the
trainer's state, devices or threads. It writes `{"ready": …}` or `{"error": …}` as its first line, then one line of JSON
for each line `[task, seconds]` that it reads, and exits at the end of its input, so it also exits with the trainer. A
late worker is killed with SIGKILL, and the next task starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gspax.errors import UserError
from gspax.rewards.calls import Failure, waiting

A = TypeVar("A")
B = TypeVar("B")

_SCRIPT = Path(__file__).with_name("worker.py")
_START = 120.0  # seconds for a worker to import what it needs, on a busy machine
_lock = threading.Lock()
_shared: dict[tuple[int, tuple[str, ...]], Pool] = {}  # by number of workers and arguments


class Pool:
    """A pool of up to `workers` processes of one script, started when needed. Thread-safe."""

    def __init__(self, script: Path, *arguments: str, workers: int, renew_after: int = 5000) -> None:
        if not 1 <= workers <= 1024:
            raise UserError(f"workers: wanted at least 1 worker, and at most 1024, got {workers}")
        self.workers = workers
        self._script, self._arguments, self._renew_after = script, arguments, renew_after
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)

    def ask(self, task: object, *, timeout: float) -> Any:
        """Answer a task; return a `Failure` if the worker has "crashed", or is "late" after `timeout` seconds.

        Time spent waiting for a free worker, or for one to start, does not count here or in `grading.timeout`.
        """
        with waiting():
            worker = self._idle.get()
        kept = None  # an interrupted worker still owes an answer, which must not go to the next task
        try:
            if worker is None or not worker.alive():
                with waiting():
                    worker = _Worker(self._script, *self._arguments)
            answer = worker.ask(task, timeout)
            if not isinstance(answer, Failure) and worker.tasks < self._renew_after:
                kept = worker
            return answer
        finally:
            if worker is not None and kept is None:
                worker.kill()
            self._idle.put(kept)

    def map(self, call: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Call `call` with every item, once for equal ones, in one thread per worker; `call` may ask this pool."""
        distinct = list(dict.fromkeys(items))
        if len(distinct) < 2:  # in this thread, whose clock `waiting` stops
            return [call(item) for item in distinct] * len(items)
        with ThreadPoolExecutor(self.workers) as threads:
            results = dict(zip(distinct, threads.map(call, distinct), strict=True))
        return [results[item] for item in items]

    def close(self) -> None:
        """Kill the idle workers. The pool may be used again."""
        for _ in range(self.workers):
            with contextlib.suppress(queue.Empty):
                if (worker := self._idle.get_nowait()) is not None:
                    worker.kill()
                self._idle.put(None)


class _Worker:
    def __init__(self, script: Path, *arguments: str) -> None:
        # -P keeps the folder of the script out of sys.path.
        # A separate session: an interrupt at the terminal is handled by the trainer.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # should a worker import jax, it must not take a device
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.tasks = 0
        first = self._read(_START)
        if not isinstance(first, dict) or "ready" not in first:
            self.kill()
            why = first.get("error") if isinstance(first, dict) else f"the worker {script.name} did not start"
            raise UserError(f"rewards: {why}")

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: object, timeout: float) -> Any:
        self.tasks += 1
        data = memoryview(json.dumps([task, timeout]).encode() + b"\n")
        try:
            while data:
                data = data[self._stdin.write(data) :]
        except BrokenPipeError:
            return Failure("crashed")
        return self._read(timeout)

    def _read(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        line = bytearray()
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return Failure("late")
            chunk = os.read(self._stdout.fileno(), 1 << 16)
            if not chunk:
                return Failure("crashed")
            line += chunk
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


def shared(*arguments: str, workers: int) -> Pool:
    """Return the pool of this process for `worker.py` with these arguments, created at the first call."""
    with _lock:
        if (workers, arguments) not in _shared:
            _shared[workers, arguments] = Pool(_SCRIPT, *arguments, workers=workers)
        return _shared[workers, arguments]


@atexit.register
def _close() -> None:
    for pool in _shared.values():
        pool.close()


os.register_at_fork(after_in_child=_shared.clear)  # a fork must not talk to its parent's workers
