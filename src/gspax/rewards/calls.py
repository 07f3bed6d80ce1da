"""Calls user code on the host, each call with a deadline: rewards and environment steps.

A function runs in threads, on batches, or as coroutines. A call that raises, exits or is late fails only its own
completions: its result is a sentence that says why. A late thread is abandoned, not stopped, and another replaces
it; Python cannot interrupt a thread that holds the interpreter's lock, as `7 ** 10 ** 9` does. Run such functions
in `gspax.rewards.guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from gspax.config import Grading
from gspax.config.functions import is_gspax, keywords, title_of, unwrap
from gspax.config.protocols import BatchReward, Problem
from gspax.errors import UserError, describe_error, shorten
from gspax.parallel import timeline

UserFunction = Callable[..., Any]
T = TypeVar("T")
F = TypeVar("F", bound=UserFunction)

COROUTINES = 32  # concurrent calls of an async function, unless the experiment says otherwise
PURE = 32  # concurrent calls of a function without state, so that it does not delay others in a composition
LATE = "late: "  # the beginning of the error of a call without an answer in time
_SPARE = 1.0  # seconds beyond its deadline after which a coroutine is assumed to block its event loop


@dataclass(frozen=True)
class Failure:
    """The result of a call that failed, with the reason."""

    reason: str


@dataclass(frozen=True)
class Batched:
    """A reward function of lists: `function(problems, completions)` returns one value for each completion.

        reward=Batched(partial(score, model="judge"))

    A batch contains the completions that arrive together, of one group or of several; its size must not change a
    reward. `function` may be async.
    """

    function: BatchReward

    def __call__(self, problem: Problem, completion: str) -> object:
        """Compute the reward of one completion."""
        return self.function([problem], [completion])[0]


def concurrent(calls: int) -> Callable[[F], F]:
    """Declare that a function may run in this many threads at once; other functions are called one at a time.

    0 declares a composition: it may run in as many threads as all rewards in its keywords `reward` and `rewards` allow.
    """

    def declare(function: F) -> F:
        function.concurrency = calls  # type: ignore[attr-defined]
        return function

    return declare


def compares_answers(function: F) -> F:
    """Declare that a reward needs `Problem.answer`, so that a dry run refuses problems without one."""
    function.compares_answers = True  # type: ignore[attr-defined]
    return function


def require_answer(problem: Problem) -> str:
    """Return the problem's answer. UserError if it has none."""
    if not problem.answer:
        prompt = shorten(repr(problem.prompt))
        raise UserError(f"reward: wanted problems with an answer (Problem.answer), got none for the prompt {prompt}")
    return problem.answer


def needs(find_missing: Callable[[Mapping[str, Any]], str]) -> Callable[[F], F]:
    """Declare what a function needs besides gspax: a package, a program, an environment variable.

    Args:
      find_missing: says, given the function's keywords, what this machine or setting lacks; empty if nothing.
    """

    def declare(function: F) -> F:
        function.find_missing = find_missing  # type: ignore[attr-defined]
        return function

    return declare


@dataclass(eq=False)
class _Call(Generic[T]):
    arguments: tuple[object, object]  # a subject and a text, or sequences of them if the function is batched
    futures: list[Future[T]]
    function: str  # its name
    began: float | None = None  # start by time.monotonic; moved forward by the time spent waiting
    waits: float | None = None  # time since which the call has been waiting for other calls

    def settle(self, results: Sequence[T] | UserError) -> bool:
        """Set the futures. Return False, without effect, if they are already set."""
        try:
            for number, future in enumerate(self.futures):
                if isinstance(results, UserError):
                    future.set_exception(results)
                else:
                    future.set_result(results[number])
        except InvalidStateError:
            return False
        if self.began is not None:
            timeline.add("calls", self.function, self.began, time.monotonic())
        return True

    def seconds(self) -> float:
        """Return the time that the call has run, without waits; 0 if it is not running."""
        now = time.monotonic() if self.waits is None else self.waits
        return 0.0 if self.began is None or self.done else now - self.began

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)


_current = threading.local()  # its attribute `call` is the call that this thread runs


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Stop the clock of this thread's call while it waits for something that it shares with other calls.

    Raises TimeoutError in a call that was late: more work for it would only delay the others.
    """
    call: _Call[object] | None = getattr(_current, "call", None)
    if call is None or call.began is None:
        yield
        return
    if call.done:
        raise TimeoutError("this call was late")
    call.waits = time.monotonic()
    try:
        yield
    finally:
        call.began += time.monotonic() - call.waits
        call.waits = None


class Calls(Generic[T]):
    """Calls of one function, each with a deadline. Daemon threads start with the first call; `close` ends them.

    Args:
      function: takes a subject (a problem, or an environment's state) and a text; may be async or `Batched`.
      grading: the limits of time and concurrency.
      read: turns the function's return value into a result.
      fail: turns a sentence into the result of a failed call.
      deadline: the setting that `grading.timeout` is the value of, for that sentence.
    """

    def __init__(
        self,
        function: UserFunction,
        grading: Grading,
        *,
        read: Callable[[object], T],
        fail: Callable[[str], T],
        deadline: str = "grading.timeout",
    ) -> None:
        self.grading = grading
        self._batched = isinstance(function, Batched)
        self.function: UserFunction = function.function if isinstance(function, Batched) else function
        self._read, self._fail, self._deadline = read, fail, deadline
        self._is_async, self._name = _is_async(self.function), title_of(inner_function(self.function))
        self.concurrency = grading.concurrency or _declared(self.function, COROUTINES if self._is_async else 1)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._pending: list[_Call[T]] = []
        self._workers: _Threads[T] | _EventLoop[T] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, subjects: Sequence[object], texts: Sequence[str]) -> list[Future[T]]:
        """Start a call for each subject and text. Return futures, whose only exception is UserError."""
        if self._batched:
            calls = [_Call[T]((subjects, texts), [Future() for _ in texts], self._name)] if texts else []
        else:
            calls = [_Call[T](pair, [Future()], self._name) for pair in zip(subjects, texts, strict=True)]
        with self._lock:
            self._pending = [call for call in self._pending if not call.done] + calls
            if self._workers is None:
                n, self._closed = self.concurrency, threading.Event()
                self._workers = _EventLoop(self._call_async, n) if self._is_async else _Threads(self._call, n)
                watched = self._workers, self._closed
                threading.Thread(target=self._watch, args=watched, name="gspax-calls", daemon=True).start()
            for call in calls:
                self._workers.put(call)
        return [future for call in calls for future in call.futures]

    def close(self) -> None:
        """End the threads that are not in a call. Further calls start new threads."""
        with self._lock:
            self._closed.set()
            if self._workers is not None:
                self._workers.stop()
            self._workers, self._pending = None, []

    def _watch(self, workers: _Threads[T] | _EventLoop[T], closed: threading.Event) -> None:
        """Abandon late calls, and let other calls run in the meantime."""
        limit = self.grading.timeout + (_SPARE if self._is_async else 0.0)
        while not closed.wait(min(0.1, self.grading.timeout / 4)):
            with self._lock:
                for call in [call for call in self._pending if call.seconds() > limit]:
                    if call.settle(self._late(call)):
                        workers.replace([call for call in self._pending if not call.done])

    def _call(self, call: _Call[T]) -> bool:
        try:
            return call.settle(self._results(call, self.function(*call.arguments)))
        except BaseException as error:  # SystemExit included: it would end this thread only
            return call.settle(self._failed(call, error))

    async def _call_async(self, call: _Call[T], stopped: threading.Event) -> None:
        """Run a call. It gets no result if its event loop was stopped, because it may start again on another."""
        deadline = asyncio.timeout(self.grading.timeout)
        try:
            async with deadline:
                results = self._results(call, await self.function(*call.arguments))
            call.settle(results)
        except BaseException as error:  # CancelledError included: the function may await a task that others canceled
            if isinstance(error, asyncio.CancelledError) and stopped.is_set():
                raise
            call.settle(self._late(call) if deadline.expired() else self._failed(call, error))

    def _results(self, call: _Call[T], value: Any) -> list[T]:
        values = list(value) if self._batched else [value]
        if len(values) == len(call.futures):
            return [self._read(value) for value in values]
        return self._fail_all(call, f"wanted a value for each of {len(call.futures)} completions, got {len(values)}")

    def _failed(self, call: _Call[T], error: BaseException) -> list[T] | UserError:
        """Return the results of a call that raised; a UserError is returned itself, because a setting is wrong."""
        if isinstance(error, UserError):
            return error
        return self._fail_all(call, describe_error(error))

    def _late(self, call: _Call[T]) -> list[T]:
        return self._fail_all(call, f"{LATE}no answer after {self.grading.timeout:g} s ({self._deadline})")

    def _fail_all(self, call: _Call[T], error: str) -> list[T]:
        return [self._fail(error) for _ in call.futures]


class _Threads(Generic[T]):
    """A set of threads, each of which makes one call at a time."""

    def __init__(self, serve: Callable[[_Call[T]], bool], count: int) -> None:
        self._serve, self._numbers = serve, itertools.count(1)
        self._queue: queue.SimpleQueue[_Call[T] | None] = queue.SimpleQueue()
        for _ in range(count):
            self.replace(())

    def put(self, call: _Call[T] | None) -> None:
        self._queue.put(call)

    def replace(self, pending: Sequence[_Call[T]]) -> None:
        """Start a thread, which takes over the pending calls of a late one."""
        threading.Thread(target=self._run, name=f"gspax-call-{next(self._numbers)}", daemon=True).start()

    def stop(self) -> None:
        self.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.began, _current.call = time.monotonic(), call
            if not self._serve(call):  # late: another thread has replaced this one
                return
        self.stop()  # passes the signal on to the next thread


class _EventLoop(Generic[T]):
    """A thread with an event loop that runs at most `count` calls at once."""

    def __init__(self, serve: Callable[[_Call[T], threading.Event], Awaitable[None]], count: int) -> None:
        self._serve, self._count = serve, count
        self._start()

    def put(self, call: _Call[T]) -> None:
        asyncio.run_coroutine_threadsafe(self._run(call, self._stopped), self._loop)

    def replace(self, pending: Sequence[_Call[T]]) -> None:
        """Restart the pending calls on another loop, because a late call blocks this one."""
        self.stop()
        self._start()
        for call in pending:
            call.began = None
            self.put(call)

    def stop(self) -> None:
        self._stopped.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self) -> None:
        self._loop, self._permits = asyncio.new_event_loop(), asyncio.Semaphore(self._count)
        self._stopped = threading.Event()
        threading.Thread(target=self._run_loop, args=(self._loop,), name="gspax-call-loop", daemon=True).start()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop):  # cancels the remaining tasks, and closes the loop
            loop.run_forever()

    async def _run(self, call: _Call[T], stopped: threading.Event) -> None:
        async with self._permits:
            if not call.done:
                call.began = time.monotonic()
                await self._serve(call, stopped)


def inner_function(function: UserFunction) -> UserFunction:
    """Return the function inside `Batched` and `functools.partial`."""
    return unwrap(function.function if isinstance(function, Batched) else function)


def members(function: UserFunction) -> list[UserFunction]:
    """Return the rewards in the keywords `reward` and `rewards` of a composition."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    several = bound.get("rewards")
    one = [bound["reward"]] if "reward" in bound else []
    return [*one, *(several.values() if isinstance(several, Mapping) else ())]


def _declared(function: UserFunction, default: int) -> int:
    """Return the number of threads that may call a function at once."""
    declared = int(getattr(inner_function(function), "concurrency", default))
    return declared or min((_declared(member, 1) for member in members(function)), default=1)


def _is_async(function: UserFunction) -> bool:
    """Return whether a function returns a coroutine."""
    inner = inner_function(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def find_rewards(function: UserFunction) -> Iterator[UserFunction]:
    """Yield a reward and the rewards inside it, if it is a composition such as `weighted_sum` or `guard`."""
    yield function
    for member in members(function):
        yield from find_rewards(member)


def find_missing(function: UserFunction) -> Iterator[str]:
    """Yield what this machine lacks for a function and for the rewards inside it, as declared by `needs`."""
    for each in find_rewards(function):
        find = getattr(inner_function(each), "find_missing", None)
        if find and (reason := find(keywords(each.function if isinstance(each, Batched) else each))):
            yield f"{title_of(inner_function(each))}: {reason}"


def find_async_members(function: UserFunction) -> Iterator[tuple[UserFunction, UserFunction]]:
    """Yield pairs of a composition of gspax and an async reward inside it, which it would not await."""
    for member in members(function) if is_gspax(function) else ():
        if _is_async(member):
            yield inner_function(function), inner_function(member)
        yield from find_async_members(member)
