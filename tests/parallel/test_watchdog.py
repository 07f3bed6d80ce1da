"""A process that makes no progress prints its stacks and ends; one that makes progress is left alone."""

import subprocess
import sys
import time

import jax.numpy as jnp
import pytest
from api import multihost

from gspax.parallel import watchdog

SCRIPT = """
import ctypes, sys, threading, time
from gspax.parallel import watchdog
watchdog.OTHERS = 0.2

def hang_in_a_reward():
    {hang}

threading.Thread(target=lambda: time.sleep(60), daemon=True, name="other").start()
watchdog.start(0.6)
hang_in_a_reward()
print("survived")
"""


def run(hang):
    command = [sys.executable, "-c", SCRIPT.format(hang=hang)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)


def test_a_process_that_hangs_prints_the_stacks_of_all_threads_and_ends():
    done = run("time.sleep(60)")
    assert done.returncode == 1 and "survived" not in done.stdout
    assert "in hang_in_a_reward" in done.stderr and done.stderr.count("hread 0x") >= 3, "all threads"
    assert done.stderr.splitlines()[-1] == "gspax: no progress for 1 seconds: the stacks of all threads are above"


def test_what_hangs_is_named():
    done = run("watchdog.progress('the exchange'); watchdog.progress(); time.sleep(60)")
    sentence = "gspax: no progress for 1 seconds in 'the exchange': the stacks of all threads are above"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == sentence


def test_a_process_whose_interpreter_is_locked_ends_too():
    done = run("ctypes.PyDLL(None).sleep(60)")  # PyDLL does not release the lock
    assert done.returncode == 1 and "survived" not in done.stdout
    assert "in hang_in_a_reward" in done.stderr and "Timeout" in done.stderr


@pytest.mark.parametrize(
    "hang", ["for _ in range(15): time.sleep(0.1), watchdog.progress()", "watchdog.stop(); time.sleep(1.5)"]
)
def test_progress_and_the_end_of_the_run_keep_it_quiet(hang):
    done = run(hang)
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")


def test_values_that_reach_the_host_are_progress_and_waiting_for_processes_is_not(monkeypatch):
    monkeypatch.setattr(watchdog, "_last_progress", 0.0)
    multihost.gather(3)
    assert watchdog._last_progress == 0.0
    multihost.to_host(jnp.zeros(2))
    assert time.monotonic() - watchdog._last_progress < 10


def test_a_limit_of_0_watches_nothing():
    watchdog.start(0)
    assert watchdog._done is None
