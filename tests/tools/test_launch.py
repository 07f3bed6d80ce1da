"""`gspax launch`: the processes that it starts, when it starts them again, and the signals that it passes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from api import main

from gspax.commands import train
from gspax.tools import launch

# Writes down what it was started with, and exits with the code of its attempt and index. A code below 0 is a signal
# that it sends itself; "wait" waits for SIGTERM, and exits with 143 then.
CHILD = """
import json, os, signal, socket, sys, time
index = int(sys.argv[sys.argv.index("--process") + 1]) if "--process" in sys.argv else 0
attempt = 0
while os.path.exists(f"{index}.{attempt}"):
    attempt += 1
code = json.load(open("codes"))[attempt][index]
if code != "begin":  # a run that has nothing to save yet
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
with open(f"{index}.{attempt}", "w") as file:
    json.dump([sys.argv[1:], os.environ.get("GSPAX_SECRET")], file)
if code in ("wait", "begin"):
    time.sleep(60)
if code == "exit":  # before the command has ended
    os._exit(0)
if code < 0:
    os.kill(os.getpid(), -code)
socket.socket(fileno=int(os.environ["GSPAX_LAUNCHER"])).send(b"\\0")
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start(codes, *arguments)`: the exit code, and by attempt and index what each process was started with."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, "-S", str(script)))
    monkeypatch.setattr(launch, "POLL", 0.02)
    monkeypatch.delenv("GSPAX_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(codes, *arguments):
        (tmp_path / "codes").write_text(json.dumps(codes))
        code = main.main(["launch", *arguments])
        found = sorted(tmp_path.glob("[0-9].[0-9]"), key=lambda path: (path.suffix, path.name))
        return code, [json.loads(path.read_text()) for path in found]

    return run


COMMAND = ["train", "some.py", "--workdir", "w", "a.b=c"]


def test_one_process_gets_the_arguments_as_they_are(start):
    assert start([[0]], *COMMAND) == (0, [[COMMAND, None]])


def test_several_processes_get_a_coordinator_an_index_and_a_secret(start):
    code, calls = start([[0, 0, 0]], "--processes", "3", *COMMAND)
    assert code == 0 and len(calls) == 3
    (secret,) = {secret for _, secret in calls}
    assert len(secret) == 64
    address = calls[0][0][calls[0][0].index("--coordinator") + 1]
    assert address.startswith("127.0.0.1:")
    for index, (arguments, _) in enumerate(calls):
        assert arguments == [*COMMAND, "--coordinator", address, "--processes", "3", "--process", str(index)]
        assert secret not in arguments


@pytest.mark.parametrize(
    ("codes", "expected", "starts"),
    [
        ([[1], [-9], [0]], 0, 3),  # a failure and a kill are repeated
        ([[1], [1], [1], [1]], 1, 4),
        ([[2]], 2, 1),
        ([[1], [3]], 3, 2),
        ([[143]], 143, 1),
        ([["exit"], [0]], 0, 2),
    ],
)
def test_a_failure_starts_it_again_and_nothing_else_does(codes, expected, starts, start, capsys):
    code, calls = start(codes, "--restarts", "3", *COMMAND)
    assert (code, len(calls)) == (expected, starts)
    assert capsys.readouterr().err.count("gspax: warning: launch: exit code 1, starting again") == starts - 1


def test_each_start_has_a_secret_of_its_own(start):
    code, calls = start([[1, -9], [0, 0]], "--processes", "2", "--restarts", "1", *COMMAND)
    assert code == 0 and len(calls) == 4 and len({secret for _, secret in calls}) == 2


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([1, 0], 1), ([1, 2], 2), ([3, 1], 3), ([-9, 1], 1), ([143, 143], 143), ([143, 1], 143), ([-6], 1)],
)
def test_the_exit_codes_are_combined(codes, code):
    assert launch.combine(codes) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [([-15], 143), ([-15, 143], 143), ([-15, 1], 143), ([-15, 2], 2), ([-9], 1), ([-2], 130), ([0], 0)],
)
def test_a_process_that_ends_by_a_forwarded_signal_did_not_fail(codes, code):
    assert launch.combine(codes, [signal.SIGINT, signal.SIGTERM]) == code


def test_the_others_are_killed_when_one_has_failed(start, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE", 0.2)
    began = time.monotonic()
    assert start([["wait", 1]], "--processes", "2", *COMMAND)[0] == 1
    assert time.monotonic() - began < 20


@pytest.fixture
def experiment_file(tmp_path):
    """`experiment_file(code)`: a command of the real program whose experiment file runs this code."""

    def write(code):
        (tmp_path / "some.py").write_text(code)
        return ["train", str(tmp_path / "some.py"), "--workdir", str(tmp_path / "w")]

    return write


def test_an_exit_in_code_that_is_called_is_no_success(experiment_file, capfd):
    assert main.main(["launch", "--restarts", "1", *experiment_file("import os\nos._exit(0)")]) == 1
    errors = capfd.readouterr().err
    assert errors.count("a process ended with exit code 0 before its command did") == 2
    assert errors.count("exit code 1, starting again") == 1


@pytest.mark.parametrize("code", [0, 1, "done"])
def test_sys_exit_in_code_that_is_called_is_no_success(code, experiment_file, monkeypatch, capsys):
    def execute(options):
        sys.exit(code)

    monkeypatch.setattr(train, "execute", execute)
    assert main.main(experiment_file("")) == 2
    assert capsys.readouterr().err == (
        f"gspax: train: wanted code that returns or raises an error, it called exit({code!r})\n"
    )


def test_a_killed_launcher_leaves_no_process(experiment_file, tmp_path):
    command = experiment_file(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-m", "gspax", "launch", *command], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    began = time.monotonic()
    launcher.kill()
    _, errors = launcher.communicate(timeout=30)  # until the last process that holds the pipe has ended
    assert time.monotonic() - began < 20
    assert errors.endswith("gspax: the `gspax launch` that started this process has ended\n")


@pytest.mark.parametrize("state", ["wait", "begin"])
def test_a_signal_is_passed_on_and_ends_the_restarts(start, tmp_path, state):
    def send():
        written = [tmp_path / "0.0", tmp_path / "1.0"]
        while not all(path.exists() and path.stat().st_size for path in written):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    previous = signal.getsignal(signal.SIGTERM)
    code, calls = start([[state, state]] * 4, "--processes", "2", "--restarts", "3", *COMMAND)
    sender.join()
    assert code == 143 and len(calls) == 2 and signal.getsignal(signal.SIGTERM) == previous


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "wanted one of train, sft, eval, bench, doctor and its arguments, got 'nothing'"),
        (["report", "w"], "got 'report'"),
        (["--processes", "0", *COMMAND], "wanted an integer of at least 1, got '0'"),
        (["--restarts", "x", *COMMAND], "wanted an integer of at least 0, got 'x'"),
    ],
)
def test_invalid_input_starts_nothing(arguments, said, start, capsys):
    assert start([[0]], *arguments) == (2, [])
    assert said in capsys.readouterr().err
