"""Runs written by older versions resume. `old_runs/COMMIT/` holds such a run, its experiment in today's API, and the
metrics that COMMIT itself recorded for the next step.

Equal keys draw other tokens since then, so the test draws them as COMMIT did.
"""

import json
import shutil
from pathlib import Path

import jax
import pytest

from gspax.commands import export
from gspax.errors import UserError
from gspax.experiment import describe, load, override
from gspax.loop import training
from gspax.rollout import drawing
from gspax.run.directory import find_run

FOLDER = Path(__file__).parent / "old_runs" / "929977a"
RENAMED = {"eval/accuracy": "eval/reward", "eval/greedy_accuracy": "eval/greedy_reward"}
CLOCKS = ("time/", "cpu/", "perf/")  # depends on the machine
EXPERIMENT = load(FOLDER / "experiment.py")


@pytest.fixture
def old_run(tmp_path):
    return Path(shutil.copytree(FOLDER / "run", tmp_path / "run"))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_with_a_noise_for_each_logit(logits_BV, key_B):
    return (logits_BV + jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(key_B)).argmax(axis=-1)


def test_a_run_of_929977a_resumes_with_the_same_metrics(old_run, monkeypatch):
    monkeypatch.setattr(drawing, "_draw", draw_with_a_noise_for_each_logit)
    training.train(override(EXPERIMENT, ["schedule.steps=3"]), old_run)
    found = {}
    for record in records(old_run / "metrics.jsonl"):
        if record["step"] == 3:
            found |= record
    expected = {name: x for record in records(FOLDER / "expected.jsonl") for name, x in record.items()}
    compared = 0
    for name, value in expected.items():
        if name.startswith((*CLOCKS, "policy/noise_floor")):  # now measured in a run's first step
            continue
        name = name if name in found else RENAMED[name]
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        compared += 1
    assert compared > 40


def test_a_run_of_929977a_decays_all_parameters(old_run):
    find_run(old_run, describe(EXPERIMENT))
    matrices_only = override(EXPERIMENT, ["optimizer.transform.decayed=gspax.optimizers.matrices"])
    with pytest.raises(UserError, match=r"decayed: gspax.optimizers.everything -> gspax.optimizers.matrices"):
        find_run(old_run, describe(matrices_only))


def test_a_run_of_929977a_is_exported_with_or_without_later_fields(old_run, tmp_path):
    description = json.loads((old_run / "experiment.json").read_text())
    del description["model"]["sliding_layers"]
    (old_run / "experiment.json").write_text(json.dumps(description))
    export.run(old_run, tmp_path / "published", dtype="float32")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config["hidden_size"] == 8
    assert config["num_experts"] == 2
