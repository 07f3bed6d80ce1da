"""Any value of any field, and any argument of any command: a sentence or a plan, at once, and nothing is written."""

import itertools
import time
from pathlib import Path

import pytest
from api import main

from gspax import experiment as experiments
from gspax.experiment.overrides import keys

FILE = str(Path(__file__).parents[2] / "experiments" / "sort_gspo.py")
PARTS = ["calibration=gspax.config.Calibration", "reference=gspax.config.Reference", "lora=gspax.config.Lora"]
VALUES = [
    *("", "abc", "0", "-1", "1.5", "1e10", "1000000000000", "9" * 400, "1e400", "nan", "-inf", "1e-30", "1e30", "true"),
    *(
        "null",
        "()",
        "1,2",
        "gspax.losses.gspo",
        "gspax.config.Experiment",
        "no.such.name",
        "日本",
        "\u202e😀",
        "a" * 5000,
    ),
]
SECONDS = 10


def set_fields():
    """The fields that a value can be given to."""
    return list(keys(experiments.override(experiments.load(FILE), PARTS)))


def refused_or_planned(arguments, capsys):
    start = time.monotonic()
    code = main.main(arguments)
    out, err = capsys.readouterr()
    assert time.monotonic() - start < SECONDS, arguments
    assert code in (0, 2) and "Traceback" not in err, (arguments, err)
    if code:
        assert out == "" and all(line.startswith("gspax: ") for line in err.splitlines()), (arguments, err)
    else:
        assert "Memory per device" in out
    return code


def fuzz(pairs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = [refused_or_planned(["train", FILE, "--dry-run", *PARTS, f"{key}={value}"], capsys) for key, value in pairs]
    assert not list(tmp_path.iterdir())
    return codes


def test_some_values_of_every_field(capsys, tmp_path, monkeypatch):
    """Each field gets a value, each value about five fields."""
    codes = fuzz([*zip(set_fields(), itertools.cycle(VALUES), strict=False)], capsys, tmp_path, monkeypatch)
    assert len(codes) > 100 and codes.count(2) > 50 and codes.count(0) > 10


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES, ids=[value[:12] or "empty" for value in VALUES])
def test_every_value_of_every_field(value, capsys, tmp_path, monkeypatch):
    fuzz([(key, value) for key in set_fields()], capsys, tmp_path, monkeypatch)


LONG, BELOW_A_FILE = "n" * 5000, f"{FILE}/run"
PATHS = ["", " ", "no/such", LONG, BELOW_A_FILE, "\u202e😀", "--", "-1"]
COMMANDS = {  # the arguments of a command, with one path or value left open
    "train": ["train", FILE, "--workdir", None],
    "train file": ["train", None, "--workdir", "w"],
    "sft": ["sft", FILE, "--workdir", None],
    "eval": ["eval", FILE, "--workdir", None],
    "bench": ["bench", None],
    "compile": ["compile", None, "--topology", "v5e:2x2"],
    "compile topology": ["compile", FILE, "--topology", None],
    "report": ["report", None],
    "replay": ["replay", FILE, None],
    "replay file": ["replay", None, "no/such"],
    "convert": ["convert", "--from", None, "--to", "w"],
    "export": ["export", "--from", None, "--to", "w"],
    "export size": ["export", "--from", "w", "--to", "w", "--shard-size", None],
    "parity": ["parity", None],
    "coordinator": ["train", FILE, "--workdir", "w", "--processes", "2", "--process", "0", "--coordinator", None],
    "processes": ["train", FILE, "--workdir", "w", "--processes", None],
    "timeout": ["train", FILE, "--workdir", "w", "--join-timeout", None],
}


class ReachedError(Exception):
    """An experiment that passed the checks was valid."""


@pytest.mark.parametrize("name", COMMANDS)
def test_paths_and_values_of_every_command(name, capsys, tmp_path, monkeypatch):
    """A sentence, or the arguments are handed on. Nothing runs and no name is looked up on the network."""

    def reached(*args, **kwargs):
        raise ReachedError

    for function in (
        "gspax.training.loop.train",
        "gspax.training.warm_start.run",
        "gspax.tools.bench.run",
        "gspax.hf.source._download",
    ):
        monkeypatch.setattr(function, reached, raising=False)
    monkeypatch.setattr("gspax.parallel.joining.join", reached)
    monkeypatch.chdir(tmp_path)
    for value in [*PATHS, ":99999", "localhost:0", "1e9", "9" * 400]:
        start = time.monotonic()
        code = main.main([value if each is None else each for each in COMMANDS[name]])
        _, err = capsys.readouterr()
        assert time.monotonic() - start < SECONDS
        if code == 1 and "ReachedError" in err:
            continue
        assert code == 2 and "Traceback" not in err and err.startswith("gspax: "), (name, value[:50], err[-500:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workdir", BELOW_A_FILE], "sort_gspo.py is a file"),
        (["--workdir", LONG], "wanted a directory: "),
        (["--workdir", "w", "--coordinator", ":99999"], "wanted HOST:PORT with a port from 1 to 65535, got"),
        (
            ["--workdir", "w", "advantage=gspax.advantages.gdpo"],
            "reward: gspax.data.tasks.sort.reward: wanted as many rewards as gspax.advantages.gdpo takes, got 1",
        ),
    ],
)
def test_what_is_refused_before_anything_is_written(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", FILE, *arguments]) == 2
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_workdir_that_is_a_dangling_link_is_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere/disk")
    assert main.main(["train", FILE, "--workdir", "dangling"]) == 2
    assert "got a link to one that does not exist" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dangling"]


def test_a_workdir_without_rights_is_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    assert main.main(["train", FILE, "--workdir", str(tmp_path / "a" / "run")]) == 2
    assert f"wanted a directory to write to, {tmp_path} is not writable" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_that_no_device_holds_is_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("gspax.learner.state.device_memory", lambda device: 10**4)
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", FILE, "--workdir", "w"]) == 2
    err = capsys.readouterr().err
    assert "model: wanted at most 0.0 GiB of each device" in err and "optimizer state" in err
    assert not list(tmp_path.iterdir())
