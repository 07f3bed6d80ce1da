"""Runs with an environment: what is refused, and training and evaluating from the configuration on."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import loop, read_rows

from gspax import advantages, losses
from gspax.config import Placement, Reference, Turns
from gspax.data.tasks import sort
from gspax.experiment import describe, flatten, load, validate
from gspax.rewards.environments import ToolUse

FILE = Path(__file__).parents[3] / "experiments" / "calculator_gspo_token.py"


@functools.cache
def small():
    """The experiment with few rows and steps."""
    experiment = load(FILE)
    return replace(
        experiment,
        sampling=replace(experiment.sampling, prompts=4, group=4),
        schedule=replace(experiment.schedule, steps=3, minibatches=2, eval_every=2, checkpoint_every=1),
        evaluation=replace(experiment.evaluation, problems=4),
        warm_start=replace(experiment.warm_start, steps=60, rows=32),
    )


def test_the_description_names_the_environment():
    flat = flatten(describe(small()))
    assert flat["environment"] == "gspax.rewards.environments.ToolUse" and flat["turns.credit"] == "turn"
    assert flat["environment.parse"] == "gspax.rewards.environments.parse_brackets"


def no_mask(rewards):
    return rewards


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"environment": None},
            'turns.credit: wanted "conversation" without environment, whose turns it tells apart, got "turn"',
        ),
        ({"environment": ToolUse}, "environment: wanted an instance, got the class ToolUse (write ToolUse(...))"),
        ({"environment": object()}, "environment: wanted an object with reset and step, object has no reset"),
        ({"tokenizer": sort.tokenizer}, "tokenizer: wanted one for conversations with an environment (data.hf_chat, "),
        (
            {"loss": losses.gspo},
            "turns.credit: wanted a loss with advantages of tokens (losses.gspo_token), got gspax",
        ),
        (
            {"advantage": no_mask},
            "turns.credit: wanted an advantage of (rewards, mask), because not every ",
        ),
        (
            {"advantage": advantages.gdpo},
            "turns.credit: wanted an advantage of one reward per turn, gspax.advantages.gdpo takes several",
        ),
        (
            {"placement": Placement(devices=1, staleness=1)},
            "environment: wanted null beside placement.staleness without placement.partial, whose sampler does not "
            "wait for replies, got ",
        ),
        ({"turns": Turns(limit=0)}, "turns.limit: wanted "),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(changes, sentence):
    problems = validate(replace(small(), **changes))
    assert any(problem.startswith(sentence) for problem in problems), problems


@pytest.mark.parametrize("limit", [{"slots": 2}, {"cache_gib": 0.01}])
def test_conversations_take_any_number_of_slots(limit):
    assert not validate(replace(small(), sampling=replace(small().sampling, **limit)))


@pytest.mark.slow
def test_a_run_counts_sampled_tokens_alone(tmp_path):
    """With a warm start of conversations, evaluations and advantages of turns."""
    loop.train(small(), tmp_path / "whole")
    whole = read_rows(tmp_path / "whole" / "metrics.jsonl")
    (*_, last) = [row for row in whole if "policy/loss" in row]
    assert last["rollout/turns"] >= 1 and "rollout/tool_calls" in last and last["rollout/reply_tokens"] >= 0
    assert any("eval/reward" in row for row in whole)
    samples = [row for path in (tmp_path / "whole" / "samples").glob("step_*.jsonl") for row in read_rows(path)]
    assert samples and all(len(row["turn_advantages"]) == len(row["turn_spans"]) for row in samples)
    assert last["response/length_max"] <= small().sampling.max_tokens
    assert any(row["length"] < row["turn_spans"][-1][1] for row in samples), "replies do not count"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": {"microbatch_tokens": 1088}},
        {"turns": Turns(limit=3), "loss": losses.gspo, "length_reward": None},
        {"reference": Reference(coefficient=1e-3), "filter_overlong": True, "sampling": {"chunk": 5, "max_refills": 1}},
        {"placement": Placement(devices=4)},
        {"sampling": {"slots": 8, "chunk": 3}},
    ],
    ids=["packed", "gspo", "all", "disaggregated", "slots"],
)
def test_variants_run(tmp_path, changes):
    parts = {name: replace(getattr(small(), name), **each) for name, each in changes.items() if isinstance(each, dict)}
    variant = replace(small(), **{**changes, **parts}, warm_start=replace(small().warm_start, steps=1))
    loop.train(replace(variant, schedule=replace(variant.schedule, steps=1, eval_every=0)), tmp_path)
    (step,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if "policy/loss" in row]
    assert np.isfinite(step["policy/loss"]) and step["optim/skipped"] == 0
    assert step["mismatch/abs_diff"] < 1e-4, "the learner's log-probs are the sampler's, on the tokens of turns"
