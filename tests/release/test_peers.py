"""The comparison with google-tunix (experiments/benchmarks/peers.py), with a stub in its place."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from small_experiment import experiment

FILE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "peers.py"
spec = importlib.util.spec_from_file_location("peers", FILE)
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)

THEIRS = {
    "version": "0.0",
    "first_step_s": 20.0,
    "first_step_cpu_s": 40.0,
    "peak_memory_bytes": 3e9,
    "phases": {name: {"wall_s": 4.0, "cpu_s": 6.0} for name in ("rollout", "train", "step")},
}


def test_the_peer_runs_alternately_on_the_same_shape(monkeypatch):
    commands, shape = [], peers.shape(experiment.model, experiment.sampling)
    assert shape["hidden_size"] == experiment.model.hidden_size and shape["group"] == experiment.sampling.group

    def run(command, environment):
        commands.append(command[0])
        if "--json" in command:
            assert command[1:6] == ["-m", "gspax", "bench", "FILE", "seed=1"]
            figures = [{"name": name, "wall_s": 1.0, "cpu_s": 2.0} for name in ("rollout", "train", "step")]
            first = 5.0 if len(commands) > 2 else 10.0
            ours = {"first_step_s": first, "first_step_cpu_s": first, "peak_memory_bytes": 1e9, "figures": figures}
            Path(command[-1]).write_text(json.dumps(ours))
            return ""
        assert json.loads(command[2]) == shape
        return f"a warning\n{json.dumps(THEIRS)}\n"

    monkeypatch.setattr(peers, "run", run)
    result = peers.compare("PEER", ["FILE", "seed=1"], shape, rounds=2)
    assert commands == [sys.executable, "PEER"] * 2
    assert result["rows"]["step, CPU s"] == {"gspax": 2.0, "tunix": 6.0, "ratio": 3.0}
    ratios = {name: row["ratio"] for name, row in result["rows"].items() if "first step" in name}
    warm = "first step with a warm cache"
    assert ratios == {
        "first step, CPU s": 4.0,
        f"{warm}, CPU s": 8.0,
        "first step, wall s": 2.0,
        f"{warm}, wall s": 4.0,
    }


def test_an_interpreter_without_tunix_is_one_sentence():
    with pytest.raises(SystemExit, match="no-such-python: No such file"):
        peers.run(["no-such-python", "x"], {})
    failing = "import sys; sys.exit('no module named tunix')"
    with pytest.raises(SystemExit, match="ended with code 1: no module named tunix"):
        peers.run([sys.executable, "-c", failing], {})
