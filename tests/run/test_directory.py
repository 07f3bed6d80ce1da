"""A run directory is created, resumed or rejected, never overwritten."""

import copy
import json
import os
from pathlib import Path

import pytest
from api import directory, folders, manifest, open_run, record

from gspax.errors import UserError
from gspax.report import run_page

DESCRIPTION = {"name": "sort", "optimizer": {"learning_rate": 3e-4}, "schedule": {"steps": 10}}


def changed(**parts):
    return copy.deepcopy(DESCRIPTION) | parts


def repr_start(value):
    return repr(value[:8])


def listing(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_run_records_its_experiment_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_SOME_SETTING", "1")
    monkeypatch.setenv("JAX_API_KEY", "secret-1")
    monkeypatch.setenv("HF_TOKEN", "secret-2")
    run = open_run(tmp_path / "a" / "b", DESCRIPTION)
    assert json.loads(run.experiment.read_text()) == DESCRIPTION
    [attempt] = json.loads(run.environment.read_text())
    assert attempt["variables"]["JAX_SOME_SETTING"] == "1"
    assert attempt["packages"]["jax"] and attempt["python"] and attempt["command"]
    assert "secret" not in run.environment.read_text()
    assert sorted(p.name for p in run.path.iterdir()) == ["environment.json", "experiment.json"]


def test_the_same_experiment_resumes_and_adds_an_attempt(tmp_path):
    open_run(tmp_path, DESCRIPTION)
    run = open_run(tmp_path, DESCRIPTION)
    assert len(json.loads(run.environment.read_text())) == 2
    open_run(tmp_path, changed(schedule={"steps": 20}))  # may be raised
    assert json.loads(run.experiment.read_text())["schedule"]["steps"] == 20


def test_another_experiment_is_rejected_with_its_fields_and_changes_nothing(tmp_path):
    open_run(tmp_path, DESCRIPTION).metrics.touch()
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 3e-4 -> 1e-4"):
        open_run(tmp_path, changed(optimizer={"learning_rate": 1e-4}))
    assert listing(tmp_path) == before


def test_a_change_that_rounds_sums_differently_is_refused_with_the_reason(tmp_path):
    open_run(tmp_path, DESCRIPTION).metrics.touch()
    why = "a resumed run must be bit-identical to an uninterrupted one"
    with pytest.raises(UserError, match=rf"schedule\.microbatch_tokens: \(absent\) -> 400\. .*{why}"):
        open_run(tmp_path, changed(schedule={"steps": 10, "microbatch_tokens": 400}))
    with pytest.raises(UserError) as other:
        open_run(tmp_path, changed(name="b", schedule={"steps": 10, "microbatch_tokens": 400}))
    assert why not in str(other.value)


def test_an_experiment_that_differs_everywhere_is_a_sentence_of_bounded_length(tmp_path):
    """As of a damaged experiment.json that is still an object."""
    open_run(tmp_path, DESCRIPTION).metrics.touch()
    (tmp_path / "experiment.json").write_text(json.dumps({f"field{i}": i for i in range(500)}))
    for function in (open_run, directory.find_run):
        with pytest.raises(UserError, match=r"; and 4\d\d more$") as told:
            function(tmp_path, DESCRIPTION)
        assert len(str(told.value)) < 1500


def test_a_mistake_that_ended_a_run_at_once_can_be_corrected_in_the_same_directory(tmp_path):
    """Such as a model.checkpoint that is not there. What a run leaves once it has begun belongs to its experiment."""
    for name in ("metrics.jsonl", "start/0/x", "warm_start/metrics.jsonl", "newest_checkpoint.json"):
        run, other = tmp_path / name.partition(".")[0], changed(optimizer={"learning_rate": 1e-4})
        open_run(run, DESCRIPTION)
        assert json.loads(open_run(run, other).experiment.read_text()) == other
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
        with pytest.raises(UserError, match=r"optimizer\.learning_rate: 1e-4 -> 3e-4"):
            open_run(run, DESCRIPTION)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs:/bucket/run", Path("gs://bucket/run")])
def test_a_url_of_no_bucket_is_rejected_and_creates_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="wanted a local path or gs://BUCKET/NAME"):
        open_run(url, DESCRIPTION)
    assert not any(tmp_path.iterdir())


def test_a_directory_that_is_not_a_run_is_rejected_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not empty and not a gspax run"):
        open_run(tmp_path, DESCRIPTION)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "thesis.tex", DESCRIPTION)


def test_a_directory_that_is_empty_or_from_a_killed_start_is_used(tmp_path):
    (tmp_path / "experiment.json.tmp").write_text('{"na')
    assert open_run(tmp_path, DESCRIPTION).experiment.exists()
    assert not (tmp_path / "experiment.json.tmp").exists()


CONTENTS = [b"", b'{"na', b"\0" * 50, b"[1]", b"{}", b"\xff\xfe", b"[" * 100_000, None]


def start_with_checkpoint(path):
    """A run, with as much of a checkpoint as says what it is of."""
    run = open_run(path, DESCRIPTION)
    extra = manifest.extra_file(run.checkpoints, 2)
    extra.parent.mkdir(parents=True)
    extra.write_text(json.dumps({"experiment": DESCRIPTION}))
    (extra.parent / "manifest.json").write_text("{}")
    return run


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content and content[:8]))
def test_a_damaged_experiment_file_is_set_aside_and_the_newest_checkpoint_compared(content, tmp_path, capsys):
    run = start_with_checkpoint(tmp_path)
    run.experiment.unlink()
    if content is not None:
        run.experiment.write_bytes(content)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 3e-4 -> 1e-4"):
        open_run(tmp_path, changed(optimizer={"learning_rate": 1e-4}))
    assert listing(tmp_path) == before and directory.find_run(tmp_path, DESCRIPTION)
    open_run(tmp_path, DESCRIPTION)
    assert json.loads(run.experiment.read_text()) == DESCRIPTION
    if content is not None:
        assert (tmp_path / "damaged_experiment.json").read_bytes() == content
        assert "experiment.json is damaged: moved to damaged_experiment.json" in capsys.readouterr().err


def test_an_evaluation_may_change_where_and_how_many_are_sampled_at_once(tmp_path):
    open_run(tmp_path, DESCRIPTION)
    assert directory.find_run(tmp_path, changed(sampling={"prompts": 3}))
    with pytest.raises(UserError, match=r"give the FILE of that run, .*: optimizer\.learning_rate: 3e-4 -> 1e-4"):
        directory.find_run(tmp_path, changed(optimizer={"learning_rate": 1e-4}))


def test_an_experiment_file_that_differs_from_the_checkpoint_does_not_block_its_run(tmp_path, capsys):
    run = start_with_checkpoint(tmp_path)
    run.experiment.write_text(run.experiment.read_text().replace('"sort"', '"sors"'))
    open_run(tmp_path, DESCRIPTION)
    assert json.loads(run.experiment.read_text()) == DESCRIPTION
    assert "is not of the experiment of the newest checkpoint: moved to damaged_" in capsys.readouterr().err


def test_what_is_of_another_kind_in_the_place_of_a_file_or_folder_is_set_aside(tmp_path, capsys):
    run = open_run(tmp_path, DESCRIPTION)
    files = [run.lock, run.environment, run.metrics, run.newest, run.skipped, run.rollbacks, run.report]
    places = [run.checkpoints, run.tensorboard, run.start, run.warm_start.path, run.tasks]
    for path in (*files, run.experiment, run.before):
        path.unlink(missing_ok=True)
        (path / "inside").mkdir(parents=True)
    for path in places:
        path.write_text("a file")
    with directory.enter_run(tmp_path, DESCRIPTION), record.Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5})
        recorder.write_samples_to(run.before, [{"prompt": "1", "completion": "2", "reward": 0.0}])
    run.after.write_text('{"prompt": 3}\n{"prompt": "1", "completion": "2", "reward": "NaN"}\n\0\0\n')
    for number, text in enumerate(["{", "[]", '{"summary": 3}', '{"summary": {"problems": 1}}']):
        path = run.tasks_at(3) / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run_page.write(tmp_path)
    for path in (*files, run.experiment, *places):
        assert path.with_name(f"damaged_{path.name}").exists(), path
    err = capsys.readouterr().err
    assert err.count(" is a folder: moved to damaged_") == len(files) + 1 and "experiment.json is damaged: moved" in err
    assert err.count(" is no folder: moved to damaged_") == len(places)
    assert err.count("cannot be read and is not in the report") == 4


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_log_is_set_aside(tmp_path, capsys):
    """Opening it would wait for ever; `gspax eval` appends to its file without a lock of the run."""
    run = open_run(tmp_path, DESCRIPTION)
    os.mkfifo(run.metrics)
    with directory.enter_run(tmp_path, DESCRIPTION), record.Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5})
    for make in (os.mkfifo, os.mkdir):
        make(run.evaluations)
        folders.append_line(run.evaluations, "{}\n")
        assert run.evaluations.read_text() == "{}\n"
        run.evaluations.unlink()
    err = capsys.readouterr().err
    assert (
        err.count(" is no regular file: moved to damaged_") == 2 and err.count(" is a folder: moved to damaged_") == 1
    )


@pytest.mark.parametrize("content", [b'[{"a": 1', b"\0" * 50, b'{"a": 1}', b"\xff\xfe", b"[" * 100_000], ids=repr_start)
def test_a_damaged_environment_does_not_block_a_resume(tmp_path, content, capsys):
    run = open_run(tmp_path, DESCRIPTION)
    run.environment.write_bytes(content)
    for _ in range(2):
        open_run(tmp_path, DESCRIPTION)
    assert len(json.loads(run.environment.read_text())) == 2
    assert (tmp_path / "damaged_environment.json").read_bytes() == content
    assert capsys.readouterr().err.count("environment.json is damaged: moved to damaged_environment.json") == 1


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    folders.write_atomically(path, "old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        folders.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_the_warm_start_has_separate_paths(tmp_path):
    run = directory.RunDir(tmp_path)
    assert run.warm_start.checkpoints == tmp_path / "warm_start" / "checkpoints"
    assert run.warm_start.metrics != run.metrics
