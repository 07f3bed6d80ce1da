"""A teacher is validated, described, and priced before a run starts."""

import functools
import json
from dataclasses import replace

import pytest
import small_experiment

from gspax import advantages, losses
from gspax.config import Reference, Teacher
from gspax.data import CharTokenizer
from gspax.experiment import describe, validate
from gspax.experiment.plan import plan, render
from gspax.hf import hf
from gspax.losses import distill, kl

MODEL = small_experiment.experiment.model
LARGE = replace(MODEL, num_experts=0, hidden_size=64, num_hidden_layers=4, intermediate_size=96, checkpoint="expert")
JENSEN_SHANNON = functools.partial(distill.jensen_shannon, beta=0.5)


def taught(loss=losses.grpo, **changes):
    return replace(small_experiment.experiment, loss=loss, teacher=Teacher(**{"model": LARGE, **changes}))


def alone(advantage, **sampling):
    """One sample of each prompt, and no teacher."""
    sampling = replace(small_experiment.experiment.sampling, **{"group": 1, "prompts": 32} | sampling)
    return replace(small_experiment.experiment, advantage=advantage, sampling=sampling)


def without_aggregate(logp, old_logp, advantage, mask):
    return losses.grpo(logp, old_logp, advantage, mask)


def with_answer(problem, completion, feedback):
    return f"{problem.prompt}{problem.answer}"


def one_number(logp, teacher_logp):
    return (logp - teacher_logp).sum()


@pytest.mark.parametrize(
    "experiment",
    [
        taught(),
        taught(kept=8),
        taught(kept=8, kept_by="policy"),
        taught(divergence=JENSEN_SHANNON),
        taught(as_advantage=True),
        replace(taught(divergence=JENSEN_SHANNON), sampling=replace(taught().sampling, top_p=0.9, mask_replay=8)),
        taught(model=None, refresh_every=4),
        taught(model=None, refresh_every=1, prompt=with_answer, max_prompt_tokens=64),
        taught(model=None, models={"one": LARGE, "other": LARGE}),
        taught(losses.gspo_token, as_advantage=True),
        taught(model=replace(LARGE, vocab_size=99)),
        replace(taught(), sampling=replace(taught().sampling, group=1, prompts=32)),
        alone(functools.partial(advantages.reinforce_plus_plus, ddof=0)),
    ],
    ids=range(13),
)
def test_every_form_is_valid(experiment):
    assert validate(experiment, 1) == []


@pytest.mark.parametrize(
    ("experiment", "sentence"),
    [
        (
            replace(taught(), sampling=replace(taught().sampling, top_p=0.9, mask_replay=8)),
            "sampling.top_p: wanted no filter with a teacher without teacher.divergence, whose KL is estimated from "
            "tokens of the whole distribution, got 0.9",
        ),
        (
            taught(model=replace(LARGE, vocab_size=9)),
            f"teacher.model.vocab_size: wanted at least the policy's {MODEL.vocab_size}, got 9",
        ),
        (
            taught(model=replace(LARGE, checkpoint="")),
            "teacher.model.checkpoint: wanted the teacher's checkpoint, got none",
        ),
        (
            taught(model=replace(LARGE, head_dim=3)),
            "teacher.model.head_dim: wanted an even number (RoPE rotates pairs), got 3",
        ),
        (
            taught(kept=99),
            f"teacher.kept: wanted at most the {MODEL.vocab_size} tokens of the vocabulary, got 99",
        ),
        (
            taught(kept=8, divergence=JENSEN_SHANNON),
            "teacher.kept: wanted 0 beside teacher.divergence, got 8",
        ),
        (
            taught(divergence=functools.partial(distill.jensen_shannon, beta=1.0)),
            "teacher.divergence: beta must be above 0 and below 1 (the ends are the forward and the reverse KL); "
            "got 1.0",
        ),
        (
            taught(divergence=one_number),
            "teacher.divergence: wanted test_teachers.one_number to return a divergence for each token [B, T], here "
            "[2, 3], got float32 []",
        ),
        (
            taught(refresh_every=3),
            "teacher.refresh_every: wanted 0 beside teacher.model, which is not refreshed, got 3",
        ),
        (
            taught(model=None, refresh_share=0.5),
            "teacher.refresh_every: wanted at least 1 with teacher.refresh_share=0.5, got 0",
        ),
        (
            taught(models={"other": LARGE}),
            "teacher.models: wanted none beside teacher.model, got other",
        ),
        (
            taught(model=None, models={"one": LARGE, "other": replace(LARGE, vocab_size=9)}),
            f"teacher.models['other'].vocab_size: wanted at least the policy's {MODEL.vocab_size}, got 9",
        ),
        (
            taught(model=None, models={"one": LARGE, "other": replace(LARGE, dtype="bfloat16")}),
            "teacher.models: wanted one dtype, got bfloat16 and float32",
        ),
        (
            taught(max_prompt_tokens=8),
            "teacher.max_prompt_tokens: wanted 0 without teacher.prompt, got 8",
        ),
        (
            taught(prompt=with_answer, max_prompt_tokens=40960),
            "teacher.max_prompt_tokens: wanted prompt and completion within the 40960 positions of the models, got "
            "40960 + 4 = 40964 tokens",
        ),
        (
            taught(prompt=lambda problem: problem.prompt),
            "teacher.prompt: wanted a function of (problem, completion, feedback), test_teachers.<lambda> does "
            "not accept these arguments: too many positional arguments",
        ),
        (taught(kept_by="student"), "teacher.kept_by: wanted 'teacher' or 'policy', got 'student'"),
        (taught(kept_by="policy"), 'teacher.kept_by: wanted "teacher" without teacher.kept, got "policy"'),
        (
            taught(kept=8, as_advantage=True),
            "teacher.kept: wanted 0 beside teacher.as_advantage, got 8",
        ),
        (
            taught(losses.gspo, as_advantage=True),
            "teacher.as_advantage: wanted a loss with an advantage for each token (losses.gspo_token, losses.grpo), "
            "got gspax.losses.gspo",
        ),
        (
            taught(without_aggregate),
            "teacher: wanted a loss with an `aggregate`, to aggregate it likewise, test_teachers.without_aggregate has "
            "none",
        ),
        (
            alone(advantages.reinforce_plus_plus_baseline),
            "sampling.group: wanted at least 2, got 1",
        ),
        (
            alone(advantages.reinforce_plus_plus, group=4, prompts=8, max_refills=2),
            "sampling.max_refills: wanted 0 with gspax.advantages.reinforce_plus_plus, which learns from groups of "
            "equal rewards too, got 2",
        ),
        (
            replace(alone(advantages.maxrl, group=4, prompts=8), reference=Reference(reward=kl.k1)),
            "reference.reward: wanted null with gspax.advantages.maxrl, which takes no negative rewards, got "
            "gspax.losses.kl.k1",
        ),
        (
            replace(taught(), sampling=replace(taught().sampling, max_refills=2)),
            "sampling.max_refills: wanted 0 with a teacher, which also trains on groups of equal rewards, got 2",
        ),
        (
            replace(taught(), sampling=replace(taught().sampling, group=1, prompts=32, max_refills=2)),
            "sampling.max_refills: wanted 0 with sampling.group=1, where all groups would be replaced, got 2",
        ),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_one_sentence_for_each_error(experiment, sentence):
    assert validate(experiment, 1) == [sentence]


def test_the_teachers_widths_divide_over_the_mesh():
    experiment = taught(model=replace(LARGE, hidden_size=63))
    experiment = replace(experiment, mesh=replace(experiment.mesh, fsdp=4), warm_start=None)
    (sentence,) = validate(experiment, 4)
    assert sentence.startswith("teacher.model.hidden_size: wanted a multiple of mesh.fsdp (4)")


def test_a_run_with_another_tokenizer_is_no_teacher(tmp_path):
    recorded = describe(replace(small_experiment.experiment, tokenizer=CharTokenizer("0123456789=+")))
    (tmp_path / "experiment.json").write_text(json.dumps(recorded))
    sentence = (
        f"teacher.model.checkpoint: wanted a model with the experiment's tokenizer, got another one in {tmp_path}"
    )
    assert validate(taught(model=replace(LARGE, checkpoint=str(tmp_path))), 1) == [sentence]
    (tmp_path / "experiment.json").write_text(json.dumps(describe(small_experiment.experiment)))
    assert hf(tmp_path) == replace(MODEL, checkpoint=str(tmp_path))
    assert validate(taught(model=hf(tmp_path)), 1) == []


def test_the_dry_run_counts_the_teacher_and_what_updates_read_of_it():
    sampled, compared = (plan(taught(**more)).learner for more in ({}, {"kept": 8}))
    without = plan(small_experiment.experiment).learner
    positions, weights = 32 * 8, 4 * (64 * MODEL.vocab_size + 4 * (2 * 64 * 16 * 3 + 3 * 64 * 96 + 2 * 64 + 32) + 64)
    assert sampled["teacher, float32"] == compared["teacher, float32"] == weights
    assert sampled["teacher's log-probs of the rollout"] == 4 * positions
    assert compared["teacher's hidden states of the rollout"] == 4 * 64 * positions
    assert compared["teacher's head, gathered"] == 4 * 64 * MODEL.vocab_size
    assert {name: size for name, size in sampled.items() if not name.startswith("teacher")} == without
    padded = plan(taught(model=replace(LARGE, vocab_size=MODEL.vocab_size + 500)))  # such rows are left out
    assert padded.learner == sampled
    own = plan(taught(model=None, refresh_every=1))
    assert own.learner["teacher, an earlier policy, float32"] == own.learner["parameters, float32"]
    assert own.checkpoint == plan(small_experiment.experiment).checkpoint + own.learner["parameters, float32"]
    several = plan(taught(model=None, models={"one": LARGE, "other": LARGE}, kept=8))
    assert several.learner["teacher, float32"] == 2 * weights
    assert several.learner["teacher's head, gathered"] == 2 * compared["teacher's head, gathered"]
    assert "teacher, float32" in render(plan(taught())) and "teacher, float32" in plan(taught()).sampler
