"""Runs whose files are damaged while they are stopped, whose disk fills, or whose directory another run wants."""

import random
import shutil
import subprocess
import sys
import time

import pytest
import runs
from runs import STEPS, VICTIM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run that has done half of its steps."""
    workdir = tmp_path_factory.mktemp("half") / "run"
    run = runs.start(workdir, steps=STEPS // 2)
    assert run.wait() == 0, run.text()
    return workdir


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def blank(path, rng):
    path.write_bytes(bytes(path.stat().st_size))


def delete(path, rng):
    path.unlink()


DAMAGES = {"bit flipped": flip, "truncated": truncate, "filled with NULs": blank, "deleted": delete}


def checkpoint_files(workdir):
    return [path for path in (workdir / "checkpoints" / str(STEPS // 2)).rglob("*") if path.is_file()]


def other_files(workdir):
    """All beside the checkpoints but experiment.json."""
    files = [path for path in workdir.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    return [path for path in files if path.name != "experiment.json"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_the_newest_checkpoint_costs_two_steps(name, half, reference, tmp_path, injected):
    """Every file and many bits of it are in `test_storage`, without a run; here are three."""
    rng = random.Random(name)
    for number in range(3):
        workdir = runs.copy(half, tmp_path / str(number))
        path = rng.choice([path for path in checkpoint_files(workdir) if path.stat().st_size])
        DAMAGES[name](path, rng)
        run = runs.start(workdir, with_report=False)
        assert run.wait() == 0 and "Traceback" not in run.text(), (path, run.text())
        assert runs.differences(workdir, reference) == [], (path, run.text())
        injected[f"{name}: a file of the newest checkpoint"] += 1


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_every_other_file_costs_lines_of_logs(name, half, reference, tmp_path, injected):
    workdir = runs.copy(half, tmp_path / "run")
    files = other_files(workdir)
    assert {"metrics.jsonl", "environment.json", "newest_checkpoint.json"} <= {path.name for path in files}
    for path in files:
        DAMAGES[name](path, random.Random(name))
    run = runs.start(workdir, with_report=False)
    assert run.wait() == 0 and "Traceback" not in run.text(), run.text()
    assert set(runs.differences(workdir, reference)) <= {"metrics.jsonl", "samples/"}, run.text()
    injected[f"{name}: a file beside the checkpoints"] += len(files)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_experiment_is_written_again(name, half, reference, tmp_path, injected):
    """The newest checkpoint holds the experiment too."""
    workdir = runs.copy(half, tmp_path / "run")
    DAMAGES[name](workdir / "experiment.json", random.Random(name))
    run = runs.start(workdir, with_report=False)
    assert run.wait() == 0 and "Traceback" not in run.text(), run.text()
    assert runs.differences(workdir, reference) == []
    assert (workdir / "experiment.json").read_bytes() == (reference / "experiment.json").read_bytes()
    injected[f"{name}: experiment.json"] += 1


def test_a_second_run_of_a_directory_is_refused(reference, tmp_path, injected):
    """Also if both start at the same moment: one of them does."""
    workdir = tmp_path / "run"
    both = runs.start(workdir), runs.start(workdir, log="second")
    while not (workdir / "metrics.jsonl").exists():
        time.sleep(0.01)
    third = runs.start(workdir, log="third")
    codes = [run.wait() for run in both]
    texts = [run.text() for run in (*both, third)]
    assert sorted(codes) == [0, 1] and third.wait() == 1, texts
    refused = [text for text in texts if "is in use by another run" in text]
    assert len(refused) == 2 and all(text.count("\n") == 1 for text in refused)
    assert runs.differences(workdir, reference) == []
    injected["second run of the directory"] += 2


def test_a_run_whose_lock_is_taken_over_ends(tmp_path, injected):
    """As after a suspension of more than a minute, or if somebody deletes the file."""
    for change in (lambda path: path.write_text("{}"), lambda path: path.unlink()):
        workdir = tmp_path / f"run{injected['lock lost']}"
        run = runs.start(workdir, steps=3000)
        while not (workdir / "newest_checkpoint.json").exists():
            time.sleep(0.01)
        change(workdir / "lock.json")
        before = len(runs.metrics(workdir))
        assert run.wait() == 1 and "Traceback" not in run.text(), run.text()
        assert "lock.json is no longer the lock of this run" in run.text().splitlines()[-1]
        assert len(runs.metrics(workdir)) <= before + 1
        injected["lock lost"] += 1


FILLED = """
set -eu
mount -t tmpfs -o size=32m tmpfs "$1"
"$2" -m gspax train "$3" --workdir "$1/run" schedule.steps=300 schedule.checkpoint_every=10 &
run=$!
until [ "$(grep -c policy/loss "$1/run/metrics.jsonl" 2>/dev/null)" -ge 12 ] 2>/dev/null; do sleep 0.02; done
dd if=/dev/zero of="$1/filler" bs=1k 2>/dev/null || true
sleep 1
rm "$1/filler"
wait $run
cp -r "$1/run" "$4"
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="a file system of 32 MB cannot be mounted here",
)
def test_a_full_disk_is_survived(tmp_path, injected):
    """ENOSPC from a small file system that is filled during the run and freed a second later."""
    whole, disk, workdir = tmp_path / "whole", tmp_path / "disk", tmp_path / "run"
    run = runs.start(whole, "schedule.checkpoint_every=10", steps=300)
    assert run.wait() == 0, run.text()
    disk.mkdir()
    command = ["unshare", "-rm", "bash", "-c", FILLED, "bash", disk, sys.executable, VICTIM, workdir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=runs.environment())
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "the run goes on" in done.stderr
    assert set(runs.differences(workdir, whole, 300)) <= {"samples/"}
    injected["disk full for a second"] += 1
