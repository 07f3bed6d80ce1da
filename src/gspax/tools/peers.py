"""Translates settings of verl, TRL, and tunix to overrides of an experiment (docs/howto/coming_from.md).

Each library is a function of its settings. It takes each key that it knows; what nobody took is listed as not carried
over. So a key that is new there cannot be lost in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gspax.errors import UserError
from gspax.tools.peer_files import Settings


class Line(NamedTuple):
    """An override, and the settings that it comes from."""

    override: str
    source: str


class Parts(NamedTuple):
    """What an experiment file names that no override can set."""

    model: str
    train: tuple[str, ...]
    heldout: tuple[str, ...]


class Given:
    """The settings of a file, which remember what was read; `why` says what becomes of the others."""

    def __init__(self, settings: Settings, why: Mapping[str, str]) -> None:
        self.values, self.conditional, self.why = settings.values, settings.conditional, why
        self.taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is carried over from now on."""
        self.taken.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: Any = None) -> Any:
        """Return a number. UserError for anything else, such as a variable that the script does not define."""
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{key}: wanted a number, got {value!r}; write it into the file")
        return value

    def line(self, override: str, key: str, *, off: Any = None) -> Iterator[Line]:
        """Yield `override` with the key's value, if it is given and is not `off`."""
        value = self.take(key)
        if value is not None and value != off:
            yield Line(f"{override}={text_of(value)}", key)

    def left(self) -> list[tuple[str, str]]:
        """Return (key, why) of what was not carried over."""
        rest = [(key, self._reason(key)) for key in self.values if key not in self.taken]
        return rest + [(key, "its value depends on a condition or on code of the file") for key in self.conditional]

    def _reason(self, key: str) -> str:
        named = (reason for part, reason in self.why.items() if key == part or key.startswith(f"{part}."))
        return f"{self.values[key]!r}: {next(named, 'no rule for it')}"


def text_of(value: object) -> str:
    """Return a value as an override writes it."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


OWN = "gspax decides this by itself"
FILES = "the experiment file names the data; see the page"
VERL_WHY = {
    **dict.fromkeys(("data.shuffle", "data.return_raw_chat", "trainer.val_before_train"), "gspax always does so"),
    "trainer.resume_mode": "the same command always continues",
    **dict.fromkeys(("trainer.logger", "trainer.log_val_generations", "trainer.project_name"), "see --report-to"),
    "trainer.default_local_dir": "give --workdir",
    "trainer.total_epochs": "an epoch is rows / sampling.prompts rollouts: set schedule.steps",
    "trainer.critic_warmup": "there is no critic",
    "trainer.nnodes": "a variable of the cluster, assumed to be 1: give --devices",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "needs the number of steps: set optimizer.warmup_updates",
    "trainer.balance_batch": "rows are packed",
    "data.truncation": "prompts that are too long are skipped, never cut",
    "data.filter_overlong_prompts": FILES,
    "data.prompt_key": FILES,
    "actor_rollout_ref.actor.clip_ratio_c": "GSPO ignores it there",
    "actor_rollout_ref.rollout.val_kwargs": "add a Task to evaluation.tasks",
    "actor_rollout_ref.rollout.name": "gspax's own sampler is used; engine=gspax.config.Engine for servers",
    "actor_rollout_ref.rollout.mode": "gspax's own sampler is used; engine=gspax.config.Engine for servers",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "a share there, GiB here: sampling.cache_gib",
    "actor_rollout_ref.rollout": OWN,
    "actor_rollout_ref.ref": OWN,
    "actor_rollout_ref.actor": "no rule for it alone",
    "actor_rollout_ref.model.use_remove_padding": "schedule.microbatch_tokens packs rows",
    "reward_model": "the reward is a function in the experiment file",
    "reward": "the reward is a function in the experiment file",
    "custom_reward_function": "the reward is a function in the experiment file",
    "model_engine": "one model for all sizes",
}
TRL_WHY = {
    **dict.fromkeys(("output_dir", "resume_from_checkpoint", "overwrite_output_dir"), "give --workdir"),
    **dict.fromkeys(("report_to", "run_name", "logging_steps", "log_completions"), "see --report-to"),
    "num_train_epochs": "an epoch is rows / sampling.prompts rollouts: set schedule.steps",
    "reward_funcs": "the reward is a function in the experiment file",
    "config_file": "devices are those of the processes",
    "optim": "see optimizer.transform",
    "lr_scheduler_type": "needs the number of updates: set optimizer.schedule and its updates",
}
TUNIX_WHY = {
    **dict.fromkeys(
        (f"rl_training_config.actor_optimizer_config.{key}" for key in ("schedule_type", "warmup_ratio")),
        "needs the number of steps: set schedule.steps and optimizer.schedule",
    ),
    "num_train_epochs": "an epoch is rows / sampling.prompts rollouts: set schedule.steps",
    "reward_functions": "the reward is a function in the experiment file",
    "tokenizer_config": "the experiment file names the tokenizer",
    "rl_training_config.metrics_logging_options": "see --report-to",
    "rl_training_config.profiler_options": "gspax bench FILE --profile DIR",
    "model_config": "the experiment file names the model",
    "reference_model_config": "the experiment file names the model",
    "rollout_model_config": OWN,
    "rollout_engine": "gspax's own sampler is used; engine=gspax.config.Engine for servers",
}
ADAM = "optimizer.transform=gspax.config.optimizers.adamw"


def verl(given: Given, devices: int) -> Iterator[Line]:
    """Translate settings of verl's `main_ppo`."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    prompts = given.number("data.train_batch_size", 1024)
    yield Line(f"sampling.prompts={prompts}", "data.train_batch_size")
    yield from given.line("sampling.group", f"{rollout}.n")
    yield from given.line("sampling.max_prompt_tokens", "data.max_prompt_length")
    response = given.number("data.max_response_length", 512)
    yield Line(f"sampling.max_tokens={response}", "data.max_response_length")
    yield from given.line("sampling.temperature", f"{rollout}.temperature", off=1.0)
    yield from given.line("sampling.top_p", f"{rollout}.top_p", off=1.0)
    yield from given.line("sampling.top_k", f"{rollout}.top_k", off=-1)
    minibatch = given.number(f"{actor}.ppo_mini_batch_size", 256)
    yield Line(
        f"schedule.minibatches={divided(prompts, minibatch)}", f"data.train_batch_size / {actor}.ppo_mini_batch_size"
    )
    yield from given.line("schedule.epochs", f"{actor}.ppo_epochs", off=1)
    found = given.number("trainer.n_gpus_per_node", 8) * _nodes(given)
    count = devices or found
    if given.take(f"{actor}.use_dynamic_bsz", False):
        tokens = given.number(f"{actor}.ppo_max_token_len_per_gpu", 16384)
        yield Line(
            f"schedule.microbatch_tokens={tokens * count}", f"{actor}.ppo_max_token_len_per_gpu x {count} devices"
        )
    elif rows := given.number(f"{actor}.ppo_micro_batch_size_per_gpu"):
        yield Line(
            f"schedule.microbatch_rows={rows * count}", f"{actor}.ppo_micro_batch_size_per_gpu x {count} devices"
        )
    yield from _verl_loss(given, response)
    yield from _verl_advantage(given)
    yield from _verl_penalties(given)
    yield from _verl_weights(given)
    yield from _verl_optimizer(given, divided(prompts, minibatch) * given.number(f"{actor}.ppo_epochs", 1))
    if given.take("algorithm.filter_groups.enable", False):
        batches = given.number("algorithm.filter_groups.max_num_gen_batches", 10) or 10
        yield Line(f"sampling.max_refills={batches - 1}", "algorithm.filter_groups")
    for override, key in (("schedule.checkpoint_every", "save_freq"), ("schedule.eval_every", "test_freq")):
        every = given.number(f"trainer.{key}", -1)
        yield Line(f"{override}={max(every, 0)}", f"trainer.{key}")
    yield from given.line("schedule.keep_checkpoints", "trainer.max_actor_ckpt_to_keep")


def _verl_optimizer(given: Given, updates: int) -> Iterator[Line]:
    """Translate the length of the run, the optimizer, and LoRA; `updates` are those of a rollout."""
    actor = "actor_rollout_ref.actor"
    yield from given.line("optimizer.learning_rate", f"{actor}.optim.lr")
    steps = given.number("trainer.total_training_steps")
    if steps is not None:
        yield Line(f"schedule.steps={steps}", "trainer.total_training_steps")
    warmup, share = (
        given.number(f"{actor}.optim.lr_warmup_steps", 0),
        given.number(f"{actor}.optim.lr_warmup_steps_ratio", 0),
    )
    if warmup and warmup > 0:
        yield Line(f"optimizer.warmup_updates={warmup * updates}", f"{actor}.optim.lr_warmup_steps x {updates} updates")
    elif share and steps:
        yield Line(f"optimizer.warmup_updates={int(share * steps * updates)}", f"{actor}.optim.lr_warmup_steps_ratio")
    elif share:
        given.taken.discard(f"{actor}.optim.lr_warmup_steps_ratio")
    yield Line("optimizer.transform.b2=0.999", "verl's AdamW")
    yield Line(
        f"optimizer.transform.weight_decay={given.number(f'{actor}.optim.weight_decay', 0.01)}",
        f"{actor}.optim.weight_decay",
    )
    yield from given.line("optimizer.max_grad_norm", f"{actor}.grad_clip", off=1.0)
    yield from given.line("optimizer.max_grad_norm", f"{actor}.optim.clip_grad", off=1.0)
    offload = [given.take(f"{actor}.{kind}.optimizer_offload", False) for kind in ("fsdp_config", "megatron")]
    if any(offload):
        yield Line("optimizer.offload=true", f"{actor}.fsdp_config.optimizer_offload")
    if given.take("actor_rollout_ref.model.enable_gradient_checkpointing", False):
        yield Line("model.remat=full", "actor_rollout_ref.model.enable_gradient_checkpointing")
    if rank := given.number("actor_rollout_ref.model.lora_rank", 0):
        alpha = given.number("actor_rollout_ref.model.lora_alpha", 16)
        yield Line("lora=gspax.config.Lora", "actor_rollout_ref.model.lora_rank")
        yield Line(f"lora.rank={rank}", "actor_rollout_ref.model.lora_rank")
        yield Line(f"lora.alpha={alpha}", "actor_rollout_ref.model.lora_alpha")


def _nodes(given: Given) -> int:
    nodes = given.take("trainer.nnodes", 1)
    if isinstance(nodes, int):
        return nodes
    given.taken.discard("trainer.nnodes")
    return 1


def _verl_loss(given: Given, response: int) -> Iterator[Line]:
    """Translate the policy loss, its aggregation, and its clip range."""
    actor = "actor_rollout_ref.actor"
    mode = given.take(f"{actor}.policy_loss.loss_mode", "vanilla")
    names = {"vanilla": "grpo", "gspo": "gspo", "kl_cov": "importance_sampling", "clip_cov": "grpo", "gmpo": "gmpo"}
    if mode not in names:
        raise UserError(f"{actor}.policy_loss.loss_mode: wanted {', '.join(names)}, got {mode!r}")
    yield Line(f"loss=gspax.losses.{names[mode]}", f"{actor}.policy_loss.loss_mode={mode}")
    yield from _aggregate(given.take(f"{actor}.loss_agg_mode", "token-mean"), response, f"{actor}.loss_agg_mode")
    if mode == "kl_cov":
        yield Line("regularizers.kl_cov=gspax.config.CovarianceKL", f"{actor}.policy_loss.loss_mode")
        return
    both = given.number(f"{actor}.clip_ratio", 0.2)
    for side in ("low", "high"):
        width = given.number(f"{actor}.clip_ratio_{side}", both)
        yield Line(f"loss.clip_{side}={width}", f"{actor}.clip_ratio_{side}")
    if mode == "vanilla":
        yield Line(f"loss.dual_clip={given.number(f'{actor}.clip_ratio_c', 3.0)}", f"{actor}.clip_ratio_c")
    if mode == "clip_cov":
        yield Line("selection=gspax.losses.selection.clip_cov", f"{actor}.policy_loss.loss_mode")


AGGREGATES = {
    "token-mean": "by_token",
    "seq-mean-token-mean": "by_sequence",
    "sequence-mean-token-mean": "by_sequence",
    "seq-mean-token-sum": "by_constant",
    "seq-mean-token-sum-norm": "by_constant",
}


def _aggregate(mode: str, response: int, key: str) -> Iterator[Line]:
    if mode not in AGGREGATES:
        raise UserError(f"{key}: wanted {', '.join(AGGREGATES)}, got {mode!r}")
    yield Line(f"loss.aggregate=gspax.losses.{AGGREGATES[mode]}", f"{key}={mode}")
    if mode.endswith("norm"):
        yield Line(f"loss.aggregate.length={response}", f"{key}={mode}")


def _verl_advantage(given: Given) -> Iterator[Line]:
    names = {
        "grpo": "standardize",
        "rloo": "leave_one_out",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "opo": "opo",
        "grpo_passk": "best_of_group",
    }
    estimator = given.take("algorithm.adv_estimator", "gae")
    if estimator not in names:
        raise UserError(f"algorithm.adv_estimator: wanted {', '.join(names)}, got {estimator!r}")
    name = names[estimator]
    if estimator == "grpo" and not given.take("algorithm.norm_adv_by_std_in_grpo", True):
        name = "center"
    yield Line(f"advantage=gspax.advantages.{name}", f"algorithm.adv_estimator={estimator}")


def _verl_penalties(given: Given) -> Iterator[Line]:
    """Translate the entropy bonus, and the KL in the loss or in the reward."""
    actor = "actor_rollout_ref.actor"
    yield from given.line("regularizers.entropy", f"{actor}.entropy_coeff", off=0)
    coefficient = given.number(f"{actor}.kl_loss_coef", 0.001)
    kind = given.take(f"{actor}.kl_loss_type", "low_var_kl")
    if given.take(f"{actor}.use_kl_loss", False) and coefficient:
        if kind not in ("low_var_kl", "k3"):
            raise UserError(f"{actor}.kl_loss_type: wanted low_var_kl, got {kind!r}")
        yield Line("reference=gspax.config.Reference", f"{actor}.use_kl_loss")
        yield Line("reference.loss=gspax.losses.kl.grpo_kl", f"{actor}.kl_loss_type={kind}")
        yield Line(f"reference.coefficient={coefficient}", f"{actor}.kl_loss_coef")
    coefficient = given.number("algorithm.kl_ctrl.kl_coef", 0.001)
    if given.take("algorithm.use_kl_in_reward", False) and coefficient:
        yield Line("reference=gspax.config.Reference", "algorithm.use_kl_in_reward")
        yield Line("reference.reward=gspax.losses.kl.k1", "algorithm.use_kl_in_reward")
        yield Line(f"reference.coefficient={coefficient}", "algorithm.kl_ctrl.kl_coef")


def _verl_weights(given: Given) -> Iterator[Line]:
    part = "algorithm.rollout_correction"
    if given.take(f"{part}.bypass_mode", False):
        yield Line("old_logp=sampler", f"{part}.bypass_mode")
    if level := given.take(f"{part}.rollout_is"):
        names = {"token": "truncate_tokens", "sequence": "truncate_sequences"}
        if level not in names:
            raise UserError(f"{part}.rollout_is: wanted token or sequence, got {level!r}")
        yield Line(f"correction=gspax.losses.correction.{names[level]}", f"{part}.rollout_is={level}")
        yield Line(
            f"correction.cap={given.number(f'{part}.rollout_is_threshold', 2.0)}", f"{part}.rollout_is_threshold"
        )


def trl(given: Given, devices: int) -> Iterator[Line]:
    """Translate settings of TRL's `GRPOConfig`, and of its model and LoRA."""
    group, count = given.number("num_generations", 8), devices or 1
    rows = given.number("per_device_train_batch_size", 8) * count
    accumulated = given.number("gradient_accumulation_steps", 1)
    per_generation = given.number("steps_per_generation", accumulated)
    samples = given.number("generation_batch_size", rows * per_generation)
    yield Line(f"sampling.prompts={divided(samples, group)}", f"rows of {count} devices x steps per generation / group")
    yield Line(f"sampling.group={group}", "num_generations")
    yield from given.line("sampling.max_prompt_tokens", "max_prompt_length")
    response = given.number("max_completion_length", 256)
    yield Line(f"sampling.max_tokens={response}", "max_completion_length")
    for key, off in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        yield from given.line(f"sampling.{key}", key, off=off)
    minibatches, epochs = divided(samples, rows * accumulated), given.number("num_iterations", 1)
    yield Line(f"schedule.minibatches={minibatches}", "steps_per_generation / gradient_accumulation_steps")
    yield Line(f"schedule.epochs={epochs}", "num_iterations")
    yield Line(f"schedule.microbatch_rows={rows}", f"per_device_train_batch_size x {count} devices")
    yield from _trl_loss(given, response)
    yield from _trl_penalties(given)
    updates = minibatches * epochs
    steps = given.number("max_steps", -1)
    if steps > 0:
        yield Line(f"schedule.steps={divided(steps, updates)}", "max_steps, which counts updates")
    yield Line(f"optimizer.learning_rate={given.number('learning_rate', 1e-6)}", "learning_rate")
    yield from _trl_schedule(given, steps)
    yield Line("optimizer.transform.b2=0.999", "TRL's AdamW")
    yield from given.line("optimizer.transform.b1", "adam_beta1", off=0.9)
    yield from given.line("optimizer.transform.b2", "adam_beta2", off=0.999)
    yield from given.line("optimizer.transform.weight_decay", "weight_decay", off=0.0)
    yield from given.line("optimizer.max_grad_norm", "max_grad_norm", off=1.0)
    yield from _trl_model(given)
    yield from given.line("seed", "seed")
    every = given.number("save_steps")
    if every is not None:
        yield Line(f"schedule.checkpoint_every={max(int(every) // updates, 1)}", "save_steps, which counts updates")


def _trl_loss(given: Given, response: int) -> Iterator[Line]:
    """Translate loss, level of the ratio, aggregation, clip range, and advantage."""
    kind, level = given.take("loss_type", "dapo"), given.take("importance_sampling_level", "token")
    modes = {
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "dapo": "token-mean",
        "bnpo": "token-mean",
    }
    own = ("cispo", "sapo", "luspo", "vespo")
    if kind not in modes and kind not in own:
        raise UserError(f"loss_type: wanted {', '.join((*modes, *own))}, got {kind!r}")
    name = kind if kind in own else "gspo" if level == "sequence" else "grpo"
    yield Line(f"loss=gspax.losses.{name}", f"loss_type={kind}, importance_sampling_level={level}")
    if kind in modes:
        yield from _aggregate(modes[kind], response, "loss_type")
    low = given.number("epsilon", 0.2)
    high = given.number("epsilon_high", low)
    if name in ("gspo", "grpo", "luspo"):
        yield Line(f"loss.clip_low={low}", "epsilon")
        yield Line(f"loss.clip_high={high}", "epsilon_high")
    if name == "cispo":
        yield Line(f"loss.clip_high={high - 1}", "epsilon_high, a bound there and a distance from 1 here")
    if name == "grpo":
        yield from given.line("loss.dual_clip", "delta")
    for ours, theirs in (("tau_positive", "sapo_temperature_pos"), ("tau_negative", "sapo_temperature_neg")):
        yield from given.line(f"loss.{ours}", theirs) if name == "sapo" else ()
    scale = str(given.take("scale_rewards", "group")).lower()
    names = {
        "group": "standardize",
        "true": "standardize",
        "none": "center",
        "false": "center",
        "batch": "reinforce_plus_plus_baseline",
    }
    if scale not in names:
        raise UserError(f"scale_rewards: wanted group, batch, or none, got {scale!r}")
    yield Line(f"advantage=gspax.advantages.{names[scale]}", f"scale_rewards={scale}")
    if names[scale] != "center":
        yield Line("advantage.eps=1e-4", "TRL's eps beside the standard deviation")
    if given.take("mask_truncated_completions", False):
        yield Line("filter_overlong=true", "mask_truncated_completions")


def _trl_penalties(given: Given) -> Iterator[Line]:
    yield from given.line("regularizers.entropy", "entropy_coef", off=0.0)
    yield from given.line("regularizers.load_balance", "router_aux_loss_coef", off=0.0)
    if beta := given.number("beta", 0.0):
        unbiased = given.take("use_bias_correction_kl", True)
        yield Line("reference=gspax.config.Reference", "beta")
        yield Line(f"reference.loss=gspax.losses.kl.{'token_kl' if unbiased else 'grpo_kl'}", "use_bias_correction_kl")
        yield Line(f"reference.coefficient={beta}", "beta")
    share = given.number("top_entropy_quantile", 1.0)
    if share < 1:
        yield Line("selection=gspax.losses.selection.top_entropy", "top_entropy_quantile")
        yield Line(f"selection.share={share}", "top_entropy_quantile")
    if threshold := given.number("off_policy_mask_threshold"):
        yield Line("rejection=gspax.losses.correction.reject_off_policy", "off_policy_mask_threshold")
        yield Line(f"rejection.delta={threshold}", "off_policy_mask_threshold")


def _trl_schedule(given: Given, steps: int) -> Iterator[Line]:
    kind, warmup = given.take("lr_scheduler_type", "linear"), given.number("warmup_steps", 0)
    if kind in ("linear", "cosine") and steps > 0:
        yield Line(f"optimizer.schedule=gspax.config.optimizers.{kind}", f"lr_scheduler_type={kind}")
        yield Line(f"optimizer.schedule.updates={steps}", "max_steps")
    elif kind not in ("constant", "constant_with_warmup"):
        given.taken.discard("lr_scheduler_type")
        given.values.setdefault("lr_scheduler_type", kind)
    if warmup:
        yield Line(f"optimizer.warmup_updates={warmup}", "warmup_steps")


def _trl_model(given: Given) -> Iterator[Line]:
    if given.take("gradient_checkpointing", True):
        yield Line("model.remat=full", "gradient_checkpointing")
    if not (given.take("use_peft", False) or any(key.startswith("lora.") for key in given.values)):
        return
    yield Line("lora=gspax.config.Lora", "use_peft")
    yield Line(f"lora.rank={given.number('lora_r', given.number('lora.r', 16))}", "lora_r")
    yield Line(f"lora.alpha={given.number('lora_alpha', given.number('lora.lora_alpha', 32))}", "lora_alpha")
    modules = given.take("lora_target_modules", given.take("lora.target_modules", ("q_proj", "v_proj")))
    modules = (modules,) if isinstance(modules, str) else tuple(modules)
    yield from lora_lines(modules, "lora_target_modules")


PROJECTIONS = {
    "attention": {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"},
    "mlp": {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
}


def lora_lines(modules: tuple[str, ...], source: str) -> Iterator[Line]:
    """Yield which projections have adapters, from PEFT's names. UserError for one that gspax has not."""
    known = {name for part in PROJECTIONS.values() for name in part}
    if unknown := [name for name in modules if name not in known and name != "all-linear"]:
        raise UserError(f"{source}: wanted {', '.join(sorted(known))}, or all-linear, got {unknown[0]!r}")
    for part, names in PROJECTIONS.items():
        chosen = [ours for theirs, ours in names.items() if theirs in modules]
        if "all-linear" not in modules:
            yield Line(
                f"lora.{part}={','.join(chosen) if len(chosen) > 1 else f'({chosen[0]},)' if chosen else 'false'}",
                source,
            )


def tunix(given: Given, devices: int) -> Iterator[Line]:
    """Translate settings of tunix's `grpo_main`."""
    grpo, training, optimizer = "grpo_config", "rl_training_config", "rl_training_config.actor_optimizer_config"
    prompts = given.number("batch_size", 1)
    yield Line(f"sampling.prompts={prompts}", "batch_size")
    yield from given.line("sampling.group", f"{grpo}.num_generations")
    yield from given.line("sampling.max_prompt_tokens", "rollout_config.max_prompt_length")
    yield from given.line("sampling.max_tokens", "rollout_config.total_generation_steps")
    for key, off in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        yield from given.line(f"sampling.{key}", f"rollout_config.{key}", off=off)
    minibatch = given.number(f"{training}.mini_batch_size", prompts)
    yield Line(f"schedule.minibatches={divided(prompts, minibatch)}", f"batch_size / {training}.mini_batch_size")
    yield from given.line("schedule.epochs", f"{grpo}.num_iterations", off=1)
    algorithm = given.take(f"{grpo}.loss_algo", "grpo")
    names = {"grpo": "grpo", "gspo-token": "gspo_token"}
    if algorithm not in names:
        raise UserError(f"{grpo}.loss_algo: wanted {', '.join(names)}, got {algorithm!r}")
    yield Line(f"loss=gspax.losses.{names[algorithm]}", f"{grpo}.loss_algo={algorithm}")
    yield from _aggregate(given.take(f"{grpo}.loss_agg_mode", "sequence-mean-token-mean"), 1, f"{grpo}.loss_agg_mode")
    low = given.number(f"{grpo}.epsilon", 0.2)
    yield Line(f"loss.clip_low={low}", f"{grpo}.epsilon")
    yield Line(f"loss.clip_high={given.number(f'{grpo}.epsilon_high', low)}", f"{grpo}.epsilon_high")
    yield Line("advantage=gspax.advantages.standardize", "tunix's GRPO")
    yield Line("advantage.eps=1e-4", "tunix's eps beside the standard deviation")
    if beta := given.number(f"{grpo}.beta", 0.04):
        yield Line("reference=gspax.config.Reference", f"{grpo}.beta")
        yield Line("reference.loss=gspax.losses.kl.grpo_kl", f"{grpo}.beta; a KL here, see the page")
        yield Line(f"reference.coefficient={beta}", f"{grpo}.beta")
    steps = given.number(f"{training}.max_steps", given.number("num_batches"))
    if steps:
        yield Line(f"schedule.steps={steps}", f"{training}.max_steps")
    yield from given.line("optimizer.learning_rate", f"{optimizer}.peak_value")
    yield from _tunix_schedule(given, optimizer, steps)
    yield Line(ADAM, f"{optimizer}.opt_type={given.take(f'{optimizer}.opt_type', 'adamw')}")
    for key in ("b1", "b2", "weight_decay"):
        yield from given.line(f"optimizer.transform.{key}", f"{optimizer}.{key}")
    yield from given.line("optimizer.max_grad_norm", f"{optimizer}.max_grad_norm")
    yield from given.line("schedule.eval_every", f"{training}.eval_every_n_steps")
    yield from given.line("schedule.checkpoint_every", f"{training}.checkpointing_options.save_interval_steps")
    yield from given.line("schedule.keep_checkpoints", f"{training}.checkpointing_options.max_to_keep")
    yield from given.line("optimizer.offload", "offload_to_cpu", off=False)
    yield from given.line("seed", "model_config.rng_seed")
    if rank := given.number("actor_model_config.lora_config.rank"):
        yield Line("lora=gspax.config.Lora", "actor_model_config.lora_config")
        yield Line(f"lora.rank={rank}", "actor_model_config.lora_config.rank")
        yield from given.line("lora.alpha", "actor_model_config.lora_config.alpha")


def _tunix_schedule(given: Given, optimizer: str, steps: Any) -> Iterator[Line]:
    kind = given.take(f"{optimizer}.schedule_type", "")
    updates = given.number(f"{optimizer}.decay_steps", steps)
    share = given.number(f"{optimizer}.warmup_ratio", 0.0)
    warmup = given.number(f"{optimizer}.warmup_steps", None if updates is None else math.floor(share * updates))
    if "cosine" in str(kind) and updates:
        yield Line("optimizer.schedule=gspax.config.optimizers.cosine", f"{optimizer}.schedule_type")
        yield Line(f"optimizer.schedule.updates={updates}", f"{optimizer}.decay_steps")
        for end in ("init_value", "end_value"):
            if given.number(f"{optimizer}.{end}", 0.0) != 0:
                given.taken.discard(f"{optimizer}.{end}")
    elif kind:  # its length is not known
        given.taken -= {f"{optimizer}.{key}" for key in ("schedule_type", "warmup_ratio")}
    if warmup:
        yield Line(f"optimizer.warmup_updates={warmup}", f"{optimizer}.warmup_steps")


def divided(whole: float, part: float) -> int:
    """Return a whole quotient. UserError if it is none."""
    if part <= 0 or whole % part:
        raise UserError(f"wanted a batch that its parts divide, got {whole:g} and {part:g}")
    return int(whole // part)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else () if value is None else (str(value),)


def verl_parts(given: Given) -> Parts:
    files = (_texts(given.take(f"data.{name}_files")) for name in ("train", "val"))
    return Parts(str(given.take("actor_rollout_ref.model.path", "")), *files)


def trl_parts(given: Given) -> Parts:
    given.take("torch_dtype"), given.take("dtype"), given.take("bf16")
    name = given.take("model_name_or_path", given.take("model", ""))
    return Parts(str(name), _texts(given.take("dataset_name")), ())


def tunix_parts(given: Given) -> Parts:
    name = given.take("model_config.model_id", given.take("reference_model_config.model_id", ""))
    return Parts(str(name), _texts(given.take("dataset_name")), ())


class Library(NamedTuple):
    """How a library's settings are read."""

    lines: Callable[[Given, int], Iterator[Line]]
    parts: Callable[[Given], Parts]
    why: Mapping[str, str]


LIBRARIES = {
    "verl": Library(verl, verl_parts, VERL_WHY),
    "trl": Library(trl, trl_parts, TRL_WHY),
    "tunix": Library(tunix, tunix_parts, TUNIX_WHY),
}
