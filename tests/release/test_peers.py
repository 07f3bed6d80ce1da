"""The comparison with other frameworks (experiments/benchmarks/peers.py), with stubs in their place."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_experiment import experiment

FOLDER = Path(__file__).parents[2] / "experiments" / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers, stopwatch = load("peers"), load("stopwatch")

THEIRS = {
    "version": "0.0",
    "first_step_s": 20.0,
    "first_step_cpu_s": 40.0,
    "peak_memory_bytes": 3e9,
    "phases": {name: {"wall_s": 4.0, "cpu_s": 6.0} for name in ("rollout", "train", "step")},
}


def test_peers_run_alternately_on_the_same_shape(monkeypatch):
    commands, shape = [], peers.shape(experiment.model, experiment.sampling)
    assert shape["hidden_size"] == experiment.model.hidden_size and shape["group"] == experiment.sampling.group

    def run(command, environment):
        commands.append((command[0], Path(command[1]).name))
        if "--json" in command:
            assert command[1:6] == ["-m", "gspax", "bench", "FILE", "seed=1"]
            figures = [{"name": name, "wall_s": 1.0, "cpu_s": 2.0} for name in ("rollout", "train", "step")]
            first = 5.0 if len(commands) > 3 else 10.0
            ours = {"first_step_s": first, "first_step_cpu_s": first, "peak_memory_bytes": 1e9, "figures": figures}
            Path(command[-1]).write_text(json.dumps(ours))
            return ""
        assert json.loads(command[2]) == shape
        return f"a warning\n{json.dumps(THEIRS)}\n"

    monkeypatch.setattr(peers, "run", run)
    result = peers.compare({"google-tunix": "A", "TRL": "B"}, ["FILE", "seed=1"], shape, rounds=2)
    assert commands == [(sys.executable, "-m"), ("A", "tunix_grpo.py"), ("B", "trl_gspo.py")] * 2
    rows, first = result["rows"], {"google-tunix": 20.0, "TRL": 20.0}
    assert rows["step, CPU s"] == {"gspax": 2.0, "google-tunix": 6.0, "TRL": 6.0}
    assert rows["peak memory, GB"] == {"gspax": 1.0, "google-tunix": 3.0, "TRL": 3.0}
    assert rows["first step, wall s"] == {"gspax": 10.0, **first}
    assert rows["first step with a warm cache, wall s"] == {"gspax": 5.0, **first}


def test_a_step_of_a_peer_is_its_rollout_and_the_update_after_it(monkeypatch):
    clock = iter([(wall, 2 * wall) for wall in (1, 3, 10, 13, 20, 24, 30)])
    monkeypatch.setattr(stopwatch, "now", lambda: next(clock))
    monkeypatch.setattr(stopwatch, "START", 0)
    trainer = SimpleNamespace(generate=lambda prompts: prompts)
    rollout = stopwatch.Stopwatch(trainer, "generate")
    assert [trainer.generate(number) for number in range(3)] == [0, 1, 2]
    figures = stopwatch.summarize("1.0", rollout)
    assert (figures["first_step_s"], figures["first_step_cpu_s"]) == (10, 20)
    assert figures["phases"] == {
        "rollout": {"wall_s": 3.5, "cpu_s": 7},  # of 3 and 4 seconds
        "train": {"wall_s": 6.5, "cpu_s": 13},  # of 7 and 6
        "step": {"wall_s": 10, "cpu_s": 20},
    }


def test_an_interpreter_without_the_peer_is_one_sentence():
    with pytest.raises(SystemExit, match="no-such-python: No such file"):
        peers.run(["no-such-python", "x"], {})
    failing = "import sys; sys.exit('no module named tunix')"
    with pytest.raises(SystemExit, match="ended with code 1: no module named tunix"):
        peers.run([sys.executable, "-c", failing], {})


def test_smollm2_is_compared_in_the_better_type_of_each(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    seconds = {"float32": {"gspax": 10.0, "TRL": 12.0}, "bfloat16": {"gspax": 6.0, "TRL": 20.0}}
    comparisons = {
        dtype: {"overrides": [f"model.dtype={dtype}"], "rows": {"step, wall s": row}, "runs": row}
        for dtype, row in seconds.items()
    }
    lines = load("bench_smollm2").write_table(comparisons, "abc")
    assert "### bfloat16 (`model.dtype=bfloat16`)" in lines and "| step, wall s | 6.00 | 20.00 | 3.33 |" in lines
    assert lines[-1] == "A step takes 0.50 of TRL's wall time, each in its better type (at most 0.70: met)."
