"""Each cause of a flat reward is found in the metrics that show it, and none in those of a healthy run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import Recorder, main, open_run

from gspax.tools.diagnosis import CHECKS, Record, estimate_epochs, find_causes, read_record

STEPS = 50
SETTINGS = {
    "loss": "gspax.losses.gspo",
    "loss.clip_low": 3e-4,
    "loss.clip_high": 4e-4,
    "sampling.prompts": 64,
    "sampling.group": 8,
    "sampling.max_tokens": 8,
    "schedule.minibatches": 4,
    "schedule.epochs": 1,
}
# As experiments/sort_gspo.py has them in its first third
HEALTHY = {
    "reward/mean": np.linspace(0.2, 0.6, STEPS),
    "reward/std": 0.48,
    "reward/zero_std_groups": 0.2,
    "response/truncated": 0.004,
    "response/length_mean": 5.5,
    "policy/clip_fraction_sequences": 0.35,
    "policy/clip_fraction_tokens": 0.35,
    "policy/ratio_deviation": 0.02,
    "policy/entropy": 0.5,
    "policy/kl": 0.01,
    "alarm/entropy": 0.0,
    "optim/learning_rate": 3e-4,
    "optim/grad_norm": 1.2,
    "optim/skipped": 0.0,
    "mismatch/abs_diff": 3e-7,
    "eval/reward": np.linspace(0.16, 0.6, STEPS),
    "eval/reward_low": np.linspace(0.16, 0.6, STEPS) - 0.06,
    "eval/reward_high": np.linspace(0.16, 0.6, STEPS) + 0.06,
    "eval/greedy_reward": np.linspace(0.5, 0.9, STEPS),
}
RIGHT = {"prompt": "31=", "answer": "13", "completion": "the answer is 13", "reward": 0.0, "finished": True}
WRONG = {"prompt": "52=", "answer": "25", "completion": "52", "reward": 0.0, "finished": True}


def record(changes=None, samples=(), **settings):
    series = {}
    for name, value in (HEALTHY | (changes or {})).items():
        if value is not None:
            series[name] = [*range(1, STEPS + 1)], np.broadcast_to(value, STEPS).tolist()
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    return Record(series, SETTINGS | settings, samples)


CONSTANT = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0, "policy/ratio_deviation": 0.0}
LEARNED = {"reward/mean": np.linspace(0.2, 1.0, STEPS) ** 0.25, "reward/zero_std_groups": 0.95, "reward/std": 0.05}
MEMORIZED = {"eval/reward": 0.2, "eval/reward_low": 0.14, "eval/reward_high": 0.26}
TOKENS = {"policy/token_ratio_mean": 1.0, "policy/clip_fraction_sequences": 0.9}
STILL = {"policy/ratio_deviation": 2e-7, "policy/clip_fraction_sequences": 0.0}
FALLING = np.array([*np.linspace(0.2, 0.6, 20), *np.linspace(0.6, 0.4, 30)])
FALLEN = {"reward/mean": [*np.linspace(0.2, 0.6, 30), *np.linspace(0.5, 0.0, 10), *[0.0] * 10]}
CASES = {
    "The policy has collapsed": [
        (FALLEN, [], {}, "reward/mean fell to 0 from a best of 0."),
        (FALLEN | {"policy/kl": [0.1, 0.6] + [0.0] * 48}, [], {}, "; the updates of step 2 have a KL of 0.6"),
        (FALLEN | {"reward/zero_std_groups": [0.2] * 40 + [1.0] * 10}, [], {}, "best of 0."),
    ],
    "The reward falls": [
        ({"reward/mean": FALLING}, [], {}, "reward/mean is 0.431 on average over 10 steps, and was 0.579 at best"),
        ({name: value[::-1] for name, value in HEALTHY.items() if isinstance(value, np.ndarray)}, [], {}, "was 0.563"),
    ],
    "The reward's parser never matches": [(CONSTANT, [[RIGHT, WRONG]], {}, "1 of 2 recorded completions contain")],
    "The reward never varies": [(CONSTANT, [[WRONG]], {}, "none of 1 recorded completions"), (CONSTANT, [], {}, "")],
    "Rewards within groups are equal": [
        (
            dict.fromkeys(("reward/mean", "eval/reward", "policy/clip_fraction_sequences"), 0.0)
            | {"reward/zero_std_groups": 0.96},
            [],
            {},
            "in 96% of the groups",
        )
    ],
    "The problems are learned already": [(LEARNED, [], {}, "it was 0.")],
    "Responses are truncated at the limit": [
        (
            {"response/truncated": 0.7},
            [[RIGHT | {"finished": False}, WRONG | {"reward": 0.5}]],
            {},
            "70% of the responses have no stop token (response/truncated), with sampling.max_tokens=8 and a mean "
            "length of 5.5; recorded rewards: 0 truncated, 0.5 finished",
        )
    ],
    "The clip range clips nothing": [
        ({"policy/clip_fraction_sequences": 0.0}, [], {"loss__clip_low": 0.2, "loss__clip_high": 0.2}, "of 5,120, by"),
        (TOKENS | {"policy/clip_fraction_tokens": 0.0}, [], {"loss__clip_low": 9.0}, "of 28,160, by"),
    ],
    "The clip range clips nearly everything": [
        (TOKENS | {"policy/clip_fraction_tokens": 0.4}, [], {"loss__clip_low": 1e-5}, "40.00% of the tokens"),
        ({"policy/noise_floor": 1e-3}, [], {}, "clip_low is 0.0003, below the noise floor 0.001"),
    ],
    "The entropy is gone": [
        ({"policy/entropy": np.geomspace(1, 1e-3, STEPS), "alarm/entropy": 1.0}, [], {}, "alarm/entropy was on in 100%")
    ],
    "The learning rate has no effect": [
        (STILL, [], {}, "|s - 1| is 2e-07"),
        (
            STILL | dict.fromkeys(("eval/reward", "eval/greedy_reward", "reward/mean"), 0.2),
            [],
            {"schedule__minibatches": 1},
            "those of the start",
        ),
    ],
    "The sampler's log-probs differ from the learner's": [({"mismatch/abs_diff": 0.3}, [], {}, "by 0.3 nats")],
    "The reward is higher without the answer": [
        ({}, [[RIGHT, WRONG | {"reward": 1.0}] * 20], {}, "20 recorded completions contain their problem's answer and"),
    ],
    "The reward is noise": [
        ({}, [[WRONG | {"reward": 1.0}, WRONG] * 10] * 2, {}, "in 20 pairs of equal completions of one prompt"),
    ],
    "The held-out reward falls while the training reward rises": [
        ({name: np.linspace(0.9, 0.3, STEPS) for name in MEMORIZED}, [], {}, "by 0.327, eval/reward by -0.6"),
        (
            {name: FALLING + more for name, more in zip(MEMORIZED, (0, -0.06, 0.06), strict=True)},
            [],
            {},
            "eval/reward by 0.2 and is 0.2 below its best",
        ),
    ],
    "Rollouts are stale": [({"mismatch/abs_diff": 0.3, "rollout/staleness": 6.0}, [], {}, "6 rollouts old")],
    "The policy overfits its problems": [
        (MEMORIZED, [[WRONG, RIGHT]] * 3, {}, "reward/mean rose by 0.327, eval/reward by 0; by the prompts")
    ],
}
EACH = [(cause, *case) for cause, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("cause", "changes", "samples", "settings", "figure"), EACH, ids=[case[0] for case in EACH])
def test_a_cause_is_found_alone_and_with_its_figures(cause, changes, samples, settings, figure):
    found, _ = find_causes(record(changes, samples, **settings))
    assert [finding.cause for finding in found] == [cause]
    assert figure in found[0].evidence


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"reward/mean": 0.5, "eval/reward": 0.5}, {}),  # flat, for none of these causes
        ({"policy/clip_fraction_sequences": 0.0, "policy/ratio_deviation": 0.0}, {"schedule__minibatches": 1}),
        ({"policy/clip_fraction_sequences": 0.0}, {"sampling__prompts": 1, "sampling__group": 2}),  # too few to tell
        (TOKENS | {"policy/clip_fraction_tokens": 5e-4}, {"loss__clip_low": 0.2, "loss__clip_high": 0.27}),
        ({"mismatch/abs_diff": 0.02, "rollout/staleness": 4.0}, {}),
        (MEMORIZED | {"eval/reward_low": 0.1, "eval/reward_high": 0.3}, {}),  # too few held-out problems to tell
        ({"reward/mean": 0.05 + 0.04 * np.random.default_rng(8).normal(size=STEPS)}, {}),  # 0.56 of its best, by noise
        ({"alarm/entropy": [1.0] * 40 + [0.0] * 10}, {}),  # an episode
        ({"reward/zero_std_groups": [1.0] * 10 + [0.3] * 40}, {}),
        ({"policy/entropy": [float("nan")] * STEPS, "policy/ratio_deviation": float("nan")}, {}),
    ],
)
def test_a_healthy_run_shows_no_cause(changes, settings):
    samples = [[RIGHT | {"reward": 1.0, "prompt": f"{step}.{n}"} for n in range(8)] for step in range(3)]
    assert find_causes(record(changes, samples, **settings))[0] == []


def test_what_a_run_did_not_measure_is_named_and_breaks_nothing():
    found, missing = find_causes(record({"reward/std": None, "mismatch/abs_diff": None, "response/truncated": 0.7}))
    assert [finding.cause for finding in found] == ["Responses are truncated at the limit"]
    assert missing == ["mismatch/abs_diff", "reward/std"]
    nothing = replace(record(), series={"my/metric": ([1], [0.0])})
    assert find_causes(nothing) == ([], sorted({name for check in CHECKS for name in check.metrics}))


@pytest.mark.parametrize(("size", "epochs"), [(200, 16), (1000, 3.2)])
def test_epochs_are_estimated_from_recurring_prompts(size, epochs):
    """Fifty steps of 64 prompts, of which every fifth is recorded."""
    rng = np.random.default_rng(0)
    files = [[{"prompt": str(n)} for n in rng.choice(size, 64, replace=False)] for _ in range(10)]
    assert estimate_epochs(files, 64, 50) == pytest.approx(epochs, rel=0.15)
    assert estimate_epochs([[{"prompt": str(step)}] for step in range(10)], 64, 50) == 0


def test_the_command_names_cause_setting_and_page(tmp_path, capsys):
    run = open_run(tmp_path / "run", {"name": "small", "sampling": {"max_tokens": 8}})
    assert main.main(["diagnose", str(run.path)]) == 2
    assert "wanted the directory of a run with metrics" in capsys.readouterr().err
    with Recorder(run, 0) as recorder:
        for step in range(1, 13):
            values = {name: 0.25 for name in ("reward/mean", "reward/std", "reward/zero_std_groups")}
            recorder.write_metrics(step, values | {"response/truncated": 0.75, "response/length_mean": 8.0})
        recorder.write_samples(12, [RIGHT])
    assert read_record(run.path).samples == [[json.loads(json.dumps(RIGHT))]]
    assert main.main(["diagnose", str(run.path)]) == 0
    title, _, cause, remedy, page, missing = capsys.readouterr().out.splitlines()
    assert title == "reward/mean 0.25 → 0.25, at step 12"
    assert cause.startswith("1. Responses are truncated at the limit: 75% of the responses have no stop token")
    assert "`sampling.max_tokens`" in remedy and page == "   See docs/advantages.md#length"
    assert missing.startswith(
        "Not looked for, because metrics are missing: alarm/entropy, eval/reward, eval/reward_high"
    )


def test_the_page_on_flat_rewards_lists_each_cause_with_its_link():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "flat_reward.md").read_text()
    for cause, ((changes, samples, settings, _), *_) in CASES.items():
        ((*_, target),) = find_causes(record(changes, samples, **settings))[0]
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {cause} |")]
        link = target.removeprefix("docs/")
        assert f"({link.removeprefix('howto/') if link.startswith('howto/') else f'../{link}'})" in line
