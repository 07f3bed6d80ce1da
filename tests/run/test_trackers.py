"""Trackers get what a run records, and none of them can stop or slow the run."""

import math
import sys
import threading
import time
from functools import partial

import pytest
from api import Recorder, RunDir
from fake_trackers import FAKES, install

from gspax.errors import UserError, how_to_install
from gspax.run import trackers
from gspax.run.trackers import Trackers

DESCRIPTION = {"name": "sums", "seed": 3, "loss": {"function": "gspax.losses.gspo", "clip_low": 0.25}}


@pytest.fixture
def fake(monkeypatch):
    return partial(install, monkeypatch)


def track(folder, names, steps, description=DESCRIPTION, report=None):
    """One attempt of a run. Its id."""
    run = RunDir(folder)
    with Trackers(names) as tracked, Recorder(run, 0, tracked) as recorder:
        tracked.start(run, description)
        for step in steps:
            recorder.write_metrics(step, {"reward/mean": step / 4})
        tracked.finish(report)
    return run.tracker_id.read_text().strip()


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_gets_settings_metrics_and_the_report_and_a_resumed_run_continues(
    name, is_local, fake, bucket, tmp_path
):
    runs, page = fake(name), (tmp_path if is_local else bucket[0]) / "report.html"
    page.write_text("<p>done")
    id = track(tmp_path / "a", [name], [1, 2])
    assert runs[id].report is None and runs[id].ended == 1
    assert track(tmp_path / "a", [name], [2, 3], report=page) == id and [*runs] == [id]
    record = runs[id]
    assert (record.attempts, record.ended, record.report, record.name) == (2, 2, "<p>done", "sums/a")
    assert record.rows == [(step, {"reward/mean": step / 4}) for step in (1, 2, 2, 3)]
    assert {key: str(value) for key, value in record.config.items()} == {
        "name": "sums", "seed": "3", "loss": "gspax.losses.gspo", "loss.clip_low": "0.25"
    }  # fmt: skip
    assert track(tmp_path / "b", [name], [1]) != id


def test_several_trackers_at_once_and_only_those_that_are_named(fake, tmp_path):
    every = {name: fake(name) for name in FAKES}
    id = track(tmp_path / "a", [*FAKES], range(50))
    assert [len(runs[id].rows) for runs in every.values()] == [50] * 3
    assert not RunDir(tmp_path / "a").tensorboard.exists()
    track(tmp_path / "b", ["tensorboard", "wandb"], [1])
    assert any(RunDir(tmp_path / "b").tensorboard.iterdir()) and [len(runs) for runs in every.values()] == [2, 1, 1]


def test_no_secret_leaves_the_machine(fake, tmp_path):
    runs = fake("wandb")
    secret = {"name": "x", "reward": {"function": "my.judge", "api_key": "0123", "url": "https://me:pw@judge.org"}}
    config = runs[track(tmp_path / "a", ["wandb"], [], secret)].config
    assert config["reward.api_key"] == "<hidden>" and config["reward.url"] == "https://<hidden>@judge.org"


def raising(*given, **named):
    raise SystemExit("wandb: error: no account")


class Broken:
    """A run of wandb of which one function raises."""

    def __init__(self, **functions):
        vars(self).update(dict.fromkeys(("log", "finish", "define_metric"), lambda *given, **named: None) | functions)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"Settings": raising}, "failed in start: wandb: error: no account; the run goes on"),
        (
            {"login": lambda prompt: False},
            "failed in start: no API key: `wandb login`, WANDB_API_KEY, or WANDB_MODE=off",
        ),
        ({"init": lambda **_: Broken(log=raising)}, "failed in log: wandb: error: no account; the run goes on"),
        ({"init": lambda **_: Broken(finish=raising)}, "failed in finish: wandb: error: no account; the run goes on"),
    ],
)
def test_a_broken_tracker_is_one_warning_and_the_others_go_on(others, said, fake, tmp_path, capsys):
    fake("wandb", **others)
    runs = fake("trackio")
    id = track(tmp_path / "a", ["wandb", "trackio"], [1, 2, 3])
    assert len(runs[id].rows) == 3 and runs[id].ended == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gspax: warning: the tracker wandb {said}")


def test_a_package_that_cannot_be_imported_is_one_warning(fake, tmp_path, capsys, monkeypatch):
    fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    track(tmp_path / "a", ["wandb"], [1, 2])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gspax: warning: the tracker wandb cannot be used: import of wandb halted")


def test_packages_are_imported_one_after_the_other(fake, tmp_path, monkeypatch):
    """In two threads at once Python 3.11.7 raised "AST constructor recursion depth mismatch"."""
    load, imported, most = trackers.importlib.import_module, [], []

    def slowly(name):
        imported.append(name)
        most.append(len(imported))
        time.sleep(0.05)
        imported.remove(name)
        return load(name)

    for name in FAKES:
        fake(name)
    monkeypatch.setattr(trackers.importlib, "import_module", slowly)
    track(tmp_path / "a", [*FAKES], [1])
    assert most == [1] * len(FAKES)


def test_an_import_that_hangs_does_not_stop_the_other_trackers(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 1.0)
    monkeypatch.setattr(trackers, "IMPORT", 0.1)
    fake("wandb")
    runs, load, hang = fake("trackio"), trackers.importlib.import_module, threading.Event()

    def hang_in_wandb(name):
        if name.endswith("wandb"):
            hang.wait()
        return load(name)

    monkeypatch.setattr(trackers.importlib, "import_module", hang_in_wandb)
    id = track(tmp_path / "a", ["wandb", "trackio"], [1, 2])
    assert len(runs[id].rows) == 2
    hang.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "gspax_wandb"]:
        thread.join(5)  # or it would write to the next test's package


def test_a_tracker_that_hangs_neither_slows_the_run_nor_fills_the_memory(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    monkeypatch.setattr(trackers, "SIZE", 20)
    hang, given = threading.Event(), []
    fake("wandb", init=lambda **_: Broken(log=lambda row: (hang.wait(), given.append(row))))
    runs, started = fake("trackio"), time.monotonic()
    id = track(tmp_path / "a", ["wandb", "trackio"], range(15))
    assert len(runs[id].rows) == 15, "the others wait for nobody"
    track(tmp_path / "b", ["wandb"], range(2000))
    assert time.monotonic() - started < 5
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" wandb ")[2].partition(":")[0] for line in lines] == [
        "has not finished after 0.3 s",
        "is too slow",
    ]
    hang.set()
    deadline = time.monotonic() + 5
    while len(given) < 15 + 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 35 <= len(given) <= 15 + 22, "the others were dropped"


def test_metrics_that_are_not_finite_are_given_as_they_are(fake, tmp_path):
    runs = fake("wandb")
    with Trackers(["wandb"]) as tracked:
        tracked.start(RunDir(tmp_path), DESCRIPTION)
        tracked.log({"loss": math.nan}, 1)
    ((_, row),) = runs[RunDir(tmp_path).tracker_id.read_text().strip()].rows
    assert math.isnan(row["loss"])


def test_trackers_that_are_not_there_are_one_sentence(monkeypatch, capsys):
    import small_experiment
    from api import main

    for name, sentence in (
        ("wand", "--report-to: wanted some of tensorboard, wandb, trackio, mlflow, or none, got 'wand'"),
        ("mlflow", f"--report-to: mlflow is not installed: {how_to_install('trackers')}"),
    ):
        monkeypatch.setattr(trackers, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=sentence[:40]):
            trackers.check([name])
        assert main.main(["train", small_experiment.__file__, "--dry-run", "--report-to", f"tensorboard,{name}"]) == 2
        assert capsys.readouterr().err.startswith(f"gspax: {sentence}")
    assert main.main(["train", small_experiment.__file__, "--dry-run", "--report-to", "none"]) == 0
