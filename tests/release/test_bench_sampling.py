"""The benchmark of the sampler alone (experiments/benchmarks/bench_sampling.py)."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import tiny
from api import Limits, single_device_mesh
from small_experiment import experiment

FILE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "bench_sampling.py"
spec = importlib.util.spec_from_file_location("bench_sampling", FILE)
bench_sampling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_sampling)

# tiny.MOE: D 16, N 4, K 2, H 8, E 5 (2 active), F 12, V 23, 3 layers
ATTENTION = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 2 * 8 + 2 * 16  # query, key and value, out, norms


def test_the_bytes_that_sampling_needs_by_hand():
    # two groups of two, lengths 1, 3 and 2, 2; a prompt of 5 tokens; tiny.MOE has 3 layers, 2 key heads of 8
    sampling = replace(experiment.sampling, prompts=2, group=2, max_prompt_tokens=5, slots=0)
    weights = 23 * 16 + 16 + 3 * (ATTENTION + 16 * 5 + 5 * 3 * 16 * 12)  # all 5 experts: 4 samples choose 8
    position = 3 * 2 * 2 * 8
    cache = (1 + 6 + 3 + 3 + 5 * (3 + 2)) * position
    assert bench_sampling.bytes_needed(tiny.MOE, sampling, [1, 3, 2, 2]) == 4 * (3 * weights + cache)
    two = bench_sampling.bytes_needed(tiny.MOE, replace(sampling, slots=2), [1, 3, 2, 2])
    fewer = weights - 3 * 3 * 16 * 12  # 2 slots choose 4 experts at most
    assert two == 4 * (4 * fewer + cache)  # 8 tokens take 4 steps


def test_ragged_samples_have_the_mean_length_and_a_quarter_as_many_slots():
    sampling = replace(experiment.sampling, prompts=16, group=8, max_tokens=64)
    mesh = single_device_mesh()
    found = dict(bench_sampling.cases(replace(tiny.MOE, vocab_size=512), sampling, mesh))
    assert list(found) == ["equal", "short", "long", "40 experts", "ragged", "64 slots"]
    slots = found["64 slots"]
    assert (slots.sampling.prompts * slots.sampling.group, slots.sampling.slots) == (256, 64)
    assert slots.sampling.max_tokens == 256 and 512 / len(slots.stop_ids) == 32
    assert "40 experts" not in dict(bench_sampling.cases(tiny.CONFIGS["dense"], sampling, mesh))


def test_a_case_is_sampled_and_written(monkeypatch, tmp_path, capsys):
    cases = bench_sampling.cases
    monkeypatch.setattr(bench_sampling, "cases", lambda *arguments: [next(cases(*arguments))])
    monkeypatch.setattr(bench_sampling, "measure_limits", lambda dtype: Limits(1e9, 1e9))
    model = replace(tiny.CONFIGS["dense"], num_hidden_layers=1, vocab_size=experiment.model.vocab_size)
    small = replace(experiment, model=model, sampling=replace(experiment.sampling, prompts=8, group=2, max_tokens=2))
    monkeypatch.setattr(bench_sampling, "load", lambda path: small)
    monkeypatch.setattr(sys, "argv", ["bench_sampling.py", "FILE", "--json", str(tmp_path / "sampling.json")])
    bench_sampling.main()
    [row] = json.loads((tmp_path / "sampling.json").read_text())["figures"]
    assert row["name"] == "equal" and row["tokens"] == 8 * 2 * 2 and row["wall_s"] > 0 and row["of_copy"] > 0
    assert "| equal | " in capsys.readouterr().out
