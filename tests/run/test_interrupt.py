"""The first signal ends a run after a checkpoint, the second one immediately."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from gspax.run import interrupt
from gspax.run.interrupt import Interrupted

CHILD = """
import pathlib, sys, time
from gspax.run import interrupt
with interrupt.watch() as interrupted:
    for step in range(10000):
        print(step, flush=True)
        time.sleep(0.02 if sys.argv[2] == "steps" else 100)
        if interrupted():
            pathlib.Path(sys.argv[1]).write_text("saved")
        try:
            interrupted.stop_here()
        except interrupt.Interrupted as stop:
            sys.exit(128 + stop.signum)
"""


@pytest.fixture
def child(tmp_path):
    children = []

    def start(mode):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "saved"), mode]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        children[-1].stdout.readline()
        return children[-1]

    yield start
    for each in children:
        each.kill()
        each.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_and_its_checkpoint(child, tmp_path, signum):
    process = child("steps")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert (tmp_path / "saved").read_text() == "saved"
    assert "again to abort" in errors and "Traceback" not in errors


def test_a_second_signal_aborts_immediately(child, tmp_path):
    process = child("hang")
    process.send_signal(signal.SIGINT)
    assert "again to abort" in process.stderr.readline() + process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
    assert not (tmp_path / "saved").exists()


def test_the_previous_handlers_are_restored():
    before = [signal.getsignal(each) for each in interrupt.SIGNALS]
    with interrupt.watch():
        assert [signal.getsignal(each) for each in interrupt.SIGNALS] != before
    assert [signal.getsignal(each) for each in interrupt.SIGNALS] == before
    with interrupt.watch() as interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert interrupted() == signal.SIGTERM
    assert [signal.getsignal(each) for each in interrupt.SIGNALS] == before


def test_a_signal_after_a_call_waits_for_the_next_call():
    with interrupt.watch() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGTERM)
        interrupted.stop_here()  # nothing was saved for it yet
        assert interrupted()
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            interrupted.stop_here()
    assert caught.value.signum == signal.SIGTERM


def test_signals_are_not_handled_outside_the_main_thread():
    answers = []

    def work():
        with interrupt.watch() as interrupted:
            answers.append(interrupted())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [0] and signal.getsignal(signal.SIGTERM) == before
