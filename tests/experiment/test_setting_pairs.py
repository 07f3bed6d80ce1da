"""The pairs of settings that need or exclude each other."""

from dataclasses import replace

import pytest
import stub_experiment

from gspax.config import Engine, Lora, Mesh, Optimizer, Placement, Schedule
from gspax.experiment.validation.pairs import PAIRS, pair_problems

BARE = replace(stub_experiment.experiment, warm_start=None)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.key} {pair.other}")
def test_an_experiment_without_both_settings_of_a_pair_is_valid(pair):
    assert list(pair_problems(BARE, pair)) == []


def test_settings_that_exclude_each_other_are_a_sentence_each():
    engine = Engine(addresses=("http://a:1",), folder="f")
    both = replace(
        BARE,
        engine=engine,
        placement=Placement(devices=1),
        sampler_mesh=Mesh(),
        lora=Lora(rank=2),
        optimizer=Optimizer(bias_update_speed=0.001),
        schedule=Schedule(microbatch_rows=2, microbatch_tokens=64),
    )
    found = [problem for pair in PAIRS for problem in pair_problems(both, pair)]
    assert found == [
        "placement: wanted null beside engine, which has its own devices, got a Placement",
        "sampler_mesh: wanted null beside engine, which has its own devices, got a Mesh",
        "sampler_mesh: wanted null beside placement, whose placement.mesh is the sampler's, got a Mesh",
        "schedule.microbatch_rows: wanted 0 beside schedule.microbatch_tokens, got 2",
        "optimizer.bias_update_speed: wanted 0 beside lora, which does not train the routers, got 0.001",
    ]
