"""One run, one writer: a second one is refused with a sentence, and the lock of a run that has ended is recognized."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest
from api import Checkpoints, Recorder, RunDir, directory, enter_run, save, write_atomically

from gspax.errors import FailureError
from gspax.run import lock

DESCRIPTION = {"name": "sort", "schedule": {"steps": 10}}
CHILD = """
import os, sys, time
from gspax.run import lock
with lock.hold(lock.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock.json"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.02)
    monkeypatch.setattr(lock, "STALE", 0.3)


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_second_run_is_refused_and_changes_nothing(tmp_path):
    with enter_run(tmp_path, DESCRIPTION) as run:
        before = {each: each.read_bytes() for each in tmp_path.iterdir()}
        with (
            pytest.raises(
                FailureError, match=rf"is in use by another run \(process {os.getpid()} on .* since 20"
            ) as caught,
            enter_run(tmp_path, {**DESCRIPTION, "schedule": {"steps": 20}}),
        ):
            pass
        assert "\n" not in str(caught.value)
        assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert not run.lock.exists()


def test_of_two_runs_that_start_at_the_same_moment_one_writes_nothing(tmp_path):
    """The first one holds the lock, but has not written experiment.json yet."""
    with lock.hold(RunDir(tmp_path).lock):
        with pytest.raises(FailureError, match="is in use by another run"), enter_run(tmp_path, DESCRIPTION):
            pass
        assert [each.name for each in tmp_path.iterdir()] == ["lock.json"]


def test_a_run_writes_nothing_before_it_holds_the_lock(tmp_path, monkeypatch):
    def is_locked(*args, **options):
        assert RunDir(tmp_path).lock.exists()

    monkeypatch.setattr(directory, "write_atomically", is_locked)
    monkeypatch.setattr(directory, "wait_until_shared", lambda run: None)
    with enter_run(tmp_path, DESCRIPTION):
        pass


def test_the_lock_is_removed_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), enter_run(tmp_path, DESCRIPTION):
        1 / 0  # noqa: B018
    assert sorted(each.name for each in tmp_path.iterdir()) == ["environment.json", "experiment.json"]


def test_the_lock_of_a_killed_process_is_stale(path, capsys):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(FailureError, match=f"process {child.pid}"):
        lock.require_free(path)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until `communicate`
    with lock.hold(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    child.communicate()
    assert "removed the lock of a run that has ended" in capsys.readouterr().err


def test_a_file_system_without_hard_links_has_locks_too(path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with lock.hold(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(FailureError, match="is in use by another run"), lock.hold(path):
            pass
    assert not path.exists()


def test_a_process_with_the_same_id_is_another_one(path):
    with lock.hold(path):
        change(path, start="1")
        lock.require_free(path)
        assert not path.exists()


def test_the_heartbeat_of_another_host_decides(path, quick):
    holder, done = lock._FileLock(path), threading.Event()
    holder._content = json.dumps(json.loads(holder._content) | {"machine": "another", "host": "far"})
    holder.acquire()
    beating = threading.Thread(target=lock._beat, args=(holder, done, holder.watch()))
    beating.start()
    with pytest.raises(FailureError, match="on far since"):
        lock.require_free(path)
    done.set()
    beating.join()
    lock.require_free(path)
    assert not path.exists()


@pytest.mark.parametrize("content", ["", "\0" * 20, "[1]"])
def test_a_damaged_lock_is_stale_without_a_heartbeat(path, quick, content):
    path.write_text(content)
    lock.require_free(path)
    assert not path.exists()


def test_of_several_that_start_at_once_one_holds_the_lock(path):
    barrier, held, refused = threading.Barrier(8), [], []
    done = threading.Event()

    def start():
        barrier.wait()
        try:
            with lock.hold(path):
                held.append(1)
                done.wait()
        except FailureError:
            refused.append(1)
            if len(refused) == 7:
                done.set()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for each in threads:
        each.start()
    done.wait(20)
    done.set()
    for each in threads:
        each.join()
    assert (len(held), len(refused)) == (1, 7)


@pytest.mark.parametrize("by", ["link", "exclusive creation"])
def test_a_lock_that_appears_after_the_look_is_respected(path, monkeypatch, by):
    """Both runs have seen no lock; only the creation itself tells which of them was first."""

    def link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with lock.hold(path):
        monkeypatch.setattr(lock, "require_free", lambda path: None)
        if by != "link":
            monkeypatch.setattr(os, "link", link)
        before = path.read_text()
        with pytest.raises(FailureError, match="is in use by another run that has just started"), lock.hold(path):
            pass
        assert path.read_text() == before


@pytest.fixture(params=["taken over", "deleted"])
def lost(request, tmp_path):
    """A run with a step and a line of metrics, which then loses its lock, and its files."""
    run = RunDir(tmp_path)
    with (
        lock.hold(run.lock),
        Recorder(run, 0) as recorder,
        Checkpoints(run.checkpoints, keep=1, note=run.newest) as checkpoints,
    ):
        recorder.write_metrics(1, {"reward/mean": 0.5})
        checkpoints.save(1, {"w": jnp.ones(2)}, {})
        checkpoints.wait()
        run.lock.write_text("{}") if request.param == "taken over" else run.lock.unlink()
        before = snapshot(tmp_path)
        yield run, recorder, checkpoints
    assert snapshot(tmp_path) == before


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
    return {path: path.read_bytes() for path in files}


WRITES = {
    "metrics": lambda run, recorder, checkpoints: recorder.write_metrics(2, {"reward/mean": 0.6}),
    "samples": lambda run, recorder, checkpoints: recorder.write_samples(2, [{"text": "a"}]),
    "a file of the run": lambda run, recorder, checkpoints: write_atomically(run.rollbacks, "{}"),
    "a save": lambda run, recorder, checkpoints: checkpoints.save(2, {"w": jnp.ones(2)}, {}),
    "a save that may fail": lambda run, recorder, checkpoints: save(
        checkpoints, 2, {"w": jnp.ones(2)}, {}, is_last=False
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_run_that_has_lost_its_lock_ends_before_its_next_write(name, lost):
    with pytest.raises(lock.LostError, match=r"lock\.json is no longer the lock of this run") as caught:
        WRITES[name](*lost)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)


def test_a_lock_that_cannot_be_read_does_not_end_the_run(path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    with lock.hold(path):
        monkeypatch.setattr(lock, "_read", fail)
        lock.require_held()
        monkeypatch.undo()
    lock.require_held()
