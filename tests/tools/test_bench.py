"""`gspax bench`: FLOP counts by hand, and each part on a tiny model."""

import json
from dataclasses import replace

import pytest
import tiny
from api import Limits, benchmarks, forward_flops, main, make_runtime, table
from small_experiment import experiment

from gspax.tools import bench

# tiny.MOE: D 16, N 4, K 2, H 8, E 5 (2 active), F 12, V 23, 3 layers
ATTENTION = 16 * 32 + 2 * 16 * 16 + 32 * 16  # query, key and value, out
NORMS = 2 * 8 + 2 * 16
EXPERTS = 16 * 5 + 2 * 3 * 16 * 12  # router, two experts
LOOKING = 2 * 4 * 8 * 10  # in a row of 10 tokens, 5 on average: scores and sums, two FLOPs per product


@pytest.mark.parametrize("name", ["moe", "tied"])
def test_flops_of_a_sparse_model(name):
    layer = 2 * (ATTENTION + NORMS + EXPERTS) + LOOKING
    # the embedding is a lookup, the head is not, tied or not
    assert forward_flops(tiny.CONFIGS[name], 10) == 3 * layer + 2 * (23 * 16 + 16)


def test_flops_of_a_dense_model():
    layer = 2 * (ATTENTION + NORMS + 3 * 16 * 24) + LOOKING
    assert forward_flops(tiny.CONFIGS["dense"], 10) == 3 * layer + 2 * (23 * 16 + 16)


def test_all_experts_cost_more_than_two():
    more = forward_flops(tiny.CONFIGS["all experts"], 10) - forward_flops(tiny.MOE, 10)
    assert more == 3 * 2 * 3 * 3 * 16 * 12


@pytest.mark.parametrize(("path", "sentence"), [("no/b.json", "there is no folder no"), (".", "it is a folder")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(path, sentence, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured"))
    assert main.main(["bench", "experiments/sort_gspo.py", "--json", path]) == 2
    assert f"wanted a file to write, but {sentence}" in capsys.readouterr().err


def test_figures_divide_work_by_median_seconds():
    seconds = {"rollout": 2.0, "old_logp": 1.0, "train": 4.0, "step": 8.0}

    def metrics(factor):
        times = {f"{clock}/{phase}": factor * s for clock in ("time", "cpu") for phase, s in seconds.items()}
        return {**times, "response/length_mean": 3.0}

    sampling = replace(experiment.sampling, prompts=1000, group=4, max_prompt_tokens=5)
    schedule = replace(experiment.schedule, minibatches=2, epochs=2)
    runtime = make_runtime(replace(experiment, sampling=sampling, schedule=schedule))
    found = benchmarks.phases(runtime, [metrics(9), metrics(1), metrics(0.1)])
    limits = Limits(matmul_flops=1e9, copy_bytes=1e9)
    rows = {line.split()[0]: line.split()[1:] for line in table(found, limits).splitlines()[1:]}
    each = forward_flops(experiment.model, 8)
    sampled, trained = 4000 * 3, 4000 * 8
    expected = {
        "rollout": (sampled, (1000 * 5 + sampled) * each),  # a prompt runs once for its four samples
        "old_logp": (trained / 2, trained / 2 * each),
        "train": (2 * trained, 6 * trained * each),
        "step": (sampled, (1000 * 5 + sampled + 6.5 * trained) * each),
    }
    assert list(rows) == list(expected)
    for phase, (tokens, flops) in expected.items():
        rate = flops / seconds[phase]
        assert rows[phase] == [
            *(f"{seconds[phase]:.3f}", f"{seconds[phase]:.3f}"),
            *(f"{tokens / seconds[phase]:,.0f}", f"{rate / 1e9:.2f}", f"{rate / 1e9:.1%}"),
        ]


def test_old_log_probs_count_for_the_minibatches_whose_first_update_does_not_compute_them():
    seconds = {f"{clock}/{phase}": 1.0 for clock in ("time", "cpu") for phase in benchmarks.PHASES}
    schedule = replace(experiment.schedule, minibatches=4)
    variants = {0.75: {"schedule": schedule}, 1: {"routing_replay": "old"}, 0: {"old_logp": "sampler"}}
    for share, changes in variants.items():
        runtime = make_runtime(replace(experiment, **changes))
        tokens = {
            each.name: each.tokens for each in benchmarks.phases(runtime, [{**seconds, "response/length_mean": 3}])
        }
        assert tokens.get("old_logp", 0) == share * tokens["train"]
        assert ("old_logp" in tokens) == (share > 0)


@pytest.fixture
def small(monkeypatch):
    """One layer, two steps: few compilations."""
    monkeypatch.setattr(benchmarks, "measure_limits", lambda dtype: Limits(1e9, 1e9))
    model = replace(tiny.CONFIGS["dense"], num_hidden_layers=1, vocab_size=experiment.model.vocab_size)
    sampling = replace(experiment.sampling, prompts=8, group=2, max_tokens=2)
    return replace(experiment, model=model, sampling=sampling, schedule=replace(experiment.schedule, minibatches=1))


def test_steps_are_measured_and_traced(small, tmp_path):
    shown = []
    result = bench.run(small, tmp_path / "trace", shown.append, 1)
    assert {row["name"] for row in result["figures"]} == {"rollout", "train", "step"}
    assert all(row["wall_s"] > 0 and row["tokens_per_s"] > 0 for row in result["figures"])
    assert (
        result["programs"] > 0
        and result["first_step_s"] > 0
        and result["first_step_cpu_s"] > 0
        and result["peak_memory_bytes"] > 2**20
    )
    assert list((tmp_path / "trace").rglob("perfetto_trace.json.gz"))
    assert shown[0].startswith("first step done ") and shown[-1].startswith("trace of one step: ")


def test_the_figures_are_written_beside_the_overrides(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.processes, "join", lambda *_: True)
    monkeypatch.setattr(bench, "run", lambda *_: {"figures": [1.5]})
    file, target = tmp_path / "small.py", tmp_path / "bench.json"
    file.write_text("from small_experiment import experiment\n")
    assert bench.execute(bench.make_parser().parse_args([str(file), "seed=1", "--json", str(target)])) == 0
    assert json.loads(target.read_text()) == {"overrides": ["seed=1"], "figures": [1.5]}
