"""Whole runs with filters: on policy, the learner's distribution of each token is the sampler's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import RunDir, loop, record
from few_devices import few_devices
from small_experiment import Countdown, experiment

from gspax import config, losses
from gspax.config import Optimizer, Reference, Sampling
from gspax.data import CharChat
from gspax.losses import kl

pytestmark = pytest.mark.usefixtures("unevaluated")

WITHIN = "1e-5"  # the largest |ratio - 1| of a run on policy, as the page has it
DENSE = replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
# `old_logp="sampler"`: the ratio of an update is learner to sampler; with one update per rollout it is on policy
BASE = replace(
    experiment,
    model=DENSE,
    loss=losses.grpo,
    warm_start=None,
    old_logp="sampler",
    optimizer=Optimizer(learning_rate=3e-3),
    sampling=Sampling(prompts=4, group=4, max_prompt_tokens=4, max_tokens=6),
    schedule=replace(experiment.schedule, steps=2, minibatches=1, eval_every=0, checkpoint_every=0),
    evaluation=config.Evaluation(problems=1),
)


def train(folder, run, devices=1):
    """The metrics of each step."""
    with few_devices(devices):
        loop.train(run, folder)
    return [row for row in record.read_metrics(RunDir(folder).metrics) if "policy/loss" in row]


def random_filters(count=20):
    """Settings of `Sampling`: one to three filters, a temperature, and a size that may cut the sets."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        on = rng.random(3) < 0.5
        on[rng.integers(3)] = True
        drawn = {
            "top_k": int(rng.integers(1, 9)),
            "top_p": float(rng.uniform(0.3, 0.99)),
            "min_p": float(rng.uniform(0.01, 0.5)),
        }
        chosen = {name: value for (name, value), is_on in zip(drawn.items(), on, strict=True) if is_on}
        yield chosen | {"temperature": float(rng.uniform(0.7, 1.5)), "mask_replay": int(rng.integers(2, 12))}


def once_each():
    """The random filters as parameters; after the first of each combination the others are slow."""
    seen = set()
    for filters in random_filters():
        is_new, names = tuple(filters) not in seen, tuple(filters)
        seen.add(names)
        yield pytest.param(filters, id="-".join(names), marks=() if is_new else pytest.mark.slow)


def test_the_page_says_within_what_the_ratios_are_1():
    page = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text(encoding="utf-8")
    assert f"{len([*random_filters()])} random filters have ratios within {WITHIN} of 1" in " ".join(page.split())


@pytest.mark.parametrize("filters", [*once_each()])
def test_every_ratio_on_policy_is_1(tmp_path, filters):
    """`test_sets_stay_with_their_tokens` has a sharded vocabulary."""
    rows = train(tmp_path, replace(BASE, sampling=replace(BASE.sampling, **filters)))
    assert len(rows) == 2
    for row in rows:
        found = [row[f"policy/token_ratio_{which}"] for which in ("min", "mean", "max")]
        np.testing.assert_allclose(found, 1, rtol=0, atol=float(WITHIN))
        assert row["mismatch/abs_diff_largest_max"] <= float(WITHIN)
        assert 1 <= row["sampling/mask_size"] <= filters["mask_replay"]
        assert 0 <= row["policy/entropy"] <= np.log(row["sampling/mask_size"]) + 1e-6, "of the set"
        assert row["optim/grad_norm"] == 0 or row["sampling/mask_size"] > 1


STILL = replace(  # a policy that does not move, so that every ratio is on policy, through whatever a run has
    BASE,
    old_logp="learner",
    optimizer=Optimizer(learning_rate=1e-30),
    reference=Reference(loss=kl.token_kl),
    sampling=replace(BASE.sampling, prompts=8, temperature=0.9, top_p=0.8, min_p=0.02, mask_replay=5),
    schedule=replace(BASE.schedule, minibatches=2),
)
PACKED = {"microbatch_tokens": 160, "share_prompts": True}
COMBINATIONS = {
    "experts, shared prompts, refills": {
        "model": replace(experiment.model, num_hidden_layers=1),
        "routing_replay": "sampler",
        "sampling": {"max_refills": 1, "slots": 8},
        "schedule": PACKED,
    },
    "conversations, a sharded vocabulary": {
        "environment": Countdown(),
        "tokenizer": CharChat(experiment.tokenizer.alphabet),
        "turns": config.Turns(limit=2),
        "model": replace(DENSE, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        "mesh": config.Mesh(fsdp=4, tensor=2),
        "sampling": {"max_tokens": 20, "slots": 16},
    },
    "partial rollouts": {
        "old_logp": "sampler",  # without them a KL by token is refused on stale samples
        "placement": config.Placement(devices=1, staleness=2, partial=config.PartialRollouts(carried=4, ahead=1)),
        "sampling": {"chunk": 2},
        "schedule": PACKED | {"share_prompts": False},
    },
    "8 bits": {"sampling": {"weights_dtype": "int8", "kv_cache_dtype": "int8"}, "schedule": {"microbatch_rows": 8}},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_sets_stay_with_their_tokens(tmp_path, name):
    """Sampler and learner agree, as do policy and reference; with a set of another token they would not."""
    changes = dict(COMBINATIONS[name])
    sampling = replace(STILL.sampling, **changes.pop("sampling", {}))
    schedule = replace(STILL.schedule, **changes.pop("schedule", {}))
    run = replace(STILL, **changes, sampling=sampling, schedule=schedule)
    devices = run.mesh.fsdp * run.mesh.tensor if "mesh" in changes else 2 if run.placement else 1
    for row in train(tmp_path, run, devices):
        assert row["mismatch/abs_diff_largest_max"] < (0.2 if name == "8 bits" else 1e-5)
        assert abs(row["reference/kl"]) < 1e-6 and row["policy/ratio_max"] < 1 + 1e-5
        assert 1 < row["sampling/mask_size"] < 5 and 0 < row["sampling/mask_cut"] < 1
