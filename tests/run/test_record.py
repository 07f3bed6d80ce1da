"""Metrics and samples on disk survive a kill and a resume."""

import contextlib
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from api import Recorder, RunDir, read_metrics, read_rows
from event_files import read_events, scalar_steps


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def fill(run, steps, resume_step=0):
    with Recorder(run, resume_step) as recorder:
        for step in steps:
            recorder.write_metrics(step, {"reward/mean": step / 10})
            recorder.write_samples(step, [{"prompt": "1+1=", "completion": "2", "reward": 1.0}])


def steps(run):
    return [row["step"] for row in read_metrics(run.metrics)]


def test_a_line_is_on_disk_when_write_metrics_returns(run):
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": np.float32(0.5), "policy/loss": jnp.float32(0.25)})
        assert read_metrics(run.metrics) == [{"step": 1, "reward/mean": 0.5, "policy/loss": 0.25}]


def test_non_finite_numbers_are_valid_json_and_round_trip(run, capfd, caplog):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, values)
        recorder.write_samples(1, [{"reward": math.nan, "parts": [math.inf, np.float32(1.5)]}])

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    json.loads(run.metrics.read_text(), parse_constant=refuse)
    [row] = read_metrics(run.metrics)
    assert math.isnan(row["a"]) and (row["b"], row["c"]) == (math.inf, -math.inf)
    assert read_rows(run.samples / "step_000001.jsonl") == [{"reward": "NaN", "parts": ["Infinity", 1.5]}]
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_resume_drops_records_after_the_restored_step(run):
    fill(run, range(6))
    fill(run, [4, 5, 6], resume_step=3)
    assert steps(run) == [0, 1, 2, 3, 4, 5, 6]
    fill(run, [], resume_step=2)
    assert steps(run) == [0, 1, 2]
    assert sorted(path.name for path in run.samples.iterdir()) == [f"step_{n:06d}.jsonl" for n in (0, 1, 2)]


def test_a_run_that_restarts_keeps_nothing(run):
    fill(run, range(3))
    fill(run, [0], resume_step=0)
    assert steps(run) == [0]


def test_an_incomplete_last_line_is_dropped(run):
    fill(run, [1, 2, 3])
    run.metrics.write_bytes(run.metrics.read_bytes()[:-9])
    assert steps(run) == [1, 2]
    fill(run, [3], resume_step=2)
    assert steps(run) == [1, 2, 3]


DAMAGED = ['{"st', "\0" * 40, "[1]", '{"a": 1}', '{"step": "x"}', '{"step": null}', "[" * 100_000]


def test_a_timeline_goes_on_after_its_last_whole_line(run):
    for lines in ('{"a":1},\n{"b"', '{"c":2},\n'):  # the first process is killed in its second line
        with Recorder(run, 0) as recorder:
            recorder.write_timeline(lines)
            recorder.write_timeline("")
    assert run.timeline.read_text() == '[\n{"a":1},\n{"c":2},\n'


def test_damaged_lines_of_the_metrics_are_skipped_counted_and_copied(run, capsys):
    fill(run, [1, 2])
    whole = run.metrics.read_text()
    run.metrics.write_text("\n".join([whole.splitlines()[0], "", *DAMAGED, whole.splitlines()[1], '{"step": 3, "re']))
    damaged = run.metrics.read_bytes()
    assert steps(run) == [1, 2]
    assert f"{len(DAMAGED)} lines, the first 3, are not JSON and skipped\n" in capsys.readouterr().err
    fill(run, [3], resume_step=2)
    assert "a copy of the file is damaged_metrics.jsonl" in capsys.readouterr().err
    assert run.metrics.with_name("damaged_metrics.jsonl").read_bytes() == damaged
    assert steps(run) == [1, 2, 3] and capsys.readouterr().err == ""


@contextlib.contextmanager
def full_disk(size):
    """No file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_delays_metrics_and_does_not_end_the_run(run, capsys):
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"a": 1.0})
        with full_disk(run.metrics.stat().st_size):
            for step in range(2, 22):  # more than the buffer of a file takes
                recorder.write_metrics(step, {f"a{number}": 2.0 for number in range(100)})
            recorder.write_samples(2, [{"prompt": "p" * 100}])
        recorder.write_metrics(22, {"a": 3.0})
    assert steps(run) == [*range(1, 23)]
    failed, again = ("could not be written: File too large; the run goes on", "is written again")
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 5 and all(line.endswith((failed, again)) for line in warnings), "once each"
    assert {Path(line.split()[2]).name for line in warnings} == {"metrics.jsonl", "step_000002.jsonl", "tensorboard"}
    assert list(run.samples.iterdir()) == []


def test_after_a_full_disk_tensorboard_has_all_steps(run):
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"a": 1.0})
        (path,) = run.tensorboard.iterdir()
        with full_disk(path.stat().st_size + 10):  # in the middle of a record
            for step in range(2, 60):
                recorder.write_metrics(step, {"a": 1.0, "b": 2.0})
        recorder.write_metrics(60, {"a": 60.0})
    assert list(run.tensorboard.iterdir()) == [path]
    assert scalar_steps(path) == [*range(1, 61)]
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, 61)]


def test_lost_metrics_are_named(run, capsys):
    fill(run, [1, 4])
    capsys.readouterr()
    fill(run, [], resume_step=5)
    assert "has no metrics of 3 steps: 2, 3, 5" in capsys.readouterr().err


def test_files_of_others_in_samples_are_kept(run):
    fill(run, [1, 2])
    foreign = ["step_notes.jsonl", "step_.jsonl", "failed_x.jsonl", "mine.txt", "step_000002.jsonl.bak"]
    for name in foreign:
        (run.samples / name).write_text("mine")
    (run.samples / "step_000009.jsonl").mkdir()
    fill(run, [], resume_step=1)
    assert {path.name for path in run.samples.iterdir()} == {*foreign, "step_000001.jsonl", "step_000009.jsonl"}


def test_completions_with_any_text_round_trip(run):
    rows = [{"prompt": "p", "completion": "\ud800\u2028\x00\n</script>"}]
    with Recorder(run, 0) as recorder:
        recorder.write_samples(20, rows)
        recorder.write_samples_to(run.before, rows)
    assert read_rows(run.samples / "step_000020.jsonl") == read_rows(run.before) == rows


def test_tensorboard_has_the_metrics_and_the_purge(run):
    fill(run, [1, 2])
    fill(run, [2], resume_step=1)
    events = [event for path in sorted(run.tensorboard.iterdir()) for event in read_events(path)]
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert [step for step, _, _ in scalars] == [1, 2, 2]
    assert scalars[0][1:] == ("reward/mean", pytest.approx(0.1))
    assert [e.step for e in events if e.session_log.status == 1][-1] == 2


def test_scalars_do_not_import_pytorch():
    """tensorboardX would, in seconds. A process that writes no scalars does not import tensorboardX either."""
    pytest.importorskip("torch")
    code = (
        "import sys; import gspax.run.record; assert 'tensorboardX' not in sys.modules; "
        "import gspax.run.trackers.tensorboard; assert 'torch' not in sys.modules; import torch"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_tensorboardx_a_notice_is_printed_once(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gspax.run.trackers.tensorboard", None)
    fill(run, [1, 2])
    assert steps(run) == [1, 2]
    assert capsys.readouterr().err.count("tensorboardX") == 1
    assert not run.tensorboard.exists()
