"""The rehearsal on a GPU (experiments/benchmarks/rehearse_gpu.py), with stubs in place of the commands."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "benchmarks"))
import rehearse_gpu

from gspax.tools.doctor import results

DOCTOR = """\
jax          0.10.2, of: jax
devices      1 x NVIDIA H100 80GB HBM3
memory       79.20 GiB a device

"""
CHECKS = [
    results.Result(name="copy", status="ok", measured=2e12, unit="B/s"),
    results.Result(name="sampler's log-probs and the learner's, float32", status="ok", measured=4e-7, bound=1e-4),
    results.Result(name="link", status="slow", measured=1.0, unit="B/s"),
]
HEADING = results.row("status", "check", "difference or rate", "note")
DOCTOR += "\n".join([HEADING, *map(str, CHECKS), ""])
BENCH = {
    "devices": "1 x NVIDIA H100 80GB HBM3",
    "first_step_s": 40.2,
    "peak_memory_bytes": 3 * 2**30,
    "figures": [
        {"name": "rollout", "wall_s": 2.0, "tokens_per_s": 16384.0},
        {"name": "train", "flops_per_s": 247.25e12, "of_matmul": 0.4, "tokens_per_s": 1e5},
    ],
}


class Commands(dict):
    """What each command of gspax does here, its exit code and output, by subcommand; `calls` has all arguments."""

    def __init__(self, **answers):
        super().__init__(answers)
        self.calls = []


@pytest.fixture
def commands(monkeypatch, tmp_path):
    stubs = Commands(doctor=[(0, DOCTOR)], bench=[(0, "")], train=[(0, "")])

    def run(part, folder, *arguments):
        stubs.calls.append(arguments)
        answers = stubs[arguments[0]]
        code, output = answers.pop(0) if len(answers) > 1 else answers[0]
        (folder / f"{part}.txt").write_text(output)
        if code == 0 and "--json" in arguments:
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(BENCH))
        return code, output

    monkeypatch.setattr(rehearse_gpu, "run", run)
    monkeypatch.chdir(tmp_path)  # where the published model is not
    return stubs


def rows(folder, **options):
    return {row.part: row.result for row in rehearse_gpu.rehearse(folder, **{"toy": False, "gib": None} | options)}


def test_the_table_has_the_figures_of_each_part(tmp_path, commands):
    found = rows(tmp_path)
    assert found.pop("gspax doctor") == "2 ok, 1 slow; slow: link"
    assert rehearse_gpu.describe(tmp_path)[0] == "- jax: 0.10.2, of: jax"
    assert found.pop("SmolLM2-135M-Instruct, bfloat16, train") == "skipped: there is no .cache/smollm2 (make real)"
    dense = found.pop("135M dense, bfloat16, bench")
    assert "MFU 25% of 989 TFLOP/s" in dense and "first step 40 s; peak 3.0 GiB" in dense
    # 256 tokens, 257 MiB of weights, 45 MiB of prompts and half of 720 MiB of completions, in 2 seconds
    assert "at least 88.8 GB/s read, 3% of 3,350 GB/s" in dense
    assert len(found) == 1


def test_the_largest_model_whose_arrays_fit_is_measured(tmp_path, commands):
    (tmp_path / "doctor.txt").write_text(DOCTOR)
    moe = [f"model={rehearse_gpu.MODELS['moe']}"]
    layers = rehearse_gpu.most_layers(moe, rehearse_gpu.memory_gib(tmp_path))

    def arrays(layers):
        costs = rehearse_gpu.planned([*moe, f"model.num_hidden_layers={layers}"])
        return max(sum(costs.learner.values()), sum(costs.sampler.values())) / 2**30

    assert 1 < layers < 48 and arrays(layers) <= 0.6 * 79.2 < arrays(layers + 1)
    assert f"Qwen3-30B-A3B with {layers} of 48 layers, bfloat16, bench" in rows(tmp_path)


def test_a_model_for_which_the_memory_does_not_suffice_is_halved(tmp_path, commands):
    commands["bench"] = [(0, ""), (1, "RESOURCE_EXHAUSTED: Out of memory | 9 GiB"), (0, "")]
    found = [result for part, result in rows(tmp_path).items() if part.startswith("Qwen3")]
    first, second = found
    assert first == r"failed: RESOURCE_EXHAUSTED: Out of memory \| 9 GiB" and second.startswith("update")
    layers = [int(each[-1].partition("=")[2]) for each in commands.calls if "num_hidden_layers" in each[-1]]
    assert layers[1] == layers[0] // 2


def test_a_part_that_fails_does_not_end_the_others(tmp_path, commands):
    commands.update(doctor=[(134, "Fatal\n\n")], bench=[(1, "")])
    found = rows(tmp_path, gib=16.0)
    assert list(found.values())[:3] == ["failed: Fatal", "failed: no output", "failed: no output"]
    assert len(found) == 4


def test_a_doctor_that_was_stopped_has_told_its_checks_and_the_memory(tmp_path, commands):
    commands["doctor"] = [(124, f"{DOCTOR}stopped after 420 seconds\n")]
    result = rows(tmp_path)["gspax doctor"]
    assert result == "failed: stopped after 420 seconds; 2 ok, 1 slow; slow: link"
    assert rehearse_gpu.memory_gib(tmp_path) == 79.2


@pytest.mark.parametrize(("status", "failed"), [("wrong", False), ("slow", True)])
def test_a_doctor_that_finds_an_error_has_not_failed(status, failed, tmp_path, commands):
    commands["doctor"] = [(1, DOCTOR.replace("slow", status))]
    assert rows(tmp_path)["gspax doctor"].startswith("failed") is failed


def test_a_part_is_stopped_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setitem(rehearse_gpu.LIMITS, "doctor", 0.01)
    code, output = rehearse_gpu.run("doctor", tmp_path, "doctor")
    assert (code, rehearse_gpu.last_line(output)) == (124, "stopped after 0.01 seconds")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_toy_shapes_run_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rehearse_gpu.py", str(tmp_path), "--toy"])
    monkeypatch.chdir(tmp_path)  # where the published model is not
    with pytest.raises(SystemExit) as ended:
        rehearse_gpu.main()
    table = (tmp_path / "gpu.md").read_text()
    assert ended.value.code == 0 and table.count("update") == 2, table
