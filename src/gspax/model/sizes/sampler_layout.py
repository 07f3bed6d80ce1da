"""How the inference weights, the cache and the rows are laid out while completions are sampled.

The sampler's mesh has the devices of the learner's, with other axes: what is cheap for an update, parameters in small
parts that each layer gathers, would send all weights for every token. `sharding.sampler_layouts` has the choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gspax.config import Experiment, Mesh, ModelConfig
from gspax.model.sizes.counts import with_carried
from gspax.model.sizes.memory import sampler_bytes
from gspax.parallel import sharding

USABLE = 0.9  # of a device's memory: the rest is for what the estimate leaves out


@dataclass(frozen=True, kw_only=True)
class SamplerLayout:
    """The sizes of the sampler's mesh axes, and the reason for them, one line for each decision."""

    sizes: dict[str, int]
    why: tuple[str, ...]


def choose_sampler_layout(experiment: Experiment, sizes: dict[str, int], memory: int | None = None) -> SamplerLayout:
    """The layout on devices whose axes have these sizes: the given one, or the fastest that fits.

    Args:
      sizes: of the learner's mesh, or of a disaggregated sampler's.
      memory: bytes of a device; None: unknown, and not compared.

    Raises:
      UserError: the given axes do not fit the devices.
    """
    placement, model = experiment.placement, experiment.model
    given = experiment.sampler_mesh
    if placement is not None:
        given = placement.mesh if placement.mesh != Mesh() else None
    if given is not None:
        resolved = sharding.resolve_axes(given, math.prod(sizes.values()), model, slices=sizes["slice"])
        return SamplerLayout(sizes=resolved, why=("as given",))
    sampling, group = experiment.sampling, experiment.sampling.group
    held = with_carried(sampling, placement).prompts
    rows = math.gcd(sampling.prompts * group, held * group, sampling.slots)
    layouts = list(sharding.sampler_layouts(sizes, model, rows))
    needs = [sum(sampler_bytes(experiment, sizes, layout).values()) for layout in layouts]
    fits = [memory is None or need <= USABLE * memory for need in needs]
    chosen = fits.index(True) if any(fits) else len(layouts) - 1
    return SamplerLayout(
        sizes=layouts[chosen], why=(*_describe(layouts[chosen], model), *_describe_shortage(needs, chosen, memory))
    )


def _describe(sizes: dict[str, int], model: ModelConfig) -> list[str]:
    """One line for experts, one for everything else."""
    expert, tensor, fsdp = sizes["expert"], sizes["tensor"], sizes["fsdp"]
    found = []
    if model.num_experts:
        parts = f", each in {tensor} parts" if tensor > 1 else ""
        found.append(f"experts: {model.num_experts // expert} of {model.num_experts} on each device{parts}")
    whole = f"over {tensor} devices by heads, widths and vocabulary" if tensor > 1 else "whole on each device"
    gathered = f", in {fsdp} parts that every token gathers" if fsdp > 1 else ""
    found.append(f"attention and head: {whole}{gathered}")
    return found


def _describe_shortage(needs: list[int], chosen: int, memory: int | None) -> list[str]:
    """Why a faster layout was not chosen."""
    if not chosen or memory is None:
        return []
    return [
        f"a faster layout would need {needs[0] / 1e9:.1f} GB of a device's {memory / 1e9:.1f} GB while sampling; "
        "optimizer.offload=true moves the optimizer state out of its way"
    ]
