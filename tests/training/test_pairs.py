"""Every two settings that change what is sampled or trained: a dry run refuses them together, or a run of them works.

A run has as many settings as go together, so few runs have every pair that is not refused. Where one fails, leave out
settings one by one: it is seldom about more than two.
"""

import itertools
import math
from dataclasses import is_dataclass, replace
from functools import partial

import jax
import numpy as np
import pytest
import small_experiment

from gspax import advantages, config, losses
from gspax.config import optimizers
from gspax.data import CharChat
from gspax.experiment import validate
from gspax.experiment.validation.first_calls import check_calls
from gspax.losses import correction, distill, kl, selection, shaping
from gspax.report import run_page
from gspax.run import record
from gspax.training import loop

SAMPLE, LENGTH = 1, 12  # runs of the release tier, and the settings of each
small = small_experiment.experiment
SPARSE = replace(small.model, num_hidden_layers=1, router=config.Router(correction_bias=True))
BASE = replace(
    small,
    model=SPARSE,
    sampling=replace(small.sampling, prompts=4, group=4),
    schedule=replace(small.schedule, steps=2, eval_every=0, checkpoint_every=0, minibatches=2),
    evaluation=config.Evaluation(problems=2),
    warm_start=None,
)
DELTA = config.GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8)


def two_rewards(problem, completion):
    return small.reward(problem, completion), float(len(completion))


def hint(problem, completion, feedback):
    return problem.answer[:1] + problem.prompt


CHAT = {"tokenizer": CharChat(small.tokenizer.alphabet), "environment": small_experiment.Countdown()}
TOKENS = {"loss": losses.gspo_token}
ENOUGH = {"max_prompt_tokens": 24, "max_tokens": 24}


def teacher(**changes):
    return {"teacher": config.Teacher(**changes)}


def penalty(**changes):
    return {"regularizers": config.Regularizers(**changes)}


OPTIONS = {  # changes by name; `part: {field: value}` changes fields of a part
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("grpo", "gspo_token", "luspo", "gmpo", "vespo")},
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("dr_grpo", "dapo", "cispo", "sapo", "dppo_tv")},
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("dppo_kl", "importance_sampling", "dis", "ipo")},
    "loss=dro": {"loss": losses.dro},
    "loss by token": {"loss": partial(losses.gspo, aggregate=losses.by_token)},
    **{
        f"advantage={name}": {"advantage": getattr(advantages, name)}
        for name in ("center", "leave_one_out", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    },
    **{f"advantage={name}": {"advantage": getattr(advantages, name)} for name in ("opo", "best_of_group")},
    "advantage=otb": TOKENS | {"advantage": advantages.otb},
    "advantage=maxrl": {"advantage": advantages.maxrl},
    "two rewards": {"advantage": advantages.gdpo, "reward": two_rewards},
    "truncate_tokens": {"correction": correction.truncate_tokens},
    "mask_sequences": {"correction": partial(correction.mask_sequences, low=0.5, high=2.0)},
    "rejection": {"rejection": partial(correction.reject_off_policy, delta=0.1)},
    "top_entropy": {"selection": partial(selection.top_entropy, share=0.5)},
    "second_moment": {"selection": selection.second_moment},
    "clip_cov": {"selection": partial(selection.clip_cov, share=0.2)},
    "kl in the loss": {"reference": config.Reference(loss=kl.token_kl)},
    "kl of sequences": {"reference": config.Reference(loss=kl.sequence_kl)},
    "kl in the reward": {"reference": config.Reference(reward=kl.k1)},
    "teacher": teacher(refresh_every=1),
    "teacher, kept": teacher(kept=4, kept_by="policy", refresh_every=1, refresh_share=0.5),
    "teacher, divergence": teacher(divergence=distill.full_forward_kl),
    "teacher, advantage": teacher(as_advantage=True) | {"loss": losses.grpo},
    "teacher, prompt": teacher(prompt=hint, max_prompt_tokens=8),
    "entropy": penalty(entropy=0.1),
    "adaptive entropy": penalty(adaptive_entropy=config.AdaptiveEntropy()),
    "kl_cov": penalty(kl_cov=config.CovarianceKL(share=0.2)),
    "log_ratio_square": penalty(log_ratio_square=0.1),
    "router penalties": penalty(load_balance=0.1, router_z=0.1),
    "length_reward": {"length_reward": partial(shaping.soft_overlong_punishment, max_length=4, buffer=2)},
    "filter_overlong": {"filter_overlong": True},
    "calibration": {"calibration": config.Calibration()},
    "environment": CHAT | {"sampling": ENOUGH},
    "environment, by turn": CHAT | {"sampling": ENOUGH, "turns": {"credit": "turn", "limit": 2}} | TOKENS,
    "old_logp=sampler": {"old_logp": "sampler"},
    "old_logp=interpolated": {"old_logp": "interpolated", "placement": {"devices": 1, "staleness": 1}},
    "replay=old": {"routing_replay": "old"},
    "replay=sampler": {"routing_replay": "sampler"},
    "router_shift": {"router_shift": config.RouterShift()},
    "chunk": {"sampling": {"chunk": 2}},
    "slots": {"sampling": {"slots": 4}},
    "prefill_prompts": {"sampling": {"prefill_prompts": 1}},
    "int8 cache": {"sampling": {"kv_cache_dtype": "int8"}},
    "int8 weights": {"sampling": {"weights_dtype": "int8"}},
    "drafts": {"sampling": {"drafts": 2, "draft_cost": 1.5}},
    "noise": {"sampling": {"noise": "problem"}},
    "max_refills": {"sampling": {"max_refills": 1}},
    "temperature": {"sampling": {"temperature": 0.7}},
    "top_k": {"sampling": {"top_k": 4}},
    "mask_replay": {"sampling": {"top_p": 0.9, "mask_replay": 8}},
    "one sample": {"sampling": {"group": 1, "prompts": 16}, "advantage": advantages.reinforce_plus_plus},
    "schedule": {"optimizer": {"schedule": partial(optimizers.cosine, updates=8), "warmup_updates": 1}},
    "muon": {"optimizer": {"transform": optimizers.muon}},
    "no clipping": {"optimizer": {"max_grad_norm": 0.0}},
    "frozen": {"optimizer": {"frozen": ("router",)}},
    "balancing": {"optimizer": {"bias_update_speed": 0.01}},
    "lora": {"lora": config.Lora(rank=2)},
    "one minibatch": {"schedule": {"minibatches": 1}},
    "epochs": {"schedule": {"epochs": 2}},
    "microbatch_rows": {"schedule": {"microbatch_rows": 2}},
    "packed": {"schedule": {"microbatch_tokens": 64}},
    "shared prompts": {"schedule": {"microbatch_tokens": 64, "share_prompts": True}},
    "guard": {"guard": config.Guard(max_ratio=100.0, max_grad_norm=1e6, collapse=config.Collapse())},
    "diagnostics": {"diagnostics": config.Diagnostics(every=1, rows=2)},
    "warm start": {"warm_start": replace(small.warm_start, steps=1, rows=4)},
    "placement": {"placement": {"devices": 1}},
    "stale": {"placement": {"devices": 1, "staleness": 1}},
    "partial": {
        "placement": {"devices": 1, "staleness": 2, "partial": config.PartialRollouts(carried=2)},
        "sampling": {"chunk": 2},
    },
    "dense": {"model": {"num_experts": 0, "intermediate_size": 32, "router": config.Router()}},
    "sigmoids": {"model": {"router": config.Router(scoring="sigmoid", correction_bias=True, scale=1.5)}},
    "delta net": {"model": {"num_hidden_layers": 2, "delta": DELTA, "delta_layers": (0,)}},
    "window": {"model": {"sliding_window": 3, "sliding_layers": (0,)}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16 parameters": {"model": {"param_dtype": "bfloat16"}},
    "remat": {"model": {"remat": "full"}},
    "untied": {"model": {"tie_word_embeddings": False}},
}
NEW = {"placement": config.Placement}  # parts that the base has not


def settings(name):
    """(field, value) of an option, dotted."""
    for field, value in OPTIONS[name].items():
        parts = value if isinstance(value, dict) else None
        yield from [(field, value)] if parts is None else ((f"{field}.{key}", each) for key, each in parts.items())


def combine(names):
    """The experiment with these options, None if two set the same field to different values."""
    changes = {}
    for key, value in itertools.chain.from_iterable(map(settings, names)):
        if changes.setdefault(key, value) != value:
            return None
    whole = {}
    for key, value in changes.items():
        part, _, field = key.partition(".")
        whole.setdefault(part, {}).update({field: value}) if field else whole.update({part: value})
    made = {}
    for part, value in whole.items():
        before = getattr(BASE, part)
        made[part] = value
        if isinstance(value, dict):
            made[part] = replace(before, **value) if is_dataclass(before) else NEW[part](**value)
    return replace(BASE, **made)


def is_accepted(names):
    """Whether a dry run accepts these options together."""
    experiment = combine(names)
    return experiment is not None and not validate(experiment, 1 + (experiment.placement is not None))


def rows(seed, most):
    """Lists of at most so many options, which a dry run accepts and which together have every accepted pair."""
    names = [*OPTIONS]  # each is accepted alone, as the slow test says
    left = {frozenset(pair) for pair in itertools.combinations(names, 2)}
    rng = np.random.default_rng(seed)
    while left:
        row = sorted(sorted(map(sorted, left))[rng.integers(len(left))])
        left.discard(frozenset(row))
        if not is_accepted(row):
            continue
        for name in rng.permutation(names).tolist():
            new = {frozenset({name, other}) for other in row} & left
            if new and name not in row and len(row) < most and is_accepted([*row, name]):
                row.append(name)
                left -= new
        yield row


def run(names, folder, monkeypatch):
    """Two steps, on one device or with a second one for the sampler; UserError from the dry run's calls."""
    experiment = combine(names)
    devices = jax.devices()[: 1 + (experiment.placement is not None)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(run_page, "write", lambda folder: folder)
    check_calls(experiment, lambda sentence: None)
    loop.train(experiment, folder / "run", report_to=())
    metrics = record.read_metrics(folder / "run" / "metrics.jsonl")
    wrong = {name: x for row in metrics for name, x in row.items() if not math.isfinite(x)}
    assert len(metrics) >= 2 and not wrong and not any(row.get("optim/skipped", 0) for row in metrics)


@pytest.mark.parametrize("number", range(SAMPLE))
def test_settings_that_are_accepted_together_work_together(number, tmp_path, monkeypatch):
    run(next(rows(seed=number, most=LENGTH)), tmp_path, monkeypatch)


@pytest.mark.slow
def test_every_pair_of_settings_works_or_is_refused(tmp_path, monkeypatch):
    assert all(is_accepted([name]) for name in OPTIONS)
    failed = {}
    for number, names in enumerate(rows(seed=0, most=len(OPTIONS))):
        with monkeypatch.context() as patch:
            try:
                run(names, tmp_path / str(number), patch)
            except Exception as error:
                failed[tuple(names)] = error
    assert not failed
