"""Lower bounds on the time of a run's phases, from compiled programs.

A phase takes as long as the slowest of its matrix products at the chip's peak rate, its memory traffic, and what it
sends to other devices of its slice and to other slices, as if all four overlapped perfectly. Bytes are read from the
compiled text (`traffic`, `hlo`); FLOPs are counted from the model's shape, because the compiler counts a loop's body
once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gspax.commands.aot import hlo
from gspax.commands.aot.chips import Chip
from gspax.commands.aot.decode_loop import PARTS, live_at
from gspax.commands.aot.hlo import Collective
from gspax.commands.aot.memory import Compiled
from gspax.commands.aot.programs import (
    COPY,
    PROMPTS,
    REPLIES,
    ROLLOUT,
    SAMPLER,
    TRAIN,
    TURNS,
    device_bytes,
    reply_tokens,
)
from gspax.commands.aot.targets import Rate, Target
from gspax.commands.aot.traffic import traffic
from gspax.config import ModelConfig, SamplerDtype, Sampling
from gspax.model.extension import BLOCK
from gspax.model.sizes.counts import forward_flops
from gspax.model.sizes.memory import count_slots
from gspax.sampler.inference_weights import abstract_inference_weights

PUSH, PREFILL, DECODE, REPLY = "weight push", "prefill", "decode, a token", "a reply"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One execution of one part of a step, on one device."""

    name: str
    runs: int  # executions in a step
    model_flops: float  # forward, and twice that for the backward pass
    flops: float  # model_flops and recomputation
    moved: int  # bytes between memory and cores
    sent: dict[Collective, int]  # bytes
    devices: int  # that execute it
    moved_at: dict[str, int] = field(default_factory=dict)  # of a decoded token, by part of a response


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a phase, at the peak rate of each resource."""

    compute: float
    memory: float
    network: float  # within a slice
    dcn: float = 0.0  # between slices

    @property
    def bound(self) -> float:
        return getattr(self, self.limit)

    @property
    def limit(self) -> str:
        """The slowest resource."""
        return max(("compute", "memory", "network", "dcn"), key=lambda name: getattr(self, name))


def make_phases(
    compiled: Compiled,
    mesh: dict[str, int],
    *,
    model: ModelConfig,
    sampling: Sampling,
    minibatches: int,
    runs: Mapping[str, int],
    slices: int = 1,
) -> list[Phase]:
    """The phases of a compiled program: the rollout is its prefill and its loop over tokens, the others are one phase.

    Args:
      mesh: axis sizes, in the order of the devices that the program was compiled for.
      minibatches: of a rollout batch, each one run of a program.
      runs: of the programs in a step, by name.
      slices: that the mesh extends over.
    """
    devices = int(np.prod(list(mesh.values())))
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    rows = sampling.prompts * sampling.group / devices
    module = hlo.parse(compiled.text)
    reply = reply_tokens(C)
    loops = 0, -(-reply // BLOCK) if compiled.name == REPLIES else 1
    moved = [traffic(module, unknown_trips=trips) for trips in loops]
    sent = [Counter(hlo.collectives(module, mesh, unknown_trips=trips, slices=slices)) for trips in loops]

    def phase(name: str, runs: int, model_flops: float, flops: float, moved: int, sent: Counter) -> Phase:
        return Phase(
            name=name, runs=runs, model_flops=model_flops, flops=flops, moved=moved, sent=dict(sent), devices=devices
        )

    if compiled.name == COPY:
        return [phase(COPY, 1, 0, 0, moved[1], sent[1])]
    if compiled.name not in SAMPLER:
        forward = rows / minibatches * (S + C) * forward_flops(model, S + C)
        training = compiled.name == TRAIN
        passes, recomputed = (3, model.remat in ("full", "offload")) if training else (1, 0)
        return [
            phase(
                compiled.name, runs[compiled.name], passes * forward, (passes + recomputed) * forward, moved[1], sent[1]
            )
        ]
    in_turn = 1  # conversations of a slot
    if TURNS in runs:
        in_turn = math.ceil(sampling.prompts * sampling.group / count_slots(model, sampling, mesh))
    drawn = rows / in_turn * forward_flops(model, 2 * (S + C / 2))  # a sampled token attends to all before it
    if compiled.name == REPLIES:
        return [phase(REPLY, runs[REPLIES], reply * drawn, reply * drawn, moved[1], sent[1])]
    found = []
    if compiled.name in (ROLLOUT, PROMPTS):
        prompts = sampling.prompts / devices * S * forward_flops(model, S)
        found.append(phase(PREFILL, 1, prompts, prompts, moved[0], sent[0]))
    if compiled.name in (ROLLOUT, TURNS):
        moved_at = {part: traffic(module, unknown_trips=1, live=live_at(part, sampling)) - moved[0] for part in PARTS}
        token = phase(DECODE, runs.get(TURNS, C - 1), drawn, drawn, moved_at["mean"], sent[1] - sent[0])
        found.append(replace(token, moved_at=moved_at))
    return found


def push_phase(model: ModelConfig, learner: Target, sampler: Target, weights_dtype: SamplerDtype = "auto") -> Phase:
    """The transfer of parameters to a disaggregated sampler, at the rate of the target with fewer devices."""
    received = device_bytes(abstract_inference_weights(model, sampler.mesh, weights_dtype))
    sent = received * max(sampler.mesh.size, learner.mesh.size) // learner.mesh.size
    axes = tuple(axis for axis, size in sampler.sizes.items() if size > 1)
    over = Collective("push", axes, sampler.mesh.size, dcn=learner.topology is not sampler.topology)
    return Phase(name=PUSH, runs=1, model_flops=0, flops=0, moved=0, sent={over: sent}, devices=learner.mesh.size)


def estimate_times(phase: Phase, chip: Chip, link_rate: Rate) -> Times:
    """Seconds of a phase at the chip's peak rates.

    Collectives within a slice follow one another over all links that they can use; those between slices overlap with
    them and use the device's share of the data centre's network.
    """
    within = [(each.axes, sent) for each, sent in phase.sent.items() if not each.dcn]
    between = sum(sent for each, sent in phase.sent.items() if each.dcn)
    return Times(
        compute=phase.flops / chip.flops,
        memory=phase.moved / chip.memory_rate,
        network=sum(sent / link_rate(axes) for axes, sent in within),
        dcn=between / chip.dcn_rate,
    )
