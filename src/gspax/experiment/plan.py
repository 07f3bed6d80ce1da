"""The dry run: what an experiment would cost, from its numbers alone. No array is made and no device is used."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from gspax.config import Experiment, trained_dtype, updates_per_step
from gspax.experiment.description import describe, flatten, show
from gspax.model.sizes.counts import active_parameter_count, parameter_count, trained_count, with_carried
from gspax.model.sizes.memory import (
    SamplerLayout,
    choose_sampler_layout,
    count_device_prompts,
    count_slots,
    learner_bytes,
    optimizer_bytes,
    prefill_chunk,
    row_length,
    sampler_bytes,
    size_of,
)
from gspax.parallel import sharding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cost of an experiment. Bytes are per device, except the checkpoint's."""

    experiment: Experiment
    overridden: tuple[str, ...]  # keys given on the command line
    mesh: dict[str, int]
    layout: SamplerLayout
    slots: int  # rows that are sampled at once
    device_prompts: int  # of a device of the sampler
    prefill_chunk: int  # of these, prefilled at once
    learner: dict[str, int]  # array -> bytes during an update, activations excluded
    sampler: dict[str, int]  # array -> bytes during a rollout
    host: int  # bytes of optimizer state in host memory, for each device
    checkpoint: int


def plan(experiment: Experiment, devices: int = 1, *, overridden: Collection[str] = ()) -> Plan:
    """The cost of a valid experiment on a number of devices.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    config, placement, lora = experiment.model, experiment.placement, experiment.lora
    own = sharding.resolve_axes(placement.mesh, placement.devices, config) if placement else None
    mesh = sharding.resolve_axes(experiment.mesh, devices - (placement.devices if placement else 0), config)
    layout, held = choose_sampler_layout(experiment, own or mesh), with_carried(experiment.sampling, placement)
    moments, all_moments = (
        sum(optimizer_bytes(experiment.optimizer, config, lora, sizes).values())
        for sizes in (mesh, dict.fromkeys(mesh, 1))
    )
    return Plan(
        experiment=experiment,
        overridden=tuple(overridden),
        mesh=mesh,
        layout=layout,
        slots=count_slots(config, held, layout.sizes),
        device_prompts=count_device_prompts(held, layout.sizes),
        prefill_chunk=prefill_chunk(config, held, layout.sizes),
        learner=learner_bytes(experiment, mesh),
        sampler=sampler_bytes(experiment, mesh, layout.sizes),
        host=moments if experiment.optimizer.offload else 0,
        checkpoint=size_of(trained_dtype(config, lora)) * trained_count(config, lora) + all_moments,
    )


def render(plan: Plan) -> str:
    """The plan as text."""
    experiment, sampling, steps = plan.experiment, plan.experiment.sampling, plan.experiment.schedule.steps
    settings, disaggregated = flatten(describe(experiment)), experiment.placement is not None
    lines = ["Settings" + (" (* given on the command line)" if plan.overridden else "")]
    width = max(map(len, settings))
    for key, value in settings.items():
        mark = "*" if any(f"{key}.".startswith(f"{overridden}.") for overridden in plan.overridden) else " "
        lines.append(f"{mark} {key:<{width}}  {show(value)}")
    rows, updates = sampling.prompts * sampling.group, updates_per_step(experiment.schedule)
    sampled, trained_on = rows * sampling.max_tokens, rows * row_length(sampling)
    lines += [
        "",
        f"Model       {_count(parameter_count(experiment.model))} parameters, "
        f"{_count(active_parameter_count(experiment.model))} active per token (embedding and head counted in both)",
        f"Mesh        {_axes(plan.mesh)}{' of the learner' if disaggregated else ''} (--devices N for another number)",
        f"            {sharding.explain_mesh(experiment.mesh, plan.mesh, experiment.model)}",
        f"Sampler     {_axes(plan.layout.sizes)}{' of its own' if disaggregated else ''}",
        *(f"            {reason}" for reason in plan.layout.why),
        f"One step    {rows:,} rows, {updates} updates, at most {sampled:,} tokens sampled, {trained_on:,} trained on",
        f"In total    {steps:,} steps, {steps * updates:,} updates, at most {steps * trained_on:,} tokens",
    ]
    if plan.slots < rows:
        lines.append(f"Slots       {plan.slots:,} rows sampled at once; a slot of a finished row takes the next")
    if plan.prefill_chunk < plan.device_prompts:
        lines.append(f"Prefill     {plan.prefill_chunk:,} of {plan.device_prompts:,} prompts of a device at a time")
    if experiment.warm_start is not None:
        lines.append(f"Warm start  {experiment.warm_start.steps:,} supervised updates before them")
    lines.append(f"Checkpoint  {_bytes(plan.checkpoint)}: trained parameters and optimizer state")
    for title, parts in (("learner, without activations", plan.learner), ("sampler", plan.sampler)):
        lines += ["", f"Memory per device, {title}"]
        lines += [f"  {part:<44}{_bytes(size):>12}" for part, size in parts.items()]
        lines.append(f"  {'together':<44}{_bytes(sum(parts.values())):>12}")
    if plan.host:
        lines += ["", f"In host memory, for each device: the optimizer state, {_bytes(plan.host)}"]
    lines += ["", "`gspax compile` gives the memory of the compiled programs, activations included"]
    return "\n".join(lines)


def _axes(mesh: dict[str, int]) -> str:
    devices = math.prod(mesh.values())
    named = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "all axes 1"
    return f"{named}: {devices} device{'s' if devices > 1 else ''}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _bytes(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"
