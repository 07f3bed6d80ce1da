"""The first signal ends a run at its next stop point, after a save; the second one ends the process immediately."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from concurrent import futures

import pytest
from api import Interrupted, interrupt

# argv: the file that a save writes; steps, terminal (steps, with stdin as the controlling terminal) or hang (in C code)
CHILD = """
import ctypes, fcntl, pathlib, sys, termios, time
from gspax.run import interrupt, progress

if sys.argv[2] == "terminal":
    fcntl.ioctl(0, termios.TIOCSCTTY)

def save():
    pathlib.Path(sys.argv[1]).write_text("saved")

try:
    with interrupt.listen(lambda: "what was done after checkpoint 4 is lost"), interrupt.call_on_interrupt(save):
        with progress.track(10000, every=1) as bar:
            for step in range(1, 10000):
                bar.update(step, {})
                if sys.argv[2] == "hang":
                    mutex = ctypes.create_string_buffer(64)
                    for _ in range(2):
                        ctypes.CDLL(None).pthread_mutex_lock(mutex)
                time.sleep(0.02)
                interrupt.stop_point()
except interrupt.Interrupted as stop:
    sys.exit(128 + stop.signum)
"""


@pytest.fixture(autouse=True)
def hang_ups_are_not_ignored():
    """Whatever started the tests, such as nohup; children inherit it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def child(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(mode, **options):
            command = [sys.executable, "-c", CHILD, str(tmp_path / "saved"), mode]
            pipes = {name: subprocess.PIPE for name in ("stdout", "stderr")}
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, text=True, env=environment, **pipes | options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            for each in filter(None, (process.stdout, process.stderr)):
                stack.callback(each.close)
            return process

        yield start


def test_a_signal_ends_the_run_at_its_next_stop_point_after_a_save(child, tmp_path):
    process = child("steps")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as `timeout` does, which also signals the process group
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").read_text() == "saved"
    assert "SIGTERM: the run ends after its current computation; send it again" in errors and "Traceback" not in errors


def test_a_second_signal_ends_a_process_that_hangs_in_c_code(child, tmp_path):
    process = child("hang")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "again to end at once" in process.stderr.readline() + process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=interrupt.SAME)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGINT again: ended without saving; what was done after checkpoint 4 is lost" in errors
    assert not (tmp_path / "saved").exists()


def test_a_closed_terminal_ends_the_run_after_a_save(child, tmp_path):
    ours, theirs = pty.openpty()

    process = child("terminal", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.read(ours, 1)  # the progress bar
    os.close(ours)
    assert process.wait(timeout=30) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").exists()


def test_a_closed_pipe_ends_the_run_after_a_save(child, tmp_path):
    """As when a connection ends, or in `gspax train ... | head`."""
    process = child("steps")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").exists()
    assert "Traceback" not in process.stderr.read()


def test_the_previous_handlers_are_restored(capfd):
    before = [signal.getsignal(each) for each in interrupt.SIGNALS]
    for _ in range(2):
        with interrupt.listen():
            assert not {signal.getsignal(each) for each in interrupt.SIGNALS} & set(before)
            interrupt.stop_point()
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(2):
                with pytest.raises(Interrupted, match="SIGTERM") as caught:
                    interrupt.stop_point()
            assert caught.value.signum == signal.SIGTERM
        assert [signal.getsignal(each) for each in interrupt.SIGNALS] == before
        assert signal.set_wakeup_fd(-1) == -1
        interrupt.stop_point()
    with interrupt.listen(other="the server"):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match=r"^SIGTERM: the server has ended$"):
            interrupt.stop_point()
    errors = capfd.readouterr().err
    assert errors.count("SIGTERM: the run ends") == 2 and errors.count("SIGTERM: the server ends after") == 1
    assert not [each for each in threading.enumerate() if each.name == "gspax_signals"]


def test_an_ignored_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.listen():
            os.kill(os.getpid(), signal.SIGHUP)
            interrupt.stop_point()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_the_wait_for_futures(capfd):
    done, never = futures.Future(), futures.Future()
    done.set_result(1)
    with interrupt.listen():
        interrupt.wait([done])
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            interrupt.wait([done, never])


def test_signals_are_not_handled_outside_the_main_thread():
    before, handlers = signal.getsignal(signal.SIGTERM), []

    def work():
        with interrupt.listen():
            handlers.append(signal.getsignal(signal.SIGTERM))
            interrupt.stop_point()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_save_is_made_for_signals_only():
    saves = []
    with pytest.raises(ValueError), interrupt.call_on_interrupt(lambda: saves.append(1)):
        raise ValueError
    with pytest.raises(Interrupted), interrupt.call_on_interrupt(lambda: saves.append(2)):
        raise Interrupted(signal.SIGTERM)
    assert saves == [2]
