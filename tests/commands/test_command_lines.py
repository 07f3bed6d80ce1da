"""Command lines that cannot work, or say the same twice, get one sentence and the exit code 2."""

import os
from pathlib import Path

import pytest
from api import main, open_run

from gspax.commands.train import make_parser

STUB = str(Path(__file__).parents[1] / "stub_experiment.py")
SMALL = str(Path(__file__).parents[1] / "small_experiment.py")


def refused(capfd, *arguments):
    """The sentences of a command that is refused."""
    assert main.main([*map(str, arguments)]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "arguments",
    [
        ("train", SMALL, "--workdir", "/proc/x"),
        ("train", SMALL, "--dry-run", "--workdir", "/proc/x/y"),
        ("bench", SMALL, "--profile", "/proc/x"),
        ("serve-command", SMALL, "engine=gspax.config.Engine", "engine.folder=/proc/x", "warm_start=null"),
    ],
)
def test_a_place_where_nothing_can_be_created_is_one_sentence(arguments, capfd):
    assert "wanted a directory to write to, nothing can be created in /proc" in refused(capfd, *arguments)


def test_a_file_is_no_folder_for_a_trace(capfd):
    assert f"{SMALL}: wanted a directory, but {SMALL} is a file" in refused(capfd, "bench", SMALL, "--profile", SMALL)


def test_loops_of_links_and_pipes_are_no_experiment_files(tmp_path, capfd):
    loop, pipe = tmp_path / "loop.py", tmp_path / "pipe.py"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    assert "Too many levels of symbolic links" in refused(capfd, "train", loop, "--dry-run")
    assert "wanted an experiment file, got a pipe" in refused(capfd, "train", pipe, "--dry-run")
    assert f"{loop}: wanted a file, got a link to nothing" in refused(
        capfd, "convert", "--from", tmp_path, "--to", tmp_path / "out"
    )


def test_a_dry_run_refuses_the_directory_of_another_experiment(tmp_path, capfd):
    run = open_run(tmp_path / "run", {"name": "other", "seed": 3})
    run.metrics.write_text('{"step": 1}\n')
    before = sorted(run.path.rglob("*"))
    assert "holds another experiment" in refused(capfd, "train", SMALL, "--dry-run", "--workdir", run.path)
    assert sorted(run.path.rglob("*")) == before


def test_a_dry_run_compares_two_checkpoints_with_the_free_space(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert main.main(["train", SMALL, "--dry-run", "--workdir", str(tmp_path / "run"), "seed=1", "seed=2"]) == 0
    said = capfd.readouterr().err
    assert "--workdir: 0.00 GiB are free in" in said and "two checkpoints take" in said
    assert "seed=1: without effect, because seed=2 follows" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "names"),
    [("none", ()), ("", ()), ("wandb,wandb", ("wandb",)), ("nonewandb", ("nonewandb",)), ("a, b", ("a", "b"))],
)
def test_report_to_is_read_as_it_is_written(text, names):
    assert make_parser().parse_args([SMALL, "--report-to", text]).report_to == names


def test_a_secret_for_one_process_is_refused(tmp_path, capfd):
    arguments = "train", SMALL, "--workdir", tmp_path / "run", "--secret-file", "/nowhere"
    assert "--secret-file: wanted several processes" in refused(capfd, *arguments)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reference=gspax.config.Reference", "reference.coefficient=0.1"],
            "reference.coefficient: wanted reference.loss or reference.reward",
        ),
        (
            ["guard.collapse=gspax.config.Collapse", "guard.collapse.alarms=(reward,reward)"],
            "guard.collapse.alarms: wanted each of them once, got reward, reward",
        ),
        (
            ["lora=gspax.config.Lora", "lora.checkpoint=/nowhere"],
            "lora.checkpoint: wanted a folder with adapter_config.json, there is none at '/nowhere'",
        ),
        (["lora=gspax.config.Lora", "lora.attention=(query,query)"], "lora.attention: "),
    ],
)
def test_a_setting_without_effect_is_refused(overrides, said, capfd):
    assert said in refused(capfd, "train", SMALL, "--dry-run", *overrides)


def test_a_reference_without_a_term_is_told(capfd):
    assert main.main(["train", SMALL, "--dry-run", "reference=gspax.config.Reference"]) == 0
    shown = capfd.readouterr()
    assert "warning: reference: the KL to it is measured only" in shown.err
    assert "3 supervised updates before them, each of 16 rows, at most 128 tokens" in shown.out


def test_a_long_value_is_shortened_and_the_ends_of_a_text_are_shown():
    from gspax.experiment.plan import _short

    assert _short("a" * 150).endswith("… (150 characters)") and _short("{prompt}\n") == "'{prompt}\\n'"
    assert _short("plain") == "plain" and _short(1e-4) == "1e-4"
