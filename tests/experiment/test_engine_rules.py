"""An experiment with servers is validated before it starts, and the dry run gives its costs."""

from dataclasses import replace

import pytest
from small_experiment import experiment

from gspax.config import Engine, Mesh, PartialRollouts, Placement
from gspax.experiment import describe, difference, plan, validate, warnings
from gspax.experiment.description import resumable
from gspax.experiment.plan import render

SERVED = replace(experiment, engine=Engine(addresses=("http://10.0.0.1:8000", "http://10.0.0.2:8000")))
CHUNKS = replace(experiment.sampling, chunk=2)


def test_a_run_with_servers_is_valid():
    assert validate(SERVED) == []
    settings = replace(SERVED.engine, staleness=2, partial=PartialRollouts(carried=2))
    assert validate(replace(SERVED, sampling=replace(experiment.sampling, top_k=5, top_p=0.9, mask_replay=8))) == []
    parted = replace(SERVED, engine=settings, sampling=CHUNKS)
    assert validate(parted, 8) == []
    assert validate(replace(parted, engine=replace(settings, partial=PartialRollouts(carried=1))), 8) == [
        "engine.partial.carried: wanted rows in multiples of the 8 devices that rows are sharded over, got 9 prompts x "
        "4 samples = 36"
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"engine": Engine(addresses=("10.0.0.1:8000",))},
            "engine.addresses: wanted http://HOST:PORT, got '10.0.0.1:8000'",
        ),
        (
            {"engine": Engine(addresses=("http://host",))},
            "engine.addresses: wanted http://HOST:PORT, got 'http://host'",
        ),
        (
            {"engine": Engine(addresses=("http://host:x",))},
            "engine.addresses: wanted http://HOST:PORT, got 'http://host:x'",
        ),
        ({"engine": Engine(addresses=("http://a:1", "http://a:1"))}, "engine.addresses: wanted each of them once"),
        ({"engine": Engine(addresses=())}, "engine.addresses: wanted at least one"),
        ({"engine": Engine(folder="gs://bucket/weights")}, "engine.folder: wanted a folder of a file system"),
        (
            {"sampling": replace(experiment.sampling, top_k=5)},
            "sampling.mask_replay: wanted at least 1 with an engine and sampling.top_k",
        ),
        (
            {"sampling": replace(experiment.sampling, top_p=0.9, mask_replay=8)},
            "sampling.top_k: wanted 1 to 8 (sampling.mask_replay) with an engine and a filter",
        ),
        (
            {"sampling": replace(experiment.sampling, top_k=9, mask_replay=8)},
            "sampling.top_k: wanted 1 to 8 (sampling.mask_replay) with an engine and a filter",
        ),
        (
            {
                "engine": Engine(server="sglang"),
                "sampling": replace(experiment.sampling, top_p=0.9, top_k=8, mask_replay=8),
            },
            "sampling.top_k: wanted no filter with an SGLang server",
        ),
        ({"placement": Placement(devices=1)}, "placement: wanted null beside engine"),
        ({"sampler_mesh": Mesh()}, "sampler_mesh: wanted null beside engine"),
        (
            {"engine": Engine(staleness=1), "sampling": replace(experiment.sampling, max_refills=2)},
            "sampling.max_refills: wanted 0 beside engine.staleness, whose problems are fixed ahead, got 2",
        ),
        (
            {"engine": Engine(staleness=1, partial=PartialRollouts(carried=2)), "sampling": CHUNKS},
            "engine.staleness: wanted at least 2, one rollout batch for each of engine.partial's carried and ahead",
        ),
        (
            {"engine": Engine(staleness=1, partial=PartialRollouts(carried=9, ahead=0)), "sampling": CHUNKS},
            "engine.partial.carried: wanted at most the 8 groups of a rollout batch, got 9",
        ),
        (
            {"engine": Engine(staleness=1, partial=PartialRollouts())},
            "sampling.chunk: wanted at least 1 with engine.partial, which renews parameters every chunk, got 0",
        ),
    ],
)
def test_what_servers_cannot_do_is_one_sentence(changes, sentence):
    problems = validate(replace(SERVED, **changes))
    assert len(problems) == 1 and problems[0].startswith(sentence), problems


def test_settings_of_the_own_sampler_are_said_to_have_no_effect():
    notes = warnings(replace(SERVED, sampling=replace(CHUNKS, slots=8), engine=Engine(staleness=1)))
    assert "sampling.chunk=2: without effect, because servers sample (engine)" in notes
    partial = warnings(replace(SERVED, sampling=CHUNKS, engine=Engine(staleness=1, partial=PartialRollouts())))
    assert not any("sampling.chunk" in note for note in partial)
    assert "sampling.slots=8: without effect, because servers sample (engine)" in notes
    assert any(note.startswith("engine.staleness=1: completions are sampled by older parameters") for note in notes)
    assert any(note.startswith("model.head_dim=16: vLLM on a CPU wants one of 32, 64") for note in notes)


def test_the_dry_run_names_the_servers_and_the_bytes_of_a_push():
    found = plan.plan(SERVED)
    assert found.sampler == {} and found.push == 4 * found.checkpoint // 12  # float32; two moments are stored with it
    text = render(found)
    assert f"at 1 GB/s {found.push / 1e9:.2g} s to write, and as long to read" in text
    assert "vLLM at http://10.0.0.1:8000, http://10.0.0.2:8000" in text and "float32 weights in engine_weights" in text
    assert "Memory per device, sampler" not in text


def test_a_resumed_run_may_move_its_servers_but_not_sample_further_ahead():
    moved = replace(SERVED, engine=Engine(addresses=("http://other:1",), folder="other", requests=3, timeout=9.0))
    keys = resumable(describe(SERVED))
    assert difference(describe(SERVED), describe(moved), ignore=keys) == []
    ahead = replace(SERVED, engine=replace(SERVED.engine, staleness=1))
    assert difference(describe(SERVED), describe(ahead), ignore=keys) == ["engine.staleness: 0 -> 1"]
    assert "schedule.checkpoint_every" in keys and "schedule.checkpoint_every" not in resumable(describe(ahead))
