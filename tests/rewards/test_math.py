"""Mathematical equality by math-verify in worker processes, and workers that time out or crash."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import math
from gspax.rewards.calls import Failure
from gspax.rewards.scores import Grade
from gspax.rewards.workers import pool as workers
from gspax.rewards.workers.pool import Pool

SOURCE = Path(__file__).parents[2] / "src"


def needs_math_verify():
    pytest.importorskip("math_verify", reason="math-verify is not installed (pip install '.[rewards]')")


def rewarded(answer, completion, **settings):
    return math.reward(Problem("?", answer), completion, **settings).value


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("1600", r"\frac{3200}{2}"),
        ("1600", r"1600 \%"),
        ("1600", "1,600"),
        ("1600", r"1600\text{ dollars}"),
        ("0.5", r"\frac12"),
        (r"50\%", "0.5"),
        ("5", r"5\text{ cm}"),
        ("5", "x = 5"),
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"90^\circ", "90"),
        ("[3, 5)", r"\left[3, 5\right)"),
        ("[3, 5)", r"x \in [3, 5)"),
        ("[3, 5)", r"3 \le x < 5"),
        (r"(-\infty, 3) \cup (5, \infty)", r"(5, \infty) \cup (-\infty, 3)"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        ("1, 2", "2, 1"),
        (r"\pm 2", "2, -2"),
        ("6 + 9i", "9i + 6"),
        ("2x + 1", "1 + 2x"),
        (r"\text{(C)}", "C"),
        ("7/2", "x = 3 1/2"),
        ("(3.5, 2)", "(3 1/2, 2)"),
        (r"\{3\frac{1}{2}, 1234\}", r"\{1\,234, 3 1/2\}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"(-\infty, 2] \cup [3, 4]", "(−∞, 2] ∪ [3, 4]"),
        (r"2\sqrt{3} + x^2", "2√3 + x**2"),
        ("3:4", r"3 \colon 4"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
    ],
)
def test_equivalent_answers_are_rewarded(expected, answer):
    needs_math_verify()
    assert rewarded(expected, rf"so \boxed{{{answer}}}.") == 1.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("1600", r"\frac{3200}{3}"),
        ("[3, 5)", "(3, 5)"),
        ("(1, 2)", "(2, 1)"),
        (r"\{1, 2\}", r"\{1, 3\}"),
        ("2x + 1", "1 + 2y"),
        ("5", r"5 \text{ or } 6"),
        ("5", "5, 6"),
        ("2", "x = 3 1/2"),
        ("3", "1 2"),
        ("235", "x = 1 234"),
        ("5", "5 = 6"),
        ("5", r"5 \pm 1"),
        ("5", "5 x"),
        ("p - q", "q - p"),
        (r"\text{Evelyn}", r"\text{Nobody}"),
        ("5", r"\frac{"),
        (r"\frac{\pi}{2^{60}}", r"\frac{\pi}{2^{59}}"),
        ("e^{-20}", "e^{-21}"),
    ],
)
def test_different_answers_are_not_rewarded(expected, answer):
    needs_math_verify()
    assert rewarded(expected, rf"so \boxed{{{answer}}}.") == 0.0


def test_a_batch_is_graded_in_order_and_counted():
    needs_math_verify()
    before = math.counts()
    grades = math.grade(
        ["1", r"\frac{1}{2}", "3", "x + y", "5"],
        [r"\boxed{1}", "#### 0.5", "I do not know", r"\boxed{y + x}", r"\boxed{6}"],
    )
    assert [grade.reward for grade in grades] == [1, 1, 0, 1, 0]
    assert [grade.outcome for grade in grades] == ["equal", "equal", "no answer", "equal", "different"]
    assert {name: count - before.get(name, 0) for name, count in math.counts().items()} | {"late": 0} == {
        **dict.fromkeys(math.counts(), 0),
        **{"equal": 3, "different": 1, "no answer": 1, "late": 0},
    }


@pytest.mark.parametrize("answer", ["7^{10^9}", "9^{9^{9^{9}}}", r"(10^9)!"])
def test_an_endless_comparison_ends_at_the_deadline(answer):
    needs_math_verify()
    math.grade(["x + 1"], [r"\boxed{1 + x}"])  # starts a worker
    began = time.monotonic()
    grades = math.grade(["x + 1", "x + 1"], [rf"\boxed{{{answer}}}", r"\boxed{1 + x}"], timeout=1.0, failed=-1.0)
    assert grades[0].outcome in ("late", "crashed", "different")
    assert grades[0].reward == (0.0 if grades[0].outcome == "different" else -1.0)
    assert grades[1] == Grade(1.0, "equal")
    assert time.monotonic() - began < 30


def test_a_batch_has_a_deadline():
    needs_math_verify()
    hang = [rf"\boxed{{7^{{10^{{{power}}}}}}}" for power in range(9, 14)]
    math.grade(["x + 1"], [r"\boxed{1 + x}"])
    began = time.monotonic()
    grades = math.grade(["x + 1"] * len(hang), hang, timeout=60.0, batch_timeout=0.5)
    assert {grade.outcome for grade in grades} == {"late"} and time.monotonic() - began < 10


def test_an_orphaned_worker_ends_by_its_own_timer():
    needs_math_verify()
    worker = subprocess.Popen(
        [sys.executable, "-P", str(SOURCE / "gspax" / "rewards" / "workers" / "worker.py"), "math"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    worker.communicate(b'[["x + 1", "7^{10^9}"], -0.8]\n', timeout=30)
    assert worker.returncode == -signal.SIGALRM


def test_a_fork_does_not_use_its_parents_workers():
    program = """
import os
from gspax.rewards.workers import pool as workers
workers.shared("math", workers=1)
process = os.fork()
if process == 0:
    os._exit(len(workers._shared))
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0 and len(workers._shared) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})


def test_an_overlong_answer_is_not_parsed():
    assert math.grade(["x"], [r"\boxed{" + "x + " * 1000 + "x}"]) == [Grade(0.0, "no answer")]


def test_rewards_can_be_computed_in_a_thread():
    needs_math_verify()
    found = []
    thread = threading.Thread(target=lambda: found.append(rewarded("x + 1", r"\boxed{1 + x}")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_the_numbers_of_answers_and_completions_must_match():
    with pytest.raises(UserError, match="answers: wanted one for each of 2 completions, got 1"):
        math.grade(["1"], ["1", "2"])


def test_the_reward_can_be_described_and_pickled():
    reward = partial(math.reward, form="boxed")
    assert describe(reward)["function"] == "gspax.rewards.math.reward"
    assert describe(reward)["form"] == "boxed" and describe(reward)["timeout"] == 5.0
    assert pickle.loads(pickle.dumps(reward))(Problem("?", "4"), r"\boxed{4.0}").value == 1.0


# The pool, with a test worker

WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    task, _ = json.loads(line)
    if task == "die":
        os._exit(1)
    if task == "sleep":
        time.sleep(60)
    print(json.dumps([task, os.getpid(), "jax" in sys.modules]), flush=True)
"""


@pytest.fixture
def pool(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    pool = Pool(script, workers=1, renew_after=3)
    yield pool
    pool.close()


def test_a_worker_is_a_new_process_without_jax(pool):
    task, process, has_jax = pool.ask("hello", timeout=10)
    assert task == "hello" and process != os.getpid() and not has_jax


@pytest.mark.parametrize(("task", "timeout", "reason"), [("die", 10, "crashed"), ("sleep", 0.1, "late")])
def test_a_failed_worker_is_replaced(pool, task, timeout, reason):
    first = pool.ask("a", timeout=10)
    assert pool.ask(task, timeout=timeout) == Failure(reason)
    second = pool.ask("b", timeout=10)
    assert second[0] == "b" and second[1] != first[1]
    with pytest.raises(ProcessLookupError):
        os.kill(first[1], 0)


def test_a_worker_that_died_while_idle_is_replaced(pool):
    _, process, _ = pool.ask("a", timeout=10)
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert pool.ask("b", timeout=10)[0] == "b"


def test_a_worker_is_replaced_after_several_tasks(pool):
    processes = [pool.ask(index, timeout=10)[1] for index in range(7)]
    assert len(set(processes)) == 3 and processes[0] == processes[2] != processes[3]


def test_large_tasks_are_sent(pool):
    assert pool.ask("x" * 1_000_000, timeout=10)[0] == "x" * 1_000_000


def test_several_threads_share_a_pool(pool):
    answers = pool.map(lambda task: pool.ask(task, timeout=10), list(range(8)))
    assert [answer[0] for answer in answers] == list(range(8))


def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text('import json; print(json.dumps({"error": "wanted a package, got none"}))')
    with pytest.raises(UserError, match="rewards: wanted a package, got none"):
        Pool(script, workers=1).ask(1, timeout=1)
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(workers, "_START", 0.1)
    with pytest.raises(UserError, match=r"rewards: the worker worker\.py did not start"):
        Pool(script, workers=1).ask(1, timeout=1)


def test_a_pool_needs_at_least_one_worker(tmp_path):
    with pytest.raises(UserError, match="workers: wanted at least 1 worker"):
        Pool(tmp_path / "worker.py", workers=0)


def test_importing_starts_no_worker_and_workers_end_with_their_parent(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    program = f"""
import os, pathlib, sys, time
from gspax.rewards import math, code, guard
from gspax.rewards.workers import pool as workers
assert not workers._shared and "jax" not in sys.modules and "math_verify" not in sys.modules
pool = workers.Pool(pathlib.Path({str(script)!r}), workers=1)
print(pool.ask("a", timeout=10)[1], flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(worker)


def running(process):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
