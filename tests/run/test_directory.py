"""A run directory is created, resumed or rejected, never overwritten."""

import copy
import json

import pytest

from gspax.errors import UserError
from gspax.run import directory, folders
from gspax.run.directory import open_run

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
    open_run(tmp_path, DESCRIPTION)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 3e-4 -> 1e-4"):
        open_run(tmp_path, changed(optimizer={"learning_rate": 1e-4}))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3:/bucket/run"])
def test_a_url_is_rejected_and_creates_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="wanted a directory of a file system"):
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


def test_a_damaged_experiment_file_is_one_error(tmp_path):
    (tmp_path / "experiment.json").write_text('{"na')
    with pytest.raises(UserError, match=r"experiment\.json cannot be read"):
        open_run(tmp_path, DESCRIPTION)


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

    monkeypatch.setattr(folders.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        folders.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_the_warm_start_has_separate_paths(tmp_path):
    run = directory.RunDir(tmp_path)
    assert run.warm_start.checkpoints == tmp_path / "warm_start" / "checkpoints"
    assert run.warm_start.metrics != run.metrics
