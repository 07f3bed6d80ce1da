"""The CI script tests a second Python, and the workflow and the hooks run the same checks."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gspax

ROOT = Path(__file__).parents[2]


def script(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A repository with .ci/run, a `make` that records its arguments, and a .venv of Python 3.11."""
    (tmp_path / "repository" / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "repository" / ".ci" / "run")
    script(tmp_path / "repository" / ".venv" / "bin" / "python", "echo 3.11")
    script(tmp_path / "bin" / "make", f'echo "$*" >> {tmp_path}/called')
    for version in ("3.11", "3.12", "3.13", "3.14"):  # a shim for a version that is not installed
        script(tmp_path / "bin" / f"python{version}", 'echo "command not found" >&2', "exit 127")
    return tmp_path


def run(checkout, **settings):
    settings |= {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "HOME": str(checkout / "home")}
    command = [checkout / "repository" / ".ci" / "run"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return (checkout / "called").read_text().splitlines(), done.stdout.splitlines()[-1]


def test_a_machine_without_another_python_is_reported(checkout):
    assert run(checkout) == (
        ["check", "docs"],
        "Tested with Python 3.11 only: no other of 3.11 to 3.14 was found.",
    )


def test_the_newest_other_python_that_works_is_tested(checkout):
    script(checkout / "bin" / "python3.12", "exit 0")
    script(checkout / "home" / ".pyenv" / "versions" / "3.13.0" / "bin" / "python", "exit 1")
    found = checkout / "home" / ".pyenv" / "versions" / "3.13.1" / "bin" / "python"
    script(found, "exit 0")
    called, last = run(checkout)
    assert called == ["check", "docs", f"test-python PYTHON={found} VENV=.venv-3.13"]
    assert last == "Tested with Python 3.11, and in a shorter round with 3.13."


def test_another_python_is_left_out_when_it_is_late(checkout):
    script(checkout / "bin" / "python3.12", "exit 0")
    called, last = run(checkout, CI_LATEST="-1")
    assert called == ["check", "docs"]
    assert re.fullmatch(r"Tested with Python 3.11 only: Python 3.12 would start after \d+ seconds.", last)


def test_a_failure_ends_the_script(checkout):
    script(checkout / "bin" / "make", "exit 3")
    command = [checkout / "repository" / ".ci" / "run"]
    assert subprocess.run(command, env={"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}, timeout=60).returncode == 3


def pinned(path):
    """The names of a file of requirements, as package indexes normalize them."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return {normalize(re.split("[=;]", line)[0]) for line in lines if line and not line.startswith("#")}


def normalize(name):
    return re.sub("[-_.]+", "-", name).lower()


def extras():
    """{extra: its packages} of setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    found = settings["options.extras_require"].items()
    return {
        extra: {normalize(re.split(r"[>=\[]", line)[0]) for line in text.split("\n") if line} for extra, text in found
    }


def test_training_installs_no_test_tools():
    """Some of them have no wheel for some machines."""
    training, tests, needs = pinned("requirements.txt"), pinned("requirements-test.txt"), extras()
    assert not training & tests
    assert tests == needs["test"] - training
    assert needs["train"] | needs["rewards"] <= training
    texts = {}
    for target in (
        "train",
        "study",
        "test",
        "check",
        "unit",
        "release",
        "test-python",
        "faults",
        "soak",
        "test-floors",
    ):
        command = ["make", "--dry-run", "--always-make", target, f"PYTHON={sys.executable}", "VENV=none"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        texts[target] = done.stdout
    floors = texts.pop("test-floors")
    assert "--constraint none/floors.txt" in floors and "requirements" not in floors
    assert all("requirements.txt" in text for text in texts.values())
    assert [target for target, text in texts.items() if "requirements-test.txt" not in text] == ["train", "study"]


def make_extras(names):
    command = [
        "make",
        "--dry-run",
        "--always-make",
        "extras",
        f"NAMES={names}",
        f"PYTHON={sys.executable}",
        "VENV=none",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("names", ["trackers", "trackers,rewards", "trackers, rewards"])
def test_an_extra_keeps_the_clone_and_the_pins(names):
    done = make_extras(names)
    (line,) = [line for line in done.stdout.splitlines() if "--editable '.[" in line]
    assert "--constraint requirements.txt" in line and f"'.[{names.replace(' ', '')}]'" in line
    assert not done.stderr


@pytest.mark.parametrize("names", ["", " ", ",", "wandb", "trackers,wandb", "'; echo", "name", "classifiers"])
def test_a_wrong_extra_installs_nothing(names):
    done = make_extras(names)
    got = names.removeprefix("trackers,").strip(", ") or "nothing"
    assert done.returncode == 2 and "pip install" not in done.stdout
    known = "train rewards gguf data trackers verifiers agents tpu gpu parity test"
    assert f"NAMES: wanted some of {known}, separated by commas, got {got}." in done.stderr


def read_yaml(path):
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_same_script_on_the_same_versions():
    (job,) = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    checkout, python, script = job["steps"]
    assert checkout == {"uses": "actions/checkout@v4"}
    assert python == {"uses": "actions/setup-python@v5", "with": {"python-version": "${{ matrix.python }}"}}
    assert script == {"run": ".ci/run"} and os.access(ROOT / ".ci" / "run", os.X_OK)
    versions = re.search(r"^for version in (.*); do", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)[1]
    assert job["strategy"]["matrix"]["python"] == versions.split()[::-1]


def test_a_tag_is_published_after_its_build_was_checked():
    """And no other job may get a token."""
    workflow = read_yaml(".github/workflows/publish.yml")
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` so
    assert workflow["permissions"] == {"contents": "read"} and "permissions" not in build
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    check, *steps = [step["run"] for step in build["steps"] if "run" in step]
    assert steps == ["python -m pip install build twine", "python -m build", "python -m twine check --strict dist/*"]
    for tag, code in ((gspax.__version__, 0), (f"{gspax.__version__}.1", 1), ("0", 1)):
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": f"v{tag}"})
        assert done.returncode == code, tag


def test_the_pre_commit_hooks_are_checks_of_make_test():
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)\ntest: lint .*\n\t\$\(PYTEST\)\n", makefile, re.M)[1]
    checks = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    *linters, tests = repository["hooks"]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in linters] == checks
    # ruff gets the changed files and applies its exclusions; the other hooks read the whole repository
    assert [hook.get("pass_filenames", True) for hook in (*linters, tests)] == [True, True, False, False]
    assert all(hook["language"] == "system" and {"id", "name"} <= {*hook} for hook in repository["hooks"])
    program, *words = shlex.split(tests["entry"])
    assert program == ".venv/bin/python" and words[:2] == ["-m", "pytest"]
    files = [word for word in words if word.endswith(".py")]
    assert files and all((ROOT / file).exists() for file in files)


def test_the_checks_pass_after_a_run(tmp_path):
    """`make train` leaves the folder runs/, which has the name of a module of the tests."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "tests" / "faults", tmp_path / "tests" / "faults")
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
