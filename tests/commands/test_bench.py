"""The counts behind the table, by hand; what is measured is measured elsewhere."""

from dataclasses import replace

import pytest
import tiny
from small_experiment import experiment

from gspax.commands import bench
from gspax.experiment.counts import forward_flops

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


def test_the_table_divides_work_by_median_seconds():
    seconds = {"rollout": 2.0, "old_logp": 1.0, "train": 4.0, "step": 8.0}

    def metrics(factor):
        times = {f"{clock}/{phase}": factor * s for clock in ("time", "cpu") for phase, s in seconds.items()}
        return {**times, "response/length_mean": 3.0}

    sampling = replace(experiment.sampling, prompts=1000, group=4, max_prompt_tokens=5)
    text = bench.table(experiment.model, sampling, [metrics(9), metrics(1), metrics(0.1)], ceiling=1e9)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:-1]}
    each = forward_flops(experiment.model, 8)
    drawn, trained = 4000 * 3, 4000 * 8
    expected = {
        "rollout": (drawn, (1000 * 5 + drawn) * each),  # a prompt runs once for its four samples
        "old_logp": (trained, trained * each),
        "train": (trained, 3 * trained * each),
        "step": (drawn, (1000 * 5 + drawn + 4 * trained) * each),
    }
    for phase, (tokens, flops) in expected.items():
        rate = flops / seconds[phase]
        assert rows[phase] == [
            *(f"{seconds[phase]:.3f}", f"{seconds[phase]:.3f}"),
            *(f"{tokens / seconds[phase]:,.0f}", f"{rate / 1e9:.2f}", f"{rate / 1e9:.1%}"),
        ]
    assert "matmul ceiling 1.0 GFLOP/s (float32, 8 x cpu)" in text
