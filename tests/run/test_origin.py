"""A run keeps the user's code as it was at the start, and notes where her data and her repository are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_experiment
from api import RunDir, directory, loop, main, open_run, warm_start

from gspax.errors import UserError
from gspax.experiment import describe, load
from gspax.experiment.origin import LARGEST, find_origin
from gspax.report import card

FILE = """
from dataclasses import replace
from functools import partial
import origin_unused
from gspax.data import PassRate, jsonl
from origin_reward import reward
from origin_rules.short import short
from origin_stub import experiment as stub

rules = (short, PassRate("data/samples.jsonl", unseen="keep"))
data = jsonl("data/train.jsonl", heldout="data/test.jsonl", prompt="q", answer="a", filters=rules)
experiment = replace(stub, data=data, reward=partial(reward, scale=2.0))
"""
FILES = {
    "anna.py": FILE,
    "origin_unused.py": "def unused():\n    return 0\n",
    "origin_words.py": "def words(text):\n    return text.split()\n",
    "origin_reward.py": (
        "from origin_words import words\n\n\n"
        "def reward(problem, completion, *, scale):\n    return scale * (words(completion) == [problem.answer])\n"
    ),
    "origin_stub.py": Path(stub_experiment.__file__).read_text(),
    "origin_rules/__init__.py": "",
    "origin_rules/short.py": "def short(problem):\n    return None if len(problem.prompt) < 9 else 'long'\n",
    "data/train.jsonl": "".join(f'{{"q": "{i}+1=", "a": "{i + 1}"}}\n' for i in range(20)),
    "data/test.jsonl": '{"q": "77+1=", "a": "78"}\n',
    "data/samples.jsonl": '{"prompt": "1+1=", "reward": 0.5}\n',
}
KEPT = ["anna.py", "origin_reward.py", "origin_rules/short.py", "origin_stub.py", "origin_words.py"]


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with an experiment, its modules, and its data, in a repository."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder.parent, "init", "-q", folder.name)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    before = {*sys.modules}
    monkeypatch.chdir(folder)
    yield folder
    for name in {*sys.modules} - before:
        if name.startswith("origin_"):
            del sys.modules[name]


def start(workdir, file="anna.py"):
    experiment = load(file)
    return open_run(workdir, describe(experiment), find_origin(experiment, file))


def kept(run):
    return {str(path.relative_to(run.source)): path.read_text() for path in run.source.rglob("*") if path.is_file()}


def last_attempt(run):
    return json.loads(run.environment.read_text())[-1]


def test_a_run_keeps_the_code_that_its_hash_covers_and_no_other(project, tmp_path):
    run = start(tmp_path / "run")
    assert kept(run) == {name: FILES[name] for name in KEPT}
    assert not [path for path in run.source.rglob("*.py") if path.stat().st_mode & 0o077]
    found = last_attempt(run)
    assert found["experiment_file"] == str(project / "anna.py")
    assert found["data"] == {
        "data.train_rows": [str(project / "data" / "train.jsonl")],
        "data.heldout_rows": [str(project / "data" / "test.jsonl")],
        "data.filters.1": [str(project / "data" / "samples.jsonl")],
    }
    (project / "origin_words.py").write_text(FILES["origin_words.py"] + "#" * LARGEST)
    assert [each.place for each in find_origin(load("anna.py"), "anna.py").code] == [
        name for name in KEPT if name != "origin_words.py"
    ]


def test_a_resume_from_another_folder_keeps_the_code_of_the_start(project, tmp_path, monkeypatch):
    run = start(tmp_path / "run")
    (project / "anna.py").write_text(FILE + "# edited\n")
    assert kept(start(run.path))["anna.py"].endswith("# edited\n")  # nothing has been trained yet
    run.metrics.touch()
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    (moved / "anna.py").write_text(FILE + "# edited again\n")
    start(run.path)
    assert kept(run)["anna.py"].endswith("# edited\n")
    assert last_attempt(run)["data"]["data.train_rows"] == [str(moved / "data" / "train.jsonl")]
    recorded = run.experiment.read_text()
    assert str(project) not in recorded and str(moved) not in recorded


def test_the_commit_of_the_experiment_is_dirty_if_it_lacks_code_of_the_run(project, tmp_path, monkeypatch):
    commit = (project / ".git" / "refs" / "heads").rglob("*")
    clean = next(path for path in commit if path.is_file()).read_text().strip()

    def recorded():
        return last_attempt(start(tmp_path / "run")).get("experiment_commit")

    assert recorded() == clean
    git(project, "rm", "-q", "--cached", "origin_words.py")
    git(project, "commit", "-q", "-m", "y")
    assert recorded() != f"{clean}-dirty" and recorded().endswith("-dirty")  # the run uses an untracked module
    git(project, "reset", "-q", clean)
    (project / "origin_unused.py").write_text("")
    assert recorded() == f"{clean}-dirty"
    run = subprocess.run

    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    assert recorded() is None
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recorded() is None and os.path.exists(tmp_path / "run" / "source" / "anna.py")


def test_code_that_cannot_be_written_is_a_warning(project, tmp_path, monkeypatch, capsys):
    def full(path, content, **options):
        if "source" in path.parts:
            raise OSError(28, "No space left on device")
        write(path, content, **options)

    write = directory.write_atomically
    monkeypatch.setattr(directory, "write_atomically", full)
    start(tmp_path / "run")
    assert "run/source was not written: No space left on device" in capsys.readouterr().err


def test_a_run_in_a_bucket_keeps_its_code_and_a_resume_leaves_it(project, bucket):
    path, server = bucket
    run = start(path)
    names = server.names(str(path).split("/")[2])
    assert [name for name in names if "/source/" in name] == [f"runs/a/source/{name}" for name in KEPT]
    run.metrics.write_text("\n")
    (project / "anna.py").write_text(FILE + "# edited\n")
    start(path)
    assert (RunDir(path).source / "anna.py").read_text() == FILE


def test_a_card_names_the_files_of_the_data(project, tmp_path):
    run = start(tmp_path / "run")
    text = card.render(run, json.loads(run.experiment.read_text()), 1, of_warm_start=False, adapter=False)
    assert "The problems are those of `train.jsonl`, `test.jsonl`, the reward is `origin_reward.reward`." in text
    assert str(project) not in text
    (*_, attempt) = json.loads(run.environment.read_text())
    for data, said in (
        ({"data.train_rows": [f"gs://secret/{i}.jsonl" for i in range(10)]}, "`7.jsonl`, and 2 more, the"),
        ({"data.sources.0.train_rows": ["openai/gsm8k (train)"]}, "those of `openai/gsm8k (train)`, the"),
        ({"evaluation.tasks.x.table": ["/d/x.jsonl"]}, "those of `gspax.data.RowSource`, the"),
        ([1], "those of `gspax.data.RowSource`, the"),
    ):
        run.environment.write_text(json.dumps([attempt | {"data": data}]))
        text = card.render(run, json.loads(run.experiment.read_text()), 1, of_warm_start=False, adapter=False)
        assert said in text and "secret" not in text


@pytest.mark.parametrize(("command", "module"), [("train", loop), ("sft", warm_start)])
def test_the_commands_tell_a_run_its_file(command, module, project, tmp_path, monkeypatch, capsys):
    def found(experiment, file):
        raise UserError(f"{experiment.name} is of {file}")

    monkeypatch.setattr(module, "find_origin", found)
    assert main.main([command, "anna.py", "--workdir", str(tmp_path / "run")]) == 2
    assert "stub is of anna.py" in capsys.readouterr().err
