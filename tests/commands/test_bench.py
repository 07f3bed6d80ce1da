"""`gspax bench`: FLOP counts by hand, and each part on a tiny model."""

import json
from dataclasses import replace

import pytest
import tiny
from small_experiment import experiment

from gspax.commands import bench, benchmarks
from gspax.commands.benchmarks import Limits, table
from gspax.errors import UserError
from gspax.model.sizes import forward_flops
from gspax.parallel.sharding import single_device_mesh
from gspax.rollout.runtime import make_runtime

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
    drawn, trained = 4000 * 3, 4000 * 8
    expected = {
        "rollout": (drawn, (1000 * 5 + drawn) * each),  # a prompt runs once for its four samples
        "old_logp": (trained / 2, trained / 2 * each),
        "train": (2 * trained, 6 * trained * each),
        "step": (drawn, (1000 * 5 + drawn + 6.5 * trained) * each),
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


def test_bytes_that_drawing_needs_by_hand():
    # two groups of two, lengths 1, 3 and 2, 2; a prompt of 5 tokens; tiny.MOE has 3 layers, 2 key heads of 8
    sampling = replace(experiment.sampling, prompts=2, group=2, max_prompt_tokens=5, slots=0)
    weights = 23 * 16 + 16 + 3 * (ATTENTION + NORMS + 16 * 5 + 5 * 3 * 16 * 12)  # all 5 experts: 4 samples choose 8
    position = 3 * 2 * 2 * 8
    cache = (1 + 6 + 3 + 3 + 5 * (3 + 2)) * position
    assert benchmarks.bytes_needed(tiny.MOE, sampling, [1, 3, 2, 2]) == 4 * (3 * weights + cache)
    two = benchmarks.bytes_needed(tiny.MOE, replace(sampling, slots=2), [1, 3, 2, 2])
    fewer = weights - 3 * 3 * 16 * 12  # 2 slots choose 4 experts at most
    assert two == 4 * (4 * fewer + cache)  # 8 tokens take 4 steps


def test_ragged_samples_have_the_mean_length_and_a_quarter_as_many_slots():
    sampling = replace(experiment.sampling, prompts=16, group=8, max_tokens=64)
    mesh = single_device_mesh()
    found = dict(benchmarks.cases(replace(tiny.MOE, vocab_size=512), sampling, mesh))
    assert list(found) == ["equal", "short", "long", "40 experts", "ragged", "64 slots"]
    slots = found["64 slots"]
    assert (slots.sampling.prompts * slots.sampling.group, slots.sampling.slots) == (256, 64)
    assert slots.sampling.max_tokens == 256 and 512 / len(slots.stop_ids) == 32
    assert "40 experts" not in dict(benchmarks.cases(tiny.CONFIGS["dense"], sampling, mesh))


@pytest.fixture
def small(monkeypatch):
    """One layer, two steps: each part is measured, at the price of few compilations."""
    monkeypatch.setattr(benchmarks, "STEPS", 1)
    monkeypatch.setattr(benchmarks, "measure_limits", lambda dtype: Limits(1e9, 1e9))
    model = replace(tiny.CONFIGS["dense"], num_hidden_layers=1, vocab_size=experiment.model.vocab_size)
    sampling = replace(experiment.sampling, prompts=8, group=2, max_tokens=2)
    return replace(experiment, model=model, sampling=sampling, schedule=replace(experiment.schedule, minibatches=1))


def test_a_whole_step_and_scoring_are_measured_and_traced(small, tmp_path):
    shown = []
    result = bench.run(small, ("step", "scoring"), tmp_path / "trace", shown.append)
    assert {row["name"] for row in result["figures"]} >= {"rollout", "train", "step", "scoring"}
    assert all(row["wall_s"] > 0 and row["tokens_per_s"] > 0 for row in result["figures"])
    assert (
        result["programs"] > 0
        and result["first_step_s"] > 0
        and result["first_step_cpu_s"] > 0
        and result["peak_memory_bytes"] > 2**20
    )
    assert list((tmp_path / "trace").rglob("perfetto_trace.json.gz"))
    assert shown[0].startswith("first step done ") and shown[-1].startswith("trace of one step: ")


def test_every_case_is_drawn(small, monkeypatch):
    cases = benchmarks.cases
    monkeypatch.setattr(benchmarks, "cases", lambda *arguments: [next(cases(*arguments))])
    [figure] = benchmarks.measure_sampling(make_runtime(small))
    assert figure.name == "drawing, equal" and figure.tokens == 8 * 2 * 2


def test_the_figures_are_written_beside_the_overrides(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.processes, "join", lambda *_: True)
    monkeypatch.setattr(bench, "run", lambda *_: {"figures": [1.5]})
    file, target = tmp_path / "small.py", tmp_path / "bench.json"
    file.write_text("from small_experiment import experiment\n")
    assert bench.execute(bench.make_parser().parse_args([str(file), "seed=1", "--json", str(target)])) == 0
    assert json.loads(target.read_text()) == {"overrides": ["seed=1"], "figures": [1.5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "step,nothing"], "wanted some of step,drawing,scoring, got 'nothing'"),
        (["--parts", "drawing", "--profile", "d"], "--profile: wanted the part step"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    file = tmp_path / "small.py"
    file.write_text("from small_experiment import experiment\n")
    with pytest.raises(UserError, match=message):
        bench.execute(bench.make_parser().parse_args([str(file), *options]))
