"""Calls of reward functions: results, failures, time limits, threads, batches and coroutines."""

import asyncio
import json
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from gspax.config import Grading
from gspax.data import reward_answer
from gspax.errors import UserError
from gspax.rewards import calls as module
from gspax.rewards import format, length
from gspax.rewards.calls import Batched, concurrent
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.scores import Result, Score, reward_calls, to_result
from gspax.rewards.workers.pool import Pool


def gather(reward, completions, **grading):
    with reward_calls(reward, Grading(**grading)) as calls:
        futures = calls.submit(list(range(len(completions))), completions)
        return [future.result(timeout=60) for future in futures]


def errors(*found):
    return [result.error for result in found]


def number(problem, completion):
    return float(completion)


async def async_number(problem, completion):
    await asyncio.sleep(0)
    return float(completion)


def numbers(problems, completions):
    return [float(each) for each in completions]


async def async_numbers(problems, completions):
    return numbers(problems, completions)


TOO_LARGE = "Score(value=1, reason='', error='', parts={'a': 1e+19})"
FORMS = {"plain": number, "async": async_number, "batched": Batched(numbers), "async, batched": Batched(async_numbers)}


@pytest.mark.parametrize("reward", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("concurrency", [0, 3])
def test_every_completion_gets_its_own_reward(reward, concurrency):
    found = gather(reward, [str(each) for each in range(20)], concurrency=concurrency)
    assert found == [Result((float(each),)) for each in range(20)]


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (1, Result((1.0,))),
        (np.float32(0.5), Result((0.5,))),
        ((1, 0.5), Result((1.0, 0.5))),
        ({"a": 1, "b": 0.5}, Result((1.0, 0.5), names=("a", "b"), parts={"a": 1.0, "b": 0.5})),
        (Score(1, "equal", parts={"b": 0.5}), Result((1.0,), parts={"b": 0.5}, reason="equal")),
        (Score(1, parts={"a": 1e19}), Result((), f"wanted finite numbers up to ±1e18, got {TOO_LARGE}")),
        ("0.5", Result((), "wanted a number, a tuple or a mapping of numbers, got '0.5'")),
        (b"1", Result((), "wanted a number, a tuple or a mapping of numbers, got b'1'")),
        ({"a": "0.5"}, Result((), "wanted a number, a tuple or a mapping of numbers, got {'a': '0.5'}")),
        (
            Score("1"),
            Result(
                (),
                "wanted a number, a tuple or a mapping of numbers, got Score(value='1', reason='', error='', parts={})",
            ),
        ),
        (float("nan"), Result((), "wanted finite numbers up to ±1e18, got nan")),
        ((1.0, float("inf")), Result((), "wanted finite numbers up to ±1e18, got (1.0, inf)")),
        (-1e18, Result((-1e18,))),
        (1e38, Result((), "wanted finite numbers up to ±1e18, got 1e+38")),
        (1e39, Result((), "wanted finite numbers up to ±1e18, got 1e+39")),
        ({"b": 0.5, "a": 1}, Result((1.0, 0.5), names=("a", "b"), parts={"b": 0.5, "a": 1.0})),
        ((Score(-1, error="late"), Score(1, "equal"), 2), Result((-1.0, 1.0, 2.0), "late", reason="equal")),
        (
            {"b": Score(1, "equal"), "a": Score(0, error="late"), "c": Score(0, error="gone")},
            Result((0.0, 1.0, 0.0), "a: late; c: gone", {"b": 1.0, "a": 0.0, "c": 0.0}, "b: equal", ("a", "b", "c")),
        ),
        ((), Result((), "wanted finite numbers up to ±1e18, got ()")),
        (None, Result((), "wanted a number, a tuple or a mapping of numbers, got None")),
        ("good", Result((), "wanted a number, a tuple or a mapping of numbers, got 'good'")),
        ([1.0], Result((), "wanted a number, a tuple or a mapping of numbers, got [1.0]")),
    ],
)
def test_every_kind_of_reward_function_is_called(value, result):
    assert to_result(value) == result


def misbehave(problem, completion):
    match completion:
        case "raise":
            raise ValueError("no such\nunit")
        case "exit":
            sys.exit("bye")
        case "nan":
            return float("nan")
        case "hang":
            time.sleep(3)
    return 1.0


def test_an_error_in_a_library_names_the_line_that_called_it():
    def parse(problem, completion):
        return json.loads(completion)

    (found,) = gather(parse, ["{"])
    assert found.error.startswith("JSONDecodeError: Expecting")
    assert found.error.endswith(f" (tests/rewards/test_calls.py:{parse.__code__.co_firstlineno + 1})")


async def async_misbehave(problem, completion):
    if completion == "hang":
        await asyncio.sleep(3)
    if completion == "block":
        time.sleep(3)
    return misbehave(problem, completion)


FAILURES = ["raise", "good", "exit", "good", "hang", "nan", "good"]


@pytest.mark.parametrize("reward", [misbehave, async_misbehave])
def test_a_failure_affects_one_completion(reward):
    began = time.monotonic()
    found = gather(reward, FAILURES, timeout=0.3)
    assert time.monotonic() - began < 2.5
    assert [each.rewards for each in found] == [(1.0,) if each == "good" else () for each in FAILURES]
    line = misbehave.__code__.co_firstlineno
    assert errors(*found)[::2] == [
        f"ValueError: no such unit (tests/rewards/test_calls.py:{line + 3})",
        f"SystemExit: bye (tests/rewards/test_calls.py:{line + 5})",
        "late: no answer after 0.3 s (grading.timeout)",
        "",
    ]


def test_a_blocking_coroutine_times_out_alone(monkeypatch):
    monkeypatch.setattr(module, "_SPARE", 0.2)
    began = time.monotonic()
    found = gather(async_misbehave, ["block", "good", "good"], timeout=0.3, concurrency=1)
    assert time.monotonic() - began < 2.5
    assert [each.rewards for each in found] == [(), (1.0,), (1.0,)]


async def awaits_what_was_cancelled(problem, completion):
    if completion == "cancelled":
        task = asyncio.ensure_future(asyncio.sleep(3))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task
    if completion == "raised":
        raise asyncio.CancelledError
    if completion == "itself":
        asyncio.current_task().cancel()
    made.append(completion)
    await asyncio.sleep(0.05)
    return 1.0


made = []


def test_a_cancelled_coroutine_is_a_failed_call_and_no_blocked_loop():
    began = time.monotonic()
    found = gather(awaits_what_was_cancelled, ["cancelled", "good", "raised", "itself", "good"], timeout=5)
    assert time.monotonic() - began < 3
    assert [each.rewards for each in found] == [(), (1.0,), (), (), (1.0,)]
    assert all(error.startswith("CancelledError") for error in errors(*found) if error)
    assert sorted(made) == ["good", "good", "itself"]  # none was made again


def test_a_failed_batch_fails_all_and_an_invalid_number_only_its_own():
    assert (
        errors(*gather(Batched(lambda problems, texts: [1.0]), ["a", "b"]))
        == ["wanted a value for each of 2 completions, got 1"] * 2
    )
    assert (
        errors(*gather(Batched(lambda problems, texts: 1 / 0), ["a", "b"]))
        == [f"ZeroDivisionError: division by zero (tests/rewards/test_calls.py:{sys._getframe().f_lineno - 1})"] * 2
    )
    assert gather(Batched(lambda problems, texts: [1.0, float("nan")]), ["a", "b"])[0] == Result((1.0,))


def test_an_invalid_setting_is_not_counted_as_a_failure():
    def refuses(problem, completion):
        raise UserError("reward: wanted allow_code_execution=True")

    with pytest.raises(UserError, match="allow_code_execution"):
        gather(refuses, ["a"])


@pytest.mark.parametrize(
    ("reward", "concurrency", "most"),
    [("plain", 0, 1), ("plain", 3, 3), ("declared", 0, 4), ("declared", 2, 2), ("async", 0, 12), ("async", 5, 5)],
)
def test_concurrent_calls_are_limited(reward, concurrency, most):
    lock, now, seen = threading.Lock(), [0], [0]

    def count(change):
        with lock:
            now[0] += change
            seen[0] = max(seen[0], now[0])

    def plain(problem, completion):
        count(1)
        time.sleep(0.02)
        count(-1)
        return 1.0

    async def of_coroutines(problem, completion):
        count(1)
        await asyncio.sleep(0.02)
        count(-1)
        return 1.0

    declared = partial(concurrent(4)(lambda problem, completion: plain(problem, completion)))
    reward = {"plain": plain, "declared": declared, "async": of_coroutines}[reward]
    gather(reward, ["x"] * 12, concurrency=concurrency)
    assert seen[0] == most


def test_a_late_call_does_not_add_threads():
    release = threading.Event()
    running = []

    def waits(problem, completion):
        if completion == "hang":
            release.wait(10)
            return 1.0
        running.append(threading.current_thread().name)
        return 1.0

    with reward_calls(waits, Grading(timeout=0.2)) as calls:
        (late,) = calls.submit([0], ["hang"])
        assert late.result(timeout=10).error.startswith("late")
        release.set()
        time.sleep(0.1)
        for future in calls.submit([0] * 20, ["good"] * 20):
            future.result(timeout=10)
    assert set(running) == {"gspax-call-2"}


judge = concurrent(4)(lambda problem, completion: 1.0)
lenient = concurrent(16)(lambda problem, completion: 1.0)


@pytest.mark.parametrize(
    ("reward", "most"),
    [
        (partial(weighted_sum, rewards={"judge": judge, "format": format.match_tags}), 4),
        (partial(combine, rewards={"judge": partial(judge), "length": length.within}), 4),
        (partial(combine, rewards={"judge": judge, "plain": number}), 1),
        (partial(reward_answer, reward=lenient), 16),
        (partial(reward_answer, reward=partial(weighted_sum, rewards={"a": lenient, "b": judge})), 4),
        (partial(reward_answer, reward=number), 1),
        (partial(weighted_sum, rewards={}), 1),
    ],
)
def test_a_composition_runs_with_the_concurrency_of_its_members(reward, most):
    with reward_calls(reward, Grading()) as calls:
        assert calls.concurrency == most
    with reward_calls(reward, Grading(concurrency=3)) as calls:
        assert calls.concurrency == 3


ANSWERS_LATE = """
import json, sys, time
print('{"ready": 1}', flush=True)
for line in sys.stdin:
    time.sleep(0.25)
    print(json.loads(line)[0], flush=True)
"""


def test_time_spent_waiting_for_other_calls_does_not_count(tmp_path):
    """Eight calls of two tasks of 0.25 s each share one worker: 4 s in all, 0.5 s of each call's own."""
    (tmp_path / "worker.py").write_text(ANSWERS_LATE)
    pool = Pool(tmp_path / "worker.py", workers=1)

    @concurrent(8)
    def judged(problem, completion):
        return float(pool.ask(1, timeout=5.0) + pool.ask(1, timeout=5.0))

    found = gather(judged, ["a"] * 8, timeout=2.0)
    pool.close()
    assert [(each.rewards, each.error) for each in found] == [((2.0,), "")] * 8


def test_a_late_call_asks_no_further_worker(tmp_path):
    (tmp_path / "worker.py").write_text(ANSWERS_LATE)
    pool, ended = Pool(tmp_path / "worker.py", workers=1), threading.Event()

    def judged(problem, completion):
        try:
            for asked in range(100):
                pool.ask(asked, timeout=5.0)
        finally:
            ended.set()
        return 1.0

    (found,) = gather(judged, ["a"], timeout=0.6)
    assert found.error.startswith("late: no answer after 0.6 s")
    assert ended.wait(3.0), "25 s of work are left"
    pool.close()


def test_calls_start_when_they_are_submitted_and_threads_end_with_close():
    started = threading.Event()
    calls = reward_calls(lambda problem, completion: started.set() or 1.0, Grading())
    before = set(threading.enumerate())
    calls.submit([0], ["x"])
    assert started.wait(10), "nobody has asked for the result"
    started_here = set(threading.enumerate()) - before
    assert len(started_here) == 2
    calls.close()
    for thread in started_here:
        thread.join(timeout=10)
        assert not thread.is_alive()
    (future,) = calls.submit([0], ["x"])
    assert future.result(timeout=10) == Result((1.0,))
    calls.close()
