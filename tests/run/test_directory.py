"""The run directory: started, resumed or refused, never overwritten."""

import copy
import json

import pytest

from gspax.errors import UserError
from gspax.run import directory
from gspax.run.directory import open_run

DESCRIPTION = {"name": "sort", "optimizer": {"learning_rate": 3e-4}, "schedule": {"steps": 10}}


def changed(**parts):
    return copy.deepcopy(DESCRIPTION) | parts


def listing(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_run_says_what_it_is_and_where_it_runs(tmp_path, monkeypatch):
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


def test_the_same_experiment_resumes_and_every_attempt_is_kept(tmp_path):
    open_run(tmp_path, DESCRIPTION)
    run = open_run(tmp_path, DESCRIPTION)
    assert len(json.loads(run.environment.read_text())) == 2
    open_run(tmp_path, changed(schedule={"steps": 20}))  # may be raised
    assert json.loads(run.experiment.read_text())["schedule"]["steps"] == 20


def test_another_experiment_is_refused_by_its_keys_and_changes_nothing(tmp_path):
    open_run(tmp_path, DESCRIPTION)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 3e-4 -> 1e-4"):
        open_run(tmp_path, changed(optimizer={"learning_rate": 1e-4}))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3:/bucket/run"])
def test_an_address_is_refused_and_makes_no_folder(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="wanted a directory of a file system"):
        open_run(address, DESCRIPTION)
    assert not any(tmp_path.iterdir())


def test_a_directory_of_something_else_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not empty and is no gspax run"):
        open_run(tmp_path, DESCRIPTION)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "thesis.tex", DESCRIPTION)


def test_an_empty_directory_and_one_whose_start_was_killed_are_taken(tmp_path):
    (tmp_path / "experiment.json.tmp").write_text('{"na')
    assert open_run(tmp_path, DESCRIPTION).experiment.exists()
    assert not (tmp_path / "experiment.json.tmp").exists()


def test_a_damaged_experiment_file_is_one_sentence(tmp_path):
    (tmp_path / "experiment.json").write_text('{"na')
    with pytest.raises(UserError, match=r"experiment\.json cannot be read"):
        open_run(tmp_path, DESCRIPTION)


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    directory.write_atomically(path, "old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(directory.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        directory.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_the_paths_of_the_warm_start_are_its_own(tmp_path):
    run = directory.RunDir(tmp_path)
    assert run.warm_start.checkpoints == tmp_path / "warm_start" / "checkpoints"
    assert run.warm_start.metrics != run.metrics
