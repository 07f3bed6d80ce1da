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
from typing import TypeVar

from gspax.commands.aot import hlo
from gspax.commands.aot.chips import Chip, Rate, Target
from gspax.commands.aot.hlo import Collective
from gspax.commands.aot.memory import Compiled, extrapolate
from gspax.commands.aot.programs import (
    COPY,
    PROMPTS,
    REPLIES,
    SAMPLER,
    TRAIN,
    TURNS,
    device_bytes,
    reply_tokens,
)
from gspax.commands.aot.traffic import fetched_at, traffic
from gspax.config import ModelConfig, SamplerDtype, Sampling
from gspax.model.extension import BLOCK
from gspax.model.sizes.counts import forward_flops
from gspax.model.sizes.memory import (
    count_slots,
    embedding_table_count,
    inference_weights_bytes,
    position_bytes,
    size_of,
)
from gspax.parallel.sharding import batch_shards
from gspax.sampler.inference_weights import abstract_inference_weights

PUSH, PREFILL, DECODE, REPLY = "weight push", "prefill", "decode, a token", "a reply"
PARTS = ("start", "mean", "end")  # of a response
Key = TypeVar("Key")


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step."""

    model: ModelConfig
    sampling: Sampling
    minibatches: int
    runs: Mapping[str, int]  # executions of each program


def make_phases(compiled: Compiled, mesh: dict[str, int], work: Work, slices: int = 1) -> list[Phase]:
    """The phases of a compiled program: the rollout is its prefill and its loop over tokens, the others are one phase.

    Args:
      compiled: the program.
      mesh: axis sizes, in the order of the devices that it was compiled for.
      work: of a step.
      slices: that the mesh extends over.
    """
    model, sampling, runs = work.model, work.sampling, work.runs
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    devices = math.prod(mesh.values())
    rows = sampling.prompts * sampling.group / devices

    def phase(name: str, model_flops: float, flops: float | None = None, *, trips: int = 1) -> Phase:
        return Phase(
            name=name,
            runs=runs.get(compiled.name, 1),
            model_flops=model_flops,
            flops=model_flops if flops is None else flops,
            moved=traffic(compiled.module, unknown_trips=trips),
            sent=hlo.collectives(compiled.module, mesh, unknown_trips=trips, slices=slices),
            devices=devices,
        )

    if compiled.name == COPY:
        return [phase(COPY, 0)]
    if compiled.name not in SAMPLER:
        forward = rows / work.minibatches * (S + C) * forward_flops(model, S + C)
        passes, recomputed = (3, model.remat in ("full", "offload")) if compiled.name == TRAIN else (1, 0)
        return [phase(compiled.name, passes * forward, (passes + recomputed) * forward)]
    in_turn = 1  # conversations of a slot
    if TURNS in runs:
        in_turn = math.ceil(sampling.prompts * sampling.group / count_slots(model, sampling, mesh))
    token = rows / in_turn * forward_flops(model, 2 * (S + C / 2))  # a sampled token attends to all before it
    if compiled.name == REPLIES:
        reply = reply_tokens(C)
        return [phase(REPLY, reply * token, trips=-(-reply // BLOCK))]
    prefill = phase(PREFILL, sampling.prompts / devices * S * forward_flops(model, S), trips=0)
    if compiled.name == PROMPTS:
        return [prefill]
    moved_at = {
        part: traffic(compiled.module, unknown_trips=1, fetched=fetched_at(part, sampling)) - prefill.moved
        for part in PARTS
    }
    both = phase(DECODE, token)
    sent = dict(Counter(both.sent) - Counter(prefill.sent))
    decode = replace(both, runs=runs.get(TURNS, C - 1), moved=moved_at["mean"], sent=sent, moved_at=moved_at)
    return [decode] if compiled.name == TURNS else [prefill, decode]


def extrapolate_phases(less: list[Phase], more: list[Phase], layers: int) -> list[Phase]:
    """The phases of a program with `layers` layers, from those of the small ones. FLOPs are those of `less`."""

    def scale(first: dict[Key, int], second: dict[Key, int]) -> dict[Key, int]:
        keys = {**first, **second}
        return {key: round(extrapolate(first.get(key, 0), second.get(key, 0), layers)) for key in keys}

    return [
        replace(
            a,
            moved=round(extrapolate(a.moved, b.moved, layers)),
            sent={key: sent for key, sent in scale(a.sent, b.sent).items() if sent},
            moved_at=scale(a.moved_at, b.moved_at),
        )
        for a, b in zip(less, more, strict=True)
    ]


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
    them and use the device's share of the data center's network.
    """
    return Times(
        compute=phase.flops / chip.flops,
        memory=phase.moved / chip.memory_rate,
        network=sum(sent / link_rate(over.axes) for over, sent in phase.sent.items() if not over.dcn),
        dcn=sum(sent for over, sent in phase.sent.items() if over.dcn) / chip.dcn_rate,
    )


def needed(part: str, model: ModelConfig, sampling: Sampling, mesh: dict[str, int]) -> int:
    """Bytes that a device must read for one token of each of its rows, at a part of the response.

    These are the weights on the device once, except for the table of embeddings, of which a token reads a row; the
    active part of the completions' cache; and the prompts' cache once per prompt.
    """
    prompts = sampling.prompts // math.gcd(sampling.prompts, batch_shards(mesh))
    rows = sampling.prompts * sampling.group / batch_shards(mesh)
    length = {"start": 1.0, "end": sampling.max_tokens, "mean": (1 + sampling.max_tokens) / 2}[part]
    positions = rows * length + prompts * sampling.max_prompt_tokens
    cache = position_bytes(model, sampling.kv_cache_dtype, mesh) * positions
    table = size_of(model.dtype) * embedding_table_count(model)
    return int(inference_weights_bytes(model, sampling, mesh) - table // mesh["tensor"] // mesh["fsdp"] + cache)
