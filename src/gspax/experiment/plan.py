"""The dry run: what an experiment would cost, from its numbers alone. No array is made and no device is used."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from gspax.config import Experiment, trained_dtype, updates_per_step
from gspax.experiment.description import describe, flatten, show
from gspax.model.sizes.counts import active_parameter_count, parameter_count, trained_count, with_carried
from gspax.model.sizes.memory import (
    count_device_prompts,
    count_slots,
    learner_bytes,
    optimizer_bytes,
    prefill_chunk,
    row_length,
    sampler_bytes,
    size_of,
)
from gspax.model.sizes.sampler_layout import choose_sampler_layout
from gspax.parallel import sharding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cost of an experiment. Bytes are per device, except the checkpoint's."""

    settings: dict[str, object]  # dotted key -> value
    overridden: tuple[str, ...]  # keys given on the command line
    mesh: dict[str, int]
    sampler_mesh: dict[str, int]
    disaggregated: bool  # the sampler has devices of its own
    why: str  # how the learner's mesh was chosen
    why_sampler: tuple[str, ...]  # how the sampler's was
    parameters: int
    active_parameters: int
    rows: int  # of a rollout batch
    slots: int  # rows that are drawn at once
    device_prompts: int  # of a device of the sampler
    prefill_chunk: int  # of these, prefilled at once
    completion_tokens: int  # drawn in a step, at most
    tokens: int  # prompts and completions that a step trains on, at most
    updates: int  # per step
    steps: int
    warm_start_updates: int
    learner: dict[str, int]  # array -> bytes during an update, activations excluded
    sampler: dict[str, int]  # array -> bytes during a rollout
    host: int  # bytes of optimizer state in host memory, for each device
    checkpoint: int


def plan(experiment: Experiment, devices: int = 1, *, overridden: Collection[str] = ()) -> Plan:
    """The cost of a valid experiment on a number of devices.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    config, sampling, schedule = experiment.model, experiment.sampling, experiment.schedule
    placement, lora = experiment.placement, experiment.lora
    own = sharding.resolve_axes(placement.mesh, placement.devices, config) if placement else None
    mesh = sharding.resolve_axes(experiment.mesh, devices - (placement.devices if placement else 0), config)
    layout = choose_sampler_layout(experiment, own or mesh)
    drawn = with_carried(sampling, placement)
    rows, length = sampling.prompts * sampling.group, row_length(sampling)
    return Plan(
        settings=flatten(describe(experiment)),
        overridden=tuple(overridden),
        mesh=mesh,
        sampler_mesh=layout.sizes,
        disaggregated=placement is not None,
        why=sharding.explain_mesh(experiment.mesh, mesh, config),
        why_sampler=layout.why,
        parameters=parameter_count(config),
        active_parameters=active_parameter_count(config),
        rows=rows,
        slots=count_slots(config, drawn, layout.sizes),
        device_prompts=count_device_prompts(drawn, layout.sizes),
        prefill_chunk=prefill_chunk(config, drawn, layout.sizes),
        completion_tokens=rows * sampling.max_tokens,
        tokens=rows * length,
        updates=updates_per_step(schedule),
        steps=schedule.steps,
        warm_start_updates=experiment.warm_start.steps if experiment.warm_start else 0,
        learner=learner_bytes(experiment, mesh),
        sampler=sampler_bytes(experiment, mesh, layout.sizes),
        host=sum(optimizer_bytes(experiment.optimizer, config, lora, mesh).values())
        if experiment.optimizer.offload
        else 0,
        checkpoint=size_of(trained_dtype(config, lora)) * trained_count(config, lora)
        + sum(optimizer_bytes(experiment.optimizer, config, lora, dict.fromkeys(mesh, 1)).values()),
    )


def render(plan: Plan) -> str:
    """The plan as text."""
    lines = ["Settings" + (" (* given on the command line)" if plan.overridden else "")]
    width = max(map(len, plan.settings))
    for key, value in plan.settings.items():
        mark = "*" if any(key == given or key.startswith(given + ".") for given in plan.overridden) else " "
        lines.append(f"{mark} {key:<{width}}  {show(value)}")
    per_step = f"{plan.updates} updates, at most {plan.completion_tokens:,} tokens drawn, {plan.tokens:,} trained on"
    lines += [
        "",
        f"Model       {_count(plan.parameters)} parameters, {_count(plan.active_parameters)} active per token "
        "(embedding and head counted in both)",
        f"Mesh        {_axes(plan.mesh)}{' of the learner' if plan.disaggregated else ''} "
        "(--devices N for another number)",
        f"            {plan.why}",
        f"Sampler     {_axes(plan.sampler_mesh)}{' of its own' if plan.disaggregated else ''}",
        *(f"            {why}" for why in plan.why_sampler),
        f"One step    {plan.rows:,} rows, {per_step}",
        f"In total    {plan.steps:,} steps, {plan.steps * plan.updates:,} updates, "
        f"at most {plan.steps * plan.tokens:,} tokens",
    ]
    if plan.slots < plan.rows:
        lines.append(f"Slots       {plan.slots:,} rows drawn at once; a slot takes the next row when its own has ended")
    if plan.prefill_chunk < plan.device_prompts:
        lines.append(f"Prefill     {plan.prefill_chunk:,} of {plan.device_prompts:,} prompts of a device at a time")
    if plan.warm_start_updates:
        lines.append(f"Warm start  {plan.warm_start_updates:,} supervised updates before them")
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
