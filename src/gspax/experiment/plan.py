"""The dry run: what an experiment would cost, from its numbers alone. No array is made and no device is used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from gspax.config import (
    Experiment,
    Layer,
    ModelConfig,
    NoMixer,
    NoMlp,
    Sampling,
    SelfAttention,
    WarmStart,
    layers_of,
    repeated_patterns,
    updates_per_step,
    with_vocabulary,
)
from gspax.experiment.description import SOURCE, describe, flatten, reward_names, show, without_defaults
from gspax.experiment.explanation import objective_lines
from gspax.model.passes import Passes
from gspax.model.sizes import (
    SamplerSizes,
    active_parameter_count,
    checkpointed_bytes,
    choose_sampler_layout,
    forward_flops,
    learner_bytes,
    optimizer_bytes,
    parameter_count,
    recorded_bytes,
    sampler_bytes,
    sampler_sizes,
    size_of,
    trained_count,
    with_carried,
)
from gspax.parallel import sharding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cost of an experiment. Bytes are per device, except the checkpoint's."""

    experiment: Experiment
    overridden: tuple[str, ...]  # keys given on the command line
    mesh: dict[str, int]
    sampler_mesh: dict[str, int]
    sizes: SamplerSizes
    learner: dict[str, int]  # array -> bytes during an update, activations excluded
    sampler: dict[str, int]  # array -> bytes during a rollout
    host: int  # bytes of offloaded optimizer state in host memory, for each device
    checkpoint: int
    push: int  # bytes of the weights that servers get after each step; 0 without servers


def plan(experiment: Experiment, devices: int = 1, *, overridden: Collection[str] = ()) -> Plan:
    """Estimate the cost of a valid experiment on a number of devices.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    config, placement, trained = experiment.model, experiment.placement, experiment.trained
    own = sharding.resolve_axes(placement.mesh, placement.devices, config) if placement else None
    mesh = sharding.resolve_axes(experiment.mesh, devices - (placement.devices if placement else 0), config)
    sampler_mesh, held = choose_sampler_layout(experiment, own or mesh), with_carried(experiment.sampling, placement)
    served = experiment.engine is not None
    moments, all_moments = (
        optimizer_bytes(experiment.optimizer, trained, sizes) for sizes in (mesh, dict.fromkeys(mesh, 1))
    )
    all_kept = checkpointed_bytes(Passes(experiment))
    return Plan(
        experiment=experiment,
        overridden=tuple(overridden),
        mesh=mesh,
        sampler_mesh=sampler_mesh,
        sizes=sampler_sizes(config, held, sampler_mesh),
        learner=learner_bytes(experiment, mesh),
        sampler={} if served else sampler_bytes(experiment, mesh, sampler_mesh),
        push=size_of(config.dtype) * parameter_count(config) if served else 0,
        host=moments if experiment.optimizer.offload else 0,
        checkpoint=size_of(trained.dtype) * trained_count(trained) + all_moments + all_kept,
    )


def memory_problems(plan: Plan, gib: float) -> list[str]:
    """List a sentence for each phase whose arrays do not fit into the memory of a device, with what would fit.

    Args:
      plan: of an experiment.
      gib: the memory of a device.
    """
    problems, limit = [], gib * 2**30
    if (learner := sum(plan.learner.values())) > limit:
        problems.append(
            f"learner: wanted arrays of at most {gib:g} GiB on each device, got {_bytes(learner)} before activations; "
            "try more devices, lora=gspax.config.Lora, optimizer.offload=true, or model.param_dtype=bfloat16"
        )
    if (sampler := sum(plan.sampler.values())) > limit:
        cache = plan.sizes.prompt_cache + plan.sizes.completion_cache
        room = max(0, math.floor((limit - (sampler - cache)) / 2**30 * 100)) / 100
        hint = "try more devices, or mesh.tensor"
        if room:
            smaller = replace(plan.experiment, sampling=replace(plan.experiment.sampling, cache_gib=room))
            sizes = sampler_sizes(smaller.model, with_carried(smaller.sampling, smaller.placement), plan.sampler_mesh)
            if sizes.prompt_cache + sizes.completion_cache <= room * 2**30:
                hint = f"sampling.cache_gib={room:g} samples {sizes.slots:,} rows at once, and then it fits"
        problems.append(
            f"sampler: wanted arrays of at most {gib:g} GiB on each device, got {_bytes(sampler)}, {_bytes(cache)} of "
            f"them keys and values; {hint}"
        )
    return problems


def _held_models(passes: Passes) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the name and the model of each checkpoint that a term holds beside the policy."""
    for each in passes.held():
        if each.model is not None:
            yield each.name, with_vocabulary(each.model, passes.experiment.model)


def render(plan: Plan, *, all_settings: bool = False) -> str:
    """Write the plan as text, after the settings that differ from their defaults, or after all of them."""
    experiment, sampling = plan.experiment, plan.experiment.sampling
    is_divided = experiment.placement is not None
    sizes, rows = plan.sizes, sampling.prompts * sampling.group
    lines = [
        *_settings(plan, all_settings=all_settings),
        "",
        f"Model       {_parameters(experiment.model)} (embedding and head counted in both)",
        *(f"{name.capitalize():<12}{_parameters(model)}" for name, model in _held_models(Passes(experiment))),
        f"Layers      {_layers(experiment.model)}",
        f"Mesh        {_axes(plan.mesh)}{' of the learner' if is_divided else ''} (--devices N for another number)",
        f"            {sharding.explain_mesh(experiment.mesh, plan.mesh, experiment.model)}",
        *_explain_sampler(plan),
        *(f"{name:<12}{text}" for name, text in _work(plan)),
        f"Compute     {_compute(plan)}",
    ]
    if sizes.slots < rows and experiment.engine is None:
        lines.append(f"Slots       {sizes.slots:,} rows sampled at once; a slot of a finished row takes the next")
    if sizes.prefill_chunk < sizes.prompts and experiment.engine is None:
        lines.append(f"Prefill     {sizes.prefill_chunk:,} of {sizes.prompts:,} prompts of a device at a time")
    if experiment.warm_start is not None:
        lines += _warm_start(experiment.warm_start, sampling, experiment.model)
    lines.append(f"Checkpoint  {_bytes(plan.checkpoint)}: trained parameters and optimizer state")
    if experiment.schedule.record_rollouts:
        size, steps = recorded_bytes(Passes(experiment)), experiment.schedule.steps
        lines.append(f"Recorded    at most {_bytes(size)} of arrays for each rollout, {_bytes(size * steps)} in all")
    for title, parts in (
        ("learner, without activations", plan.learner),
        ("sampler", plan.sampler),
    ):
        if not parts:
            continue
        lines += ["", f"Memory per device, {title}"]
        lines += [f"  {part:<44}{_bytes(size):>12}" for part, size in parts.items()]
        lines.append(f"  {'together':<44}{_bytes(sum(parts.values())):>12}")
    lines += ["", "Objective (`gspax explain` says what the names are)"]
    lines += [f"  {line}" for line in objective_lines(Passes(experiment))]
    if plan.host:
        lines += ["", f"In host memory, for each device: the optimizer state, {_bytes(plan.host)}"]
    lines += ["", "`gspax compile` gives the memory of the compiled programs, activations included, and a bound on the"]
    lines += ["time of a step on a TPU; `gspax bench` measures a step on this machine"]
    return "\n".join(lines)


def _settings(plan: Plan, *, all_settings: bool) -> list[str]:
    """The lines of the settings; those of the command line are among them and marked."""
    description = describe(plan.experiment)
    everything, other = flatten(description), {*flatten(without_defaults(description))}
    given = [key for key in everything if any(f"{key}.".startswith(f"{name}.") for name in plan.overridden)]
    other = {key for key in other if not key.endswith(SOURCE)}
    shown = {key: value for key, value in everything.items() if all_settings or key in other or key in given}
    title = "All settings" if all_settings else "Settings that differ from the defaults"
    notes = ["* given on the command line"] if given else []
    notes += [] if all_settings else [f"--all-settings lists all {len(everything)}"]
    width = max(map(len, shown))
    lines = [f"{'*' if key in given else ' '} {key:<{width}}  {_short(value)}" for key, value in shown.items()]
    return [title + (f" ({'; '.join(notes)})" if notes else ""), *lines]


def overview(plan: Plan) -> list[tuple[str, str]]:
    """Make the table at the start of a run: a line for its model, task, objective, devices, and work."""
    experiment, settings = plan.experiment, flatten(describe(plan.experiment))
    start = f"{experiment.model.checkpoint}, " if experiment.model.checkpoint else ""
    rate, decay = experiment.optimizer.learning_rate, settings["optimizer.schedule"]
    return [
        ("Experiment", f"{experiment.name}, seed {experiment.seed}"),
        ("Model", start + _parameters(experiment.model)),
        ("Task", ", ".join([str(settings["data"]), *reward_names(settings)])),
        ("Objective", "\n".join(objective_lines(Passes(experiment)))),
        ("Optimizer", f"learning rate {show(rate)}, {str(decay).rpartition('.')[2]}"),
        ("Mesh", _axes(plan.mesh)),
        *_work(plan),
    ]


def _work(plan: Plan) -> list[tuple[str, str]]:
    """The rows, updates and tokens of a step and of the run."""
    sampling, schedule = plan.experiment.sampling, plan.experiment.schedule
    rows, updates, steps = sampling.prompts * sampling.group, updates_per_step(schedule), schedule.steps
    sampled, trained_on = rows * sampling.max_tokens, rows * (sampling.max_prompt_tokens + sampling.max_tokens)
    made = f"{sampling.prompts:,} prompts x {sampling.group:,} responses"
    count = f"{updates} update{'s' if updates > 1 else ''}"
    step = f"{made}, {count}, at most {sampled:,} tokens sampled, {trained_on:,} trained on"
    return [
        ("One step", step),
        ("In total", f"{steps:,} steps, {steps * updates:,} updates, at most {steps * trained_on:,} tokens"),
    ]


def _compute(plan: Plan) -> str:
    """The floating-point operations of a step and of the run, where every text is as long as it may be."""
    experiment, schedule = plan.experiment, plan.experiment.schedule
    sampling, model = experiment.sampling, experiment.model
    rows, length = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens
    passes = 3 * schedule.epochs + (Passes(experiment).old_logp == "pass")  # a backward pass counts as two
    step = forward_flops(model, length) * rows * (sampling.max_tokens + passes * length)
    step += forward_flops(model, sampling.max_prompt_tokens) * sampling.prompts * sampling.max_prompt_tokens
    total = _operations(step * schedule.steps)
    return f"at most {_operations(step)} a step, {total} in total, on all devices together; evaluations come on top"


def _layers(model: ModelConfig) -> str:
    """The layers in order, such as "1 dense, 45 with experts" or "12 x (1 dense, 3 with experts)"."""
    groups = []
    for pattern, repeats in repeated_patterns([_name(layer) for layer in layers_of(model)]):
        names = ", ".join(f"{len([*equal])} {name}" for name, equal in itertools.groupby(pattern))
        groups.append(f"{repeats} {pattern[0]}" if len(pattern) == 1 else f"{repeats} x ({names})")
    return ", ".join(groups)


def _name(layer: Layer) -> str:
    """The layer's feed-forward network, and its mixer if that is not attention to everything before a token."""
    mixer = layer.mixer
    if isinstance(layer.mlp, NoMlp):
        return f"{mixer.name} alone"
    if isinstance(mixer, NoMixer):
        return "experts alone" if layer.sparse else "dense alone"
    plain = "" if isinstance(mixer, SelfAttention) else mixer.name
    own = f"a window of {mixer.window:,}" if mixer.window else plain
    mlp, joined = ("with experts", "and") if layer.sparse else ("dense", "with")
    return f"{mlp} {joined} {own}" if own else mlp


_LONGEST = 100  # characters of a value


def _short(value: object) -> str:
    """A value on one line, shortened; a text as Python writes it if its ends or lines could not be seen."""
    text = show(value)
    if isinstance(value, str) and (text != text.strip() or "\n" in text):
        text = repr(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def _warm_start(stage: WarmStart, sampling: Sampling, model: ModelConfig) -> list[str]:
    """The rows and tokens of a supervised update, and what its logits would take at once."""
    tokens = stage.rows * (sampling.max_prompt_tokens + sampling.max_tokens)
    logits = _bytes(4 * tokens * model.vocab_size)
    return [
        f"Warm start  {stage.steps:,} supervised updates before them, each of {stage.rows:,} rows, at most {tokens:,} "
        f"tokens ({logits} of logits, computed in chunks)"
    ]


def _axes(mesh: dict[str, int]) -> str:
    named = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    return f"{named}: {math.prod(mesh.values())} devices" if named else "1 device"


def _explain_sampler(plan: Plan) -> list[str]:
    """The lines about the sampler: the devices of a mesh, or servers."""
    experiment = plan.experiment
    if (engine := experiment.engine) is None:
        of_its_own = " of its own" if experiment.placement is not None else ""
        reasons = _explain_sampler_mesh(plan.sampler_mesh, experiment.model)
        return [f"Sampler     {_axes(plan.sampler_mesh)}{of_its_own}", *(f"            {reason}" for reason in reasons)]
    program, weights = "SGLang" if engine.server == "sglang" else "vLLM", f"{experiment.model.dtype} weights"
    return [
        f"Sampler     {program} at {', '.join(engine.addresses)} (`gspax serve-command` prints how to start it)",
        f"Each push   {_bytes(plan.push)} of {weights} in {engine.folder}, which holds at most two versions",
        f"            at 1 GB/s {plan.push / 1e9:.2g} s to write, and as long to read",
    ]


def _explain_sampler_mesh(sizes: dict[str, int], model: ModelConfig) -> list[str]:
    """One line for experts, one for everything else."""
    expert, tensor, fsdp = sizes["expert"], sizes["tensor"], sizes["fsdp"]
    lines = []
    if model.num_experts:
        parts = f", each in {tensor} parts" if tensor > 1 else ""
        lines.append(f"experts: {model.num_experts // expert} of {model.num_experts} on each device{parts}")
    whole = f"over {tensor} devices by heads, widths and vocabulary" if tensor > 1 else "whole on each device"
    gathered = f", in {fsdp} parts that every token gathers" if fsdp > 1 else ""
    return [*lines, f"attention and head: {whole}{gathered}"]


def _parameters(model: ModelConfig) -> str:
    return f"{_count(parameter_count(model))} parameters, {_count(active_parameter_count(model))} active per token"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _operations(number: float) -> str:
    units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"


def _bytes(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"
