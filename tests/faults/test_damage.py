"""Runs whose files are damaged while they are stopped, whose disk fills, or whose directory another run wants."""

import random
import re
import shutil
import subprocess
import sys
import time

import pytest
import runs
from runs import STEPS, VICTIM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOGS = {"metrics.jsonl": "metrics.jsonl", "samples": "samples/"}  # what only the lost lines of a log may differ in


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


def kinds_of_files(workdir):
    """One file of each kind: names that differ in numbers and hashes alone are of one."""
    files = sorted(path.relative_to(workdir) for path in workdir.rglob("*") if path.is_file() and path.stat().st_size)
    return list({re.sub(r"[0-9a-f]{32}|[0-9]+", "N", str(file)): file for file in files}.values())  # the newest step's


DAMAGES = {"bit flipped": flip, "truncated": truncate, "filled with NULs": blank, "deleted": delete}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_any_kind_of_file_costs_at_most_that_file(name, half, reference, tmp_path, injected):
    rng = random.Random(name)
    files = kinds_of_files(half)
    assert len(files) > 12
    for number, file in enumerate(files):
        workdir = runs.copy(half, tmp_path / str(number))
        DAMAGES[name](workdir / file, rng)
        run = runs.start(workdir, with_report=False)
        code, text = run.wait(), run.text()
        assert "Traceback" not in text, (file, text)
        if file.name == "experiment.json":  # what the run is: refused, and nothing is changed
            assert code == 2 and text.startswith("gspax: "), (file, text)
            shutil.copyfile(half / file, workdir / file)
            run = runs.start(workdir, with_report=False)
            code, text = run.wait(), run.text()
        assert code == 0, (file, text)
        assert set(runs.differences(workdir, reference)) <= {LOGS.get(file.parts[0])}, (file, text)
        kind = "of a checkpoint" if file.parts[0] == "checkpoints" else "beside the checkpoints"
        injected[f"{name}: a file {kind}"] += 1
        shutil.rmtree(workdir)


def test_a_second_run_of_a_directory_is_refused(reference, tmp_path, injected):
    """Also if both start at the same moment: one of them does."""
    workdir = tmp_path / "run"
    both = runs.start(workdir), runs.start(workdir, log="second")
    while not (workdir / "metrics.jsonl").exists():
        time.sleep(0.01)
    third = runs.start(workdir, log="third")
    codes = [run.wait() for run in both]
    texts = [run.text() for run in (*both, third)]
    assert sorted(codes) == [0, 2] and third.wait() == 2, texts
    refused = [text for text in texts if "is in use by another run" in text]
    assert len(refused) == 2 and all(text.count("\n") == 1 for text in refused)
    assert runs.differences(workdir, reference) == []
    injected["second run of the directory"] += 2


FILLED = """
set -eu
mount -t tmpfs -o size=32m tmpfs "$1"
"$2" -m gspax train "$3" --workdir "$1/run" schedule.steps=60 &
run=$!
until [ "$(grep -c policy/loss "$1/run/metrics.jsonl" 2>/dev/null)" -ge 12 ] 2>/dev/null; do sleep 0.02; done
dd if=/dev/zero of="$1/filler" bs=1k 2>/dev/null || true
sleep 2
rm "$1/filler"
wait $run
cp -r "$1/run" "$4"
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="a file system of 32 MB cannot be mounted here",
)
def test_a_full_disk_is_survived(tmp_path, injected):
    """ENOSPC from a small file system that is filled during the run and freed two seconds later."""
    whole, disk, workdir = tmp_path / "whole", tmp_path / "disk", tmp_path / "run"
    run = runs.start(whole, steps=60)
    assert run.wait() == 0, run.text()
    disk.mkdir()
    command = ["unshare", "-rm", "bash", "-c", FILLED, "bash", disk, sys.executable, VICTIM, workdir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=runs.environment())
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "the run goes on" in done.stderr
    assert set(runs.differences(workdir, whole, 60)) <= {"samples/"}
    injected["disk full for two seconds"] += 1
