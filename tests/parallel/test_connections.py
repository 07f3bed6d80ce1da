"""The connections of a run: exchange, leaving, and what the others do when a process is killed or fails alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gspax.parallel import connections

SECRET = b"s" * 32


@pytest.fixture
def ended(monkeypatch):
    """The sentences and exit codes of the processes that would have ended."""
    found = []

    def end(sentence, code, *, first=lambda: None):
        first()
        found.append((sentence, code))

    monkeypatch.setattr(connections, "end_process", end)
    monkeypatch.setattr(connections, "LEAVE_TIMEOUT", 0.3)
    return found


@pytest.fixture
def connect(ended):
    """`connect(count)`: the links of `count` processes in this one, and their channels."""
    made, channels = [], []

    def make(count):
        own = [{} for _ in range(count)]
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            for peer in range(1, count):
                far = socket.create_connection(server.getsockname())
                accepted = pool.submit(connections.accept, server.accept()[0], SECRET)
                own[peer][0], own[0][peer] = connections.connect(far, SECRET), accepted.result()
        for each in own:
            for found in each.values():
                found.wait_without_deadline()
                channels.append(found)
        processes = [connections.Connections(index, count, each) for index, each in enumerate(own)]
        made.extend(processes)
        return processes, own

    yield make
    for each in made:
        each._announced.update(dict.fromkeys(range(4), 0))
    for each in channels:
        each.close()
    for thread in threading.enumerate():
        if thread.name.startswith("gspax_connection_"):
            thread.join(10)
            assert not thread.is_alive()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_process_gets_all_values_in_the_order_of_the_processes(connect, ended):
    processes, _ = connect(4)
    for number in range(20):
        sent = [(f"{index}:{number}" * (1 + 1000 * index), {index: None}) for index in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for received in pool.map(lambda process, value: process.exchange(value), processes, sent):
                assert received == sent
    assert not ended


def test_a_value_that_cannot_be_sent_is_an_error_in_every_process(connect, ended):
    processes, _ = connect(3)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(process.exchange, {1, 2}) for process in processes]
        for answer in answers:
            with pytest.raises(TypeError, match="a set cannot be sent to another process"):
                answer.result(timeout=10)
        after = [pool.submit(process.exchange, index) for index, process in enumerate(processes)]
        assert [answer.result(timeout=10) for answer in after] == [[0, 1, 2]] * 3
    assert not ended


@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_connection_ends_all_others(gone, connect, ended):
    _, own = connect(3)
    for each in own[gone].values():
        each.close()
    # the process that is "gone" runs here too, and notices that its own connections are closed
    named = f"processes: process {gone} of 3 on 127.0.0.1 has ended"
    wait_for(lambda: sum(sentence.startswith(named) for sentence, _ in ended) >= 2)
    assert {code for _, code in ended} == {1}
    assert all(sentence.endswith("the same command continues the run") for sentence, _ in ended)


def test_processes_that_fail_together_leave_in_order(connect, ended):
    processes, own = connect(3)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda each: each.leave(2), processes)) == [True] * 3
    for each in own[1].values():
        each.close()
    time.sleep(0.4)
    assert not ended, "neither the time-out nor the connections count any more"


def test_a_process_that_fails_alone_ends_the_others(connect, ended):
    processes, _ = connect(3)
    assert processes[2].leave(2) is False
    wait_for(lambda: len(ended) >= 2)
    assert ended[:2] == [("processes: process 2 of 3 ended with exit code 2, see its output", 1)] * 2


def test_a_process_that_has_finished_may_close_its_connections(connect, ended):
    processes, own = connect(3)
    assert processes[1].leave(0) and processes[1].leave(2), "the first call counts"
    wait_for(lambda: 1 in processes[2]._announced)
    own[1][0].close()
    time.sleep(0.2)
    assert [each for each in ended if "process 1" in each[0]] == []


def test_a_failure_that_follows_from_a_lost_process_names_that_process(connect, ended):
    """A collective operation fails first, with an exception in the main thread; then the connection is lost."""
    processes, own = connect(2)
    leaving = threading.Thread(target=processes[1].leave, args=(1,))
    leaving.start()
    wait_for(lambda: 1 in processes[0]._announced)
    own[0][1].close()
    leaving.join()
    wait_for(lambda: ended)
    assert "process 0 of 2 on 127.0.0.1 has ended" in ended[0][0]


@pytest.mark.parametrize("kind", [connections.SENT, connections.LEAVING])
def test_a_message_of_another_schema_ends_the_run_with_a_sentence(kind, connect, ended):
    bodies = [b"", b"junk"]
    if kind == connections.LEAVING:
        bodies.append(b"\0\0\0\x17" + b'{"value":1,"arrays":[]}')
    for content in bodies:
        _, own = connect(2)
        own[1][0].send(kind, content)
        wait_for(lambda: ended)
        assert "process 1 of 2 on 127.0.0.1 has ended" in ended.pop()[0]
        own[1][0].close()
        time.sleep(0.05)
        ended.clear()


# Real processes


CHILD = """
import ctypes, sys, time
from gspax.parallel import connections, joining, multihost
connections.LEAVE_TIMEOUT = 1.0
address, count, index, fails, locked = sys.argv[1], *map(int, sys.argv[2:])
joining.join(joining.ProcessInfo(address, count, index), {}, lambda a, b: [], 60, b"secret")
multihost.gather(index)
print("joined", flush=True)
while True:
    print("sum", end=" ")  # never flushed, and not lost
    assert multihost.gather(index) == list(range(count))
    if index == fails:
        joining.leave(2)
    ctypes.PyDLL(None).usleep(locked)  # microseconds; this holds the interpreter's lock
    time.sleep(0.01)
"""


def run_until_one_is_gone(count, killed=None, fails=-1, locked=0):
    """Exit codes, output and stderr of processes that exchange values until one is killed or fails, and the seconds."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, address, *map(str, (count, index, fails, locked))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        for each in processes:
            assert each.stdout.readline() == "joined\n", each.communicate()
        began = time.monotonic()
        if killed is not None:
            time.sleep(0.3)  # in which they exchange values
            processes[killed].kill()
        output = [each.communicate(timeout=60) for each in processes]
        return [each.returncode for each in processes], output, time.monotonic() - began
    finally:
        for each in processes:
            each.kill()
            each.communicate()


@pytest.mark.parametrize(("killed", "locked"), [(0, 1_500_000), (1, 0)])
def test_a_killed_process_ends_the_others_at_once_with_one_sentence(killed, locked):
    """Process 0 too, although jax's clients abort when they lose its coordination service, and Python may not run."""
    codes, output, seconds = run_until_one_is_gone(3, killed, locked=locked)
    assert codes == [-signal.SIGKILL if index == killed else 1 for index in range(3)], output
    assert seconds < 15
    for index in {0, 1, 2} - {killed}:
        out, error = output[index]
        last = error.splitlines()[-1]
        assert last.startswith(f"gspax: processes: process {killed} of 3 on 127.0.0.1 has ended"), error
        assert "Traceback" not in error and "sum" in out


def test_a_process_that_fails_ends_the_others():
    codes, output, seconds = run_until_one_is_gone(2, fails=1)
    assert codes == [1, 2] and seconds < 15, output
    assert output[0][1].splitlines()[-1] == "gspax: processes: process 1 of 2 ended with exit code 2, see its output"
