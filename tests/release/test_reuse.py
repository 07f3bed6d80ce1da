"""The scripts of experiments/reuse run by themselves, as a user would run them, and their printed reward rises."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "reuse"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run(path, *first_on_path):
    """The finished process; modules in the folders `first_on_path` shadow installed ones."""
    paths = [*first_on_path, ROOT / "src", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    return subprocess.run([sys.executable, path], cwd=ROOT, env=environment, capture_output=True, text=True)


def printed(path):
    """{name: its numbers, line by line} of a script that must succeed."""
    process = run(path)
    assert process.returncode == 0, process.stderr
    numbers = {}
    for name, number in re.findall(r"(\w+) +(\S+)", process.stdout):
        numbers.setdefault(name, []).append(float(number))
    return numbers


def check_reward(numbers):
    first, last = numbers["reward"][0], numbers["reward"][-1]
    assert 0 < first < 0.25, "a random policy has 1/8"
    assert 0.9 < last <= 1


@pytest.mark.parametrize(
    "name",
    ["plain_jax", "device_mesh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flax_linen", "flax_nnx"))],
)
def test_the_reward_rises(name):
    numbers = printed(FOLDER / f"{name}.py")
    check_reward(numbers)
    assert max(numbers["clipped"]) > 0, "the second update of a batch is off policy"


def test_a_step_with_flax_nnx_changes_the_policy(monkeypatch, capsys):
    """In this process, which costs a quarter of the whole script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("flax_nnx")
    monkeypatch.setattr(script, "STEPS", 1)
    script.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert float(line.split()[-1]) > 0, "the second update of the batch is off policy, so the first one changed it"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("equinox") is None, reason="Equinox is not installed")
def test_the_reward_rises_with_equinox():
    numbers = printed(FOLDER / "equinox_loop.py")
    check_reward(numbers)
    assert max(numbers["clipped"]) > 0, "the second update of a batch is off policy"


def test_without_equinox_the_script_fails_with_one_error(tmp_path):
    (tmp_path / "equinox.py").write_text('raise ModuleNotFoundError("No module named equinox", name="equinox")\n')
    process = run(FOLDER / "equinox_loop.py", tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    sentence = "equinox_loop.py needs Equinox, which is not installed: run pip install equinox.\n"
    assert process.stderr == sentence


def test_the_reward_rises_from_a_buffer_and_the_mismatch_is_reported():
    numbers = printed(FOLDER / "rollout_buffer.py")
    check_reward(numbers)
    assert all(math.isfinite(number) for column in numbers.values() for number in column)
    assert numbers["mismatch_k3"][0] == 0 and numbers["weight_min"][0] == numbers["weight_max"][0] == 1
    assert 1e-3 < max(numbers["mismatch_k3"]) < 0.5, "rounded and stale weights differ, but not wildly"
    assert 0.2 < min(numbers["ess"]) < 1
    assert 0 < min(numbers["weight_min"]) < 1 < max(numbers["weight_max"]) <= 2 + 1e-6


def test_every_script_is_short_self_contained_and_names_its_command():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in SCRIPTS] == [
        "device_mesh",
        "equinox_loop",
        "flax_linen",
        "flax_nnx",
        "plain_jax",
        "rollout_buffer",
    ]
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        command = f"    python experiments/reuse/{path.name}\n"
        assert command in text and command in readme
        assert len(text.splitlines()) <= 90, path.name
        imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
        assert not imported & {other.stem for other in SCRIPTS}, path.name
        assert set(re.findall(r"^from (gspax\S*) import", text, re.MULTILINE)) <= {"gspax", "gspax.losses"}
