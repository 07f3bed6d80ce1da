"""Calling a reward function for many completions: in threads, in batches or as coroutines, each call with a time limit.

A call that raises, exits, is late or gives no finite number costs its own completions only: its `Result` says why. A
thread whose call is late is abandoned, not stopped, and another takes its place; Python cannot interrupt a thread that
holds the interpreter's lock, as `7 ** 10 ** 9` does. For functions that may do that there is `gspax.rewards.guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from gspax.config import Grading
from gspax.config.protocols import BatchReward, Reward
from gspax.errors import UserError, place_of

F = TypeVar("F", bound=Callable[..., Any])

OF_COROUTINES = 32  # calls of an async function at one time, unless the experiment says otherwise
PURE = 32  # calls of a function without state, so that it does not hold up others in a composition
LARGEST = 1e18  # of a reward: advantages add up squares of rewards in float32, which ends at 3.4e38
_SPARE = 1.0  # seconds beyond its time limit after which a coroutine is taken to block its event loop


@dataclass(frozen=True)
class Batched:
    """A reward function of lists: `function(problems, completions)` gives a reward, or several, for each completion.

        reward=Batched(partial(score, model="judge"))

    It gets the completions that have arrived together, of one group or of several. How many those are must not change a
    reward. `function` may be async.
    """

    function: BatchReward

    def __call__(self, problem: Any, completion: str) -> Any:
        """The reward of one completion."""
        return self.function([problem], [completion])[0]


def concurrent(calls: int) -> Callable[[F], F]:
    """Declare that a reward function may run in this many threads at once; others are called one at a time.

    0 is for a composition: as many as each of the rewards may that it has as its keywords `reward` and `rewards`.
    """

    def declare(function: F) -> F:
        function.concurrency = calls  # type: ignore[attr-defined]
        return function

    return declare


class Total(float):
    """A reward that is the sum of named parts, each of which is a metric."""

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> Self:
        total = super().__new__(cls, sum(parts.values()))
        total.parts = dict(parts)
        return total

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.parts,)

    @property
    def error(self) -> str:
        """What has failed in the parts that are `Failed`."""
        return _join(self.parts, "error")

    @property
    def reason(self) -> str:
        """The reasons of the parts that are `Graded`."""
        return _join(self.parts, "reason")


class Graded(float):
    """A reward with the reason for it, which is kept with the completion."""

    reason: str

    def __new__(cls, reward: float, reason: str) -> Self:
        graded = super().__new__(cls, reward)
        graded.reason = reason
        return graded

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (float(self), self.reason)


class Failed(float):
    """The value of a completion whose reward could not be computed, with the reason.

    It is counted and recorded as a failure, also towards `grading.max_failed`; it keeps its value in place of
    `grading.failed`.
    """

    error: str

    def __new__(cls, reward: float, error: str) -> Self:
        failed = super().__new__(cls, reward)
        failed.error = error
        return failed

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (float(self), self.error)


@dataclass(frozen=True)
class Result:
    """The rewards of one completion, or why there are none."""

    rewards: tuple[float, ...]
    error: str = ""  # with rewards, those of a `Failed`
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, for the metrics
    reason: str = ""  # of a `Graded` reward
    names: tuple[str, ...] = ()  # of `rewards` that were given by name
    value: Any = None  # what else the function has returned (`rewards.environments.calls`)


@dataclass(eq=False)
class _Call:
    problems: Sequence[Any]
    completions: Sequence[str]
    futures: list[Future[Result]] = field(default_factory=list)
    began: float | None = None  # by time.monotonic; later by what it has waited
    waits: float | None = None  # since when it is waiting for other calls

    def settle(self, results: Sequence[Result] | UserError) -> bool:
        """Set the futures; False, and without effect, if they are set already."""
        try:
            for number, future in enumerate(self.futures):
                if isinstance(results, UserError):
                    future.set_exception(results)
                else:
                    future.set_result(results[number])
        except InvalidStateError:
            return False
        return True

    def fail(self, error: str) -> list[Result]:
        return [Result((), error) for _ in self.completions]

    def seconds(self) -> float:
        """How long it has been going on, waits aside; 0 if it is not."""
        now = time.monotonic() if self.waits is None else self.waits
        return 0.0 if self.began is None or self.done else now - self.began

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)


_current = threading.local()  # `call`: what this thread is serving


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """For what a reward function shares with other calls: waiting for it does not count towards the time limit.

    TimeoutError in a call that was late and has been given up on: what it still asks for would only delay the others.
    """
    call: _Call | None = getattr(_current, "call", None)
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


class RewardCalls:
    """Calls of one reward function. Threads start with the first call; they are daemons and end with `close`."""

    what = "reward"  # that a call gives

    def __init__(self, reward: Reward, grading: Grading):
        self.grading = grading
        self._batched = isinstance(reward, Batched)
        self.function: Callable[..., Any] = reward.function if isinstance(reward, Batched) else reward
        self._is_async = is_async(self.function)
        self.concurrency = grading.concurrency or _declared(self.function, OF_COROUTINES if self._is_async else 1)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._pending: list[_Call] = []
        self._server: _Threads | _EventLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, problems: Sequence[Any], completions: Sequence[str]) -> list[Future[Result]]:
        """Start rewarding completions, each of the problem of the same index. A future raises UserError at most."""
        size = max(1, len(completions)) if self._batched else 1
        calls = [_Call(problems[i : i + size], completions[i : i + size]) for i in range(0, len(completions), size)]
        for call in calls:
            call.futures = [Future() for _ in call.completions]
        with self._lock:
            self._pending = [call for call in self._pending if not call.done] + calls
            if self._server is None:
                self._start()
            assert self._server is not None
            for call in calls:
                self._server.put(call)
        return [future for call in calls for future in call.futures]

    def close(self) -> None:
        """End the threads that are not in a call. Further completions start others."""
        with self._lock:
            self._closed.set()
            if self._server is not None:
                self._server.stop()
            self._server, self._pending = None, []

    def read(self, value: Any) -> Result:
        """What the function has returned for a completion."""
        return to_result(value)

    def _start(self) -> None:
        self._closed = threading.Event()
        self._server = self._new_server()
        threading.Thread(target=self._watch, args=(self._closed,), name="gspax-rewards", daemon=True).start()

    def _new_server(self) -> _Threads | _EventLoop:
        if self._is_async:
            return _EventLoop(self._call_async, self.concurrency)
        return _Threads(self._call, self.concurrency)

    def _watch(self, closed: threading.Event) -> None:
        """Give up on calls that are late."""
        limit = self.grading.timeout + (_SPARE if self._is_async else 0.0)
        while not closed.wait(min(0.1, self.grading.timeout / 4)):
            with self._lock:
                for call in [call for call in self._pending if call.seconds() > limit]:
                    if call.settle(self._late(call)):
                        self._replace()

    def _replace(self) -> None:
        """Let others be called while a late call goes on."""
        if isinstance(self._server, _Threads):
            self._server.add()
        elif self._server is not None:  # the late coroutine blocks the others
            self._server.stop()
            self._server = self._new_server()
            for call in self._pending:
                if not call.done:
                    call.began = None
                    self._server.put(call)

    def _late(self, call: _Call) -> list[Result]:
        return call.fail(f"late: no {self.what} after {self.grading.timeout:g} s (grading.timeout)")

    def _arguments(self, call: _Call) -> tuple[Any, Any]:
        return (call.problems, call.completions) if self._batched else (call.problems[0], call.completions[0])

    def _call(self, call: _Call) -> bool:
        try:
            return call.settle(self._results(call, self.function(*self._arguments(call))))
        except UserError as problem:  # a setting is wrong, not this completion
            return call.settle(problem)
        except BaseException as problem:  # SystemExit included: it would end this thread only
            return call.settle(call.fail(_sentence(problem)))

    async def _call_async(self, call: _Call) -> None:
        try:
            call.settle(await asyncio.wait_for(self._await(call), self.grading.timeout))
        except TimeoutError:
            call.settle(self._late(call))

    async def _await(self, call: _Call) -> Sequence[Result] | UserError:
        try:
            return self._results(call, await self.function(*self._arguments(call)))
        except asyncio.CancelledError:
            raise
        except UserError as problem:
            return problem
        except BaseException as problem:
            return call.fail(_sentence(problem))

    def _results(self, call: _Call, value: Any) -> list[Result]:
        if not self._batched:
            return [self.read(value)]
        values = list(value)
        if len(values) != len(call.completions):
            return call.fail(f"wanted a reward for each of {len(call.completions)} completions, got {len(values)}")
        return [self.read(each) for each in values]


class _Threads:
    """Threads that each make one call at a time."""

    def __init__(self, serve: Callable[[_Call], bool], count: int):
        self._serve = serve
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._count = 0
        for _ in range(count):
            self.add()

    def put(self, call: _Call) -> None:
        self._queue.put(call)

    def add(self) -> None:
        self._count += 1
        threading.Thread(target=self._run, name=f"gspax-reward-{self._count}", daemon=True).start()

    def stop(self) -> None:
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call.began, _current.call = time.monotonic(), call
            if not self._serve(call):  # late: another thread has taken this one's place
                return


class _EventLoop:
    """A thread with an event loop, and at most `count` calls in it at one time."""

    def __init__(self, serve: Callable[[_Call], Awaitable[None]], count: int):
        self._serve, self._permits = serve, asyncio.Semaphore(count)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="gspax-reward-loop", daemon=True).start()

    def put(self, call: _Call) -> None:
        asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    async def _run(self, call: _Call) -> None:
        async with self._permits:
            if not call.done:
                call.began = time.monotonic()
                await self._serve(call)


def to_result(value: Any) -> Result:
    """What a reward function has returned as finite numbers up to ±`LARGEST`, or why it is none.

    The numbers of a mapping are in the alphabetical order of their names, whatever their order in the mapping. `error`
    and `reason` are those of all members.
    """
    named: dict[Any, Any] = {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {}
    given = named or dict(enumerate(value if isinstance(value, tuple) else (value,)))
    try:
        names, rewards = tuple(sorted(named)), tuple(float(given[key]) for key in sorted(given))
        parts = {name: float(part) for name, part in (named or getattr(value, "parts", {})).items()}
    except Exception:
        return Result((), f"wanted a number, a tuple or a mapping of numbers, got {_brief(value)}")
    if not rewards or not all(abs(each) <= LARGEST for each in (*rewards, *parts.values())):  # false for NaN
        return Result((), f"wanted finite numbers up to ±1e18, got {_brief(value)}")
    return Result(rewards, _join(given, "error"), parts, _join(given, "reason"), names)


def _join(members: Mapping[Any, Any], name: str) -> str:
    """The errors or reasons of several rewards, after their names if they have names."""
    found = {key: str(text) for key, each in members.items() if (text := getattr(each, name, ""))}
    return "; ".join(f"{key}: {text}" if isinstance(key, str) else text for key, text in found.items())


def _inner(function: Any) -> Any:
    """The function inside `Batched` and `functools.partial`."""
    function = function.function if isinstance(function, Batched) else function
    return function.func if isinstance(function, functools.partial) else function


def _members(function: Any) -> list[Any]:
    """The rewards that a composition has as its keywords `reward` and `rewards`."""
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    several = keywords.get("rewards")
    one = [keywords["reward"]] if "reward" in keywords else []
    return [*one, *(several.values() if isinstance(several, Mapping) else ())]


def _declared(function: Any, default: int) -> int:
    """How many threads may call a function at once."""
    declared = int(getattr(_inner(function), "concurrency", default))
    return declared or min((_declared(each, 1) for each in _members(function)), default=1)


def is_async(function: Any) -> bool:
    """Whether a reward function gives a coroutine."""
    inner = _inner(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def find_async_members(function: Any) -> Iterator[tuple[Any, Any]]:
    """Rewards that cannot be called: functions of gspax, each with an async reward inside, which it does not await."""
    inner = _inner(function)
    for each in _members(function) if str(getattr(inner, "__module__", "")).startswith("gspax.") else ():
        if is_async(each):
            yield inner, _inner(each)
        yield from find_async_members(each)


def _sentence(problem: BaseException) -> str:
    text = f": {_brief(problem, str)}" if str(problem) else ""
    return f"{type(problem).__name__}{text}{place_of(problem)}"


def _brief(value: Any, text: Callable[[Any], str] = repr) -> str:
    found = " ".join(text(value).split())
    return found if len(found) <= 300 else f"{found[:300]}…"
