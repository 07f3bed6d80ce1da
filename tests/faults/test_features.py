"""A table of features: a run with one, killed after a checkpoint and started again, is the run that was not.

The same law at any moment of a plain run is in test_kills.py, of a run in a bucket in test_bucket_faults.py, among
processes in test_killed_hosts.py; here it is about what a feature keeps beside the parameters. Drafts, adapters with a
reference, and teachers of their own files have their resumed runs where their files are tested.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import runs
from api import loop, open_array, read_metrics
from few_devices import few_devices
from pair_options import OPTIONS, combined, device_count, length, problems, small
from small_experiment import Spoiled

from gspax.config import Lora

STEPS, SAVED = 4, 2


SETTINGS = OPTIONS | {"lora of deltas": {"lora": Lora(rank=2, delta=True)}}
SPOILED = Spoiled(small.data, raising=(3, 9), too_long=(12,))


class Case(NamedTuple):
    """Settings of pair_options.py, and what the metrics of the steps have if these settings are at work."""

    names: list[str]
    shows: dict[str, Callable[[list[float]], bool]]  # of each metric by step
    data: Any = small.data


def grows(values):
    return values[0] < 1e-9 < values[1] < values[-1]


def is_carried(values):
    return values == [2, 0, 2, 0]  # nothing passes a checkpoint


PARTIAL = {"rollout/carried": is_carried, "rollout/staleness_max": lambda ages: ages[::2] == [0, 0] and max(ages) == 1}
CASES = {
    "sampling masks": Case(
        ["dense", "mask_replay", "loss=grpo", "mesh of fsdp"], {"sampling/mask_size": lambda sizes: min(sizes) > 1}
    ),
    "adapters, packed epochs": Case(
        ["dense", "lora", "kl of GRPO", "packed", "epochs"],
        {"reference/kl": grows, "learner/packing_efficiency": lambda share: 0.5 < min(share) <= max(share) <= 1},
    ),
    "routing, a clip range, refills": Case(
        ["replay=old", "calibration", "kl in the loss", "max_refills"],
        {
            "reference/kl": grows,
            "policy/clip_low": lambda low: len({*low}) > 1,
            "sampling/prompts": lambda count: max(count) > 4,
        },
    ),
    "balanced experts": Case(["balancing", "adaptive entropy", "warm start"], {"policy/entropy": all}),
    "turns": Case(["dense", "environment, by turn", "warm start", "evaluated"], {"rollout/turns": all}),
    "stale": Case(["dense", "stale", "loss=grpo"], {"rollout/staleness": lambda ages: ages == [0, 1, 0, 1]}),
    "a teacher's kept tokens": Case(["dense", "teacher, kept"], {"policy/teacher_kl": all}),
    "a teacher's advantages": Case(["dense", "teacher, advantage"], {"policy/loss": any}),
    "a teacher's divergence": Case(["dense", "teacher, forward KL", "mixture"], {"policy/loss": any}),
    "partial, conversations": Case(["dense", "partial", "environment, two turns", "slots"], PARTIAL),
    "partial, adapters": Case(["dense", "partial", "lora", "bfloat16"], PARTIAL),
    "partial, unusable problems": Case(
        ["dense", "partial", "window", "slots"], PARTIAL | {"data/skipped": lambda count: sum(count) == 3}, SPOILED
    ),
    "partial, 8 bits": Case(["dense", "partial", "int8 cache", "int8 weights", "slots"], PARTIAL),
    "partial, split groups": Case(
        ["dense", "partial, not ahead", "loss=grpo", "old_logp=interpolated", "truncate_tokens"],
        {"rollout/carried": is_carried},
    ),
    "partial, sets and a selection": Case(
        ["dense", "partial", "mask_replay", "clip_cov", "loss=grpo", "slots"], PARTIAL
    ),
    "partial, states": Case(["dense", "partial", "delta net", "lora of deltas", "slots"], PARTIAL),
}


@pytest.mark.parametrize(
    "name", [name if name == "sampling masks" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_run_killed_after_a_checkpoint_has_the_bits_of_a_whole_one(name, tmp_path):
    case = CASES[name]
    assert not problems(case.names, SETTINGS)
    experiment = combined(case.names, SETTINGS)
    schedule = replace(experiment.schedule, steps=STEPS, checkpoint_every=SAVED)
    experiment = replace(experiment, reward=length, data=case.data, schedule=schedule)
    whole = tmp_path / "whole"
    with few_devices(device_count(experiment)):
        loop.train(experiment, whole, report_to=())
        rows = [row for row in read_metrics(whole / "metrics.jsonl") if "policy/loss" in row]
        for metric, shows in case.shows.items():
            values = [row[metric] for row in rows]
            assert len(values) == STEPS and shows(values), (metric, values)
        killed = runs.copy(whole, tmp_path / "killed")
        shutil.rmtree(killed / "checkpoints" / str(STEPS))
        loop.train(experiment, killed, report_to=())
    assert runs.differences(killed, whole, STEPS) == []
    updates = open_array(killed / "checkpoints", STEPS, "step", ())[()]
    assert updates == schedule.minibatches * schedule.epochs * STEPS
