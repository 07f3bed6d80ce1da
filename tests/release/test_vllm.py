"""The small experiment with a real vLLM server, as docs/howto/sample_with_vllm.md says: `make vllm-test`.

VLLM names the virtual environment of vLLM; without it the test is skipped.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from api import RunDir, record

VLLM = os.environ.get("VLLM", "")
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "sort_gspo.py"
QUIET = 600  # seconds without a sign of progress: a server's start on a busy machine has pauses, a whole run many
STEPS = 12


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gspax(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "gspax", *map(str, arguments)], text=True, **options)


@contextmanager
def server(command, log):
    """A vLLM server in a process group of its own, which is killed at the end."""
    environment = {**os.environ, "PATH": f"{VLLM}/bin:{os.environ['PATH']}"}
    with log.open("a") as file:
        process = subprocess.Popen(
            command, shell=True, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(done, what, files):
    """Until it is done; it fails once no file has grown for QUIET seconds, however long the whole takes."""
    sizes, end = None, 0.0
    while not done():
        now = [path.stat().st_size if path.exists() else 0 for path in files]
        if now != sizes:
            sizes, end = now, time.monotonic() + QUIET
        assert time.monotonic() < end, f"{what}: nothing was written for {QUIET} seconds"
        time.sleep(0.5)


def test_the_limit_is_of_the_time_without_progress(tmp_path, monkeypatch):
    """A file that grows every QUIET - 1 seconds is waited for, however long it takes; one that stands still is not."""
    now, log = [0.0], tmp_path / "log"

    def sleep(seconds):
        now[0] += seconds
        if now[0] < 10 * QUIET and now[0] % (QUIET - 1) == 0:
            log.write_text("x" * int(now[0]))

    monkeypatch.setattr(sys.modules[__name__], "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    wait_for(lambda: now[0] > 9 * QUIET, "the end", [log, tmp_path / "none"])
    with pytest.raises(AssertionError, match=f"the end: nothing was written for {QUIET} seconds"):
        wait_for(lambda: False, "the end", [log])
    assert 10 * QUIET < now[0] < 12 * QUIET


@pytest.mark.skipif(not VLLM, reason="make vllm-test: VLLM names the environment of vLLM")
@pytest.mark.timeout(0)  # `wait_for` has the limit
def test_the_small_experiment_trains_with_vllm_though_its_server_is_killed(tmp_path, request):
    address, workdir = f"http://127.0.0.1:{free_port()}", tmp_path / "run"
    log, errors = tmp_path / "vllm.log", tmp_path / "errors.log"
    settings = [
        "model.head_dim=32",
        "routing_replay=sampler",
        "optimizer.learning_rate=1e-3",
        f"schedule.steps={STEPS}",
        "engine=gspax.config.Engine",
        f"engine.addresses={address}",
        f"engine.timeout={QUIET}",
    ]
    printed = gspax("serve-command", EXPERIMENT, "--cpu", *settings, cwd=tmp_path, stdout=subprocess.PIPE)
    command, _ = printed.communicate(timeout=60)
    assert printed.returncode == 0
    metrics = RunDir(workdir).metrics

    def steps():
        return [row for row in record.read_metrics(metrics) if "reward/mean" in row] if metrics.exists() else []

    with errors.open("w") as file:
        run = gspax("train", EXPERIMENT, "--workdir", workdir, *settings, cwd=tmp_path, stderr=file)
    request.addfinalizer(run.kill)
    written = log, errors, metrics
    with server(command, log):
        wait_for(lambda: run.poll() is not None or len(steps()) >= 3, "three steps", written)
    with server(command, log):
        wait_for(lambda: run.poll() is not None, "the end of the run", written)
    assert run.returncode == 0, errors.read_text()
    assert "its requests are sent again" in errors.read_text()
    assert "is back, with the newest weights" in errors.read_text()
    rows = steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["engine/probe_abs_diff"] < 1e-5 and row["engine/probe_sampled_abs_diff"] < 1e-5
        assert row["mismatch/abs_diff"] < 1e-5 and row["routing/changed"] >= 0
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
    assert [path.name for path in (tmp_path / "engine_weights").glob("weights_v*")] == [f"weights_v{STEPS:06d}"]
