"""The settings that change what is sampled or trained, by name, for tests of every two of them together."""

import itertools
from dataclasses import is_dataclass, replace
from functools import partial

import numpy as np
import optax
import small_experiment

from gspax import advantages, config, data, losses
from gspax.config import optimizers
from gspax.data.tasks import sort
from gspax.experiment import validate
from gspax.losses import correction, distill, kl, selection, shaping
from gspax.rewards.calls import Batched
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.scores import Score

small = small_experiment.experiment
SPARSE = replace(small.model, num_hidden_layers=1, num_key_value_heads=2, router=config.Router(correction_bias=True))
BASE = replace(
    small,
    model=SPARSE,
    sampling=replace(small.sampling, prompts=4, group=4),
    schedule=replace(small.schedule, steps=2, eval_every=0, checkpoint_every=0, minibatches=2),
    evaluation=config.Evaluation(problems=2),
    warm_start=None,
)


def two_rewards(problem, completion):
    return small.reward(problem, completion), float(len(completion))


def length(problem, completion):
    return float(len(completion))


async def awaited(problem, completion):
    return small.reward(problem, completion)


def batched(problems, completions):
    return [*map(small.reward, problems, completions)]


def fails_on_some(problem, completion):
    if len(completion) == 2:
        raise ValueError("two letters")
    return Score(small.reward(problem, completion), reason="its digits in place")


def hint(problem, completion, feedback):
    return problem.answer[:1] + problem.prompt


def elsewhere(sequences):
    """The log-probs of a uniform teacher."""
    return [np.full(len(tokens) - 1, -np.log(12), np.float32) for tokens in sequences]


def first_digit(completion):
    return completion[:1] or None


class Countdown(small_experiment.Countdown):
    """With a reward for each message, so that turns differ."""

    def step(self, state, message):
        return super().step(state, message)._replace(reward=float(len(message)))


def chat(environment=small_experiment.Countdown, **turns):
    tokenizer, enough = data.CharChat(small.tokenizer.alphabet), {"max_prompt_tokens": 24, "max_tokens": 24}
    return {"tokenizer": tokenizer, "environment": environment(), "sampling": enough, "turns": turns}


def teacher(**changes):
    return {"teacher": config.Teacher(**changes)}


def penalty(**changes):
    return {"regularizers": config.Regularizers(**changes)}


def mesh(**axes):
    return config.Mesh(**{"fsdp": 1, "expert": 1} | axes)


def task(**changes):
    return config.Task(name="task", data=small.data, reward=small.reward, problems=2, **changes)


PARTS = {"answer": small.reward, "length": length}
OBJECTIVE = {  # options of the learner's objective, which one model's samples can be trained on
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("grpo", "gspo_token", "luspo", "gmpo", "vespo")},
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("dr_grpo", "dapo", "cispo", "sapo", "dppo_tv")},
    **{f"loss={name}": {"loss": getattr(losses, name)} for name in ("dppo_kl", "importance_sampling", "dis", "ipo")},
    "loss=dro": {"loss": losses.dro},
    "loss by token": {"loss": partial(losses.gspo, aggregate=losses.by_token)},
    **{
        f"advantage={name}": {"advantage": getattr(advantages, name)}
        for name in ("center", "leave_one_out", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "maxrl")
    },
    "advantage=best_of_group": {"advantage": advantages.best_of_group},
    "advantage=otb": {"advantage": advantages.otb},
    **{
        name: {"correction": getattr(correction, name)}
        for name in ("truncate_tokens", "truncate_sequences", "truncate_geometric", "mask_tokens")
    },
    "mask_sequences": {"correction": partial(correction.mask_sequences, low=0.5, high=2.0)},
    "reject_geometric": {"correction": partial(correction.reject_geometric, low=0.9, high=1.1)},
    "reject_tokens": {"correction": partial(correction.reject_tokens, high=0.1)},
    "reject_sequences": {"correction": partial(correction.reject_sequences, high=0.1)},
    "product": {
        "correction": partial(correction.product, factors=(correction.truncate_tokens, correction.mask_tokens))
    },
    "rejection": {"rejection": partial(correction.reject_off_policy, delta=0.1)},
    "top_entropy": {"selection": partial(selection.top_entropy, share=0.5)},
    "second_moment": {"selection": selection.second_moment},
    "clip_cov": {"selection": partial(selection.clip_cov, share=0.2)},
    "reference": {"reference": config.Reference()},
    "kl in the loss": {"reference": config.Reference(loss=kl.token_kl)},
    "kl of sequences": {"reference": config.Reference(loss=kl.sequence_kl)},
    "kl of GRPO": {"reference": config.Reference(loss=kl.grpo_kl)},
    "k1 in the reward": {"reference": config.Reference(reward=kl.k1)},
    "k3 in the reward": {"reference": config.Reference(reward=kl.k3)},
    "entropy": {"regularizers": {"entropy": 0.1}},
    "adaptive entropy": {"regularizers": {"adaptive_entropy": config.AdaptiveEntropy()}},
    "kl_cov": {"regularizers": {"kl_cov": config.CovarianceKL(share=0.2)}},
    "log_ratio_square": {"regularizers": {"log_ratio_square": 0.1}},
    "load balance": {"regularizers": {"load_balance": 0.1}},
    "router z": {"regularizers": {"router_z": 0.1}},
    "length_reward": {"length_reward": partial(shaping.soft_overlong_punishment, max_length=4, buffer=2)},
    "filter_overlong": {"filter_overlong": True},
    "calibration": {"calibration": config.Calibration()},
    "router_shift": {"router_shift": config.RouterShift()},
    "old_logp=sampler": {"old_logp": "sampler"},
}
REST = {  # what is sampled, who teaches, how rows and devices are laid out, and the model
    "two rewards": {"advantage": advantages.gdpo, "reward": two_rewards},
    "named rewards": {"advantage": advantages.gdpo, "reward": partial(combine, rewards=PARTS)},
    "sum of rewards": {"reward": partial(weighted_sum, rewards=PARTS)},
    "async reward": {"reward": awaited},
    "batched reward": {"reward": Batched(batched)},
    "failing reward": {"reward": fails_on_some, "grading": {"max_failed": 1.0, "failed": 0.25}},
    "teacher": teacher(refresh_every=1),
    "teacher, kept": teacher(kept=4, kept_by="policy", refresh_every=1, refresh_share=0.5),
    "teacher, forward KL": teacher(divergence=distill.full_forward_kl),
    "teacher, Jensen-Shannon": teacher(divergence=partial(distill.jensen_shannon, beta=0.5)),
    "teacher, advantage": teacher(as_advantage=True),
    "teacher, prompt": teacher(prompt=hint, max_prompt_tokens=8),
    "teacher, score": teacher(score=elsewhere),
    "environment": chat(),
    "environment, two turns": chat(Countdown, limit=2),
    "environment, by turn": chat(Countdown, credit="turn", discount=0.5),
    "old_logp=interpolated": {"old_logp": "interpolated", "placement": {"devices": 1, "staleness": 1}},
    "replay=old": {"routing_replay": "old"},
    "replay=sampler": {"routing_replay": "sampler"},
    "chunk": {"sampling": {"chunk": 2}},
    "slots": {"sampling": {"slots": 4}},
    "cache_gib": {"sampling": {"cache_gib": 1.0}},
    "prefill_prompts": {"sampling": {"prefill_prompts": 1}},
    "int8 cache": {"sampling": {"kv_cache_dtype": "int8"}},
    "int8 weights": {"sampling": {"weights_dtype": "int8"}},
    "drafts": {"sampling": {"drafts": 2, "draft_cost": 1.5}},
    "drafts in all passes": {"sampling": {"drafts": 2}},
    "noise": {"sampling": {"noise": "problem"}},
    "stop strings": {"sampling": {"stop": ("12", "9")}},
    "stop ids": {"sampling": {"stop_token_ids": (3,)}},
    "max_refills": {"sampling": {"max_refills": 1}},
    "temperature": {"sampling": {"temperature": 0.7}},
    "top_k": {"sampling": {"top_k": 4}},
    "top_p": {"sampling": {"top_p": 0.9}},
    "min_p": {"sampling": {"min_p": 0.05}},
    "mask_replay": {"sampling": {"top_p": 0.9, "mask_replay": 8}},
    "one sample": {"sampling": {"group": 1, "prompts": 16}, "advantage": advantages.reinforce_plus_plus},
    "linear": {"optimizer": {"schedule": partial(optimizers.linear, updates=8), "warmup_updates": 1}},
    "cosine": {"optimizer": {"schedule": partial(optimizers.cosine, updates=8), "warmup_updates": 1}},
    "decay": {"optimizer": {"transform": partial(optimizers.adamw, weight_decay=0.1)}},
    "muon": {"optimizer": {"transform": optimizers.muon}},
    "adafactor": {"optimizer": {"transform": optax.adafactor}},
    "no clipping": {"optimizer": {"max_grad_norm": 0.0}},
    "offload": {"optimizer": {"offload": True}},
    "frozen": {"optimizer": {"frozen": ("attention",)}},
    "balancing": {"optimizer": {"bias_update_speed": 0.01}},
    "lora": {"lora": config.Lora(rank=2)},
    "lora of attention": {"lora": config.Lora(rank=2, attention=("query",), mlp=False)},
    "one minibatch": {"schedule": {"minibatches": 1}},
    "four minibatches": {"schedule": {"minibatches": 4}},
    "epochs": {"schedule": {"epochs": 2}},
    "microbatch_rows": {"schedule": {"microbatch_rows": 2}},
    "packed": {"schedule": {"microbatch_tokens": 64}},
    "shared prompts": {"schedule": {"microbatch_tokens": 64, "share_prompts": True}},
    "evaluated": {"schedule": {"eval_every": 1}},
    "saved": {"schedule": {"checkpoint_every": 1}},
    "guard": {"guard": config.Guard(max_ratio=100.0, max_grad_norm=1e6, collapse=config.Collapse())},
    "diagnostics": {"diagnostics": config.Diagnostics(every=1, rows=2)},
    "samples": {"evaluation": {"samples": 2, "max_tokens": 6}},
    "task": {"evaluation": {"tasks": (task(samples=2, vote=first_digit, top_k=3),)}},
    "greedy task": {"evaluation": {"tasks": (task(temperature=0.0, max_tokens=5, max_prompt_tokens=5),)}},
    "warm start": {"warm_start": replace(small.warm_start, steps=1, rows=4)},
    "mixture": {"data": data.mixture((small.data, 1), (sort.Problems(seed=1, min_digits=2, max_digits=2), 1))},
    "mesh of data": {"mesh": mesh(data=2)},
    "mesh of fsdp": {"mesh": mesh(fsdp=2)},
    "mesh of experts": {"mesh": mesh(expert=2)},
    "mesh of context": {"mesh": mesh(context=2)},
    "mesh of tensors": {"mesh": mesh(tensor=2)},
    "sampler_mesh": {"mesh": mesh(fsdp=2), "sampler_mesh": mesh(tensor=2)},
    "placement": {"placement": {"devices": 1}},
    "placement of two": {"placement": {"devices": 2, "mesh": mesh(fsdp=2)}},
    "stale": {"placement": {"devices": 1, "staleness": 1}},
    "partial": {
        "placement": {"devices": 1, "staleness": 2, "partial": config.PartialRollouts(carried=2)},
        "sampling": {"chunk": 2},
    },
    "partial, not ahead": {
        "placement": {"devices": 1, "staleness": 1, "partial": config.PartialRollouts(carried=2, ahead=0)},
        "sampling": {"chunk": 2},
    },
    "dense": {"model": {"num_experts": 0, "intermediate_size": 32, "router": config.Router()}},
    "dense layer": {"model": {"num_hidden_layers": 2, "intermediate_size": 32, "mlp_only_layers": (0,)}},
    "sigmoids": {"model": {"router": config.Router(scoring="sigmoid", correction_bias=True, scale=1.5)}},
    "shared expert": {"model": {"shared_expert_intermediate_size": 16}},
    "groups of experts": {
        "model": {"router": config.Router(groups=2, top_groups=1, group_best=1, correction_bias=True)}
    },
    "biases": {"model": {"expert_bias": True, "attention_bias": True}},
    "sinks": {"model": {"attention_sinks": True}},
    "gate": {"model": {"attention_gate": True}},
    "latent": {"model": {"latent": config.Latent(rank=8, nope_dim=8, value_dim=8), "qk_norm": False}},
    "norms around": {"model": {"norm_place": "around", "norm_plus_one": True, "scale_embedding": True}},
    "part of a head": {"model": {"rope_fraction": 0.5, "rope_interleaved": True}},
    "yarn": {"model": {"rope_scaling": config.Yarn(factor=2.0, original_max_position_embeddings=16)}},
    "no qk_norm": {"model": {"qk_norm": False}},
    "delta net": {
        "model": {
            "num_hidden_layers": 2,
            "delta": config.GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8),
            "delta_layers": (0,),
        }
    },
    "window": {"model": {"sliding_window": 3, "sliding_layers": (0,)}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16 parameters": {"model": {"param_dtype": "bfloat16"}},
    "remat": {"model": {"remat": "full"}},
    "remat of products": {"model": {"remat": "products"}},
    "untied": {"model": {"tie_word_embeddings": False}},
}
OPTIONS = OBJECTIVE | REST  # changes by name; `part: {field: value}` changes fields of a part
NEW = {"placement": config.Placement}  # parts that the base has not
BY_TOKEN = {"advantage=otb", "teacher, advantage", "environment, by turn"}  # where no loss is named, with gspo_token


def settings(name, options):
    """(field, value) of an option, dotted."""
    for field, value in options[name].items():
        parts = value if isinstance(value, dict) else None
        yield from [(field, value)] if parts is None else ((f"{field}.{key}", each) for key, each in parts.items())


def combined(names, options=OPTIONS):
    """The experiment with these options, None if two set the same field to different values."""
    changes = {}
    for key, value in itertools.chain.from_iterable(settings(name, options) for name in names):
        if changes.setdefault(key, value) != value:
            return None
    if BY_TOKEN & {*names}:
        changes.setdefault("loss", losses.gspo_token)
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


def device_count(experiment):
    """The devices of the learner's mesh, and those of a sampler of its own."""
    own = experiment.placement.devices if experiment.placement else 0
    axes = experiment.mesh
    return own + abs(axes.data * axes.fsdp * (axes.expert or 1) * axes.context * axes.tensor)


def problems(names, options=OPTIONS):
    """The sentences of a dry run about these options together; one if two contradict each other."""
    experiment = combined(names, options)
    return ["two values of a field"] if experiment is None else validate(experiment, device_count(experiment))
